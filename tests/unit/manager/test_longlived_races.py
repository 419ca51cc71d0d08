"""Long-lived sandboxes whose changes come at once, or fail half way: what each caller is told, and what is left."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from manager.errors import (
    IdempotencyMismatch,
    Provisioning,
    SandboxGone,
    SandboxStarting,
    StoreUnavailable,
)
from manager.model import Owner, Principal, SandboxRecord, SandboxState, own_name
from manager.services.audit import Detail
from manager.services.longlived.asked import Changes
from manager.services.longlived.ending import last_snapshot
from tests.support.place import ME, Held, Place, asked, place
from tests.support.world import ACME, running, services_over, until

S = SandboxState


# ── one key, many requests (F27) ────────────────────────────────────────────────────────────────────────────────────


async def test_fifty_requests_with_one_key_make_one_sandbox_and_another_body_among_them_is_refused() -> None:
    async with place() as here:
        others = [here.create(key="k", name="other") for _ in range(10)]
        answers = await asyncio.gather(
            *(here.create(key="k", name="one") for _ in range(50)), *others, return_exceptions=True
        )
        of = {"one": answers[:50], "other": answers[50:]}
        (made,) = {str(answer) for answer in answers if not isinstance(answer, BaseException)}
        accepted = of.pop((await here.record(made)).name)  # whichever of them was first
        assert {str(answer) for answer in accepted} == {made}
        (refused,) = of.values()
        assert {type(answer) for answer in refused} == {IdempotencyMismatch}
        assert (len(here.world.provider.pods), await here.slots()) == (1, 1)


async def test_two_managers_with_one_key_make_one_sandbox_and_another_body_is_refused_by_either() -> None:
    async with place() as here:
        world = here.world
        objects = here.kept.kept.records._objects
        other = services_over(world.store, world.provider, "m2", objects=objects)
        async with running(other):
            other.longlived.kept.workspaces = here.workspaces
            world.provider.hook = held = Held("create")
            first = asyncio.create_task(here.create(key="k", name="one"))
            await held.reached.wait()
            same = asyncio.create_task(other.longlived.create(ME, asked(name="one"), key="k", wait_sec=60))
            otherwise = asyncio.create_task(other.longlived.create(ME, asked(name="other"), key="k", wait_sec=60))
            held.go.set()
            sandbox_id = await first
            assert (await same).sandbox_id == sandbox_id
            with pytest.raises(IdempotencyMismatch):
                await otherwise
            assert (len(world.provider.pods), await here.slots()) == (1, 1)


async def test_who_comes_with_the_same_key_waits_no_longer_than_it_said() -> None:
    async with place() as here:
        here.world.provider.hook = held = Held("create")
        first = asyncio.create_task(here.create(key="k"))
        await held.reached.wait()
        again = await here.kept.create(ME, asked(), key="k", wait_sec=0)
        assert (again.state, first.done()) == (S.CREATING, False)
        held.go.set()
        assert await first == again.sandbox_id


async def test_a_manager_that_waited_for_anothers_creation_in_vain_takes_nothing_of_it_away() -> None:
    """Its own start limit passes while the other fills the workspace."""
    async with place() as here:
        world = here.world
        other = services_over(
            world.store, world.provider, "m2", objects=here.kept.kept.records._objects, start_limit_sec=0.3
        )
        async with running(other):
            other.longlived.kept.workspaces = here.workspaces
            filling, go = asyncio.Event(), asyncio.Event()

            async def first(_sandbox_id: str) -> None:
                filling.set()
                await go.wait()

            records = other.longlived.kept.records
            get = records.get

            async def not_there(*_: Any, **__: Any) -> None:  # the other looked a moment before the record was there
                records.get = get  # type: ignore[method-assign]

            making = asyncio.create_task(here.kept.create(ME, asked(), key="k", wait_sec=60, first=first))
            await filling.wait()
            records.get = not_there  # type: ignore[method-assign]
            with pytest.raises(Provisioning):
                await other.longlived.create(ME, asked(), key="k", wait_sec=60)
            sandbox_id = next(iter(here.kept._creations))
            assert await here.state(sandbox_id) is S.CREATING
            here.workspaces._put(ACME, sandbox_id, {"a": b"one"})
            go.set()
            assert (await making).state is S.RUNNING
            assert (await here.executor(sandbox_id)).files == {"a": b"one"}


# ── what breaks off ─────────────────────────────────────────────────────────────────────────────────────────────────


def unable_to_say(here: Place, state: SandboxState) -> None:
    """The record cannot be moved to this state any more: object storage is away at that moment."""
    move = here.kept.kept.move

    async def failing(owner: Owner, sandbox_id: str, to: SandboxState, reason: str) -> SandboxRecord:
        if to is state:
            raise StoreUnavailable("away, for a test")
        return await move(owner, sandbox_id, to, reason)

    here.kept.kept.move = failing  # type: ignore[method-assign]


async def test_a_creation_whose_record_cannot_say_that_it_runs_leaves_no_pod_no_slot_and_no_record() -> None:
    async with place() as here:
        unable_to_say(here, S.RUNNING)
        with pytest.raises(StoreUnavailable):
            await here.create()
        assert (here.world.provider.pods, await here.slots(), await here.kept.page(ACME)) == ([], 0, [])


async def test_a_start_whose_record_cannot_say_that_it_runs_is_stopped_again_with_all_that_was_kept() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        await here.stop(sandbox_id)
        move = here.kept.kept.move
        unable_to_say(here, S.RUNNING)
        with pytest.raises(StoreUnavailable):
            await here.start(sandbox_id)
        assert (here.world.provider.pods, await here.slots()) == ([], 0)
        assert await here.state(sandbox_id) is S.STOPPED
        here.kept.kept.move = move  # type: ignore[method-assign]
        await here.start(sandbox_id)
        assert (await here.executor(sandbox_id)).files == {"a": b"one"}


async def test_an_end_that_broke_off_after_its_last_snapshot_can_be_repeated_with_what_came_since() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        move = here.kept.kept.move
        unable_to_say(here, S.DESTROYED)
        with pytest.raises(StoreUnavailable):
            await here.destroy(sandbox_id)
        here.kept.kept.move = move  # type: ignore[method-assign]
        await here.put(sandbox_id, "b", b"two")
        assert (await here.destroy(sandbox_id)).state is S.DESTROYED
        assert here.workspaces.snapshots[ACME, last_snapshot(sandbox_id)][1] == {"a": b"one", "b": b"two"}


# ── who, what, when, from where ─────────────────────────────────────────────────────────────────────────────────────


class Noted:
    """manager.services.audit.AuditLog."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, Principal | str]] = []

    async def record(self, action: str, subject: str, *, owner: Owner, by: Principal | str, **_details: Detail) -> None:
        assert owner == ACME
        self.events.append((action, subject, by))


