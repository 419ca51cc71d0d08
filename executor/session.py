"""A session: one shell after another under one id, and the commands that they run, one at a time.

A command of a session is a Command whose process is the shell's: its output comes through FIFOs, its end through the
shell's report. Its time over, or interrupted, it is given up and the shell kept; only a shell that does not give way
within the grace is ended with it, and the answer says so."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import signal
import time
from collections import deque
from typing import Final, Literal

from executor import kernel, tree
from executor.errors import Conflict, ExecutorError, NoSpace, NotSupported, RateLimited
from executor.isolation import CommandUser
from executor.pipes import Pump
from executor.process import Command, Host, Outcome, rfc3339
from executor.shell import Shell, ShellEnd, ticks_now
from executor.wire import ExecRequest, Reason, ResourceUse, SessionInfo, SessionRequest

log = logging.getLogger("executor.session")

OPEN_SEC: Final = 20.0  # for a new shell to answer
MAX_WAITING: Final = 64  # commands of one session
KEPT_MARKS: Final = 4096  # of the latest commands, to find by them what they left behind
LAZY_PUMP_SEC: Final = 0.002  # a command that is over by then never has its FIFOs registered with the loop
SWEEP_SEC: Final = 0.05
INTERRUPT_SWEEPS: Final = 4
CANCELLED_CODE: Final = 128 + signal.SIGINT
HANG_UP_SEC: Final = 1.0  # for a shell's EXIT trap when its session is deleted


_OVER: Final = asyncio.Event()
_OVER.set()


class SessionCommand(Command):
    """One command of a session."""

    __slots__ = (
        "_interrupted_ones", "_interrupting", "_over", "_place", "_session", "_shell", "_since", "_spares_background",
        "fresh_shell", "shell_ended",
    )  # fmt: skip
    gets_leaf = False  # its process is the shell's, which goes on
    tells_more = True

    def __init__(self, session: Session, request: ExecRequest, id: str, *, streamed: bool) -> None:
        super().__init__(session.host, request, id, session.user, session.cwd, background=False, streamed=streamed)
        self.shell_text = None  # it says nothing of whether a new shell can be run
        self.shell_ended = self.fresh_shell = False
        self._session: Session | None = session  # and the shell: until it is over, as its outcome is kept for longer
        self._shell: Shell | None = None
        self._place = (0, 0)  # the shell's pid and mark
        self._since = 0
        self._spares_background = False
        self._interrupting: asyncio.Task[None] | None = None
        self._interrupted_ones: frozenset[tuple[int, int]] = frozenset()  # pid and start
        self._over = asyncio.Event()  # reported, or the shell gone

    def start(self) -> None:
        """Takes its place in the session's queue. Raises RateLimited, Conflict."""
        assert self._session is not None
        self._session.enqueue(self)

    def begin(self, shell: Shell, *, fresh: bool) -> None:
        """Gives it to the shell. Raises OSError; nothing has begun then."""
        request, loop = self.request, self.host.loop
        stdin = None
        if request.stdin is not None:
            stdin = request.stdin.encode()
        elif request.stdin_base64 is not None:
            stdin = base64.b64decode(request.stdin_base64)
        assert isinstance(request.command, str)
        self._since = ticks_now()  # before the shell can start anything
        try:
            for stream in range(1 if request.merge_output else 2):
                fd = shell.files.open_output(stream)
                self.pumps.append(Pump(self.host.readers, fd, self.logs[stream], self))
            shell.run(request.command, request.env, stdin, merged=request.merge_output, mark=self.seq)
        except OSError:
            for pump in self.pumps:
                pump.close()
            self.pumps.clear()
            raise
        self._shell, self.pid, self.fresh_shell = shell, shell.pid, fresh
        self._place = (shell.pid, shell.seq)
        self.started_at, self.began = time.time(), time.monotonic()
        if self.streamed or request.no_output_timeout_sec is not None:
            self._arm_pumps()
        else:
            self._timers["pumps"] = loop.call_later(LAZY_PUMP_SEC, self._arm_pumps)
        self._start_clocks()
        self._launch()

    def reported(self, code: int, user_sec: float, system_sec: float, left: bool) -> None:
        """The shell says that it has ended."""
        self._over.set()
        by_signal = 128 < code <= 128 + 64 and (self._ending is not None or code - 128 == self._sent)
        # The shell tells a death by a signal as any other code: only one that we sent is known to be one.
        self.exited(code - 128 if by_signal else code << 8, user_sec, system_sec, 0, left)

    def shell_gone(self, end: ShellEnd) -> None:
        self.shell_ended = True
        self._over.set()
        if end.status is None:
            self.lost()
        else:
            self.exited(end.status, end.user_sec, end.system_sec, 0, end.left)

    def let_go(self) -> None:
        """It is over: what is kept for its outcome holds no shell, ended or not, and no session."""
        self._shell = self._session = None
        self._over = _OVER

    def refuse(self, error: ExecutorError) -> None:
        """It never began."""
        self._cancel_timers()
        self._refuse(error)

    def interrupt(self, *, escalate: bool) -> None:
        """As Ctrl-C: what it runs in the foreground gets INT, and the rest of it is given up. With `escalate`, more
        follows after the grace."""
        if self._status is None:
            self._sent = signal.SIGINT
        if escalate:
            self._spares_background = self._spares_background or self._killing is None
            self.end("cancelled")
        elif self._killing is None and self._interrupting is None:
            self._interrupting = self.host.loop.create_task(self._only_interrupt(), name=f"interrupt-{self.id}")
            self._interrupting.add_done_callback(self._interrupted)

    def _interrupted(self, _done: asyncio.Task[None]) -> None:
        self._interrupting = None

    # ── a Command's ways, in a shell that is to be kept ─────────────────────────────────────────────────────────

    async def _kill_tree(self) -> None:
        if not self.is_launched and self._session is not None and self._session.withdraw(self):
            self._killing = None
            self._finish(Outcome(
                exit_code=CANCELLED_CODE, signal=None, reason=self._ending or "cancelled",
                message="it never began: it was still waiting for earlier commands of its session",
                descendants_left=False, duration_sec=0.0, usage=ResourceUse(0.0, 0.0, 0),
            ))  # fmt: skip
            return
        if not self.is_launched:
            await asyncio.wait([self.launched])
        if self._status is None and self.outcome is None and self.error is None:
            await self._make_way()
        if self._spares_background and not self.shell_ended:
            self._killing = None
            if self.outcome is None and self._status is not None and "drain" not in self._timers:
                self._conclude()
            return
        await super()._kill_tree()

    async def _only_interrupt(self) -> None:
        for _ in range(INTERRUPT_SWEEPS):
            await self._give_up()
            await self._wait_over(SWEEP_SEC)

    async def _make_way(self) -> None:
        """INT, halfway through the grace TERM, at its end KILL and the end of the shell."""
        loop = self.host.loop
        began, grace = loop.time(), self.request.grace_sec
        is_termed = False
        while not self._over.is_set() and not self._kill_now.is_set():
            left = began + grace - loop.time()
            if left <= 0:
                break
            await self._give_up()
            if not is_termed and left < grace / 2:
                is_termed = True
                await self._signal_tree(signal.SIGTERM)
            await self._wait_over(min(SWEEP_SEC, left))
        if not self._over.is_set():
            assert self._shell is not None
            assert self._session is not None
            log.info("shell_ended_with_command", extra={"session": self._session.id, "command": self.id})
            self._kill_now.set()
            self._shell.send(signal.SIGKILL)
            await self._wait_over(OPEN_SEC)

    async def _wait_over(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            pass

    async def _give_up(self) -> None:
        """The shell first: it must not run on when it sees its child end. Each process is interrupted once."""
        if self._shell is None or self._over.is_set():
            return
        self._shell.abandon()
        await self.host.spawner.sweeps.signal(self._uninterrupted, signal.SIGINT)

    def _uninterrupted(self, at: tree.Snapshot) -> dict[int, tree.Seen]:
        found = {pid: one for pid, one in self._members(at).items() if (pid, one.start) not in self._interrupted_ones}
        self._interrupted_ones |= {(pid, one.start) for pid, one in found.items()}
        return found

    def _members(self, at: tree.Snapshot) -> dict[int, tree.Seen]:
        pid, mark = self._place
        return tree.call_members(at, self.seq, pid, mark, self._since) if pid else {}

    async def send_signal(self, number: int, to: Literal["leader", "tree"]) -> None:
        """To what the command has started; never to the shell, which is the session's."""
        if self.is_launched:
            if self._status is None:
                self._sent = number
            await self._signal_tree(number)

    def _why(self, code: int, number: int) -> tuple[Reason, str | None]:
        reason, message = super()._why(code, number)
        if self.shell_ended:
            gone = "the session's shell has ended, its state is lost, and the next command gets a fresh one"
            if self._shell is not None and self._shell.is_mute:
                gone = f"the text took away what the shell reports its end with; {gone}"
            message = gone if message is None else f"{message}; {gone}"
        return reason, message

    def _facts(self, outcome: Outcome) -> dict[str, object]:
        return super()._facts(outcome) | {"ended": self.shell_ended, "fresh_shell": self.fresh_shell}


class Session:
    """A session from its creation until it is deleted, whatever becomes of its shells."""

    def __init__(self, host: Host, request: SessionRequest, id: str, user: CommandUser, cwd: str) -> None:
        self.host = host
        self.id = id
        self.request = request
        self.user = user
        self.cwd = cwd
        self.shell: Shell | None = None
        self.current: SessionCommand | None = None
        self.commands = 0
        self.started_at = time.time()
        self._queue: deque[SessionCommand] = deque()
        self._preparing: asyncio.Task[None] | None = None  # the shell for the next command
        self._last_end: tuple[int, str | None] | None = None
        self._is_untold = False  # the last shell ended between two commands, and no caller knows yet
        self._marks: deque[int] = deque(maxlen=KEPT_MARKS)
        self._closing = False

    async def open(self) -> None:
        """A shell that answers. Raises InvalidCwd, NotSupported, RateLimited, TooLarge, NoSpace."""
        shell: Shell | None = None
        try:
            shell = Shell(self.host, self.user, self.cwd, self.request.env, self)
            shell.start()
            async with asyncio.timeout(OPEN_SEC):
                await asyncio.shield(shell.opened)
            if not shell.alive:
                raise NotSupported(f"the shell {os.fsdecode(self.host.shell)} ended as it started")
        except BaseException as why:
            if shell is not None:
                shell.send(signal.SIGKILL)
                shell.close()
            if isinstance(why, TimeoutError):
                raise NotSupported(f"the shell did not answer within {OPEN_SEC:.0f} s") from why
            if isinstance(why, OSError):
                raise _storage_error(why) from why
            raise
        self.shell = shell
        self.started_at = time.time()
        self._marks.append(shell.seq)

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, command: SessionCommand) -> None:
        """`advance` begins it when it is its turn. Raises RateLimited; Conflict, once, where the shell was ended
        between two commands."""
        if self._closing:
            raise Conflict("the session is being deleted; nothing was run")
        if self._is_untold:
            self._is_untold = False
            raise Conflict(self._said_of_end(), **self._end_details())
        if len(self._queue) >= MAX_WAITING:
            raise RateLimited(f"{MAX_WAITING} commands wait for this session already", limit=MAX_WAITING)
        self._queue.append(command)

    def withdraw(self, command: SessionCommand) -> bool:
        """Whether it was still waiting, and now is not any more."""
        if command not in self._queue:
            return False
        self._queue.remove(command)
        return True

    def advance(self) -> None:
        """Begins the next command where none runs."""
        while self.current is None and self._queue and self._preparing is None and not self._closing:
            if self.shell is None:
                self._preparing = self.host.loop.create_task(self._reopen(), name=f"session-{self.id}")
                return
            self._begin(self._queue.popleft(), self.shell, fresh=False)

    def _begin(self, command: SessionCommand, shell: Shell, *, fresh: bool) -> None:
        self.current = command
        try:
            command.begin(shell, fresh=fresh)
        except OSError as why:
            self.current = None
            command.refuse(_storage_error(why))
            if isinstance(why, FileNotFoundError):
                self._replace(shell)
            return
        self._marks.append(command.seq)
        self.commands += 1
        command.ended.add_done_callback(lambda _ended: self._command_over(command))

    async def _reopen(self) -> None:
        error: ExecutorError | None = None
        try:
            await self.open()
        except ExecutorError as why:
            error = why
        except Exception:
            log.exception("session_failed", extra={"session": self.id})
            error = ExecutorError("the executor failed to start a new shell; its log has the details")
        finally:
            self._preparing = None
        self._is_untold = False
        if self._queue:
            command = self._queue.popleft()
            if error is not None:
                command.refuse(error)
            elif self.shell is not None:
                self._begin(command, self.shell, fresh=True)
        self.advance()

    def _command_over(self, command: SessionCommand) -> None:
        if self.current is command:
            self.current = None
            self._renew_outputs(command)
            command.let_go()
            if self.shell is not None and self.shell.is_unsettled:
                self._preparing = self.host.loop.create_task(self._settle(self.shell), name=f"settle-{self.id}")
            else:
                self.advance()

    async def _settle(self, shell: Shell) -> None:
        try:
            await shell.settle()
        finally:
            self._preparing = None
        self.advance()

    def _renew_outputs(self, command: SessionCommand) -> None:
        if self.shell is None:
            return
        try:
            for stream, pump in enumerate(command.pumps):
                if not pump.eof:
                    self.shell.files.renew_output(stream)
        except OSError as why:  # its files are gone, or there is no space for new ones: not to be used any more
            log.warning("session_files_lost", extra={"session": self.id, "errno": why.errno})
            self._replace(self.shell)

    def _replace(self, shell: Shell) -> None:
        """Drops a shell that cannot be used any more: the next command gets another one."""
        shell.send(signal.SIGKILL)
        self.shell = None
        self._last_end = (128 + signal.SIGKILL, "SIGKILL")

    # ── heard from the shell ────────────────────────────────────────────────────────────────────────────────────

    def reported(self, code: int, user_sec: float, system_sec: float, left: bool) -> None:
        if self.current is not None:
            self.current.reported(code, user_sec, system_sec, left)

    def shell_gone(self, shell: Shell, end: ShellEnd, begun: bool) -> None:
        shell.close()
        if self.shell is not shell:
            return
        self.shell = None
        status = end.status if end.status is not None else signal.SIGKILL
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        self._last_end = (code, kernel.signal_name(number) if number else None)
        log.info("shell_ended", extra={"session": self.id, "exit_code": code})
        command = self.current
        if command is not None and not command.exited_already:
            if begun:
                command.shell_gone(end)
                return
            command.refuse(Conflict(self._said_of_end(), **self._end_details()))
        elif command is None or not command.shell_ended:
            self._is_untold = True

    def _said_of_end(self) -> str:
        assert self._last_end is not None
        code, name = self._last_end
        how = f"was ended by {name}" if name is not None else f"exited with {code}"
        return (
            f"the shell of session {self.id} {how} since its last command; its state is lost and nothing was run. "
            "The next command gets a fresh shell"
        )

    def _end_details(self) -> dict[str, object]:
        assert self._last_end is not None
        return {"ended": True, "exit_code": self._last_end[0], "signal": self._last_end[1]}

    # ── what it tells, and its end ──────────────────────────────────────────────────────────────────────────────

    def info(self) -> SessionInfo:
        shell = self.shell
        return SessionInfo(
            id=self.id, state="alive" if shell is not None else "dead", shell=os.fsdecode(self.host.shell),
            pid=None if shell is None else shell.pid, user=self.user.name, started_at=rfc3339(self.started_at),
            cwd=self.cwd if shell is None else shell.cwd, busy=self.current is not None, waiting=len(self._queue),
            commands=self.commands, exit_code=None if self._last_end is None else self._last_end[0],
            signal=None if self._last_end is None else self._last_end[1],
        )  # fmt: skip

    async def close(self, *, kill_descendants: bool) -> None:
        """Ends the shell and its running command; with `kill_descendants` also what earlier commands left."""
        self._closing = True
        for command in list(self._queue):
            command.end("cancelled")
        if self._preparing is not None:
            await asyncio.wait([self._preparing])
        shell = self.shell
        if self.current is not None:
            self.current.end("cancelled", at_once=True)
            await asyncio.wait([self.current.ended])
        if kill_descendants:
            # While the shell lives, the session that it leads cannot be another's.
            leader = shell.pid if shell is not None and shell.alive else 0
            marks = frozenset(self._marks)
            await self.host.spawner.sweeps.signal(lambda at: tree.session_members(at, marks, leader), signal.SIGKILL)
        if shell is not None and shell.alive:
            shell.hang_up()
            await asyncio.wait([shell.exited_already], timeout=HANG_UP_SEC)
            shell.send(signal.SIGKILL)
            await asyncio.wait([shell.exited_already], timeout=OPEN_SEC)

    def abort(self) -> None:
        """At the executor's end: the spawner ends the processes."""
        self._closing = True
        if self._preparing is not None:
            self._preparing.cancel()
        if self.shell is not None:
            self.shell.close()


def _storage_error(why: OSError) -> ExecutorError:
    if kernel.is_space_error(why):
        return NoSpace("no space is left in the pod for the session's files; nothing was run")
    if isinstance(why, FileNotFoundError):
        return Conflict("the session's files were removed, so its shell is ended; the next command gets a fresh one")
    return RateLimited(f"no descriptors or memory left for the session: {why.strerror}. Nothing was run")
