"""What a sandbox's workspace begins with: an archive from a URL, a prefix of a bucket, or a snapshot.

Fetched once and only by the manager; the pod gets layers, as at every other start. A source that is refused leaves
nothing behind, and the refusal says what was wrong with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

import msgspec

from executor.tarread import Member, TarLimits, TarRefused, name_parts
from manager.archives.canonical import Canonical
from manager.archives.child import LIMITS, ArchiveRefused, NoZstd, layer_of, packed
from manager.egress.fetch import Fetcher, FetchFailed, FetchRefused, FetchTooLarge, check_url
from manager.errors import InvalidRequest, NotSupported, RateLimited, StoreUnavailable, TooLarge
from manager.model import Owner
from manager.services.checkpoints import Checkpoints
from manager.services.manifests import Manifest
from manager.store.objects import ObjectInfo, ObjectMisnamed, ObjectMissing, Objects

AT_ONCE: Final = 4  # sources being prepared; each may have an archive on this machine's disk
OF_ONE_OWNER: Final = 2
TURN_SEC: Final = 60.0  # for its turn
_SPARE_BYTES: Final = 64 << 20  # a packed layer may be larger than its files: headers, and what cannot be packed
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}\Z")
_SNAPSHOT: Final = re.compile(r"[a-z0-9]{1,64}\Z")
_PREFIX: Final = re.compile(r"(gs|s3|az)://([A-Za-z0-9][A-Za-z0-9._-]{1,254})/([A-Za-z0-9._/=+@,~-]{1,1024})\Z")
_FILE_MODE: Final = 0o644


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the three."""

    archive_url: str | None = None  # https; zip, or tar as it is, as gzip or as zstd
    sha256: str | None = None  # hex, of the archive as it is fetched
    prefix: str | None = None  # s3://bucket/path/ or gs://bucket/path/, where the operator allows it
    snapshot_id: str | None = None


