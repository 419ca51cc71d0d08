"""A manager's services over a Store and a Provider in memory, for tests of the rules alone."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from executor.wire import ExecRequest
from manager.config import ProjectPolicy
from manager.model import Binding, LeaseTerms, Owner, Pod, Principal, Profile, Role, new_id
from manager.providers.base import Provider
from manager.services.audit import AuditLog
from manager.services.core import Services
from manager.services.pool import idle_labels
from manager.services.tasks import TaskExecAnswer
from manager.store.base import Cache, Store
from manager.store.objects import Objects
from tests.support.fake_executor import FakeExecutor
from tests.support.memory_objects import MemoryCache, memory_objects
from tests.support.memory_provider import MemoryProvider
from tests.support.memory_store import MemoryStore

SECRET = b"a secret of the tests"
ACME = Owner("acme", "web")
SHOP = Owner("acme", "shop")
TERMS = LeaseTerms(active_sec=1000.0, idle_sec=100.0, max_sec=5000.0)
SMALL = Profile(name="small", keep_workspace=False, pool_min=0)
LARGE = Profile(name="large", cpu=4.0, keep_workspace=False, pool_min=0)
KEPT = Profile(name="kept", pool_min=0)  # whose tasks' workspaces are kept


def principal(owner: Owner = ACME) -> Principal:
    return Principal(owner=owner, role=Role.MEMBER, key_id="k")


@dataclass
class World:
    store: MemoryStore
    provider: MemoryProvider
    services: Services

    async def run(self, task_id: str, *command: str, owner: Owner = ACME, key: str | None = None) -> TaskExecAnswer:
        request = ExecRequest(command=list(command) or ["true"])
        return await self.services.tasks.exec(principal(owner), task_id, request, idempotency_key=key)

    async def binding(self, task_id: str, owner: Owner = ACME) -> Binding:
        found = await self.store.get_binding(owner, task_id)
        assert found is not None
        return found

    async def executor(self, task_id: str, owner: Owner = ACME) -> FakeExecutor:
        return self.provider.executors[(await self.binding(task_id, owner)).pod]

    async def warm(self, profile: Profile = SMALL, count: int = 1) -> list[Pod]:
        """So many pool pods, as the refill would make them."""
        pods = [await self.provider.create(profile, new_id("p"), idle_labels(profile), {}) for _ in range(count)]
        await self.services.watches["here"].sync()
        return pods


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], most_sec: float = 60.0) -> None:
    """Waits until the condition holds; TimeoutError after `most_sec`."""
    async with asyncio.timeout(most_sec):
        while True:
            holds = condition()
            if (await holds) if not isinstance(holds, bool) else holds:
                return
            await asyncio.sleep(0.01)


def services_over(
    store: Store,
    provider: Provider,
    holder: str,
    *,
    profiles: tuple[Profile, ...] = (SMALL, LARGE),
    terms: LeaseTerms = TERMS,
    policies: Mapping[Owner, ProjectPolicy] | None = None,
    start_limit_sec: float = 20.0,
    audit: AuditLog | None = None,
    objects: Objects | None = None,
    cache: Cache | None = None,
) -> Services:
    default = ProjectPolicy(profiles=tuple(profile.name for profile in profiles), concurrency=None)
    return Services(
        store=store,
        objects=objects if objects is not None else memory_objects(),
        cache=cache if cache is not None else MemoryCache(),
        providers={"here": provider},
        regions={"here": "north"},
        profiles=profiles,
        policy=lambda owner: (policies or {}).get(owner, default),
        terms=terms,
        secret=SECRET,
        holder=holder,
        audit=audit,
        start_limit_sec=start_limit_sec,
        reap_sec=0.05,
    )


@asynccontextmanager
async def running(services: Services) -> AsyncIterator[Services]:
    """The services with their background loops, closed in the end."""
    await services.start()
    loops = asyncio.create_task(services.run_forever(), name=f"loops-{services.holder}")
    try:
        yield services
    finally:
        loops.cancel()
        await asyncio.wait([loops])
        await services.close()
    if not loops.cancelled() and (died := loops.exception()) is not None:
        raise died


@asynccontextmanager
async def world(
    *,
    profiles: tuple[Profile, ...] = (SMALL, LARGE),
    terms: LeaseTerms = TERMS,
    policies: Mapping[Owner, ProjectPolicy] | None = None,
    start_limit_sec: float = 20.0,
    loops: bool = False,
    audit: AuditLog | None = None,
) -> AsyncIterator[World]:
    """`loops`: with the background loops running."""
    with tempfile.TemporaryDirectory(prefix="sj") as directory:  # short: a socket's path has 107 bytes
        provider = MemoryProvider(Path(directory), SECRET)
        store = MemoryStore()
        services = services_over(
            store,
            provider,
            "m1",
            profiles=profiles,
            terms=terms,
            policies=policies,
            start_limit_sec=start_limit_sec,
            audit=audit,
        )
        try:
            if loops:
                async with running(services):
                    yield World(store, provider, services)
            else:
                await services.start()
                yield World(store, provider, services)
                await services.close()
        finally:
            await provider.close()
