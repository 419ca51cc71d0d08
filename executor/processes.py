"""All commands of this executor by their ids: starting, joining, finding, keeping outcomes, forgetting."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from executor import kernel
from executor.budget import DiskBudget, MemoryBudget
from executor.config import ExecutorConfig
from executor.errors import IdempotencyMismatch, InvalidRequest, NotFound, RateLimited, ShuttingDown
from executor.isolation import CommandUser, Users, base_environment
from executor.leaves import Leaves
from executor.output import SPILL_BYTES, Spill
from executor.pressure import Counters, Pressure
from executor.process import Command
from executor.readers import Readers
from executor.spawn import Spawner
from executor.threads import started_pool
from executor.turns import Turns
from executor.wire import ExecRequest, Health, MiB, bad_field

log = logging.getLogger("executor.processes")

KEEP_SEC: Final = 3600.0  # an outcome, from the command's end
KEEP_COUNT: Final = 1000  # outcomes kept at least for KEEP_SEC; more go earlier, oldest first
KEEP_COUNT_MAX: Final = 10_000
KEEP_OUTPUT_BYTES: Final = 64 * MiB  # of ended commands, in memory, all together; twice that with unread streams
LASTING_SEC: Final = 0.5  # a command this old gets a cgroup of its own the next time that somebody looks
ADOPT_AT_ONCE: Final = 64
TRIM_AFTER_BYTES: Final = 8 * MiB  # of output since the heap was last trimmed
ID_BYTES: Final = 16
TRIM_QUIET_SEC: Final = 2.0  # without a command's end, before it is trimmed

_ENCODER: Final = msgspec.json.Encoder(order="sorted")


class Processes:
    """The Host that commands live in."""

    def __init__(
        self, config: ExecutorConfig, users: Users, spawner: Spawner, counters: Counters,
        inherited: dict[str, str], changed: Callable[[], None], leaves: Leaves | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._users = users
        self._inherited = inherited
        self._changed = changed  # called when a command starts or ends
        self.spawner = spawner
        self.loop = asyncio.get_running_loop()
        self.shell = os.fsencode(kernel.find_program("bash") or kernel.find_program("sh") or "/bin/sh")
        self.broken: str | None = None  # why commands cannot run here any more, for people
        self.bound_env: dict[str, str] = {}
        self.closing = False
        self._running: set[Command] = set()
        self._leaves = leaves
        self._adopting: asyncio.Future[None] | None = None
        self._commands: dict[str, Command] = {}
        self._fingerprints: dict[str, bytes] = {}  # of those whose id the caller chose
        self._random = b""  # for ids to come; a call to the kernel for each would be one of a dozen for a command
        self._random_at = 0
        self._ended: OrderedDict[str, Command] = OrderedDict()
        self._kept_bytes = 0
        self._on_disk: dict[Command, None] = {}  # those of `_ended` whose output is there, oldest first
        self._env_lists: dict[int, list[bytes]] = {}
        self._drained: asyncio.Event | None = None  # of whoever waits for all to end
        self._oldest_goes_at = 0.0  # on the loop's clock: before, no outcome is kept for too long
        self.pressure = Pressure(counters, self._looked, always=leaves is not None)
        self._workers = started_pool(2, "spill")
        self.output = MemoryBudget()
        self.turns = Turns(self.loop)
        self.readers = Readers(self.loop)
        self._disk = DiskBudget(on_short=self._free_disk)
        self._spill_dir: str | None = None
        self._passed_bytes = 0  # output and, roughly, outcomes since the heap was last trimmed
        self._trimming: asyncio.TimerHandle | None = None
        self.counts: dict[str, int] = {}  # ended commands by reason

    @property
    def running(self) -> int:
        return len(self._running)

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────

    def start(
        self, request: ExecRequest, *, background: bool = False, streamed: bool = False, interactive: bool = False,
        tells_pid: bool = True,
    ) -> tuple[Command, bool]:  # fmt: skip
        """(the command, whether it was there already under its id). Raises what `request` makes impossible."""
        present, fingerprint = self._look_up(request, background)
        if present is not None:
            return present, True
        command = Command(
            self, request, request.id or self._new_id(), self._users.get(request.user), self.directory(request.cwd),
            background=background, streamed=streamed, interactive=interactive, tells_pid=tells_pid,
        )  # fmt: skip
        command.start()
        if background:
            command.spill_to_disk()
        self._take_in(command, fingerprint)
        return command, False

    def directory(self, cwd: str | None) -> str:
        """The working directory that a request means."""
        return self._config.workspace if cwd is None else os.path.join(self._config.workspace, cwd)

    def admit(self, request: ExecRequest, kind: bool | str, make: Callable[[str], Command]) -> tuple[Command, bool]:
        """As `start`, for any kind of command: `make` gets the id and returns it started. A request joins the command
        of its id only where both are of one `kind`."""
        present, fingerprint = self._look_up(request, kind)
        if present is not None:
            return present, True
        command = make(request.id or self._new_id())
        self._take_in(command, fingerprint)
        return command, False

    def _look_up(self, request: ExecRequest, kind: bool | str) -> tuple[Command | None, bytes]:
        """(the command that has the request's id already, the request's fingerprint); without one it may start."""
        bad = bad_field(request)
        if bad is not None:
            raise InvalidRequest(f"{bad[0]} {bad[1]}", field=bad[0])
        if request.stdin_base64 is not None:
            try:
                base64.b64decode(request.stdin_base64, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidRequest("stdin_base64 is not base64", field="stdin_base64") from None
        fingerprint = b""
        id = request.id
        if id is not None:
            fingerprint = hashlib.blake2b(_ENCODER.encode((request, kind)), digest_size=16).digest()
            present = self._commands.get(id)
            if present is not None:
                if self._fingerprints.get(id) != fingerprint:
                    raise IdempotencyMismatch(f"process {id} was started with another body; choose another id")
                return present, fingerprint
        if self.closing:
            raise ShuttingDown("this pod is ending; nothing was started")
        if len(self._running) >= self._config.max_running:
            raise RateLimited(
                f"{self.running} commands run here already, as many as may", limit=self._config.max_running
            )
        if self.pressure.is_old:
            self.pressure.begin()
        return None, fingerprint

    def _take_in(self, command: Command, fingerprint: bytes) -> None:
        self._commands[command.id] = command
        if fingerprint:
            self._fingerprints[command.id] = fingerprint
        self._running.add(command)
        self._changed()

    def _new_id(self) -> str:
        """One that no caller can guess."""
        at = self._random_at
        if at == len(self._random):
            self._random, at = os.urandom(256 * ID_BYTES), 0
        self._random_at = at + ID_BYTES
        return "p" + self._random[at : at + ID_BYTES].hex()

    def get(self, id: str) -> Command:
        """Raises NotFound."""
        command = self._commands.get(id)
        if command is None or command.error is not None:
            raise NotFound(f"no process {id[:128]!r} here: never started, deleted, or its outcome is kept no longer")
        return command

    def all(self) -> list[Command]:
        return [command for command in self._commands.values() if command.error is None]

    def leaders(self) -> dict[int, str]:
        """The pid of every running command -> its id."""
        return {command.pid: command.id for command in self._commands.values() if command.state == "running"}

    async def delete(self, id: str) -> None:
        """Ends the command's whole tree, then forgets it. Raises NotFound."""
        command = self.get(id)
        command.end("cancelled")
        await command.gone()
        if self._commands.get(id) is command:  # it may be forgotten by now, and its id be another's
            self._forget(id)

    def health(self) -> Health:
        """What `/healthz` and `/readyz` say."""
        if self.closing:
            return Health(status="shutting_down")
        if self.broken is not None:
            return Health(status="degraded", message=self.broken)
        return Health(status="ok")

    # ── the Host of commands ────────────────────────────────────────────────────────────────────────────────────

    def environment(self, user: CommandUser, env: dict[str, str]) -> list[bytes]:
        if not env:
            kept = self._env_lists.get(user.uid)
            if kept is None:
                kept = self._env_lists[user.uid] = _as_list(self._base_env(user))
            return kept
        return _as_list(self._base_env(user) | env)

    def _base_env(self, user: CommandUser) -> dict[str, str]:
        return base_environment(user, self._config, self._inherited) | self.bound_env

    def bind_env(self, env: dict[str, str]) -> None:
        self.bound_env = dict(env)
        self._env_lists.clear()

    def new_spill(self, start: int, head_bytes: int = 0, tail_bytes: int = SPILL_BYTES) -> Spill | None:
        try:
            if self._spill_dir is None:
                import tempfile  # for most pods never

                self._spill_dir = self._config.state_dir or tempfile.mkdtemp(prefix="sojourn-")
            return Spill(
                self._spill_dir, start, self._workers, limit=head_bytes + tail_bytes, head_bytes=head_bytes,
                disk=self._disk, memory=self.output,
            )  # fmt: skip
        except OSError as why:
            log.warning("spill_failed", extra={"errno": why.errno})
            return None

    def was_oom(self, command: Command) -> bool:
        return self.pressure.was_oom(command.began, command.leaf)

    def was_pids(self, command: Command) -> bool:
        return self.pressure.was_pids(command.began, command.leaf)

    def _looked(self, now: float) -> bool:
        """The pod's counters were read. Commands that last get a cgroup of their own."""
        for command in self._running:
            if command.leaf is not None:
                command.leaf.look(now)
        if self._leaves is not None and self._adopting is None:
            lasting = [
                command for command in self._running
                if command.leaf is None and command.gets_leaf and command.pid and now - command.began > LASTING_SEC
            ][:ADOPT_AT_ONCE]  # fmt: skip
            if lasting:
                self._adopting = self.loop.run_in_executor(self._workers, self._leaves.adopt, lasting)
                self._adopting.add_done_callback(lambda done: self._adopted(lasting, done))
        return bool(self._running)

    def _adopted(self, commands: list[Command], done: asyncio.Future[None]) -> None:
        self._adopting = None
        if not done.cancelled() and done.exception() is not None:
            log.warning("adoption_failed", extra={"why": str(done.exception())[:200]})
        for command in commands:
            if command.outcome is not None and not command.outcome.descendants_left:  # meanwhile
                self._release_leaf(command)

    def _release_leaf(self, command: Command) -> None:
        if command.leaf is not None:
            assert self._leaves is not None
            self._leaves.release(command.leaf)
            command.leaf = None

    def shell_failed(self, why: str | None) -> None:
        if why is not None and self.broken is None:
            log.error("shell_broken", extra={"why": why})
        self.broken = why

    def command_ended(self, command: Command) -> None:
        self._running.discard(command)
        if self._drained is not None and not self._running:
            self._drained.set()
        if command.error is not None:  # nothing ran: the id is free again
            if self._commands.get(command.id) is command:
                self._forget(command.id)
        else:
            assert command.outcome is not None
            if command.leaf is not None and not command.outcome.descendants_left:
                self._release_leaf(command)
            reason = command.outcome.reason
            self.counts[reason] = self.counts.get(reason, 0) + 1
            self._ended[command.id] = command
            self._passed_bytes += 4096
            stdout, stderr = command.logs
            if stdout.end or stderr.end:
                self._kept_bytes += command.held_bytes
                if command.is_on_disk:
                    self._on_disk[command] = None
                self._passed_bytes += stdout.end + stderr.end
            count = len(self._ended)
            if count > KEEP_COUNT_MAX or self._kept_bytes > KEEP_OUTPUT_BYTES or (
                count > KEEP_COUNT and command.ended_at > self._oldest_goes_at
            ):  # fmt: skip
                self._trim()
            if self._passed_bytes > TRIM_AFTER_BYTES and self._trimming is None:
                self._trimming = self.loop.call_later(TRIM_QUIET_SEC, self._trim_heap)
        self._changed()

    def _trim(self) -> None:
        while (count := len(self._ended)) > KEEP_COUNT:
            oldest = next(iter(self._ended.values()))
            self._oldest_goes_at = oldest.ended_at + KEEP_SEC
            if count <= KEEP_COUNT_MAX and self.loop.time() < self._oldest_goes_at:
                break
            self._forget(oldest.id)
        if self._kept_bytes > KEEP_OUTPUT_BYTES:
            self._cut_kept()
        if self._kept_bytes > 2 * KEEP_OUTPUT_BYTES:
            self._cut_kept(unseen_too=True)

    def _cut_kept(self, *, unseen_too: bool = False) -> None:
        """What the callers' own streams have yet to read goes last."""
        for command in self._ended.values():
            held = command.held_bytes
            if held > 4096:
                if unseen_too:
                    command.caller_gone()
                command.cut_output(4096)
                self._kept_bytes -= held - command.held_bytes
            if self._kept_bytes <= KEEP_OUTPUT_BYTES // 2:
                break

    def _free_disk(self, size: int) -> None:
        """Those that run go before what ended, the oldest of it first."""
        for command in [command for command in self._on_disk if not command.sending]:
            held = command.held_bytes
            size -= sum(one.leave_disk() for one in command.logs)
            self._kept_bytes -= held - command.held_bytes
            del self._on_disk[command]
            if size <= 0:
                break

    def _trim_heap(self) -> None:
        """After a burst of commands, once: malloc keeps what they took, several times of what is kept of them."""
        self._trimming = None
        latest = next(reversed(self._ended.values())).ended_at if self._ended else 0.0
        if self.loop.time() - latest < TRIM_QUIET_SEC:
            self._trimming = self.loop.call_later(TRIM_QUIET_SEC, self._trim_heap)
            return
        self._passed_bytes = 0
        self.loop.run_in_executor(self._workers, kernel.trim_heap)

    def _forget(self, id: str) -> None:
        command = self._commands.pop(id)
        self._fingerprints.pop(id, None)
        if self._ended.pop(id, None) is not None and (command.stdout_bytes or command.stderr_bytes):
            self._kept_bytes -= command.held_bytes
            self._on_disk.pop(command, None)
        if command.leaf is not None:
            self._release_leaf(command)
        command.close()

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, seconds: float) -> None:
        """Refuses new commands and ends those that run: TERM, and KILL when the time is nearly over."""
        self.closing = True
        if not self.running:
            return
        if self._drained is None:
            self._drained = asyncio.Event()
        for command in list(self._commands.values()):
            if command.outcome is None and command.error is None:
                command.end("cancelled")
        try:
            async with asyncio.timeout(seconds * 0.7):
                await self._drained.wait()
        except TimeoutError:
            for command in list(self._commands.values()):
                command.end("cancelled", at_once=True)
            try:
                async with asyncio.timeout(seconds * 0.3):
                    await self._drained.wait()
            except TimeoutError:
                log.warning("drain_incomplete", extra={"running": self.running})

    def close(self) -> None:
        self.pressure.close()
        if self._trimming is not None:
            self._trimming.cancel()
        self.turns.close()
        self.readers.close()
        for command in list(self._commands.values()):
            command.close()
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self._spill_dir is not None and self._config.state_dir is None:
            import shutil

            shutil.rmtree(self._spill_dir, ignore_errors=True)


def _as_list(env: dict[str, str]) -> list[bytes]:
    return [f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in env.items()]
