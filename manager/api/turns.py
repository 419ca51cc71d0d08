"""So many requests begin in one round of the event loop; the others wait for the next ones, each project in its turn.

Where one project sends more than a manager can do, every round would be as long as all of its requests together, and
another's request takes several rounds: to be read, to be sent on, to be answered. A short round costs a look at the
sockets more; a request that comes alone waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Final

from manager.model import Owner

BEGIN: Final = 1  # requests in a round


class Turns:
    """Of this manager's event loop. Bounded by whoever calls: every waiter is a request under way."""

    def __init__(self, begin: int = BEGIN) -> None:
        self._begin = begin
        self._left = begin  # of this round
        self._is_counting = False
        self._waiting: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()  # the next one first

    async def of(self, owner: Owner) -> None:
        """Returns when a request of this project may begin."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_round, loop)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._begin
        while self._left and self._waiting:
            owner, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind everybody else
            if not turn.done():  # its caller has not hung up
                turn.set_result(None)
                self._left -= 1
        self._is_counting = self._left < self._begin
        if self._is_counting:
            loop.call_soon(self._next_round, loop)
