"""What a session's shell and the executor share in the file system: FIFOs for output and reports, and the script.

A running shell cannot be handed descriptors, but it can open paths. Each output FIFO is used again only after all who
wrote to it have closed it: it is then as empty and as unconnected as a new pipe. One that a background job still holds
is unlinked, and the next command gets another under its name. So nothing that an earlier command left behind can write
into a later one's answer.

The directory belongs to the executor: where commands run as another user, none can replace what is in it. The files
are the command user's alone. Everything is opened relative to the directory, never through a link, never blocking."""

from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import tempfile
from typing import ClassVar, Final

from executor.isolation import CommandUser

REPORTS: Final = "report"
SCRIPT: Final = "script"
STDIN: Final = "stdin"
OUTPUTS: Final = ("stdout", "stderr")
# Memory first: a full disk must not keep sessions from working.
_PLACES: Final = ("/dev/shm", None)
_READ_END: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE_END: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_BOTH_ENDS: Final = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW_FILE: Final = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class ShellFiles:
    """Raises OSError wherever the file system does."""

    # A FIFO's next reader is told at once of the end of its last writer, who was another reader's: so under gVisor.
    _fifos_remember: ClassVar[bool | None] = None

    def __init__(self, user: CommandUser) -> None:
        self._user = user
        self.path = _make_directory()
        self._directory = self.reports = self._script = -1
        self._script_bytes = 0
        self._has_stdin = False
        try:
            if user.uid != os.geteuid():
                os.chmod(self.path, 0o711)
            self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            for name in (REPORTS, *OUTPUTS):
                self._make_fifo(name)
            # Both ends: the shell's opening never waits for us, and its closing is never an end.
            self.reports = self._open_fifo(REPORTS, _BOTH_ENDS)
            self._script = self._make_file(SCRIPT)
            if ShellFiles._fifos_remember is None:
                ShellFiles._fifos_remember = self._ask_a_used_fifo(OUTPUTS[0])
        except BaseException:
            self.close()
            raise

    def open_output(self, stream: int) -> int:
        """A new read end for the next command's output. Open it before the shell opens the other one."""
        if ShellFiles._fifos_remember:
            self.renew_output(stream)
        return self._open_fifo(OUTPUTS[stream], _READ_END)

    def renew_output(self, stream: int) -> None:
        """The FIFO is still held by somebody: the next command gets another one."""
        os.unlink(OUTPUTS[stream], dir_fd=self._directory)
        self._make_fifo(OUTPUTS[stream])

    def put_script(self, text: bytes) -> None:
        _write(self._script, text)
        if len(text) < self._script_bytes:
            os.ftruncate(self._script, len(text))
        self._script_bytes = len(text)

    def put_stdin(self, data: bytes) -> None:
        """A new file each time: a job of an earlier command may still hold the last one."""
        self.drop_stdin()
        fd = self._make_file(STDIN)
        self._has_stdin = True
        try:
            _write(fd, data)
        finally:
            os.close(fd)

    def drop_stdin(self) -> None:
        if self._has_stdin:
            self._has_stdin = False
            os.unlink(STDIN, dir_fd=self._directory)

    def close(self) -> None:
        for fd in (self._directory, self.reports, self._script):
            if fd >= 0:
                os.close(fd)
        self._directory = self.reports = self._script = -1
        shutil.rmtree(self.path, ignore_errors=True)

    def _make_fifo(self, name: str) -> None:
        os.mkfifo(name, 0o600, dir_fd=self._directory)
        if self._user.uid != os.geteuid():
            os.chown(name, self._user.uid, self._user.gid, dir_fd=self._directory, follow_symlinks=False)

    def _open_fifo(self, name: str, flags: int) -> int:
        fd = os.open(name, flags, dir_fd=self._directory)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a FIFO any more", name)
        return fd

    def _ask_a_used_fifo(self, name: str) -> bool:
        """Whether a reader that has never had a writer hears of an end, where an earlier one had a writer."""
        used = self._open_fifo(name, _READ_END)
        try:
            os.close(self._open_fifo(name, _WRITE_END))
        finally:
            os.close(used)
        reader = self._open_fifo(name, _READ_END)
        try:
            poll = select.poll()
            poll.register(reader, select.POLLIN)
            return bool(poll.poll(0))
        finally:
            os.close(reader)

    def _make_file(self, name: str) -> int:
        fd = os.open(name, _NEW_FILE, 0o600, dir_fd=self._directory)
        try:
            if self._user.uid != os.geteuid():
                os.fchown(fd, self._user.uid, self._user.gid)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _make_directory() -> str:
    for place in _PLACES[:-1]:
        try:
            return tempfile.mkdtemp(prefix="sojourn-", dir=place)
        except OSError:
            continue
    return tempfile.mkdtemp(prefix="sojourn-", dir=_PLACES[-1])


def _write(fd: int, data: bytes) -> None:
    view, at = memoryview(data), 0
    while at < len(data):
        at += os.pwrite(fd, view[at:], at)
