"""A directory tree in one fixed order, in constant memory, never out of it.

Each directory comes before its content and names in the order of their bytes, so that two walks can be compared like
two sorted lists. A path's key is its components with a NUL between: compared as bytes, keys are in the walk's order.
Every step is relative to an open directory and follows no link. Blocking; one thread at a time.
"""

from __future__ import annotations

import errno
import heapq
import os
import re
import stat
from collections.abc import Callable, Generator
from itertools import chain, islice
from typing import Final, NamedTuple

MAX_DEPTH: Final = 256  # components of a path; one descriptor a level stays open meanwhile
MAX_KEY_BYTES: Final = 4096
_BATCH: Final = 32_768  # names in memory at once, of all levels together, beside a few of each
_FEW: Final = 64
_OURS: Final = re.compile(rb"\.sojourn-[0-9a-f]{24}\.part\Z")  # uploads that are not done
DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_HANDLE: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGED: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENXIO)  # no longer what it was


class Seen(NamedTuple):
    key: bytes
    parent: int  # descriptor of the directory that it is in
    name: bytes
    status: os.stat_result | None  # None: what is here or below is none of the tree's business
    directory: int = -1  # its own descriptor
    is_blind: bool = False  # a directory whose content was not looked at


class Left:
    """What a walk leaves out, counted."""

    def __init__(self) -> None:
        self.unreadable = 0
        self.sockets = 0
        self.devices = 0
        self.mounts = 0
        self.too_deep = 0


class _Level:
    def __init__(self, fd: int, prefix: bytes, status: os.stat_result) -> None:
        self.fd = fd
        self.prefix = prefix
        self.names: list[bytes] = []  # the next one last
        self.after = b""  # names from here on are still to come; b"" before the first batch
        self.is_done = False
        self._mode = widen(fd, status)

    def close(self) -> None:
        narrow(self.fd, self._mode)
        os.close(self.fd)


class TreeWalk:
    def __init__(self, top: int, *, mounts: frozenset[bytes] = frozenset(), alone: frozenset[bytes] = frozenset()):
        """`top` stays the caller's. `mounts` and `alone`: keys to say nothing of, the former counted."""
        self._top = top
        self._mounts = mounts
        self._alone = alone
        self._held = 0
        self.left = Left()

    def entries(self) -> Generator[Seen, None, None]:
        """All below the top. The descriptors are good until the next step. Raises OSError for the top itself."""
        levels: list[_Level] = []
        try:
            self._push(levels, os.open(b".", DIRECTORY, dir_fd=self._top), b"")
            while levels:
                level = levels[-1]
                name = self._next_name(level)
                if name is None:
                    levels.pop().close()
                    continue
                if _OURS.match(name):
                    continue
                key = level.prefix + name
                if key in self._alone or key in self._mounts:
                    self.left.mounts += key in self._mounts
                    yield Seen(key, level.fd, name, None)
                    continue
                try:
                    status = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue  # gone since its name was read
                except OSError:
                    yield self._unreadable(level, name, key)
                    continue
                kind = stat.S_IFMT(status.st_mode)
                if kind == stat.S_IFDIR:
                    if (seen := self._enter(levels, name, key)) is not None:
                        yield seen
                elif kind in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO):
                    yield Seen(key, level.fd, name, status)
                elif kind == stat.S_IFSOCK:
                    self.left.sockets += 1
                else:
                    self.left.devices += 1
        finally:
            while levels:
                levels.pop().close()

    def _enter(self, levels: list[_Level], name: bytes, key: bytes) -> Seen | None:
        """None where it is no directory any more."""
        level = levels[-1]
        try:
            fd = open_own(level.fd, name, DIRECTORY)
        except OSError as why:
            return None if why.errno in _CHANGED else self._unreadable(level, name, key)
        status = self._push(levels, fd, key + b"\0")
        is_blind = len(levels) > MAX_DEPTH or len(key) + 256 > MAX_KEY_BYTES
        if is_blind:
            self.left.too_deep += 1
            levels[-1].is_done = True
        return Seen(key, level.fd, name, status, fd, is_blind)

    def _push(self, levels: list[_Level], fd: int, prefix: bytes) -> os.stat_result:
        try:
            status = os.fstat(fd)
            levels.append(_Level(fd, prefix, status))
        except BaseException:
            os.close(fd)
            raise
        return status

    def _unreadable(self, level: _Level, name: bytes, key: bytes) -> Seen:
        self.left.unreadable += 1
        return Seen(key, level.fd, name, None)

    def _next_name(self, level: _Level) -> bytes | None:
        if not level.names:
            if level.is_done:
                return None
            self._fill(level)
            if not level.names:
                return None
        self._held -= 1
        return level.names.pop()

    def _fill(self, level: _Level) -> None:
        """The next names of a directory: all of them, mostly; of a huge one as many as may be held."""
        count = max(_FEW, _BATCH - self._held)
        try:
            with os.scandir(level.fd) as scan:
                names = (os.fsencode(entry.name) for entry in scan)
                if level.after:
                    names = (name for name in names if name >= level.after)
                found = list(islice(names, count + 1))
                if len(found) > count:
                    found = heapq.nsmallest(count, chain(found, names))
                    level.after = found[-1] + b"\0"  # no name holds a NUL: just after the last
                else:
                    level.is_done = True
        except FileNotFoundError:  # getdents(2) of a directory that is gone
            level.is_done = True
            return
        found.sort(reverse=True)
        level.names = found
        self._held += len(found)


