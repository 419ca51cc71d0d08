"""The services over a real Valkey, and in the end over real pods."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from executor.wire import ExecRequest, Exit, OutputFrame, Started
from manager.config import ProjectPolicy
from manager.errors import StoreUnavailable
from manager.model import BindingState, LeaseTerms, Owner, Profile, new_id
from manager.providers.base import Provider
from manager.providers.local.provider import LocalProvider
from manager.services.core import Services
from manager.services.pool import idle_labels
from manager.services.tasks import SandboxFacts
from manager.store.base import Lease, Store
from manager.store.redis import RedisStore
from tests.support.local_pods import SECRET, token_for
from tests.support.memory_objects import MemoryCache, memory_objects
from tests.support.memory_provider import MemoryProvider
from tests.support.world import ACME, SMALL, TERMS, principal, running, until

ME = principal()


def services(store: Store, provider: Provider, holder: str, terms: LeaseTerms = TERMS, pool: int = 0) -> Services:
    profile = Profile(name="small", cpu=None, memory_bytes=None, pids=None, keep_workspace=False, pool_min=pool)

    def policy(owner: Owner) -> ProjectPolicy:
        return ProjectPolicy(profiles=("small",), concurrency=None)

    return Services(
        store=store,
        objects=memory_objects(),
        cache=MemoryCache(),
        providers={provider.name: provider},
        regions={provider.name: None},
        profiles=(profile,),
        policy=policy,
        terms=terms,
        secret=SECRET,
        holder=holder,
        start_limit_sec=60.0,
        reap_sec=0.1,
    )


@pytest.fixture
async def provider() -> AsyncIterator[MemoryProvider]:
    with tempfile.TemporaryDirectory(prefix="sj") as directory:
        made = MemoryProvider(Path(directory), SECRET)
        yield made
        await made.close()


@asynccontextmanager
async def until_killed(one: Services, calls: Sequence[asyncio.Task[None]] = ()) -> AsyncIterator[Services]:
    """As `running`, but its end is that of a process that is killed: nothing is given up or written any more. `calls`
    are what it is at: they are cut off when nobody is left to write of it."""
    await one.start()
    loops = asyncio.create_task(one.run_forever(), name="loops-of-the-killed")
    try:
        yield one
    finally:
        loops.cancel()
        await asyncio.wait([loops])
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await one.client.close()


async def held_leases(store: Store, sandbox_ids: Iterable[str], operations: int) -> dict[str, Lease]:
    """Their leases, once so many operations under way are written in each."""
    found: dict[str, Lease] = {}

    async def written() -> bool:
        found.update({id: lease for id in sandbox_ids if (lease := await store.get_lease(id)) is not None})
        return all(id in found and found[id].operations == operations for id in sandbox_ids)

    await until(written)
    return found


# ── over executors without processes ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_two_first_commands_through_two_managers_land_in_one_sandbox_every_time(
    store: Store, valkey_url: str, provider: MemoryProvider
) -> None:
    profile = Profile(name="small", cpu=None, memory_bytes=None, pids=None, keep_workspace=False, pool_min=0)
    other_store = RedisStore.at(valkey_url, call_sec=30.0)
    one, other = services(store, provider, "m1"), services(other_store, provider, "m2")
    async with running(one), running(other):
        for number in range(500):
            if number % 2:
                await provider.create(profile, new_id("p"), idle_labels(profile), {})
            request = ExecRequest(command=["echo", str(number)])
            first, second = await asyncio.gather(*(each.tasks.exec(ME, f"t{number}", request) for each in (one, other)))
            assert first.facts.pod_id == second.facts.pod_id
            assert len(provider.claimed) == 1
            await one.tasks.retire(ACME, f"t{number}")
    assert provider.claimed == []
    assert await store.list_bindings() == []
    await other_store.close()


async def test_leases_are_kept_by_work_and_given_back_by_its_end(store: Store, provider: MemoryProvider) -> None:
    terms = LeaseTerms(active_sec=1.5, idle_sec=0.5, max_sec=600)
    async with running(services(store, provider, "m1", terms)) as one:
        command = asyncio.create_task(one.tasks.exec(ME, "t", ExecRequest(command=["wait"])))
        await until(lambda: bool(provider.claimed))
        executor = provider.executors[provider.claimed[0].name]
        await executor.waiting.wait()
        quiet = [await one.tasks.exec(ME, f"q{number}", ExecRequest(command=["true"])) for number in range(3)]
        await until(lambda: len(provider.claimed) == 1)  # the three quiet ones went; active and idle have passed
        assert provider.claimed[0].name == executor.pod
        await until(lambda: one.reaper.reaped == len(quiet))
        executor.running = 1
        executor.release()
        assert (await command).result.exit_code == 0
        await until(lambda: one.reaper.spared > 0)  # background work, of which only the executor knows
        executor.running = 0
        await until(lambda: not provider.claimed)
    record = await store.get_binding(ACME, "t")
    assert record is not None
    assert record.ended is not None
    assert (record.state, record.ended.reason) == (BindingState.ENDED, "expired")


async def test_a_killed_managers_leases_last_and_its_sandboxes_are_found(
    store: Store, provider: MemoryProvider
) -> None:
    async with until_killed(services(store, provider, "m1")) as one:
        answers = [await one.tasks.exec(ME, f"t{n}", ExecRequest(command=["true"])) for n in range(5)]
        bound = await one.sandboxes.ensure(ACME, "t0")
        one.sandboxes.operation(bound).__enter__()
        await held_leases(store, [bound.binding.sandbox_id], 1)
    async with running(services(store, provider, "m2")) as other:
        for number, before in enumerate(answers):
            after = await other.tasks.exec(ME, f"t{number}", ExecRequest(command=["true"]))
            assert (after.facts.pod_id, after.facts.provisioned) == (before.facts.pod_id, "bound")
        lease = await store.get_lease(answers[0].facts.sandbox_id)
        assert lease is not None
        assert lease.until - lease.now > TERMS.active_sec - 60
    assert len(provider.claimed) == 5


async def test_a_store_that_was_wiped_is_rebuilt_from_the_pods(
    store: Store, valkey_url: str, provider: MemoryProvider
) -> None:
    """F17"""
    async with until_killed(services(store, provider, "m1")) as one:
        before = [await one.tasks.exec(ME, f"tâche {n}", ExecRequest(command=["true"])) for n in range(5)]
    async with Redis.from_url(valkey_url) as raw:
        await raw.flushall()
    async with running(services(store, provider, "m2")) as other:
        after = [await other.tasks.exec(ME, f"tâche {n}", ExecRequest(command=["true"])) for n in range(5)]
        assert [one.facts.pod_id for one in after] == [one.facts.pod_id for one in before]
        assert len(await store.list_bindings(ACME)) == 5


async def test_an_outage_of_the_store_stops_no_command_and_ends_in_typed_errors(
    valkey_url: str, store: Store, provider: MemoryProvider
) -> None:
    flaky = RedisStore.at(valkey_url, call_sec=1.0)
    async with Redis.from_url(valkey_url) as raw, running(services(flaky, provider, "m1")) as one:
        request = ExecRequest(command=["wait"])
        await one.tasks.exec(ME, "t", ExecRequest(command=["true"]))
        command = asyncio.create_task(one.tasks.exec(ME, "t", request))
        executor = provider.executors[provider.claimed[0].name]
        await executor.waiting.wait()
        await raw.client_pause(8000, all=True)  # it lets nobody end it sooner
        with pytest.raises(StoreUnavailable):
            await one.tasks.exec(ME, "new", ExecRequest(command=["true"]))
        assert (await one.tasks.exec(ME, "t", ExecRequest(command=["echo", "on"]))).result.stdout == "on"
        executor.release()
        assert (await command).result.exit_code == 0

        async def works() -> bool:
            try:
                await one.tasks.exec(ME, "new", ExecRequest(command=["true"]))
            except StoreUnavailable:
                return False
            return True

        await until(works)
        assert len(provider.claimed) == 2
    await flaky.close()


# ── over real pods ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    made = LocalProvider("here", tmp_path, token_for)
    found = await made.capabilities()
    if found.tier is None:
        await made.close()
        pytest.skip(f"no isolation on this machine: {found.why_not}")
    yield made
    for pod in await made.list():
        await made.delete(pod.name)
    await made.close()


async def test_twenty_streaming_commands_outlive_their_manager_and_are_read_to_their_end_by_the_next(
    store: Store, local: LocalProvider, tmp_path: Path
) -> None:
    script = "for n in 1 2 3 4 5 6; do echo line $n; sleep 0.5; done"
    reads: dict[str, Any] = {}
    before: dict[str, SandboxFacts] = {}
    streams: list[asyncio.Task[None]] = []
    async with until_killed(services(store, local, "m1", pool=2), streams) as one:

        async def follow(number: int) -> None:
            request = ExecRequest(command=script, id=f"c{number}")
            async with one.tasks.stream(ME, f"t{number % 4}", request) as stream:
                before[f"t{number % 4}"] = stream.facts
                async for event in stream.events:
                    if isinstance(event, OutputFrame):
                        reads[f"c{number}"] = event
                        await asyncio.Event().wait()

        streams += [asyncio.create_task(follow(number)) for number in range(20)]
        await until(lambda: len(reads) == 20, 60.0)
        leases = await held_leases(store, [facts.sandbox_id for facts in before.values()], 5)

    again = LocalProvider("here", tmp_path, token_for)
    async with running(services(store, again, "m2", pool=2)) as other:
        for number in range(20):
            task, path = f"t{number % 4}", f"/v1/processes/c{number}/output"
            call = other.tasks.forward(ME, task, "GET", path, "stream=stdout&follow=true", {}, None, wait_sec=None)
            async with call as answered:
                assert answered.facts.pod_id == before[task].pod_id
                output = b"".join([chunk async for chunk in answered.response.body])
            assert output == b"".join(b"line %d\n" % n for n in range(1, 7))
        for task, facts in before.items():
            assert (await other.tasks.get(ME, task)).sandbox_id == facts.sandbox_id
            now = await store.get_lease(facts.sandbox_id)
            assert now is not None
            # Nothing has ended but the manager, and reading is no work: the lease is what the work had made it.
            assert now.until >= leases[facts.sandbox_id].until - 1
        claimed = [pod for pod in await again.list() if pod.labels["sojourn/state"] == "claimed"]
        assert {pod.name for pod in claimed} == {facts.pod_id for facts in before.values()}
    await again.close()


async def test_a_task_lives_in_a_real_pod_from_its_first_command_to_its_retirement(
    store: Store, local: LocalProvider
) -> None:
    async with running(services(store, local, "m1", pool=1)) as one:
        await until(lambda: one.pool.full, 60.0)
        first = await one.tasks.exec(ME, "t", ExecRequest(command="echo $SOJOURN_SANDBOX_ID; echo kept > note"))
        assert first.facts.provisioned == "warm"
        assert first.result.stdout == first.facts.sandbox_id + "\n"
        async with one.tasks.stream(ME, "t", ExecRequest(command=["cat", "note"])) as stream:
            events = [event async for event in stream.events]
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Exit)
        assert b"".join(event.data for event in events if isinstance(event, OutputFrame)) == b"kept\n"
        other = await one.tasks.exec(ME, "u", ExecRequest(command="cat note || ls -A"))
        assert (other.facts.pod_id != first.facts.pod_id, other.result.stdout) == (True, "")
        await one.tasks.retire(ACME, "t")
        fresh = await one.tasks.exec(ME, "t", ExecRequest(command=["ls", "-A"]))
        assert (fresh.result.stdout, fresh.facts.workspace) == ("", "fresh")
        assert fresh.facts.previous is not None
        assert fresh.facts.previous.reason == "destroyed"


async def test_a_thousand_commands_at_once_all_answer_right(store: Store, local: LocalProvider) -> None:
    async with running(services(store, local, "m1")) as one:
        await one.tasks.exec(ME, "t", ExecRequest(command=["true"]))

        async def run(number: int) -> bool:
            answer = await one.tasks.exec(
                ME, "t", ExecRequest(command=["echo", str(number)]), idempotency_key=f"k{number}"
            )
            return answer.result.stdout == f"{number}\n"

        assert all(await asyncio.gather(*(run(number) for number in range(1000))))
        assert SMALL.name == (await one.tasks.get(ME, "t")).profile
