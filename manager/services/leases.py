"""Which sandboxes have work under way here, told to the store behind the commands' backs.

An operation counts in memory; one flusher writes what changed, many sandboxes in one round trip. A command waits for
Redis only where the sandbox's lease was not confirmed for long enough (`Sandboxes.ensure` asks `safe`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from manager.errors import StoreUnavailable
from manager.model import LeaseTerms
from manager.store.base import Store

log = logging.getLogger(__name__)

FLUSH_SEC: Final = 0.05  # writes of one sandbox are at least this far apart
HEARTBEATS: Final = 4  # in each active lease, so that three may be lost
HOLDER_BEAT_SEC: Final = 20.0  # and one in this: the store takes a silent manager for dead after three
LINGER_SEC: Final = 1.0  # a connection's traffic counts as work for so long
MAX_BATCH: Final = 1000  # sandboxes in one round trip
_SWEEP_SEC: Final = 60.0


class _Held:
    """What this manager knows of one sandbox's lease."""

    __slots__ = ("beat_at", "operations", "safe_until", "terms")

    def __init__(self, terms: LeaseTerms) -> None:
        self.terms = terms
        self.operations = 0
        self.safe_until = 0.0  # monotonic: the lease was confirmed to last at least so long
        self.beat_at = 0.0  # monotonic: of the last write with operations under way


class Operation:
    """Counts as work while it is entered: renews the lease at both ends and keeps it active between."""

    __slots__ = ("_held", "_leases", "_sandbox_id")

    def __init__(self, leases: Leases, sandbox_id: str, held: _Held) -> None:
        self._leases = leases
        self._sandbox_id = sandbox_id
        self._held = held

    def __enter__(self) -> None:
        self._held.operations += 1
        if self._held.operations == 1:
            self._leases.changed(self._sandbox_id)

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, tb: TracebackType | None) -> None:
        self._held.operations -= 1
        if self._held.operations == 0:
            self._leases.changed(self._sandbox_id)


class Traffic:
    """Counts as an operation while something passes, and a moment longer: so a terminal that nobody uses renews
    nothing, and one that somebody types into does not write at every key."""

    def __init__(self, operation: Callable[[], Operation]) -> None:
        self._operation = operation
        self._loop = asyncio.get_running_loop()
        self._held: Operation | None = None
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def passed(self) -> None:
        self._last = self._loop.time()
        if self._held is None:
            self._held = self._operation()
            self._held.__enter__()
            self._timer = self._loop.call_later(LINGER_SEC, self._look)

    def _look(self) -> None:
        left = self._last + LINGER_SEC - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)


