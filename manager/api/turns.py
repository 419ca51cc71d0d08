"""Whose request begins next, so that one project's flood holds nobody else's commands up (S33 of the threats).

So many requests begin in one round of the event loop, and the others wait for the next ones, each project in its turn.
Where one project sends more than a manager can do, every round would be as long as all of its requests together, and
another's request takes several rounds: to be read, to be sent on, to be answered. A short round costs a look at the
sockets more; a request that comes alone waits for nothing.

While several projects are at work, each also has only so many *young* requests: under way, and begun a moment ago. They
are what keeps processors busy; whatever lasts longer, as a command that waits for something, is not counted any more.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from typing import Final

from manager.model import Owner

BEGIN: Final = 1  # requests in a round
YOUNG: Final = 2 * len(os.sched_getaffinity(0))  # requests of one project
YOUNG_SEC: Final = 0.01
AT_WORK_SEC: Final = 5.0  # since its last request; then a project is at work no more


class Young:
    """A request that has begun and is counted."""

    __slots__ = ("owner", "timer")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.timer: asyncio.TimerHandle | None = None  # None: it is counted no more


class Turns:
    """Of this manager's event loop. Bounded by whoever calls: every waiter is a request under way."""

    def __init__(self, *, begin: int = BEGIN, young: int = YOUNG, young_sec: float = YOUNG_SEC) -> None:
        self._begin, self._most, self._young_sec = begin, young, young_sec
        self._left = begin  # of this round
        self._is_counting = False
        self._waiting: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()  # the next one first
        self._young: dict[Owner, int] = {}
        self._at_work: dict[Owner, float] = {}  # the loop's time of each project's last request
        self._looked_at = 0.0

    async def begin(self, owner: Owner) -> Young | None:
        """Returns when a request of this project may begin; its end is told with `end`."""
        loop = asyncio.get_running_loop()
        is_shared = self._is_shared(owner, loop.time())
        if self._left and not (is_shared and self._is_full(owner)):
            self._left -= 1
            self._count_rounds(loop)
        else:
            turn = loop.create_future()
            self._waiting.setdefault(owner, deque()).append(turn)
            self._count_rounds(loop)
            await turn
        if not is_shared:
            return None
        young = Young(owner)
        young.timer = loop.call_later(self._young_sec, self.end, young)
        self._young[owner] = self._young.get(owner, 0) + 1
        return young

    def end(self, young: Young | None) -> None:
        """Safe to repeat."""
        if young is None or young.timer is None:
            return
        young.timer.cancel()
        young.timer = None
        if (count := self._young[young.owner]) > 1:
            self._young[young.owner] = count - 1
        else:
            del self._young[young.owner]
        if self._waiting:
            self._count_rounds(asyncio.get_running_loop())

    def _is_shared(self, owner: Owner, now: float) -> bool:
        self._at_work[owner] = now
        if now - self._looked_at > AT_WORK_SEC:
            self._looked_at = now
            self._at_work = {one: at for one, at in self._at_work.items() if now - at < AT_WORK_SEC}
        return len(self._at_work) > 1

    def _is_full(self, owner: Owner) -> bool:
        return owner in self._waiting or self._young.get(owner, 0) >= self._most

    def _count_rounds(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_round, loop)

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._begin
        while self._left:
            owner = next((one for one in self._waiting if self._young.get(one, 0) < self._most), None)
            if owner is None:
                break  # until one that is counted ends, or is young no more
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind everybody else
            if not turn.done():  # its caller has not hung up
                turn.set_result(None)
                self._left -= 1
        self._is_counting = self._left < self._begin
        if self._is_counting:
            loop.call_soon(self._next_round, loop)
