"""Room for so many at once, given in turn to those who wait: a crowd of one project holds nobody else up."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


@dataclass(eq=False)
class _Turn:
    kind: str
    called: asyncio.Future[bool]  # True: with a place


class FairRoom(Generic[Who]):
    """Whoever waits behind others of its own gets in after one of everybody else's: first come, first served for each,
    round robin between them. Bounded by whoever calls: every waiter is a request under way."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[Who, deque[_Turn]] = OrderedDict()  # whose turn is next stands first
        self._kinds: Counter[str] = Counter()

    @asynccontextmanager
    async def of(self, who: Who, kind: str = "", *, again: bool = False) -> AsyncIterator[bool]:
        """With a place: True. Or called by `call`, beside the places: False; `again` waits on in front, then."""
        placed = await self._enter(who, kind, again)
        try:
            yield placed
        finally:
            if placed:
                self._leave()

    def waiting(self, kind: str) -> int:
        """How many of a kind wait."""
        return self._kinds[kind]

    def call(self, kind: str) -> bool:
        """Lets one in that waits, of this kind, whose turn is next, beside the places. False: none of it waits."""
        if not self._kinds[kind]:
            return False
        for who, queue in self._waiting.items():
            turn = next((turn for turn in queue if turn.kind == kind and not turn.called.done()), None)
            if turn is not None:
                self._remove(who, queue, turn)
                turn.called.set_result(False)
                return True
        return False

    async def _enter(self, who: Who, kind: str, again: bool) -> bool:
        if self._free > 0 and not self._waiting:
            self._free -= 1
            return True
        turn = _Turn(kind, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(who, deque())
        if again:
            queue.appendleft(turn)
            self._waiting.move_to_end(who, last=False)
        else:
            queue.append(turn)
        self._kinds[kind] += 1
        try:
            return await turn.called
        except asyncio.CancelledError:
            if not turn.called.done() or turn.called.cancelled():
                if turn in queue:
                    self._remove(who, queue, turn)
            elif turn.called.result():
                self._leave()  # it was let in as it left
            else:
                self.call(kind)
            raise

    def _leave(self) -> None:
        while self._waiting:
            who, queue = next(iter(self._waiting.items()))
            turn = queue[0]
            self._remove(who, queue, turn)
            if not turn.called.done():
                turn.called.set_result(True)
                return
        self._free += 1

    def _remove(self, who: Who, queue: deque[_Turn], turn: _Turn) -> None:
        """Takes a turn out; the next one is somebody else's."""
        queue.remove(turn)
        self._kinds[turn.kind] -= 1
        if queue:
            self._waiting.move_to_end(who)
        elif self._waiting.get(who) is queue:
            del self._waiting[who]
