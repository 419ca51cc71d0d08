"""Work keeps a sandbox's pod, its end gives it back in time, and the reaper never takes one that works."""

from __future__ import annotations

import asyncio

import pytest

from executor.wire import LeaseInfo
from manager.errors import StoreUnavailable
from manager.executor_client import PodRef
from manager.model import BindingState, LeaseTerms
from manager.services.leases import Leases
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME, TERMS, World, running, services_over, until, world


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ── counting ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_many_short_operations_are_one_write() -> None:
    store = MemoryStore()
    leases = Leases(store, "m1")
    for _ in range(100):
        with leases.operation("s1", TERMS), leases.operation("s2", TERMS):
            assert leases.operations("s1") == 1
    await leases.flush()
    assert store.calls == ["touch_leases"]
    await leases.flush()
    assert store.calls == ["touch_leases"]  # nothing changed, nothing is due


async def test_a_lease_is_safe_only_for_as_long_as_it_was_confirmed() -> None:
    clock = Clock()
    leases = Leases(MemoryStore(), "m1", clock=clock)
    assert not leases.safe("s")
    leases.confirmed("s", TERMS, 50.0)
    assert leases.safe("s")
    leases.confirmed("s", TERMS, 10.0)  # an older word takes nothing back
    clock.now += 40
    assert leases.safe("s")
    clock.now += 6  # nearer to its end than a late flush may be
    assert not leases.safe("s")


async def test_the_end_of_the_last_operation_counts_from_then_with_the_idle_length() -> None:
    clock = Clock()
    leases = Leases(MemoryStore(), "m1", clock=clock)
    with leases.operation("s", TERMS):
        await leases.flush()
        clock.now += TERMS.idle_sec + 10
        assert leases.safe("s")
    await leases.flush()
    assert leases.safe("s")
    clock.now += TERMS.idle_sec - 4
    assert not leases.safe("s")


async def test_running_work_is_written_again_before_a_holder_counts_as_dead() -> None:
    clock, store = Clock(), MemoryStore()
    leases = Leases(store, "m1", clock=clock)
    with leases.operation("s", TERMS):
        for _ in range(6):
            await leases.flush()
            clock.now += 10.5
    assert store.calls.count("touch_leases") == 3  # of six looks, 10.5 s apart: each 20 s


async def test_a_short_active_lease_is_renewed_four_times_in_it() -> None:
    clock, store = Clock(), MemoryStore()
    leases = Leases(store, "m1", clock=clock)
    with leases.operation("s", LeaseTerms(active_sec=8.0, idle_sec=4.0, max_sec=100.0)):
        for _ in range(8):
            await leases.flush()
            clock.now += 1.0
    assert store.calls.count("touch_leases") == 4


async def test_a_write_that_fails_is_made_later_and_nothing_is_forgotten() -> None:
    store = MemoryStore()
    leases = Leases(store, "m1")
    store.down = True
    with leases.operation("s", TERMS):
        with pytest.raises(StoreUnavailable):
            await leases.flush()
        assert not leases.safe("s")
        store.down = False
        await leases.flush()
        assert leases.safe("s")


async def test_the_flusher_goes_on_after_an_outage() -> None:
    store = MemoryStore()
    leases = Leases(store, "m1", flush_sec=0.001)
    flusher = asyncio.create_task(leases.flush_forever())
    store.down = True
    with leases.operation("s", TERMS):
        await until(lambda: leases.flush_failures >= 2)
        store.down = False
        await until(lambda: leases.safe("s"))
    flusher.cancel()
    await asyncio.wait([flusher])


async def test_a_sandbox_that_ended_under_an_operation_is_not_written_any_more() -> None:
    store = MemoryStore()
    leases = Leases(store, "m1")
    with leases.operation("s", TERMS):
        leases.forget("s")
    await leases.flush()
    assert store.calls == []
    assert leases.operations("s") == 0


# ── the store's side, through real operations ───────────────────────────────────────────────────────────────────────


async def left(here: World, task_id: str = "t") -> float:
    lease = await here.store.get_lease((await here.binding(task_id)).sandbox_id)
    assert lease is not None
    return lease.until - lease.now


async def test_a_command_keeps_the_lease_active_and_its_end_makes_it_idle() -> None:
    async with world() as here:
        running_command = asyncio.create_task(here.run("t", "wait"))
        await until(lambda: bool(here.provider.pods))
        executor = here.provider.executors[here.provider.pods[0].name]
        await executor.waiting.wait()
        await here.services.leases.flush()
        assert await left(here) == pytest.approx(TERMS.active_sec, abs=30)
        executor.release()
        await running_command
        await here.services.leases.flush()
        assert await left(here) == pytest.approx(TERMS.idle_sec, abs=30)


async def test_a_command_waits_for_the_store_only_where_the_lease_is_not_known_to_last() -> None:
    async with world() as here:
        await here.run("t")
        await here.services.leases.flush()
        before = list(here.store.calls)
        await here.run("t")
        assert here.store.calls == before
        here.services.leases.forget((await here.binding("t")).sandbox_id)
        await here.run("t")
        assert {"extend_lease", "get_lease"} <= set(here.store.calls[len(before) :])


# ── the reaper ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def expired(here: World, task_id: str = "t") -> None:
    """The task has a sandbox whose lease has run out, and this manager has forgotten what it knew of it."""
    await here.run(task_id)
    await here.services.leases.flush()
    here.services.leases.forget((await here.binding(task_id)).sandbox_id)
    here.store.offset_sec += TERMS.idle_sec + 1


