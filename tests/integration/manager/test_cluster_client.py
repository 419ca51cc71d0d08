"""One request to an API server: tried again where that can help, and its errors with names (F18)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from manager.errors import TargetUnavailable
from manager.providers.kubernetes.client import ApiRefused, ClusterClient, NoCluster
from tests.support.scripted_api import ScriptedApi, hangs_up, refuses, says, scripted


@pytest.fixture
async def both() -> AsyncIterator[tuple[ScriptedApi, ClusterClient]]:
    async with scripted() as made:
        yield made


async def test_no_answer_and_server_errors_are_tried_again_until_there_is_one(
    both: tuple[ScriptedApi, ClusterClient],
) -> None:
    api, client = both
    api.script = [hangs_up, refuses(500), refuses(503), refuses(504), says({"ok": True})]
    assert await client.request("PATCH", "/x", body=[], content_type="application/json-patch+json") == b'{"ok": true}'
    assert [call.method for call in api.calls] == ["PATCH"] * 5


async def test_retry_after_is_waited_for(both: tuple[ScriptedApi, ClusterClient]) -> None:
    api, client = both
    api.script = [refuses(429, headers={"Retry-After": "2"}), says()]
    await client.request("GET", "/x")
    assert api.calls[1].at - api.calls[0].at >= 2


async def test_past_the_deadline_the_target_is_unavailable_and_says_when_to_come_back(
    both: tuple[ScriptedApi, ClusterClient],
) -> None:
    api, client = both
    api.otherwise = refuses(429, headers={"Retry-After": "7"})
    with pytest.raises(TargetUnavailable) as told:
        await client.request("GET", "/x", deadline_sec=3)
    assert told.value.retry_after_sec == 7
    assert not isinstance(told.value, ApiRefused)
    assert len(api.calls) == 1  # seven seconds are more than there are: nobody is asked too early


async def test_a_server_that_is_not_there_is_unavailable(both: tuple[ScriptedApi, ClusterClient]) -> None:
    _, client = both
    client._configuration.host = "http://127.0.0.1:1"  # nobody listens there
    with pytest.raises(TargetUnavailable):
        await client.request("GET", "/x", deadline_sec=2)


async def test_an_answer_that_never_comes_ends_with_the_deadline(both: tuple[ScriptedApi, ClusterClient]) -> None:
    api, client = both

    async def never(_request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    api.otherwise = never
    async with asyncio.timeout(60):
        with pytest.raises(TargetUnavailable):
            await client.request("GET", "/x", deadline_sec=3, try_sec=1)
    assert len(api.calls) >= 2


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 422])
async def test_a_refusal_that_nothing_changes_is_told_at_once_with_its_reason(
    both: tuple[ScriptedApi, ClusterClient], status: int
) -> None:
    api, client = both
    api.script = [refuses(status, "Why", "words\nof the\x00 server")]
    with pytest.raises(ApiRefused) as told:
        await client.request("POST", "/x", body={})
    assert (told.value.api_status, told.value.reason, told.value.doubtful) == (status, "Why", False)
    assert told.value.words == "words of the server"
    assert len(api.calls) == 1


async def test_a_refusal_after_a_try_without_an_answer_says_that_it_may_be_about_that_one(
    both: tuple[ScriptedApi, ClusterClient],
) -> None:
    api, client = both
    for first in (hangs_up, refuses(500)):
        api.script = [first, refuses(409, "Conflict")]
        with pytest.raises(ApiRefused) as told:
            await client.request("POST", "/x", body={})
        assert told.value.doubtful
    api.script = [refuses(429), refuses(409, "Conflict")]
    with pytest.raises(ApiRefused) as told:
        await client.request("POST", "/x", body={})
    assert not told.value.doubtful  # what was turned away for its number was not done


async def test_without_a_way_to_a_cluster_the_message_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NoCluster, match=r"none\.yaml"):
        await ClusterClient.connect(str(tmp_path / "none.yaml"))
    with pytest.raises(NoCluster, match="service account"):
        await ClusterClient.connect(None)
    broken = tmp_path / "broken.yaml"
    broken.write_text("current-context: a\ncontexts: []\n")
    with pytest.raises(NoCluster, match=r"broken\.yaml"):
        await ClusterClient.connect(str(broken))


async def test_a_request_needs_no_thread(
    both: tuple[ScriptedApi, ClusterClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for proxies and passwords anew for every call would take two, and more time than all the rest."""
    api, client = both
    api.otherwise = says()

    def submit(*_given: object, **_named: object) -> None:
        raise AssertionError("a thread was asked for")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    assert await client.request("PATCH", "/x", body=[{"op": "test", "path": "/metadata/uid", "value": "u"}]) == b"{}"


async def test_the_environments_proxy_is_asked_unless_the_server_is_named_as_reached_without(
    both: tuple[ScriptedApi, ClusterClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    api, direct = both
    api.otherwise = says()
    configuration = Configuration(host="http://api.test.invalid")
    monkeypatch.setenv("http_proxy", direct.host)
    client = ClusterClient(configuration)
    try:
        assert await client.request("GET", "/through", query={"labelSelector": "a=b,c/d=e"}) == b"{}"
    finally:
        await client.close()
    assert [call.path for call in api.calls] == ["/through"]
    monkeypatch.setenv("no_proxy", "api.test.invalid")
    client = ClusterClient(configuration)
    try:
        with pytest.raises(TargetUnavailable):
            await client.request("GET", "/direct", deadline_sec=2)
    finally:
        await client.close()
    assert len(api.calls) == 1
