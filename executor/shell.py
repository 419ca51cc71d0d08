"""A session's shell: one bash (sh where bash is missing), what it is told, and what it reports.

It is an interactive shell without a terminal, since only an interactive one gives up what it runs, however deep, and
keeps all of its state when it is interrupted. It reads one line a command from a pipe of its own:

    ulimit -m MARK; NAME='value' . DIR/script <DIR/stdin >DIR/stdout 2>DIR/stderr; printf 'TOKEN $? $PWD' >DIR/report

- The caller's text is a file that the shell sources: no quoting, no limit on its length, and an unfinished quote or
  here-document ends with the file. Nothing of it ever stands in the line, and nothing of ours in its output.
- Redirections belong to the one `.` command, so whatever the text does to its descriptors is undone after it. What the
  shell keeps meanwhile is close-on-exec: no program inherits a descriptor of ours.
- The mark (see `executor.spawn_helper`) tells this command's processes from those of the shell's other ones.
- `\\command` gets round aliases and functions; a text that nonetheless takes away `command`, `printf` or the shell's
  ability to open files loses its shell (`_look`), never its caller's time.
- A report with another token than the current command's is an old one and ignored. A command could forge its own
  report: it would deceive nobody but its caller.

Giving up: ABANDON is trapped by the shell, which interrupts itself before its next command, whatever the one that it
waits for did with an interruption of its own, and even where the text has INT ignored or trapped (that trap is lost
then). A shell that interrupts itself so while it reads a line crashes, bash and dash both: hence the trap looks whether
a script is being sourced, and does nothing elsewhere. So ABANDON may come too early and is to be repeated."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import signal
import struct
import termios
import time
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from executor import tree
from executor.errors import ExecutorError, InvalidCwd, NotSupported, RateLimited, TooLarge
from executor.isolation import CommandUser
from executor.pipes import StdinWriter
from executor.process import Host
from executor.shellfiles import OUTPUTS, REPORTS, SCRIPT, STDIN, ShellFiles
from executor.spawn import STAGE_CHDIR, STAGE_FORK
from executor.wire import MAX_ARG_BYTES

log = logging.getLogger("executor.shell")

ABANDON: Final = 52  # a real-time signal in the middle of their range, that nobody uses
LOOK_SEC: Final = 0.3  # between two looks whether a shell that does not report still can
LAST_LOOK_SEC: Final = 1.0  # before it is ended: it may only be slow to get its turn
REPORT_BYTES: Final = 8192  # the longest report: it holds the working directory
_TICK_SEC: Final = 1 / os.sysconf("SC_CLK_TCK")
_QUIET: Final = (
    "\\command set +o history 2>/dev/null; \\command unset -v HISTFILE MAILCHECK 2>/dev/null; PS1='$ ' PS2='> '; "
)


class ShellEnd(msgspec.Struct, frozen=True):
    """How a shell ended: wait4(2)'s status and figures, these since its last report."""

    status: int | None  # None: nobody can say
    user_sec: float
    system_sec: float
    left: bool  # descendants remain


class Owner(Protocol):
    """Who has the shell."""

    def reported(self, code: int, user_sec: float, system_sec: float, left: bool) -> None:
        """The command has ended; `left`: children of the shell remain."""

    def shell_gone(self, shell: Shell, end: ShellEnd, begun: bool) -> None:
        """The shell has ended. `begun`: it had taken up the command that it was given last."""


