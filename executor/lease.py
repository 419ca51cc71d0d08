"""How long this pod may live: the dead-man's switch that ends it when its manager is gone, on the monotonic clock.

Work is a running command or a call that carries content. When the last work has ended and `quiet_sec` plus a grace
pass without any, or the hard end comes, the pod ends itself; before it is bound, the unclaimed deadline holds."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from executor.config import ExecutorConfig
from executor.errors import Conflict, InvalidRequest
from executor.wire import BindRequest, LeaseInfo, LeaseRequest

log = logging.getLogger("executor.lease")

MAX_SEC = 10 * 365 * 86_400.0


class Lease:
    def __init__(
        self,
        config: ExecutorConfig,
        running: Callable[[], int],
        end: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = running
        self.count_terminals: Callable[[], int] = lambda: 0
        self.on_claim: Callable[[], None] = lambda: None  # a manager names its terms, or others than before
        self._end = end
        self._grace_sec = config.quiet_grace_sec
        self.boot_id = os.urandom(16).hex()
        self.bound: BindRequest | None = None
        self.operations = 0
        self._quiet_sec: float | None = None
        self._hard_end: float | None = None
        self._unclaimed: float | None = None
        self._last_work = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if config.unclaimed_sec is not None:
            self._unclaimed = self._loop.time() + config.unclaimed_sec
            self._arm()

    # ── work ────────────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, quiet_sec: str) -> None:
        """A manager's `Sandbox-Lease-Sec`. Raises InvalidRequest."""
        try:
            value = float(quiet_sec)
        except ValueError:
            value = -1.0
        if not 0 < value <= MAX_SEC:
            raise InvalidRequest("Sandbox-Lease-Sec must be a number of seconds over 0", field="Sandbox-Lease-Sec")
        self._unclaimed = None
        if value != self._quiet_sec:
            self._quiet_sec = value
            self._arm()
            self.on_claim()

    def begin(self) -> None:
        self.operations += 1

    def done(self) -> None:
        self.operations -= 1
        self._last_work = self._loop.time()

    def worked(self) -> None:
        """A command started or ended, or a terminal had input or output."""
        self._last_work = self._loop.time()

    @property
    def busy(self) -> bool:
        return self.operations > 0 or self._running() > 0

    # ── identity and terms ──────────────────────────────────────────────────────────────────────────────────────

    def bind(self, request: BindRequest) -> bool:
        """True where the pod became this sandbox's now, False where it was already. Raises Conflict for another's."""
        if self.bound is not None:
            if (self.bound.sandbox_id, self.bound.task_id) != (request.sandbox_id, request.task_id):
                raise Conflict("this pod belongs to another sandbox")
            self.push(LeaseRequest(quiet_sec=request.lease.quiet_sec, hard_end_sec=request.lease.hard_end_sec))
            return False
        terms = LeaseRequest(quiet_sec=request.lease.quiet_sec, hard_end_sec=request.lease.hard_end_sec)
        check_terms(terms)
        self.bound = request
        self._unclaimed = None
        self._last_work = self._loop.time()
        self.push(terms)
        return True

    def push(self, request: LeaseRequest) -> None:
        """Moves deadlines. Raises InvalidRequest; Conflict for an unclaimed deadline of a pod that is bound."""
        check_terms(request)
        now = self._loop.time()
        if request.unclaimed_sec is not None:
            if self.bound is not None:
                raise Conflict("this pod belongs to a sandbox; it has no unclaimed deadline any more")
            self._unclaimed = now + request.unclaimed_sec
        if request.quiet_sec is not None:
            self._quiet_sec = request.quiet_sec
            self._last_work = now
        if request.hard_end_sec is not None:
            self._hard_end = now + request.hard_end_sec
        self._arm()

    def info(self) -> LeaseInfo:
        now = self._loop.time()
        quiet_for = 0.0 if self.busy else now - self._last_work
        quiet_left = None if self._quiet_sec is None else max(0.0, self._quiet_sec - quiet_for)
        return LeaseInfo(
            bound=self.bound is not None,
            sandbox_id=None if self.bound is None else self.bound.sandbox_id,
            boot_id=self.boot_id,
            operations=self.operations,
            running=self._running(),
            terminals=self.count_terminals(),
            quiet_for_sec=round(quiet_for, 3),
            quiet_left_sec=None if quiet_left is None else round(quiet_left, 3),
            hard_left_sec=None if self._hard_end is None else round(max(0.0, self._hard_end - now), 3),
            unclaimed_left_sec=None if self._unclaimed is None else round(max(0.0, self._unclaimed - now), 3),
        )

    # ── deadlines: one timer, armed only while there is one ─────────────────────────────────────────────────────

    def _deadlines(self) -> list[tuple[float, str]]:
        due = []
        if self._hard_end is not None:
            due.append((self._hard_end, "hard_end"))
        if self._unclaimed is not None:
            due.append((self._unclaimed, "unclaimed"))
        elif self._quiet_sec is not None:
            last = self._loop.time() if self.busy else self._last_work
            due.append((last + self._quiet_sec + self._grace_sec, "quiet"))
        return due

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._deadlines()
        if due:
            self._timer = self._loop.call_at(min(due)[0], self._check)

    def _check(self) -> None:
        self._timer = None
        now = self._loop.time()
        for at, why in self._deadlines():
            if at <= now:
                log.warning("pod_ends_itself", extra={"why": why})
                self._end(why)
                return
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def check_terms(request: LeaseRequest) -> None:
    for name in ("quiet_sec", "hard_end_sec", "unclaimed_sec"):
        value = getattr(request, name)
        if value is not None and not 0 < value <= MAX_SEC:
            raise InvalidRequest(f"{name} must be a number of seconds over 0", field=name)
