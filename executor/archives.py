"""`/v1/archive`: a directory in and out as one tar stream, in constant memory, all or nothing on the way in.

An archive is unpacked into a hidden directory on the file system of its target, checked to its last byte, and only then
put in place by renames: what is refused, broken off or out of space leaves nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import threading
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Final, Literal

from executor.errors import Conflict, ExecutorError, InvalidPath, InvalidRequest, RateLimited, TooLarge
from executor.files import FileService
from executor.filetree import remove
from executor.gunzip import Gunzip, check_ratio
from executor.isolation import CommandUser
from executor.safepath import (
    Parts,
    Place,
    directory_at,
    enter_or_make,
    file_error,
    make_directory,
    open_existing,
    rename,
)
from executor.spawn import Spawner
from executor.tarpack import Packer, PackLimit
from executor.tarread import TarLimits, TarReader, TarRefused
from executor.untar import Merge, Unpacking, WouldReplace
from executor.wire import ArchiveUnpacked
from executor.written import MAX_PATHS
from executor.zstd import Zstd, running_zstd

Format = Literal["tar", "gzip", "zstd"]

_MAX_AT_ONCE: Final = 16  # each has a stage, descriptors, perhaps a process
_MERGE_SEC: Final = 120.0
_MAGIC: Final[tuple[tuple[bytes, Format], ...]] = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GZIP_LEVEL: Final = 3  # 6 takes twice the time for a tenth less


class ArchiveService:
    def __init__(self, files: FileService, spawner: Spawner, limits: TarLimits | None = None) -> None:
        self._files = files
        self._spawner = spawner
        self._limits = limits or TarLimits()
        self._under_way = 0

    async def unpack(
        self, path: str, pieces: AsyncIterator[bytes], format: Format | None, user: str | None = None
    ) -> tuple[ArchiveUnpacked, bool]:
        """Puts the archive's content into the directory, which is made where it is missing; whether it is new.

        `format` None: told by the first bytes. Raises InvalidRequest, InvalidPath and TooLarge (details: `member`),
        Conflict, NoSpace, NotSupported; then nothing of the archive is there."""
        place = self._files.roots.place(path)
        threads = self._files.threads
        who = threads.named(user)
        with self._slot():
            first, plain = await _first_of(pieces)
            format = format or next((name for magic, name in _MAGIC if first.startswith(magic)), "tar")
            arrival = _Arrival(place, self._limits, self._files.umask, is_gzip=format == "gzip")
            try:
                await threads.run(who, arrival.begin)
                if format == "zstd":
                    plain = self._unzstd(plain, who)
                async with aclosing(plain):
                    async for piece in plain:
                        await threads.run(who, arrival.feed, piece)
                try:
                    return await threads.run(who, arrival.commit)
                finally:
                    if arrival.is_too_much:
                        self._files.written.forget()
                    elif arrival.changed:
                        self._files.written.replaced(place, arrival.changed)
            finally:
                await threads.finish(who, arrival.abort)

    @asynccontextmanager
    async def pack(self, path: str, format: Format, user: str | None = None) -> AsyncIterator[AsyncIterator[bytes]]:
        """The directory as a stream. Raises FileMissing, NotADirectory, PermissionDenied, NotSupported on entering;
        while it is read PackLimit, and OSError where the directory itself cannot be read on."""
        place = self._files.roots.place(path)
        threads = self._files.threads
        who = threads.named(user)
        with self._slot():
            departure = _Departure(place, self._limits.total_bytes, is_gzip=format == "gzip")
            try:
                await threads.run(who, departure.begin)
                stream = self._chunks(departure, who)
                if format != "zstd":
                    async with aclosing(stream):
                        yield stream
                    return
                async with (
                    running_zstd(self._spawner, who, unpack=False) as run,
                    aclosing(_through(run, stream)) as packed,
                ):
                    yield packed
            finally:
                await threads.finish(who, departure.close)

    async def _chunks(self, departure: _Departure, who: CommandUser) -> AsyncGenerator[bytes, None]:
        while (chunk := await self._files.threads.run(who, departure.chunk)) is not None:
            yield chunk

    async def _unzstd(self, pieces: AsyncIterator[bytes], who: CommandUser) -> AsyncGenerator[bytes, None]:
        async with running_zstd(self._spawner, who, unpack=True) as run:
            counted = _Counted(pieces)
            unpacked = 0
            async with aclosing(_through(run, counted.pieces())) as plain:
                async for piece in plain:
                    unpacked += len(piece)
                    try:
                        check_ratio(counted.bytes, unpacked)
                    except TarRefused as why:
                        raise _refusal(why) from None
                    yield piece

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if self._under_way >= _MAX_AT_ONCE:
            raise RateLimited(f"{_MAX_AT_ONCE} archives are under way here, as many as may", limit=_MAX_AT_ONCE)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


class _Counted:
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self.bytes = 0

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        async for piece in self._pieces:
            self.bytes += len(piece)
            yield piece


async def _through(run: Zstd, source: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """What comes out of the program for what goes in. Raises what `source` raises, and InvalidRequest."""

    async def pump() -> None:
        async for piece in source:
            await run.write(piece)
        run.end()

    pumping = asyncio.get_running_loop().create_task(pump(), name="zstd-input")
    try:
        while True:
            reading = asyncio.ensure_future(run.read())
            try:
                await asyncio.wait({reading, pumping} if not pumping.done() else {reading},
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
                if pumping.done() and not pumping.cancelled() and pumping.exception() is not None:
                    pumping.result()
                piece = await reading
            finally:
                reading.cancel()
            if not piece:
                break
            yield piece
        await run.check_end()  # first: a program that refuses its input does not read on
        await pumping
    finally:
        pumping.cancel()
        await asyncio.wait({pumping})


async def _first_of(pieces: AsyncIterator[bytes]) -> tuple[bytes, AsyncGenerator[bytes, None]]:
    """The first bytes, enough for a magic number, and all again."""
    kept = b""
    async for piece in pieces:
        kept += piece
        if len(kept) >= 4:
            break

    async def again() -> AsyncGenerator[bytes, None]:
        if kept:
            yield kept
        async for piece in pieces:
            yield piece

    return kept, again()


class _Arrival:
    """begin, feed as often as needed, commit; and abort, from any thread, which undoes all but a commit.

    Each runs in a worker thread under the file user's identity and holds the lock meanwhile, so that an abort that a
    cancelled caller sends comes after the step still under way."""

    def __init__(self, place: Place, limits: TarLimits, umask: int, *, is_gzip: bool) -> None:
        self._place = place
        self._umask = umask
        self._reader = TarReader(limits)
        self._gunzip = Gunzip() if is_gzip else None
        self._lock = threading.Lock()
        self._directory = -1  # the target, or the deepest directory above it that exists
        self._missing: Parts = ()
        self._stage = -1
        self._stage_name = b".sojourn-" + secrets.token_hex(12).encode() + b".part"
        self._unpacking: Unpacking | None = None
        self._over = False
        self.changed: list[Parts] = []  # what may be new, or other than it was, with all in it: below the root
        self.is_too_much = False  # to be told one by one

    def begin(self) -> None:
        with self._lock:
            if self._over:
                return
            self._directory, self._missing = open_existing(self._place, self._place.parts)
            try:
                self._stage = make_directory(self._directory, self._stage_name, 0o700)
            except OSError as error:
                raise file_error(error, self._place.path) from None
            self._unpacking = Unpacking(self._stage, self._umask)

    def feed(self, data: bytes) -> None:
        with self._lock:
            if not self._over:
                with self._typed():
                    self._take(data)

    def commit(self) -> tuple[ArchiveUnpacked, bool]:
        with self._lock:
            if self._over:
                raise ExecutorError("the archive is over")
            assert self._unpacking is not None
            with self._typed():
                if self._gunzip is not None:
                    self._gunzip.finish()
                self._reader.finish()
            self._unpacking.close()
            is_new = bool(self._missing)
            if is_new:
                self._put_in_place(self._unpacking)
            else:
                self._put_into(self._unpacking)
            answer = ArchiveUnpacked(
                path=self._place.shown, entries=self._reader.entries, files=self._unpacking.files,
                bytes=self._reader.total_bytes,
            )  # fmt: skip
            return answer, is_new

    def abort(self) -> None:
        """Removes what is not in place. Never raises."""
        with self._lock:
            if self._over:
                return
            self._over = True
            if self._unpacking is not None:
                self._unpacking.close()
            if self._stage >= 0:
                os.close(self._stage)
                try:
                    remove(self._directory, self._stage_name, self._place.path, recursive=True)
                except ExecutorError:
                    pass  # it is in place, or a command holds on to it; it owns what is left
            if self._directory >= 0:
                os.close(self._directory)

    def _take(self, data: bytes) -> None:
        assert self._unpacking is not None
        if self._gunzip is None:
            self._unpacking.take(self._reader.feed(data))
            return
        for piece in self._gunzip.feed(data):
            self._unpacking.take(self._reader.feed(piece))

    def _put_in_place(self, unpacking: Unpacking) -> None:
        """The stage becomes the target itself."""
        made: list[tuple[int, bytes]] = []
        above = len(self._place.parts) - len(self._missing)
        self.changed = [self._place.parts[: above + 1]]
        with ExitStack() as steps:
            parent = self._directory
            try:
                for name in self._missing[:-1]:
                    deeper, is_new = enter_or_make(parent, name, 0o777 & ~self._umask, self._place.path)
                    steps.callback(os.close, deeper)
                    if is_new:
                        made.append((parent, name))
                    parent = deeper
                rename(self._directory, self._stage_name, parent, self._missing[-1], replace=False)
            except BaseException as error:
                for above, name in reversed(made):
                    try:
                        os.rmdir(name, dir_fd=above)
                    except OSError:
                        pass  # another put something into it
                if isinstance(error, FileExistsError):
                    raise Conflict(
                        f"{self._place.shown} was made by another meanwhile; send the archive again"
                    ) from None
                if isinstance(error, OSError):
                    raise file_error(error, self._place.path) from None
                raise
        unpacking.set_late_modes(self._stage)
        os.fchmod(self._stage, unpacking.top_mode if unpacking.top_mode is not None else 0o777 & ~self._umask)

    def _put_into(self, unpacking: Unpacking) -> None:
        """The stage's content goes into the target, which keeps its own mode."""
        merge = Merge(_MERGE_SEC)
        try:
            merge.check(self._stage, self._directory)
            self._find_changed(self._stage, self._directory, self._place.parts)
            merge.run(self._stage, self._directory)
        except WouldReplace as why:
            raise Conflict(f"{why}; nothing was unpacked") from None
        except TimeoutError:
            raise Conflict(f"{self._place.shown}: not all was in place after {_MERGE_SEC:.0f} s") from None
        except OSError as error:
            name = error.filename if isinstance(error.filename, bytes) else b""
            raise file_error(error, self._place.path + b"/" + name) from None
        unpacking.set_late_modes(self._directory)

    def _find_changed(self, source: int, target: int, at: Parts) -> None:
        """What the merge will put into the directory `target` as it is: all but directories that both have."""
        with ExitStack() as opened:
            readable = os.open(b".", _DIRECTORY, dir_fd=source)
            opened.callback(os.close, readable)
            for entry in opened.enter_context(os.scandir(readable)):
                if self.is_too_much:
                    return
                name = os.fsencode(entry.name)
                if entry.is_dir(follow_symlinks=False) and _is_directory(target, name):
                    with ExitStack() as both:
                        inner = os.open(name, _HANDLE, dir_fd=source)
                        both.callback(os.close, inner)
                        other = os.open(name, _HANDLE, dir_fd=target)
                        both.callback(os.close, other)
                        self._find_changed(inner, other, (*at, name))
                elif len(self.changed) < MAX_PATHS:
                    self.changed.append((*at, name))
                else:
                    self.is_too_much = True

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except TarRefused as why:
            raise _refusal(why) from None
        except OSError as error:
            assert self._unpacking is not None
            raise file_error(error, self._place.path + b"/" + self._unpacking.member) from None


