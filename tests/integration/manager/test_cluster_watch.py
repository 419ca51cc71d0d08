"""A namespace's pods followed over everything that can happen to a watch (F19)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from manager.providers.kubernetes.client import ClusterClient
from manager.providers.kubernetes.watch import Changed, Listed, PodFollower
from tests.support.scripted_api import Answer, ScriptedApi, hangs_up, lists, pod, refuses, scripted, tells

WAIT_SEC = 60.0
PATH = "/api/v1/namespaces/n/pods"


@pytest.fixture
async def both() -> AsyncIterator[tuple[ScriptedApi, ClusterClient]]:
    async with scripted() as made:
        yield made


def follower(client: ClusterClient, **options: Any) -> PodFollower:
    return PodFollower(client, PATH, {"app": "x"}, **{"watch_sec": 40.0, "idle_sec": 30.0, **options})


def added(name: str, version: int) -> dict[str, Any]:
    return {"type": "MODIFIED", "object": pod(name, version)}


def mark(version: int) -> dict[str, Any]:
    return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}}


async def told(following: PodFollower, count: int) -> list[Any]:
    """The first so many things that are told: of a list the names, of a change the name and version."""
    found: list[Any] = []
    events = following.follow()
    try:
        async with asyncio.timeout(WAIT_SEC):
            async for event in events:
                if isinstance(event, Listed):
                    found.append([one.name for one in event.pods])
                elif isinstance(event, Changed):
                    version = event.pod.metadata.resource_version
                    found.append((event.pod.name, version) if not event.deleted else (event.pod.name, version, "gone"))
                if len(found) == count:
                    return found
        raise AssertionError("a follow never ends by itself")
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def test_a_list_then_its_changes_and_a_watch_that_ends_in_its_time_is_taken_up_where_it_was(
    both: tuple[ScriptedApi, ClusterClient],
) -> None:
    api, client = both
    gone = {"type": "DELETED", "object": pod("a", 103)}
    api.script = [
        lists(pod("a", 90), version="100"),
        tells(added("b", 101), mark(102), then_sec=1.5),
        tells(gone, then_sec=30),
    ]
    assert await told(follower(client), 3) == [["a"], ("b", "101"), ("a", "103", "gone")]
    assert [call.query.get("resourceVersion") for call in api.calls] == [None, "100", "102"]
    assert api.calls[1].query["allowWatchBookmarks"] == "true"
    assert api.calls[1].query["labelSelector"] == "app=x"


async def test_a_long_list_is_read_in_pages_and_begun_anew_where_they_have_expired(
    both: tuple[ScriptedApi, ClusterClient],
) -> None:
    api, client = both
    api.script = [
        lists(pod("a", 1), more="next"),
        refuses(410, "Expired"),
        lists(pod("a", 1), more="next"),
        lists(pod("b", 2)),
    ]
    assert await told(follower(client), 1) == [["a", "b"]]
    assert [call.query.get("continue") for call in api.calls] == [None, "next", None, "next"]


ERROR = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}


@pytest.mark.parametrize(
    ("broken", "listed_anew"),
    [
        ([refuses(410, "Expired")], True),
        ([tells(ERROR, then_sec=30)], True),
        ([tells()], True),  # a clean end at once
        ([tells({"type": "MODIFIED", "object": {"no": "pod"}}, then_sec=30)], True),
        ([hangs_up, hangs_up], False),
        ([refuses(500)], False),
        ([refuses(429, headers={"Retry-After": "2"})], False),
    ],
    ids=["410", "ERROR", "clean-close", "nonsense", "hung-up", "500", "429"],
)
async def test_a_broken_watch_misses_nothing_and_is_never_hurried(
    both: tuple[ScriptedApi, ClusterClient], broken: list[Answer], listed_anew: bool
) -> None:
    api, client = both
    after = [tells(added("b", 105), then_sec=30)]
    api.script = [lists(pod("a", 90)), *broken, *([lists(pod("a", 90), version="104")] if listed_anew else []), *after]
    following = follower(client, first_pause_sec=1.0)
    wanted: list[Any] = [["a"], *([["a"]] if listed_anew else []), ("b", "105")]
    assert await told(following, len(wanted)) == wanted
    assert api.calls[-1].at - api.calls[1].at >= 0.8
    assert api.calls[-1].query["resourceVersion"] == ("104" if listed_anew else "100")
    assert following.current


async def test_a_silent_watch_is_given_up_and_the_pods_listed_anew(both: tuple[ScriptedApi, ClusterClient]) -> None:
    api, client = both
    api.script = [lists(pod("a", 90)), tells(then_sec=60), lists(version="104"), tells(added("b", 105), then_sec=60)]
    assert await told(follower(client, idle_sec=1.0), 3) == [["a"], [], ("b", "105")]


async def test_bookmarks_alone_keep_a_watch_alive(both: tuple[ScriptedApi, ClusterClient]) -> None:
    api, client = both
    api.script = [
        lists(),
        *[tells(mark(number), then_sec=1.2) for number in (110, 120)],
        tells(added("b", 130), then_sec=30),
    ]
    assert await told(follower(client), 2) == [[], ("b", "130")]
    assert [call.query.get("resourceVersion") for call in api.calls] == [None, "100", "110", "120"]


@pytest.mark.parametrize(
    "ends", [tells(), tells(mark(101)), refuses(410, "Expired")], ids=["nothing", "bookmark", "410"]
)
async def test_a_server_that_ends_every_watch_at_once_is_asked_less_than_once_a_second(
    both: tuple[ScriptedApi, ClusterClient], ends: Answer
) -> None:
    """No busy loop."""
    api, client = both

    async def otherwise(request: Any) -> Any:
        return await (ends if "watch" in request.query else lists())(request)

    api.otherwise = otherwise
    following = follower(client)
    loop = asyncio.get_running_loop()
    began = loop.time()
    events = following.follow()

    async def follow() -> None:
        async for _ in events:
            pass

    running = asyncio.create_task(follow())
    while loop.time() - began < 4:
        await asyncio.sleep(0.5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    spent = loop.time() - began
    assert following.watches <= spent + 1
    assert following.lists <= spent + 1


async def test_while_the_server_is_away_what_is_known_is_said_to_be_old(
    both: tuple[ScriptedApi, ClusterClient],
) -> None:
    api, client = both
    following = follower(client, first_pause_sec=0.2)
    assert not following.current
    api.script = [lists(pod("a", 90))]
    api.otherwise = refuses(500)
    seen = asyncio.Event()

    async def follow() -> None:
        async for _ in following.follow():
            seen.set()

    running = asyncio.create_task(follow())
    async with asyncio.timeout(WAIT_SEC):
        await seen.wait()
        while following.current:
            await asyncio.sleep(0.05)
        api.otherwise = tells(mark(101), then_sec=60)
        while not following.current:
            await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
