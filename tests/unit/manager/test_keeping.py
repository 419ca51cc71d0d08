"""Tasks' workspaces outlive their pods: kept when a pod is reclaimed, put into the next one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from manager.errors import NotFound, Provisioning, SandboxGone, StoreUnavailable
from manager.model import BindingState, LeaseTerms
from manager.services.keeping import TaskWorkspaces
from tests.support.memory_workspaces import MemoryWorkspaces
from tests.support.world import ACME, KEPT, World, principal, until, world

ME = principal()
SHORT = LeaseTerms(active_sec=1000.0, idle_sec=100.0, max_sec=5000.0)


class Place:
    def __init__(self, made: World) -> None:
        self.world = made
        self.workspaces = MemoryWorkspaces(made.provider)
        services = made.services
        self.kept = TaskWorkspaces(made.store, services.sandboxes, self.workspaces, (KEPT,))
        services.tasks.kept = services.sandboxes.task_keeper = services.reaper._tasks = self.kept

    async def put(self, path: str, content: bytes) -> None:
        await self.world.run("t")
        (await self.world.executor("t")).files[path] = content

    async def reap(self, at: float = 200.0) -> None:
        await self.world.services.leases.flush()
        self.world.store.offset_sec += at
        await self.world.services.reaper.reap()
        await until(lambda: not self.kept.busy)


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    async with world(profiles=(KEPT,), terms=SHORT) as made:
        yield Place(made)


def fails_at(step: str, error: Exception) -> Any:
    async def hook(entered: str) -> None:
        if entered == step:
            raise error

    return hook


async def test_a_reclaimed_tasks_files_are_in_its_next_pod_and_the_answer_says_so() -> None:
    async with place() as here:
        first = await here.world.run("t")
        assert first.facts.workspace == "fresh"
        await here.put("a", b"one")
        await here.reap()
        assert here.world.provider.pods == []
        again = await here.world.run("t")
        assert (again.facts.workspace, again.facts.sandbox_id) == ("restored", first.facts.sandbox_id)
        assert again.facts.previous is not None
        assert again.facts.previous.reason == "expired"
        assert (await here.world.executor("t")).files == {"a": b"one"}
        assert (await here.world.run("t")).facts.workspace == "kept"


async def test_they_are_found_also_where_redis_knows_nothing_of_the_task_any_more() -> None:
    async with place() as here:
        await here.put("a", b"one")
        await here.reap()
        here.world.store.forget_everything()
        again = await here.world.run("t")
        assert again.facts.workspace == "restored"
        assert (await here.world.executor("t")).files == {"a": b"one"}


async def test_what_cannot_be_kept_is_not_reclaimed_and_tried_again() -> None:
    async with place() as here:
        await here.put("a", b"one")
        here.workspaces.hook = fails_at("save", StoreUnavailable("away"))
        for _ in range(3):
            await here.reap()
            assert len(here.world.provider.pods) == 1
            assert (await here.world.binding("t")).state is BindingState.BOUND
        here.workspaces.hook = None
        await here.reap()
        assert here.world.provider.pods == []
        assert (await here.world.run("t")).facts.workspace == "restored"


async def test_a_task_that_may_have_files_is_not_begun_without_them() -> None:
    async with place() as here:
        await here.put("a", b"one")
        await here.reap()
        here.workspaces.hook = fails_at("restore", StoreUnavailable("away"))
        with pytest.raises(StoreUnavailable):
            await here.world.run("t")
        assert here.world.provider.pods == []
        assert (await here.world.store.held(ACME)).slots == 0
        here.workspaces.hook = None
        assert (await here.world.run("t")).facts.workspace == "restored"


async def test_a_command_that_comes_as_its_files_are_kept_waits_and_finds_them() -> None:
    async with place() as here:
        await here.put("a", b"one")
        commands: list[Any] = []

        async def hook(entered: str) -> None:
            if entered == "save" and not commands:
                with pytest.raises(Provisioning):
                    async with here.world.services.tasks.forward(ME, "t", "DELETE", "/v1/files", "path=a", {}, None):
                        pass
                commands.append(here.world.run("t"))

        here.workspaces.hook = hook
        await here.reap()
        answer = await commands[0]
        assert answer.facts.workspace == "restored"
        assert (await here.world.executor("t")).files == {"a": b"one"}


async def test_a_retired_task_leaves_nothing_and_begins_anew() -> None:
    async with place() as here:
        await here.put("a", b"one")
        await here.reap()
        await here.world.services.tasks.retire(ACME, "t")
        assert here.workspaces.heads == {}
        assert (await here.world.run("t")).facts.workspace == "fresh"


async def test_a_task_that_is_retired_as_its_files_are_kept_leaves_nothing() -> None:
    async with place() as here:
        await here.put("a", b"one")

        async def hook(entered: str) -> None:
            if entered == "save":
                await here.world.services.tasks.retire(ACME, "t")

        here.workspaces.hook = hook
        await here.reap()
        assert (here.workspaces.heads, here.world.provider.pods) == ({}, [])


async def test_writeback_keeps_what_is_in_that_very_pod_and_never_anothers() -> None:
    async with place() as here:
        await here.put("a", b"one")
        pod = (await here.world.binding("t")).pod
        written = await here.world.services.tasks.writeback(ME, "t", pod_expected=pod)
        assert (written.pod_id, written.checkpoint) == (pod, 1)
        await here.put("b", b"not written back")
        await here.world.provider.lose(pod, "oom")
        await here.world.services.watches["here"].sync()
        with pytest.raises(SandboxGone):
            await here.world.services.tasks.writeback(ME, "t", pod_expected=pod)
        again = await here.world.run("t")
        assert again.facts.workspace == "restored"
        assert (await here.world.executor("t")).files == {"a": b"one"}
        with pytest.raises(SandboxGone):
            await here.world.services.tasks.writeback(ME, "t", pod_expected=pod)
        assert here.workspaces.saves == 1
        with pytest.raises(NotFound):
            await here.world.services.tasks.writeback(ME, "never used")