class Leases:
    def __init__(
        self,
        store: Store,
        holder: str,
        *,
        flush_sec: float = FLUSH_SEC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._holder = holder
        self._flush_sec = flush_sec
        self._clock = clock
        self._held: dict[str, _Held] = {}  # of sandboxes used here; let go once nothing is known of them any more
        self._dirty: set[str] = set()
        self._wake = asyncio.Event()
        self.flushes = 0  # round trips that succeeded
        self.flush_failures = 0

    def operation(self, sandbox_id: str, terms: LeaseTerms) -> Operation:
        return Operation(self, sandbox_id, self._of(sandbox_id, terms))

    def operations(self, sandbox_id: str) -> int:
        """Under way through this manager."""
        held = self._held.get(sandbox_id)
        return held.operations if held is not None else 0

    @property
    def operations_total(self) -> int:
        return sum(held.operations for held in self._held.values())

    def safe(self, sandbox_id: str) -> bool:
        """Whether the lease is known to last well past the next flush: an operation may begin without asking."""
        held = self._held.get(sandbox_id)
        if held is None:
            return False
        margin = min(5.0, held.terms.idle_sec / 4, held.terms.active_sec / 4)
        return held.safe_until - self._clock() > margin

    def confirmed(self, sandbox_id: str, terms: LeaseTerms, left_sec: float) -> None:
        """The lease has at least `left_sec` left from now on, as the store said."""
        held = self._of(sandbox_id, terms)
        held.safe_until = max(held.safe_until, self._clock() + left_sec)

    def forget(self, sandbox_id: str) -> None:
        """The sandbox has ended: operations that still run renew nothing."""
        self._held.pop(sandbox_id, None)
        self._dirty.discard(sandbox_id)

    def new_terms(self, sandbox_id: str, terms: LeaseTerms) -> None:
        """How long it lasts is asked for again. What runs counts on, and an end that was not written yet still is."""
        held = self._held.get(sandbox_id)
        if held is not None:
            held.terms, held.safe_until = terms, 0.0

    def changed(self, sandbox_id: str) -> None:
        if sandbox_id in self._held:
            self._dirty.add(sandbox_id)
            self._wake.set()

    async def flush_forever(self) -> None:
        """Writes changes soon and heartbeats in time; goes on through outages of the store, with growing pauses."""
        failures = 0
        swept_at = self._clock()
        while True:
            try:
                async with asyncio.timeout(self._until_beat()):
                    await self._wake.wait()
            except TimeoutError:
                pass  # heartbeats are due, or soon
            self._wake.clear()
            try:
                await self.flush()
                failures = 0
                await asyncio.sleep(self._flush_sec)
            except StoreUnavailable as why:
                failures += 1
                self._wake.set()
                log.warning("lease_flush_failed", extra={"why": why.message, "failures": failures})
                await asyncio.sleep(min(2.0, self._flush_sec * 2 ** min(failures, 6)) * random.uniform(0.5, 1.5))
            if self._clock() - swept_at > _SWEEP_SEC:
                swept_at = self._clock()
                self._sweep()

    async def flush(self) -> None:
        """One write of everything that changed or is due. Raises StoreUnavailable, having forgotten nothing."""
        now = self._clock()
        due = {sid for sid, held in self._held.items() if held.operations and now - held.beat_at >= self._beat(held)}
        todo = list(self._dirty | due)
        for first in range(0, len(todo), MAX_BATCH):
            await self._write([sid for sid in todo[first : first + MAX_BATCH] if sid in self._held])

    async def close(self) -> None:
        """Operations of this manager are over: writes the last counts and takes its name off every lease."""
        try:
            await self.flush()
            await self._store.drop_holder(self._holder)
        except StoreUnavailable as why:
            log.warning("lease_holder_left", extra={"why": why.message})

    async def _write(self, batch: list[str]) -> None:
        if not batch:
            return
        self._dirty.difference_update(batch)
        asked_at = self._clock()
        counts = {sandbox_id: self._held[sandbox_id].operations for sandbox_id in batch}
        try:
            await self._store.touch_leases(self._holder, counts)
        except BaseException:
            self._dirty.update(sid for sid in batch if sid in self._held)
            self.flush_failures += 1
            raise
        self.flushes += 1
        for sandbox_id, count in counts.items():
            held = self._held.get(sandbox_id)
            if held is None:
                continue
            if count:
                held.beat_at = asked_at
                held.safe_until = max(held.safe_until, asked_at + held.terms.active_sec)
            else:
                # The end of the last operation shortens the lease to the idle length, see design.md section 5.
                held.safe_until = asked_at + held.terms.idle_sec

    def _of(self, sandbox_id: str, terms: LeaseTerms) -> _Held:
        held = self._held.get(sandbox_id)
        if held is None:
            held = self._held[sandbox_id] = _Held(terms)
        return held

    @staticmethod
    def _beat(held: _Held) -> float:
        return min(held.terms.active_sec / HEARTBEATS, HOLDER_BEAT_SEC)

    def _until_beat(self) -> float | None:
        """Seconds until the first heartbeat is due; None where nothing runs, so that an idle manager sleeps."""
        now = self._clock()
        waits = [held.beat_at + self._beat(held) - now for held in self._held.values() if held.operations]
        return max(0.0, min(waits)) if waits else None

    def _sweep(self) -> None:
        """Lets go of sandboxes that are quiet here and whose lease is no longer known."""
        now = self._clock()
        for sandbox_id in [sid for sid, held in self._held.items() if not held.operations and held.safe_until < now]:
            if sandbox_id not in self._dirty:
                del self._held[sandbox_id]
