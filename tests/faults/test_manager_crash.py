"""kill -9 of the manager: sandboxes, commands, output and leases live on, and nothing runs twice (F1, F4, F27)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.stack import Stack

pytestmark = pytest.mark.timeout(400)
COMMANDS = 20


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack(config='[projects."dev/default"]\nprofiles = ["sandboxes-default"]\nconcurrency = 200\n').start()
    yield stack
    stack.remove()


async def test_twenty_streaming_commands_outlive_the_manager(stack: Stack) -> None:
    script = "for n in $(seq 1 60); do echo line $n; sleep 0.05; done; until [ -e go ]; do sleep 0.1; done; echo end"
    async with stack:
        tasks = [f"crash-{number}" for number in range(5)]
        pods = {task: (await stack.exec(task, "true"))["pod_id"] for task in tasks}
        leases = {task: (await stack.call("GET", stack.task(task)))[1]["lease"]["until"] for task in tasks}
        seen = [0] * COMMANDS

        async def stream(number: int) -> None:
            async with stack.http.post(
                f"{stack.url}{stack.task(tasks[number % 5])}/exec",
                json={"command": script, "id": f"cmd-{number}"},
                headers={"Accept": "application/x-ndjson"},
            ) as answer:
                async for _line in answer.content:
                    seen[number] += 1

        streams = [asyncio.create_task(stream(number)) for number in range(COMMANDS)]
        while min(seen) < 3:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(stack.end, signal.SIGKILL)
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(outcome, aiohttp.ClientError) for outcome in outcomes), outcomes

    await asyncio.to_thread(stack.start)
    async with stack:
        for task in tasks:
            assert (await stack.call("PUT", f"{stack.task(task)}/files?path=go", data=b""))[0] == 201
        whole = "".join(f"line {n}\n" for n in range(1, 61)) + "end\n"
        for number in range(COMMANDS):
            task = tasks[number % 5]
            path = f"{stack.task(task)}/processes/cmd-{number}"
            status, state = await stack.call("GET", path, params={"wait_sec": "60"})
            assert (status, state["state"], state["exit_code"]) == (200, "ended", 0), state
            status, output = await stack.call("GET", f"{path}/output", params={"stream": "stdout", "offset": "0"})
            assert (status, output.decode()) == (200, whole)
        for task in tasks:
            answer = await stack.exec(task, "true")
            assert (answer["pod_id"], answer["provisioned"]) == (pods[task], "bound")
            view = (await stack.call("GET", stack.task(task)))[1]
            assert view["lease"]["until"] >= leases[task]
        await _only_known_pods(stack, set(pods.values()))


async def _only_known_pods(stack: Stack, bound: set[str]) -> None:
    """Every pod that there is, is a task's or of the warm pool."""
    pods: set[str] = set()
    pools: Any = None
    for _ in range(100):
        _, pools = await stack.call("GET", "/api/v1/pools")
        idle = sum(pool["ready"] for pool in pools["pools"])
        pods = stack.pods()
        if bound <= pods and len(pods) - len(bound) == idle:
            return
        await asyncio.sleep(0.2)
    raise AssertionError((pods, bound, pools))


async def test_a_retry_after_the_crash_joins_the_run_that_is_under_way(stack: Stack) -> None:
    """F4: the same key at the next manager returns the same execution's outcome, and there is one side effect."""
    command = "echo ran >> effects; until [ -e go ]; do sleep 0.1; done; wc -l < effects"
    async with stack:
        await stack.exec("retry", "true")
        keys = [f"key-{number}" for number in range(6)]
        calls = [asyncio.create_task(stack.exec(f"retry-{key}", command, key=key)) for key in keys]
        for key in keys:
            while (await stack.call("GET", f"{stack.task(f'retry-{key}')}/processes"))[0] != 200:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(stack.end, signal.SIGKILL)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, aiohttp.ClientError) for outcome in outcomes), outcomes
    await asyncio.to_thread(stack.start)
    async with stack:
        calls = [asyncio.create_task(stack.exec(f"retry-{key}", command, key=key)) for key in keys]
        await asyncio.wait(calls, timeout=1.0)  # a moment to join in
        assert not any(call.done() for call in calls)
        for key in keys:
            assert (await stack.call("PUT", f"{stack.task(f'retry-{key}')}/files?path=go", data=b""))[0] == 201
        for answer in await asyncio.gather(*calls):
            assert (answer["exit_code"], answer["stdout"]) == (0, "1\n")


async def test_ctrl_c_leaves_nothing_behind_and_sigterm_leaves_pods_to_be_found(stack: Stack) -> None:
    async with stack:
        before = await stack.exec("stays", "echo kept > file; cat file")
    assert await asyncio.to_thread(stack.end, signal.SIGTERM) == 0
    assert before["pod_id"] in stack.pods()
    await asyncio.to_thread(stack.start)
    async with stack:
        after = await stack.exec("stays", "cat file")
        assert (after["stdout"], after["pod_id"], after["provisioned"]) == ("kept\n", before["pod_id"], "bound")
    assert await asyncio.to_thread(stack.end, signal.SIGINT) in (0, 130)
    assert stack.pods() == set()
