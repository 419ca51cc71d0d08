"""A manager over everything that an API server does when it is unwell (F18, F19)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from manager.errors import TargetUnavailable
from manager.services.core import Services
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.fault_proxy import Call, FaultProxy, fault_proxy
from tests.support.cluster.node_agent import NodeAgent, OpenAgent
from tests.support.cluster.provider import faulty, manager, warm
from tests.support.cluster.waiting import until
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME


@pytest.fixture
async def proxy(own_plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(own_plane) as made:
        yield made


@pytest.fixture
async def silent_node(open_agent: OpenAgent) -> NodeAgent:
    agent = await open_agent(processes=False)
    await agent.add_node()
    return agent


def patches(call: Call) -> bool:
    return call.method == "PATCH"


async def pods_in(admin: KubeApi, account: Account, state: str) -> int:
    path = f"/api/v1/namespaces/{account.namespace}/pods"
    return len(await admin.list(path, labelSelector=f"sojourn/state={state}"))


async def test_claims_go_through_errors_refusals_for_their_number_and_lost_answers(
    silent_node: NodeAgent, manager_account: Account, proxy: FaultProxy, admin: KubeApi
) -> None:
    kubeconfig = proxy.kubeconfig(manager_account)
    async with manager(manager_account, MemoryStore(), "m1", kubeconfig=kubeconfig) as (services, provider):
        await warm(services, provider, 12)
        faults: list[Callable[[], object]] = [
            lambda: proxy.refuse(500, patches, times=2),
            lambda: proxy.refuse(503, patches, times=1),
            lambda: proxy.refuse(429, patches, times=1, retry_after_sec=1),
            lambda: proxy.hang_up(patches, times=2),
            lambda: proxy.lose_answer(patches, times=1),
            lambda: proxy.lose_answer(patches, times=2),
        ]
        for number, fault in enumerate(faults):
            fault()
            bound = await services.sandboxes.ensure(ACME, f"t{number}")
            assert bound.provisioned == "warm"
            assert await pods_in(admin, manager_account, "claimed") == number + 1
        assert services.claims.lost_candidates == 0


async def test_while_nothing_answers_the_caller_is_told_so_and_afterwards_claims_work_again(
    silent_node: NodeAgent, manager_account: Account, proxy: FaultProxy, admin: KubeApi
) -> None:
    kubeconfig = proxy.kubeconfig(manager_account)
    async with manager(manager_account, MemoryStore(), "m1", kubeconfig=kubeconfig) as (services, provider):
        await warm(services, provider, 2)
        faulty(provider).deadline_sec = 2.0  # instead of ten, for the test's sake
        first = await services.sandboxes.ensure(ACME, "bound")
        watch = services.watches["here"]
        with proxy.refuse(500, lambda call: True):
            proxy.cut_watches()
            await until(lambda: not watch.synced, "the picture is said to be old")
            with pytest.raises(TargetUnavailable):
                await services.sandboxes.ensure(ACME, "new")
            again = await services.sandboxes.ensure(ACME, "bound")  # what has its pod goes on
            assert again.binding.pod == first.binding.pod
        await until(lambda: watch.synced, "the picture is the present again")
        assert (await services.sandboxes.ensure(ACME, "new")).binding.pod
        assert await pods_in(admin, manager_account, "claimed") == 2


@pytest.mark.parametrize("broken", ["expired", "closed", "cut"])
async def test_whatever_ends_a_watch_no_change_is_missed(
    silent_node: NodeAgent, manager_account: Account, proxy: FaultProxy, admin: KubeApi, broken: str
) -> None:
    kubeconfig = proxy.kubeconfig(manager_account)
    path = f"/api/v1/namespaces/{manager_account.namespace}/pods"
    async with manager(manager_account, MemoryStore(), "m1", kubeconfig=kubeconfig) as (services, provider):
        await warm(services, provider, 3)
        watch = services.watches["here"]
        ends = {"expired": proxy.expire_watches, "closed": proxy.close_watches, "cut": proxy.cut_watches}[broken]
        with proxy.refuse(503, lambda call: call.is_watch):
            assert ends()
            await until(lambda: not watch.synced or broken == "closed", "noticed")
            await admin.delete(f"{path}/w0", gracePeriodSeconds=0)
            await provider.create(services.pool._shelves["small"].profile, "late", {"sojourn/state": "idle"}, {})
        await until(lambda: "late" in watch.pods and "w0" not in watch.pods, "both changes were told")
        await until(lambda: watch.synced, "the picture is the present again")
        assert services.ended.get("w0") is not None


async def test_a_deletion_that_no_watch_told_is_found_by_the_next_list(
    silent_node: NodeAgent, manager_account: Account, proxy: FaultProxy, admin: KubeApi
) -> None:
    kubeconfig = proxy.kubeconfig(manager_account)
    path = f"/api/v1/namespaces/{manager_account.namespace}/pods"
    async with manager(manager_account, MemoryStore(), "m1", kubeconfig=kubeconfig) as (services, provider):
        await warm(services, provider, 2)
        proxy.dropped = lambda event: event["type"] == "DELETED"
        await admin.delete(f"{path}/w0", gracePeriodSeconds=0)
        async with asyncio.timeout(60):
            while await admin.find(f"{path}/w0") is not None:
                await asyncio.sleep(0.05)
        await proxy_settled(services)
        proxy.expire_watches()
        await until(lambda: "w0" not in services.watches["here"].pods, "the list told it")


async def proxy_settled(services: Services) -> None:
    """Whatever is told of now is told; what is dropped is dropped."""
    for _ in range(5):
        await asyncio.sleep(0.05)
    assert services.watches["here"].synced


async def test_a_watch_that_falls_silent_is_noticed_without_hurry_and_claims_that_hang_work_again_afterwards(
    silent_node: NodeAgent, manager_account: Account, proxy: FaultProxy, admin: KubeApi
) -> None:
    """F18, F19: minutes of silence, in seconds."""
    kubeconfig = proxy.kubeconfig(manager_account)
    path = f"/api/v1/namespaces/{manager_account.namespace}/pods"
    async with manager(manager_account, MemoryStore(), "m1", kubeconfig=kubeconfig) as (services, provider):
        await warm(services, provider, 3)
        follower, watch = provider._follower, services.watches["here"]
        follower._idle_sec = 2.0  # instead of fifty
        faulty(provider).deadline_sec = 3.0
        before, began = follower.lists + follower.watches, time.monotonic()
        with proxy.frozen_watches(), proxy.hang(patches):
            proxy.close_watches()  # the next one has the shorter patience
            await admin.delete(f"{path}/w0", gracePeriodSeconds=0)
            await until(lambda: "w0" not in watch.pods, "what no watch told is found all the same")
            with pytest.raises(TargetUnavailable):
                await services.sandboxes.ensure(ACME, "t")
            asked = follower.lists + follower.watches - before
            # A list and a watch each time that the patience is over, and never at once.
            assert asked <= 2 * (time.monotonic() - began) + 4
        await until(lambda: watch.synced, "the picture is the present again")
        faulty(provider).deadline_sec = 60.0
        async with asyncio.timeout(60):
            bound = await services.sandboxes.ensure(ACME, "t")
        assert bound.binding.pod in ("w1", "w2")
        assert await pods_in(admin, manager_account, "claimed") == 1
