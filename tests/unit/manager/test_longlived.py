"""Long-lived sandboxes: their states, what takes a slot, and what a crash between any two steps leaves behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from manager.config import ProjectPolicy
from manager.errors import (
    CapacityExhausted,
    IdempotencyMismatch,
    IllegalMove,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    SandboxGone,
    SandboxReplaced,
    SandboxStopped,
    StoreUnavailable,
    UnknownProfile,
)
from manager.model import (
    MOVES,
    Owner,
    PodState,
    SandboxRecord,
    SandboxState,
    moved,
    own_name,
)
from manager.services.longlived.asked import Changes
from manager.services.longlived.ending import last_snapshot
from tests.support.place import ME, ONE, Held, Place, asked, fails_at, place
from tests.support.world import ACME, SHOP, SMALL, World, running, until

S = SandboxState


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_state_moves_only_as_the_table_says() -> None:
    record = SandboxRecord(
        owner=ACME, sandbox_id="s", profile="p", target="t", autostop_sec=1, ttl_sec=1, created_at=0.0
    )
    for state in S:
        for to in S:
            at = msgspec.structs.replace(record, state=state)
            if to in MOVES[state]:
                assert (moved(at, to, "why", 5.0).state, moved(at, to, "why", 5.0).since) == (to, 5.0)
            else:
                with pytest.raises(IllegalMove):
                    moved(at, to, "why", 5.0)
    assert MOVES[S.DESTROYED] == frozenset()


# ── making and using ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_sandbox_is_made_once_and_used_by_its_id_as_a_task_is_by_its_name() -> None:
    async with place() as here:
        sandbox_id = await here.create(env={"COLOUR": "blue"}, name="mine")
        answers = [await here.run(sandbox_id) for _ in range(3)]
        assert {answer.facts.sandbox_id for answer in answers} == {sandbox_id}
        assert len({answer.facts.pod_id for answer in answers}) == 1
        assert answers[0].facts.provisioned == "bound"
        executor = await here.executor(sandbox_id)
        assert executor.bound.env == {"COLOUR": "blue", "SOJOURN_SANDBOX_ID": sandbox_id}
        assert executor.bound.task_id is None
        assert await here.slots() == 1
        record = await here.record(sandbox_id)
        assert (record.state, record.reason, record.name, record.member) == (S.RUNNING, "created", "mine", None)


async def test_a_task_cannot_be_called_like_a_sandbox() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.world.run(sandbox_id)  # a task of the same text is another sandbox
        assert len(here.world.provider.claimed) == 2
        views = await here.world.services.tasks.list(ME)
        assert [view.task_id for view in views] == [sandbox_id]


async def test_a_foreign_sandbox_is_as_one_that_does_not_exist() -> None:
    async with place() as here:
        theirs = await here.create(SHOP)
        for sandbox_id in (theirs, "s" * 27):
            for call in (
                here.run(sandbox_id),
                here.run(sandbox_id, pod_expected="p"),
                here.record(sandbox_id),
                here.stop(sandbox_id),
                here.start(sandbox_id),
                here.destroy(sandbox_id),
                here.kept.change(ME, sandbox_id, Changes(name="x")),
                here.kept.snapshot(ME, sandbox_id, ""),
                here.kept.fork(ME, sandbox_id, asked(), key=None, wait_sec=60),
            ):
                with pytest.raises(NotFound) as missing:
                    await call
                assert missing.value.message == "there is no such sandbox"
        assert (await here.kept.get(SHOP, theirs)).state is S.RUNNING


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"autostop_sec": 0}, "autostop_sec"),
        ({"ttl_sec": -1}, "ttl_sec"),
        ({"ttl_sec": 10**9}, "ttl_sec"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"env": {"A": "a\0b"}}, "env"),
        ({"env": {"A": "x" * 70_000}}, "env"),
        ({"metadata": {"k": "v" * 20_000}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(65)}}, "metadata"),
    ],
)
async def test_what_no_sandbox_can_be_is_refused_and_leaves_nothing(changes: dict[str, Any], field: str) -> None:
    async with place() as here:
        with pytest.raises(InvalidRequest) as refused:
            await here.create(**changes)
        assert refused.value.details["field"] == field
        assert (await here.kept.page(ACME), await here.slots()) == ([], 0)


async def test_a_profile_that_is_not_allowed_is_refused_and_leaves_nothing() -> None:
    async with place() as here:
        with pytest.raises(UnknownProfile):
            await here.create(profile="root")
        assert (await here.kept.page(ACME), await here.slots()) == ([], 0)


async def test_a_full_project_is_refused_and_nothing_is_left_of_the_attempt() -> None:
    async with place(policies={ACME: ONE}) as here:
        first = await here.create()
        with pytest.raises(QuotaExceeded):
            await here.create()
        with pytest.raises(QuotaExceeded):
            await here.world.run("a task needs a slot too")
        assert [record.sandbox_id for record in await here.kept.page(ACME)] == [first]
        await here.destroy(first)
        await here.create()


async def test_a_pod_that_cannot_be_made_leaves_no_sandbox_and_no_slot() -> None:
    async with place() as here:
        here.world.provider.hook = fails_at("create", CapacityExhausted("no room"))
        with pytest.raises(CapacityExhausted):
            await here.create()
        here.world.provider.hook = None
        assert (await here.kept.page(ACME), await here.slots(), here.world.provider.pods) == ([], 0, [])


async def test_a_first_content_that_fails_leaves_no_sandbox_no_slot_and_no_workspace() -> None:
    async with place() as here:

        async def first(workspace: str) -> None:
            await here.workspaces.fork(ACME, "nothing", workspace)

        with pytest.raises(NotFound):
            await here.kept.create(ME, asked(), key=None, wait_sec=60, first=first)
        assert (await here.kept.page(ACME), await here.slots(), here.workspaces.heads) == ([], 0, {})


async def test_the_same_key_again_is_the_same_sandbox() -> None:
    async with place() as here:
        made = await asyncio.gather(*(here.create(key="k") for _ in range(5)))
        assert len(set(made)) == 1
        assert await here.create(key="k") == made[0]
        with pytest.raises(IdempotencyMismatch):
            await here.create(key="k", name="another")
        assert await here.create(SHOP, key="k") != made[0]
        assert await here.slots() == 1


async def test_one_that_takes_long_is_told_of_before_it_runs_and_waited_for_by_its_first_command() -> None:
    async with place() as here:
        held = Held("create")
        here.world.provider.hook = held
        record = await here.kept.create(ME, asked(), key=None, wait_sec=0)
        assert record.state is S.CREATING
        command = asyncio.create_task(here.run(record.sandbox_id))
        await held.reached.wait()
        assert not command.done()
        held.go.set()
        assert (await command).facts.sandbox_id == record.sandbox_id
        assert await here.state(record.sandbox_id) is S.RUNNING


async def test_one_that_is_never_made_says_so_to_who_waits_and_by_its_state() -> None:
    async with place() as here:
        held = Held("create")
        here.world.provider.hook = held
        record = await here.kept.create(ME, asked(), key=None, wait_sec=0)
        command = asyncio.create_task(here.run(record.sandbox_id))
        await held.reached.wait()
        here.world.provider.hook = fails_at("create", CapacityExhausted("no room"))
        here.world.provider.after = fails_at("create", CapacityExhausted("no room"))
        held.go.set()
        with pytest.raises(SandboxGone):
            await command
        found = await here.record(record.sandbox_id)
        assert (found.state, found.reason) == (S.FAILED, "capacity_exhausted")
        assert await here.slots() == 0


async def test_who_stops_waiting_stops_nothing() -> None:
    async with place() as here:
        held = Held("create")
        here.world.provider.hook = held
        making = asyncio.create_task(here.create(key="k"))
        await held.reached.wait()
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        held.go.set()
        assert await here.state(await here.create(key="k")) is S.RUNNING


async def test_the_pods_own_deadlines_outlast_its_lease_for_the_last_checkpoint() -> None:
    async with place() as here:
        sandbox_id = await here.create(autostop_sec=9000, ttl_sec=20_000)
        lease = (await here.executor(sandbox_id)).bound.lease
        assert lease.quiet_sec >= 9000 + 3600
        assert 20_000 < lease.hard_end_sec <= 20_000 + 3600


# ── changing ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_change_is_of_the_record_the_lease_and_the_pod() -> None:
    async with place() as here:
        sandbox_id = await here.create(metadata={"a": "1"})
        await here.world.store.touch_leases("m1", {sandbox_id: 0})
        after = await here.kept.change(
            ME, sandbox_id, Changes(name="new", metadata={"b": "2"}, autostop_sec=60, ttl_sec=600, autostart=True)
        )
        assert (after.name, after.metadata, after.autostart) == ("new", {"b": "2"}, True)
        lease = await here.world.store.get_lease(sandbox_id)
        assert lease is not None
        assert 0 < lease.until - lease.now <= 60
        assert 500 < lease.hard_end - lease.now <= 600
        assert (await here.executor(sandbox_id)).pushed[-1].hard_end_sec > 3600
        unchanged = await here.kept.change(ME, sandbox_id, Changes(autostart=False))
        assert (unchanged.name, unchanged.metadata, unchanged.ttl_sec) == ("new", {"b": "2"}, 600)


async def test_a_time_that_is_over_already_cannot_be_set() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        record = await here.record(sandbox_id)
        await until(lambda: time.time() > record.created_at + 1)
        with pytest.raises(InvalidRequest):
            await here.kept.change(ME, sandbox_id, Changes(ttl_sec=1))
        assert (await here.record(sandbox_id)).ttl_sec == 14_400


# ── stopping and starting ───────────────────────────────────────────────────────────────────────────────────────────


async def test_stop_keeps_the_workspace_and_gives_pod_and_slot_back_start_brings_it_back() -> None:
    async with place(policies={ACME: ONE}) as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        first_pod = (await here.run(sandbox_id)).facts.pod_id
        assert (await here.stop(sandbox_id)).state is S.STOPPED
        assert (await here.slots(), here.world.provider.pods) == (0, [])
        assert (await here.stop(sandbox_id)).state is S.STOPPED  # again is no error
        with pytest.raises(SandboxStopped) as refused:
            await here.run(sandbox_id)
        assert refused.value.status == 409
        other = await here.create()
        with pytest.raises(QuotaExceeded):
            await here.start(sandbox_id)
        assert await here.state(sandbox_id) is S.STOPPED
        await here.destroy(other)
        assert (await here.start(sandbox_id)).state is S.RUNNING
        answer = await here.run(sandbox_id)
        assert (await here.executor(sandbox_id)).files == {"a": b"one"}
        assert (answer.facts.sandbox_id, answer.facts.pod_id == first_pod) == (sandbox_id, False)
        with pytest.raises(SandboxReplaced):
            await here.run(sandbox_id, pod_expected=first_pod)


async def test_a_start_that_comes_as_the_last_pod_is_still_ending_waits_for_that() -> None:
    async with place(policies={ACME: ONE}) as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        here.world.provider.hook = held = Held("delete")
        stopping = asyncio.create_task(here.stop(sandbox_id))
        await held.reached.wait()
        assert await here.state(sandbox_id) is S.STOPPED
        starting = asyncio.create_task(here.start(sandbox_id))
        await asyncio.sleep(0)
        held.go.set()
        assert (await stopping).state is S.STOPPED
        assert (await starting).state is S.RUNNING
        assert (await here.executor(sandbox_id)).files == {"a": b"one"}


async def test_what_cannot_be_kept_runs_on_and_says_why() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        pod = (await here.run(sandbox_id)).facts.pod_id
        here.workspaces.hook = fails_at("save", StoreUnavailable("the object storage is away"))
        with pytest.raises(StoreUnavailable):
            await here.stop(sandbox_id)
        record = await here.record(sandbox_id)
        assert (record.state, record.reason) == (S.RUNNING, "not_kept:store_unavailable")
        assert (await here.run(sandbox_id)).facts.pod_id == pod
        with pytest.raises(StoreUnavailable):
            await here.destroy(sandbox_id)
        assert (await here.run(sandbox_id)).facts.pod_id == pod
        assert (await here.destroy(sandbox_id, force=True)).state is S.DESTROYED
        assert here.world.provider.pods == []


async def test_while_it_is_being_stopped_nothing_runs_in_it() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.run(sandbox_id)
        here.workspaces.hook = held = Held("save")
        assert (await here.stop(sandbox_id, wait_sec=0)).state in (S.RUNNING, S.STOPPING)
        await held.reached.wait()
        assert await here.state(sandbox_id) is S.STOPPING
        assert here.kept.progress(sandbox_id) is not None
        for call in (here.run(sandbox_id), here.start(sandbox_id)):
            with pytest.raises(SandboxStopped):
                await call
        held.go.set()
        assert (await here.stop(sandbox_id)).state is S.STOPPED
        assert here.workspaces.saves == 1


async def test_a_workspace_that_cannot_be_brought_back_leaves_no_pod_and_no_slot() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        await here.stop(sandbox_id)
        here.workspaces.hook = fails_at("restore", StoreUnavailable("away"))
        with pytest.raises(StoreUnavailable):
            await here.start(sandbox_id)
        assert (await here.slots(), here.world.provider.pods) == (0, [])
        record = await here.record(sandbox_id)
        assert (record.state, record.reason) == (S.STOPPED, "not_started:store_unavailable")
        here.workspaces.hook = None
        await here.start(sandbox_id)
        assert (await here.executor(sandbox_id)).files == {"a": b"one"}


async def test_access_to_a_stopped_sandbox_starts_it_where_it_shall_once_for_all_who_ask() -> None:
    async with place() as here:
        sandbox_id = await here.create(autostart=True)
        await here.put(sandbox_id, "a", b"one")
        await here.stop(sandbox_id)
        answers = await asyncio.gather(*(here.run(sandbox_id) for _ in range(10)))
        assert len({answer.facts.pod_id for answer in answers}) == 1
        assert (await here.executor(sandbox_id)).files == {"a": b"one"}
        assert await here.slots() == 1


# ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_destroyed_sandbox_leaves_its_last_checkpoint_for_a_week() -> None:
    async with place() as here:
        sandbox_id = await here.create(name="mine")
        await here.put(sandbox_id, "a", b"one")
        await here.destroy(sandbox_id)
        assert (await here.destroy(sandbox_id)).state is S.DESTROYED
        snapshot = await here.workspaces.get_snapshot(ACME, last_snapshot(sandbox_id))
        assert snapshot is not None
        assert snapshot.keep_until is not None
        assert 6 * 86_400 < snapshot.keep_until - time.time() <= 7 * 86_400
        assert (await here.slots(), here.world.provider.pods, here.workspaces.heads) == (0, [], {})
        with pytest.raises(SandboxGone) as gone:
            await here.run(sandbox_id)
        assert gone.value.details["reason"] == "destroyed"
        with pytest.raises(SandboxGone):
            await here.start(sandbox_id)


@pytest.mark.parametrize("stopped", [False, True])
async def test_purge_keeps_nothing(stopped: bool) -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        if stopped:
            await here.stop(sandbox_id)
        await here.destroy(sandbox_id, purge=True)
        assert (here.workspaces.heads, here.workspaces.snapshots, here.world.provider.pods) == ({}, {}, [])


async def test_a_sandbox_that_is_still_being_made_can_be_destroyed() -> None:
    async with place() as here:
        held = Held("create")
        here.world.provider.hook = held
        record = await here.kept.create(ME, asked(), key=None, wait_sec=0)
        await held.reached.wait()
        destroying = asyncio.create_task(here.destroy(record.sandbox_id))
        await asyncio.sleep(0)
        held.go.set()
        assert (await destroying).state is S.DESTROYED
        await until(lambda: here.world.provider.pods == [])
        assert await here.slots() == 0


async def test_a_sandbox_that_is_destroyed_when_its_pod_is_there_and_nobody_was_told_yet_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with place() as here:
        move, told = here.kept.kept.move, asyncio.Event()

        async def held(owner: Owner, sandbox_id: str, to: SandboxState, reason: str) -> SandboxRecord:
            if to is S.RUNNING:
                told.set()
                await asyncio.Event().wait()
            return await move(owner, sandbox_id, to, reason)

        monkeypatch.setattr(here.kept.kept, "move", held)
        record = await here.kept.create(ME, asked(), key=None, wait_sec=0)
        await told.wait()
        assert (await here.destroy(record.sandbox_id)).state is S.DESTROYED
        await until(lambda: here.world.provider.pods == [])
        assert await here.slots() == 0


async def test_a_lost_pod_is_told_and_what_was_kept_last_can_be_started() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"kept")
        await here.kept.snapshot(ME, sandbox_id, "before")
        await here.put(sandbox_id, "b", b"not kept")
        pod = (await here.run(sandbox_id)).facts.pod_id
        await here.world.provider.lose(pod, "oom")
        await here.world.services.watches["here"].sync()
        with pytest.raises(SandboxGone):
            await here.run(sandbox_id)
        await until(lambda: is_failed(here, sandbox_id))
        assert await here.slots() == 0
        await here.start(sandbox_id)
        assert (await here.executor(sandbox_id)).files == {"a": b"kept"}


async def is_failed(here: Place, sandbox_id: str) -> bool:
    return await here.state(sandbox_id) is S.FAILED


# ── snapshots and forks ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_snapshot_is_of_its_moment_and_the_sandbox_runs_on() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        pod = (await here.run(sandbox_id)).facts.pod_id
        taken = await here.kept.snapshot(ME, sandbox_id, "first")
        await here.put(sandbox_id, "a", b"two")
        assert (await here.run(sandbox_id)).facts.pod_id == pod
        assert here.workspaces.snapshots[ACME, taken.snapshot_id][1] == {"a": b"one"}
        await here.stop(sandbox_id)
        later = await here.kept.snapshot(ME, sandbox_id, "of a stopped one")
        assert here.workspaces.snapshots[ACME, later.snapshot_id][1] == {"a": b"two"}


async def test_a_fork_has_what_is_there_now_and_goes_its_own_way() -> None:
    async with place() as here:
        source = await here.create()
        await here.put(source, "a", b"one")
        pod = (await here.run(source)).facts.pod_id
        forked = (await here.kept.fork(ME, source, asked(name="fork"), key=None, wait_sec=60)).sandbox_id
        assert (await here.run(source)).facts.pod_id == pod
        await here.put(forked, "a", b"of the fork")
        assert (await here.executor(source)).files == {"a": b"one"}
        assert (await here.record(forked)).name == "fork"


async def test_a_fork_that_finds_no_slot_leaves_nothing_behind() -> None:
    async with place(policies={ACME: ONE}) as here:
        source = await here.create()
        with pytest.raises(QuotaExceeded):
            await here.kept.fork(ME, source, asked(), key=None, wait_sec=60)
        assert [record.sandbox_id for record in await here.kept.page(ACME)] == [source]
        assert here.workspaces.heads == {}


# ── autostop and time to live ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_quiet_sandbox_is_stopped_with_its_workspace_kept() -> None:
    async with place() as here:
        sandbox_id = await here.create(autostop_sec=60)
        await here.put(sandbox_id, "a", b"one")
        await here.world.services.leases.flush()
        here.world.store.offset_sec = 120
        await here.world.services.reaper.reap()
        await until(lambda: here.world.provider.pods == [])
        record = await here.record(sandbox_id)
        assert (record.state, record.reason, await here.slots()) == (S.STOPPED, "idle", 0)
        assert here.workspaces.heads[ACME, sandbox_id][1] == {"a": b"one"}


@pytest.mark.parametrize("work", ["background", "operation"])
async def test_one_that_works_is_never_stopped_for_being_quiet(work: str) -> None:
    async with place() as here:
        sandbox_id = await here.create(autostop_sec=60)
        await here.run(sandbox_id)
        executor = await here.executor(sandbox_id)
        await here.world.services.leases.flush()
        here.world.store.offset_sec = 120
        if work == "background":
            executor.running = 1
            await here.world.services.reaper.reap()
        else:
            bound = await here.world.services.sandboxes.ensure(ACME, own_name(sandbox_id))
            with here.world.services.sandboxes.operation(bound):
                await here.world.services.reaper.reap()
        assert await here.state(sandbox_id) is S.RUNNING
        assert here.workspaces.saves == 0
        await here.run(sandbox_id)


@pytest.mark.parametrize("when", ["under way", "just over"])
async def test_new_terms_while_a_command_runs_or_just_after_it_leave_its_end_to_be_told(when: str) -> None:
    """S9: a command that counts as under way for ever would keep a quiet sandbox for its whole active lease."""
    async with place() as here:
        sandbox_id = await here.create()
        services = here.world.services
        bound = await services.sandboxes.ensure(ACME, own_name(sandbox_id))
        with services.sandboxes.operation(bound):
            await services.leases.flush()
            if when == "under way":
                await here.kept.change(ME, sandbox_id, Changes(autostop_sec=60))
                assert services.leases.operations(sandbox_id) == 1
        if when == "just over":  # and not written yet
            await here.kept.change(ME, sandbox_id, Changes(autostop_sec=60))
        await services.leases.flush()
        lease = await here.world.store.get_lease(sandbox_id)
        assert lease is not None
        assert lease.operations == 0
        assert lease.until - lease.now <= 60


async def test_an_operation_that_begins_as_the_reaper_looks_wins() -> None:
    async with place() as here:
        sandbox_id = await here.create(autostop_sec=60)
        await here.run(sandbox_id)
        await here.world.services.leases.flush()
        here.world.store.offset_sec = 120
        binding = await here.world.binding(own_name(sandbox_id))
        await here.world.store.extend_lease(sandbox_id, 50)
        await here.keeper.stop_quiet(binding)
        await until(lambda: not here.kept.kept.moving(sandbox_id))
        assert await here.state(sandbox_id) is S.RUNNING


async def test_one_whose_time_is_over_is_ended_with_a_last_checkpoint_though_it_works() -> None:
    async with place() as here:
        sandbox_id = await here.create(ttl_sec=300)
        await here.put(sandbox_id, "a", b"one")
        (await here.executor(sandbox_id)).running = 1
        here.world.store.offset_sec = 400
        await here.world.services.reaper.reap()
        await until(lambda: here.world.provider.pods == [])
        record = await here.record(sandbox_id)
        assert (record.state, record.reason) == (S.DESTROYED, "expired")
        assert here.workspaces.snapshots[ACME, last_snapshot(sandbox_id)][1] == {"a": b"one"}


async def test_a_stopped_one_whose_time_is_over_is_ended_too() -> None:
    async with place() as here:
        sandbox_id = await here.create(ttl_sec=1)
        await here.put(sandbox_id, "a", b"one")
        await here.stop(sandbox_id)

        async def ended() -> bool:
            await here.keeper.look()
            return await here.state(sandbox_id) is S.DESTROYED

        await until(ended)
        assert here.workspaces.snapshots[ACME, last_snapshot(sandbox_id)][1] == {"a": b"one"}


async def test_a_quiet_one_that_cannot_be_kept_is_tried_again_and_never_lost() -> None:
    async with place() as here:
        sandbox_id = await here.create(autostop_sec=60)
        await here.put(sandbox_id, "a", b"one")
        await here.world.services.leases.flush()
        here.workspaces.hook = fails_at("save", StoreUnavailable("away"))
        for turn in range(1, 4):
            here.world.store.offset_sec = 120.0 * turn
            await here.world.services.reaper.reap()
            await until(lambda: not here.kept.kept.moving(sandbox_id))
            assert await here.state(sandbox_id) is S.RUNNING
            assert len(here.world.provider.pods) == 1
        here.workspaces.hook = None
        here.world.store.offset_sec = 600
        await here.world.services.reaper.reap()
        await until(lambda: here.world.provider.pods == [])
        assert here.workspaces.heads[ACME, sandbox_id][1] == {"a": b"one"}


# ── crashes, and a store that was emptied ───────────────────────────────────────────────────────────────────────────


async def test_after_redis_was_emptied_running_ones_are_found_and_stopped_ones_too() -> None:
    async with place() as here:
        runs, sleeps = await here.create(autostop_sec=500), await here.create()
        await here.put(sleeps, "a", b"one")
        await here.stop(sleeps)
        pod = (await here.run(runs)).facts.pod_id
        here.world.store.forget_everything()
        await here.world.services.recovery.recover()
        assert (await here.run(runs)).facts.pod_id == pod
        assert await here.slots() == 1
        lease = await here.world.store.get_lease(runs)
        assert lease is not None
        assert lease.terms.idle_sec == 500
        assert await here.state(sleeps) is S.STOPPED
        await here.start(sleeps)
        assert (await here.executor(sleeps)).files == {"a": b"one"}
        assert await here.slots() == 2


@pytest.mark.parametrize("step", ["save", "snapshot"])
@pytest.mark.parametrize("ending", ["stop", "destroy"])
async def test_a_manager_that_dies_at_any_step_of_ending_leaves_it_for_the_next(step: str, ending: str) -> None:
    async with place(start_limit_sec=1.0) as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        here.workspaces.hook = held = Held(step)
        here.world.services.sandboxes.claim_sec = 0.2  # what a manager that died held is free so soon
        dying = asyncio.create_task(here.stop(sandbox_id) if ending == "stop" else here.destroy(sandbox_id))
        if step == "snapshot" and ending == "stop":
            assert (await dying).state is S.STOPPED  # no such step
            return
        await held.reached.wait()
        successor = here.other("m2", start_limit_sec=1.0)
        here.workspaces.hook = None
        async with frozen(here.world, sandbox_id), running(successor):
            # It takes over what the first one does not renew any more.
            async def over() -> bool:
                await successor.keeper.look()
                return not here.world.provider.claimed

            await until(over, 60)
        wanted = (S.STOPPED, "asked") if ending == "stop" else (S.DESTROYED, "destroyed")
        record = await successor.longlived.get(ACME, sandbox_id)
        assert (record.state, record.reason) == wanted
        assert await here.slots() == 0
        dying.cancel()
        held.go.set()
        await asyncio.gather(dying, return_exceptions=True)


@asynccontextmanager
async def frozen(made: World, sandbox_id: str) -> AsyncIterator[None]:
    """As if its manager had died in the middle: nothing of what it began goes on."""
    moving = made.services.longlived.kept.move_of(sandbox_id)
    assert moving is not None
    for task in asyncio.all_tasks():
        if task.get_name() == f"renewing-{sandbox_id}":
            task.cancel()
    yield
    assert not moving.done() or moving.cancelled()


async def test_a_start_whose_claim_is_gone_is_stopped_again_and_can_be_started() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        await here.stop(sandbox_id)
        found = await here.kept.kept.records.get(ACME, sandbox_id, fresh=True)
        assert found is not None
        await here.kept.kept.records.replace(found, moved(found.value, S.STARTING, "asked", time.time() - 1000))
        await here.keeper.look()
        record = await here.record(sandbox_id)
        assert (record.state, record.reason) == (S.STOPPED, "not_started:interrupted")
        await here.start(sandbox_id)
        assert (await here.executor(sandbox_id)).files == {"a": b"one"}


async def test_records_of_what_was_destroyed_go_after_a_week() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.destroy(sandbox_id)
        await here.keeper.look()
        assert await here.state(sandbox_id) is S.DESTROYED
        found = await here.kept.kept.records.get(ACME, sandbox_id, fresh=True)
        assert found is not None
        await here.kept.kept.records.replace(
            found, msgspec.structs.replace(found.value, since=time.time() - 8 * 86_400)
        )
        await here.keeper.look()
        with pytest.raises(NotFound):
            await here.record(sandbox_id)


async def test_two_hundred_creates_and_starts_never_hold_more_than_the_limit() -> None:
    most = 0
    async with place(policies={ACME: ProjectPolicy(profiles=(SMALL.name,), concurrency=10)}) as here:

        async def count() -> None:
            nonlocal most
            while True:
                most = max(most, sum(pod.state is PodState.CLAIMED for pod in here.world.provider.pods))
                await asyncio.sleep(0.001)

        counting = asyncio.create_task(count())
        made = await asyncio.gather(*(here.create() for _ in range(200)), return_exceptions=True)
        ids = [one for one in made if isinstance(one, str)]
        assert len(ids) == 10
        assert all(isinstance(one, str | QuotaExceeded) for one in made)
        await asyncio.gather(*(here.stop(one) for one in ids[:5]))
        mixed: list[Any] = [here.start(one) for one in ids[:5]] + [here.create() for _ in range(50)]
        results = await asyncio.gather(*mixed, return_exceptions=True)
        assert sum(not isinstance(one, BaseException) for one in results) == 5
        assert all(not isinstance(one, BaseException) or isinstance(one, QuotaExceeded) for one in results)
        counting.cancel()
        assert most == 10
        assert await here.slots() == 10
