"""Permission bits of one file or of a tree, links left alone. Runs in worker threads."""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import Final

from executor.filetree import entry_in, entry_of
from executor.safepath import Place, directory_at, file_error, parent_of
from executor.wire import ChmodResult

_DEADLINE_SEC: Final = 30.0
_MAX_DEPTH: Final = 128  # one descriptor a level stays open meanwhile
_READ: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def change_mode(place: Place, mode: int, recursive: bool) -> ChmodResult:
    """Raises FileMissing, PermissionDenied, and InvalidPath for a link. Below the top, failures are counted."""
    change = _Change(mode)
    try:
        if place.is_root:
            with directory_at(place) as fd:
                change.tree(fd, b".", 0) if recursive else change.one(fd, b".")
                entry = entry_of(os.fstat(fd), place.path)
        else:
            with parent_of(place) as (fd, name):
                if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                change.tree(fd, name, 0) if recursive else change.one(fd, name)
                entry = entry_in(fd, name, place.path)
    except OSError as error:
        raise file_error(error, place.path) from None
    return ChmodResult(entry=entry, changed=change.changed, failed=change.failed, truncated=change.truncated)


class _Change:
    def __init__(self, mode: int) -> None:
        self._mode = mode
        self._until = time.monotonic() + _DEADLINE_SEC
        self.changed = 0
        self.failed = 0
        self.truncated = False

    def one(self, fd: int, name: bytes) -> None:
        """Not for links. Raises OSError."""
        held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            now = os.fstat(held).st_mode
            if stat.S_ISLNK(now):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            inherited = now & stat.S_ISGID if stat.S_ISDIR(now) else 0
            # fchmod(2) takes no O_PATH descriptor, and any other could block on a FIFO or need a right to read
            os.chmod(f"/proc/self/fd/{held}", self._mode | inherited)
            self.changed += 1
        finally:
            os.close(held)

    def tree(self, fd: int, name: bytes, depth: int) -> None:
        """What is in it before the directory itself: its new mode may shut us out. Raises OSError for `name`."""
        was_shut = False
        try:
            inner = os.open(name, _READ, dir_fd=fd)
        except PermissionError:
            was_shut = True
            self.one(fd, name)  # its old mode shut us out already; the new one may let us in
            try:
                inner = os.open(name, _READ, dir_fd=fd)
            except OSError:
                return
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self.one(fd, name)
            return
        try:
            if depth < _MAX_DEPTH:
                self._inside(inner, depth)
            else:
                self.truncated = True
        finally:
            os.close(inner)
        if not was_shut:
            self.one(fd, name)

    def _inside(self, fd: int, depth: int) -> None:
        with os.scandir(fd) as scan:
            for entry in scan:
                if time.monotonic() > self._until:
                    self.truncated = True
                    return
                name = os.fsencode(entry.name)
                try:
                    if entry.is_dir(follow_symlinks=False):
                        self.tree(fd, name, depth + 1)
                    elif not entry.is_symlink():
                        self.one(fd, name)
                except FileNotFoundError:
                    pass  # gone since its name was read
                except OSError:
                    self.failed += 1
