"""What a manager was at when it died is another's within seconds, and never what truly goes on (F24)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from manager.errors import ManagerError, QuotaExceeded, StoreUnavailable
from manager.model import SandboxState, own_name
from manager.services.core import Services
from manager.services.longlived.ending import RETRY_STOP_SEC
from tests.support.place import ME, ONE, Held, Place, fails_at, place
from tests.support.world import ACME, until

S = SandboxState


@asynccontextmanager
async def another(here: Place) -> AsyncIterator[Services]:
    """A manager that is at something, in what is entered; it ends with it."""
    made = here.other("m2", policies={ACME: ONE})
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def stand_still(sandbox_id: str) -> None:
    """As a manager that is dead, or stopped by a signal: nothing of what it holds is renewed any more."""
    renewing = [task for task in asyncio.all_tasks() if task.get_name() == f"renewing-{sandbox_id}"]
    assert renewing
    for task in renewing:
        task.cancel()


async def stopped(here: Place) -> str:
    sandbox_id = await here.create()
    await here.put(sandbox_id, "a", b"one")
    await here.stop(sandbox_id)
    return sandbox_id


def pass_a_claim(here: Place) -> None:
    here.world.store.offset_sec += here.world.services.sandboxes.claim_sec + 1


async def test_a_start_whose_manager_died_is_stopped_again_in_seconds_and_leaves_no_pod_and_no_slot() -> None:
    async with place() as here, another(here) as dead:
        sandbox_id = await stopped(here)
        here.workspaces.hook = held = Held("restore")
        starting = asyncio.create_task(dead.longlived.start(ME, ACME, sandbox_id, wait_sec=60))
        await held.reached.wait()
        stand_still(sandbox_id)
        here.workspaces.hook = None
        await here.world.services.reaper.reap()
        assert await here.state(sandbox_id) is S.STARTING  # it may live yet
        pass_a_claim(here)
        await here.world.services.reaper.reap()
        record = await here.record(sandbox_id)
        assert (record.state, record.reason) == (S.STOPPED, "not_started:interrupted")
        assert (here.world.provider.claimed, await here.slots()) == ([], 0)
        await here.start(sandbox_id)
        assert (await here.executor(sandbox_id)).files == {"a": b"one"}
        pod = (await here.world.binding(own_name(sandbox_id))).pod
        held.go.set()  # it was not dead after all
        with pytest.raises(ManagerError):
            await starting
        assert await here.state(sandbox_id) is S.RUNNING
        assert [one.name for one in here.world.provider.claimed] == [pod]


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_tasks_claim_whose_manager_died_is_settled_though_nobody_asks_for_the_task(goes_on: bool) -> None:
    async with place() as here, another(here) as dead:
        held = Held("commit_binding")
        here.world.store.hook = held
        making = asyncio.create_task(dead.sandboxes.ensure(ACME, "t"))
        await held.reached.wait()
        here.world.store.hook = None
        pass_a_claim(here)
        await here.world.services.reaper.reap()
        binding = await here.world.binding("t")  # its pod was bound already: nothing of it is lost
        assert [one.name for one in here.world.provider.claimed] == [binding.pod]
        assert await here.slots() == 1
        if goes_on:
            held.go.set()
            assert (await making).binding.pod == binding.pod
        else:  # it breaks off, and takes nothing back that is another's by now
            making.cancel()
            await dead.sandboxes.close()
            await dead.claims.close()
            await asyncio.gather(making, return_exceptions=True)
        assert [one.name for one in here.world.provider.claimed] == [binding.pod]


async def test_the_slot_of_a_dead_claim_is_free_only_once_its_pod_is_gone() -> None:
    """S12: else one more than the limit would live for a moment."""
    async with place(policies={ACME: ONE}) as here, another(here) as dead:
        sandbox_id = await stopped(here)
        here.workspaces.hook = held = Held("restore")
        starting = asyncio.create_task(dead.longlived.start(ME, ACME, sandbox_id, wait_sec=60))
        await held.reached.wait()
        stand_still(sandbox_id)
        pass_a_claim(here)
        with pytest.raises(QuotaExceeded):
            await here.create()
        assert len(here.world.provider.claimed) == await here.slots() == 1
        await here.world.services.reaper.reap()
        assert (here.world.provider.claimed, await here.slots()) == ([], 0)
        await here.create()
        held.go.set()
        with pytest.raises(ManagerError):
            await starting
        assert len(here.world.provider.claimed) == await here.slots() == 1


async def test_a_start_that_goes_on_elsewhere_is_never_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manager.services.renewing._RENEWALS", 1000)
    async with place() as here, another(here) as other:
        sandbox_id = await stopped(here)
        here.workspaces.hook = held = Held("restore")
        starting = asyncio.create_task(other.longlived.start(ME, ACME, sandbox_id, wait_sec=60))
        await held.reached.wait()
        claim_sec = other.sandboxes.claim_sec
        for _ in range(6):  # several times as long as a claim lasts
            renewals = here.world.store.calls.count("renew_claim")
            here.world.store.offset_sec += claim_sec / 3
            await until(lambda: here.world.store.calls.count("renew_claim") > renewals + 1)  # noqa: B023
            await here.world.services.reaper.reap()
        assert await here.state(sandbox_id) is S.STARTING
        held.go.set()
        assert (await starting).state is S.RUNNING
        assert len(here.world.provider.claimed) == await here.slots() == 1


async def test_a_manager_that_stood_still_breaks_off_the_start_that_is_not_its_own_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not fill a pod for hours that nobody will ever use."""
    monkeypatch.setattr("manager.services.renewing._RENEWALS", 1000)
    async with place() as here, another(here) as other:
        sandbox_id = await stopped(here)
        here.workspaces.hook = held = Held("restore")
        starting = asyncio.create_task(other.longlived.start(ME, ACME, sandbox_id, wait_sec=60))
        await held.reached.wait()
        binding = await here.world.services.sandboxes.find(ACME, own_name(sandbox_id))
        assert binding is not None
        await here.world.services.recovery.settle_claims([binding])  # as if its claim had been stale
        with pytest.raises(StoreUnavailable, match="another goes on"):
            await starting
        await until(lambda: here.world.provider.claimed == [])
        assert await here.state(sandbox_id) is S.STOPPED
        assert await here.slots() == 0