async def test_every_change_of_a_sandbox_is_in_the_audit_log_once_with_who_made_it_and_from_where() -> None:
    audit = Noted()
    async with place(audit=audit) as here:
        me = msgspec.structs.replace(ME, address="192.0.2.7", member="a@example.org")
        made = (await here.kept.create(me, asked(), key="k", wait_sec=60)).sandbox_id
        await here.kept.create(me, asked(), key="k", wait_sec=60)
        await here.kept.change(me, made, Changes(name="new"))
        snapshot = (await here.kept.snapshot(me, made, "s")).snapshot_id
        forked = (await here.kept.fork(me, made, asked(), key=None, wait_sec=60)).sandbox_id
        for _ in range(2):
            await here.kept.stop(me, ACME, made, reason="asked", wait_sec=60)
        for _ in range(2):
            await here.kept.start(me, ACME, made, wait_sec=60)
        await here.kept.delete_snapshot(me, snapshot)
        for _ in range(2):
            await here.kept.destroy(me, ACME, made, purge=False, force=False, wait_sec=60)
        with pytest.raises(SandboxGone):
            await here.kept.start(me, ACME, made, wait_sec=60)
        told = [(action, subject) for action, subject, _ in audit.events if not action.startswith("pod.")]
        assert told == [
            ("sandbox.created", made), ("sandbox.changed", made), ("snapshot.created", snapshot),
            ("sandbox.created", forked), ("sandbox.forked", forked), ("sandbox.stopped", made),
            ("sandbox.started", made), ("snapshot.deleted", snapshot), ("sandbox.destroyed", made),
        ]  # fmt: skip
        assert [by for _, _, by in audit.events] == [me] * len(audit.events)
        pods = [action for action, subject, _ in audit.events if action.startswith("pod.") and subject == made]
        assert pods == ["pod.bound", "pod.ended"] * 2


# ── at once ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("of", ["fork", "snapshot"])
async def test_a_copy_that_is_asked_for_while_it_is_stopped_has_what_the_stop_keeps(of: str) -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        await here.kept.snapshot(ME, sandbox_id, "before")
        await here.put(sandbox_id, "a", b"two")
        here.workspaces.hook = held = Held("save")
        stopping = asyncio.create_task(here.stop(sandbox_id))
        await held.reached.wait()
        if of == "fork":
            copying: asyncio.Task[Any] = asyncio.create_task(
                here.kept.fork(ME, sandbox_id, asked(), key=None, wait_sec=60)
            )
        else:
            copying = asyncio.create_task(here.kept.snapshot(ME, sandbox_id, "now"))
        for _ in range(20):  # the copy has every chance to be made of what was kept before
            await asyncio.sleep(0)
        held.go.set()
        copy = await copying
        assert (await stopping).state is S.STOPPED
        if of == "fork":
            assert (await here.executor(copy.sandbox_id)).files == {"a": b"two"}
        else:
            assert here.workspaces.snapshots[ACME, copy.snapshot_id][1] == {"a": b"two"}


