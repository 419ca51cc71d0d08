"""One manager refills and reclaims, by a Lease; it never makes more than there should be, however little it sees."""

from __future__ import annotations

import asyncio
import time

import msgspec

from manager.providers.kubernetes.election import Election
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.audit import AuditLog
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.node_agent import OpenAgent
from tests.support.cluster.provider import SMALL, faulty, late, manager, opened, refilling
from tests.support.cluster.waiting import until
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME

POOL = msgspec.structs.replace(SMALL, pool_min=5)


async def idle_pods(admin: KubeApi, namespace: str) -> int:
    return len(await admin.list(f"/api/v1/namespaces/{namespace}/pods", labelSelector="sojourn/state=idle"))


async def test_with_its_watch_frozen_a_manager_never_makes_more_pods_than_there_should_be(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    namespace = manager_account.namespace
    async with (
        manager(manager_account, MemoryStore(), "m1", profile=POOL, late=True) as (services, provider),
        refilling(services),
    ):
        await until(lambda: services.pool.full, "the pool is full")
        late(provider).late_sec = None
        most = 0
        for number in range(4):
            await services.sandboxes.ensure(ACME, f"t{number}")
            for _ in range(10):
                services.pool.missed(POOL)  # wakes it, again and again
                most = max(most, await idle_pods(admin, namespace))
                await asyncio.sleep(0.05)
        assert most <= 5
        late(provider).late_sec = 0.0
        await until(lambda: services.pool.full, "the pool is full again")
        assert await idle_pods(admin, namespace) == 5


async def test_of_two_managers_one_refills_and_the_other_takes_over_without_making_too_many(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    store, namespace = MemoryStore(), manager_account.namespace
    async with manager(manager_account, store, "m2", profile=POOL, late=True) as (other, provider):
        late(provider).late_sec = None  # it sees nothing of what the first one does
        async with manager(manager_account, store, "m1", profile=POOL) as (one, _), refilling(one):
            await until(lambda: one.pool.full, "the pool is full")
            async with refilling(other):
                await asyncio.sleep(0.5)  # it is told that another leads
                assert other.pool.views()[0].created == 0
        async with refilling(other):
            await until(lambda: other.pool.views()[0].ready == 5, "the new leader has looked anew")
            await other.sandboxes.ensure(ACME, "t")
            await until(lambda: other.pool.views()[0].created == 1, "the new leader refills")
            assert await idle_pods(admin, namespace) == 5


async def test_a_leadership_is_anothers_until_it_was_not_renewed_for_its_length_or_given_up(
    plane: ControlPlane, manager_account: Account, admin: KubeApi
) -> None:
    async with opened(manager_account) as one, opened(manager_account) as two:
        assert await one.lead("pool", "m1", 3)
        assert not await two.lead("pool", "m2", 3)
        assert await two.lead("reaper", "m2", 3)
        path = f"/apis/coordination.k8s.io/v1/namespaces/{manager_account.namespace}/leases/sojourn-pool"
        spec = (await admin.get(path))["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("m1", 3)
        began = time.monotonic()
        async with asyncio.timeout(60):
            while not await two.lead("pool", "m2", 3):
                await asyncio.sleep(0.1)
        assert time.monotonic() - began > 2  # by its own clock, since it first saw that nothing was renewed
        assert not await one.lead("pool", "m1", 3)
        assert not await two.lead("pool", "m2", 0)  # given up
        assert await Election(faulty(one), manager_account.namespace).lead("pool", "m3", 3)


async def test_a_leadership_with_most_of_its_time_left_is_not_written_again(
    manager_account: Account, audit: AuditLog
) -> None:
    async with opened(manager_account) as one:
        mark = audit.mark()
        for _ in range(20):
            assert await one.lead("pool", "m1", 60)
        assert await audit.writes_of(manager_account.user, mark) == {("create", "leases"): 1}


async def test_a_renewal_whose_answer_was_lost_is_still_a_leadership(manager_account: Account) -> None:
    async with opened(manager_account) as one:
        lost: set[str] = set()

        def loses(method: str, path: str) -> bool:
            first = method in ("POST", "PUT") and method not in lost
            lost.add(method)
            return first

        faulty(one).loses = loses
        assert await one.lead("pool", "m1", 1)
        async with asyncio.timeout(60):
            while "PUT" not in lost:
                assert await one.lead("pool", "m1", 1)
                await asyncio.sleep(0.1)
        assert await one.lead("pool", "m1", 1)
