"""Small records that outlive Redis: written through to object storage, which is the truth, and cached in Redis.

Each write is a compare-and-set on the object's version. The cache may be wiped at any time. A reader is behind by at
most `cache_sec`, and only where two writers or a crash came between; `fresh` reads past the cache.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from manager.errors import StoreUnavailable, TooLarge
from manager.model import Owner, new_id
from manager.store import keys
from manager.store.base import Cache
from manager.store.objects import Object, ObjectChanged, ObjectInfo, Objects, key_part, owner_prefix, same_version

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

MAX_RECORD_BYTES: Final = 1 << 20
CACHE_SEC: Final = 4.0
_UPDATE_TRIES: Final = 30
_UPDATE_PAUSE_SEC: Final = 0.02
_AT_ONCE: Final = 8  # objects read side by side for a page
_NOBODYS: Final = "=all/"  # no tenant's part: an escape is `=` and two hexadecimal digits
_ABSENT: Final = ""  # in the cache: there is no such record


class RecordChanged(Exception):
    """The record exists already, is another one by now, or is gone. Nothing was written."""


@dataclass(frozen=True)
class Versioned(Generic[T]):
    owner: Owner | None
    id: str
    value: T
    version: str  # for `replace`; means nothing to anybody else


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """An object's content. `write` makes every write different, so that equal values are different versions."""

    owner: Owner | None
    id: str
    write: str
    value: msgspec.Raw


class _Cached(msgspec.Struct, frozen=True, array_like=True):
    version: str
    stored: msgspec.Raw


