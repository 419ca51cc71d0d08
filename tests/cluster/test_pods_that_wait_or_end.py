"""What a pod waits for, and why it ended: told with names, on the real API server, scheduler and controllers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from manager.errors import (
    CapacityExhausted,
    ImagePullFailed,
    IsolationUnavailable,
    OutcomeUnknown,
    SandboxGone,
    WorkspaceAttaching,
)
from manager.model import Binding, Pod, Profile
from manager.providers.base import PodEvent
from manager.providers.kubernetes.provider import KubernetesProvider
from manager.services.pool import idle_labels
from manager.services.tasks import TaskExecAnswer
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.commands import WAIT_SEC, ended, ends_told, run, running_in
from tests.support.cluster.node_agent import NodeAgent, OpenAgent
from tests.support.cluster.provider import IMAGE, SMALL, manager, opened
from tests.support.cluster.waiting import pod_gone, until
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME

SOON_SEC = 10.0  # in which a caller is told


@asynccontextmanager
async def ends_of(provider: KubernetesProvider) -> AsyncIterator[asyncio.Queue[PodEvent]]:
    """How pods end, as the watch tells."""
    told: asyncio.Queue[PodEvent] = asyncio.Queue()

    async def take() -> None:
        async for event in provider.watch():
            if event.gone:
                told.put_nowait(event)

    taking = asyncio.create_task(take())
    try:
        yield told
    finally:
        taking.cancel()
        await asyncio.wait([taking])


async def reason(told: asyncio.Queue[PodEvent], name: str) -> str:
    async with asyncio.timeout(WAIT_SEC):
        event = await told.get()
    assert event.pod.name == name
    return event.reason


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_room_the_caller_gets_the_schedulers_words_and_the_pod_keeps_its_place(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node(capacity={"pods": "1"})
    async with manager(manager_account, MemoryStore(), "m1") as (services, _):
        await services.sandboxes.ensure(ACME, "first")
        with pytest.raises(CapacityExhausted, match=r"Too many pods") as told:
            await services.sandboxes.ensure(ACME, "second")
        assert told.value.code == "capacity_exhausted"
        path = f"/api/v1/namespaces/{manager_account.namespace}/pods"
        (waiting,) = [pod for pod in await admin.list(path) if "podIP" not in pod["status"]]
        await agent.add_node()
        bound = await services.sandboxes.ensure(ACME, "second")
        assert bound.binding.pod == waiting["metadata"]["name"]


async def test_pool_pods_without_room_are_held_and_counted_and_keep_their_uid(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node(capacity={"pods": "1"})
    profile = msgspec.structs.replace(SMALL, pool_min=4)
    path = f"/api/v1/namespaces/{manager_account.namespace}/pods"
    async with manager(manager_account, MemoryStore(), "m1", profile=profile) as (services, _):
        refilling = asyncio.create_task(services.pool.refill_forever())
        try:
            view = services.pool.views
            await until(lambda: (view()[0].ready, view()[0].pending, view()[0].created) == (1, 3, 4), "all are made")
            await until(lambda: "Too many pods" in (view()[0].last_error or ""), "told")
            before = {pod["metadata"]["uid"] for pod in await admin.list(path)}
            assert len(before) == 4
            for _ in range(20):
                services.pool.missed(profile)  # wakes it
                await asyncio.sleep(0.1)
            assert {pod["metadata"]["uid"] for pod in await admin.list(path)} == before
            assert (view()[0].ready, view()[0].pending) == (1, 3)
            await agent.add_node()
            await until(lambda: view()[0].ready == 4, "ready")
            assert {pod["metadata"]["uid"] for pod in await admin.list(path)} == before
            assert view()[0].last_error is None
        finally:
            refilling.cancel()
            await asyncio.wait([refilling])


async def test_a_pod_that_is_gated_waits_for_room_too(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    async with opened(manager_account, ready_sec=2.0) as provider:
        post = provider._client.request

        async def gated(method: object, path: str, **options: object) -> bytes:
            if method == "POST":
                options["body"]["spec"]["schedulingGates"] = [{"name": "test.invalid/later"}]  # type: ignore[index]
            return await post(method, path, **options)  # type: ignore[arg-type]

        provider._client.request = gated  # type: ignore[method-assign]
        with pytest.raises(CapacityExhausted):
            await provider.create(SMALL, "gated", idle_labels(SMALL), {})
        await pod_gone(admin, manager_account.namespace, "gated")


async def test_an_image_that_cannot_be_pulled_is_told_in_the_kubelets_words_and_leaves_no_pod(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    await agent.pull_error(IMAGE, "manifest unknown")
    async with manager(manager_account, MemoryStore(), "m1") as (services, provider):
        with pytest.raises(ImagePullFailed, match="manifest unknown"):
            await services.sandboxes.ensure(ACME, "t")
        held = await provider.create(SMALL, "pooled", idle_labels(SMALL), {}, wait=False)
        assert not held.ready
        await until(lambda: "manifest unknown" in (services.pool.views()[0].last_error or ""), "told")
        path = f"/api/v1/namespaces/{manager_account.namespace}/pods"
        async with asyncio.timeout(WAIT_SEC):
            while [pod["metadata"]["name"] for pod in await admin.list(path)] != ["pooled"]:
                await asyncio.sleep(0.05)
        await agent.pull_error(IMAGE, None)
        await until(lambda: services.pool.views()[0].ready == 1, "ready")


async def test_a_namespaces_quota_is_no_room_and_a_policys_refusal_is_no_weaker_pod(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    base = f"/api/v1/namespaces/{manager_account.namespace}"
    async with opened(manager_account) as provider:
        await admin.create(f"{base}/resourcequotas", {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
        async with asyncio.timeout(WAIT_SEC):
            while not (await admin.get(f"{base}/resourcequotas/none")).get("status", {}).get("hard"):
                await asyncio.sleep(0.05)
        with pytest.raises(CapacityExhausted, match="exceeded quota"):
            await provider.create(SMALL, "over", idle_labels(SMALL), {})
        await admin.delete(f"{base}/resourcequotas/none")
        restricted = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
        await admin.patch(base, restricted)
        async with asyncio.timeout(WAIT_SEC):
            while True:
                try:
                    made = await provider.create(SMALL, "split", idle_labels(SMALL), {})
                    await provider.delete(made.name)  # the quota's or the label's word takes a moment to spread
                except IsolationUnavailable:
                    break
                except CapacityExhausted:
                    await asyncio.sleep(0.1)
        assert SMALL.cluster is not None
        single = msgspec.structs.replace(SMALL, cluster=msgspec.structs.replace(SMALL.cluster, tier="single"))
        assert (await provider.create(single, "single", idle_labels(single), {})).ready
        assert [pod.name for pod in await provider.list()] == ["single"]


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def made(provider: KubernetesProvider, name: str, profile: Profile = SMALL) -> None:
    assert (await provider.create(profile, name, idle_labels(profile), {})).ready


async def test_every_way_in_which_a_pod_ends_is_told_with_its_reason_and_leaves_no_record(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    """F21"""
    agent = await open_agent(processes=False)
    await agent.add_node()
    base = f"/api/v1/namespaces/{manager_account.namespace}/pods"
    async with opened(manager_account) as provider, ends_of(provider) as told:
        ends: list[tuple[str, Callable[[], None], str]] = [
            ("fat", partial(agent.oom, "fat"), "oom"),
            ("unlucky", partial(agent.evict, "unlucky"), "evicted"),
            ("over", partial(agent.exit, "over", 0), "expired"),
            ("broken", partial(agent.exit, "broken", 3), "lost"),
        ]
        for name, end, wanted in ends:
            await made(provider, name)
            end()
            assert await reason(told, name) == wanted
            await pod_gone(admin, manager_account.namespace, name)
        await made(provider, "by-hand")
        await admin.delete(f"{base}/by-hand")
        assert await reason(told, "by-hand") == "destroyed"
        await made(provider, "drained")
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "drained"}}
        await admin.create(f"{base}/drained/eviction", eviction)
        assert await reason(told, "drained") == "evicted"
        assert await provider.list() == []
        assert told.empty()


async def test_a_pod_of_a_lost_node_is_given_up_without_a_word_from_it(
    open_agent: OpenAgent, manager_account: Account
) -> None:
    """F22"""
    agent = await open_agent(processes=False)
    await agent.add_node(labels={"kept": "yes"})  # not the only one: where all are lost, the control plane waits
    node = await agent.add_node(labels={"lost": "yes"})
    assert SMALL.cluster is not None
    there = msgspec.structs.replace(
        SMALL, cluster=msgspec.structs.replace(SMALL.cluster, node_selector=(("lost", "yes"),))
    )
    async with opened(manager_account) as provider, ends_of(provider) as told:
        await made(provider, "away", there)
        await agent.lose(node)
        assert await reason(told, "away") == "node_lost"
        assert await provider.get("away") is None
        await provider.delete("away")  # nobody confirms it, and nobody waits for that
        await agent.recover(node)


async def test_a_command_whose_pod_is_taken_away_is_told_why_within_ten_seconds_and_the_next_gets_a_new_pod(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    """F21, F22: real executors, on a node that is lost in the end."""
    agent = await open_agent()
    await agent.add_node(labels={"kept": "yes"})  # where all nodes are lost, the control plane waits
    node = await agent.add_node(labels={"lost": "yes"})
    assert SMALL.cluster is not None
    profile = msgspec.structs.replace(
        SMALL, cluster=msgspec.structs.replace(SMALL.cluster, node_selector=(("lost", "yes"),))
    )
    pods = f"/api/v1/namespaces/{manager_account.namespace}/pods"

    async def evicted(pod: str) -> None:
        agent.evict(pod)

    async def oom(pod: str) -> None:
        agent.oom(pod)

    async def destroyed(pod: str) -> None:
        await admin.delete(f"{pods}/{pod}")

    async def node_lost(_: str) -> None:
        await agent.lose(node)  # its pods are silent, but no connection breaks

    async with manager(manager_account, MemoryStore(), "m1", profile=profile, silent=False) as (services, _):
        told_at = ends_told(services)
        previous: str | None = None
        found: Binding | None = None
        for end in (evicted, oom, destroyed, node_lost):
            running = asyncio.create_task(run(services, "t", "sleep 300"))
            pod = await running_in(services, running)
            assert (pod.previous.reason if pod.previous else None) == previous
            await end(pod.pod)
            async with asyncio.timeout(WAIT_SEC):
                told = (await asyncio.gather(running, return_exceptions=True))[0]
            # How soon the cluster knows is a matter of the machine; from then on the caller is not kept waiting.
            assert time.monotonic() - told_at.get(pod.pod, time.monotonic()) < SOON_SEC
            if isinstance(told, SandboxGone):
                assert told.details["reason"] == end.__name__
            elif isinstance(told, TaskExecAnswer):
                # Its executor had the time to end its commands and to say so.
                assert (end, told.result.reason) == (destroyed, "cancelled")
            else:
                assert isinstance(told, OutcomeUnknown), told
            previous = end.__name__
            found = await ended(services)
        assert found is not None
        assert found.ended is not None
        assert found.ended.reason == "node_lost"
        await agent.recover(node)


async def test_a_workspace_on_a_volume_of_its_own_goes_with_its_pod(
    agent: NodeAgent, manager_account: Account, admin: KubeApi
) -> None:
    await agent.storage_class()
    assert SMALL.cluster is not None
    profile = msgspec.structs.replace(
        SMALL,
        cluster=msgspec.structs.replace(SMALL.cluster, workspace="volume", storage_class=agent.STORAGE_CLASS),
    )
    claims = f"/api/v1/namespaces/{manager_account.namespace}/persistentvolumeclaims"
    async with manager(manager_account, MemoryStore(), "m1", profile=profile, silent=False) as (services, _):
        await run(services, "t", "echo kept > note.txt")
        (claim,) = await admin.list(claims)
        assert claim["spec"]["resources"]["requests"]["storage"] == str(64 << 20)
        await services.sandboxes.retire(ACME, "t")
        async with asyncio.timeout(WAIT_SEC):
            while await admin.list(claims):
                await asyncio.sleep(0.1)


async def test_a_pod_whose_volume_cannot_be_had_waits_for_its_workspace(
    open_agent: OpenAgent, manager_account: Account
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    assert SMALL.cluster is not None
    profile = msgspec.structs.replace(
        SMALL, cluster=msgspec.structs.replace(SMALL.cluster, workspace="volume", storage_class="nobody-makes-these")
    )
    async with opened(manager_account) as provider:
        pod: Pod | None = await provider.create(profile, "volumeless", idle_labels(profile), {}, wait=False)
        async with asyncio.timeout(WAIT_SEC):
            while pod is None or pod.waits is None or pod.waits.code != "workspace_attaching":
                await asyncio.sleep(0.1)
                pod = await provider.get("volumeless")
        assert isinstance(pod.waits.error(), WorkspaceAttaching)
