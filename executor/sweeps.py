"""Finding and signalling the processes of many commands at once: one walk of /proc serves all that wait for it.

Hundreds of commands that time out together would otherwise walk it once each, several times over."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Final

from executor import tree

log = logging.getLogger("executor.sweeps")

Find = Callable[[tree.Snapshot], dict[int, tree.Seen]]
KILL_SWEEPS: Final = 50
RETRY_SEC: Final = 0.2  # while /proc cannot be read, for want of descriptors or memory


class _Wish:
    __slots__ = ("done", "find", "found", "number", "sweeps", "total")

    def __init__(self, find: Find, number: int, done: asyncio.Future[int]) -> None:
        self.find = find
        self.number = number  # the signal to send; 0: only count
        self.done = done
        self.found = 0  # by the latest sweep
        self.total = 0
        self.sweeps = 0


class Sweeps:
    """The event loop's, one walk at a time in a worker thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wishes: list[_Wish] = []
        self._sweeping = False
        self._closed = False

    async def signal(self, find: Find, number: int) -> int:
        """Sends `number` to all that `find` finds; how many there were. KILL repeats until no new one shows up."""
        return await self._wish(find, number)

    async def count(self, find: Find) -> int:
        return await self._wish(find, 0)

    def close(self) -> None:
        """What still waits is never answered: its tasks end with the loop."""
        self._closed = True

    def _wish(self, find: Find, number: int) -> asyncio.Future[int]:
        done: asyncio.Future[int] = self._loop.create_future()
        self._wishes.append(_Wish(find, number, done))
        if not self._sweeping:
            self._sweep()
        return done

    def _sweep(self) -> None:
        if self._closed:
            return
        self._sweeping = True
        wishes, self._wishes = self._wishes, []
        sweep = self._loop.run_in_executor(None, _carry_out, wishes)
        sweep.add_done_callback(lambda done: self._swept(done, wishes))

    def _swept(self, sweep: asyncio.Future[None], wishes: list[_Wish]) -> None:
        error = None if sweep.cancelled() else sweep.exception()
        if error is not None:
            log.warning("sweep_failed", extra={"why": str(error)[:200], "commands": len(wishes)})
            self._wishes[:0] = wishes
            self._loop.call_later(RETRY_SEC, self._sweep)
            return
        for wish in wishes:
            if wish.number == signal.SIGKILL and wish.found and wish.sweeps < KILL_SWEEPS:
                self._wishes.append(wish)
            elif not wish.done.done():
                wish.done.set_result(wish.total)
        self._sweeping = False
        if self._wishes:
            self._sweep()


def _carry_out(wishes: list[_Wish]) -> None:
    """Raises OSError, before anything was done."""
    at = tree.Snapshot()
    for wish in wishes:
        found = wish.find(at)
        wish.found = len(found)
        wish.total += len(found)
        wish.sweeps += 1
        if wish.number and found:
            tree.signal_all(found, wish.number)
