"""Terminals: a process on a pseudo-terminal that outlives the connections to it.

The process is a Command, whose one output is the terminal's. It is started through `sh`, which as leader of a new
session opens the terminal and so makes it the controlling one (tty_ioctl(4)), then becomes the process proper."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import signal
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from executor.budget import MemoryBudget
from executor.config import ExecutorConfig
from executor.errors import IdempotencyMismatch, InvalidRequest, NotFound, RateLimited, ShuttingDown
from executor.follow import Follower
from executor.isolation import CommandUser, Users
from executor.output import OutputLog, Spill
from executor.pipes import Pump, StdinWriter
from executor.process import Command
from executor.processes import Processes
from executor.pty import end_of_input, open_pty, set_size
from executor.spawn import Spawner
from executor.wire import ExecRequest, MiB, TerminalInfo, TerminalRequest, bad_field, bad_size

log = logging.getLogger("executor.terminals")

MAX_TERMINALS: Final = 64  # living at once
MAX_CONNECTIONS: Final = 32  # to one terminal
SCROLLBACK_BYTES: Final = MiB  # kept of a terminal's output, for whoever attaches
REPLAY_BYTES: Final = 256 << 10  # of it, for a connection that names no offset
WINDOW_BYTES: Final = 128 << 10  # less than a command's: after Ctrl-C this much is still to be shown
KEEP_SEC: Final = 3600.0  # an ended terminal's outcome and output
KEEP_COUNT: Final = 200
KEEP_OUTPUT_BYTES: Final = 16 * MiB  # of ended terminals, all together; the oldest are cut down first
CUT_BYTES: Final = 64 << 10
HANGUP_GRACE_SEC: Final = 1.0
TERM: Final = "xterm-256color"
# "$0" is the terminal, "$@" the command; its output is on the terminal already, and so are the shell's own words
_ENTER: Final = b'exec "$@" 0<>"$0"'

_ENCODER: Final = msgspec.json.Encoder(order="sorted")


class TerminalCommand(Command):
    """A command whose standard input, output and errors are one terminal."""

    window_bytes = WINDOW_BYTES
    own_session = True  # only a session's leader can have a controlling terminal

    def __init__(self, host: Terminals, request: ExecRequest, id: str, user: CommandUser, cwd: str) -> None:
        super().__init__(host, request, id, user, cwd, background=True, streamed=True)
        self.logs = (OutputLog(0, SCROLLBACK_BYTES), OutputLog(0, 0))
        self._terminals = host
        self._master = self._slave = -1
        self._path = ""

    def open(self, cols: int, rows: int) -> None:
        """Opens the terminal; `start` then runs the command on it. Raises NotSupported, OSError."""
        self._master, self._slave, self._path = open_pty(self.user.uid, cols, rows)

    def resize(self, cols: int, rows: int) -> None:
        if self._master >= 0:
            set_size(self._master, cols, rows)

    async def type(self, data: bytes) -> None:
        """Returns once a program that does not read has room again."""
        if self.stdin is not None and self.outcome is None:
            self._terminals.traffic()
            await self.stdin.write(data)

    async def type_end(self) -> None:
        if self._master >= 0:
            await self.type(end_of_input(self._master))

    # ── a Command's ways, on a terminal ─────────────────────────────────────────────────────────────────────────

    def _argv(self) -> tuple[list[bytes], bytes | None]:
        program = [text.encode() for text in self.request.command]
        return [self._terminals.enter_shell, b"-c", _ENTER, self._path.encode(), *program], None

    def _stdin(self, theirs: list[int]) -> int | None:
        self.stdin = StdinWriter(self.host.loop, os.dup(self._master))
        return self._own_slave(theirs)

    def _output_pipe(self, stream: int, theirs: list[int]) -> int:
        self.pumps.append(Pump(self.host.readers, os.dup(self._master), self.logs[stream], self))
        return self._own_slave(theirs)

    def _own_slave(self, theirs: list[int]) -> int:
        theirs.append(os.dup(self._slave))
        return theirs[-1]

    def spill_to_disk(self) -> None:
        """Never: a terminal's scrollback is bounded, older output is a gap."""

    def output_came(self, pump: Pump) -> None:
        self._terminals.traffic()
        super().output_came(pump)

    def exited(self, status: int, user_sec: float, system_sec: float, max_rss_kib: int, left: bool) -> None:
        # Ours kept the terminal alive for programs that close it and open it again. Without it the master's end of
        # output is seen at once, where no descendant holds the terminal.
        self._close_slave()
        super().exited(status, user_sec, system_sec, max_rss_kib, left)

    def _settle(self) -> None:
        for pump in self.pumps:  # the kernel has hung up: descendants that hold the terminal cannot write to it
            pump.close()
        self.release()
        super()._settle()

    def release(self) -> None:
        """Closes our descriptors of the terminal."""
        self._close_slave()
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def _close_slave(self) -> None:
        if self._slave >= 0:
            os.close(self._slave)
            self._slave = -1