async def test_times_that_are_changed_while_its_pod_is_made_hold_once_it_runs() -> None:
    async with place() as here:
        here.world.provider.hook = held = Held("create")
        making = asyncio.create_task(here.create())
        await held.reached.wait()
        sandbox_id = (await here.kept.page(ACME))[0].sandbox_id
        await here.kept.change(ME, sandbox_id, Changes(autostop_sec=60, ttl_sec=600))
        held.go.set()
        assert await making == sandbox_id
        terms = (await here.world.binding(own_name(sandbox_id))).terms
        assert terms is not None
        assert (terms.idle_sec, 590 < terms.max_sec <= 600) == (60, True)
        assert (await here.executor(sandbox_id)).pushed[-1].hard_end_sec < 600 + 3601


async def test_changes_of_different_fields_at_once_are_all_there_in_the_end() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await asyncio.gather(
            here.kept.change(ME, sandbox_id, Changes(name="new")),
            here.kept.change(ME, sandbox_id, Changes(metadata={"a": "1"})),
            here.kept.change(ME, sandbox_id, Changes(autostop_sec=77)),
            here.kept.change(ME, sandbox_id, Changes(ttl_sec=7777)),
            here.kept.change(ME, sandbox_id, Changes(autostart=True)),
        )
        record = await here.record(sandbox_id)
        assert (record.name, record.metadata, record.autostart) == ("new", {"a": "1"}, True)
        terms = (await here.world.binding(own_name(sandbox_id))).terms
        assert terms is not None
        assert (record.autostop_sec, record.ttl_sec, terms.idle_sec) == (77, 7777, 77)


async def test_an_end_that_has_to_wait_for_another_change_says_so_when_its_patience_is_over() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        here.workspaces.hook = held = Held("save")
        stopping = asyncio.create_task(here.stop(sandbox_id))
        await held.reached.wait()
        with pytest.raises(SandboxStarting):
            await here.destroy(sandbox_id, wait_sec=0)
        held.go.set()
        assert (await stopping).state is S.STOPPED
        assert (await here.destroy(sandbox_id)).state is S.DESTROYED


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_is_asked_at_once_it_ends_in_one_state_with_no_slot_or_pod_too_many(seed: int) -> None:
    """Starts, stops, forks, snapshots, changes and an end, all together, in different orders."""
    async with place() as here:
        sandbox_id = await here.create(autostart=bool(seed % 2))
        await here.put(sandbox_id, "a", b"one")
        makers: list[Any] = [
            lambda: here.stop(sandbox_id),
            lambda: here.start(sandbox_id),
            lambda: here.kept.fork(ME, sandbox_id, asked(), key=None, wait_sec=60),
            lambda: here.kept.snapshot(ME, sandbox_id, "s"),
            lambda: here.kept.change(ME, sandbox_id, Changes(ttl_sec=5000 + seed)),
            lambda: here.run(sandbox_id),
            lambda: here.stop(sandbox_id),
        ]
        if seed % 3 == 0:
            makers.append(lambda: here.destroy(sandbox_id))
        turned = makers[seed % len(makers) :] + makers[: seed % len(makers)]
        answers = await asyncio.wait_for(asyncio.gather(*(maker() for maker in turned), return_exceptions=True), 60)
        for answer in answers:
            assert not isinstance(answer, BaseException) or getattr(answer, "status", 500) in (404, 409, 410), answer
        state = await here.state(sandbox_id)
        assert state in (S.RUNNING, S.STOPPED, S.DESTROYED)
        running_ones = [record for record in await here.kept.page(ACME) if record.state is S.RUNNING]
        await until(lambda: len(here.world.provider.claimed) == len(running_ones))
        assert await here.slots() == len(running_ones)
        for record in running_ones:
            assert (await here.executor(record.sandbox_id)).files == {"a": b"one"}
            await here.kept.destroy(ME, ACME, record.sandbox_id, purge=True, force=False, wait_sec=60)
        assert (await here.slots(), here.world.provider.claimed) == (0, [])
        if state is S.DESTROYED:
            with pytest.raises(SandboxGone):
                await here.start(sandbox_id)


async def test_one_whose_time_is_over_during_its_stop_is_stopped_first_and_then_ended_once() -> None:
    async with place() as here:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        here.workspaces.hook = held = Held("save")
        stopping = asyncio.create_task(here.stop(sandbox_id))
        await held.reached.wait()
        records = here.kept.kept.records
        await records.update(
            ACME, sandbox_id, lambda record: msgspec.structs.replace(record, created_at=record.created_at - 20_000)
        )
        binding = await here.world.binding(own_name(sandbox_id))
        await here.keeper.expire(binding)
        await here.keeper.look()
        assert await here.state(sandbox_id) is S.STOPPING
        held.go.set()
        assert (await stopping).state is S.STOPPED
        with pytest.raises(SandboxGone) as gone:  # not for the moment until somebody ends it
            await here.start(sandbox_id)
        assert gone.value.details["reason"] == "expired"
        assert await here.slots() == 0
        await here.keeper.look()
        await until(lambda: is_destroyed(here, sandbox_id))
        assert here.workspaces.snapshots[ACME, last_snapshot(sandbox_id)][1] == {"a": b"one"}
        assert (here.world.provider.claimed, await here.slots(), here.workspaces.saves) == ([], 0, 1)


async def is_destroyed(here: Place, sandbox_id: str) -> bool:
    return await here.state(sandbox_id) is S.DESTROYED
