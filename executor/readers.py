"""Pipes that are waited for, in an epoll of their own that the event loop waits for as one.

The loop takes eight system calls and an object to begin and to end with a descriptor; here it is one call each."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final

READY_AT_ONCE: Final = 64  # in one turn of the loop; the others stay ready


class Readers:
    """Not thread-safe: the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._look)

    def add(self, fd: int, ready: Callable[[], None]) -> None:
        """Calls `ready` whenever there is something to read, or the end, until `remove`. Raises OSError."""
        if self._epoll.closed:
            return
        self._epoll.register(fd, select.EPOLLIN)
        self._ready[fd] = ready

    def remove(self, fd: int) -> None:
        """Always before the descriptor is closed: a registration outlives it while another process has the pipe."""
        if self._ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _look(self) -> None:
        for fd, _events in self._epoll.poll(0, READY_AT_ONCE):
            ready = self._ready.get(fd)
            if ready is not None:  # one before it may have ended this one
                ready()

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._ready.clear()