async def test_a_quiet_sandbox_is_reclaimed_after_the_idle_lease_and_the_next_answer_says_so() -> None:
    async with world() as here:
        await expired(here)
        await here.services.reaper.reap()
        assert here.provider.pods == []
        record = await here.binding("t")
        assert record.ended is not None
        assert (record.state, record.ended.reason) == (BindingState.ENDED, "expired")
        answer = await here.run("t")
        assert answer.facts.workspace == "fresh"
        assert answer.facts.previous is not None
        assert answer.facts.previous.reason == "expired"


async def test_a_lease_with_time_left_is_not_looked_at() -> None:
    async with world() as here:
        await here.run("t")
        await here.services.leases.flush()
        here.store.offset_sec += TERMS.idle_sec - 30
        await here.services.reaper.reap()
        assert len(here.provider.pods) == 1


@pytest.mark.parametrize("what", ["running", "operations"])
async def test_a_sandbox_whose_executor_says_that_it_works_is_kept(what: str) -> None:
    async with world() as here:
        await expired(here)
        executor = await here.executor("t")
        setattr(executor, what, 1)
        await here.services.reaper.reap()
        assert await left(here) == pytest.approx(TERMS.idle_sec, abs=30)
        setattr(executor, what, 0)
        executor.quiet_for_sec = 30
        here.store.offset_sec += TERMS.idle_sec + 1
        await here.services.reaper.reap()
        assert await left(here) == pytest.approx(TERMS.idle_sec - 30, abs=15)
        executor.quiet_for_sec = TERMS.idle_sec + 1
        here.store.offset_sec += TERMS.idle_sec + 1
        await here.services.reaper.reap()
        assert here.provider.pods == []


async def test_work_does_not_carry_a_sandbox_past_its_hard_end() -> None:
    async with world() as here:
        await expired(here)
        (await here.executor("t")).running = 1
        here.store.offset_sec += TERMS.max_sec
        await here.services.reaper.reap()
        assert here.provider.pods == []
        assert (await here.run("t")).facts.provisioned == "cold"


async def test_an_operation_here_whose_renewal_is_late_keeps_the_sandbox() -> None:
    async with world() as here:
        await expired(here)
        bound = here.services.sandboxes.bound_of(await here.binding("t"))
        with here.services.sandboxes.operation(bound):
            await here.services.reaper.reap()
            await here.services.leases.flush()
            assert len(here.provider.pods) == 1
            assert await left(here) == pytest.approx(TERMS.active_sec, abs=30)


async def test_a_command_that_begins_while_the_reaper_looks_wins() -> None:
    async with world() as here:
        other = services_over(here.store, here.provider, "m2")
        await other.start()
        await expired(here)
        other.sandboxes.invalidate(await here.binding("t"))

        async def begin_one(call: str) -> None:
            if call == "end_binding":  # the reaper has asked the executor and found it quiet
                here.store.hook = None
                await other.sandboxes.ensure(ACME, "t")

        here.store.hook = begin_one
        await here.services.reaper.reap()
        assert len(here.provider.pods) == 1
        assert (await here.binding("t")).state is BindingState.BOUND
        await other.close()


async def test_an_executor_that_stays_silent_is_given_up_only_after_several_looks() -> None:
    async with world() as here:
        await expired(here)
        executor = await here.executor("t")
        await executor.stop()
        await here.services.reaper.reap()
        await here.services.reaper.reap()
        assert len(here.provider.pods) == 1
        await here.services.reaper.reap()
        assert here.provider.pods == []


async def test_an_executor_that_takes_its_time_to_answer_keeps_no_other_sandbox_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manager.services.reaper._ROUND_SEC", 0.01)
    async with world() as here:
        await here.run("slow")
        await expired(here)
        slow, go, asked = (await here.binding("slow")).pod, asyncio.Event(), 0
        real = here.services.client.lease

        async def held(pod: PodRef) -> LeaseInfo:
            nonlocal asked
            if pod.name == slow:
                asked += 1
                await go.wait()
            return await real(pod)

        monkeypatch.setattr(here.services.client, "lease", held)

        async def reaped(*names: str) -> bool:
            await here.services.reaper.reap()
            return [pod.name for pod in here.provider.pods] == list(names)

        await until(lambda: reaped(slow))
        assert asked == 1  # one look at a time
        go.set()
        await until(reaped)


async def test_one_manager_reaps_at_a_time() -> None:
    async with (
        world(terms=LeaseTerms(active_sec=1000, idle_sec=0.2, max_sec=5000), loops=True) as here,
        running(services_over(here.store, here.provider, "m2")) as other,
    ):
        for number in range(5):
            await here.run(f"t{number}")
        reapers = (here.services.reaper, other.reaper)
        await until(lambda: sum(reaper.reaped for reaper in reapers) == 5)  # counted after the pods are gone
        assert not here.provider.pods
        assert sorted(reaper.reaped for reaper in reapers) == [0, 5]


async def test_closing_gives_up_what_this_manager_held() -> None:
    async with world() as here:
        bound = await here.services.sandboxes.ensure(ACME, "t")
        with here.services.sandboxes.operation(bound):
            await here.services.leases.flush()
            await here.services.leases.close()
        lease = await here.store.get_lease(bound.binding.sandbox_id)
        assert lease is not None
        assert lease.operations == 0
