"""Counting connections and finding those that waited too long: threat S27."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from executor.connections import HEAD_SEC, IDLE_SEC, NEVER, Connections


class Socket:
    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number


class Transport(asyncio.BaseTransport):
    def __init__(self, peer: Any, number: int = 3) -> None:
        self.facts = {"peername": peer, "socket": Socket(number)}

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.facts.get(name, default)


class Clock:
    """A loop of which only the clock is used, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Any, Any]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: Any) -> Any:
        timer = asyncio.TimerHandle(at, call, (), self)  # type: ignore[arg-type]
        self.timers.append((at, call, timer))
        return timer

    def _timer_handle_cancelled(self, _handle: Any) -> None: ...

    def get_debug(self) -> bool:
        return False

    @property
    def armed(self) -> list[float]:
        return [at for at, _call, timer in self.timers if not timer.cancelled()]

    def go_to(self, now: float) -> int:
        """How many timers rang on the way."""
        rang = 0
        while (due := [one for one in self.timers if one[0] <= now and not one[2].cancelled()]) != []:
            at, call, timer = min(due, key=lambda one: one[0])
            self.now = max(self.now, at)
            self.timers = [one for one in self.timers if one[2] is not timer]
            call()
            rang += 1
        self.now = now
        return rang


class One:
    def __init__(self, at: float) -> None:
        self.at = at
        self.expired_at: float | None = None
        self.clock: Clock

    def deadline(self) -> float:
        return self.at

    def expire(self) -> None:
        self.expired_at = self.clock.now


def made(clock: Clock, most: int = 100, of_one: int = 100) -> Connections:
    return Connections(clock, most=most, most_of_one=of_one, reader_sec=300.0, last_descriptor=1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peers", "is_one"),
    [
        ([("127.0.0.1", 1), ("127.8.9.10", 2), ("::ffff:127.0.0.2", 3, 0, 0)], True),
        ([("10.0.0.1", 1), ("::ffff:10.0.0.1", 2, 0, 0)], True),
        ([("2001:db8::1", 1, 0, 0), ("2001:db8::2:3", 2, 0, 0), ("2001:db8::%eth0", 2, 0, 0)], True),
        ([("10.0.0.1", 1), ("10.0.0.2", 1), ("2001:db8:0:1::1", 1, 0, 0), ("2001:db8::1", 1, 0, 0)], False),
        (["", "", ""], False),
    ],
)
def test_one_caller_cannot_take_every_place_under_many_names(peers: list[Any], is_one: bool) -> None:
    connections = made(Clock(), of_one=1)
    entered = [connections.enter(Transport(peer)) for peer in peers]
    refused = [address for address in entered if address is None]
    assert len(refused) == connections.refused == (len(peers) - 1 if is_one else 0)


def test_the_last_descriptors_are_not_for_connections() -> None:
    connections = made(Clock())
    assert connections.enter(Transport("", 1001)) is None
    assert connections.enter(Transport("", 1000)) == ""


def test_a_place_is_free_again_when_its_connection_has_left() -> None:
    connections = made(Clock(), most=2, of_one=2)
    first, second = (connections.enter(Transport(("10.0.0.1", port))) for port in (1, 2))
    assert connections.enter(Transport(("10.0.0.9", 3))) is None
    assert first is not None
    connections.leave(first)
    assert connections.enter(Transport(("10.0.0.9", 3))) == "10.0.0.9"
    assert second == "10.0.0.1"


def test_each_deadline_is_met_within_a_second_and_one_timer_serves_all() -> None:
    clock = Clock()
    connections = made(clock)
    ones = [One(at) for at in (IDLE_SEC, HEAD_SEC, HEAD_SEC + 0.3, NEVER)]
    for one in ones:
        one.clock = clock
        connections.watch(one)
        assert len(clock.armed) == 1
    rang = clock.go_to(100.0)
    for one in ones[:3]:
        assert one.expired_at is not None
        assert 0 <= one.expired_at - one.at <= 1.0
    assert ones[3].expired_at is None
    assert connections.expired == 3
    assert rang < 6, "no ticking"


def test_a_deadline_that_came_nearer_is_looked_at_in_time_and_nothing_rings_without_connections() -> None:
    clock = Clock()
    connections = made(clock)
    one = One(NEVER)
    one.clock = clock
    connections.watch(one)
    clock.go_to(5.0)
    one.at = 5.0 + HEAD_SEC
    connections.look_at(one.at)
    clock.go_to(30.0)
    assert one.expired_at == 5.0 + HEAD_SEC
    clock.go_to(500.0)
    assert clock.armed == []
