"""What every Provider promises, tried on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from manager.model import Pod, Profile
from manager.providers.base import ClaimLost, PodEvent, PodGone, Provider
from manager.providers.local.provider import LocalProvider
from tests.support.local_pods import SECRET, session_to, token_for
from tests.support.memory_provider import MemoryProvider

PROFILE = Profile(name="small", cpu=None, memory_bytes=None, pids=None)
LABELS = {"sojourn/state": "idle", "sojourn/profile": "small"}
WAIT_SEC = 60.0


@pytest.fixture(params=["local", "memory"])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Provider]:
    if request.param == "memory":
        memory = MemoryProvider(tmp_path, SECRET)
        yield memory
        await memory.close()
        return
    local = LocalProvider("here", tmp_path, token_for)
    found = await local.capabilities()
    if found.tier is None:
        await local.close()
        pytest.skip(f"no isolation on this machine: {found.why_not}")
    yield local
    for pod in await local.list():
        await local.delete(pod.name)
    await local.close()


async def next_event(events: AsyncIterator[PodEvent], name: str) -> PodEvent:
    """The next of a pod that is ready or gone: those of its making and ending are a data plane's own."""
    async with asyncio.timeout(WAIT_SEC):
        async for event in events:
            if event.pod.name == name and (event.pod.ready or event.gone):
                return event
    raise AssertionError("a watch never ends by itself")


async def test_a_created_pod_is_ready_and_its_executor_takes_its_token_only(provider: Provider) -> None:
    pod = await provider.create(PROFILE, "p1", LABELS, {"note": "x"})
    assert pod.ready
    assert (pod.labels, pod.annotations, pod.target) == (LABELS, {"note": "x"}, provider.name)
    async with session_to(pod) as session:
        async with session.post("http://pod/v1/exec", json={"command": ["echo", "hi"]}) as answer:
            assert (await answer.json())["stdout"].strip() == "hi"
        async with session.get("http://pod/v1/usage", headers={"Authorization": "Bearer other"}) as answer:
            assert answer.status == 401


async def test_a_pod_is_found_by_name_and_by_labels(provider: Provider) -> None:
    pod = await provider.create(PROFILE, "p1", LABELS, {})
    assert await provider.get("p1") == pod
    assert await provider.list({"sojourn/state": "idle"}) == [pod]
    assert await provider.list({"sojourn/state": "claimed"}) == []
    assert await provider.get("p2") is None


async def test_creating_a_pod_again_gives_the_same_pod(provider: Provider) -> None:
    first = await provider.create(PROFILE, "p1", LABELS, {})
    assert await provider.create(PROFILE, "p1", {}, {}) == first


async def test_a_patch_sets_and_removes_and_changes_the_version(provider: Provider) -> None:
    pod = await provider.create(PROFILE, "p1", LABELS, {"a": "1", "b": "2"})
    patched = await provider.patch("p1", pod.version, {"sojourn/state": "claimed"}, {"a": None, "c": "3"})
    assert patched.labels == {**LABELS, "sojourn/state": "claimed"}
    assert patched.annotations == {"b": "2", "c": "3"}
    assert patched.version != pod.version
    assert await provider.get("p1") == patched


async def test_a_patch_of_an_older_version_is_lost_and_changes_nothing(provider: Provider) -> None:
    pod = await provider.create(PROFILE, "p1", LABELS, {})
    winner = await provider.patch("p1", pod.version, {}, {"token": "first"})
    with pytest.raises(ClaimLost):
        await provider.patch("p1", pod.version, {}, {"token": "second"})
    assert await provider.get("p1") == winner


async def test_of_many_patches_at_once_exactly_one_wins(provider: Provider) -> None:
    pod = await provider.create(PROFILE, "p1", LABELS, {})
    claims = [provider.patch("p1", pod.version, {}, {"token": str(number)}) for number in range(20)]
    results = await asyncio.gather(*claims, return_exceptions=True)
    winners = [result for result in results if isinstance(result, Pod)]
    assert len(winners) == 1
    assert sum(isinstance(result, ClaimLost) for result in results) == 19
    assert await provider.get("p1") == winners[0]


async def test_a_deleted_pod_is_gone_for_everybody_and_deleting_again_is_no_error(provider: Provider) -> None:
    pod = await provider.create(PROFILE, "p1", LABELS, {})
    await asyncio.gather(provider.delete("p1"), provider.delete("p1"))
    await provider.delete("p1")
    assert await provider.get("p1") is None
    assert await provider.list() == []
    with pytest.raises(PodGone):
        await provider.patch("p1", pod.version, {}, {})
    async with session_to(pod) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get("http://pod/readyz")


async def test_a_watch_tells_what_there_is_then_every_change_then_the_end(provider: Provider) -> None:
    pod = await provider.create(PROFILE, "p1", LABELS, {})
    events = provider.watch()
    assert await next_event(events, "p1") == PodEvent(pod)
    second = await provider.create(PROFILE, "p2", LABELS, {})
    assert await next_event(events, "p2") == PodEvent(second)
    patched = await provider.patch("p1", pod.version, {}, {"a": "b"})
    assert await next_event(events, "p1") == PodEvent(patched)
    await provider.delete("p1")
    gone = await next_event(events, "p1")
    assert (gone.gone, gone.reason, gone.pod.name) == (True, "destroyed", "p1")
    assert (gone.pod.labels, gone.pod.annotations) == (patched.labels, patched.annotations)
