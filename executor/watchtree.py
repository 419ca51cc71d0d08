"""inotify for a directory tree: which directories are watched, and what the events say. Runs in worker threads.

A directory that appears is watched and looked through at once, as things may be in it before its watch is; so a thing
may be told of twice, and none is missed but where the kernel or a bound says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

from executor.errors import ExecutorError, NotADirectory, NotSupported, RateLimited
from executor.filetree import path_base64
from executor.safepath import Place, directory_at, file_error, step_into
from executor.wire import (
    FileAttributes,
    FileCreated,
    FileDeleted,
    FileEvent,
    FileModified,
    FileMoved,
    WatchEnded,
    WatchOverflow,
)

MAX_DIRECTORIES: Final = 8192  # of one watch
MAX_DEPTH: Final = 64  # one descriptor a level stays open while a tree is looked through
MAX_EVENTS: Final = 10_000  # of one step; a tree that appears with more is told of as an overflow
_READ_BYTES: Final = 65_536

_ACCESS_LOST: Final = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_MODIFY, _ATTRIB, _CLOSE_WRITE = 0x2, 0x4, 0x8
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_UNMOUNT, _Q_OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_ONLYDIR, _EXCL_UNLINK, _ISDIR = 0x0100_0000, 0x0400_0000, 0x4000_0000
_MASK: Final = (
    _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
    | _ONLYDIR | _EXCL_UNLINK
)  # fmt: skip
_EVENT: Final = struct.Struct("=iIII")  # watch, mask, cookie, length of the name

_libc: Final = ctypes.CDLL(None, use_errno=True)

Parts = tuple[bytes, ...]
Told = FileEvent | WatchOverflow | WatchEnded


class WatchedTree:
    """open, then take as often as `fd` can be read, each in a worker thread under the user's identity; close."""

    def __init__(self, place: Place, recursive: bool) -> None:
        self._place = place
        self._recursive = recursive
        self.fd = -1
        self._paths: dict[int, Parts] = {}  # watch -> below the place
        self._watches: dict[Parts, int] = {}
        self._root = -1
        self._moving: tuple[int, Parts, bool] | None = None  # half of a move: cookie, from where, whether a directory
        self._told_full = False
        self.truncated = False

    @property
    def directories(self) -> int:
        return len(self._paths)

    @property
    def waits_for_half(self) -> bool:
        """Whether a thing has left and it is not known yet where it went: `settle` says that it is gone."""
        return self._moving is not None

    def open(self) -> None:
        """Raises NotADirectory, FileMissing, PermissionDenied, RateLimited, NotSupported."""
        with directory_at(self._place) as fd:
            self.fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self.fd < 0:
                number = ctypes.get_errno()
                if number in (errno.EMFILE, errno.ENFILE):
                    raise RateLimited("this machine has no room for another watch (fs.inotify.max_user_instances)")
                raise NotSupported(f"this kernel has no inotify: {os.strerror(number)}; list the directory instead")
            try:
                self._root = self._add(fd, ())
            except OSError as error:
                if error.errno == errno.ENOTDIR:
                    raise NotADirectory(f"{self._place.shown} is no directory") from None
                raise file_error(error, self._place.path) from None
            if self._root < 0:
                raise RateLimited("this machine has no room for another watch (fs.inotify.max_user_watches)")
            if self._recursive:
                self._look_through(fd, (), None)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def take(self) -> list[Told]:
        """What happened, in its order; the same thing several times in a row once."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        told: list[Told] = []
        at = 0
        while at < len(data):
            watch, mask, cookie, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            self._heard(watch, mask, cookie, name, told)
            if told and isinstance(told[-1], WatchEnded):
                break
        if len(told) > MAX_EVENTS:
            told = [WatchOverflow(reason="events", message="too much happened at once; list the directory again")]
        return told

    def settle(self) -> list[Told]:
        """The half of a move whose other half has not come: it went out of what is watched."""
        told: list[Told] = []
        self._lose_half(told)
        return told

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _heard(self, watch: int, mask: int, cookie: int, name: bytes, told: list[Told]) -> None:
        if mask & _Q_OVERFLOW:
            self._lose_half(told)
            told.append(WatchOverflow(reason="events", message="more happened than the kernel keeps; list it again"))
            self._catch_up()
            return
        directory = self._paths.get(watch)
        if directory is None:
            return
        if mask & _IGNORED:
            self._forget(watch, directory)
            if watch == self._root:
                told.append(WatchEnded(reason="deleted"))
            return
        if watch == self._root and mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT):
            reason = "moved" if mask & _MOVE_SELF else "unmounted" if mask & _UNMOUNT else "deleted"
            told.append(WatchEnded(reason=reason))  # type: ignore[arg-type]
            return
        if not name:
            return  # of a directory below, which its parent's watch tells of too
        path, is_directory = (*directory, name), bool(mask & _ISDIR)
        moving = self._moving
        if moving is not None and not (mask & _MOVED_TO and moving[0] == cookie):
            self._lose_half(told)
        if mask & _MOVED_FROM:
            self._moving = (cookie, path, is_directory)
        elif mask & _MOVED_TO and moving is not None and moving[0] == cookie:
            self._moving = None
            self._moved(moving[1], path, is_directory, told)
        elif mask & (_MOVED_TO | _CREATE):
            self._tell(told, FileCreated, path, is_directory)
            if is_directory and self._recursive:
                self._enter(path, told)
        elif mask & _DELETE:
            self._tell(told, FileDeleted, path, is_directory)
        elif mask & (_MODIFY | _CLOSE_WRITE):
            self._tell(told, FileModified, path, is_directory)
        elif mask & _ATTRIB:
            self._tell(told, FileAttributes, path, is_directory)

    def _tell(self, told: list[Told], kind: type[FileEvent], path: Parts, is_directory: bool) -> None:
        raw = self._raw(path)
        event = kind(path=raw.decode("utf-8", "replace"), is_directory=is_directory, path_base64=path_base64(raw))  # type: ignore[call-arg]
        if event not in told[-8:]:
            told.append(event)

    def _moved(self, source: Parts, target: Parts, is_directory: bool, told: list[Told]) -> None:
        raw, raw_source = self._raw(target), self._raw(source)
        told.append(FileMoved(
            path=raw.decode("utf-8", "replace"), is_directory=is_directory, path_base64=path_base64(raw),
            source=raw_source.decode("utf-8", "replace"), source_base64=path_base64(raw_source),
        ))  # fmt: skip
        if is_directory:
            for watch, parts in list(self._paths.items()):
                if parts[: len(source)] == source:
                    del self._watches[parts]
                    self._paths[watch] = moved = target + parts[len(source) :]
                    self._watches[moved] = watch

    def _lose_half(self, told: list[Told]) -> None:
        if self._moving is None:
            return
        (_, path, is_directory), self._moving = self._moving, None
        self._tell(told, FileDeleted, path, is_directory)
        if is_directory:
            for watch, parts in list(self._paths.items()):
                if parts[: len(path)] == path:
                    _libc.inotify_rm_watch(self.fd, watch)
                    self._forget(watch, parts)

    def _raw(self, parts: Parts) -> bytes:
        return self._place.path.rstrip(b"/") + b"/" + b"/".join(parts)

    # ── directories ─────────────────────────────────────────────────────────────────────────────────────────────

    def _add(self, fd: int, parts: Parts) -> int:
        """The watch; -1 where there is no room. Raises OSError."""
        if len(self._paths) >= MAX_DIRECTORIES and parts not in self._watches:
            return -1
        # By the descriptor that the walk opened, so that no name is followed twice (inotify takes only paths).
        watch: int = _libc.inotify_add_watch(self.fd, b"/proc/self/fd/%d" % fd, ctypes.c_uint32(_MASK))
        if watch < 0:
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.ENOMEM):
                return -1
            raise OSError(number, os.strerror(number))
        before = self._paths.get(watch)
        if before is not None:
            self._watches.pop(before, None)
        self._paths[watch] = parts
        self._watches[parts] = watch
        return watch

    def _forget(self, watch: int, parts: Parts) -> None:
        self._paths.pop(watch, None)
        if self._watches.get(parts) == watch:
            del self._watches[parts]

    def _enter(self, path: Parts, told: list[Told]) -> None:
        """Watches a directory that has appeared, and tells of what is in it already."""
        try:
            with directory_at(self._place, self._place.parts + path) as fd:
                if self._add(fd, path) < 0:
                    self._full(told)
                else:
                    self._look_through(fd, path, told)
        except (ExecutorError, OSError):  # gone or changed since: then its own events say so
            return

    def _look_through(self, fd: int, above: Parts, told: list[Told] | None) -> None:
        """Watches all directories below; `told` None: without telling of what is there."""
        if len(above) >= MAX_DEPTH:
            self._full(told)
            return
        try:
            readable = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        except OSError:
            return
        try:
            with os.scandir(readable) as scan:
                for entry in scan:
                    name = os.fsencode(entry.name)
                    path, is_directory = (*above, name), entry.is_dir(follow_symlinks=False)
                    if told is not None and len(told) <= MAX_EVENTS:
                        self._tell(told, FileCreated, path, is_directory)
                    if is_directory and not self._look_into(readable, name, path, told):
                        return
        except OSError:
            pass  # not ours to read on
        finally:
            os.close(readable)

    def _look_into(self, fd: int, name: bytes, path: Parts, told: list[Told] | None) -> bool:
        """False where there is no room for more."""
        try:
            inner = step_into(fd, name)
        except OSError:
            return True
        try:
            if self._add(inner, path) < 0:
                self._full(told)
                return False
            self._look_through(inner, path, told)
        except OSError as error:
            if error.errno not in _ACCESS_LOST:
                raise
        finally:
            os.close(inner)
        return True

    def _full(self, told: list[Told] | None) -> None:
        self.truncated = True
        if told is not None and not self._told_full:
            self._told_full = True
            bounds = f"{MAX_DIRECTORIES}, {MAX_DEPTH} deep"
            told.append(WatchOverflow(reason="directories", message=f"more directories than can be watched ({bounds})"))

    def _catch_up(self) -> None:
        """After lost events: directories may have appeared unseen."""
        if self._recursive:
            try:
                with directory_at(self._place) as fd:
                    self._look_through(fd, (), None)
            except (ExecutorError, OSError):
                return
