"""The pool has what a first command needs, and never the same pod twice."""

from __future__ import annotations

import asyncio

import pytest

from manager.errors import CapacityExhausted
from manager.model import LABEL_PROFILE, LABEL_REVISION, LABEL_STATE, PodState, Profile
from manager.services.pool import PoolView
from tests.support.world import ACME, World, running, services_over, until, world

POOLED = Profile(name="small", pool_min=3)


def view(here: World) -> PoolView:
    (only,) = here.services.pool.views()
    return only


async def test_a_pool_fills_to_its_size_and_no_further() -> None:
    async with world(profiles=(POOLED,), loops=True) as here:
        await until(lambda: here.services.pool.full)
        for _ in range(50):
            here.services.pool.missed(POOLED)  # wakes it
            await asyncio.sleep(0)
        assert len(here.provider.pods) == 3
        assert view(here).created == 3
        assert all(executor.bound is None for executor in here.provider.executors.values())


async def test_at_most_two_pods_are_made_at_once() -> None:
    async with world(profiles=(Profile(name="small", pool_min=6),)) as here:
        making, most = 0, 0

        async def count(call: str) -> None:
            nonlocal making, most
            if call == "create":
                making += 1
                most = max(most, making)
                await asyncio.sleep(0.01)

        async def done(call: str) -> None:
            nonlocal making
            if call == "create":
                making -= 1

        here.provider.hook, here.provider.after = count, done
        async with running(here.services):
            await until(lambda: here.services.pool.full)
        assert most == 2


async def test_a_claim_is_refilled_right_after() -> None:
    async with world(profiles=(POOLED,), loops=True) as here:
        await until(lambda: here.services.pool.full)
        for number in range(4):
            assert (await here.services.sandboxes.ensure(ACME, f"t{number}")).provisioned == "warm"
            await until(lambda: here.services.pool.full)
        assert len(here.provider.pods) == 7
        assert (view(here).claims, view(here).misses) == (4, 0)


async def test_a_pool_pod_that_dies_is_replaced() -> None:
    async with world(profiles=(POOLED,), loops=True) as here:
        await until(lambda: here.services.pool.full)
        dead = here.provider.pods[0].name
        await here.provider.lose(dead, "oom")
        await until(lambda: len(here.provider.pods) == 3)
        assert dead not in [pod.name for pod in here.provider.pods]


async def test_pods_of_another_revision_are_never_claimed_and_are_replaced() -> None:
    async with world(profiles=(POOLED,)) as here:
        old = Profile(name="small", pool_min=3, memory_bytes=1 << 29)
        outdated = await here.warm(old, 2)
        assert (await here.services.sandboxes.ensure(ACME, "t")).provisioned == "cold"
        async with running(here.services):
            await until(lambda: here.services.pool.full)
            await until(lambda: not {pod.name for pod in outdated} & {pod.name for pod in here.provider.pods})
        idle = [pod for pod in here.provider.pods if pod.labels[LABEL_STATE] == PodState.IDLE]
        assert {pod.labels[LABEL_REVISION] for pod in idle} == {POOLED.revision}


async def test_an_outdated_pod_that_another_manager_has_just_claimed_is_left_alone() -> None:
    async with world(profiles=(POOLED,)) as here:
        (outdated,) = await here.warm(Profile(name="small", memory_bytes=1 << 29))
        await here.provider.patch(outdated.name, outdated.version, {LABEL_STATE: PodState.CLAIMED}, {})
        watch = here.services.watches["here"]
        await here.services.pool._take_out(watch, outdated)
        assert await here.provider.get(outdated.name) is not None


async def test_a_create_that_fails_is_said_and_tried_again_later() -> None:
    async with world(profiles=(Profile(name="small", pool_min=1),)) as here:

        async def refuse(call: str) -> None:
            if call == "create":
                raise CapacityExhausted("no room")

        here.provider.hook = refuse
        async with running(here.services):
            await until(lambda: view(here).failed == 1)
            assert view(here).last_error == "no room"
            assert here.provider.pods == []
            here.provider.hook = None
            await until(lambda: here.services.pool.full)
            assert view(here).last_error is None


async def test_two_managers_fill_one_pool_once() -> None:
    async with (
        world(profiles=(POOLED,), loops=True) as here,
        running(services_over(here.store, here.provider, "m2", profiles=(POOLED,))) as other,
    ):
        await until(lambda: here.services.pool.full and other.pool.full)
        assert len(here.provider.pods) == 3
        bound = await other.sandboxes.ensure(ACME, "t")
        assert bound.provisioned == "warm"
        await until(lambda: here.services.pool.full)  # the leader sees the other's claim
        assert len(here.provider.pods) == 4


async def test_idle_pods_are_told_to_live_on_and_claimed_ones_are_not() -> None:
    async with world(profiles=(POOLED,), loops=True) as here:
        await until(lambda: here.services.pool.full)
        bound = await here.services.sandboxes.ensure(ACME, "t")
        await until(lambda: here.services.pool.full)
        await until(lambda: all(executor.pushed for executor in here.provider.executors.values()))  # at its making
        before = {name: len(executor.pushed) for name, executor in here.provider.executors.items()}
        await here.services.pool.push()
        for name, executor in here.provider.executors.items():
            assert len(executor.pushed) - before[name] == (0 if name == bound.binding.pod else 1)
            if name != bound.binding.pod:
                assert executor.pushed[-1].unclaimed_sec == 600.0
                assert set(executor.lease_headers) == {None}  # a quiet deadline would end a pool pod in its waiting


async def test_idle_pods_of_a_profile_that_is_no_more_are_left_to_end_by_themselves() -> None:
    async with world(profiles=(POOLED,), loops=True) as here:
        await until(lambda: here.services.pool.full)
        left = list(here.provider.executors.values())
        await until(lambda: all(executor.pushed for executor in left))
        renamed = services_over(here.store, here.provider, "m2", profiles=(Profile(name="other", pool_min=1),))
        async with running(renamed):
            await renamed.pool.push()
            assert [len(executor.pushed) for executor in left] == [1, 1, 1]


async def test_an_idle_pod_that_does_not_answer_is_taken_out() -> None:
    async with world(profiles=(POOLED,), loops=True) as here:
        await until(lambda: here.services.pool.full)
        wedged = here.provider.pods[0].name
        await here.provider.executors[wedged].stop()
        for _ in range(3):
            await here.services.pool.push()
        await until(lambda: here.services.pool.full and wedged not in [pod.name for pod in here.provider.pods])


async def test_a_pod_that_says_it_was_claimed_has_not_failed_to_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Another manager's claim that the watch has not shown yet: it must not be taken for wedged, and nobody be told"""
    async with world(profiles=(POOLED,), loops=True) as here:
        await until(lambda: here.services.pool.full)
        claimed = here.provider.pods[0].name
        here.provider.executors[claimed].is_claimed = True
        for _ in range(4):
            await here.services.pool.push()
        assert claimed in [pod.name for pod in here.provider.pods]
        assert "pool_push_failed" not in caplog.messages


async def test_pods_of_other_profiles_are_no_candidates() -> None:
    async with world() as here:
        await here.warm(Profile(name="large", cpu=4.0), 2)
        bound = await here.services.sandboxes.ensure(ACME, "t", "small")
        assert bound.provisioned == "cold"
        pod = await here.provider.get(bound.binding.pod)
        assert pod is not None
        assert pod.labels[LABEL_PROFILE] == "small"
