"""A pool of real local pods that grows on a burst and shrinks when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from manager.executor_client import pod_token
from manager.model import Profile
from manager.providers.local.provider import LocalProvider
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME, SECRET, running, services_over, until

ELASTIC = Profile(
    name="small", cpu=None, memory_bytes=None, pids=None, keep_workspace=False,
    pool_min=1, pool_max=4, pool_utilisation=0.5, pool_shrink_sec=60.0,
)  # fmt: skip


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    made = LocalProvider("here", tmp_path, lambda pod: pod_token(SECRET, pod))
    found = await made.capabilities()
    if found.tier is None:
        await made.close()
        pytest.skip(f"no isolation on this machine: {found.why_not}")
    yield made
    for pod in await made.list():
        await made.delete(pod.name)
    await made.close()


async def test_a_pool_of_local_pods_grows_on_a_burst_and_shrinks_when_it_is_over(local: LocalProvider) -> None:
    services = services_over(MemoryStore(), local, "m1", profiles=(ELASTIC,))
    now = 0.0
    services.pool.clock = lambda: now

    def sizes() -> tuple[int, int, int]:
        (view,) = services.pool.views()
        return view.ready, view.pending, view.wanted

    async with running(services):
        await until(lambda: sizes() == (1, 0, 1))
        for task in ("one", "two"):
            await services.sandboxes.ensure(ACME, task)
        await until(lambda: sizes() == (4, 0, 4))
        while now < 60.0:
            now += 10.0
            services.pool.missed(ELASTIC)  # wakes it
            await asyncio.sleep(0)
        await until(lambda: sizes() == (1, 0, 1))

        async def only_three() -> bool:
            return len(await local.list()) == 3

        await until(only_three)
        for task in ("one", "two"):
            assert (await services.sandboxes.ensure(ACME, task)).provisioned == "bound"
