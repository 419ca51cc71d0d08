"""The pool follows its size: what was claimed, by any manager, makes it grow, and time makes it shrink."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from manager.model import Pod, PodWaits, Profile
from manager.services.core import Services
from manager.services.pool import WarmPool, idle_labels
from tests.support.world import ACME, World, running, services_over, until, world

ELASTIC = Profile(
    name="small", keep_workspace=False, pool_min=1, pool_max=8, pool_utilisation=0.5, pool_shrink_sec=100.0
)


class Clock:
    """Stands still until it is told to go on, for as many pools as look at it."""

    def __init__(self, *services: Services) -> None:
        self.now = 1000.0
        self._pools: list[WarmPool] = []
        self.keep_for(*services)

    def keep_for(self, *services: Services) -> None:
        for one in services:
            one.pool.clock = lambda: self.now
            self._pools.append(one.pool)

    async def go_on(self, seconds: float) -> None:
        """In steps in which pools look at it anyway."""
        until_then = self.now + seconds
        while self.now < until_then:
            self.now = min(until_then, self.now + 5.0)
            for pool in self._pools:
                pool.views()
                pool.missed(ELASTIC)  # wakes it
            await asyncio.sleep(0)


@asynccontextmanager
async def elastic(profile: Profile = ELASTIC) -> AsyncIterator[tuple[World, Clock]]:
    async with world(profiles=(profile,)) as here:
        clock = Clock(here.services)
        async with running(here.services):
            await until(lambda: here.services.pool.full)
            yield here, clock


def sizes(services: Services) -> tuple[int, int, int]:
    (view,) = services.pool.views()
    return view.ready, view.pending, view.wanted


async def test_a_burst_grows_the_pool_at_once_and_a_quiet_time_shrinks_it_slowly_to_its_least() -> None:
    async with elastic() as (here, clock):
        assert sizes(here.services) == (1, 0, 1)
        for number in range(3):
            await here.services.sandboxes.ensure(ACME, f"t{number}")
        await until(lambda: sizes(here.services) == (6, 0, 6))  # three during a start, by a half
        await clock.go_on(49.0)
        assert sizes(here.services)[2] == 6
        await clock.go_on(26.0)
        await until(lambda: sizes(here.services) == (3, 0, 3))
        await until(lambda: len(here.provider.pods) == 3 + 3)
        await clock.go_on(30.0)
        await until(lambda: sizes(here.services) == (1, 0, 1))
        await until(lambda: len(here.provider.pods) == 1 + 3)
        assert len(here.provider.claimed) == 3  # no sandbox lost its pod


async def test_however_many_are_claimed_the_pool_stays_within_its_most() -> None:
    async with elastic() as (here, _clock):
        most = 0

        async def count(call: str) -> None:
            nonlocal most
            most = max(most, len(here.provider.pods) - len(here.provider.claimed))

        here.provider.after = count
        await asyncio.gather(*(here.services.sandboxes.ensure(ACME, f"t{number}") for number in range(30)))
        await until(lambda: sizes(here.services) == (8, 0, 8))
        assert most <= 8


async def test_claims_of_every_manager_count_at_the_one_that_leads_and_cost_no_write() -> None:
    async with elastic() as (here, clock):
        other = services_over(here.store, here.provider, "m2", profiles=(ELASTIC,))
        clock.keep_for(other)
        async with running(other):
            calls: list[str] = []

            async def count(call: str) -> None:
                calls.append(call)

            here.provider.hook = count
            assert (await other.sandboxes.ensure(ACME, "warm")).provisioned == "warm"
            patches = calls.count("patch")
            await until(lambda: sizes(here.services) == (2, 0, 2))
            for name in ("one", "two"):
                await other.sandboxes.ensure(ACME, name)
            await until(lambda: sizes(here.services) == (6, 0, 6))
            await until(lambda: sizes(other) == (6, 0, 6))  # what would take over knows as much
            assert patches == 1
            assert other.pool.views()[0].created == 0
            assert (here.services.pool.leads, other.pool.leads) == (True, False)


async def test_a_pool_of_none_begins_with_a_claim_for_which_another_manager_made_a_pod() -> None:
    none = msgspec.structs.replace(ELASTIC, pool_min=0)
    async with elastic(none) as (here, clock):
        other = services_over(here.store, here.provider, "m2", profiles=(none,))
        clock.keep_for(other)
        async with running(other):
            assert (await other.sandboxes.ensure(ACME, "first")).provisioned == "cold"
            await until(lambda: sizes(here.services) == (2, 0, 2))
            assert (await other.sandboxes.ensure(ACME, "second")).provisioned == "warm"


async def test_claims_that_wait_for_their_turn_make_the_pool_grow_and_are_served_by_it() -> None:
    none = msgspec.structs.replace(ELASTIC, pool_min=0)
    async with elastic(none) as (here, _clock):
        held, made = asyncio.Event(), 0

        async def hold(call: str) -> None:
            nonlocal made
            if call == "create":
                made += 1
                if made <= 4:
                    await held.wait()  # the first four that are made for a claim

        here.provider.hook = hold
        claims = [asyncio.create_task(here.services.sandboxes.ensure(ACME, f"t{number}")) for number in range(10)]
        await until(lambda: sizes(here.services)[2] == 8)
        await until(lambda: sum(claim.done() for claim in claims) >= 6)  # as pods of the pool are ready
        assert not held.is_set()
        held.set()
        bound = await asyncio.gather(*claims)
        assert len({one.binding.pod for one in bound}) == 10
        (view,) = here.services.pool.views()
        assert view.misses == 10
        assert view.demand == 10  # none of them waits any more, and each counts once


async def test_a_manager_that_begins_keeps_the_pool_that_it_finds_for_as_long_as_any_peak() -> None:
    async with world(profiles=(ELASTIC,)) as here:
        await here.warm(ELASTIC, 6)
        clock = Clock(here.services)
        async with running(here.services):
            await until(lambda: sizes(here.services) == (6, 0, 6))
            await clock.go_on(45.0)
            assert sizes(here.services) == (6, 0, 6)
            await clock.go_on(60.0)
            await until(lambda: sizes(here.services) == (1, 0, 1))


async def test_a_manager_that_begins_learns_from_the_pods_what_was_claimed_a_moment_ago() -> None:
    fixed = msgspec.structs.replace(ELASTIC, pool_min=0, pool_max=None)
    async with world(profiles=(fixed,), loops=True) as here:
        for number in range(3):
            await here.services.sandboxes.ensure(ACME, f"t{number}")
        other = services_over(here.store, here.provider, "m2", profiles=(ELASTIC,))
        async with running(other):
            assert sizes(other)[2] >= 2


async def test_while_the_watch_is_behind_nothing_is_taken_out_of_the_pool() -> None:
    async with elastic() as (here, clock):
        await here.services.sandboxes.ensure(ACME, "t")
        await until(lambda: sizes(here.services) == (2, 0, 2))
        here.provider.current = False
        await clock.go_on(200.0)
        assert sizes(here.services) == (2, 0, 1)
        here.provider.current = True
        here.services.pool.missed(ELASTIC)
        await until(lambda: sizes(here.services) == (1, 0, 1))


@pytest.mark.parametrize("claimed_first", [True, False])
async def test_a_pod_that_is_claimed_as_the_pool_shrinks_is_left_to_who_claimed_it(claimed_first: bool) -> None:
    async with world(profiles=(ELASTIC,)) as here:
        other = services_over(here.store, here.provider, "m2", profiles=(ELASTIC,))
        await other.start()
        pods = await here.warm(ELASTIC, 1)
        await other.watches["here"].sync()
        watch = here.services.watches["here"]
        if claimed_first:
            bound = await other.sandboxes.ensure(ACME, "t")
            await here.services.pool._take_out(watch, pods[0])  # as it has not seen the claim
            assert (await here.provider.get(bound.binding.pod)) is not None
            assert bound.provisioned == "warm"
        else:
            await here.services.pool._take_out(watch, pods[0])
            bound = await other.sandboxes.ensure(ACME, "t")
            assert bound.provisioned == "cold"
            assert bound.binding.pod != pods[0].name
        await other.close()


async def test_how_long_starts_take_is_measured_but_not_of_pods_that_wait_for_room() -> None:
    async with world(profiles=(ELASTIC,)) as here:
        clock, pool = Clock(here.services), here.services.pool

        unready = Pod(
            name="", version="1", target="here", labels=idle_labels(ELASTIC), annotations={}, address="", ready=False,
            created_at=0.0,
        )  # fmt: skip

        def told(name: str, *, ready: bool = False, waits: PodWaits | None = None) -> None:
            pod = msgspec.structs.replace(unready, name=name, ready=ready, waits=waits)
            here.services.watches["here"].put(pod)

        for name in ("quick", "held"):
            told(name, waits=PodWaits("provisioning", "its container"))
        clock.now += 3.0
        told("quick", ready=True)
        assert pool.views()[0].start_sec == 3.0
        told("held", waits=PodWaits("capacity_exhausted", "no node is free"))
        told("held", waits=PodWaits("provisioning", "its container"))
        clock.now += 20.0
        told("held", ready=True)
        assert pool.views()[0].start_sec == 3.0


async def test_the_figures_of_a_pool_say_how_near_it_is_to_running_dry() -> None:
    async with elastic() as (here, _clock):
        await here.services.sandboxes.ensure(ACME, "t")
        await until(lambda: sizes(here.services) == (2, 0, 2))
        (view,) = here.services.pool.views()
        assert (view.claims, view.misses, view.demand, view.utilisation) == (1, 0, 1, 0.5)