class Sources:
    def __init__(
        self,
        checkpoints: Checkpoints,
        fetcher: Fetcher,
        *,
        prefixes: Sequence[str] = (),
        open_at: Callable[[str], Objects],
        spool_dir: Path | None = None,
        limits: TarLimits = LIMITS,
        turn_sec: float = TURN_SEC,
    ) -> None:
        """`prefixes`: URLs below which a tenant finds what is under its own name. `open_at`: objects at such a URL.
        `spool_dir`: where archives lie while they are read, without a name; None: where the system keeps such files."""
        self._checkpoints = checkpoints
        self._fetcher = fetcher
        self._prefixes = prefixes
        self._open_at = open_at
        self._spool_dir = spool_dir
        self._limits = limits
        self._turn_sec = turn_sec
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._owners: dict[Owner, tuple[asyncio.Semaphore, int]] = {}

    def check(self, owner: Owner, source: Source) -> None:
        """What can be said without asking anybody. Raises InvalidRequest."""
        given = [name for name in ("archive_url", "prefix", "snapshot_id") if getattr(source, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("a source is one of archive_url, prefix and snapshot_id", field="source")
        if source.sha256 is not None and (source.archive_url is None or not _SHA256.match(source.sha256)):
            raise InvalidRequest("sha256 is the hexadecimal SHA-256 of what archive_url gives", field="source.sha256")
        if source.archive_url is not None:
            try:
                check_url(source.archive_url)
            except FetchRefused as why:
                raise InvalidRequest(str(why), field="source.archive_url") from None
        if source.snapshot_id is not None and not _SNAPSHOT.match(source.snapshot_id):
            raise InvalidRequest("that is no snapshot's id", field="source.snapshot_id")
        if source.prefix is not None:
            self._place(owner, source.prefix)

    async def prepare(self, owner: Owner, workspace: str, source: Source, *, disk_bytes: int | None = None) -> Manifest:
        """The new workspace's first checkpoint, made of the source. `disk_bytes`: what its profile lets it hold.

        Raises InvalidRequest (details: field, and member where one of the archive's is to blame), TooLarge (limit),
        NotFound (a snapshot), NotSupported, RateLimited, StoreUnavailable. The workspace is not there then."""
        self.check(owner, source)
        if source.snapshot_id is not None:
            return await self._checkpoints.from_snapshot(owner, source.snapshot_id, workspace)
        total = self._limits.total_bytes if disk_bytes is None else min(self._limits.total_bytes, disk_bytes)
        limits = TarLimits(entries=self._limits.entries, total_bytes=total, file_bytes=self._limits.file_bytes)
        field = "source.archive_url" if source.archive_url is not None else "source.prefix"
        try:
            with _typed(field):
                async with self._turn(owner):
                    if source.archive_url is not None:
                        return await self._from_archive(owner, workspace, source.archive_url, source.sha256, limits)
                    assert source.prefix is not None
                    return await self._from_prefix(owner, workspace, source.prefix, limits)
        except BaseException:
            if await asyncio.shield(self._checkpoints.head(owner, workspace)) is None:
                await asyncio.shield(self._checkpoints.delete_workspace(owner, workspace))
            raise

    # ── an archive ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _from_archive(
        self, owner: Owner, workspace: str, url: str, sha256: str | None, limits: TarLimits
    ) -> Manifest:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryFile(dir=self._spool_dir) as spool:  # has no name: a crash leaves nothing
            digest = hashlib.sha256()
            async with self._fetcher.get(url) as pieces:
                async for piece in pieces:
                    digest.update(piece)
                    await loop.run_in_executor(None, spool.write, piece)
            await loop.run_in_executor(None, spool.flush)
            if sha256 is not None and digest.hexdigest() != sha256.lower():
                raise InvalidRequest(
                    f"what was fetched has the SHA-256 {digest.hexdigest()}, not the one that was given",
                    field="source.sha256",
                )
            return await self._unpacked(owner, workspace, spool, limits)

    async def _unpacked(self, owner: Owner, workspace: str, spool: BinaryIO, limits: TarLimits) -> Manifest:
        async with layer_of(spool, limits) as layer:

            def facts() -> tuple[int, int]:
                if not layer.entries:
                    raise ArchiveRefused("there is nothing in it")
                return layer.file_bytes, layer.entries

            return await self._checkpoints.add_layer(
                owner, workspace, layer.pieces, facts, limit=limits.total_bytes + _SPARE_BYTES
            )

    # ── a prefix ────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, owner: Owner, prefix: str) -> tuple[str, str]:
        """Where the operator keeps what this tenant may have, and the prefix within that. Raises InvalidRequest."""
        shape = _PREFIX.match(prefix)
        parts = tuple(shape[3].removesuffix("/").split("/")) if shape is not None else ()
        if shape is None or not {"", ".", ".."}.isdisjoint(parts):
            raise InvalidRequest(
                "a prefix is written s3://bucket/path/ or gs://bucket/path/, in plain characters", field="source.prefix"
            )
        for allowed in self._prefixes:
            place = urlsplit(allowed)
            base = (*(part for part in place.path.split("/") if part), owner.tenant)
            if (place.scheme, place.netloc) == (shape[1], shape[2]) and parts[: len(base)] == base:
                query = f"?{place.query}" if place.query else ""
                within = "".join(part + "/" for part in parts[len(base) :])
                return f"{place.scheme}://{place.netloc}/{'/'.join(base)}{query}", within
        raise InvalidRequest(
            "this prefix is not one that the operator lets your tenant load from", field="source.prefix"
        )

    async def _from_prefix(self, owner: Owner, workspace: str, prefix: str, limits: TarLimits) -> Manifest:
        url, within = self._place(owner, prefix)
        objects = self._open_at(url)
        canonical = Canonical()

        def facts() -> tuple[int, int]:
            if not canonical.entries:
                raise ArchiveRefused("there is nothing at this prefix")
            return canonical.file_bytes, canonical.entries

        try:
            async with aclosing(packed(_tar_of_objects(objects, within, canonical, limits))) as pieces:
                return await self._checkpoints.add_layer(
                    owner, workspace, pieces, facts, limit=limits.total_bytes + _SPARE_BYTES
                )
        finally:
            await objects.close()

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _turn(self, owner: Owner) -> AsyncIterator[None]:
        """One project's sources do not keep all others waiting. Raises RateLimited."""
        own, users = self._owners.get(owner, (asyncio.Semaphore(OF_ONE_OWNER), 0))
        self._owners[owner] = (own, users + 1)
        try:
            async with contextlib.AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(self._turn_sec):
                        await held.enter_async_context(own)
                        await held.enter_async_context(self._turns)
                except TimeoutError:
                    raise RateLimited("many sources are being prepared; try again in a moment") from None
                yield
        finally:
            own, users = self._owners[owner]
            if users == 1:
                del self._owners[owner]
            else:
                self._owners[owner] = (own, users - 1)


async def _tar_of_objects(
    objects: Objects, within: str, canonical: Canonical, limits: TarLimits
) -> AsyncGenerator[bytes, None]:
    """One plain tar of all that is under the prefix. Raises TarRefused."""
    entries = 0
    async for page in objects.list(within):
        for info in page:
            entries += 1
            if entries > limits.entries:
                raise TarRefused(f"more than {limits.entries} objects lie there", fault="limit", limit=limits.entries)
            name = info.key.removeprefix(within).encode()
            if canonical.file_bytes + info.size > limits.total_bytes:
                raise TarRefused(
                    f"its objects have more than {limits.total_bytes} bytes", fault="limit", limit=limits.total_bytes
                )
            async with aclosing(_object_as_tar(objects, info, name, canonical, limits)) as pieces:
                async for piece in pieces:
                    yield piece
    yield canonical.finish()


async def _object_as_tar(
    objects: Objects, info: ObjectInfo, name: bytes, canonical: Canonical, limits: TarLimits
) -> AsyncGenerator[bytes, None]:
    path = name_parts(name, limits)
    if name.endswith(b"/"):  # what some tools put in a directory's place
        for piece in canonical.take([Member(path, "directory", 0, 0o755, info.modified_at)]):
            yield piece
        return
    for piece in canonical.take([Member(path, "file", info.size, _FILE_MODE, info.modified_at)]):
        yield piece
    if not info.size:
        return
    got = 0
    changed = TarRefused("was changed while it was read", member=name)
    try:
        async with aclosing(objects.stream(info.key)) as content:
            async for data in content:
                got += len(data)
                if got > info.size:
                    raise changed
                for piece in canonical.take([data]):
                    yield piece
    except ObjectMissing:
        raise changed from None
    if got != info.size:
        raise changed


# ── what goes wrong, in the caller's words ──────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _typed(field: str) -> Iterator[None]:
    try:
        yield
    except FetchTooLarge as why:
        raise TooLarge(f"the archive was not fetched: {why}", limit=why.limit, field=field) from None
    except (FetchRefused, FetchFailed) as why:
        raise InvalidRequest(f"the archive was not fetched: {why}", field=field) from None
    except ArchiveRefused as why:
        raise _refused(str(why), why.fault, why.member, why.limit, field) from None
    except TarRefused as why:
        raise _refused(str(why), why.fault, why.shown, why.limit, field) from None
    except ObjectMisnamed:
        raise _refused("an object there has a name that is no path", "path", "", None, field) from None
    except NoZstd as why:
        raise NotSupported(str(why), field=field) from None
    except OSError as why:
        if why.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreUnavailable("this manager has no room on its disk for the archive; try again later") from None
        raise


def _refused(why: str, fault: str, member: str, limit: int | None, field: str) -> InvalidRequest | TooLarge:
    details: dict[str, Any] = {"field": field}
    if member:
        details["member"] = _plain(member)
    message = f"the source is refused, and nothing was made of it: {_plain(why)}"
    if fault == "limit":
        return TooLarge(message, **details, **({} if limit is None else {"limit": limit}))
    return InvalidRequest(message, **details)


def _plain(text: str) -> str:
    """Names in an archive are a stranger's."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)[:500]


def spool_in(data_dir: Path) -> Path | None:
    """The data directory where there is one, which has the room; else the system's choice."""
    return data_dir if os.access(data_dir, os.W_OK) else None
