"""How many connections there may be, in all and from one address, and which of them have waited for too long.

One timer for all of them, armed for the earliest deadline only; without connections there is none."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Final, Protocol

NEVER: Final = math.inf
HEAD_SEC: Final = 10.0  # for a whole head, however slowly it comes; a new connection has as long to send anything
IDLE_SEC: Final = 75.0  # for the next request on a kept connection
LOOK_AGAIN_SEC: Final = (
    IDLE_SEC  # for those without a deadline now: they may have one by then, and nobody needs to say so
)
GRAIN_SEC: Final = 1.0  # two looks are at least this far apart


class Watched(Protocol):
    def deadline(self) -> float:
        """On the loop's clock; NEVER while it is our turn."""

    def expire(self) -> None:
        """The deadline has passed: closes the connection."""


class Connections:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, most: int, most_of_one: int, reader_sec: float, last_descriptor: int
    ) -> None:
        self._loop = loop
        self.reader_sec = reader_sec  # a caller that takes nothing of its answer for so long is cut off
        self._most = most
        self._most_of_one = most_of_one
        self._last_descriptor = last_descriptor
        self._watched: set[Watched] = set()
        self._by_address: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        self.count = 0
        self.refused = 0
        self.expired = 0

    # ── how many ────────────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, transport: asyncio.BaseTransport) -> str | None:
        """What `leave` has to be called with at the end; None where there is no room for this one."""
        address = _address_of(transport)
        held = self._by_address.get(address, 0)
        if (
            self.count >= self._most
            or (address and held >= self._most_of_one)
            or transport.get_extra_info("socket").fileno() > self._last_descriptor
        ):
            self.refused += 1
            return None
        self.count += 1
        self._by_address[address] = held + 1
        return address

    def leave(self, address: str) -> None:
        self.count -= 1
        left = self._by_address[address] - 1
        if left:
            self._by_address[address] = left
        else:
            del self._by_address[address]

    # ── how long ────────────────────────────────────────────────────────────────────────────────────────────────

    def watch(self, one: Watched) -> None:
        self._watched.add(one)
        self.look_at(one.deadline())

    def forget(self, one: Watched) -> None:
        self._watched.discard(one)

    def all(self) -> list[Watched]:
        return list(self._watched)

    def look_at(self, at: float) -> None:
        """A deadline is nearer than it was."""
        if at < self._timer_at - GRAIN_SEC:
            self._arm(at)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer, self._timer_at = None, NEVER
        now = self._loop.time()
        next_at = now + LOOK_AGAIN_SEC
        for one in list(self._watched):
            deadline = one.deadline()
            if deadline <= now:
                self._watched.discard(one)
                self.expired += 1
                one.expire()
            elif deadline < next_at:
                next_at = deadline
        if self._watched:
            self._arm(max(next_at, now + GRAIN_SEC))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _address_of(transport: asyncio.BaseTransport) -> str:
    """The caller's address; "" for a Unix socket. All of 127.0.0.0/8 is the pod itself and so is one, and so is an
    IPv6 network of 64 bits, which one machine may have to itself."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0]).partition("%")[0]
    if ":" in host:
        packed = socket.inet_pton(socket.AF_INET6, host)
        if packed[:12] != b"\0" * 10 + b"\xff\xff":
            return packed[:8].hex()
        host = socket.inet_ntoa(packed[12:])
    return "127" if host.startswith("127.") else host