async def test_a_stop_that_was_taken_over_changes_nothing_any_more_when_its_manager_goes_on() -> None:
    async with place() as here, another(here) as slow:
        sandbox_id = await here.create()
        await here.put(sandbox_id, "a", b"one")
        here.workspaces.hook = held = Held("save")
        stopping = asyncio.create_task(slow.longlived.stop(ME, ACME, sandbox_id, reason="asked", wait_sec=60))
        await held.reached.wait()
        stand_still(sandbox_id)
        here.workspaces.hook = None
        pass_a_claim(here)
        await here.world.services.reaper.reap()
        await until(lambda: here.world.provider.claimed == [])
        await until(lambda: not here.kept.kept.moving(sandbox_id))
        record = await here.record(sandbox_id)
        assert (record.state, record.reason, await here.slots()) == (S.STOPPED, "asked", 0)
        await here.start(sandbox_id)
        await here.put(sandbox_id, "b", b"two")
        held.go.set()
        with pytest.raises(ManagerError):
            await stopping
        assert await here.state(sandbox_id) is S.RUNNING
        assert (await here.executor(sandbox_id)).files == {"a": b"one", "b": b"two"}


async def test_what_could_not_be_kept_is_tried_again_in_seconds_and_then_ever_later() -> None:
    """One refusal of a busy machine does not keep a quiet sandbox for a minute."""
    first_sec, last_sec = RETRY_STOP_SEC
    async with place() as here:
        sandbox_id = await here.create(autostop_sec=1)
        await here.put(sandbox_id, "a", b"one")
        await here.world.services.leases.flush()
        here.workspaces.hook = fails_at("save", StoreUnavailable("away"))
        waits: list[float] = []
        while not waits or waits[-1] <= last_sec / 2:
            here.world.store.offset_sec += 2 * last_sec
            await here.world.services.reaper.reap()
            await until(lambda: not here.kept.kept.moving(sandbox_id))
            lease = await here.world.store.get_lease(sandbox_id)
            assert lease is not None
            waits.append(lease.until - lease.now)
            assert len(waits) < 10
        assert waits[0] <= first_sec
        assert sorted(waits) == waits
        assert waits[-1] <= last_sec


async def test_who_leads_anew_looks_at_all_pods_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever led before may have died, and have left pods that no record tells of."""
    monkeypatch.setattr("manager.services.recovery._LOOK_SEC", 0.01)
    passed = 0
    async with place() as here:
        recovery = here.world.services.recovery
        assert await here.world.store.lead("recovery", "dead", 3600)

        async def count(*, anew: bool) -> None:
            nonlocal passed
            assert anew
            passed += 1

        monkeypatch.setattr(recovery, "recover", count)
        looking = asyncio.create_task(recovery.recover_forever())
        looks = here.world.store.calls.count("lead")
        await until(lambda: here.world.store.calls.count("lead") > looks + 3)
        assert passed == 0
        await here.world.store.lead("recovery", "dead", 0)
        await until(lambda: passed == 1)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
