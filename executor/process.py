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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal, Protocol

import msgspec

from executor import kernel, tree
from executor.budget import LEAST_BYTES, MemoryBudget
from executor.errors import ExecutorError, InvalidCwd, RateLimited, TooLarge
from executor.isolation import CommandUser
from executor.leaves import Leaf
from executor.output import SPILL_BYTES, STREAM_TAIL_BYTES, OutputLog, Spill
from executor.pipes import DRAIN_BYTES, PIPE_BYTES, READ_BYTES, Pump, StdinWriter, filled_stdin, memory_file
from executor.readers import Readers
from executor.spawn import STAGE_CHDIR, STAGE_FORK, Spawner
from executor.turns import Turns
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
SHORT_WINDOW_BYTES: Final = 64 << 10  # the same where memory for output is short
STALL_SEC: Final = 60.0  # a caller that has not read for so long no longer holds it back
KILL_SWEEP_SEC: Final = 0.05
KILL_GIVE_UP_SEC: Final = 5.0  # processes in uninterruptible sleep cannot be waited for


class Host(Protocol):
    """What a command needs of the executor around it."""

    loop: asyncio.AbstractEventLoop
    spawner: Spawner
    shell: bytes
    turns: Turns
    readers: Readers

    @property
    def output(self) -> MemoryBudget: ...
    def environment(self, user: CommandUser, env: dict[str, str]) -> list[bytes]: ...
    def new_spill(self, start: int, head_bytes: int = 0, tail_bytes: int = SPILL_BYTES) -> Spill | None: ...
    def was_oom(self, command: Command) -> bool: ...
    def was_pids(self, command: Command) -> bool: ...
    def command_ended(self, command: Command) -> None: ...
    def shell_failed(self, why: str | None) -> None: ...


