"""Reads of pipes whose command waits for no reader: so many in a moment, the others wait in their pipe for their turn.

Without it a hundred commands that write as fast as they can would have all of the loop's time."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Final, Protocol

TICK_SEC: Final = 0.005
READS: Final = 8  # in a tick: up to 400 MB/s


class Source(Protocol):
    """A pipe that is read."""

    def hold(self) -> None: ...
    def go_on(self) -> None:
        """Its turn has come."""


class Turns:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tick_began = 0.0
        self._reads = 0
        self._waiting: dict[Source, None] = {}  # in their order
        self._next: asyncio.TimerHandle | None = None

    def has_read(self, source: Source) -> None:
        """Holds the source where there was too much in this moment, until its turn comes."""
        now = self._loop.time()
        if now - self._tick_began > TICK_SEC:
            self._tick_began, self._reads = now, 0
        self._reads += 1
        if self._reads > READS:
            source.hold()
            self.wait(source)

    def wait(self, source: Source) -> None:
        """For one that is held: it goes on at its next turn."""
        self._waiting[source] = None
        if self._next is None:
            self._next = self._loop.call_later(TICK_SEC, self._go_on)

    def _go_on(self) -> None:
        self._next = None
        self._tick_began, self._reads = self._loop.time(), 0
        for source in list(islice(self._waiting, READS)):
            del self._waiting[source]
            source.go_on()
        if self._waiting:
            self._next = self._loop.call_later(TICK_SEC, self._go_on)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
