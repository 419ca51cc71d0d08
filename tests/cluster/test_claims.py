"""Claims on the real API server: one write each, never a pod for two tasks, never two pods for a task."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from manager.model import LABEL_TASK, Owner, task_label
from manager.providers.kubernetes.objects import version_of
from manager.services.sandboxes import Bound
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi, Object
from tests.support.cluster.audit import AuditLog
from tests.support.cluster.node_agent import NodeAgent, OpenAgent
from tests.support.cluster.provider import SMALL, faulty, late, manager, warm
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME, SHOP

ODD_IDS = ["x" * 500, "a/b:c", "🦊🦊", "trailing---", "-", " ", "A" * 63, "plain"]


async def pods_of(admin: KubeApi, namespace: str) -> list[Object]:
    return await admin.list(f"/api/v1/namespaces/{namespace}/pods")


async def nothing_is_shared(admin: KubeApi, namespace: str, bound: list[Bound]) -> None:
    """Each sandbox has a pod of its own, which says so itself, and no task has two."""
    assert len({one.binding.pod for one in bound}) == len(bound)
    labels = {pod["metadata"]["name"]: pod["metadata"]["labels"] for pod in await pods_of(admin, namespace)}
    for one in bound:
        assert labels[one.binding.pod][LABEL_TASK] == task_label(one.binding.owner, one.binding.task_id)
    claimed = Counter(found[LABEL_TASK] for found in labels.values() if found["sojourn/state"] == "claimed")
    assert max(claimed.values()) == 1
    assert len(claimed) == len(bound)


async def test_a_warm_claim_is_one_write(
    open_agent: OpenAgent, manager_account: Account, audit: AuditLog, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    async with manager(manager_account, MemoryStore(), "m1") as (services, provider):
        await warm(services, provider, 5)
        mark = audit.mark()
        bound = await asyncio.gather(*(services.sandboxes.ensure(ACME, f"t{number}") for number in range(5)))
        assert await audit.writes_of(manager_account.user, mark) == {("patch", "pods"): 5}
        assert {one.provisioned for one in bound} == {"warm"}
        await nothing_is_shared(admin, manager_account.namespace, list(bound))


async def test_every_task_id_works_and_the_same_one_of_two_projects_is_two(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    async with manager(manager_account, MemoryStore(), "m1") as (services, provider):
        await warm(services, provider, len(ODD_IDS))  # the rest of them cold
        tasks: list[tuple[Owner, str]] = [(owner, task_id) for owner in (ACME, SHOP) for task_id in ODD_IDS]
        bound = await asyncio.gather(*(services.sandboxes.ensure(owner, task_id) for owner, task_id in tasks))
        await nothing_is_shared(admin, manager_account.namespace, list(bound))
        again = await asyncio.gather(*(services.sandboxes.ensure(owner, task_id) for owner, task_id in tasks))
        assert [one.binding.pod for one in again] == [one.binding.pod for one in bound]


async def test_two_managers_whose_watch_is_late_claim_a_hundred_pods_at_once_and_share_none(
    open_agent: OpenAgent, manager_account: Account, audit: AuditLog, admin: KubeApi
) -> None:
    """F20, F28: a pool of a hundred, the watch a second behind, a hundred claims at once."""
    agent = await open_agent(processes=False)
    await agent.add_node()
    store = MemoryStore()
    async with (
        manager(manager_account, store, "m1", late=True) as (one, provider),
        manager(manager_account, store, "m2", late=True) as (other, other_provider),
    ):
        await warm(one, provider, 100)
        await other.watches["here"].sync()
        for services in (one, other):
            services.pool._met_at = float("-inf")
            await services.pool.meet()  # as every few seconds
        late(provider).late_sec = late(other_provider).late_sec = 1.0
        mark = audit.mark()
        claims = [services.sandboxes.ensure(ACME, f"t{number}") for number, services in enumerate([one, other] * 50)]
        bound = await asyncio.gather(*claims)
        assert {claim.provisioned for claim in bound} == {"warm"}
        await nothing_is_shared(admin, manager_account.namespace, list(bound))
        writes = await audit.writes_of(manager_account.user, mark)
        assert set(writes) == {("patch", "pods")}
        assert writes[("patch", "pods")] <= 120


async def test_a_claim_whose_answer_was_lost_is_recognised_and_no_second_pod_is_tried(
    open_agent: OpenAgent, manager_account: Account, audit: AuditLog, admin: KubeApi
) -> None:
    """F18: the API server did it, and nobody heard of it."""
    agent = await open_agent(processes=False)
    await agent.add_node()
    async with manager(manager_account, MemoryStore(), "m1") as (services, provider):
        await warm(services, provider, 10)
        lost: set[str] = set()

        def loses(method: str, path: str) -> bool:
            first = method == "PATCH" and path not in lost
            lost.add(path)
            return first

        faulty(provider).loses = loses
        mark = audit.mark()
        bound = await asyncio.gather(*(services.sandboxes.ensure(ACME, f"t{number}") for number in range(5)))
        assert (
            len(lost & {f"/api/v1/namespaces/{manager_account.namespace}/pods/{one.binding.pod}" for one in bound}) == 5
        )
        await nothing_is_shared(admin, manager_account.namespace, list(bound))
        assert services.claims.lost_candidates == 0
        # Each patch was sent twice; the second was refused, and the pod itself then told whose it is.
        calls = await audit.calls_of(manager_account.user, mark, ["patch"])
        assert sorted(Counter(call.status for call in calls).items()) == [(200, 5), (422, 5)]


async def test_claims_with_lost_answers_and_callers_that_go_away_leave_nothing_shared_and_nothing_behind(
    open_agent: OpenAgent, manager_account: Account, admin: KubeApi
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    store, chance = MemoryStore(), random.Random(7)
    async with (
        manager(manager_account, store, "m1") as (one, provider),
        manager(manager_account, store, "m2") as (other, other_provider),
    ):
        await warm(one, provider, 40)
        for made in (provider, other_provider):
            faulty(made).loses = lambda method, path: method in ("PATCH", "POST", "DELETE") and chance.random() < 0.1

        async def claim(number: int) -> None:
            services = chance.choice([one, other])
            making = asyncio.create_task(services.sandboxes.ensure(ACME, f"t{number % 60}"))
            if chance.random() < 0.2:
                await asyncio.sleep(chance.uniform(0, 0.2))
                making.cancel()
            await asyncio.wait([making])
            assert making.cancelled() or making.exception() is None, making.exception()

        await asyncio.gather(*(claim(number) for number in range(120)))
        for made in (provider, other_provider):
            faulty(made).loses = lambda method, path: False
        bound = list(await asyncio.gather(*(one.sandboxes.ensure(ACME, f"t{number}") for number in range(60))))
        async with asyncio.timeout(60):  # what was taken back is still being deleted
            while True:
                pods = await pods_of(admin, manager_account.namespace)
                claimed = [pod for pod in pods if pod["metadata"]["labels"]["sojourn/state"] == "claimed"]
                if len(claimed) == len(bound):
                    break
                await asyncio.sleep(0.2)
        await nothing_is_shared(admin, manager_account.namespace, bound)


async def test_a_claim_tests_uid_version_and_state_in_one_patch(
    open_agent: OpenAgent, manager_account: Account
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    async with manager(manager_account, MemoryStore(), "m1") as (services, provider):
        await warm(services, provider, 1)
        sent: list[object] = []
        client = faulty(provider)
        ask = client.request

        async def seen(method: object, path: str, **options: object) -> bytes:
            if method == "PATCH":
                sent.append(options["body"])
            return await ask(method, path, **options)  # type: ignore[arg-type]

        client.request = seen  # type: ignore[method-assign]
        before = await provider._read("w0")
        assert before is not None
        bound = await services.sandboxes.ensure(ACME, "t")
        assert bound.binding.pod == "w0"
        (body,) = sent
        assert isinstance(body, list)
        assert body[:3] == [
            {"op": "test", "path": "/metadata/uid", "value": before.metadata.uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": before.metadata.resource_version},
            {"op": "test", "path": "/metadata/labels/sojourn~1state", "value": "idle"},
        ]
        assert version_of(before).endswith(":idle")
        assert all(change["op"] == "add" for change in body[3:])
        assert all(change["path"].startswith(("/metadata/labels/", "/metadata/annotations/")) for change in body[3:])


async def test_a_wiped_store_is_rebuilt_from_the_pods_labels(agent: NodeAgent, manager_account: Account) -> None:
    """With a real executor, which confirms what the labels say."""
    async with manager(manager_account, MemoryStore(), "m1", silent=False) as (services, provider):
        first = await services.sandboxes.ensure(ACME, "a/b:c 🦊")
    async with manager(manager_account, MemoryStore(), "m2", silent=False) as (services, provider):
        again = await services.sandboxes.ensure(ACME, "a/b:c 🦊")
        assert again.binding.pod == first.binding.pod
        assert again.binding.sandbox_id == first.binding.sandbox_id
        assert SMALL.name == again.binding.profile
        await provider.delete(again.binding.pod)
