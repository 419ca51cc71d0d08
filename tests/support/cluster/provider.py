"""The manager's provider, and whole managers, on the tests' cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from manager.executor_client import pod_token
from manager.model import ClusterPod, Profile
from manager.providers.kubernetes.client import ClusterClient
from manager.providers.kubernetes.provider import KubernetesProvider
from manager.providers.kubernetes.watch import Changed, Listed, PodFollower
from manager.services.core import Services
from manager.services.pool import idle_labels
from manager.store.base import Store
from tests.support.cluster.accounts import Account
from tests.support.local_pods import token_for
from tests.support.world import SECRET, services_over

# Nobody pulls it where nodes are the tests' own; for somebody's cluster SOJOURN_TEST_IMAGE names one to be pulled.
IMAGE: Final = os.environ.get("SOJOURN_TEST_IMAGE") or "test.invalid/sojourn/python@sha256:" + "ab" * 32
SMALL: Final = Profile(
    name="small", image=IMAGE, cpu=0.1, memory_bytes=64 << 20, disk_bytes=64 << 20, pool_min=0,
    cluster=ClusterPod(),
)  # fmt: skip


class FaultyClient(ClusterClient):
    """Loses answers, after the API server has done what they are about, where `loses` says so."""

    loses: Callable[[str, str], bool] = staticmethod(lambda method, path: False)

    async def _once(self, method: Any, path: str, *rest: Any) -> Any:
        done = await super()._once(method, path, *rest)
        if self.loses(method, path):
            raise aiohttp.ServerDisconnectedError
        return done


class LateFollower(PodFollower):
    """Tells everything after its first list `late_sec` later than it happened; None: never."""

    late_sec: float | None = 0.0

    async def follow(self) -> AsyncIterator[Listed | Changed]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, Listed | Changed]] = asyncio.Queue()

        async def take() -> None:
            async for told in super(LateFollower, self).follow():
                queue.put_nowait((loop.time(), told))

        taking = asyncio.create_task(take(), name="late-follower")
        try:
            yield (await queue.get())[1]
            while True:
                at, told = await queue.get()
                while self.late_sec is None or loop.time() < at + self.late_sec:
                    await asyncio.sleep(0.02)
                yield told
        finally:
            taking.cancel()
            await asyncio.wait([taking])


@asynccontextmanager
async def opened(
    account: Account,
    name: str = "here",
    *,
    kubeconfig: Path | None = None,
    secret: bytes | None = None,
    late: bool = False,
    **options: Any,
) -> AsyncIterator[KubernetesProvider]:
    """With the rights of `account`; `kubeconfig`: another way to the same API server; `late`: with a LateFollower.
    `options` are the provider's."""
    client = await FaultyClient.connect(str(kubeconfig or account.kubeconfig))
    client.deadline_sec = 60.0  # instead of ten: it is not the speed of a busy machine that is tested
    tokens = token_for if secret is None else lambda pod: pod_token(secret, pod)
    if late:
        labels = {"app.kubernetes.io/name": "sojourn-sandbox", "sojourn/target": name}
        options["follower"] = LateFollower(client, f"/api/v1/namespaces/{account.namespace}/pods", labels)
    made = KubernetesProvider(name, client, account.namespace, tokens, **options)
    try:
        yield made
    finally:
        await made.close()


def faulty(provider: KubernetesProvider) -> FaultyClient:
    client = provider._client
    assert isinstance(client, FaultyClient)
    return client


def late(provider: KubernetesProvider) -> LateFollower:
    follower = provider._follower
    assert isinstance(follower, LateFollower)
    return follower


@asynccontextmanager
async def manager(
    account: Account, store: Store, holder: str, *, profile: Profile = SMALL, silent: bool = True, **options: Any
) -> AsyncIterator[tuple[Services, KubernetesProvider]]:
    """A manager's services, without their loops but with its watch. `silent`: its pods have no executors, and are
    taken to agree with everything."""
    async with opened(account, secret=SECRET, **options) as provider:
        services = services_over(store, provider, holder, profiles=(profile,), start_limit_sec=120.0)
        if silent:
            for call in ("bind", "push_lease"):
                setattr(services.client, call, _agrees)
        await services.start()
        watching = asyncio.create_task(services.watches["here"].watch_forever(), name=f"watch-{holder}")
        try:
            yield services, provider
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await services.close()


@asynccontextmanager
async def refilling(services: Services) -> AsyncIterator[None]:
    loop = asyncio.create_task(services.pool.refill_forever(), name=f"refill-{services.holder}")
    try:
        yield
    finally:
        loop.cancel()
        await asyncio.wait([loop])


async def _agrees(*_arguments: object) -> None:
    return None


async def warm(services: Services, provider: KubernetesProvider, count: int, profile: Profile = SMALL) -> None:
    """So many pool pods, ready and known to the manager."""
    room = asyncio.Semaphore(8)

    async def one(name: str) -> None:
        async with room:
            await provider.create(profile, name, idle_labels(profile), {"sojourn/claim-token": ""}, wait=False)

    await asyncio.gather(*(one(f"w{number}") for number in range(count)))
    watch = services.watches["here"]
    async with asyncio.timeout(60):
        while sum(pod.ready for pod in watch.pods.values()) < count:
            await asyncio.sleep(0.02)