def _is_directory(parent: int, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _refusal(why: TarRefused) -> ExecutorError:
    message = f"archive: {why}; nothing was unpacked"
    member = {"member": why.shown} if why.member else {}
    if why.fault == "limit":
        return TooLarge(message, **member, **({"limit": why.limit} if why.limit is not None else {}))
    return (InvalidPath if why.fault == "path" else InvalidRequest)(message, **member)


class _Departure:
    """begin, then chunk until it gives None; close at any time and from any thread."""

    def __init__(self, place: Place, max_bytes: int, *, is_gzip: bool) -> None:
        self._place = place
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._fd = -1
        self._over = False
        self._chunks: Generator[bytes, None, None] | None = None
        self._gzip = zlib.compressobj(_GZIP_LEVEL, wbits=31) if is_gzip else None
        self._first: bytes | None = None

    def begin(self) -> None:
        with self._lock, directory_at(self._place) as fd:
            if self._over:
                return
            self._fd = os.dup(fd)
            self._chunks = Packer(self._fd, max_bytes=self._max_bytes).chunks()
            try:
                self._first = next(self._chunks)  # what cannot be read at all is told before the answer begins
            except OSError as error:
                raise file_error(error, self._place.path) from None
            except PackLimit as why:
                raise TooLarge(f"{self._place.shown} has {why}", limit=self._max_bytes) from None

    def chunk(self) -> bytes | None:
        with self._lock:
            while not self._over and self._chunks is not None:
                chunk, self._first = self._first or next(self._chunks, None), None
                if self._gzip is None:
                    return chunk
                if chunk is None:
                    self._chunks = None
                    return self._gzip.flush()
                if packed := self._gzip.compress(chunk):
                    return packed
            return None

    def close(self) -> None:
        with self._lock:
            self._over = True
            if self._chunks is not None:
                self._chunks.close()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
