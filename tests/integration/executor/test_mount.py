"""What is loaded when: a pod that only runs commands and is probed does without the application for all other calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected, until
from tests.support.raw_http import raw, request

pytestmark = [pytest.mark.timeout(120)]
Fresh = Callable[..., AbstractContextManager[ExecutorProcess]]
TRUE = b'{"command": ["true"]}'


@pytest.fixture
async def pod(fresh_executor: Fresh) -> AsyncIterator[Pod]:
    with fresh_executor() as process:
        async with connected(process) as one:
            yield one


def is_loaded(pod: Pod) -> bool:
    if not IS_ROOT:
        pytest.skip("nobody but root may look at what an executor has mapped")
    return "aiohttp" in Path(f"/proc/{pod.pid}/maps").read_text()


async def test_commands_and_probes_load_nothing_else(pod: Pod) -> None:
    async with raw(pod) as connection:
        connection.send(
            b"GET /healthz HTTP/1.1\r\nHost: pod\r\n\r\n"
            + request(pod, "POST /v1/exec", TRUE)
            + b"GET /readyz HTTP/1.1\r\nHost: 10.0.0.1:8080\r\nUser-Agent: kube-probe/1.31\r\nAccept: */*\r\n"
            b"X-B3-Trace_Id: 7\r\nConnection: close\r\n\r\n"
        )
        answers = [await connection.answer() for _ in range(3)]
        assert await connection.ended() == b""
    assert [one.status for one in answers] == [200, 200, 200]
    assert answers[0].json == answers[2].json == {"status": "ok", "message": None}
    assert answers[2].headers["connection"] == "close"
    assert not is_loaded(pod)


@pytest.mark.parametrize(
    "headers",
    [
        "Host: pod\r\nContent-Length: 3\r\n\r\nabc",
        "Host: pod\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "Host: pod\r\nConnection: keep-alive, x\r\n\r\n",
        "Host: pod\r\nX: \xff\r\n\r\n",
    ],
)
async def test_a_probe_out_of_the_ordinary_is_the_applications_and_the_next_request_is_not_mistaken(
    executor: Pod, headers: str
) -> None:
    async with raw(executor) as connection:
        for _ in range(2):
            connection.send(f"GET /healthz HTTP/1.1\r\n{headers}".encode("latin-1"))
            answer = await connection.answer()
            assert (answer.status, answer.json["status"]) == (200, "ok")


async def test_the_first_other_calls_come_at_once_and_are_all_answered_while_commands_run_on(pod: Pod) -> None:
    calls = [pod.call("GET", "/v1/files/stat?path=.") for _ in range(20)]
    calls += [pod.call("PUT", f"/v1/files?path=f{number}", b"x" * 100_000) for number in range(20)]
    calls += [pod.call("POST", "/v1/exec", {"command": ["true"]}) for _ in range(20)]
    answers = await asyncio.gather(*calls)
    assert [one.status for one in answers] == [200] * 20 + [201] * 20 + [200] * 20
    assert all((pod.workspace / f"f{number}").stat().st_size == 100_000 for number in range(20))


async def test_a_body_that_arrives_while_the_application_loads_is_held_within_bounds(pod: Pod) -> None:
    size = 64 << 20
    async with raw(pod) as connection:
        connection.send(request(pod, "PUT /v1/files?path=big", length=size))
        for _ in range(64):
            connection.send(b"y" * (1 << 20))
        await connection.writer.drain()
        assert (await connection.answer()).status == 201
    assert (pod.workspace / "big").stat().st_size == size
    if IS_ROOT:
        assert pod.process.status_kib("VmHWM") < 100_000


async def test_a_pod_that_a_manager_claims_gets_the_rest_by_itself(pod: Pod) -> None:
    async with raw(pod) as connection:
        connection.send(request(pod, "POST /v1/exec", TRUE, "Sandbox-Lease-Sec: 600"))
        assert (await connection.answer()).status == 200
    await until(lambda: is_loaded(pod), "the application is loaded in the background")


async def test_who_leaves_while_the_application_loads_takes_nothing_from_the_others(pod: Pod) -> None:
    async with raw(pod) as connection:
        connection.send(request(pod, "GET /v1/processes"))
        await connection.writer.drain()
    assert (await pod.call("GET", "/v1/processes")).status == 200
    assert "failed" not in pod.process.log_text(0)
