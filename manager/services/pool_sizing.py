"""How large a warm pool should be: a function of what was claimed, of how long a pod takes to start, and of the time.

A pool has to last until what replaces its pods has started. So it holds, divided by the utilisation that the operator
wants, what is claimed within the length of a start: it grows at the first sight of more, and keeps to the most that it
needed for a while before it gives that up evenly. Nothing here waits, asks a clock or knows a pod: the warm pool and
the simulator, `benchmarks/simulate_pool.py`, run the same code.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from typing import Final

from manager.model import PoolSize

FIRST_START_SEC: Final = 5.0  # what a start is taken to last before any was seen
_SHORTEST_START_SEC: Final = 1.0  # a watch and a look at the pool take their time too
_LONGEST_START_SEC: Final = 120.0  # beyond it a start says more about the cluster than about the next one
_STARTS_KEPT: Final = 32
_MOST_STEP_SEC: Final = 30.0  # a longer pause between two calls was none of the pool's: a halted process, a clock set
_CLAIMS_KEPT: Final = 4  # times the largest size, and a few
_STEPS: Final = 256  # in which a peak is forgotten


class PoolSizer:
    """One pool's size. Every `now` is in seconds of one clock that only goes forward; where it jumps all the same, a
    jump counts as half a minute at most, and one backwards as nothing."""

    def __init__(self, size: PoolSize) -> None:
        self.size = size
        self._step_sec = size.shrink_sec / _STEPS
        self._seen: float | None = None  # `now` of the last call
        self._at = 0.0  # seconds since the first one, without the jumps
        self._claims: list[float] = []  # when, in order; no more than a pool of the largest size takes note of
        self._starts: deque[float] = deque(maxlen=_STARTS_KEPT)
        self._start_sec = FIRST_START_SEC
        self._peaks: deque[tuple[float, int]] = deque()  # when and how large: each smaller than the one before it
        self._late = False  # some claims were told out of their order
        self.waiting = 0  # claims that found no pod, and for which none is being made yet

    # ── what happened ───────────────────────────────────────────────────────────────────────────────────────────

    def claimed(self, now: float, age_sec: float = 0.0) -> None:
        """A pod became somebody's, of the pool or made for it; `age_sec` ago, where that is only known now."""
        at = self._move(now) - max(0.0, age_sec)
        if self._claims and at < self._claims[-1]:
            insort(self._claims, at)
            self._late = True
        else:
            self._claims.append(at)
            self._note(at)
        most = _CLAIMS_KEPT * (self.size.max + 16)
        if len(self._claims) > 2 * most:
            del self._claims[:-most]

    def waits(self, now: float, change: int) -> None:
        """So many more claims wait, or fewer."""
        self._move(now)
        self.waiting = max(0, self.waiting + change)
        self._note(self._at)

    def started(self, now: float, seconds: float) -> None:
        """A pod of the pool was ready so long after it was asked for."""
        self._move(now)
        self._starts.append(min(max(seconds, _SHORTEST_START_SEC), _LONGEST_START_SEC))
        self._start_sec = sorted(self._starts)[len(self._starts) // 2]
        self._note(self._at)

    def found(self, now: float, pods: int) -> None:
        """The pool had so many when somebody new looked at it, who cannot know what for: it is given up as slowly."""
        self._remember(self._move(now), min(self.size.max, pods))

    # ── what follows from it ────────────────────────────────────────────────────────────────────────────────────

    @property
    def start_sec(self) -> float:
        """How long a start is taken to last: half of the last ones were no longer."""
        return self._start_sec

    def demand(self, now: float) -> int:
        """Claims of the last so many seconds as a start lasts, and those that wait."""
        return self._demand(self._move(now))

    def wanted(self, now: float) -> int:
        """Pods that belong to nobody, ready or starting, that there should be: from `min` to `max` of them."""
        at, kept_sec = self._move(now), self.size.shrink_sec
        if self._late:
            self._late = False
            for when in self._claims[bisect_right(self._claims, at - kept_sec) :]:
                self._note(when)
        while self._peaks and at - self._peaks[0][0] >= kept_sec:
            self._peaks.popleft()
        # Held for the first half, given up evenly over the second.
        held = max((peak * min(1.0, 2.0 - 2.0 * (at - when) / kept_sec) for when, peak in self._peaks), default=0.0)
        return min(self.size.max, max(self.size.min, math.ceil(held - 1e-9)))

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _move(self, now: float) -> float:
        if self._seen is not None:
            self._at += min(max(0.0, now - self._seen), _MOST_STEP_SEC)
        self._seen = now
        return self._at

    def _demand(self, at: float) -> int:
        first = bisect_right(self._claims, at - self._start_sec)
        return bisect_right(self._claims, at) - first + self.waiting

    def _note(self, at: float) -> None:
        """Remembers what the pool should have been at `at`."""
        self._remember(at, min(self.size.max, math.ceil(self._demand(at) / self.size.utilisation - 1e-9)))

    def _remember(self, at: float, need: int) -> None:
        """In steps of time, so that there are few to look at; what a later and larger one outlives is forgotten."""
        if need <= self.size.min:
            return
        step = math.ceil(at / self._step_sec) * self._step_sec
        after: list[tuple[float, int]] = []
        while self._peaks and self._peaks[-1][0] > step:  # what was learned late
            after.append(self._peaks.pop())
        if not after or after[-1][1] < need:
            while self._peaks and self._peaks[-1][1] <= need:
                self._peaks.pop()
            if not self._peaks or self._peaks[-1][0] < step:
                self._peaks.append((step, need))
        self._peaks.extend(reversed(after))