class CallerStream(Protocol):
    """The one reader that may hold the command back: the caller's own stream."""

    offsets: list[int]

    def output_came(self) -> None:
        """Called at every output and at the end, before it is looked at how far the stream is behind."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    exit_code: int
    signal: str | None
    reason: Reason
    message: str | None
    descendants_left: bool
    duration_sec: float
    usage: ResourceUse


STREAM_NAMES: Final = ("stdout", "stderr")
TIMEOUTS: Final = ("timeout", "no_output_timeout")
_NO_OUTPUT: Final = (b"", b"", 0)
_NO_USE: Final = ResourceUse(0.0, 0.0, 0)


class Command:
    """A command from its start to its outcome, which then waits for whoever asks by its id."""

    # Thousands of outcomes are kept, so what a short command has no need of is made when it is first used.
    __slots__ = (
        "_duration", "_ended", "_ending", "_kill_event", "_killing", "_last_output", "_launched", "_left", "_sent",
        "_status", "_timers", "_usage", "_watchers", "answer", "background", "began", "caller", "cwd", "ended_at",
        "error", "host", "id", "interactive", "is_launched", "is_settled", "leaf", "logs", "outcome", "pid", "pumps",
        "request", "sending", "seq", "shell_text", "started_at", "stdin", "streamed", "tells_pid", "user",
    )  # fmt: skip
    window_bytes = WINDOW_BYTES
    gets_leaf = True  # once it has run for a while, where there are any
    own_session = False  # a process group is enough for what has no terminal
    tells_more = False  # in its answer than every command does

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
        tells_pid: bool = True,
    ) -> None:
        """`tells_pid`: of a stream, whether the pid stands at its beginning."""
        self.host = host
        self.id = id
        self.request = request
        self.user = user
        self.cwd = cwd
        self.background = background
        self.interactive = interactive  # its caller's connection carries input too
        self.streamed = streamed
        self.tells_pid = tells_pid
        self.seq = host.spawner.next_seq()
        self.pid = 0
        self.outcome: Outcome | None = None
        self.error: ExecutorError | None = None  # nothing ran
        self.caller: CallerStream | None = None
        self.started_at = time.time()
        self.ended_at = 0.0  # on the loop's clock
        self.stdin: StdinWriter | None = None
        self.leaf: Leaf | None = None  # the cgroup that is its alone
        self.shell_text = request.command if isinstance(request.command, str) else None
        self.began = time.monotonic()
        half = 0 if background or streamed else request.max_output_bytes // 2
        tail = STREAM_TAIL_BYTES if background or streamed else request.max_output_bytes - half
        self.logs = (OutputLog(half, tail), OutputLog(half, tail))
        self.pumps: list[Pump] = []
        self.is_launched = False  # it runs, or never will
        self.is_settled = False  # there is an outcome or an error
        self._launched: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self.answer: Callable[[Command], None] | None = None  # called at once when it is settled, before all else
        self.sending = 0  # answers that are being read from disk
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
        _check_arguments(argv, env if request.env else ())
        theirs: list[int] = []
        try:
            stdin = self._stdin(theirs)
            stdout = self._output_pipe(0, theirs)
            stderr = None if request.merge_output else self._output_pipe(1, theirs)
            script = None
            if script_text is not None:
                script = memory_file(script_text)
                theirs.append(script)
            watched = self.background or self.streamed or request.no_output_timeout_sec is not None
            eager = watched and (self.tells_pid or not self.streamed)
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
        if watched:
            self._arm_pumps()
        if request.timeout_sec is not None or request.no_output_timeout_sec is not None:
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

    def _output_pipe(self, stream: int, theirs: list[int]) -> int:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        theirs.append(write_end)
        self.pumps.append(Pump(self.host.readers, read_end, self.logs[stream], self))
        if write_end > self.host.spawner.last_descriptor:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return write_end

    def _arm_pumps(self) -> None:
        for pump in self.pumps:
            pump.arm()

    # Most commands end before anybody waits for them on a future of its own.

    @property
    def launched(self) -> asyncio.Future[None]:
        """Done when it runs, or never will."""
        if self._launched is None:
            self._launched = self.host.loop.create_future()
            if self.is_launched:
                self._launched.set_result(None)
        return self._launched

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when there is an outcome or an error."""
        if self._ended is None:
            self._ended = self.host.loop.create_future()
            if self.is_settled:
                self._ended.set_result(None)
        return self._ended

    def _launch(self) -> None:
        self.is_launched = True
        if self._launched is not None and not self._launched.done():
            self._launched.set_result(None)

    # ── heard from the spawner ──────────────────────────────────────────────────────────────────────────────────

    def spawned(self, pid: int) -> None:
        self.pid = pid
        self._launch()
        self._arm_pumps()  # a command that is over before this is heard never has its pipes registered
        if self.caller is not None:
            self.caller.output_came()
        if self.shell_text is not None:
            self.host.shell_failed(None)

    def failed(self, error: int, stage: int) -> None:
        self._duration = time.monotonic() - self.began
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
        self._duration = time.monotonic() - self.began
        self._status = status
        self._left = left
        self._usage = ResourceUse(_milliseconds(user_sec), _milliseconds(system_sec), max_rss_kib * 1024)
        if self._timers:
            self._cancel_timers()
        if not self.is_launched:  # its end came first: a short command, or a helper that died in between
            self._launch()
            if self.shell_text is not None:
                self.host.shell_failed(None)
        at_end = True
        if self.caller is not None:
            for stream, one in enumerate(self.logs):
                one.make_room(one.end - self.caller.offsets[stream] + DRAIN_BYTES)
        for pump in self.pumps:
            pump.drain()
            at_end = at_end and pump.eof
        if at_end:
            self._conclude()
        else:
            for pump in self.pumps:
                pump.close() if pump.eof else pump.release()
            self._timers["drain"] = self.host.loop.call_later(DRAIN_SEC, self._conclude)
            self._wake()

    def lost(self) -> None:
        """Nobody can say any more how it ended."""
        self._duration = time.monotonic() - self.began
        self._cancel_timers()
        for pump in self.pumps:
            pump.drain()
        self._finish(Outcome(
            exit_code=255, signal=None, reason="lost",
            message="the helper that knew its exit code was killed, most likely by a command; its output is kept",
            descendants_left=True, duration_sec=self._duration, usage=_NO_USE,
        ))  # fmt: skip

    # ── output ──────────────────────────────────────────────────────────────────────────────────────────────────

    def output_came(self, pump: Pump) -> None:
        if pump.discarding:
            self.host.turns.has_read(pump)
            return
        if self.request.no_output_timeout_sec is not None:
            self._last_output = self.host.loop.time()
        self._wake()
        held = self.held_bytes
        if held > LEAST_BYTES:
            self.host.output.hold(self, held)
            pump.sips = self.host.output.is_short
        caller = self.caller
        if caller is not None:
            stream = 0 if pump.log is self.logs[0] else 1
            if pump.log.end - caller.offsets[stream] > self._window(pump.log) and self._status is None:
                pump.hold()
                if "stall" not in self._timers:
                    self._timers["stall"] = self.host.loop.call_later(STALL_SEC, self._stalled)
        else:
            if pump.log.spill is not None and pump.log.spill.full:
                pump.hold()
            self.host.turns.has_read(pump)

    @property
    def held_bytes(self) -> int:
        return self.logs[0].memory_bytes + self.logs[1].memory_bytes

    def cut_output(self, keep_bytes: int) -> None:
        for stream, log in enumerate(self.logs):
            keep = keep_bytes // 2  # of the head and of the tail
            if self.caller is not None:  # what it has not seen stays
                unseen = log.end - self.caller.offsets[stream]
                keep = max(keep, unseen + (0 if self.exited_already else PIPE_BYTES + SHORT_WINDOW_BYTES))
            if log.memory_bytes > 2 * keep:
                if self.is_whole and log.spill is None and self.outcome is None:
                    self._move_to_disk(log)
                log.shrink_all(keep)
        for pump in self.pumps:
            pump.sips = True

    def _window(self, log: OutputLog) -> int:
        """How far its caller may be behind in it; the log keeps that much, and what one reading of the pipe adds."""
        if self.host.output.is_short:
            return SHORT_WINDOW_BYTES
        log.make_room(self.window_bytes + READ_BYTES)
        return self.window_bytes

    def output_over(self, _pump: Pump) -> None:
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
                if pump.log.end - caller.offsets[stream] <= self._window(pump.log) // 2:
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

    @property
    def is_whole(self) -> bool:
        """Its caller gets all of its output at once, in the answer."""
        return not self.background and not self.streamed

    def spill_to_disk(self) -> None:
        for pump in self.pumps:
            if pump.log.spill is None and not pump.eof:
                spill = self.host.new_spill(pump.log.tail_start)
                if spill is not None:
                    pump.log.spill = spill
                    spill.on_room = partial(self.host.turns.wait, pump)

    def _move_to_disk(self, log: OutputLog) -> None:
        """What its caller asked for stays whole where memory is short."""
        spill = self.host.new_spill(0, *log.room_bytes)
        if spill is not None:
            for pump in self.pumps:
                if pump.log is log:
                    spill.on_room = partial(self.host.turns.wait, pump)
            log.move_to_disk(spill)

    def watch(self) -> asyncio.Future[None]:
        """Done at the next output or at the end. Cancel it when it is not wanted any more."""
        future: asyncio.Future[None] = self.host.loop.create_future()
        if self._watchers is None:
            self._watchers = set()
        self._watchers.add(future)
        future.add_done_callback(self._watchers.discard)
        return future

    def _wake(self) -> None:
        if self.caller is not None:
            self.caller.output_came()
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
        if not self.is_launched:
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
        if self._status is None and not self.is_settled and not count:
            await self._hear_of_end()
        return count

    async def _hear_of_end(self) -> None:
        """It is dead: its helper says so in a moment, or is stuck itself and to be replaced."""
        give_up = self.host.loop.time() + KILL_GIVE_UP_SEC
        while self._status is None and not self.is_settled:
            if self.host.loop.time() > give_up:
                self.host.spawner.give_up(self.seq)
                break
            await asyncio.sleep(KILL_SWEEP_SEC / 5)

    def _unkillable(self) -> None:
        """In an uninterruptible sleep, on a file system that does not answer, say. Nobody shall wait for that."""
        self._duration = time.monotonic() - self.began
        self._cancel_timers()
        for pump in self.pumps:
            pump.drain()
        self._finish(Outcome(
            exit_code=128 + signal.SIGKILL, signal="SIGKILL", reason=self._ending or "cancelled",
            message="it was killed, but the kernel has not let go of it yet", descendants_left=True,
            duration_sec=self._duration, usage=_NO_USE,
        ))  # fmt: skip

    async def _signal_tree(self, number: int) -> int:
        if number == signal.SIGKILL and self.leaf is not None:  # faster than anything can fork
            await self.host.loop.run_in_executor(None, self.leaf.kill)
        return await self.host.spawner.sweeps.signal(self._members, number)

    async def _count_tree(self) -> int:
        return await self.host.spawner.sweeps.count(self._members)

    def _leader(self, at: tree.Snapshot) -> dict[int, tree.Seen]:
        return {pid: one for pid, one in tree.members(at, self.seq, self.pid).items() if pid == self.pid}

    def _members(self, at: tree.Snapshot) -> dict[int, tree.Seen]:
        return tree.members(at, self.seq, self.pid, self.leaf.pids_inside() if self.leaf is not None else ())

    async def send_signal(self, number: int, to: Literal["leader", "tree"]) -> None:
        """A caller's signal; nothing where the command has ended and left nothing behind."""
        if not self.is_launched:
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
        status = self._status
        assert status is not None
        number = code = 0
        if status:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            code = 128 + number if number else os.WEXITSTATUS(status)
        left = self._left
        if not left and self._ending is None:
            for pump in self.pumps:
                left = left or not pump.eof
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
        if code == 137 and self._sent != signal.SIGKILL and self.host.was_oom(self):
            return "oom_killed", "killed by the kernel: the memory that commands may use here was used up"
        if number:
            return ("cancelled", None) if number == self._sent else ("signaled", None)
        if code and self.host.was_pids(self):
            return "pids_exhausted", "there were as many processes in the pod as commands may have while this ran"
        return "exited", None

    def _refuse(self, error: ExecutorError) -> None:
        self.error = error
        self._settle()

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._settle()

    def _settle(self) -> None:
        self.is_settled = True
        if self.answer is not None:
            self.answer(self)
            self.answer = None
        self.ended_at = self.host.loop.time()
        at_end = True
        for pump in self.pumps:
            if pump.eof:
                pump.close()
            else:
                at_end = False
                pump.discarding = True
                pump.release()
        if at_end:
            self.pumps = []
        stdout, stderr = self.logs
        if stdout.end or stderr.end:
            self.host.output.drop(self)
        if stdout.end or stdout.spill is not None:
            stdout.seal()
        if stderr.end or stderr.spill is not None:
            stderr.seal()
        if self.stdin is not None:
            self.stdin.close()
        if not self.is_launched:
            self._launch()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        if self._watchers or self.caller is not None:
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
        stdout, stderr = self.logs
        return {
            "id": self.id, "pid": self.pid or None, "exit_code": outcome.exit_code, "signal": outcome.signal,
            "reason": outcome.reason, "message": outcome.message, "timed_out": outcome.reason in TIMEOUTS,
            "stdout_bytes": stdout.end, "stderr_bytes": stderr.end,
            "descendants_left": outcome.descendants_left, "started_at": rfc3339(self.started_at),
            "duration_ms": _milliseconds(outcome.duration_sec), "usage": outcome.usage,
        }  # fmt: skip

    def exit_event(self, *, truncated: bool) -> Exit:
        """`truncated`: whether the reader of this stream missed some of the output."""
        assert self.outcome is not None
        return Exit(truncated=truncated, **self._facts(self.outcome))  # type: ignore[arg-type]

    @property
    def is_on_disk(self) -> bool:
        return self.logs[0].spill is not None or self.logs[1].spill is not None

    @property
    def has_large_result(self) -> bool:
        """Whether its result is to be read from disk (`executor.largeresult`). What a stream or a background process
        left there is far more than an answer may have, and is read by offset."""
        return self.is_whole and self.is_on_disk

    def result(self) -> ExecResult:
        """The outcome with the output that is kept, all of it in memory. Call once `ended`; raises what kept the
        command from running."""
        if self.error is not None:
            raise self.error
        outcome = self.outcome
        assert outcome is not None
        stdout, stderr = self.logs
        if not stdout.end and not stderr.end and not self.tells_more and self.request.encoding == "text":
            # Spelled out: with a dictionary between it is a twentieth of the executor's own work for a command.
            return ExecResult(
                id=self.id, pid=self.pid or None, exit_code=outcome.exit_code, signal=outcome.signal,
                reason=outcome.reason, message=outcome.message, timed_out=outcome.reason in TIMEOUTS, stdout="",
                stderr="", stdout_bytes=0, stderr_bytes=0, truncated=False, descendants_left=outcome.descendants_left,
                started_at=rfc3339(self.started_at), duration_ms=_milliseconds(outcome.duration_sec),
                usage=outcome.usage,
            )  # fmt: skip
        facts = self._facts(outcome)
        truncated = False
        for name, log in zip(STREAM_NAMES, self.logs, strict=True):
            head, tail, dropped = log.collect() if log.end else _NO_OUTPUT
            if dropped:
                truncated = True
                facts[f"{name}_dropped"] = DroppedSpan(len(head), dropped)
            if self.request.encoding == "base64":
                facts[f"{name}_base64"] = base64.b64encode(head + tail).decode()
            else:
                facts[name] = _text(head, tail, dropped)
        return ExecResult(truncated=truncated, **facts)  # type: ignore[arg-type]

    def result_without_output(self) -> ExecResult:
        """The same for output that is on disk."""
        assert self.outcome is not None
        facts = self._facts(self.outcome)
        for name, log in zip(STREAM_NAMES, self.logs, strict=True):
            if log.dropped:
                facts[f"{name}_dropped"] = DroppedSpan(log.head_end, log.dropped)
        return ExecResult(truncated=self.truncated, **facts)  # type: ignore[arg-type]

    def info(self) -> ProcessInfo:
        outcome = self.outcome
        facts: dict[str, object] = {
            "id": self.id, "pid": self.pid or None, "started_at": rfc3339(self.started_at),
            "stdout_bytes": self.stdout_bytes, "stderr_bytes": self.stderr_bytes,
            "duration_ms": _milliseconds(time.monotonic() - self.began),
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
            if log.end or log.spill is not None:
                log.close()
        for pump in self.pumps:
            pump.log = OutputLog(0, 0)


def _check_arguments(argv: Sequence[bytes], env: Sequence[bytes]) -> None:
    for entries in (argv, env):
        for entry in entries:
            if len(entry) > MAX_ARG_BYTES:
                what = "an argument" if entries is argv else "an environment entry"
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
    rest = tail[skip:].decode("utf-8", "replace")
    return head[:cut].decode("utf-8", "replace") + dropped_mark(dropped + skip) + rest


def dropped_mark(count: int) -> str:
    """What stands in text output in place of so many bytes."""
    return f"\n[... {count} bytes dropped ...]\n"


def _milliseconds(seconds: float) -> float:
    """To the microsecond; `round` takes four times as long for the same."""
    return int(seconds * 1e6 + 0.5) / 1e3


_latest_second: tuple[int, str] = (0, "")


def rfc3339(at: float) -> str:
    """Seconds since 1970, to the millisecond. The latest second's text is kept: most calls are for the same one."""
    global _latest_second
    ms = int(at * 1e3)
    second = ms // 1000
    if _latest_second[0] != second:
        _latest_second = (second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)))
    return f"{_latest_second[1]}.{str(ms % 1000 + 1000)[1:]}Z"
