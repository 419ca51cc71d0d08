"""All commands of this executor by their ids: starting, joining, finding, keeping outcomes, forgetting."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from executor import kernel
from executor.cgroup import CgroupCounters
from executor.config import ExecutorConfig
from executor.errors import IdempotencyMismatch, InvalidRequest, NotFound, RateLimited, ShuttingDown
from executor.isolation import CommandUser, Users, base_environment
from executor.output import Spill
from executor.process import Command
from executor.spawn import Spawner
from executor.threads import started_pool
from executor.wire import ExecRequest, MiB, bad_field

log = logging.getLogger("executor.processes")

KEEP_SEC: Final = 3600.0  # an outcome, from the command's end
KEEP_COUNT: Final = 1000  # outcomes kept at least for KEEP_SEC; more go earlier, oldest first
KEEP_COUNT_MAX: Final = 10_000
KEEP_OUTPUT_BYTES: Final = 64 * MiB  # of ended commands, in memory, all together
SPILL_DISK_BYTES: Final = 1024 * MiB  # all spills together may be this much; further commands keep memory only
TRIM_AFTER_BYTES: Final = 8 * MiB  # of output since the heap was last trimmed
TRIM_QUIET_SEC: Final = 2.0  # without a command's end, before it is trimmed

_ENCODER: Final = msgspec.json.Encoder(order="sorted")


class Processes:
    """The Host that commands live in."""

    def __init__(
        self, config: ExecutorConfig, users: Users, spawner: Spawner, counters: CgroupCounters,
        inherited: dict[str, str], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._config = config
        self._users = users
        self._counters = counters
        self._inherited = inherited
        self._changed = changed  # called when a command starts or ends
        self.spawner = spawner
        self.loop = asyncio.get_running_loop()
        self.shell = os.fsencode(shutil.which("bash") or shutil.which("sh") or "/bin/sh")
        self.broken: str | None = None  # why commands cannot run here any more, for people
        self.bound_env: dict[str, str] = {}
        self.running = 0
        self.closing = False
        self._commands: dict[str, Command] = {}
        self._fingerprints: dict[str, bytes] = {}
        self._ended: OrderedDict[str, Command] = OrderedDict()
        self._kept_bytes = 0
        self._env_lists: dict[int, list[bytes]] = {}
        self._drained = asyncio.Event()
        self._drained.set()
        self._oom_seen = counters.oom_kills()
        self._pids_seen = counters.pids_denied()
        self._workers = started_pool(2, "spill")
        self._spills: list[Spill] = []
        self._spill_dir: str | None = None
        self._passed_bytes = 0  # output and, roughly, outcomes since the heap was last trimmed
        self._trimming: asyncio.TimerHandle | None = None
        self.counts: dict[str, int] = {}  # ended commands by reason

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────

    def start(
        self, request: ExecRequest, *, background: bool = False, streamed: bool = False, interactive: bool = False
    ) -> tuple[Command, bool]:
        """(the command, whether it was there already under its id). Raises what `request` makes impossible."""

        def make(id: str) -> Command:
            user = self._users.get(request.user)
            command = Command(
                self, request, id, user, self.directory(request.cwd), background=background, streamed=streamed,
                interactive=interactive,
            )  # fmt: skip
            command.start()
            if background:
                command.spill_to_disk()
            return command

        return self.admit(request, background, make)

    def directory(self, cwd: str | None) -> str:
        """The working directory that a request means."""
        return self._config.workspace if cwd is None else os.path.join(self._config.workspace, cwd)

    def admit(self, request: ExecRequest, kind: bool | str, make: Callable[[str], Command]) -> tuple[Command, bool]:
        """As `start`, for any kind of command: `make` gets the id and returns it started. A request joins the command
        of its id only where both are of one `kind`."""
        bad = bad_field(request)
        if bad is not None:
            raise InvalidRequest(f"{bad[0]} {bad[1]}", field=bad[0])
        if request.stdin_base64 is not None:
            try:
                base64.b64decode(request.stdin_base64, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidRequest("stdin_base64 is not base64", field="stdin_base64") from None
        id = request.id
        if id is not None:
            fingerprint = hashlib.blake2b(_ENCODER.encode((request, kind)), digest_size=16).digest()
            present = self._commands.get(id)
            if present is not None:
                if self._fingerprints[id] != fingerprint:
                    raise IdempotencyMismatch(f"process {id} was started with another body; choose another id")
                return present, True
        else:
            id = "p" + secrets.token_hex(16)
            fingerprint = b""
        if self.closing:
            raise ShuttingDown("this pod is ending; nothing was started")
        if self.running >= self._config.max_running:
            raise RateLimited(
                f"{self.running} commands run here already, as many as may", limit=self._config.max_running
            )
        command = make(id)
        self._commands[id] = command
        self._fingerprints[id] = fingerprint
        self.running += 1
        self._drained.clear()
        self._changed()
        return command, False

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

    def new_spill(self, start: int) -> Spill | None:
        self._spills = [spill for spill in self._spills if not spill.closed]
        if sum(spill.disk_bytes for spill in self._spills) >= SPILL_DISK_BYTES:
            log.warning("spill_budget_used", extra={"spills": len(self._spills)})
            return None
        try:
            if self._spill_dir is None:
                self._spill_dir = self._config.state_dir or tempfile.mkdtemp(prefix="sojourn-")
            spill = Spill(self._spill_dir, start, self._workers)
        except OSError as why:
            log.warning("spill_failed", extra={"errno": why.errno})
            return None
        self._spills.append(spill)
        return spill

    def was_oom(self) -> bool:
        before, self._oom_seen = self._oom_seen, self._counters.oom_kills()
        return self._oom_seen > before

    def was_pids(self) -> bool:
        before, self._pids_seen = self._pids_seen, self._counters.pids_denied()
        return self._pids_seen > before

    def shell_failed(self, why: str | None) -> None:
        if why is not None and self.broken is None:
            log.error("shell_broken", extra={"why": why})
        self.broken = why

    def command_ended(self, command: Command) -> None:
        self.running -= 1
        if not self.running:
            self._drained.set()
        if command.error is not None:  # nothing ran: the id is free again
            if self._commands.get(command.id) is command:
                self._forget(command.id)
        else:
            assert command.outcome is not None
            reason = command.outcome.reason
            self.counts[reason] = self.counts.get(reason, 0) + 1
            self._ended[command.id] = command
            self._kept_bytes += _memory(command)
            self._trim()
            self._passed_bytes += 4096 + command.stdout_bytes + command.stderr_bytes
            if self._passed_bytes > TRIM_AFTER_BYTES and self._trimming is None:
                self._trimming = self.loop.call_later(TRIM_QUIET_SEC, self._trim_heap)
        self._changed()

    def _trim(self) -> None:
        now = self.loop.time()
        while self._ended:
            oldest = next(iter(self._ended.values()))
            count = len(self._ended)
            if count <= KEEP_COUNT or (count <= KEEP_COUNT_MAX and now - oldest.ended_at < KEEP_SEC):
                break
            self._forget(oldest.id)
        if self._kept_bytes > KEEP_OUTPUT_BYTES:
            for command in self._ended.values():
                held = _memory(command)
                if held > 4096:
                    for one in command.logs:
                        one.shrink_all(2048)
                    self._kept_bytes -= held - _memory(command)
                if self._kept_bytes <= KEEP_OUTPUT_BYTES // 2:
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
        if self._ended.pop(id, None) is not None:
            self._kept_bytes -= _memory(command)
        command.close()

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, seconds: float) -> None:
        """Refuses new commands and ends those that run: TERM, and KILL when the time is nearly over."""
        self.closing = True
        if not self.running:
            return
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
        if self._trimming is not None:
            self._trimming.cancel()
        for command in list(self._commands.values()):
            command.close()
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self._spill_dir is not None and self._config.state_dir is None:
            shutil.rmtree(self._spill_dir, ignore_errors=True)


def _as_list(env: dict[str, str]) -> list[bytes]:
    return [f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in env.items()]


def _memory(command: Command) -> int:
    return sum(log.memory_bytes for log in command.logs)
