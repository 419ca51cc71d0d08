"""A task has one sandbox, and what breaks while it is provided leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from manager.config import ProjectPolicy
from manager.errors import (
    CapacityExhausted,
    InvalidTaskId,
    ManagerError,
    NoTargetInRegion,
    ProfileMismatch,
    Provisioning,
    QuotaExceeded,
    StoreUnavailable,
    TaskBoundElsewhere,
    UnknownProfile,
)
from manager.executor_client import PodRef
from manager.model import LABEL_STATE, NOTE_TOKEN, BindingState, Owner, PodState, task_label
from manager.services.sandboxes import Bound
from tests.support.world import ACME, SHOP, SMALL, TERMS, World, running, services_over, until, world


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world() as made:
        yield made


async def ensure(here: World, task_id: str = "t", owner: Owner = ACME) -> Bound:
    return await here.services.sandboxes.ensure(owner, task_id)


# ── one task, one sandbox ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_first_command_makes_a_pod_and_the_next_finds_it(here: World) -> None:
    first = await ensure(here)
    assert (first.provisioned, first.workspace, first.previous) == ("cold", "fresh", None)
    again = await ensure(here)
    assert (again.provisioned, again.workspace) == ("bound", "kept")
    assert again.binding == first.binding
    assert len(here.provider.pods) == 1


async def test_the_pod_is_told_who_it_is_and_how_long_it_may_live(here: World) -> None:
    bound = await ensure(here)
    told = (await here.executor("t")).bound
    assert told is not None
    assert (told.sandbox_id, told.task_id) == (bound.binding.sandbox_id, "t")
    assert told.lease.hard_end_sec == TERMS.max_sec
    assert told.lease.quiet_sec == TERMS.active_sec  # a manager that dies leaves leases of that length behind


async def test_a_warm_pod_is_claimed_rather_than_one_made(here: World) -> None:
    (pod,) = await here.warm()
    bound = await ensure(here)
    assert (bound.provisioned, bound.binding.pod) == ("warm", pod.name)
    claimed = await here.provider.get(pod.name)
    assert claimed is not None
    assert claimed.labels[LABEL_STATE] == PodState.CLAIMED
    assert claimed.labels["sojourn/task"] == task_label(ACME, "t")
    assert claimed.labels["sojourn/task-id"] == "t"
    assert claimed.annotations[NOTE_TOKEN] == bound.binding.token


async def test_two_concurrent_first_commands_of_a_task_land_in_one_sandbox_every_time(here: World) -> None:
    for number in range(500):
        if number % 2:
            await here.warm()
        first, second = await asyncio.gather(ensure(here, f"t{number}"), ensure(here, f"t{number}"))
        assert first.binding == second.binding
        assert len(here.provider.pods) == 1
        await here.services.sandboxes.retire(ACME, f"t{number}")
    assert here.provider.pods == []


async def test_first_commands_through_two_managers_land_in_one_sandbox(here: World) -> None:
    """F28"""
    other = services_over(here.store, here.provider, "m2")
    await other.start()
    for number in range(50):
        await here.warm(count=2)
        await other.watches["here"].sync()
        calls = [services.sandboxes.ensure(ACME, f"t{number}") for services in (here.services, other) * 2]
        bounds = await asyncio.gather(*calls)
        assert len({bound.binding.pod for bound in bounds}) == 1
        assert len(here.provider.claimed) == 1
        await other.sandboxes.retire(ACME, f"t{number}")
        for pod in here.provider.pods:
            await here.provider.delete(pod.name)
    await other.close()


async def test_a_hundred_tasks_at_once_share_no_pod(here: World) -> None:
    await here.warm(count=20)
    bounds = await asyncio.gather(*(ensure(here, f"t{number}") for number in range(100)))
    assert len({bound.binding.pod for bound in bounds}) == 100
    assert sum(bound.provisioned == "warm" for bound in bounds) == 20
    assert len({bound.binding.sandbox_id for bound in bounds}) == 100


async def test_the_same_task_id_of_two_owners_is_two_sandboxes(here: World) -> None:
    mine, theirs = await ensure(here), await ensure(here, owner=SHOP)
    assert mine.binding.pod != theirs.binding.pod
    assert mine.binding.sandbox_id != theirs.binding.sandbox_id


async def test_a_caller_that_goes_away_does_not_stop_the_provisioning_of_the_others(here: World) -> None:
    gate = asyncio.Event()

    async def hold(call: str) -> None:
        if call == "create":
            await gate.wait()

    here.provider.after = hold
    first = asyncio.create_task(ensure(here))
    second = asyncio.create_task(ensure(here))
    await until(lambda: bool(here.provider.pods))
    first.cancel()
    await asyncio.wait([first])
    gate.set()
    assert (await second).binding.state is BindingState.BOUND
    assert len(here.provider.pods) == 1


async def test_a_sandbox_whose_only_caller_has_gone_away_is_idle_from_the_start() -> None:
    gate = asyncio.Event()

    async def hold(call: str) -> None:
        if call == "create":
            await gate.wait()

    async with world(loops=True) as here:
        here.provider.after = hold
        caller = asyncio.create_task(ensure(here))
        await until(lambda: bool(here.provider.pods))
        caller.cancel()
        await asyncio.wait([caller])
        gate.set()

        async def idle() -> bool:
            binding = await here.store.get_binding(ACME, "t")
            lease = await here.store.get_lease(binding.sandbox_id) if binding is not None else None
            return lease is not None and lease.until - lease.now <= TERMS.idle_sec

        await until(idle)


# ── what breaks leaves nothing behind ───────────────────────────────────────────────────────────────────────────────

STEPS = [
    "store:begin_binding",
    "provider:patch",
    "patched",
    "provider:create",
    "created",
    "bind",
    "store:commit_binding",
]


async def fails_once(here: World, step: str, error: BaseException) -> asyncio.Event:
    """Lets the first call of the step fail; the event says that it came to that."""
    came = asyncio.Event()

    async def fail(name: str) -> None:
        if name == step and not came.is_set():
            came.set()
            raise error

    async def store(call: str) -> None:
        await fail(f"store:{call}")

    async def before(call: str) -> None:
        await fail(f"provider:{call}")

    async def after(call: str) -> None:
        await fail({"patch": "patched", "create": "created"}.get(call, ""))
        if call == "create" and step == "bind" and here.provider.pods:
            here.provider.executors[here.provider.pods[-1].name].before_bind = lambda: fail("bind")

    here.store.hook, here.provider.hook, here.provider.after = store, before, after
    return came


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [StoreUnavailable("away"), CapacityExhausted("full")], ids=["store", "capacity"])
async def test_a_claim_that_fails_at_any_step_leaves_no_pod_and_no_record(
    here: World, step: str, error: ManagerError
) -> None:
    """F5"""
    if step in ("provider:patch", "patched"):
        await here.warm()
    came = await fails_once(here, step, error)
    result = (await asyncio.gather(ensure(here), return_exceptions=True))[0]
    assert came.is_set()
    if isinstance(result, BaseException):
        assert isinstance(result, ManagerError)
        assert here.provider.claimed == []
        assert await here.store.get_binding(ACME, "t") is None
    else:  # the step was tried again, or an answer that was lost was found: then there is exactly this sandbox
        assert [pod.name for pod in here.provider.claimed] == [result.binding.pod]
    again = await ensure(here)
    assert [pod.name for pod in here.provider.claimed] == [again.binding.pod]


async def test_what_a_pod_that_does_not_start_said_is_for_the_operator_not_for_the_tenant(
    here: World, caplog: pytest.LogCaptureFixture
) -> None:
    await fails_once(here, "provider:create", Provisioning("pod p1 ended: Traceback in /srv/private/file.py"))
    with pytest.raises(Provisioning) as told:
        await ensure(here)
    assert "/srv" not in told.value.message
    assert any("/srv/private" in str(vars(record).get("why")) for record in caplog.records)


@pytest.mark.parametrize("step", STEPS)
async def test_a_manager_that_stops_at_any_step_of_a_claim_leaves_no_pod_and_no_record(here: World, step: str) -> None:
    """F5"""
    if step in ("provider:patch", "patched"):
        await here.warm()
    at_step, never = asyncio.Event(), asyncio.Event()

    async def hold(name: str) -> None:
        if name == step and not at_step.is_set():
            at_step.set()
            await never.wait()

    async def store(call: str) -> None:
        await hold(f"store:{call}")

    async def before(call: str) -> None:
        await hold(f"provider:{call}")

    async def after(call: str) -> None:
        await hold({"patch": "patched", "create": "created"}.get(call, ""))
        if call == "create":
            here.provider.executors[here.provider.pods[-1].name].before_bind = lambda: hold("bind")

    here.store.hook, here.provider.hook, here.provider.after = store, before, after
    waiting = asyncio.create_task(ensure(here))
    await at_step.wait()
    closing = asyncio.create_task(here.services.sandboxes.close())
    await asyncio.wait([waiting, closing])
    assert waiting.cancelled()
    await here.services.claims.close()
    assert here.provider.claimed == []
    assert await here.store.get_binding(ACME, "t") is None


async def test_a_patch_whose_answer_was_lost_is_the_claim_and_no_second_pod_is_touched(here: World) -> None:
    await here.warm(count=2)
    came = await fails_once(here, "patched", OSError("connection reset"))
    bound = await ensure(here)
    assert came.is_set()
    assert bound.provisioned == "warm"
    assert [pod.name for pod in here.provider.claimed] == [bound.binding.pod]


async def test_a_candidate_that_another_manager_took_is_left_alone(here: World) -> None:
    taken, free = await here.warm(count=2)
    await here.provider.patch(taken.name, taken.version, {LABEL_STATE: PodState.CLAIMED}, {NOTE_TOKEN: "theirs"})
    bound = await ensure(here)
    assert bound.binding.pod == free.name
    other = await here.provider.get(taken.name)
    assert other is not None
    assert other.annotations[NOTE_TOKEN] == "theirs"


async def test_a_warm_pod_that_has_died_is_deleted_and_the_next_one_bound(here: World) -> None:
    (dead,) = await here.warm()
    await here.provider.executors[dead.name].stop()
    bound = await ensure(here)
    assert bound.provisioned == "cold"
    assert [pod.name for pod in here.provider.pods] == [bound.binding.pod]


async def test_a_start_that_takes_too_long_says_so_and_leaves_nothing() -> None:
    async with world(start_limit_sec=0.05) as here:

        async def hold(call: str) -> None:
            if call == "create":
                await asyncio.Event().wait()

        here.provider.after = hold
        with pytest.raises(Provisioning):
            await ensure(here)
        assert here.provider.pods == []
        assert await here.store.get_binding(ACME, "t") is None


async def test_a_stale_claim_of_a_dead_manager_is_taken_over(here: World) -> None:
    """F5"""
    dead = services_over(here.store, here.provider, "dead")
    at_commit = asyncio.Event()

    async def hold(call: str) -> None:
        if call == "commit_binding" and not at_commit.is_set():
            at_commit.set()
            await asyncio.Event().wait()

    here.store.hook = hold
    dying = asyncio.create_task(dead.sandboxes.ensure(ACME, "t"))
    await at_commit.wait()
    here.store.offset_sec += here.services.sandboxes.claim_sec + 1
    await here.services.reaper.reap()
    bound = await ensure(here)
    assert bound.binding.state is BindingState.BOUND
    dying.cancel()
    await dead.sandboxes.close()
    await dead.claims.close()
    assert [pod.name for pod in here.provider.claimed] == [bound.binding.pod]
    assert (await ensure(here)).binding == bound.binding


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_retiring_ends_the_pod_and_the_next_command_says_so(here: World) -> None:
    first = await ensure(here)
    await here.services.sandboxes.retire(ACME, "t")
    await here.services.sandboxes.retire(ACME, "t")
    assert here.provider.pods == []
    second = await ensure(here)
    assert second.previous is not None
    assert (second.previous.reason, second.workspace) == ("destroyed", "fresh")
    assert second.binding.sandbox_id == first.binding.sandbox_id
    assert second.binding.pod != first.binding.pod
    assert (await ensure(here)).previous is None


async def test_retiring_what_was_never_used_is_no_error(here: World) -> None:
    await here.services.sandboxes.retire(ACME, "nothing")


async def test_retiring_while_the_sandbox_is_made_leaves_at_most_the_one_made_after(here: World) -> None:
    for number in range(30):
        making = asyncio.create_task(ensure(here, f"t{number}"))
        for _ in range(number):
            await asyncio.sleep(0)
        await here.services.sandboxes.retire(ACME, f"t{number}")
        bound = await making
        record = await here.binding(f"t{number}")
        alive = record.state is BindingState.BOUND and record.pod == bound.binding.pod
        assert [pod.name for pod in here.provider.pods] == ([record.pod] if alive else [])
        await here.services.sandboxes.retire(ACME, f"t{number}")


async def test_a_pod_that_ended_by_itself_is_noted_with_its_reason() -> None:
    async with world(loops=True) as here:
        bound = await ensure(here)
        await here.provider.lose(bound.binding.pod, "oom")

        async def noted() -> bool:
            return (await here.binding("t")).state is BindingState.ENDED

        await until(noted)
        again = await ensure(here)
        assert again.previous is not None
        assert again.previous.reason == "oom"


# ── what a request may ask for ──────────────────────────────────────────────────────────────────────────────────────


async def test_another_profile_than_the_bound_one_is_a_mismatch(here: World) -> None:
    await here.services.sandboxes.ensure(ACME, "t", "small")
    with pytest.raises(ProfileMismatch):
        await here.services.sandboxes.ensure(ACME, "t", "large")
    assert (await here.services.sandboxes.ensure(ACME, "t", "small")).provisioned == "bound"


@pytest.mark.parametrize("bound_already", [False, True])
async def test_a_profile_that_is_not_allowed_is_refused_with_those_that_are(here: World, bound_already: bool) -> None:
    if bound_already:
        await ensure(here)
    with pytest.raises(UnknownProfile) as refused:
        await here.services.sandboxes.ensure(ACME, "t", "enormous")
    assert refused.value.details == {"allowed": ["small", "large"]}


async def test_a_region_without_a_target_runs_nowhere(here: World) -> None:
    with pytest.raises(NoTargetInRegion):
        await here.services.sandboxes.ensure(ACME, "t", None, "moon")
    assert here.provider.pods == []
    await here.services.sandboxes.ensure(ACME, "t", None, "north")
    for _ in range(2):
        with pytest.raises(TaskBoundElsewhere):
            await here.services.sandboxes.ensure(ACME, "t", None, "moon")
        here.services.sandboxes.invalidate(await here.binding("t"))  # the same from the store as from memory


@pytest.mark.parametrize("task_id", ["", "x" * 513, "a\0b", "\ud800"])
async def test_a_bad_task_id_is_refused_before_anything_happens(here: World, task_id: str) -> None:
    with pytest.raises(InvalidTaskId):
        await ensure(here, task_id)
    assert "begin_binding" not in here.store.calls


async def test_a_project_holds_no_more_sandboxes_than_it_may() -> None:
    async with world(policies={ACME: ProjectPolicy(profiles=("small",), concurrency=2)}) as here:
        results = await asyncio.gather(*(ensure(here, f"t{n}") for n in range(10)), return_exceptions=True)
        assert sum(isinstance(result, QuotaExceeded) for result in results) == 8
        assert len(here.provider.pods) == 2
        await ensure(here, "t", SHOP)


# ── restarts and outages ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_new_manager_finds_every_sandbox_with_its_lease(here: World) -> None:
    bounds = [await ensure(here, f"t{number}") for number in range(5)]
    leases = [await here.store.get_lease(bound.binding.sandbox_id) for bound in bounds]
    async with running(services_over(here.store, here.provider, "m2")) as after:
        found = [await after.sandboxes.ensure(ACME, f"t{number}") for number in range(5)]
        assert [bound.binding for bound in found] == [bound.binding for bound in bounds]
        assert {bound.provisioned for bound in found} == {"bound"}
    for before, bound in zip(leases, bounds, strict=True):
        now = await here.store.get_lease(bound.binding.sandbox_id)
        assert before is not None
        assert now is not None
        assert now.until >= before.until


async def test_after_the_store_was_wiped_pods_are_adopted_from_their_labels(here: World) -> None:
    """F17"""
    bounds = [await ensure(here, f"tâche {number}/x") for number in range(3)]
    here.store._records.clear()
    here.store._leases.clear()
    after = services_over(here.store, here.provider, "m2")
    await after.start()
    found = [await after.sandboxes.ensure(ACME, f"tâche {number}/x") for number in range(3)]
    assert [bound.binding.pod for bound in found] == [bound.binding.pod for bound in bounds]
    assert await after.sandboxes.find(SHOP, "tâche 0/x") is None
    assert after.recovery.adopted == 3
    await after.close()


async def test_a_store_wiped_under_a_running_manager_gets_the_sandbox_back_at_the_next_command(here: World) -> None:
    """F17"""
    bound = await ensure(here)
    here.store._records.clear()
    here.store._leases.clear()
    here.services.sandboxes.invalidate(bound.binding)
    assert (await ensure(here)).binding.pod == bound.binding.pod
    assert len(here.provider.pods) == 1


async def test_recovery_deletes_claimed_pods_that_nobody_will_use_and_no_others(here: World) -> None:
    """F5"""
    used = await ensure(here)
    (idle,) = await here.warm()
    unfinished, stray = await here.warm(count=2)
    long_ago = {"sojourn/bound-at": "1000.0"}
    for pod, task_id in ((unfinished, "never bound"), (stray, "t")):
        labels = {LABEL_STATE: "claimed", "sojourn/task": task_label(ACME, task_id), "sojourn/sandbox": "s"}
        notes = {"sojourn/tenant": "acme", "sojourn/project": "web", "sojourn/task-id-raw": task_id, NOTE_TOKEN: "x"}
        await here.provider.patch(pod.name, pod.version, labels, notes | long_ago)
    await here.services.recovery.recover()
    assert {pod.name for pod in here.provider.pods} == {used.binding.pod, idle.name}


async def test_of_two_pods_with_one_task_the_older_claim_is_kept(here: World) -> None:
    """F28"""
    bound = await ensure(here)
    older = await here.provider.get(bound.binding.pod)
    assert older is not None
    twin = await here.provider.create(SMALL, "twin", older.labels, {**older.annotations, "sojourn/bound-at": "9e9"})
    await here.services.client.bind(
        PodRef(twin.name, twin.address),
        (await here.executor("t")).bound,  # type: ignore[arg-type]
    )
    here.store._records.clear()
    here.store._leases.clear()
    await here.services.recovery.recover()
    assert [pod.name for pod in here.provider.pods] == [older.name]
    assert (await here.binding("t")).pod == older.name


async def test_recovery_asks_for_no_record_of_a_pod_that_carries_what_its_record_says(here: World) -> None:
    """Thousands of sandboxes in use cost a pass one list of records, not a look at each."""
    for number in range(3):
        await here.run(f"t{number}")
    here.store.calls.clear()
    await here.services.recovery.recover()
    assert "get_binding" not in here.store.calls
    assert len(here.provider.claimed) == 3


async def test_recovery_takes_the_watchs_word_for_what_pods_there_are_while_it_is_up_to_date(here: World) -> None:
    """A list of thousands costs most of a second; one is made where the watch may be behind, and now and then."""
    await here.run("t")
    await here.services.recovery.recover()  # with a list, as the first of a leader
    listed = 0

    async def count(call: str) -> None:
        nonlocal listed
        listed += call == "list"

    here.provider.hook = count
    await here.services.recovery.recover(anew=False)
    assert listed == 0
    here.provider.current = False
    await here.services.recovery.recover(anew=False)
    assert listed == 1
    assert [pod.labels["sojourn/task"] for pod in here.provider.claimed] == [task_label(ACME, "t")]


async def test_a_pod_that_is_nobodys_is_looked_at_again_as_soon_as_it_is_old_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F5: it is gone within a minute, although passes come less often."""
    monkeypatch.setattr("manager.services.recovery._LOOK_SEC", 0.01)
    monkeypatch.setattr("manager.services.recovery._STRAY_SEC", 1.0)
    monkeypatch.setattr("manager.services.recovery.EVERY_SEC", 3600.0)
    async with world(loops=True) as here:
        await until(lambda: "list_bindings" in here.store.calls)  # the first pass; another comes a second after it
        (stray,) = await here.warm()
        labels = {LABEL_STATE: "claimed", "sojourn/task": task_label(ACME, "t"), "sojourn/sandbox": "s"}
        notes = {"sojourn/tenant": "acme", "sojourn/project": "web", "sojourn/task-id-raw": "t", NOTE_TOKEN: "x"}
        just_now = {"sojourn/bound-at": str(time.time() + 1.0)}  # too young for that one too
        await here.provider.patch(stray.name, stray.version, labels, notes | just_now)
        await until(lambda: not here.provider.pods)
        assert here.services.recovery.deleted == 1


async def test_recovery_ends_records_whose_pod_is_gone(here: World) -> None:
    bound = await ensure(here)
    await here.provider.lose_silently(bound.binding.pod)
    await here.services.recovery.recover()
    record = await here.binding("t")
    assert record.ended is not None
    assert (record.state, record.ended.reason) == (BindingState.ENDED, "lost")


async def test_without_the_store_a_bound_task_goes_on_and_a_new_one_is_told(here: World) -> None:
    bound = await ensure(here)
    here.store.down = True
    assert (await ensure(here)).binding == bound.binding
    with pytest.raises(StoreUnavailable):
        await ensure(here, "new")
    here.store.down = False
    assert len(here.provider.pods) == 1
    assert (await ensure(here, "new")).provisioned == "cold"