class Attachment:
    """One connection's place at a terminal."""

    def __init__(self, terminal: Terminal, follower: Follower, controls: bool) -> None:
        self.terminal = terminal
        self.follower = follower
        self.controls = controls
        self.taken = asyncio.Event()  # another connection controls the terminal now

    async def until_taken(self) -> None:
        await self.taken.wait()

    def close(self) -> None:
        self.follower.close()
        self.terminal.attachments.discard(self)
        if self.terminal.controller is self:
            self.terminal.controller = None


class Terminal:
    def __init__(self, command: TerminalCommand, shown: str | list[str], cols: int, rows: int) -> None:
        self.command = command
        self.shown = shown
        self.cols = cols
        self.rows = rows
        self.controller: Attachment | None = None
        self.attachments: set[Attachment] = set()

    @property
    def id(self) -> str:
        return self.command.id

    def check_room(self) -> None:
        """Raises RateLimited."""
        if len(self.attachments) >= MAX_CONNECTIONS:
            raise RateLimited(f"terminal {self.id} has {MAX_CONNECTIONS} connections, as many as may be")

    def attach(self, offset: int | None, *, control: bool) -> Attachment:
        """From `offset` of the output on; None: from a screen or several before its end. Who takes control takes it
        from whom had it."""
        output = self.command.logs[0]
        if offset is None:
            offset = max(output.tail_start, output.end - REPLAY_BYTES)
        if control and self.controller is not None:
            self.controller.taken.set()
            self.controller.follower.close()
        follower = Follower(self.command, min(offset, output.end), 0, only=0, caller=control)
        attachment = Attachment(self, follower, control)
        if control:
            self.controller = attachment
            self.command.caller_read()  # what the last one held back may not be behind any more
        self.attachments.add(attachment)
        return attachment

    def resize(self, cols: int, rows: int) -> None:
        """Raises InvalidRequest, the size unchanged."""
        bad = bad_size(cols, rows)
        if bad is not None:
            raise InvalidRequest(f"{bad[0]} {bad[1]}", field=bad[0])
        self.command.resize(cols, rows)
        self.cols, self.rows = cols, rows

    def info(self) -> TerminalInfo:
        state = self.command.info()
        return TerminalInfo(
            id=self.id, pid=state.pid, state=state.state, command=self.shown, cols=self.cols, rows=self.rows,
            started_at=state.started_at, exit_code=state.exit_code, signal=state.signal, reason=state.reason,
            message=state.message, descendants_left=state.descendants_left, output_bytes=state.stdout_bytes,
            kept_from=self.command.logs[0].tail_start, connections=len(self.attachments),
            controlled=self.controller is not None,
        )  # fmt: skip


