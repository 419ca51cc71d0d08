"""A pool whose size follows what is claimed, on a real API server, with more than one manager."""

from __future__ import annotations

import asyncio

import msgspec

from manager.services.core import Services
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.audit import AuditLog
from tests.support.cluster.node_agent import OpenAgent
from tests.support.cluster.provider import SMALL, manager, refilling
from tests.support.cluster.waiting import until, until_async
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME

ELASTIC = msgspec.structs.replace(SMALL, pool_min=2, pool_max=8, pool_utilisation=0.5, pool_shrink_sec=60.0)


class Clock:
    """The same for the sizes of all managers."""

    def __init__(self, *managers: Services) -> None:
        self.now = 0.0
        self._managers = managers
        for one in managers:
            one.pool.clock = lambda: self.now

    async def go_on(self, seconds: float) -> None:
        until_then = self.now + seconds
        while self.now < until_then:
            self.now += 5.0
            for one in self._managers:
                one.pool.missed(ELASTIC)  # wakes it
                one.pool.views()
            await asyncio.sleep(0)


def sizes(one: Services) -> tuple[int, int, int]:
    (view,) = one.pool.views()
    return view.ready, view.pending, view.wanted


async def test_two_managers_keep_one_pool_that_grows_with_the_claims_of_both_and_shrinks(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi, audit: AuditLog
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    store, path = MemoryStore(), f"/api/v1/namespaces/{manager_account.namespace}/pods"
    async with (
        manager(manager_account, store, "m1", profile=ELASTIC) as (one, _),
        manager(manager_account, store, "m2", profile=ELASTIC) as (two, _),
    ):
        clock = Clock(one, two)
        async with refilling(one):
            await until(lambda: sizes(one) == (2, 0, 2), "the pool is full")
            async with refilling(two):
                mark = audit.mark()
                for number in range(4):
                    await (one, two)[number % 2].sandboxes.ensure(ACME, f"t{number}")
                await until(lambda: sizes(one) == (8, 0, 8) == sizes(two), "both know that the pool is to be larger")
                assert two.pool.views()[0].created == 0
                writes = await audit.writes_of(manager_account.user, mark)
                assert writes["create", "pods"] == 8 + 4 - 2  # the pool, the claimed ones, but for those it began with
                await clock.go_on(60.0)
                await until(lambda: sizes(one) == (2, 0, 2) == sizes(two), "the pool has shrunk")
                assert two.pool.views()[0].created == 0
                claimed = await admin.list(path, labelSelector="sojourn/state=claimed,sojourn/sandbox!=")
                assert len(claimed) == 4


async def test_pods_without_room_keep_their_uid_as_the_pool_grows_and_are_the_first_to_go_as_it_shrinks(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node(capacity={"pods": "3"})
    profile = msgspec.structs.replace(ELASTIC, pool_min=1)
    path = f"/api/v1/namespaces/{manager_account.namespace}/pods"

    async def idle(*, scheduled: bool) -> set[str]:
        pods = await admin.list(path, labelSelector="sojourn/state=idle")
        return {pod["metadata"]["uid"] for pod in pods if bool(pod["spec"].get("nodeName")) == scheduled}

    async def are(scheduled: int, held: int) -> bool:
        return (len(await idle(scheduled=True)), len(await idle(scheduled=False))) == (scheduled, held)

    async with manager(manager_account, MemoryStore(), "m1", profile=profile) as (services, _):
        clock = Clock(services)
        async with refilling(services):
            await until(lambda: sizes(services) == (1, 0, 1), "the pool is full")
            await services.sandboxes.ensure(ACME, "one")
            await until(lambda: sizes(services) == (2, 0, 2), "it grew")
            await services.sandboxes.ensure(ACME, "two")
            await until_async(lambda: are(1, 3), "it grew beyond its room")
            held = await idle(scheduled=False)
            for _ in range(20):
                services.pool.missed(profile)  # wakes it
                await asyncio.sleep(0.05)
            assert await idle(scheduled=False) == held
            await services.sandboxes.ensure(ACME, "three")
            await until(lambda: sizes(services) == (0, 6, 6), "it grew again")
            await until_async(lambda: are(0, 6), "all are there")
            assert await idle(scheduled=False) > held
            await agent.add_node(capacity={"pods": "1"})
            await until(lambda: sizes(services) == (1, 5, 6), "one has room")
            (served,) = await idle(scheduled=True)
            await clock.go_on(60.0)
            await until(lambda: sizes(services) == (1, 0, 1), "it has shrunk")
            await until_async(lambda: are(1, 0), "what had no room went first")
            assert await idle(scheduled=True) == {served}
