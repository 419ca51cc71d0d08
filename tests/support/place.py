"""A world in memory with long-lived sandboxes, for tests of their rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from executor.wire import ExecRequest
from manager.config import ProjectPolicy
from manager.model import Owner, SandboxRecord, SandboxState, own_name
from manager.services.core import Services
from manager.services.longlived.asked import Asked
from manager.services.longlived.keeper import Keeper
from manager.services.longlived.service import LongLived
from manager.services.tasks import TaskExecAnswer
from tests.support.memory_workspaces import MemoryWorkspaces
from tests.support.world import ACME, SMALL, World, principal, services_over, world

ME = principal()
ONE = ProjectPolicy(profiles=(SMALL.name,), concurrency=1)


def asked(**changes: Any) -> Asked:
    return Asked(**({"profile": None, "autostop_sec": 1800, "ttl_sec": 14_400} | changes))


class Place:
    """A world whose workspaces are kept in memory."""

    def __init__(self, made: World) -> None:
        self.world = made
        self.workspaces = MemoryWorkspaces(made.provider)
        made.services.longlived.kept.workspaces = self.workspaces

    @property
    def kept(self) -> LongLived:
        return self.world.services.longlived

    @property
    def keeper(self) -> Keeper:
        return self.world.services.keeper

    def other(self, holder: str, **options: Any) -> Services:
        """Another manager over the same store, pods, records and workspaces. Its maker closes it."""
        records = self.kept.kept.records
        made = services_over(
            self.world.store, self.world.provider, holder, objects=records._objects, cache=records._cache, **options
        )
        made.longlived.kept.workspaces = self.workspaces
        return made

    async def create(self, owner: Owner = ACME, key: str | None = None, wait_sec: float = 60, **changes: Any) -> str:
        record = await self.kept.create(principal(owner), asked(**changes), key=key, wait_sec=wait_sec)
        return record.sandbox_id

    async def run(self, sandbox_id: str, owner: Owner = ACME, **terms: Any) -> TaskExecAnswer:
        request = ExecRequest(command=["true"])
        return await self.world.services.tasks.exec(principal(owner), own_name(sandbox_id), request, **terms)

    async def put(self, sandbox_id: str, path: str, content: bytes) -> None:
        await self.run(sandbox_id)
        (await self.executor(sandbox_id)).files[path] = content

    async def executor(self, sandbox_id: str) -> Any:
        return self.world.provider.executors[(await self.world.binding(own_name(sandbox_id))).pod]

    async def record(self, sandbox_id: str) -> SandboxRecord:
        return await self.kept.get(ACME, sandbox_id)

    async def state(self, sandbox_id: str) -> SandboxState:
        return (await self.record(sandbox_id)).state

    async def stop(self, sandbox_id: str, wait_sec: float = 60) -> SandboxRecord:
        return await self.kept.stop(ME, ACME, sandbox_id, reason="asked", wait_sec=wait_sec)

    async def start(self, sandbox_id: str, wait_sec: float = 60) -> SandboxRecord:
        return await self.kept.start(ME, ACME, sandbox_id, wait_sec=wait_sec)

    async def destroy(self, sandbox_id: str, **how: Any) -> SandboxRecord:
        how = {"purge": False, "force": False, "wait_sec": 60.0} | how
        return await self.kept.destroy(ME, ACME, sandbox_id, **how)

    async def slots(self) -> int:
        return (await self.world.store.held(ACME)).slots


@asynccontextmanager
async def place(**options: Any) -> AsyncIterator[Place]:
    async with world(**options) as made:
        yield Place(made)


def fails_at(step: str, error: Exception) -> Any:
    async def hook(entered: str) -> None:
        if entered == step:
            raise error

    return hook


class Held:
    """A hook that holds one step up until it is let go."""

    def __init__(self, step: str) -> None:
        self._step, self.reached, self.go = step, asyncio.Event(), asyncio.Event()

    async def __call__(self, entered: str) -> None:
        if entered == self._step:
            self.reached.set()
            await self.go.wait()
