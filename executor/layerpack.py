"""A layer: all in which a tree differs from a state of it, as a tar stream; and the tree's new state.

Tree and index are gone through side by side, so that neither is ever in memory. A file is announced with the size that
it has when its turn comes, and just so many bytes follow; one that changes meanwhile counts as changed in the next
layer too. Blocking; one thread at a time.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

from executor.layerformat import (
    MAX_EXTENTS,
    MAX_XATTR_BYTES,
    MAX_XATTRS,
    Extents,
    emptied,
    entry_header,
    whiteout,
)
from executor.layerwire import MAX_BYTES, MAX_ENTRIES
from executor.tarpack import BLOCK_BYTES, COMMENT_MARK, PackLimit
from executor.treeindex import Record, TreeIndex, facts_of, same_as
from executor.treewalk import Seen, TreeWalk, open_file

READ_BYTES: Final = 256 * 1024
_HELD_LINKS: Final = 200_000  # files of several names whose other names are still to come

Write = Callable[[bytes], object]


class LayerPacker:
    """`run` once; the counts are then those of the layer."""

    def __init__(
        self, top: int, walk: TreeWalk, base: TreeIndex | None, new: TreeIndex, write: Write,
        *, check: Callable[[], object] = bool, mapped: Callable[[], frozenset[int]] = frozenset,
        max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES,
    ) -> None:  # fmt: skip
        """`base` None: a layer that stands alone. `new` takes the new state. What `write` raises ends the run, and so
        does what `check` raises, which is asked at every entry. `mapped` tells the inodes that can change unseen."""
        self._top = top
        self._walk = walk
        self._base = base
        self.new = new
        self._out = write
        self._check = check
        self._mapped = mapped
        self._unsure = base.unsure if base is not None else frozenset()
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._kept = bytearray()
        self._links: dict[tuple[int, int], tuple[bytes, int]] = {}  # (device, inode): first name, names to come
        self._looked_ns = 0  # the time before the entry at hand was looked at
        self.entries = 0
        self.removed = 0
        self.bytes = 0
        self.tar_bytes = 0
        self.changed = 0
        self.links_split = 0
        self.attributes_lost = 0

    def run(self) -> None:
        """Raises PackLimit, and OSError where the tree cannot be read on or the index not be written."""
        self.new.unsure = self._mapped()
        if self._base is None:
            self._write(emptied())
        records = self._base.records() if self._base is not None else iter(())
        known = next(records, None)  # the top's own
        looked_ns = time.time_ns()
        status = os.fstat(self._top)
        if known is not None and known.facts == same_as(b"", status):
            self.new.add(b"", known.facts)
        else:
            self.new.add(b"", facts_of(b"", status, looked_ns))
            self.entries += 1
        with closing(self._walk.entries()) as seen:
            self._merge(seen, records)
        self.new.unsure |= self._mapped()  # also those of a program that began meanwhile
        status = os.fstat(self._top)
        comment = COMMENT_MARK + json.dumps({"entries": self.entries, "removed": self.removed})
        header = entry_header(b"./", b"5", status, xattrs=self._xattrs(self._top), comment=comment.encode())
        self._write(header + bytes(2 * BLOCK_BYTES))
        self._flush()
        self.new.seal()

    def _merge(self, seen: Iterator[Seen], records: Iterator[Record]) -> None:
        record = next(records, None)
        under = b"\0"  # nothing is to be said of what the base has below this key; a lone NUL is below none
        for looked_ns, one in _timed(seen):
            self._check()
            key, self._looked_ns = one.key, looked_ns
            while record is not None and record.key < key:
                if not record.key.startswith(under):
                    under = record.key + b"\0"
                    self._gone(record.key)
                record = next(records, None)
            known = b""
            if record is not None and record.key == key:
                known = record.facts
                record = next(records, None)
            if one.status is None or one.is_blind or not stat.S_ISDIR(one.status.st_mode):
                under = key + b"\0"
            if one.status is None:
                continue
            if known and known == same_as(key, one.status) and one.status.st_ino not in self._unsure:
                self.new.add(key, known)
                continue
            facts = self._entry(one, one.status)
            if facts:
                self.new.add(key, facts)
            elif known:
                self._gone(key)
        while record is not None:
            if not record.key.startswith(under):
                under = record.key + b"\0"
                self._gone(record.key)
            record = next(records, None)

    def _gone(self, key: bytes) -> None:
        self._count()
        self.removed += 1
        self._write(whiteout(key.replace(b"\0", b"/")))

    # ── entries ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _entry(self, one: Seen, status: os.stat_result) -> bytes:
        """Writes the entry; its facts, b"" where it is gone by now."""
        path = one.key.replace(b"\0", b"/")
        if stat.S_ISREG(status.st_mode):
            return self._file(one, status, path)
        if stat.S_ISDIR(status.st_mode):
            header = entry_header(path + b"/", b"5", status, xattrs=self._xattrs(one.directory))
        elif stat.S_ISFIFO(status.st_mode):
            header = entry_header(path, b"6", status)
        else:
            try:
                target = os.readlink(one.name, dir_fd=one.parent)
            except OSError:
                return b""
            header = entry_header(path, b"2", status, target=target)
        self._count()
        self.entries += 1
        self._write(header)
        return facts_of(one.key, status, self._looked_ns)

    def _file(self, one: Seen, status: os.stat_result, path: bytes) -> bytes:
        first = self._other_name(status)
        if first:
            self._count()
            self.entries += 1
            self._write(entry_header(path, b"1", status, target=first))
            return facts_of(one.key, status, self._looked_ns)
        try:
            file = open_file(one.parent, one.name)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError:
            return self._not_read(one, status)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return b""  # replaced since; the next layer says by what
            self._count()
            is_sure = self._content(file, path, status)
            self._await_others(status, path)
            return facts_of(one.key, status, self._looked_ns, is_sure=is_sure)
        finally:
            os.close(file)

    def _not_read(self, one: Seen, status: os.stat_result) -> bytes:
        """What the base has of it stays: no mark of its removal, and the next layer tries again."""
        self._walk.left.unreadable += 1
        return facts_of(one.key, status, self._looked_ns, is_sure=False)

    def _content(self, file: int, path: bytes, status: os.stat_result) -> bool:
        """Whether the content is just that of `status`."""
        size, extents = status.st_size, None
        if status.st_blocks * 512 < size:
            extents = data_extents(file, size)
            size = sum(length for _, length in extents) if extents is not None else size
        if self.bytes + size > self._max_bytes:
            raise PackLimit(f"more than {self._max_bytes} bytes in its files")
        self.entries += 1
        self.bytes += size
        xattrs = self._xattrs(file)
        self._write(entry_header(path, b"0", status, size=size, xattrs=xattrs, extents=extents))
        is_whole = True
        for offset, length in extents if extents is not None else ((0, size),):
            is_whole = self._copy(file, offset, length) and is_whole
        if size % BLOCK_BYTES:
            self._write(bytes(-size % BLOCK_BYTES))
        if not is_whole or os.fstat(file).st_ctime_ns != status.st_ctime_ns:
            self.changed += 1
            return False
        return True

    def _copy(self, file: int, offset: int, length: int) -> bool:
        end, is_whole = offset + length, True
        while offset < end:
            data = b""
            if is_whole:
                try:
                    data = os.pread(file, min(end - offset, READ_BYTES), offset)
                except OSError:
                    pass
            if not data:
                is_whole = False
                data = bytes(min(end - offset, READ_BYTES))
            self._write(data)
            offset += len(data)
        return is_whole

    def _other_name(self, status: os.stat_result) -> bytes:
        """The name under which this layer has the same file already; b"" where it has none."""
        if status.st_nlink < 2:
            return b""
        inode = (status.st_dev, status.st_ino)
        name, to_come = self._links.get(inode, (b"", 0))
        if to_come > 1:
            self._links[inode] = (name, to_come - 1)
        elif name:
            del self._links[inode]
        return name

    def _await_others(self, status: os.stat_result, path: bytes) -> None:
        """The layer has the file's content under this name; others are to refer to it."""
        if status.st_nlink < 2:
            return
        if len(self._links) < _HELD_LINKS:
            self._links[status.st_dev, status.st_ino] = (path, status.st_nlink - 1)
        else:
            self.links_split += 1

    def _xattrs(self, fd: int) -> dict[bytes, bytes]:
        """Those of the `user` namespace: others are the machine's business."""
        try:
            names = os.listxattr(fd)
        except OSError:
            return {}  # a file system without
        found: dict[bytes, bytes] = {}
        left = MAX_XATTR_BYTES
        for text in names:
            name = os.fsencode(text)
            if not name.startswith(b"user."):
                continue
            try:
                value = os.getxattr(fd, name)
            except OSError:
                continue  # removed meanwhile, which the file's ctime tells of
            left -= len(name) + len(value)
            if left < 0 or len(found) == MAX_XATTRS:
                self.attributes_lost += 1
                continue
            found[name] = value
        return found

    # ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _count(self) -> None:
        if self.entries + self.removed >= self._max_entries:
            raise PackLimit(f"more than {self._max_entries} entries")

    def _write(self, data: bytes) -> None:
        self.tar_bytes += len(data)
        self._kept += data
        if len(self._kept) >= READ_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._out(bytes(self._kept))
        self._kept.clear()


def index_tree(top: int, walk: TreeWalk, new: TreeIndex) -> None:
    """The tree's state alone. Raises OSError."""
    looked_ns = time.time_ns()
    new.add(b"", facts_of(b"", os.fstat(top), looked_ns))
    with closing(walk.entries()) as entries:
        for looked_ns, one in _timed(entries):
            if one.status is not None:
                new.add(one.key, facts_of(one.key, one.status, looked_ns))
    new.seal()


def _timed(entries: Iterator[Seen]) -> Iterator[tuple[int, Seen]]:
    """Each with the time before it was looked at."""
    while True:
        looked_ns = time.time_ns()
        one = next(entries, None)
        if one is None:
            return
        yield looked_ns, one


def data_extents(file: int, size: int) -> Extents | None:
    """Where the file has content; None where its file system does not tell."""
    found: Extents = []
    at = 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
        except OSError as why:
            if why.errno == errno.ENXIO:  # only holes from here on
                return found
            return None
        if start >= size:
            break
        if len(found) == MAX_EXTENTS - 1:
            found.append((start, size - start))
            break
        at = min(os.lseek(file, start, os.SEEK_HOLE), size)
        found.append((start, at - start))
    return found