class Terminals:
    """All terminals by their ids, and the Host of their commands."""

    def __init__(self, config: ExecutorConfig, users: Users, processes: Processes, traffic: Callable[[], None]) -> None:
        self._config = config
        self._users = users
        self._processes = processes
        self.traffic = traffic  # called at input and output: what renews the lease, open connections do not
        self.loop = processes.loop
        self.spawner: Spawner = processes.spawner
        self.turns = processes.turns
        self.readers = processes.readers
        self.shell = processes.shell
        self.enter_shell = os.fsencode(shutil.which("sh") or "/bin/sh")
        self.closing = False
        self._terminals: dict[str, Terminal] = {}
        self._fingerprints: dict[str, bytes] = {}
        self._ended: OrderedDict[str, Terminal] = OrderedDict()

    @property
    def living(self) -> int:
        return len(self._terminals) - len(self._ended)

    def create(self, request: TerminalRequest) -> tuple[Terminal, bool]:
        """(the terminal, whether it was there already under its id). Raises what `request` makes impossible."""
        shell = os.fsdecode(self.shell)
        argv: list[str] = [shell, "-i"]
        if isinstance(request.command, str):
            argv = [shell, "-c", request.command]
        elif request.command is not None:
            argv = request.command
        program = ExecRequest(
            command=argv, cwd=request.cwd, env={"TERM": TERM} | request.env, user=request.user, id=request.id,
            merge_output=True, grace_sec=HANGUP_GRACE_SEC,
        )  # fmt: skip
        bad = bad_field(program) or bad_size(request.cols, request.rows)
        if bad is None and isinstance(request.command, str) and not request.command.strip():
            bad = "command", "is empty"
        if bad is not None:
            raise InvalidRequest(f"{bad[0]} {bad[1]}", field=bad[0])
        fingerprint = hashlib.blake2b(_ENCODER.encode(request), digest_size=16).digest()
        if request.id is not None and request.id in self._terminals:
            if self._fingerprints[request.id] != fingerprint:
                raise IdempotencyMismatch(f"terminal {request.id} was opened with another body; choose another id")
            return self._terminals[request.id], True
        if self.closing:
            raise ShuttingDown("this pod is ending; nothing was started")
        if self.living >= MAX_TERMINALS:
            raise RateLimited(f"{self.living} terminals are open here, as many as may be", limit=MAX_TERMINALS)
        id = request.id or "t" + secrets.token_hex(16)
        cwd = os.path.join(self._config.workspace, request.cwd) if request.cwd is not None else self._config.workspace
        command = TerminalCommand(self, program, id, self._users.get(request.user), cwd)
        try:
            command.open(request.cols, request.rows)
            command.start()
        except OSError as why:
            command.release()
            raise RateLimited(f"no more pseudo-terminals can be opened in this pod: {why.strerror}") from why
        except BaseException:
            command.release()
            raise
        shown = argv if request.command is None else request.command
        self._terminals[id] = Terminal(command, shown, request.cols, request.rows)
        self._fingerprints[id] = fingerprint
        self.traffic()
        return self._terminals[id], False

    def get(self, id: str) -> Terminal:
        """Raises NotFound."""
        terminal = self._terminals.get(id)
        if terminal is None:
            raise NotFound(f"no terminal {id[:128]!r} here: never opened, deleted, or ended too long ago")
        return terminal

    def all(self) -> list[Terminal]:
        return list(self._terminals.values())

    def leaders(self) -> dict[int, str]:
        """The pid of every terminal's process -> the terminal's id."""
        found = self._terminals.values()
        return {one.command.pid: one.id for one in found if one.command.state == "running"}

    async def delete(self, id: str) -> None:
        """Hangs up, ends the whole tree, then forgets it. Raises NotFound."""
        terminal = self.get(id)
        command = terminal.command
        await self._hang_up(command)
        if command._killing is not None:
            await asyncio.wait([command._killing])
        if self._terminals.get(id) is terminal:  # it may be forgotten by now, and its id be another's
            self._forget(id)

    async def _hang_up(self, command: TerminalCommand) -> None:
        if command.outcome is None:
            await command.send_signal(signal.SIGHUP, "tree")  # an interactive shell ignores TERM
        command.end("cancelled")
        await asyncio.wait([command.ended])

    def _forget(self, id: str) -> None:
        terminal = self._terminals.pop(id, None)
        self._fingerprints.pop(id, None)
        self._ended.pop(id, None)
        if terminal is not None:
            terminal.command.close()

    def _trim(self) -> None:
        now = self.loop.time()
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= KEEP_COUNT and now - oldest.command.ended_at < KEEP_SEC:
                break
            self._forget(oldest.id)
        kept = sum(one.command.logs[0].memory_bytes for one in self._ended.values())
        for one in self._ended.values():
            if kept <= KEEP_OUTPUT_BYTES:
                break
            output = one.command.logs[0]
            kept -= output.memory_bytes
            output.shrink_all(CUT_BYTES)
            kept += output.memory_bytes

    async def drain(self, seconds: float) -> None:
        """Opens no more, and ends those that there are: HUP and TERM, and KILL when the time is nearly over."""
        self.closing = True
        living = [one.command for one in self._terminals.values() if one.command.outcome is None]
        if not living:
            return
        ending = [asyncio.create_task(self._hang_up(command), name=f"hang-up-{command.id}") for command in living]
        _, late = await asyncio.wait(ending, timeout=seconds * 0.7)
        if late:
            for command in living:
                command.end("cancelled", at_once=True)
            _, late = await asyncio.wait(late, timeout=seconds * 0.3)
        for task in late:
            task.cancel()
        if late:
            log.warning("terminals_left", extra={"count": len(late)})

    # ── the Host of commands ────────────────────────────────────────────────────────────────────────────────────

    @property
    def output(self) -> MemoryBudget:
        return self._processes.output

    def environment(self, user: CommandUser, env: dict[str, str]) -> list[bytes]:
        return self._processes.environment(user, env)

    def new_spill(self, start: int, head_bytes: int = 0, tail_bytes: int = 0) -> Spill | None:
        return None

    def was_oom(self, command: Command) -> bool:
        return self._processes.was_oom(command)

    def was_pids(self, command: Command) -> bool:
        return self._processes.was_pids(command)

    def shell_failed(self, why: str | None) -> None:
        self._processes.shell_failed(why)

    def command_ended(self, command: Command) -> None:
        terminal = self._terminals.get(command.id)
        if terminal is None or terminal.command is not command:
            return
        self.traffic()
        if command.error is not None:  # nothing ran: the id is free again
            self._forget(command.id)
            return
        self._ended[command.id] = terminal
        self._trim()
