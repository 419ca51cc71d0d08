"""One regular file held open for a reader: it stays whole for it, whatever is renamed over its name meanwhile."""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
from dataclasses import dataclass
from typing import Final

from executor.errors import NotAFile
from executor.filetree import entry_of, type_of
from executor.safepath import Place, file_error, parent_of
from executor.wire import FileEntry

SEND_BYTES: Final = 8 << 20  # of one step, after which other files have their turn
FULL_MS: Final = 5  # a thread waits so long for room; a reader that is slower is waited for without one


@dataclass(frozen=True)
class FileFacts:
    entry: FileEntry
    mtime: float  # seconds since 1970

    @property
    def etag(self) -> str:
        return self.entry.etag or ""


class Download:
    """begin, then read or send as often as needed; close at any time and from any thread.

    Each holds the lock meanwhile: a close that a cancelled caller sends comes after the step still under way, which
    would else read from whatever got the descriptor's number next."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._fd = -1
        self._socket = -1
        self._over = False

    def begin(self) -> FileFacts:
        """Raises NotAFile for what has no content, InvalidPath for a link, FileMissing, PermissionDenied."""
        if self._place.is_root:
            raise NotAFile(f"{self._place.shown} is a directory", type="directory")
        with self._lock, parent_of(self._place) as (parent, name):
            try:
                self._refuse_unless_file(os.stat(name, dir_fd=parent, follow_symlinks=False))
                # It may be another thing by now: O_NONBLOCK, as the open of a FIFO would wait for a writer.
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
                fd = os.open(name, flags, dir_fd=parent)
            except OSError as error:
                raise file_error(error, self._place.path) from None
            try:
                status = os.fstat(fd)
                self._refuse_unless_file(status)
            except BaseException:
                os.close(fd)
                raise
            if self._over:
                os.close(fd)
            else:
                self._fd = fd
            return FileFacts(entry_of(status, self._place.path), status.st_mtime)

    def read(self, offset: int, count: int) -> bytes:
        """At most `count` bytes from `offset` on; b"" at or past the end, and after the close."""
        with self._lock:
            if self._over:
                return b""
            try:
                return os.pread(self._fd, count, offset)
            except OSError as error:
                raise file_error(error, self._place.path) from None

    def aim(self, socket: int) -> None:
        """Takes over the descriptor of a non-blocking socket, which `send` is to write to."""
        with self._lock:
            self._socket = socket

    def send(self, offset: int, count: int) -> tuple[int, bool]:
        """Sends at most `count` bytes from `offset` on; (bytes sent, whether the socket takes no more for now). Neither
        at the end, after the close, and where the kernel cannot send this file. Raises ConnectionError."""
        sent = 0
        with self._lock:
            while sent < min(count, SEND_BYTES) and not self._over:
                try:
                    step = os.sendfile(self._socket, self._fd, offset + sent, min(count, SEND_BYTES) - sent)
                except BlockingIOError:
                    room = select.poll()
                    room.register(self._socket, select.POLLOUT)
                    if not room.poll(FULL_MS):
                        return sent, True
                    continue
                except ConnectionError:
                    raise
                except OSError:
                    break
                if not step:
                    break
                sent += step
        return sent, False

    def close(self) -> None:
        with self._lock:
            self._over = True
            for fd in (self._fd, self._socket):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._socket = -1

    def _refuse_unless_file(self, status: os.stat_result) -> None:
        if stat.S_ISLNK(status.st_mode):
            raise file_error(OSError(errno.ELOOP, ""), self._place.path)
        if not stat.S_ISREG(status.st_mode):
            kind = type_of(status)
            raise NotAFile(f"{self._place.shown} has no content to read: its type is {kind}", type=kind)