class Shell:
    """A Job of the spawner's."""

    def __init__(self, host: Host, user: CommandUser, cwd: str, env: Mapping[str, str], owner: Owner) -> None:
        self.host = host
        self.user = user
        self.cwd = cwd  # after the last report
        self.seq = host.spawner.next_seq()
        self.pid = 0
        self.alive = False
        self.is_bash = os.path.basename(host.shell).startswith(b"bash")
        self.opened: asyncio.Future[None] = host.loop.create_future()
        self.files = ShellFiles(user)
        self.exited_already: asyncio.Future[None] = host.loop.create_future()
        self._start_cwd = cwd
        self._env = dict(env)
        self._owner = owner
        self._control: StdinWriter | None = None
        self._control_fd = -1
        self._line_bytes = 0
        self._heard = b""
        self._token = ""
        self._last_code = 0
        self._seen: tree.Seen | None = None
        self._stat_fd = self._children_fd = -1
        self._used = (0.0, 0.0)
        self._looking: asyncio.TimerHandle | None = None
        self._sent = False
        self._asks = 0
        self._came_back = False
        self._closed = False
        self._answers = False
        self._settled: asyncio.Future[None] | None = None
        self.is_unsettled = False  # it was told to give up, and may have ended its command by itself before it heard
        self.is_mute = False  # it could not report any more, and was ended for that

    def start(self) -> None:
        """Starts it; `opened` is done when it answers, or raises what kept it from that. Raises OSError, TooLarge."""
        env = self.host.environment(self.user, self._env)
        if any(len(entry) > MAX_ARG_BYTES for entry in env):
            raise TooLarge(f"an environment entry is over {MAX_ARG_BYTES} bytes", limit=MAX_ARG_BYTES)
        options = [b"--norc", b"--noprofile", b"--noediting", b"+H", b"-i"] if self.is_bash else [b"-i"]
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self._control, self._control_fd = StdinWriter(self.host.loop, write_end), write_end
        theirs = [read_end]
        try:
            theirs.append(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
            theirs.append(os.dup(theirs[-1]))
            stdin, stdout, stderr = theirs
            self.host.spawner.spawn(
                self, self.user, [self.host.shell, *options], env, os.fsencode(self._start_cwd), stdin, stdout,
                stderr, None,
            )  # fmt: skip
        except OSError:
            for fd in theirs:
                os.close(fd)
            raise
        self.host.loop.add_reader(self.files.reports, self._read_reports)
        self._token = secrets.token_hex(8)
        self._control.put(first_line(self.is_bash).encode() + self._report_line())

    # ── a command ───────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, text: str, env: Mapping[str, str], stdin: bytes | None, *, merged: bool, mark: int) -> None:
        """Gives it the next command; the owner hears of its end. Raises OSError where there is no space for it."""
        assert self._control is not None
        self.files.put_script(text.encode())
        if stdin is not None:
            self.files.put_stdin(stdin)
        self._token = secrets.token_hex(8)
        # A subshell costs a fork, so only for a text that may look at it. Under `set -e` there is no such code.
        code = self._last_code if "$?" in text else 0
        line = call_line(
            self.files.path, env, mark=mark if self.is_bash else None, has_stdin=stdin is not None, merged=merged,
            last_code=code,
        ) + self._report_line()  # fmt: skip
        self._line_bytes = len(line)
        self._asks, self._came_back = 0, False
        self._looking = self.host.loop.call_later(LOOK_SEC, self._look)
        self._control.put(line)
        self._sent = self._control.open

    def abandon(self) -> None:
        """Makes it give up the rest of its command, once the process that it waits for has ended, and report.

        To be repeated until it has reported: it may not have begun yet."""
        self._last_code = 0
        self.is_unsettled = True
        for number in (ABANDON, signal.SIGCONT):
            self.send(number)
        if not self._asks:
            self._ask()

    async def settle(self) -> None:
        """Returns when nothing that it was told before can befall its next command, or when it has ended."""
        if self._control is None or not self.alive:
            return
        self._settled = self.host.loop.create_future()
        self._token = secrets.token_hex(8)
        self._asks, self._came_back = 0, False
        self._ask()
        self._looking = self.host.loop.call_later(LOOK_SEC, self._look)
        await self._settled

    def send(self, number: int) -> None:
        """A signal to the shell alone."""
        if self._seen is not None and self.alive:
            tree.send(self._seen, number)

    def _ask(self) -> None:
        if self._control is not None:
            self._control.put(self._report_line())
            self._asks += 1

    def _report_line(self) -> bytes:
        words = f'\\command printf "%s\\\\0" "{self._token} $? ${{PWD-}}" >|{self.files.path}/{REPORTS}\n'
        return words.encode()

    def _look(self) -> None:
        """A shell that reads on has ended its command. One that was asked by then and still does not report cannot
        any more: it runs nothing (`set -n`), may not open files, or lost the builtins it needs. Asked twice, since an
        interrupted sh throws away what it has read ahead."""
        if self._came_back:
            self.is_mute = True
            log.warning("shell_mute", extra={"shell": self.pid})
            self.send(signal.SIGKILL)
            return
        if not self._asks or self._unread() == 0:
            if self._asks < 2:
                self._ask()
            else:
                self._came_back = True
        self._looking = self.host.loop.call_later(LAST_LOOK_SEC if self._came_back else LOOK_SEC, self._look)

    def _unread(self) -> int:
        """Bytes in the shell's pipe that it has not taken; -1 where that cannot be told."""
        if self._control is None or not self._control.open:
            return -1
        try:
            (count,) = struct.unpack("i", fcntl.ioctl(self._control_fd, termios.FIONREAD, bytes(4)))
        except OSError:
            return -1
        return int(count)

    # ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_reports(self) -> None:
        if self.files.reports < 0:
            return
        try:
            data = os.read(self.files.reports, 4096)
        except (BlockingIOError, InterruptedError):
            return
        *reports, self._heard = (self._heard + data).split(b"\0")
        if len(self._heard) > REPORT_BYTES:  # no shell of ours says so much
            self._heard = b""
        for report in reports:
            self._hear(report)

    def _hear(self, report: bytes) -> None:
        token, _, rest = report.partition(b" ")
        code, _, cwd = rest.partition(b" ")
        if token.decode("ascii", "replace") != self._token or not code.isdigit() or int(code[:4]) > 255:
            return
        self._token = ""  # only once
        self._last_code = int(code)
        self.cwd = cwd.decode("utf-8", "replace") or self.cwd
        self._stop_looking()
        try:
            self.files.drop_stdin()
        except OSError:  # a command that may take it away took it away
            pass
        if not self._answers:
            self._answers = True
            self._open_now()
        elif self._settled is not None:
            self._is_settled()
        else:
            user_sec, system_sec = self._use()
            self._owner.reported(self._last_code, user_sec, system_sec, self._has_children())

    def _open_now(self) -> None:
        """Its first report may be here before the spawner's word of its pid."""
        if self._answers and self.pid and not self.opened.done():
            self.opened.set_result(None)

    def _is_settled(self) -> None:
        self.is_unsettled = False
        settled, self._settled = self._settled, None
        if settled is not None and not settled.done():
            settled.set_result(None)

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _use(self) -> tuple[float, float]:
        """CPU seconds (user, system) of the shell and what it waited for, since the last call of this."""
        try:
            text = os.pread(self._stat_fd, 1024, 0)
            fields = [int(one) for one in text[text.rindex(b")") + 2 :].split()[11:15]]
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0
        before = self._used
        self._used = ((fields[0] + fields[2]) * _TICK_SEC, (fields[1] + fields[3]) * _TICK_SEC)
        return max(0.0, self._used[0] - before[0]), max(0.0, self._used[1] - before[1])

    def _has_children(self) -> bool:
        try:
            return bool(os.pread(self._children_fd, 64, 0).strip())
        except OSError:  # a kernel without CONFIG_PROC_CHILDREN
            return False

    # ── heard from the spawner ──────────────────────────────────────────────────────────────────────────────────

    def spawned(self, pid: int) -> None:
        self.pid = pid
        self.alive = True
        self._seen = tree.seen(pid)
        if self._closed:
            self.send(signal.SIGKILL)
            return
        try:
            self._stat_fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            self._children_fd = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass
        self._open_now()

    def failed(self, error: int, stage: int) -> None:
        why = os.strerror(error)
        if stage == STAGE_CHDIR:
            self._refuse(InvalidCwd(f"the working directory {self._start_cwd!r} cannot be entered: {why}"))
        elif stage == STAGE_FORK and error == errno.EAGAIN:
            self._refuse(RateLimited("the pod has as many processes as it may have"))
        else:
            self._refuse(NotSupported(f"the shell {os.fsdecode(self.host.shell)} cannot be run here: {why}"))

    def _refuse(self, error: ExecutorError) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # seen: who opened it awaits it, unless cancelled
        self._set_exited()

    def exited(self, status: int, user_sec: float, system_sec: float, _max_rss_kib: int, left: bool) -> None:
        since = (max(0.0, user_sec - self._used[0]), max(0.0, system_sec - self._used[1]))
        self._over(ShellEnd(status, *since, left))

    def lost(self) -> None:
        self._over(ShellEnd(None, 0.0, 0.0, True))

    def _over(self, end: ShellEnd) -> None:
        # What it reported before its end is still in the FIFO.
        self._read_reports()
        begun = self._sent and self._unread() < self._line_bytes
        self.alive = False
        if not self.opened.done():
            self._refuse(NotSupported(f"the shell {os.fsdecode(self.host.shell)} ended as it started"))
            return
        self._set_exited()
        self._is_settled()
        self._owner.shell_gone(self, end, begun)

    def _set_exited(self) -> None:
        if not self.exited_already.done():
            self.exited_already.set_result(None)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def hang_up(self) -> None:
        """The end of its input: it runs its EXIT trap and ends."""
        if self._control is not None:
            self._control.close()

    def close(self) -> None:
        self._closed = True
        self._stop_looking()
        if self.files.reports >= 0:
            self.host.loop.remove_reader(self.files.reports)
        self.files.close()
        self.hang_up()
        for fd in (self._stat_fd, self._children_fd):
            if fd >= 0:
                os.close(fd)
        self._stat_fd = self._children_fd = -1


def call_line(
    directory: str, env: Mapping[str, str], *, mark: int | None, has_stdin: bool, merged: bool, last_code: int = 0
) -> bytes:
    """What the shell is told to run the script, up to where it reports. Without a newline at its end."""
    parts = []
    if mark is not None:
        parts.append(f"\\command ulimit -S -m {mark}; ")
    if last_code:
        parts.append(f"(\\exit {last_code}); ")
    parts += [f"{name}={quoted(value)} " for name, value in env.items()]
    stdin = f"{directory}/{STDIN}" if has_stdin else os.devnull
    stderr = "&1" if merged else f"|{directory}/{OUTPUTS[1]}"
    parts.append(f"\\command . {directory}/{SCRIPT} <{stdin} >|{directory}/{OUTPUTS[0]} 2>{stderr}; ")
    return "".join(parts).encode()


def first_line(is_bash: bool) -> str:
    """The shell's first line: it is quiet, and gives up what it sources at ABANDON."""
    # No reserved words, which an alias could replace. Without BASH_SOURCE, sh shows by a saved descriptor that it
    # has redirected its input: it saves from 10 on, and allows nobody else to use these.
    sourcing = '[ -n "${BASH_SOURCE-}" ]' if is_bash else "[ -e /proc/self/fd/10 ]"
    steps = f'\\command {sourcing} && \\command trap - INT && \\command kill -INT "$$" || \\command :'
    return f"{_QUIET}\\command trap '{steps}' {ABANDON}\n"


def quoted(text: str) -> str:
    """The text as one word of a shell, whatever it holds but NUL."""
    return "'" + text.replace("'", "'\\''") + "'"


def ticks_now() -> int:
    """Clock ticks since boot, as proc_pid_stat(5) counts a process's start."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) / _TICK_SEC)