class Records(Generic[T]):
    """The records of one kind. Every method raises StoreUnavailable where object storage does not answer."""

    def __init__(
        self,
        objects: Objects,
        cache: Cache,
        kind: str,
        of: type[T],
        *,
        cache_sec: float = CACHE_SEC,
        max_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self._objects, self._cache, self._kind = objects, cache, kind
        self._cache_sec, self._max_bytes = cache_sec, max_bytes
        self._value = msgspec.json.Decoder(of)
        self._stored = msgspec.json.Decoder(_Stored)
        self._cached = msgspec.json.Decoder(_Cached)
        self._root = f"records/{key_part(kind)}/"

    async def get(self, owner: Owner | None, id: str, *, fresh: bool = False) -> Versioned[T] | None:
        """None where there is none: that is cached as well, so that made-up ids do not reach storage each time."""
        key = self._key(owner, id)
        if not fresh and (known := (await self._from_cache([key]))[0]) is not None:
            return self._of_cached(known)
        loop = asyncio.get_running_loop()
        started = loop.time()
        found = await self._objects.get(key, limit=self._max_bytes)
        # An answer that was long under way may be older than what a writer put into the cache, and has lost since.
        if fresh:  # what is cached may be older; or newer, by a writer who was quicker than this answer
            await self._forget(key)
        elif loop.time() - started < self._cache_sec / 2:
            await self._to_cache(key, found, only_absent=True)
        return None if found is None else self._of(found)

    async def create(self, owner: Owner | None, id: str, value: T) -> Versioned[T]:
        """Raises RecordChanged where there is one of that id, TooLarge; as the others that write."""
        return await self._write(owner, id, value, None)

    async def replace(self, found: Versioned[T], value: T) -> Versioned[T]:
        """Raises RecordChanged where it is not `found` any more."""
        return await self._write(found.owner, found.id, value, found.version)

    async def update(self, owner: Owner | None, id: str, change: Callable[[T], T | None]) -> Versioned[T] | None:
        """What the record became by `change`, which may run several times; None where there is none.

        Where `change` says None the record stays as it is. Raises StoreUnavailable where others change it as fast."""
        for _ in range(_UPDATE_TRIES):
            found = await self.get(owner, id, fresh=True)
            if found is None or (value := change(found.value)) is None:
                return found
            try:
                return await self.replace(found, value)
            except RecordChanged:
                await asyncio.sleep(random.uniform(0, _UPDATE_PAUSE_SEC))
        raise StoreUnavailable(f"the {self._kind} record is being changed by others all the time; try again")

    async def delete(self, owner: Owner | None, id: str) -> bool:
        """Whether there was one."""
        key = self._key(owner, id)
        there = await self._objects.head(key) is not None
        await self._objects.delete(key)
        await self._to_cache(key, None)
        return there

    async def page(self, owner: Owner | None, *, after: str = "", limit: int = 100) -> list[Versioned[T]]:
        """The owner's, by id as a key orders it, from after the id `after` on; never from a cache that is behind."""
        prefix = self._prefix(owner)
        found: list[Versioned[T]] = []
        async for infos in self._objects.list(prefix, prefix + key_part(after) if after else ""):
            at = 0
            while at < len(infos) and (left := limit - len(found)) > 0:
                found += await self._read_all(infos[at : at + left])  # fewer, where some were deleted meanwhile
                at += left
            if len(found) >= limit:
                break
        return found

    async def every(self, under: str = "") -> AsyncGenerator[Versioned[T], None]:
        """All of everybody's, or of the owner of whom `under` is the `owner_prefix`; in no stated order."""
        async for infos in self._objects.list(self._root + under):
            for at in range(0, len(infos), _AT_ONCE):
                for record in await self._read_all(infos[at : at + _AT_ONCE]):
                    yield record

    async def unwritten_since(self, owner: Owner | None, moment: float) -> list[Versioned[T]]:
        """The owner's that were last written before `moment` by the storage's own clock."""
        old: list[ObjectInfo] = []
        async for infos in self._objects.list(self._prefix(owner)):
            old += [info for info in infos if info.modified_at < moment]
        return await self._read_all(old)

    # ── objects ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _prefix(self, owner: Owner | None) -> str:
        return self._root + (_NOBODYS if owner is None else owner_prefix(owner))

    def _key(self, owner: Owner | None, id: str) -> str:
        return self._prefix(owner) + key_part(id)

    async def _write(self, owner: Owner | None, id: str, value: T, version: str | None) -> Versioned[T]:
        key = self._key(owner, id)
        stored = _Stored(owner=owner, id=id, write=new_id(), value=msgspec.Raw(msgspec.json.encode(value)))
        data = msgspec.json.encode(stored)
        if len(data) > self._max_bytes:
            raise TooLarge(f"a {self._kind} record takes at most {self._max_bytes} bytes", limit=self._max_bytes)
        try:
            etag = await self._objects.put(key, data, if_absent=version is None, if_match=version)
        except ObjectChanged as why:
            raise RecordChanged(f"{self._kind} {id}") from why
        await self._to_cache(key, Object(data, etag))
        return Versioned(owner, id, value, etag)

    async def _read_all(self, infos: Sequence[ObjectInfo]) -> list[Versioned[T]]:
        """In order; those deleted meanwhile are left out."""
        known = await self._from_cache([info.key for info in infos])
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(info: ObjectInfo, cached: str | None) -> Versioned[T] | None:
            if cached and same_version(info.etag, self._cached.decode(cached).version):
                return self._of_cached(cached)
            async with turns:
                found = await self._objects.get(info.key, limit=self._max_bytes)
            return None if found is None else self._of(found)

        read = await asyncio.gather(*(one(info, cached) for info, cached in zip(infos, known, strict=True)))
        return [record for record in read if record is not None]

    def _of(self, found: Object) -> Versioned[T]:
        try:
            stored = self._stored.decode(found.data)
            return Versioned(stored.owner, stored.id, self._value.decode(stored.value), found.etag)
        except msgspec.MsgspecError as why:
            raise StoreUnavailable(f"object storage holds a {self._kind} record that cannot be read") from why

    # ── the cache ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _from_cache(self, object_keys: Sequence[str]) -> Sequence[str | None]:
        """None each where the cache does not know or does not answer."""
        try:
            return await self._cache.cache_get([keys.record_key(key) for key in object_keys])
        except StoreUnavailable:
            return [None] * len(object_keys)

    async def _to_cache(self, key: str, found: Object | None, *, only_absent: bool = False) -> None:
        text = _ABSENT if found is None else msgspec.json.encode(_Cached(found.etag, msgspec.Raw(found.data))).decode()
        try:
            await self._cache.cache_put(keys.record_key(key), text, self._cache_sec, only_absent=only_absent)
        except StoreUnavailable as why:
            log.warning("record_not_cached", extra={"kind": self._kind, "why": why.message})

    async def _forget(self, key: str) -> None:
        try:
            await self._cache.cache_drop(keys.record_key(key))
        except StoreUnavailable as why:
            log.warning("record_not_forgotten", extra={"kind": self._kind, "why": why.message})

    def _of_cached(self, text: str) -> Versioned[T] | None:
        if text == _ABSENT:
            return None
        cached = self._cached.decode(text)
        return self._of(Object(bytes(cached.stored), cached.version))
