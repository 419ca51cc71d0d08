"""A warm pool in simulated time: the manager's own sizing, and the steps that a claim takes there, without pods."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manager.model import PoolSize
from manager.services.pool_sizing import PoolSizer

LOOK_SEC = 5.0  # between two looks at the pool where nothing happens
MOMENTS = 300  # the picture over time has so many points


@dataclass(frozen=True, kw_only=True)
class Starts:
    """How long a pod takes to start: half of them `median_sec` or less, one in twenty `slow_sec` or more."""

    median_sec: float
    slow_sec: float
    together: int  # that start at once, of the pool or not; those beyond wait for their turn

    def one(self, rng: random.Random) -> float:
        spread = math.log(self.slow_sec / self.median_sec) / 1.645 if self.slow_sec > self.median_sec else 0.0
        return self.median_sec * math.exp(spread * rng.gauss(0.0, 1.0))


@dataclass
class Outcome:
    name: str
    size: PoolSize
    waits: list[float] = field(default_factory=list)  # seconds, of each claim
    hits: int = 0
    pod_seconds: float = 0.0  # of pods that were nobody's, ready or starting
    seconds: float = 0.0
    largest: int = 0
    moments: list[tuple[float, int, int]] = field(default_factory=list)  # when, ready, wanted

    def wait(self, share: float) -> float:
        """So many of all claims had their pod within it; 0.0 where there were none."""
        ordered = sorted(self.waits)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0

    @property
    def hit_share(self) -> float:
        return self.hits / len(self.waits) if self.waits else 1.0

    @property
    def pods(self) -> float:
        """On average: pod-hours an hour."""
        return self.pod_seconds / self.seconds if self.seconds else 0.0


class Simulation:
    def __init__(
        self,
        name: str,
        size: PoolSize,
        starts: Starts,
        *,
        cold_together: int,
        seed: int,
        settle_sec: float = 0.0,
        moments: bool = False,
    ) -> None:
        """`cold_together`: pods that are made at once for claims that found none, as the manager bounds them. Claims of
        the first `settle_sec` are in no figure; `moments`: with the picture over time."""
        self._sizer = PoolSizer(size)
        self._starts, self._rng = starts, random.Random(seed)
        self._cold_free = cold_together
        self._settle_sec = settle_sec
        self._draws = moments
        self._served = 0
        self._now = 0.0
        self._ready = 0
        self._asked: dict[int, float] = {}  # of the pool and starting: number -> when it was asked for
        self._line: deque[tuple[int, Callable[[], None]]] = deque()  # starts that wait for their turn
        self._places = starts.together
        self._queue: deque[float] = deque()  # when claims came that wait for their turn to have a pod made
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.outcome = Outcome(name, size)

    def run(self, arrivals: Sequence[float]) -> Outcome:
        """The pool is full at the start and is watched until the last claim has its pod."""
        self._ready = self._sizer.wanted(0.0)
        for at in arrivals:
            heapq.heappush(self._events, (at, next(self._numbers), self._claim))
        end = arrivals[-1] if arrivals else 0.0
        every = max(LOOK_SEC, end / MOMENTS)
        next_look, next_moment = 0.0, 0.0
        while self._events and self._served < len(arrivals):
            if next_look <= self._events[0][0]:
                self._to(next_look)
                next_look += LOOK_SEC
            else:
                at, _, event = heapq.heappop(self._events)
                self._to(at)
                event()
            wanted = self._tend()
            if self._draws and self._now >= next_moment:
                self.outcome.moments.append((self._now, self._ready, wanted))
                next_moment = self._now + every
        return self.outcome

    def _to(self, at: float) -> None:
        pods = self._ready + len(self._asked)
        self.outcome.pod_seconds += pods * (at - self._now)
        self.outcome.largest = max(self.outcome.largest, pods)
        self.outcome.seconds = self._now = at

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), event))

    # ── a claim ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _claim(self) -> None:
        if self._ready > len(self._queue):
            self.outcome.hits += self._now >= self._settle_sec
            self._take(self._now)
        elif self._cold_free:
            self._cold_free -= 1
            self._make(self._now)
        else:
            self._queue.append(self._now)
            self._sizer.waits(self._now, +1)

    def _take(self, came: float) -> None:
        self._ready -= 1
        self._sizer.claimed(self._now)
        self._serve(came)

    def _serve(self, came: float) -> None:
        self._served += 1
        if came >= self._settle_sec:
            self.outcome.waits.append(self._now - came)

    def _make(self, came: float) -> None:
        self._sizer.claimed(self._now)

        def done() -> None:
            self._serve(came)
            self._leave()

        self._start(next(self._numbers), done)

    def _leave(self) -> None:
        """Whose turn it is now takes what the pool has meanwhile, else has a pod made."""
        while self._queue:
            came = self._queue.popleft()
            self._sizer.waits(self._now, -1)
            if not self._ready:
                self._make(came)
                return
            self._take(came)
        self._cold_free += 1

    # ── pods ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, number: int, done: Callable[[], None]) -> None:
        self._line.append((number, done))
        self._next_start()

    def _next_start(self) -> None:
        while self._places and self._line:
            number, done = self._line.popleft()
            self._places -= 1
            took = self._starts.one(self._rng)
            if number in self._asked:
                self._asked[number] = self._now  # as the manager measures it: since the provider was asked

            def ended(done: Callable[[], None] = done) -> None:
                self._places += 1
                done()
                self._next_start()

            self._later(took, ended)

    def _tend(self) -> int:
        wanted = self._sizer.wanted(self._now)
        missing = wanted - self._ready - len(self._asked)
        for _ in range(missing):
            number = next(self._numbers)
            self._asked[number] = self._now
            self._start(number, lambda number=number: self._became_ready(number))  # type: ignore[misc]
        for _ in range(-missing):
            if self._asked:
                self._asked.popitem()  # it starts all the same, for nobody
            elif self._ready:
                self._ready -= 1
        return wanted

    def _became_ready(self, number: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            self._ready += 1
            self._sizer.started(self._now, self._now - asked)
            if self._queue:  # for whoever waits, not for whoever comes next
                self._sizer.waits(self._now, -1)
                self._take(self._queue.popleft())
