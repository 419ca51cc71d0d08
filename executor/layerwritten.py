"""A layer of single paths: each as it is now, with the directories above it, or a mark that it is gone.

Nothing else of the tree is read. The stream is zstd without compression: such layers are small, they are made at every
changing file call, and a program to pack them would cost more than it saves.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

from executor.layerformat import entry_header
from executor.layerpack import LayerPacker
from executor.tarpack import BLOCK_BYTES
from executor.treeindex import TreeIndex
from executor.treewalk import DIRECTORY, Left, Seen, TreeWalk, narrow, open_own, widen
from executor.written import Changed

_NO_DIRECTORY: Final = (errno.ENOTDIR, errno.ELOOP)


class _NoIndex(TreeIndex):
    """Single paths are no state of a tree."""

    def __init__(self) -> None:
        self.entries = 0


class _Open:
    """A directory in which something is looked for."""

    def __init__(self, key: bytes, fd: int, status: os.stat_result) -> None:
        self.key, self.fd = key, fd
        self._mode = widen(fd, status)

    def close(self) -> None:
        narrow(self.fd, self._mode)
        os.close(self.fd)


class WrittenPacker(LayerPacker):
    """`pack` once. Blocking; one thread at a time."""

    def __init__(
        self, top: int, write: Callable[[bytes], object], *, check: Callable[[], object] = bool,
        mounts: frozenset[bytes] = frozenset(), alone: frozenset[bytes] = frozenset(),
    ) -> None:  # fmt: skip
        """`top` stays the caller's. `alone` and `mounts`: keys of which nothing is said."""
        super().__init__(top, TreeWalk(top, mounts=mounts, alone=alone), None, _NoIndex(), write, check=check)
        self._apart = mounts | alone
        self._mounts = mounts
        self._above: list[_Open] = []  # outermost first
        self._said = b"\0"  # all that there is to say at and below this key was said; a lone NUL is no key

    @property
    def left(self) -> Left:
        return self._walk.left

    def pack(self, paths: Sequence[Changed]) -> None:
        """In the order of a walk. Raises PackLimit, OSError."""
        wholes = {path.key for path in paths if path.whole}
        try:
            for key in sorted({path.key for path in paths}):
                self._check()
                if key and not self._is_said(key):
                    self._path(key, key in wholes)
        finally:
            self._leave(b"")
        status = os.fstat(self._top)
        self._write(entry_header(b"./", b"5", status, xattrs=self._xattrs(self._top)) + bytes(2 * BLOCK_BYTES))
        self._flush()

    def _path(self, key: bytes, whole: bool) -> None:
        names = key.split(b"\0")
        self._leave(key)
        for depth in range(len(self._above), len(names) - 1):
            if not self._step(b"\0".join(names[: depth + 1]), names[depth]):
                return
        if key in self._apart:
            self._said = key
            return
        parent, name = self._parent(), names[-1]
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            self._gone(key)
            self._said = key
            return
        if stat.S_ISDIR(status.st_mode) and not whole:
            self._step(key, name)
            return
        if whole:
            self._gone(key)
        self._all(key, parent, name, status)

    def _step(self, key: bytes, name: bytes) -> bool:
        """Into a directory, whose entry is written. False: there is none, and what there is instead was said."""
        self._said = key
        if key in self._apart:
            return False
        parent = self._parent()
        try:
            fd = open_own(parent, name, DIRECTORY)
        except FileNotFoundError:
            self._gone(key)
            return False
        except OSError as why:
            if why.errno not in _NO_DIRECTORY:
                raise
            try:
                self._all(key, parent, name, os.stat(name, dir_fd=parent, follow_symlinks=False))
            except FileNotFoundError:
                self._gone(key)
            return False
        self._said = b"\0"
        status = os.fstat(fd)
        self._above.append(_Open(key, fd, status))
        self._one(Seen(key, parent, name, status, fd))
        return True

    def _all(self, key: bytes, parent: int, name: bytes, status: os.stat_result) -> None:
        """The entry, and of a directory all in it."""
        self._said = key
        kind = stat.S_IFMT(status.st_mode)
        if kind != stat.S_IFDIR:
            if kind in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO):
                self._one(Seen(key, parent, name, status))
            return
        fd = open_own(parent, name, DIRECTORY)
        try:
            self._one(Seen(key, parent, name, os.fstat(fd), fd))
            under = key + b"\0"
            alone, mounts = (
                frozenset(each.removeprefix(under) for each in keys if each.startswith(under))
                for keys in (self._apart - self._mounts, self._mounts)
            )
            with closing(TreeWalk(fd, mounts=mounts, alone=alone).entries()) as entries:
                for seen in entries:
                    self._check()
                    if seen.status is not None:
                        self._one(seen._replace(key=under + seen.key))
        finally:
            os.close(fd)

    def _one(self, seen: Seen) -> None:
        assert seen.status is not None
        self._looked_ns = time.time_ns()
        self._entry(seen, seen.status)

    def _is_said(self, key: bytes) -> bool:
        return key == self._said or key.startswith(self._said + b"\0")

    def _parent(self) -> int:
        return self._above[-1].fd if self._above else self._top

    def _leave(self, key: bytes) -> None:
        """Closes the directories that are not above `key`."""
        while self._above and not key.startswith(self._above[-1].key + b"\0"):
            self._above.pop().close()
