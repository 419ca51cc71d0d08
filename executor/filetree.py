"""What is in a directory, and how to be rid of it: all relative to open descriptors. Runs in worker threads."""

from __future__ import annotations

import base64
import errno
import heapq
import os
import secrets
import stat
import time
from collections.abc import Generator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Final, Literal

import msgspec

from executor.errors import Conflict, InvalidRequest
from executor.safepath import Parts, Place, file_error, shown, step_into
from executor.wire import FileEntry, FileList

MAX_DEPTH: Final = 32  # of a listing: one descriptor a level stays open meanwhile
_HELD_LEVELS: Final = 64  # descriptors that a removal holds at once, however deep the tree
_BATCH: Final = 1024  # names of one directory in memory at once
_REMOVAL_SEC: Final = 120.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_US: Final = (datetime(1, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_LAST_US: Final = (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)

FileType = Literal["file", "directory", "symlink", "fifo", "socket", "char_device", "block_device", "unknown"]
_TYPES: Final[dict[int, FileType]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char_device",
    stat.S_IFBLK: "block_device",
}


def type_of(status: os.stat_result) -> FileType:
    return type_name(status.st_mode)


def type_name(mode: int) -> FileType:
    return _TYPES.get(stat.S_IFMT(mode), "unknown")


def etag_of(status: os.stat_result) -> str:
    """Changes with every write, also with one that restores size and mtime: ctime cannot be set back."""
    return f'"{status.st_ino:x}-{status.st_size:x}-{status.st_ctime_ns:x}"'


def entry_of(status: os.stat_result, path: bytes, target: bytes | None = None) -> FileEntry:
    name = path.rpartition(b"/")[2] or b"/"
    kind = type_of(status)
    return FileEntry(
        name=name.decode("utf-8", "replace"),
        path=path.decode("utf-8", "replace"),
        type=kind,
        size=status.st_size,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime=rfc3339(status.st_mtime_ns),
        etag=etag_of(status) if kind == "file" else None,
        target=target.decode("utf-8", "replace") if target is not None else None,
        name_base64=path_base64(name),
    )


def path_base64(path: bytes) -> str | msgspec.UnsetType:
    """For a path that is no UTF-8, which its rendering in JSON cannot name."""
    return msgspec.UNSET if _is_utf8(path) else base64.b64encode(path).decode()


def entry_in(fd: int, name: bytes, path: bytes) -> FileEntry:
    """The entry `name` of the directory `fd`, links not followed. Raises OSError."""
    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    target: bytes | None = None
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(name, dir_fd=fd)
    return entry_of(status, path, target)


def rfc3339(ns: int) -> str:
    """In UTC. A time outside the years 1 to 9999, as touch(1) can set, becomes the nearest inside."""
    microseconds = min(max(ns // 1000, _FIRST_US), _LAST_US)
    moment = _EPOCH + timedelta(microseconds=microseconds)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


# ── listing ─────────────────────────────────────────────────────────────────────────────────────────────────────


def list_tree(fd: int, place: Place, depth: int, limit: int, after: str | None) -> FileList:
    """At most `limit` entries below the directory `fd`, down to `depth` levels; each directory before its content,
    names in the order of their bytes. `after` is the `next` of the page before. Links are shown, never followed.

    A directory that cannot be read is shown without its content; the top one raises OSError."""
    cursor = _cursor_of(after) if after is not None else ()
    entries: list[FileEntry] = []
    last: Parts = ()
    with closing(_below(fd, place.path.rstrip(b"/"), (), depth, cursor, min(limit + 1, _BATCH))) as found:
        for parts, entry in found:
            if len(entries) == limit:
                next_page = base64.urlsafe_b64encode(b"/".join(last)).decode()
                return FileList(entries=entries, truncated=True, next=next_page)
            entries.append(entry)
            last = parts
    return FileList(entries=entries)


def _below(
    fd: int, path: bytes, parts: Parts, depth: int, cursor: Parts, batch: int
) -> Generator[tuple[Parts, FileEntry], None, None]:
    readable = _open_to_read(fd, b".")
    try:
        start = cursor[0] if cursor else b""
        while names := _names_from(readable, start, batch):
            for name in names:
                here, below = path + b"/" + name, (*parts, name)
                resumed = bool(cursor) and name == cursor[0]  # itself on the page before, its content perhaps not
                may_hold_more = resumed
                if not resumed:
                    try:
                        entry = entry_in(readable, name, here)
                    except OSError:
                        continue  # gone since the names were read
                    yield below, entry
                    may_hold_more = entry.type == "directory"
                if depth > 1 and may_hold_more:
                    yield from _inside(readable, name, here, below, depth - 1, cursor[1:] if resumed else (), batch)
            if len(names) < batch:
                return
            start = names[-1] + b"\0"  # no name holds a NUL: just after the last
    finally:
        os.close(readable)


def _inside(
    parent: int, name: bytes, path: bytes, parts: Parts, depth: int, cursor: Parts, batch: int
) -> Generator[tuple[Parts, FileEntry], None, None]:
    try:
        fd = step_into(parent, name)
    except OSError:
        return  # no directory any more
    try:
        yield from _below(fd, path, parts, depth, cursor, batch)
    except OSError:
        pass  # not ours to read
    finally:
        os.close(fd)


def _names_from(fd: int, start: bytes, count: int) -> list[bytes]:
    """The `count` least names from `start` on, so that a directory of millions costs no memory."""
    with os.scandir(fd) as scan:
        names = (os.fsencode(entry.name) for entry in scan)
        return heapq.nsmallest(count, (name for name in names if name >= start))


def _cursor_of(after: str) -> Parts:
    try:
        parts = tuple(base64.b64decode(after, altchars=b"-_", validate=True).split(b"/"))
    except ValueError:
        parts = ()
    if not parts or len(parts) > MAX_DEPTH or any(part in (b"", b".", b"..") or b"\0" in part for part in parts):
        raise InvalidRequest("query: after must be the `next` of another page", field="after")
    return parts


# ── removal ─────────────────────────────────────────────────────────────────────────────────────────────────────


def remove(fd: int, name: bytes, path: bytes, recursive: bool) -> None:
    """Removes the entry `name` of `fd`: a link itself, a directory only when empty or `recursive`.

    Raises FileMissing, Conflict, PermissionDenied; of a tree, some may then be gone already."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=fd)
        elif recursive:
            _Removal(path).run(fd, name)
        else:
            os.rmdir(name, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY and not recursive:
            raise Conflict(
                f"{shown(path)}: the directory is not empty; recursive=true deletes its content too"
            ) from None
        raise file_error(error, path) from None


class _Removal:
    """Of one tree: holds few descriptors and names, however deep and wide it is."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._until = time.monotonic() + _REMOVAL_SEC

    def run(self, parent: int, name: bytes) -> None:
        while not _removed_if_empty(parent, name):
            top = _open_to_read(parent, name)
            try:
                # A branch below the held levels is moved up to the top, whose next pass then finds it there.
                while self._remove_batch(top, top, _HELD_LEVELS):
                    pass
            finally:
                os.close(top)

    def _remove_batch(self, fd: int, top: int, levels: int) -> bool:
        """Removes some of what is in `fd`; False where there was nothing. OSError where a thing cannot be removed."""
        if time.monotonic() > self._until:  # a command can make files as fast as they are removed
            raise Conflict(
                f"{shown(self._path)}: not all was deleted in {_REMOVAL_SEC:.0f} s; delete it again to go on"
            )
        with os.scandir(fd) as scan:
            found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in islice(scan, _BATCH)]
        for name, is_directory in found:
            try:
                if is_directory:
                    self._remove_directory(fd, name, top, levels)
                else:
                    os.unlink(name, dir_fd=fd)
            except FileNotFoundError:
                pass  # another removes too
            except OSError as error:
                # It is no longer what the listing said: the next pass sees what it is now.
                if error.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ELOOP):
                    raise
        return bool(found)

    def _remove_directory(self, fd: int, name: bytes, top: int, levels: int) -> None:
        while not _removed_if_empty(fd, name):
            if levels == 0:
                os.rename(name, b".deleted-" + secrets.token_hex(8).encode(), src_dir_fd=fd, dst_dir_fd=top)
                return
            inner = _open_to_read(fd, name)
            try:
                while self._remove_batch(inner, top, levels - 1):
                    pass
            finally:
                os.close(inner)


def _removed_if_empty(fd: int, name: bytes) -> bool:
    try:
        os.rmdir(name, dir_fd=fd)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _open_to_read(fd: int, name: bytes) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
