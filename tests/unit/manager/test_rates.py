"""How fast one key may ask."""

from __future__ import annotations

import pytest

from manager.api.rates import BURST_SEC, Rates
from manager.errors import RateLimited
from manager.model import Owner, Principal, Role

RATE = 10
ONE, OTHER = (Principal(Owner("acme", "web"), Role.MEMBER, key_id) for key_id in ("a", "b"))
ELSEWHERE = Principal(Owner("acme", "shop"), Role.MEMBER, "a")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(rates: Rates, principal: Principal, tries: int) -> int:
    count = 0
    for _ in range(tries):
        try:
            rates.take(principal, RATE)
        except RateLimited:
            continue
        count += 1
    return count


def test_two_seconds_worth_may_come_at_once_and_then_so_many_a_second() -> None:
    """S33"""
    clock = Clock()
    rates = Rates(clock)
    assert taken(rates, ONE, 100) == BURST_SEC * RATE
    clock.now += 1
    assert taken(rates, ONE, 100) == RATE
    clock.now += 3600
    assert taken(rates, ONE, 100) == BURST_SEC * RATE


def test_a_refused_request_is_told_when_the_next_would_be_taken() -> None:
    clock = Clock()
    rates = Rates(clock)
    taken(rates, ONE, 100)
    with pytest.raises(RateLimited) as refusal:
        rates.take(ONE, RATE)
    assert refusal.value.retry_after_sec == pytest.approx(1 / RATE)
    clock.now += 1 / RATE + 1e-6
    rates.take(ONE, RATE)


def test_keys_and_the_projects_that_a_platform_key_acts_for_are_counted_by_themselves() -> None:
    rates = Rates(Clock())
    assert [taken(rates, one, 100) for one in (ONE, OTHER, ELSEWHERE)] == [BURST_SEC * RATE] * 3


def test_keys_that_have_not_asked_for_a_while_cost_no_memory() -> None:
    clock = Clock()
    rates = Rates(clock)
    for number in range(20_001):
        clock.now += 0.01
        rates.take(Principal(Owner("acme", "web"), Role.MEMBER, f"key-{number}"), RATE)
    assert len(rates._full_at) <= 10_001


def test_however_many_keys_ask_at_once_few_requests_look_through_all_of_them() -> None:
    clock = Clock()
    rates = Rates(clock)
    looks = 0
    for number in range(45_000):
        before = rates._full_at
        rates.take(Principal(Owner("acme", f"p-{number}"), Role.PLATFORM, "key"), RATE)
        looks += rates._full_at is not before
    assert looks == 3
    assert len(rates._full_at) == 45_000
    clock.now += 3600
    for number in range(45_000):
        rates.take(Principal(Owner("acme", f"q-{number}"), Role.PLATFORM, "key"), RATE)
    assert len(rates._full_at) <= 80_001
