"""One command's life: its pipes, its limits in time, its end, and ending all that it started.

A command ends when its process has ended, never when its pipes do: descendants may hold those for ever. After the end
its pipes get a short drain, and the outcome says whether descendants remain."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import signal
import time
from datetime import UTC, datetime
from typing import Final, Literal, Protocol

import msgspec

from executor import kernel, tree
from executor.errors import ExecutorError, InvalidCwd, RateLimited, TooLarge
from executor.isolation import CommandUser
from executor.output import STREAM_TAIL_BYTES, OutputLog, Spill
from executor.pipes import Pump, StdinWriter, filled_stdin, memory_file
from executor.spawn import STAGE_CHDIR, STAGE_FORK, Spawner
from executor.wire import (
    MAX_ARG_BYTES,
    DroppedSpan,
    ExecRequest,
    ExecResult,
    Exit,
    ProcessInfo,
    Reason,
    ResourceUse,
)

DRAIN_SEC: Final = 0.1  # after the end of the process, for what a descendant (a `tee`, say) is just writing
WINDOW_BYTES: Final = 1 << 20  # how far the caller's own stream may be behind before the command is held back
STALL_SEC: Final = 60.0  # a caller that has not read for so long no longer holds it back
KILL_SWEEP_SEC: Final = 0.05
KILL_GIVE_UP_SEC: Final = 5.0  # processes in uninterruptible sleep cannot be waited for


class Host(Protocol):
    """What a command needs of the executor around it."""

    loop: asyncio.AbstractEventLoop
    spawner: Spawner
    shell: bytes

    def environment(self, user: CommandUser, env: dict[str, str]) -> list[bytes]: ...
    def new_spill(self, start: int) -> Spill | None: ...
    def was_oom(self) -> bool: ...
    def was_pids(self) -> bool: ...
    def command_ended(self, command: Command) -> None: ...
    def shell_failed(self, why: str | None) -> None: ...


class CallerStream(Protocol):
    """The one reader that may hold the command back: the caller's own stream."""

    offsets: list[int]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int
    signal: str | None
    reason: Reason
    message: str | None
    descendants_left: bool
    duration_sec: float
    usage: ResourceUse


_NO_USE: Final = ResourceUse(0.0, 0.0, 0)


