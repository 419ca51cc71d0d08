"""Lays a layer over a tree. Every step is relative to an open directory and follows no link.

What a layer says comes from a pod, so it is a stranger's: what it may not do is refused by LayerReader, what it may
not have (set-id bits of root, say) it does not get. A directory's times, mode and attributes are given to it when its
content is done; one that the layer does not speak of has its time set back. Blocking; one thread at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from itertools import islice
from typing import Final

from executor.errors import PermissionDenied
from executor.filetree import remove
from executor.layerformat import EMPTIED
from executor.layerread import LayerMember, SmallFile
from executor.tarread import Member, Parts, TarRefused
from executor.treewalk import DIRECTORY, narrow, open_own, widen

_HANDLE: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_STEPPED: Final = (errno.ENOTDIR, errno.ELOOP, errno.ENOENT)
_BATCH: Final = 1024  # names of one directory in memory at once
_SET_ID: Final = stat.S_ISUID | stat.S_ISGID


class _Open:
    """A directory that is being worked in."""

    def __init__(self, name: bytes, fd: int, said: LayerMember | None) -> None:
        self.name = name
        self.fd = fd
        self.said = said  # what the layer says of it, to be given to it at the end
        status = os.fstat(fd)
        self.mtime_ns = status.st_mtime_ns
        self.mode = widen(fd, status)
        self.is_changed = False
        self.makes: dict[int, tuple[tuple[int, int], int]] = {}  # by the mode asked for: a new file's owner and mode


class Applier:
    """Takes what a LayerReader yields, in its order; then `finish`, and `close` in any case. Raises TarRefused, OSError
    and ExecutorError; the tree is then neither what it was nor what it should be, if `is_touched`."""

    def __init__(
        self, top: int, *, umask: int, executor: tuple[int, int], alone: frozenset[bytes] = frozenset()
    ) -> None:
        """`top` stays the caller's. `executor`: its user and group, which nobody is to become by a set-id bit.
        `alone`: keys (see treewalk) at which nothing is to be changed."""
        self._stack = [_Open(b"", os.dup(top), None)]
        self._alone = alone
        self._parent_mode = 0o777 & ~umask
        self._no_users = {0, executor[0]}
        self._no_groups = {0, executor[1]}
        self._file = -1
        self._now: LayerMember | SmallFile | None = None
        self._within: Parts | None = None  # the directory on top of the stack, where the last entry was a small file
        self._left = 0  # bytes of the file under way
        self._at = 0  # where the next of them go
        self._extents: list[tuple[int, int]] = []  # still to come, the next one last
        self._extent_left = 0
        self.is_touched = False
        self.entries = 0
        self.files = 0
        self.removed = 0
        self.owners_lost = 0
        self.set_id_dropped = 0
        self.left_alone = 0
        self.attributes_lost = 0

    @property
    def member(self) -> bytes:
        return self._now.name if self._now is not None else b""

    def take(self, events: Iterable[Member | SmallFile | memoryview]) -> None:
        for event in events:
            if isinstance(event, SmallFile):
                self._small_file(event)
            elif isinstance(event, LayerMember):
                self._begin(event)
            elif isinstance(event, memoryview):
                self._write(event)

    def finish(self) -> None:
        """The layer is whole: the last directories get what is theirs."""
        self._leave(1)
        self._end_directory(self._stack[0])

    def close(self) -> None:
        """Lets go of what is open. Safe to repeat."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        while self._stack:
            os.close(self._stack.pop().fd)

    # ── members ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _small_file(self, file: SmallFile) -> None:
        """With as few system calls as it can be: what a new file gets here by itself is looked at once a directory."""
        self._now = file
        self.entries += 1
        self.is_touched = True
        above, base, mode, owner, mtime_ns, content = file
        if self._alone and self._is_alone(b"\0".join(file.path)):
            self.left_alone += 1
            return
        if above is not self._within:
            self._enter(above)
            self._within = above
        parent = self._stack[-1]
        parent.is_changed = True
        try:
            fd = os.open(base, _NEW, mode, dir_fd=parent.fd)
        except FileExistsError:
            self._remove(parent.fd, base, file.path)
            fd = os.open(base, _NEW, mode, dir_fd=parent.fd)
        try:
            made = parent.makes.get(mode)
            if made is None:
                status = os.fstat(fd)
                made = parent.makes[mode] = (status.st_uid, status.st_gid), stat.S_IMODE(status.st_mode)
            while content:
                content = content[os.write(fd, content) :]
            if made[0] != owner:
                try:
                    os.chown(fd, *owner)
                except OSError as why:
                    self._owner_lost(why)
            if made[1] != mode:
                os.fchmod(fd, mode)
            os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)
        self.files += 1

    def _begin(self, member: LayerMember) -> None:
        self._now = member
        self._within = None
        if member.whiteout:
            self._take_away(member)
            return
        self.entries += 1
        self.is_touched = True
        if not member.path:
            self._stack[0].said = member
            return
        self._left, self._file = member.size, -1
        if self._is_alone(b"\0".join(member.path)):
            self.left_alone += 1
            return
        self._enter(member.path[:-1])
        parent, name = self._stack[-1], member.path[-1]
        if member.kind == "directory":
            self._directory(parent, name, member)
            return
        parent.is_changed = True
        try:
            self._make(parent.fd, name, member)
        except FileExistsError:
            self._remove(parent.fd, name, member.path)
            self._make(parent.fd, name, member)

    def _make(self, parent: int, name: bytes, member: LayerMember) -> None:
        match member.kind:
            case "file":
                self._file = os.open(name, _NEW, 0o600, dir_fd=parent)
                self._extents = list(reversed(member.extents if member.extents is not None else [(0, member.size)]))
                self._extent_left = 0
                if not member.size:
                    self._end_file()
            case "symlink":
                os.symlink(member.target, name, dir_fd=parent)
                self._own_link(parent, name, member)
            case "fifo":
                os.mkfifo(name, 0o600, dir_fd=parent)
                self._end_fifo(parent, name, member)
            case "hardlink":
                self._link(parent, name, member)
            case "directory":
                os.mkdir(name, 0o700, dir_fd=parent)

    def _directory(self, parent: _Open, name: bytes, member: LayerMember) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent.fd)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent.fd, follow_symlinks=False).st_mode):
                self._remove(parent.fd, name, member.path)
                os.mkdir(name, 0o700, dir_fd=parent.fd)
                parent.is_changed = True
        else:
            parent.is_changed = True
        self._push(name, member)

    def _write(self, data: memoryview) -> None:
        self._left -= len(data)
        if self._file < 0:
            return  # of a member that is left alone
        while data:
            if not self._extent_left:
                self._at, self._extent_left = self._extents.pop()
            count = os.pwrite(self._file, data[: self._extent_left], self._at)
            self._at += count
            self._extent_left -= count
            data = data[count:]
        if not self._left:
            self._end_file()

    def _end_file(self) -> None:
        member, fd = self._said(), self._file
        if member.extents is not None:
            os.ftruncate(fd, member.real_size)
        self._give(fd, member)
        self._file = -1
        os.close(fd)
        self.files += 1

    def _end_fifo(self, parent: int, name: bytes, member: LayerMember) -> None:
        handle = os.open(name, _HANDLE, dir_fd=parent)
        try:
            if not stat.S_ISFIFO(os.fstat(handle).st_mode):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
            place = f"/proc/self/fd/{handle}"
            try:
                os.chown(place, member.uid, member.gid)
            except OSError as why:
                self._owner_lost(why)
            os.chmod(place, member.mode & ~_SET_ID)
            os.utime(place, ns=(member.mtime_ns, member.mtime_ns))
        finally:
            os.close(handle)

    def _own_link(self, parent: int, name: bytes, member: LayerMember) -> None:
        try:
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
        except OSError as why:
            self._owner_lost(why)
        os.utime(name, ns=(member.mtime_ns, member.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _link(self, parent: int, name: bytes, member: LayerMember) -> None:
        shown = b"/".join(member.source).decode("utf-8", "replace")
        missing = TarRefused(f"is a hard link to {shown}, which is no file before it", member=member.name, fault="path")
        if not member.source or self._is_alone(b"\0".join(member.source)):
            raise missing
        fd = os.dup(self._stack[0].fd)
        try:
            for part in member.source[:-1]:
                deeper = os.open(part, _HANDLE | os.O_DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = deeper
            if not stat.S_ISREG(os.stat(member.source[-1], dir_fd=fd, follow_symlinks=False).st_mode):
                raise missing
            os.link(member.source[-1], name, src_dir_fd=fd, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as why:
            if why.errno in _NOT_STEPPED:
                raise missing from None
            raise
        finally:
            os.close(fd)

    # ── what a member gets ──────────────────────────────────────────────────────────────────────────────────────

    def _give(self, fd: int, member: LayerMember) -> None:
        """Attributes, owner, mode, time: each may keep us from, or undo, what comes before it."""
        for name, value in member.xattrs.items():
            try:
                os.setxattr(fd, name, value)
            except OSError:
                self.attributes_lost += 1
        is_theirs = True
        if member.path:  # the workspace itself is the command user's, whoever that is here
            try:
                os.chown(fd, member.uid, member.gid)
            except OSError as why:
                is_theirs = False
                self._owner_lost(why)
        mode = member.mode
        if mode & _SET_ID and member.kind != "directory":
            is_ours = member.uid in self._no_users or (mode & stat.S_ISGID and member.gid in self._no_groups)
            if is_ours or not is_theirs:
                mode &= ~_SET_ID
                self.set_id_dropped += 1
        os.fchmod(fd, mode)
        os.utime(fd, ns=(member.mtime_ns, member.mtime_ns))

    def _owner_lost(self, why: OSError) -> None:
        if why.errno not in (errno.EPERM, errno.EINVAL):  # EINVAL: an id that this user namespace does not have
            raise why
        self.owners_lost += 1

    def _end_directory(self, directory: _Open) -> None:
        fd, said = directory.fd, directory.said
        if said is not None:
            for name in _user_xattrs(fd):
                if name not in said.xattrs:
                    os.removexattr(fd, name)
            self._give(fd, said)
            return
        narrow(fd, directory.mode)
        if directory.is_changed:
            os.utime(fd, ns=(directory.mtime_ns, directory.mtime_ns))

    # ── what is gone ────────────────────────────────────────────────────────────────────────────────────────────

    def _take_away(self, member: LayerMember) -> None:
        self.is_touched = True
        self.removed += 1
        if member.whiteout == EMPTIED:
            if self._try_enter(member.path):
                self._empty(self._stack[-1].fd, member.path)
                self._stack[-1].is_changed = True
        elif self._is_alone(b"\0".join(member.path)):
            self.left_alone += 1
        elif self._try_enter(member.path[:-1]):
            self._stack[-1].is_changed = True
            self._remove(self._stack[-1].fd, member.path[-1], member.path)

    def _try_enter(self, parts: Parts) -> bool:
        """False where there is no such directory, and so nothing in it."""
        try:
            self._enter(parts, make=False)
        except FileNotFoundError:
            return False
        return True

    def _empty(self, fd: int, parts: Parts) -> None:
        kept: set[bytes] = set()  # of what is left alone, or holds such
        while True:
            with os.scandir(fd) as scan:
                names = (os.fsencode(entry.name) for entry in scan)
                found = list(islice((name for name in names if name not in kept), _BATCH))
            if not found:
                return
            for name in found:
                self._remove(fd, name, (*parts, name))
                if self._holds_alone(b"\0".join((*parts, name))):
                    kept.add(name)

    def _remove(self, fd: int, name: bytes, parts: Parts) -> None:
        key = b"\0".join(parts)
        if self._is_alone(key):
            return
        if self._holds_alone(key):
            inner = os.open(name, DIRECTORY, dir_fd=fd)
            try:
                self._empty(inner, parts)
            finally:
                os.close(inner)
            return
        shown = b"/".join(parts)
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
                return
        except FileNotFoundError:
            return
        try:
            remove(fd, name, shown, recursive=True)
        except PermissionDenied:
            _open_up(fd, name)
            remove(fd, name, shown, recursive=True)

    def _is_alone(self, key: bytes) -> bool:
        return bool(self._alone) and any(key == one or key.startswith(one + b"\0") for one in self._alone)

    def _holds_alone(self, key: bytes) -> bool:
        return any(one == key or one.startswith(key + b"\0") for one in self._alone)

    # ── directories ─────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, parts: Parts, *, make: bool = True) -> None:
        """The last of the stack is then that directory. Raises FileNotFoundError with `make` False."""
        same = 0
        while same < len(parts) and same + 1 < len(self._stack) and self._stack[same + 1].name == parts[same]:
            same += 1
        self._leave(same + 1)
        for name in parts[same:]:
            try:
                self._push(name, None)
            except FileNotFoundError:
                if not make:
                    raise
                self._stack[-1].is_changed = True
                os.mkdir(name, 0o700, dir_fd=self._stack[-1].fd)
                self._push(name, None)
                os.fchmod(self._stack[-1].fd, self._parent_mode | 0o700)
            except OSError as why:
                if why.errno in _NOT_STEPPED:
                    raise TarRefused("lies below what is no directory", member=self.member, fault="path") from None
                raise

    def _push(self, name: bytes, said: LayerMember | None) -> None:
        fd = open_own(self._stack[-1].fd, name, DIRECTORY)
        try:
            self._stack.append(_Open(name, fd, said))
        except BaseException:
            os.close(fd)
            raise

    def _leave(self, depth: int) -> None:
        while len(self._stack) > depth:
            directory = self._stack[-1]
            self._end_directory(directory)
            self._stack.pop()
            os.close(directory.fd)

    def _said(self) -> LayerMember:
        assert isinstance(self._now, LayerMember)
        return self._now


def _user_xattrs(fd: int) -> list[bytes]:
    try:
        return [name for text in os.listxattr(fd) if (name := os.fsencode(text)).startswith(b"user.")]
    except OSError:
        return []  # a file system without


def _open_up(parent: int, name: bytes) -> None:
    """Lets its owner, us, into every directory of a tree that is to be removed."""
    fd = open_own(parent, name, DIRECTORY)
    try:
        os.fchmod(fd, 0o700)
        with os.scandir(fd) as scan:
            inner = [os.fsencode(entry.name) for entry in scan if entry.is_dir(follow_symlinks=False)]
        for one in inner:
            _open_up(fd, one)
    finally:
        os.close(fd)
