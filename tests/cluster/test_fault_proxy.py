"""The proxy in front of the API server makes the faults that it says, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.support.cluster.accounts import Account
from tests.support.cluster.api import ApiError, KubeApi, connected
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.fault_proxy import FaultProxy, fault_proxy
from tests.support.cluster.pods import executor_pod
from tests.support.cluster.waiting import until

NEVER = {"schedulingGates": [{"name": "tests/never"}]}  # such pods need no node


@pytest.fixture
async def proxy(own_plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(own_plane) as opened:
        yield opened


@pytest.fixture
async def api(proxy: FaultProxy, manager_account: Account) -> AsyncIterator[KubeApi]:
    """The manager's access through the proxy."""
    async with connected(proxy.kubeconfig(manager_account)) as through:
        yield through


@pytest.fixture
def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


class Watching:
    """A watch that goes on beside the test, and the names it has heard."""

    def __init__(self, api: KubeApi, pods: str, version: str) -> None:
        self.names: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.ended: BaseException | None = None
        self.task = asyncio.create_task(self._run(api, pods, version), name="watching")

    async def _run(self, api: KubeApi, pods: str, version: str) -> None:
        try:
            async for kind, pod in api.watch(pods, version):
                self.events.append((kind, pod))
                self.names.append(pod.get("metadata", {}).get("name", ""))
        except aiohttp.ClientError as why:
            self.ended = why

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def watching(api: KubeApi, pods: str, proxy: FaultProxy) -> AsyncIterator[Watching]:
    version = (await api.get(pods))["metadata"]["resourceVersion"]
    found = Watching(api, pods, version)
    await until(lambda: proxy.watches == 1, "the watch is open")
    yield found
    await found.close()


async def test_calls_without_a_fault_go_through_as_the_caller(api: KubeApi, pods: str) -> None:
    made = await api.create(pods, executor_pod("plain", **NEVER))
    assert (await api.get(f"{pods}/plain"))["metadata"]["uid"] == made["metadata"]["uid"]
    with pytest.raises(ApiError) as refused:
        await api.get("/api/v1/nodes")
    assert refused.value.status == 403


async def test_a_refusal_is_not_passed_on_and_ends_when_it_is_used_up(
    api: KubeApi, admin: KubeApi, pods: str, proxy: FaultProxy
) -> None:
    fault = proxy.refuse(500, lambda call: call.method == "POST", times=1)
    with pytest.raises(ApiError) as refused:
        await api.create(pods, executor_pod("first", **NEVER))
    assert refused.value.status == 500
    assert fault.hits == 1
    assert await admin.find(f"{pods}/first") is None
    await api.create(pods, executor_pod("first", **NEVER))


async def test_a_refusal_can_say_when_to_come_back(pods: str, proxy: FaultProxy, manager_account: Account) -> None:
    with proxy.refuse(429, retry_after_sec=7):
        headers = {"Authorization": f"Bearer {manager_account.token}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(proxy.server + pods, ssl=False) as answer,
        ):
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "7"


async def test_a_call_whose_answer_is_lost_has_been_done(
    api: KubeApi, admin: KubeApi, pods: str, proxy: FaultProxy
) -> None:
    with proxy.lose_answer(lambda call: call.method == "POST"), pytest.raises(aiohttp.ClientError):
        await api.create(pods, executor_pod("lost", **NEVER))
    assert await admin.find(f"{pods}/lost") is not None


async def test_a_call_that_is_hung_up_on_has_not_been_done(
    api: KubeApi, admin: KubeApi, pods: str, proxy: FaultProxy
) -> None:
    with proxy.hang_up(lambda call: call.method == "POST"), pytest.raises(aiohttp.ClientError):
        await api.create(pods, executor_pod("never", **NEVER))
    assert await admin.find(f"{pods}/never") is None


async def test_a_call_that_hangs_is_never_answered(api: KubeApi, pods: str, proxy: FaultProxy) -> None:
    with proxy.hang() as fault:
        waiting = asyncio.create_task(api.get(pods))
        await until(lambda: fault.hits == 1, "the call has come")
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_late_answer_comes_in_the_end(api: KubeApi, pods: str, proxy: FaultProxy) -> None:
    clock = asyncio.get_running_loop().time
    with proxy.late(1.5):
        asked = clock()
        assert (await api.get(pods))["items"] == []
    assert clock() - asked >= 1.5


async def test_a_frozen_watch_is_silent_and_then_tells_what_it_missed(
    api: KubeApi, admin: KubeApi, pods: str, proxy: FaultProxy, watching: Watching
) -> None:
    await admin.create(pods, executor_pod("before", **NEVER))
    await until(lambda: "before" in watching.names, "the watch tells of a pod")
    with proxy.frozen_watches():
        await admin.create(pods, executor_pod("meanwhile", **NEVER))
        other = Watching(admin, pods, (await admin.get(pods))["metadata"]["resourceVersion"])
        await admin.create(pods, executor_pod("later", **NEVER))
        await until(lambda: "later" in other.names, "a watch beside the proxy tells of it")
        await other.close()
        assert "meanwhile" not in watching.names
    await until(lambda: {"meanwhile", "later"} <= set(watching.names), "the watch tells what it missed")


async def test_a_delayed_watch_tells_everything_in_order_later(
    admin: KubeApi, pods: str, proxy: FaultProxy, watching: Watching
) -> None:
    proxy.watch_delay_sec = 1.5
    clock = asyncio.get_running_loop().time
    made = clock()
    for name in ("a", "b", "c"):
        await admin.create(pods, executor_pod(name, **NEVER))
    await until(lambda: watching.names[:1] == ["a"], "the first")
    assert clock() - made >= 1.5
    await until(lambda: [name for name in watching.names if name] == ["a", "b", "c"], "all of them")


async def test_an_expired_watch_gets_an_error_event_and_its_end(proxy: FaultProxy, watching: Watching) -> None:
    assert proxy.expire_watches() == 1
    await until(watching.task.done, "the watch has ended")
    assert watching.ended is None
    kind, status = watching.events[-1]
    assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")


async def test_watches_are_closed_cleanly_or_cut(
    api: KubeApi, pods: str, proxy: FaultProxy, watching: Watching
) -> None:
    assert proxy.close_watches() == 1
    await until(watching.task.done, "the watch has ended")
    assert watching.ended is None
    again = Watching(api, pods, (await api.get(pods))["metadata"]["resourceVersion"])
    await until(lambda: proxy.watches == 1, "the watch is open")
    assert proxy.cut_watches() == 1
    await until(again.task.done, "the watch has ended")
    assert again.ended is not None


async def test_the_proxy_tells_which_calls_have_come(api: KubeApi, pods: str, proxy: FaultProxy) -> None:
    await api.list(pods)
    await api.find(f"{pods}/nobody")
    assert [(call.method, call.path, call.is_list) for call in proxy.calls] == [
        ("GET", pods, True),
        ("GET", f"{pods}/nobody", False),
    ]
