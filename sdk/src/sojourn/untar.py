"""Puts an archive's members below a directory of our own, and all of them in their place when none was refused.

Every step is relative to an open directory and follows no link, so that neither a link of the archive nor one that
somebody swaps in meanwhile leads elsewhere. Blocking; one thread at a time. Standard library only: the client's copy,
`sojourn/untar.py`, differs in its imports alone (a test compares them).
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

from sojourn.tarread import Member, Parts, TarRefused

_HELD: Final = 65_536  # directories whose mode must wait until they are full
_WALK: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH: Final = 1024  # names of one directory in memory at once
_READ: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_STEPPED: Final = (errno.ENOTDIR, errno.ELOOP)


class WouldReplace(Exception):
    """What is in the target directory already cannot be replaced by what the archive has. Nothing was changed."""


class Unpacking:
    """Takes what a TarReader yields, in its order. Raises TarRefused, and OSError with `member` saying where."""

    def __init__(self, directory: int, umask: int) -> None:
        """`directory`: an empty one of ours; its descriptor stays the caller's."""
        self._top = directory
        self._parent_mode = 0o777 & ~umask
        self._at: tuple[Parts, int] | None = None  # the directory of the last member: the next is likely there too
        self._file = -1
        self._left = 0
        self._now: Member | None = None
        self._late_modes: list[tuple[Parts, int]] = []
        self.top_mode: int | None = None  # where the archive says it
        self.files = 0
        self.comment = b""

    @property
    def member(self) -> bytes:
        return self._now.name if self._now is not None else b""

    def take(self, events: Iterable[Member | memoryview]) -> None:
        for event in events:
            if isinstance(event, Member):
                self._begin(event)
            else:
                self._write(event)

    def close(self) -> None:
        """Lets go of what is open. Safe to repeat."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._at is not None:
            os.close(self._at[1])
            self._at = None

    # ── members ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, member: Member) -> None:
        self._now = member
        self.comment = member.comment
        if not member.path:
            self.top_mode = member.mode
            return
        parent, name = self._directory(member.path[:-1]), member.path[-1]
        try:
            if member.kind == "directory":
                self._make_directory(parent, name, member)
            elif member.kind == "symlink":
                os.symlink(member.target, name, dir_fd=parent)
            elif member.kind == "hardlink":
                self._link(parent, name, member)
            else:
                self._file = os.open(name, _NEW, 0o600, dir_fd=parent)
                self._left = member.size
                if not self._left:
                    self._end_file()
        except FileExistsError:
            raise TarRefused("comes twice", member=member.name) from None

    def _write(self, data: memoryview) -> None:
        while data:
            count = os.write(self._file, data)
            self._left -= count
            data = data[count:]
        if not self._left:
            self._end_file()

    def _end_file(self) -> None:
        assert self._now is not None
        fd, self._file = self._file, -1
        try:
            ns = int(self._now.mtime * 1e9)
            os.utime(fd, ns=(ns, ns))
            os.fchmod(fd, self._now.mode)
        finally:
            os.close(fd)
        self.files += 1

    def _make_directory(self, parent: int, name: bytes, member: Member) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:  # made for a member inside it, or said again
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
        self._set_mode(parent, name, member.mode | 0o700)
        if member.mode & 0o700 != 0o700:
            if len(self._late_modes) >= _HELD:
                raise TarRefused(
                    f"more than {_HELD} directories that their owner may not use", member=member.name, fault="limit"
                )
            self._late_modes.append((member.path, member.mode))

    def _set_mode(self, parent: int, name: bytes, mode: int) -> None:
        fd = os.open(name, _READ, dir_fd=parent)
        try:
            os.fchmod(fd, mode | os.fstat(fd).st_mode & stat.S_ISGID)  # as it inherited it
        finally:
            os.close(fd)

    def _link(self, parent: int, name: bytes, member: Member) -> None:
        shown = b"/".join(member.source).decode("utf-8", "replace")
        missing = TarRefused(f"is a hard link to {shown}, which is no file before it", member=member.name, fault="path")
        if not member.source:
            raise missing
        try:
            fd = self._walk(member.source[:-1], make=False)
        except OSError:
            raise missing from None
        try:
            if not stat.S_ISREG(os.stat(member.source[-1], dir_fd=fd, follow_symlinks=False).st_mode):
                raise missing
            os.link(member.source[-1], name, src_dir_fd=fd, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise missing from None
        finally:
            os.close(fd)

    # ── directories ─────────────────────────────────────────────────────────────────────────────────────────────

    def _directory(self, parts: Parts) -> int:
        """A descriptor of the directory, made where it is missing; ours to keep."""
        if self._at is not None:
            if self._at[0] == parts:
                return self._at[1]
            os.close(self._at[1])
            self._at = None
        try:
            fd = self._walk(parts, make=True)
        except OSError as why:
            if why.errno in _NOT_STEPPED and self._now is not None:
                raise TarRefused(
                    "lies below what is no directory in this archive", member=self._now.name, fault="path"
                ) from None
            raise
        self._at = (parts, fd)
        return fd

    def _walk(self, parts: Parts, *, make: bool) -> int:
        fd = os.open(b".", _WALK, dir_fd=self._top)
        for name in parts:
            try:
                deeper = _step(fd, name, self._parent_mode if make else None)
            finally:
                os.close(fd)
            fd = deeper
        return fd

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def set_late_modes(self, directory: int) -> None:
        """The modes that would have kept us out, now that all is in `directory`. What is gone by now is left out."""
        for parts, mode in reversed(self._late_modes):
            try:
                fd = os.dup(directory)
                for name in parts[:-1]:
                    deeper = _opened(fd, name)
                    os.close(fd)
                    fd = deeper
            except OSError:
                continue
            try:
                self._set_mode(fd, parts[-1], mode)
            except OSError:
                pass
            finally:
                os.close(fd)


def _opened(fd: int, name: bytes) -> int:
    try:
        return os.open(name, _WALK, dir_fd=fd)
    except OSError:
        os.close(fd)
        raise


def _step(fd: int, name: bytes, mode: int | None) -> int:
    """A descriptor of the directory `name` in `fd`, made with `mode` where it is missing and a mode is given."""
    try:
        return os.open(name, _WALK, dir_fd=fd)
    except FileNotFoundError:
        if mode is None:
            raise
    os.mkdir(name, 0o700, dir_fd=fd)
    made = os.open(name, _READ, dir_fd=fd)
    try:
        os.fchmod(made, mode | 0o700 | os.fstat(made).st_mode & stat.S_ISGID)
    except BaseException:
        os.close(made)
        raise
    return made


# ── into a directory that has things already ────────────────────────────────────────────────────────────────────


class Merge:
    """Moves all that is in the directory `source` into `target`: files replace files, directories are joined."""

    def __init__(self, limit_sec: float) -> None:
        self._until = time.monotonic() + limit_sec

    def check(self, source: int, target: int, shown: bytes = b"") -> None:
        """Raises WouldReplace or PermissionError for what `run` could not do; changes nothing."""
        can_ask = os.access in os.supports_effective_ids
        if not os.access(b".", os.W_OK | os.X_OK, dir_fd=target, effective_ids=can_ask):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), shown or b".")
        with _entries(source) as entries:
            for entry in entries:
                self._check_time()
                name = os.fsencode(entry.name)
                here = shown + b"/" + name if shown else name
                try:
                    there = os.stat(name, dir_fd=target, follow_symlinks=False).st_mode
                except FileNotFoundError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if not stat.S_ISDIR(there):
                        raise WouldReplace(f"{here.decode('utf-8', 'replace')} is there and is no directory")
                    with _both(source, target, name) as (inner, other):
                        self.check(inner, other, here)
                elif not stat.S_ISREG(there) and not stat.S_ISLNK(there):
                    raise WouldReplace(f"{here.decode('utf-8', 'replace')} is there and is no file")

    def run(self, source: int, target: int) -> None:
        """Only renames, so that no file is ever there in part. OSError where a command interferes meanwhile."""
        while True:
            with _entries(source) as entries:
                found = [
                    (os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in islice(entries, _BATCH)
                ]
            if not found:
                return
            for name, is_directory in found:
                self._check_time()
                if is_directory and _exists(name, target):
                    with _both(source, target, name) as (inner, other):
                        self.run(inner, other)
                    os.rmdir(name, dir_fd=source)
                else:
                    os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)

    def _check_time(self) -> None:
        if time.monotonic() > self._until:  # whoever owns the directories can fill them as fast as they are read
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


@contextmanager
def _both(source: int, target: int, name: bytes) -> Iterator[tuple[int, int]]:
    inner = os.open(name, _WALK, dir_fd=source)
    try:
        other = os.open(name, _WALK, dir_fd=target)
        try:
            yield inner, other
        finally:
            os.close(other)
    finally:
        os.close(inner)


@contextmanager
def _entries(directory: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    fd = os.open(b".", _READ, dir_fd=directory)
    try:
        with os.scandir(fd) as scan:
            yield scan
    finally:
        os.close(fd)


def _exists(name: bytes, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
