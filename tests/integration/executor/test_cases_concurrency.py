"""Cases of *Concurrency and retries*, against a running executor."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected, until

FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]
MiB = 1 << 20


async def test_health_is_answered_all_the_while(executor: Pod) -> None:
    """CO01: long commands, many short ones and a large upload at the same time"""
    sleeper = await executor.start(["sleep", "300"])

    async def content() -> AsyncIterator[bytes]:
        piece = b"\0" * MiB
        for _ in range(200):
            yield piece

    async def upload() -> None:
        async with executor.session.put(
            executor.url + "/v1/files?path=big", data=content(), headers={"Authorization": f"Bearer {executor.token}"}
        ) as answer:
            assert answer.status in (200, 201, 204), await answer.read()

    async def commands() -> None:
        for _ in range(10):
            await asyncio.gather(*(executor.exec(["true"]) for _ in range(20)))

    work = asyncio.gather(upload(), commands())
    waits: list[float] = []
    while not work.done() or len(waits) < 20:
        began = time.monotonic()
        reply = await executor.call("GET", "/healthz", token="")
        assert reply.status == 200
        waits.append(time.monotonic() - began)
        await asyncio.sleep(0.05)
    await work
    assert max(waits) < 20
    assert sorted(waits)[len(waits) // 2] < 5
    assert (executor.workspace / "big").stat().st_size == 200 * MiB
    (executor.workspace / "big").unlink()
    await executor.call("DELETE", f"/v1/processes/{sleeper}")


@pytest.mark.skipif(not IS_ROOT, reason="nobody but root may look at the descriptors of an executor")
@pytest.mark.parametrize("body", [
    {"command": ["/nope"]}, {"command": ["true"], "cwd": "/nope"}, {"command": ["true"], "stdin": "x" * 10_000},
    {"command": ["true"], "merge_output": True}, {"command": ["echo", "x" * 200_000]},
])  # fmt: skip
async def test_spawns_that_fail_leak_no_descriptors(executor: Pod, body: dict[str, Any]) -> None:
    """CO03, with 500 of each kind"""
    gate = asyncio.Semaphore(8)

    async def run() -> int:
        async with gate:
            return (await executor.call("POST", "/v1/exec", body)).status

    assert {await run() for _ in range(10)} <= {200, 400, 413}
    before = executor.process.open_files()
    await asyncio.gather(*(run() for _ in range(500)))
    await until(lambda: executor.process.open_files() <= before + 8, "as few descriptors as before")


@pytest.mark.parametrize("kind", ["wait", "stream", "background"])
async def test_an_executor_ends_soon_with_many_spawns_in_flight(fresh_executor: FreshExecutor, kind: str) -> None:
    """CO05"""
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.exec(["true"])
            path = "/v1/processes" if kind == "background" else "/v1/exec"
            headers = {"Accept": "application/vnd.sojourn.frames"} if kind == "stream" else {}
            calls = [
                asyncio.create_task(
                    pod.call("POST", path, {"command": ["sleep", "300.0501"]}, headers=headers), name=f"spawn-{n}"
                )
                for n in range(100)
            ]
            await asyncio.sleep(0)
            began = time.monotonic()
            os.kill(process.pid, signal.SIGTERM)
            code = await asyncio.to_thread(process.process.wait, 60)
            assert time.monotonic() - began < 45
            assert code == 128 + signal.SIGTERM, pod.log.read_text()[-2000:]
            await asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: not process.descendants(), "nothing is left of it")
            assert '"trace"' not in process.log_text()


async def test_a_draining_executor_answers_the_commands_it_ends(fresh_executor: FreshExecutor) -> None:
    """CO05"""
    with fresh_executor() as process:
        async with connected(process) as pod:
            call = asyncio.create_task(pod.exec("echo up > up; sleep 300"), name="drained")
            await until((pod.workspace / "up").exists, "the command runs")
            os.kill(process.pid, signal.SIGTERM)
            result = await call
            assert result["reason"] == "cancelled"
            assert await asyncio.to_thread(process.process.wait, 60) == 128 + signal.SIGTERM


async def test_the_same_id_again_is_replayed_and_not_run(any_tier: Pod) -> None:
    """CO07"""
    ran = any_tier.workspace / "co07"
    command = f"echo x >> {ran}; echo $$"
    first = await any_tier.exec(command, id="co07-K1")
    await any_tier.exec("true", id="co07-K2")
    again = await any_tier.exec(command, id="co07-K1")
    assert again == first
    assert ran.read_text() == "x\n"


async def test_a_twin_joins_the_one_that_runs(executor: Pod) -> None:
    """CO07"""
    ran = executor.workspace / "co07-twins"
    command = f"echo x >> {ran}; sleep 0.5; echo $$"
    twins = await asyncio.gather(*(executor.exec(command, id="co07-twin") for _ in range(10)))
    assert all(twin == twins[0] for twin in twins)
    assert ran.read_text() == "x\n"


async def test_streams_of_one_id_each_get_all_of_it(executor: Pod) -> None:
    """CO07"""
    ran = executor.workspace / "co07-streams"
    command = f"echo x >> {ran}; seq 1 50000; sleep 0.3; echo end"
    streams = await asyncio.gather(*(executor.stream(command, id="co07-streams") for _ in range(5)))
    late = await executor.stream(command, id="co07-streams")
    assert len({stream.stdout for stream in [*streams, late]}) == 1
    assert streams[0].stdout.endswith(b"50000\nend\n")
    assert ran.read_text() == "x\n"


async def test_an_id_that_is_taken_by_another_body_is_refused(executor: Pod) -> None:
    """CO07"""
    await executor.exec("echo one", id="co07-taken")
    for path, body in (
        ("/v1/exec", {"command": "echo two"}),
        ("/v1/exec", {"command": "echo one", "env": {"A": "b"}}),
        ("/v1/processes", {"command": "echo one"}),
    ):
        reply = await executor.call("POST", path, {**body, "id": "co07-taken"})
        assert (reply.status, reply.code) == (422, "idempotency_mismatch")


async def test_an_id_whose_command_never_ran_is_free_again(executor: Pod) -> None:
    """CO07"""
    refused = await executor.call("POST", "/v1/exec", {"command": "echo ok", "cwd": "not-yet", "id": "co07-free"})
    assert refused.code == "invalid_cwd"
    (executor.workspace / "not-yet").mkdir()
    if IS_ROOT:
        os.chown(executor.workspace / "not-yet", executor.user.pw_uid, executor.user.pw_gid)
    assert (await executor.exec("echo ok", cwd="not-yet", id="co07-free"))["stdout"] == "ok\n"


async def test_hundreds_at_once_each_get_their_own_answer(executor: Pod) -> None:
    """CO01"""
    results = await asyncio.gather(*(executor.exec(f"sleep 0.2; echo {n}; exit {n % 7}") for n in range(300)))
    assert [(one["stdout"], one["exit_code"]) for one in results] == [(f"{n}\n", n % 7) for n in range(300)]


async def test_more_commands_than_a_pod_may_run_are_refused_and_can_be_tried_again(
    fresh_executor: FreshExecutor,
) -> None:
    """CO01"""
    with fresh_executor(env={"SOJOURN_MAX_RUNNING": "3"}) as process:
        async with connected(process) as pod:
            ids = [await pod.start(["sleep", "300"]) for _ in range(3)]
            reply = await pod.call("POST", "/v1/exec", {"command": ["true"]})
            assert (reply.status, reply.code, reply.json["error"]["retryable"]) == (429, "rate_limited", True)
            assert reply.headers["Retry-After"]
            await pod.call("DELETE", f"/v1/processes/{ids[0]}")
            assert (await pod.exec(["true"]))["exit_code"] == 0