def open_file(parent: int, name: bytes) -> int:
    """To read. Raises OSError; FIFOs and devices do not hold it."""
    return open_own(parent, name, _FILE)


def open_own(parent: int, name: bytes, flags: int) -> int:
    """Like os.open, also where its mode keeps the owner of a file or directory out and the owner is us, who could
    change it: afterwards it is as it was. Root needs none of this."""
    try:
        return os.open(name, flags, dir_fd=parent)
    except PermissionError:
        handle = os.open(name, _HANDLE, dir_fd=parent)
    try:
        status = os.fstat(handle)
        kind = stat.S_IFMT(status.st_mode)
        if status.st_uid != os.geteuid() or kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        place = f"/proc/self/fd/{handle}"  # fchmod(2) does not take such a handle
        mode = stat.S_IMODE(status.st_mode)
        os.chmod(place, mode | (0o700 if kind == stat.S_IFDIR else 0o600))
        try:
            return os.open(place, flags & ~os.O_NOFOLLOW)
        finally:
            os.chmod(place, mode)
    finally:
        os.close(handle)


def widen(fd: int, status: os.stat_result) -> int | None:
    """Lets us work in a directory of our own whatever its mode; what `narrow` needs to set it back."""
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o700 == 0o700 or os.geteuid() == 0 or status.st_uid != os.geteuid():
        return None
    os.fchmod(fd, mode | 0o700)
    return mode


def narrow(fd: int, mode: int | None) -> None:
    if mode is not None:
        os.fchmod(fd, mode)


def mounts_below(root: tuple[bytes, ...], read: Callable[[], bytes] | None = None) -> frozenset[bytes]:
    """Keys of the mount points below the directory with these components. None are known where /proc is not there."""
    try:
        text = read() if read is not None else _mountinfo()
    except OSError:
        return frozenset()
    found = set()
    for line in text.splitlines():
        fields = line.split(b" ")
        if len(fields) > 4:
            parts = tuple(part for part in _unescaped(fields[4]).split(b"/") if part)
            if len(parts) > len(root) and parts[: len(root)] == root:
                found.add(b"\0".join(parts[len(root) :]))
    return frozenset(found)


def _mountinfo() -> bytes:
    with open("/proc/self/mountinfo", "rb") as file:
        return file.read()


def _unescaped(field: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda digits: bytes([int(digits[1], 8) & 0xFF]), field)
