"""A pool's size follows what is claimed: at once upwards, slowly downwards, and never beyond its bounds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manager.model import PoolSize
from manager.services.pool_sizing import FIRST_START_SEC, PoolSizer

SIZE = PoolSize(min=2, max=50, utilisation=0.5, shrink_sec=600.0)

sizes = st.builds(
    lambda least, more, share, shrink: PoolSize(min=least, max=least + more, utilisation=share, shrink_sec=shrink),
    st.integers(0, 20), st.integers(0, 60), st.floats(0.1, 1.0), st.floats(10.0, 3600.0),
)  # fmt: skip
moments = st.lists(st.floats(0.0, 100.0), max_size=60).map(sorted)
# Whatever may be told, in any order, with any clock: (what, now, value)
told = st.lists(
    st.tuples(
        st.sampled_from(["claimed", "waits", "started", "found", "wanted"]),
        st.floats(-1e9, 1e9),
        st.floats(-10.0, 1e6),
    ),
    max_size=60,
)


def sizer_after(size: PoolSize, claims: list[float], start_sec: float | None = None) -> PoolSizer:
    """One that was looked at every ten seconds meanwhile, as a manager does at least."""
    sizer = PoolSizer(size)
    sizer.wanted(0.0)
    if start_sec is not None:
        sizer.started(0.0, start_sec)
    before = 0.0
    for at in claims:
        before = look(sizer, before, at)
        sizer.claimed(at)
    return sizer


def look(sizer: PoolSizer, now: float, until: float) -> float:
    """Every ten seconds; returns `until`."""
    while (now := now + 10.0) < until:
        sizer.wanted(now)
    sizer.wanted(until)
    return until


def tell(sizer: PoolSizer, what: str, now: float, value: float) -> None:
    if what == "claimed":
        sizer.claimed(now, value)
    elif what == "waits":
        sizer.waits(now, int(value))
    elif what == "started":
        sizer.started(now, value)
    elif what == "found":
        sizer.found(now, int(value))


@settings(max_examples=60, deadline=None)
@given(sizes, told)
def test_whatever_is_told_and_whatever_the_clock_does_a_pool_stays_within_its_bounds(
    size: PoolSize, events: list[tuple[str, float, float]]
) -> None:
    sizer = PoolSizer(size)
    for what, now, value in events:
        tell(sizer, what, now, value)
        assert size.min <= sizer.wanted(now) <= size.max


@settings(max_examples=60, deadline=None)
@given(sizes, moments, moments, st.floats(1.0, 60.0))
def test_more_claims_never_make_a_pool_smaller(
    size: PoolSize, claims: list[float], more: list[float], start_sec: float
) -> None:
    fewer = sizer_after(size, claims, start_sec)
    all_of_them = sizer_after(size, sorted(claims + more), start_sec)
    look(fewer, max(claims, default=0.0), 100.0)
    look(all_of_them, max(claims + more, default=0.0), 100.0)
    before = 100.0
    for now in (100.0, 120.0, 120.0 + size.shrink_sec * 0.4, 120.0 + size.shrink_sec * 0.7):
        for sizer in (fewer, all_of_them):
            look(sizer, before, now)
        before = now
        assert all_of_them.wanted(now) >= fewer.wanted(now)


@settings(max_examples=60, deadline=None)
@given(sizes, moments, st.lists(st.floats(0.1, 30.0), min_size=1, max_size=40))
def test_a_pool_is_given_up_no_faster_than_its_peak_over_half_of_its_time(
    size: PoolSize, claims: list[float], steps: list[float]
) -> None:
    sizer = sizer_after(size, claims)
    now, before = 100.0, sizer.wanted(100.0)
    for step in steps:
        now += step
        after = sizer.wanted(now)
        assert after <= before  # nothing was claimed
        assert before - after <= math.ceil(size.max * step / (size.shrink_sec / 2)) + 1
        before = after


@settings(max_examples=30, deadline=None)
@given(sizes, moments)
def test_in_the_end_a_quiet_pool_is_at_its_least(size: PoolSize, claims: list[float]) -> None:
    sizer = sizer_after(size, claims)
    now = 100.0
    while now < 130.0 + size.shrink_sec * 1.01:
        now += 25.0
        sizer.wanted(now)
    assert sizer.wanted(now) == size.min


@settings(max_examples=60, deadline=None)
@given(sizes, st.lists(st.integers(0, 400).map(lambda quarters: quarters / 4), max_size=60))
def test_claims_that_are_told_late_and_in_any_order_count_as_if_they_had_been_told_in_time(
    size: PoolSize, claims: list[float]
) -> None:
    late = sizer_after(size, [])
    look(late, 0.0, 100.0)
    for at in claims:
        late.claimed(100.0, 100.0 - at)
    in_time = sizer_after(size, sorted(claims))
    look(in_time, max(claims, default=0.0), 100.0)
    assert abs(late.wanted(100.0) - in_time.wanted(100.0)) <= 1 + size.max * 2 / 256  # they are rounded to its steps


def test_a_pool_holds_what_is_claimed_during_a_start_by_the_utilisation() -> None:
    sizer = sizer_after(SIZE, [10.0, 11.0, 12.0, 13.0], start_sec=10.0)
    assert sizer.demand(13.0) == 4
    assert sizer.wanted(13.0) == 8
    assert sizer.demand(21.5) == 2  # of the last ten seconds


def test_a_burst_grows_a_pool_at_once_and_the_claims_that_wait_count() -> None:
    sizer = sizer_after(SIZE, [100.0] * 5)
    assert sizer.wanted(100.0) == 10
    sizer.waits(100.0, +4)
    assert sizer.wanted(100.0) == 18
    sizer.waits(101.0, -4)
    assert sizer.demand(101.0) == 5


def test_a_peak_is_held_for_half_of_the_time_and_given_up_evenly_over_the_other() -> None:
    sizer = sizer_after(SIZE, [0.0] * 10)
    sizes = [sizer.wanted(float(now)) for now in range(0, 620, 10)]
    assert sizes[: 300 // 10] == [20] * 30
    assert sizes[450 // 10] == 10
    assert sizes[-2:] == [2, 2]
    assert max(before - after for before, after in itertools.pairwise(sizes)) == 1


def test_slow_starts_ask_for_a_larger_pool_and_one_outlier_does_not() -> None:
    claims = [90.0, 92.0, 94.0, 96.0, 98.0]
    slow, quick = sizer_after(SIZE, claims, 10.0), sizer_after(SIZE, claims, 1.0)
    assert slow.wanted(98.0) == 10 > quick.wanted(98.0)
    one = PoolSizer(SIZE)
    for _ in range(5):
        one.started(0.0, 2.0)
    one.started(0.0, 600.0)
    assert one.start_sec == 2.0


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_neither_empties_a_pool_nor_fills_it(jump: float) -> None:
    sizer = sizer_after(SIZE, [0.0] * 10)
    assert sizer.wanted(jump) == 20
    sizer.claimed(jump)
    assert 20 <= sizer.wanted(jump + 1.0) <= 22


def test_a_fixed_size_is_kept_whatever_is_claimed() -> None:
    sizer = sizer_after(PoolSize(min=3, max=3), [float(now) for now in range(50)])
    sizer.waits(50.0, +10)
    assert sizer.wanted(50.0) == 3


def test_a_pool_of_none_begins_with_the_first_claim_and_ends_where_no_more_come() -> None:
    sizer = PoolSizer(PoolSize(min=0, max=4, utilisation=1.0, shrink_sec=60.0))
    assert sizer.wanted(0.0) == 0
    sizer.claimed(1.0)
    assert sizer.wanted(1.0) == 1
    assert [sizer.wanted(float(now)) for now in (30, 60, 62)] == [1, 1, 0]


def test_what_an_earlier_manager_kept_is_given_up_as_slowly() -> None:
    sizer = PoolSizer(SIZE)
    sizer.found(0.0, 30)
    assert sizer.wanted(0.0) == 30
    assert [sizer.wanted(float(now)) for now in range(25, 301, 25)][-1] == 30
    assert sizer.start_sec == FIRST_START_SEC


def test_many_claims_take_no_more_memory_and_a_look_stays_short() -> None:
    sizer = PoolSizer(PoolSize(min=0, max=10, shrink_sec=600.0))
    for number in range(50_000):
        sizer.claimed(number / 50)
    assert len(sizer._claims) < 300
    assert len(sizer._peaks) <= 257
    assert sizer.wanted(1000.0) == 10
