"""The pod's files for its callers: read, write, list, make, move and delete, as the command user would.

Every system call on a file runs in one of a few worker threads under that user's identity, so that neither a slow
disk nor a FIFO holds the event loop, and no mistake here gives a caller more than a command would have.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from executor.config import ExecutorConfig
from executor.download import Download, FileFacts
from executor.errors import Conflict, ExecutorError, FileMissing, InvalidPath, InvalidRequest, NotUtf8, TooLarge
from executor.filemodes import change_mode
from executor.filethreads import FileThreads
from executor.filetree import entry_in, entry_of, list_tree, remove
from executor.isolation import CommandUser
from executor.safepath import Place, Roots, directory_at, enter_or_make, file_error, parent_of, rename
from executor.upload import Upload, WriteTerms, check_match
from executor.wire import ChmodRequest, ChmodResult, FileEntry, FileList, MkdirRequest, MoveRequest
from executor.written import Written

READ_BYTES: Final = 256 * 1024  # one step of a download
WRITE_BYTES: Final = 1 << 18  # one step of an upload; larger ones leave the cache before they are written
WRITE_PIECES: Final = 256  # or so many of its pieces, however small
STALL_SEC: Final = 60.0  # a peer that neither sends nor takes a byte for so long is given up
DEFAULT_MAX_FILE_BYTES: Final = 8 << 30


class FileService:
    """Paths are absolute, or relative to the workspace, and lie in the workspace or another of the roots."""

    def __init__(
        self,
        config: ExecutorConfig,
        user: CommandUser,
        *,
        other_roots: tuple[str, ...] = ("/tmp",),
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        resolve_user: Callable[[str], CommandUser] | None = None,  # for `user=`; raises UserNotAllowed
    ) -> None:
        self.roots = Roots((config.workspace, *other_roots))
        self.umask = config.umask
        self.written = Written(self.roots.place(config.workspace))
        self.threads = FileThreads(user, resolve_user)
        self._max_file_bytes = max_file_bytes
        self._commits = threading.Lock()

    def close(self) -> None:
        """Waits for the calls under way in threads; those that wait for a thread do not run."""
        self.threads.close()

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────

    async def stat(self, path: str, user: str | None = None) -> FileEntry:
        """Of a link, the link itself. Raises FileMissing, InvalidPath."""
        place = self.roots.place(path)
        return await self.threads.run(self.threads.named(user), _stat, place)

    async def list(self, path: str, depth: int, limit: int, after: str | None, user: str | None = None) -> FileList:
        """A page of what is below a directory. Raises NotADirectory, FileMissing."""
        place = self.roots.place(path)
        return await self.threads.run(self.threads.named(user), _list, place, depth, limit, after)

    @asynccontextmanager
    async def open(self, path: str, user: str | None = None) -> AsyncIterator[OpenFile]:
        """A regular file to read from. Raises NotAFile for what has no content, InvalidPath for a link, FileMissing."""
        download = Download(self.roots.place(path))
        who = self.threads.named(user)
        try:
            yield OpenFile(self, download, await self.threads.run(who, download.begin))
        finally:
            await self.threads.finish(who, download.close)

    async def read(self, download: Download, offset: int, count: int) -> bytes:
        return await self.threads.run(self.threads.user, download.read, offset, count)

    async def send(self, download: Download, offset: int, count: int) -> tuple[int, bool]:
        return await self.threads.run(self.threads.user, download.send, offset, count)

    # ── changing ────────────────────────────────────────────────────────────────────────────────────────────

    async def write(
        self, path: str, pieces: AsyncIterator[bytes], size: int | None, terms: WriteTerms, user: str | None = None
    ) -> tuple[FileEntry, bool]:
        """Puts the pieces at `path` in one step at the end, whatever comes between; the file, and whether it is new.

        `size` is the announced one, None where unknown. Raises TooLarge, NoSpace, PreconditionFailed; what was there
        before is then unchanged, and nothing else is left."""
        place = self.roots.place(path)
        if path.rpartition("/")[2] in ("", ".") or place.is_root:
            raise InvalidPath(f"{place.shown} names a directory", field="path")
        if size is not None and size > self._max_file_bytes:
            raise self._too_large()
        who = self.threads.named(user)
        upload = Upload(place, terms, self.threads.identity, self.umask, self._commits)
        try:
            await self.threads.run(who, upload.begin)
            written = unwritten = 0
            kept: list[bytes] = []  # each way to a thread and back costs as much as writing 100 KiB
            async for piece in pieces:
                written += len(piece)
                unwritten += len(piece)
                if written > self._max_file_bytes:
                    raise self._too_large()
                kept.append(piece)
                if unwritten >= WRITE_BYTES or len(kept) == WRITE_PIECES:
                    await self.threads.run(who, upload.write, kept)
                    kept, unwritten = [], 0
            with self._told(lambda: self.written.changed(place)):
                return await self.threads.run(who, upload.write_and_commit, kept)
        except BaseException:
            await self.threads.finish(who, upload.abort)
            raise

    async def delete(self, path: str, recursive: bool, if_match: str | None = None, user: str | None = None) -> None:
        """A link itself, a directory with its content only if `recursive`. Raises FileMissing, Conflict."""
        place = self._movable(path, "path")
        who = self.threads.named(user)
        with self._told(lambda: self.written.replaced(place), in_part=recursive):
            await self.threads.run(who, _delete, place, recursive, if_match, self._commits)

    async def mkdir(self, request: MkdirRequest, user: str | None = None) -> tuple[FileEntry, bool]:
        """The directory, and whether it is new. With `parents`, one that exists is fine; else Conflict."""
        place = self.roots.place(request.path)
        if not 0 <= request.mode <= 0o777:
            raise InvalidRequest("body: mode must be from 0 to 511 (octal 777)", field="mode")
        who = self.threads.named(user)
        with self._told(lambda: self.written.changed(place), in_part=True):
            return await self.threads.run(who, _mkdir, place, request.parents, request.mode, 0o777 & ~self.umask)

    async def move(self, request: MoveRequest, user: str | None = None) -> FileEntry:
        """What is at the target then. Raises Conflict where something is there and `overwrite` is not given."""
        source, target = self._movable(request.source, "source"), self._movable(request.target, "target")
        if target.is_below(source):
            raise InvalidPath(f"target: {target.shown} is inside the source", field="target")
        who = self.threads.named(user)
        with self._told(lambda: self.written.moved(source, target)):
            return await self.threads.run(who, _move, source, target, request.overwrite)

    async def chmod(self, request: ChmodRequest, user: str | None = None) -> ChmodResult:
        """Of a file or directory, with `recursive` of all below it too. Raises FileMissing, InvalidPath for a link."""
        place = self.roots.place(request.path)
        if not 0 <= request.mode <= 0o777:
            raise InvalidRequest("body: mode must be from 0 to 511 (octal 777)", field="mode")
        who = self.threads.named(user)
        tell = self.written.replaced if request.recursive else self.written.changed
        with self._told(lambda: tell(place), in_part=request.recursive):
            return await self.threads.run(who, change_mode, place, request.mode, request.recursive)

    @contextmanager
    def _told(self, tell: Callable[[], object], *, in_part: bool = False) -> Iterator[None]:
        """Tells of a change when it is there, also where the caller is cancelled: its thread goes on. `in_part`: one
        that is refused may have changed something."""
        try:
            yield
        except BaseException as why:
            if in_part or not isinstance(why, ExecutorError):
                tell()
            raise
        tell()

    def _movable(self, path: str, field: str) -> Place:
        place = self.roots.place(path, field)
        if self.roots.holds_root(place):
            raise InvalidPath(f"{field}: {place.shown} is or holds the workspace or another root", field=field)
        return place

    def _too_large(self) -> TooLarge:
        limit = self._max_file_bytes
        return TooLarge(f"the file is over the limit of {limit} bytes; nothing was written", limit=limit)


def _stat(place: Place) -> FileEntry:
    if place.is_root:
        with directory_at(place) as fd:
            return entry_of(os.fstat(fd), place.path)
    with parent_of(place) as (fd, name):
        try:
            return entry_in(fd, name, place.path)
        except OSError as error:
            raise file_error(error, place.path) from None


def _list(place: Place, depth: int, limit: int, after: str | None) -> FileList:
    try:
        with directory_at(place) as fd:
            return list_tree(fd, place, depth, limit, after)
    except OSError as error:
        raise file_error(error, place.path) from None


def _delete(place: Place, recursive: bool, if_match: str | None, commits: threading.Lock) -> None:
    with parent_of(place) as (fd, name):
        if if_match is None:
            remove(fd, name, place.path, recursive)
            return
        with commits:
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError as error:
                raise file_error(error, place.path) from None
            check_match(if_match, status, place)  # only a file can match
            remove(fd, name, place.path, recursive=False)


def _mkdir(place: Place, parents: bool, mode: int, parent_mode: int) -> tuple[FileEntry, bool]:
    steps = place.parts if parents else place.parts[-1:]
    with directory_at(place, () if parents else place.parts[:-1]) as start:
        fd, is_new = os.dup(start), False
        try:
            for index, name in enumerate(steps):
                is_last = index == len(steps) - 1
                deeper, is_new = enter_or_make(fd, name, mode if is_last else parent_mode, place.path)
                os.close(fd)
                fd = deeper
            if not is_new and not parents:
                raise Conflict(f"{place.shown} is there already")
            return entry_of(os.fstat(fd), place.path), is_new
        finally:
            os.close(fd)


def _move(source: Place, target: Place, overwrite: bool) -> FileEntry:
    with parent_of(source) as (source_fd, source_name), parent_of(target) as (target_fd, target_name):
        try:
            os.stat(source_name, dir_fd=source_fd, follow_symlinks=False)
        except OSError as error:
            raise file_error(error, source.path) from None
        try:
            rename(source_fd, source_name, target_fd, target_name, overwrite)
            return entry_in(target_fd, target_name, target.path)
        except FileExistsError:
            raise Conflict(f"{target.shown} is there already; overwrite=true replaces it") from None
        except FileNotFoundError:
            raise FileMissing(f"{source.shown} was removed meanwhile") from None
        except OSError as error:
            raise file_error(error, target.path) from None


class OpenFile:
    """What `FileService.open` gives: the facts as they were at the open, and the content from any offset."""

    def __init__(self, service: FileService, download: Download, facts: FileFacts) -> None:
        self.facts = facts
        self._service = service
        self._download = download

    async def read(self, offset: int, count: int) -> bytes:
        """At most `count` bytes from `offset` on; b"" at or past the end."""
        return await self._service.read(self._download, offset, count)

    async def pieces(self, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from `start` to `end`, in steps; fewer where the file has been cut meanwhile."""
        while start < end and (piece := await self.read(start, min(READ_BYTES, end - start))):
            yield piece
            start += len(piece)

    async def send(self, socket: int, start: int, end: int) -> int:
        """Sends the bytes from `start` to `end` without a copy of ours, and returns how far it came: less where the
        file has been cut meanwhile, or cannot be sent so. Takes over `socket`, a descriptor of a non-blocking socket
        that nobody else writes to. Raises ConnectionError; TimeoutError where the peer takes nothing any more."""
        self._download.aim(socket)
        while start < end:
            sent, is_full = await self._service.send(self._download, start, end - start)
            start += sent
            if is_full:
                async with asyncio.timeout(STALL_SEC):
                    await _room(socket)
            elif not sent:
                break
        return start

    async def check_utf8(self, start: int, end: int) -> None:
        """Raises NotUtf8 where the bytes from `start` to `end` are no UTF-8 text of their own."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            async for piece in self.pieces(start, end):
                decoder.decode(piece)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            path = self.facts.entry.path
            raise NotUtf8(f"{path} is not UTF-8 text; get it in binary form, without text=true") from None


async def _room(socket: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(socket, wake)
    try:
        await ready
    finally:
        loop.remove_writer(socket)
