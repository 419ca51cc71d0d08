"""What was in a tree at one moment, in a file: enough to tell later what changed, in the order of a walk.

The file has no name, so that only this process can read it, and it is gone with it. One record an entry: the length of
its key, what stat(2) said of it, the key. Two entries are the same where all of it is: programs can set every time but
ctime, which changes with content, mode, owner, links and attributes alike.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Final, NamedTuple

_RECORD: Final = struct.Struct("<HIIIQqqQQ")
_BUFFER_BYTES: Final = 256 * 1024
_UNKNOWN: Final = -(1 << 63)  # a ctime that nothing has: the entry counts as changed at the next look
# Changes of one tick of the kernel's clock (10 ms at HZ=100) have the same ctime: what changed so lately could do so
# again and look the same.
RACY_NS: Final = 50_000_000


class Record(NamedTuple):
    key: bytes
    facts: bytes


def facts_of(key: bytes, status: os.stat_result, looked_ns: int, *, is_sure: bool = True) -> bytes:
    """`looked_ns`: the time before `status` and all else of the entry was asked for. `is_sure` False: what was read of
    its content may be neither an old nor a new state."""
    ctime = status.st_ctime_ns if is_sure and status.st_ctime_ns < looked_ns - RACY_NS else _UNKNOWN
    return _facts(key, status, ctime)


def same_as(key: bytes, status: os.stat_result) -> bytes:
    """The facts that a record has where nothing changed since."""
    return _facts(key, status, status.st_ctime_ns)


def _facts(key: bytes, status: os.stat_result, ctime: int) -> bytes:
    size, inode, device = status.st_size, status.st_ino, status.st_dev
    if stat.S_ISDIR(status.st_mode):  # its content has records of its own; overlayfs makes up new inode numbers for it
        size = inode = device = 0
    mtime = min(max(status.st_mtime_ns, -(1 << 63)), (1 << 63) - 1)
    return _RECORD.pack(
        len(key),
        status.st_mode,
        status.st_uid,
        status.st_gid,
        size,
        mtime,
        ctime,
        inode,
        device & 0xFFFF_FFFF_FFFF_FFFF,
    )


class TreeIndex:
    """Write it in the walk's order, `seal` it, then read it as often as you like, one reader at a time."""

    def __init__(self, directory: str | None) -> None:
        """In that directory; None: where temporary files are. Raises OSError."""
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=_BUFFER_BYTES, dir=directory)  # noqa: SIM115
        self.entries = 0
        self.unsure: frozenset[int] = frozenset()  # inodes whose content may change without their ctime
        self._write = self._file.write

    def add(self, key: bytes, facts: bytes) -> None:
        self._write(facts + key)
        self.entries += 1

    def seal(self) -> None:
        self._file.flush()

    def records(self) -> Iterator[Record]:
        self._file.seek(0)
        read, size, unpack = self._file.read, _RECORD.size, struct.Struct("<H").unpack_from
        while facts := read(size):
            yield Record(read(unpack(facts)[0]), facts)

    def close(self) -> None:
        """Never raises: what could not be written is nobody's any more."""
        with suppress(OSError):
            self._file.close()
