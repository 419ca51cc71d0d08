"""Object storage in S3, Google Cloud Storage or Azure (and in memory, for tests), through `obstore`.

Credentials are those that the cloud's own tools read from the environment; they never leave the manager.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from manager.errors import StoreUnavailable
from manager.store.objects import (
    CALL_SEC,
    MAX_PUT_BYTES,
    MOVE_SEC,
    PAGE,
    PROBE_KEY,
    Object,
    ObjectChanged,
    ObjectInfo,
    ObjectMisnamed,
    ObjectMissing,
    ObjectTooLarge,
    answered,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_PIECE: Final = 1 << 20
_CLIENT: Final = {"connect_timeout": "5s", "timeout": "60s", "read_timeout": "20s"}
_RETRY: Final = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
SETTINGS_OF: Final = {
    "s3": ("endpoint", "region"),
    "gs": (),
    "az": ("account_name", "endpoint"),
}  # what may stand behind `?` in the URL


class CloudObjects:
    """manager.store.objects.Objects over an obstore store. See there for what each method does."""

    def __init__(self, store: ObjectStore, describe: str) -> None:
        self.describe = describe
        self._store = store

    async def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        if len(data) > MAX_PUT_BYTES:
            raise ValueError(f"{len(data)} bytes at once are over the bound of {MAX_PUT_BYTES}")
        mode: Any = "create" if if_absent else "overwrite" if if_match is None else _version(if_match)
        try:
            async with _ours("put", MOVE_SEC, key):
                written = await obstore.put_async(self._store, key, data, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError, ObjectMissing) as why:
            # Requests are repeated after a lost answer: the bytes that are in the way may be these.
            present = await self.get(key, limit=MAX_PUT_BYTES)
            if present is not None and present.data == data:
                return present.etag
            raise ObjectChanged(key) from why
        if not written["e_tag"]:
            raise StoreUnavailable(f"what answers at {self.describe} is no object storage")
        return _etag(written)

    async def get(self, key: str, *, limit: int) -> Object | None:
        try:
            async with _ours("get", MOVE_SEC, key):
                found = await obstore.get_async(self._store, key)
                if found.meta["size"] > limit:
                    raise ObjectTooLarge(f"object storage: {key} has more than {limit} bytes")
                return Object(bytes(await found.bytes_async()), _etag(found.meta))
        except ObjectMissing:
            return None

    async def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        if end is not None and end <= start:
            return
        options: Any = {"range": {"offset": start} if end is None else (start, end)}
        async with _ours("get", CALL_SEC, key):
            found = await obstore.get_async(self._store, key, options=options)
        pieces = aiter(found.stream(min_chunk_size=_PIECE))
        while True:
            async with _ours("read", CALL_SEC + MOVE_SEC):
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield bytes(piece)

    async def head(self, key: str) -> ObjectInfo | None:
        try:
            async with _ours("head", CALL_SEC, key):
                return _info(await obstore.head_async(self._store, key))
        except ObjectMissing:
            return None

    async def list(self, prefix: str, after: str = "") -> AsyncGenerator[list[ObjectInfo], None]:
        pages = aiter(obstore.list(self._store, prefix or None, offset=after or None, chunk_size=PAGE))
        empty = True
        while True:
            async with _ours("list", CALL_SEC):
                page = await anext(pages, None)
            if page is None:
                break
            empty = empty and not page
            # What answers as Azure may know nothing of where a listing is to begin.
            if found := [_info(meta) for meta in page if meta["path"] > after]:
                yield found
        # Any answer of status 200 without a list in it reads as an empty one, and what is not listed may be deleted.
        if empty and await self.head(f"{PROBE_KEY}/{secrets.token_hex(8)}") is not None:
            raise StoreUnavailable(f"what answers at {self.describe} is no object storage")

    async def delete(self, key: str) -> None:
        try:
            async with _ours("delete", CALL_SEC, key):
                await obstore.delete_async(self._store, key)
        except ObjectMissing:
            return

    async def close(self) -> None:
        """Connections end with the last reference to the store."""


def open_cloud(url: str, credentials: Mapping[str, str] | None = None) -> CloudObjects:
    """`s3://bucket/prefix`, `gs://...`, `az://container/prefix`, with SETTINGS_OF behind `?`. Connects when used.

    `credentials`: instead of the environment's. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in SETTINGS_OF or not parts.netloc:
        raise ValueError(f"{url!r} names no bucket; it starts with s3://, gs:// or az:// and the bucket's name")
    settings: dict[str, Any] = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    if unknown := sorted(set(settings) - set(SETTINGS_OF[parts.scheme])):
        raise ValueError(f"{unknown[0]!r} is no setting of {parts.scheme}://")
    client: Any = dict(_CLIENT)
    if settings.get("endpoint", "").startswith("http://"):
        client["allow_http"] = True
    common: dict[str, Any] = {
        "prefix": parts.path.strip("/") or None, "client_options": client, "retry_config": _RETRY,
        **settings, **(credentials or {}),
    }  # fmt: skip
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[parts.scheme]
    where = f" at {settings['endpoint']}" if "endpoint" in settings else ""
    try:
        return CloudObjects(kind(parts.netloc, **common), f"{parts.scheme}://{parts.netloc}{parts.path}{where}")
    except BaseError as why:
        raise ValueError(_words(why)) from why


def memory_objects() -> CloudObjects:
    """Objects that end with the process: for tests."""
    return CloudObjects(MemoryStore(), "memory")


@asynccontextmanager
async def _ours(what: str, seconds: float, missing: str | None = None) -> AsyncIterator[None]:
    """As `answered`, and for obstore's errors; refused conditions pass."""
    async with answered(what, seconds, missing):
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except BaseError as why:
            kind = ObjectMisnamed if "object with invalid path" in (words := _words(why)) else StoreUnavailable
            raise kind(f"object storage failed ({what}): {words}") from why


def _version(etag: str) -> dict[str, str]:
    """What `if_match` says: an etag, and a generation where the cloud has one."""
    tag, _, version = etag.partition(" ")
    return {"e_tag": tag, "version": version} if version else {"e_tag": tag}


def _etag(found: Any) -> str:
    tag, version = found["e_tag"], found["version"]
    return f"{tag or ''} {version}" if version else str(tag or "")


def _info(meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], _etag(meta), meta["last_modified"].timestamp())


def _words(why: BaseException) -> str:
    """The first line: what follows is a debugging aid that repeats requests."""
    return str(why).partition("\n")[0][:300]