class Command:
    """A command from its start to its outcome, which then waits for whoever asks by its id."""

    # Thousands of outcomes are kept, so what a short command has no need of is made when it is first used.
    __slots__ = (
        "_duration", "_ending", "_kill_event", "_killing", "_last_output", "_left", "_sent", "_status", "_t0",
        "_timers", "_usage", "_watchers", "background", "caller", "cwd", "ended", "ended_at", "error", "host", "id",
        "interactive", "launched", "logs", "outcome", "pid", "pumps", "request", "seq", "shell_text", "started_at",
        "stdin", "streamed", "user",
    )  # fmt: skip
    window_bytes = WINDOW_BYTES
    own_session = False  # a process group is enough for what has no terminal

    def __init__(
        self,
        host: Host,
        request: ExecRequest,
        id: str,
        user: CommandUser,
        cwd: str,
        *,
        background: bool,
        streamed: bool,
        interactive: bool = False,
    ) -> None:
        self.host = host
        self.id = id
        self.request = request
        self.user = user
        self.cwd = cwd
        self.background = background
        self.interactive = interactive  # its caller's connection carries input too
        self.streamed = streamed
        self.seq = host.spawner.next_seq()
        self.pid = 0
        self.outcome: Outcome | None = None
        self.error: ExecutorError | None = None  # nothing ran
        self.caller: CallerStream | None = None
        self.started_at = datetime.now(UTC)
        self.ended_at = 0.0  # on the loop's clock
        self.stdin: StdinWriter | None = None
        self.shell_text = request.command if isinstance(request.command, str) else None
        loop = host.loop
        self._t0 = time.monotonic()
        half = 0 if background or streamed else request.max_output_bytes // 2
        tail = STREAM_TAIL_BYTES if background or streamed else request.max_output_bytes - half
        self.logs = (OutputLog(half, tail), OutputLog(half, tail))
        self.pumps: list[Pump] = []
        self.launched: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._watchers: set[asyncio.Future[None]] | None = None
        self._status: int | None = None
        self._usage = _NO_USE
        self._left = False
        self._duration = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._last_output = 0.0
        self._ending: Reason | None = None  # why we are killing it
        self._sent: int = 0  # the signal a caller sent last, to leader or tree
        self._killing: asyncio.Task[None] | None = None
        self._kill_event: asyncio.Event | None = None

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Hands the command to a spawn helper; `launched` then says whether it runs. Raises RateLimited, TooLarge."""
        request = self.request
        argv, script_text = self._argv()
        env = self.host.environment(self.user, request.env)
        _check_arguments(argv, env)
        ours: list[int] = []
        theirs: list[int] = []
        try:
            stdin = self._stdin(theirs)
            stdout = self._output_pipe(0, ours, theirs)
            stderr = None if request.merge_output else self._output_pipe(1, ours, theirs)
            script = None
            if script_text is not None:
                script = memory_file(script_text)
                theirs.append(script)
            eager = self.background or self.streamed or request.no_output_timeout_sec is not None
            self.host.spawner.spawn(
                self, self.user, argv, env, os.fsencode(self.cwd), stdin, stdout, stderr, script, at_once=eager,
                own_session=self.own_session,
            )  # fmt: skip
        except OSError as why:
            for pump in self.pumps:
                pump.close()
            if self.stdin is not None:
                self.stdin.close()
            for fd in theirs:
                os.close(fd)
            raise RateLimited(f"no descriptors or memory left for another command: {why.strerror}") from why
        if eager:
            self._arm_pumps()
        self._start_clocks()

    def _start_clocks(self) -> None:
        request, loop = self.request, self.host.loop
        if request.timeout_sec is not None:
            self._timers["timeout"] = loop.call_later(request.timeout_sec, self._timed_out)
        if request.no_output_timeout_sec is not None:
            self._last_output = loop.time()
            self._timers["quiet"] = loop.call_later(request.no_output_timeout_sec, self._quiet)

    def _argv(self) -> tuple[list[bytes], bytes | None]:
        if self.shell_text is None:
            return [text.encode() for text in self.request.command], None
        text = self.shell_text.encode()
        if len(text) <= MAX_ARG_BYTES:
            return [self.host.shell, b"-c", text], None
        return [self.host.shell, b"script"], text  # the helper puts the descriptor's path in the last place

    def _stdin(self, theirs: list[int]) -> int | None:
        request = self.request
        data: bytes | None = None
        if request.stdin is not None:
            data = request.stdin.encode()
        elif request.stdin_base64 is not None:
            data = base64.b64decode(request.stdin_base64)
        stays_open = request.stdin_open
        if stays_open is None:
            stays_open = (self.background or self.interactive) and data is None
        if not stays_open:
            if data is None:
                return None  # the helper has /dev/null
            fd = filled_stdin(data)
            theirs.append(fd)
            return fd
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        theirs.append(read_end)
        self.stdin = StdinWriter(self.host.loop, write_end)
        if data:
            self.stdin.put(data)
        return read_end

    def _output_pipe(self, stream: int, ours: list[int], theirs: list[int]) -> int:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        ours.append(read_end)
        theirs.append(write_end)
        self.pumps.append(Pump(self.host.loop, read_end, self.logs[stream], self._on_data, self._on_eof))
        if write_end > self.host.spawner.last_descriptor:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return write_end

    def _arm_pumps(self) -> None:
        for pump in self.pumps:
            pump.arm()

    # ── heard from the spawner ──────────────────────────────────────────────────────────────────────────────────

    def spawned(self, pid: int) -> None:
        self.pid = pid
        if not self.launched.done():
            self.launched.set_result(None)
        self._arm_pumps()  # a command that is over before this is heard never has its pipes registered
        if self.shell_text is not None:
            self.host.shell_failed(None)

    def failed(self, error: int, stage: int) -> None:
        self._duration = time.monotonic() - self._t0
        self._cancel_timers()
        why = os.strerror(error)
        if stage == STAGE_CHDIR:
            self._refuse(InvalidCwd(f"the working directory {self.cwd!r} cannot be entered: {why}. Nothing was run"))
        elif error == errno.E2BIG:
            self._refuse(
                TooLarge("arguments and environment together are over the kernel's limit", limit=MAX_ARG_BYTES)
            )
        elif stage == STAGE_FORK:
            reason: Reason = "pids_exhausted" if error == errno.EAGAIN else "spawn_failed"
            what = "the pod has as many processes as it may have" if error == errno.EAGAIN else f"no new process: {why}"
            self._finish(Outcome(
                exit_code=126, signal=None, reason=reason, message=what, descendants_left=False,
                duration_sec=self._duration, usage=_NO_USE,
            ))  # fmt: skip
        else:
            program = self.host.shell.decode() if self.shell_text is not None else self.request.command[0]
            missing = error in (errno.ENOENT, errno.ENOTDIR)
            message = None
            if self.shell_text is not None:
                message = f"the sandbox is broken: its shell {program} cannot be run: {why}"
                self.host.shell_failed(message)
            said = "command not found" if missing and "/" not in program else why
            self.logs[1 if len(self.pumps) > 1 else 0].append(f"{program}: {said}\n".encode())
            self._finish(Outcome(
                exit_code=127 if missing and self.shell_text is None else 126, signal=None, reason="spawn_failed",
                message=message, descendants_left=False, duration_sec=self._duration, usage=_NO_USE,
            ))  # fmt: skip

    def exited(self, status: int, user_sec: float, system_sec: float, max_rss_kib: int, left: bool) -> None:
        self._duration = time.monotonic() - self._t0
        self._status = status
        self._left = left
        self._usage = ResourceUse(round(user_sec * 1e3, 3), round(system_sec * 1e3, 3), max_rss_kib * 1024)
        self._cancel_timers()
        if not self.launched.done():  # its end came first: a short command, or a helper that died in between
            self.launched.set_result(None)
            if self.shell_text is not None:
                self.host.shell_failed(None)
        at_end = True
        for pump in self.pumps:
            pump.drain()
            at_end = at_end and pump.eof
        if at_end:
            self._conclude()
        else:
            for pump in self.pumps:
                pump.release()
            self._timers["drain"] = self.host.loop.call_later(DRAIN_SEC, self._conclude)
            self._wake()

    def lost(self) -> None:
        """Nobody can say any more how it ended."""
        self._duration = time.monotonic() - self._t0
        self._cancel_timers()
        for pump in self.pumps:
            pump.drain()
        self._finish(Outcome(
            exit_code=255, signal=None, reason="lost",
            message="the helper that knew its exit code was killed, most likely by a command; its output is kept",
            descendants_left=True, duration_sec=self._duration, usage=_NO_USE,
        ))  # fmt: skip

    # ── output ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_data(self, pump: Pump) -> None:
        if self.request.no_output_timeout_sec is not None:
            self._last_output = self.host.loop.time()
        caller = self.caller
        if caller is not None:
            stream = 0 if pump.log is self.logs[0] else 1
            if pump.log.end - caller.offsets[stream] > self.window_bytes and self._status is None:
                pump.hold()
                if "stall" not in self._timers:
                    self._timers["stall"] = self.host.loop.call_later(STALL_SEC, self._stalled)
        elif pump.log.spill is not None and pump.log.spill.full:
            pump.hold()
        self._wake()

    def _on_eof(self, _pump: Pump) -> None:
        if "drain" in self._timers and all(pump.eof for pump in self.pumps):
            self._timers.pop("drain").cancel()
            self._conclude()

    def caller_read(self) -> None:
        """The caller's stream has moved on: what it held back may run again."""
        caller = self.caller
        if caller is None:
            return
        stall = self._timers.pop("stall", None)
        if stall is not None:
            stall.cancel()
        behind = False
        for pump in self.pumps:
            if pump.held:
                stream = 0 if pump.log is self.logs[0] else 1
                if pump.log.end - caller.offsets[stream] <= self.window_bytes // 2:
                    pump.release()
                else:
                    behind = True
        if behind:
            self._timers["stall"] = self.host.loop.call_later(STALL_SEC, self._stalled)

    def _stalled(self) -> None:
        self._timers.pop("stall", None)
        self.caller_gone()

    def caller_gone(self) -> None:
        """Nobody holds the command back from here on; its output goes on into the bounded log, on disk too."""
        self.caller = None
        stall = self._timers.pop("stall", None)
        if stall is not None:
            stall.cancel()
        if self.outcome is None:
            self.spill_to_disk()
            for pump in self.pumps:
                if pump.held:
                    pump.release()

    def spill_to_disk(self) -> None:
        for pump in self.pumps:
            if pump.log.spill is None and not pump.eof:
                spill = self.host.new_spill(pump.log.tail_start)
                if spill is not None:
                    pump.log.spill = spill
                    spill.on_room = pump.release

    def watch(self) -> asyncio.Future[None]:
        """Done at the next output or at the end. Cancel it when it is not wanted any more."""
        future: asyncio.Future[None] = self.host.loop.create_future()
        if self._watchers is None:
            self._watchers = set()
        self._watchers.add(future)
        future.add_done_callback(self._watchers.discard)
        return future

    def _wake(self) -> None:
        if self._watchers:
            watchers, self._watchers = self._watchers, None
            for future in watchers:
                if not future.done():
                    future.set_result(None)

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def exited_already(self) -> bool:
        return self._status is not None or self.outcome is not None

    @property
    def state(self) -> Literal["starting", "running", "ended"]:
        if self.outcome is not None:
            return "ended"
        return "running" if self.pid else "starting"

    def _timed_out(self) -> None:
        self._timers.pop("timeout", None)
        self.end("timeout")

    def _quiet(self) -> None:
        limit = self.request.no_output_timeout_sec
        assert limit is not None
        left = self._last_output + limit - self.host.loop.time()
        if left > 0:
            self._timers["quiet"] = self.host.loop.call_later(left, self._quiet)
        else:
            self._timers.pop("quiet", None)
            self.end("no_output_timeout")

    def end(self, reason: Reason, *, at_once: bool = False) -> None:
        """Ends the command and all of its descendants: TERM, then KILL after the grace (or `at_once`)."""
        if at_once:
            self._kill_now.set()
        if self.outcome is not None and not self.outcome.descendants_left:
            return
        if self._killing is None:
            if self._status is None:
                self._ending = reason
            self._killing = self.host.loop.create_task(self._kill_tree(), name=f"kill-{self.id}")

    @property
    def _kill_now(self) -> asyncio.Event:
        """Set where nothing is to wait for the grace any more."""
        if self._kill_event is None:
            self._kill_event = asyncio.Event()
        return self._kill_event

    async def gone(self) -> None:
        """Returns when the command has ended and what was told to end it is done."""
        await asyncio.wait([self.ended])
        if self._killing is not None:
            await asyncio.wait([self._killing])

    async def _kill_tree(self) -> None:
        try:
            self._left = await self._kill_all_of_it() > 0
        finally:
            self._killing = None
            if self.outcome is not None:
                if self.outcome.descendants_left != self._left:
                    self.outcome = msgspec.structs.replace(self.outcome, descendants_left=self._left)
            elif self._status is None:
                if self._left:
                    self._unkillable()
            elif "drain" not in self._timers:
                self._conclude()

    async def _kill_all_of_it(self) -> int:
        """How many processes of the command are left in the end: those that the kernel does not let go."""
        loop = self.host.loop
        if not self.launched.done():
            await asyncio.wait([self.launched])
        deadline = loop.time() + self.request.grace_sec
        count = await self._signal_tree(signal.SIGTERM if not self._kill_now.is_set() else signal.SIGKILL)
        while count and loop.time() < deadline and not self._kill_now.is_set():
            try:
                async with asyncio.timeout(min(KILL_SWEEP_SEC, max(0.0, deadline - loop.time()))):
                    await self._kill_now.wait()
            except TimeoutError:
                pass
            if self._status is None and loop.time() < deadline and not self._kill_now.is_set():
                continue  # the leader still lives: no need to look for the others yet
            count = await self._count_tree()
        give_up = loop.time() + KILL_GIVE_UP_SEC
        while count and loop.time() < give_up:
            count = await self._signal_tree(signal.SIGKILL)
            if count:
                await asyncio.sleep(KILL_SWEEP_SEC / 5)
                count = await self._count_tree()
        if self._status is None and not self.ended.done() and not count:
            await self._hear_of_end()
        return count

    async def _hear_of_end(self) -> None:
        """It is dead: its helper says so in a moment, or is stuck itself and to be replaced."""
        give_up = self.host.loop.time() + KILL_GIVE_UP_SEC
        while self._status is None and not self.ended.done():
            if self.host.loop.time() > give_up:
                self.host.spawner.give_up(self.seq)
                break
            await asyncio.sleep(KILL_SWEEP_SEC / 5)

    def _unkillable(self) -> None:
        """In an uninterruptible sleep, on a file system that does not answer, say. Nobody shall wait for that."""
        self._duration = time.monotonic() - self._t0
        self._cancel_timers()
        for pump in self.pumps:
            pump.drain()
        self._finish(Outcome(
            exit_code=128 + signal.SIGKILL, signal="SIGKILL", reason=self._ending or "cancelled",
            message="it was killed, but the kernel has not let go of it yet", descendants_left=True,
            duration_sec=self._duration, usage=_NO_USE,
        ))  # fmt: skip

    async def _signal_tree(self, number: int) -> int:
        return await self.host.spawner.sweeps.signal(self._members, number)

    async def _count_tree(self) -> int:
        return await self.host.spawner.sweeps.count(self._members)

    def _leader(self, at: tree.Snapshot) -> dict[int, tree.Seen]:
        return {pid: one for pid, one in tree.members(at, self.seq, self.pid).items() if pid == self.pid}

    def _members(self, at: tree.Snapshot) -> dict[int, tree.Seen]:
        return tree.members(at, self.seq, self.pid)

    async def send_signal(self, number: int, to: Literal["leader", "tree"]) -> None:
        """A caller's signal; nothing where the command has ended and left nothing behind."""
        if not self.launched.done():
            await asyncio.wait([self.launched])
        if self._status is None:
            self._sent = number
        if to == "tree":
            await self._signal_tree(number)
        elif self._status is None and self.pid:
            await self.host.spawner.sweeps.signal(self._leader, number)

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _conclude(self) -> None:
        """The process has ended and its pipes are drained: the outcome, unless its tree is still being killed."""
        self._timers.pop("drain", None)
        if self._killing is not None or self.outcome is not None:
            return
        assert self._status is not None
        number = os.WTERMSIG(self._status) if os.WIFSIGNALED(self._status) else 0
        code = 128 + number if number else os.WEXITSTATUS(self._status)
        left = self._left or (self._ending is None and any(not pump.eof for pump in self.pumps))
        reason, message = self._why(code, number)
        self._finish(Outcome(
            exit_code=code, signal=kernel.signal_name(number) if number else None, reason=reason, message=message,
            descendants_left=left, duration_sec=self._duration, usage=self._usage,
        ))  # fmt: skip

    def _why(self, code: int, number: int) -> tuple[Reason, str | None]:
        request = self.request
        if self._ending == "timeout":
            return "timeout", f"timed out after {request.timeout_sec:g} s"
        if self._ending == "no_output_timeout":
            return "no_output_timeout", f"ended after {request.no_output_timeout_sec:g} s without output"
        if self._ending is not None:
            return self._ending, None
        if code == 137 and self._sent != signal.SIGKILL and self.host.was_oom():
            return "oom_killed", "killed by the kernel: the pod's memory limit was reached"
        if number:
            return ("cancelled", None) if number == self._sent else ("signaled", None)
        if code and self.host.was_pids():
            return "pids_exhausted", "the pod had as many processes as it may have while this ran"
        return "exited", None

    def _refuse(self, error: ExecutorError) -> None:
        self.error = error
        self._settle()

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._settle()

    def _settle(self) -> None:
        self.ended_at = self.host.loop.time()
        for pump in self.pumps:
            pump.discarding = True
            pump.release()
        for one in self.logs:
            one.seal()
        if all(pump.eof for pump in self.pumps):
            self.pumps = []
        if self.stdin is not None:
            self.stdin.close()
        for future in (self.launched, self.ended):
            if not future.done():
                future.set_result(None)
        self._wake()
        self.host.command_ended(self)

    # ── what it tells ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def stdout_bytes(self) -> int:
        return self.logs[0].end

    @property
    def stderr_bytes(self) -> int:
        return self.logs[1].end

    @property
    def truncated(self) -> bool:
        return self.logs[0].dropped > 0 or self.logs[1].dropped > 0

    def _facts(self, outcome: Outcome) -> dict[str, object]:
        return {
            "id": self.id, "pid": self.pid or None, "exit_code": outcome.exit_code, "signal": outcome.signal,
            "reason": outcome.reason, "message": outcome.message, "timed_out": outcome.reason.endswith("timeout"),
            "stdout_bytes": self.stdout_bytes, "stderr_bytes": self.stderr_bytes,
            "descendants_left": outcome.descendants_left, "started_at": rfc3339(self.started_at),
            "duration_ms": round(outcome.duration_sec * 1e3, 3), "usage": outcome.usage,
        }  # fmt: skip

    def exit_event(self, *, truncated: bool) -> Exit:
        """`truncated`: whether the reader of this stream missed some of the output."""
        assert self.outcome is not None
        return Exit(truncated=truncated, **self._facts(self.outcome))  # type: ignore[arg-type]

    def result(self) -> ExecResult:
        """The outcome with the output that is kept. Call once `ended`; raises what kept the command from running."""
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        facts = self._facts(self.outcome)
        truncated = False
        for name, log in zip(("stdout", "stderr"), self.logs, strict=True):
            head, tail, dropped = log.collect()
            if dropped:
                truncated = True
                facts[f"{name}_dropped"] = DroppedSpan(len(head), dropped)
            if self.request.encoding == "base64":
                facts[f"{name}_base64"] = base64.b64encode(head + tail).decode()
            else:
                facts[name] = _text(head, tail, dropped)
        return ExecResult(truncated=truncated, **facts)  # type: ignore[arg-type]

    def info(self) -> ProcessInfo:
        outcome = self.outcome
        facts: dict[str, object] = {
            "id": self.id, "pid": self.pid or None, "started_at": rfc3339(self.started_at),
            "stdout_bytes": self.stdout_bytes, "stderr_bytes": self.stderr_bytes,
            "duration_ms": round((time.monotonic() - self._t0) * 1e3, 3),
        }  # fmt: skip
        if outcome is not None:
            facts = self._facts(outcome)
        return ProcessInfo(
            state=self.state,
            command=self.request.command,
            truncated=self.truncated,
            **facts,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Forgets the output. Pipes that descendants still hold are read on, so that no write of theirs fails."""
        for log in self.logs:
            log.close()
        for pump in self.pumps:
            pump.log = OutputLog(0, 0)


def _check_arguments(argv: list[bytes], env: list[bytes]) -> None:
    for what, entries in (("an argument", argv), ("an environment entry", env)):
        for entry in entries:
            if len(entry) > MAX_ARG_BYTES:
                raise TooLarge(
                    f"{what} of {len(entry)} bytes is over the kernel's limit of {MAX_ARG_BYTES}; "
                    "send the data as stdin or as a file",
                    limit=MAX_ARG_BYTES,
                )


def _text(head: bytes, tail: bytes, dropped: int) -> str:
    if not dropped:
        return head.decode("utf-8", "replace")
    # the cut must not show as broken characters: bytes of one that stands across it count as dropped
    cut = len(head)
    for back in range(1, min(4, cut + 1)):
        byte = head[cut - back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            if back < length:
                dropped, cut = dropped + back, cut - back
            break
        if byte < 0x80:
            break
    skip = 0
    while skip < min(3, len(tail)) and 0x80 <= tail[skip] < 0xC0:
        skip += 1
    mark = f"\n[... {dropped + skip} bytes dropped ...]\n"
    return head[:cut].decode("utf-8", "replace") + mark + tail[skip:].decode("utf-8", "replace")


def rfc3339(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
