"""FLUSHALL under load on a whole stack with a Redis of its operator's: what was made goes on as if nothing was."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.support.long_lived import ALL, made
from tests.support.stack import Stack

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
WIPES = 5
LIMIT = 5
CONFIG = f"""
[projects."dev/default"]
profiles = ["sandboxes-default"]
concurrency = {LIMIT}
"""
LONG_SEC = 120.0


@pytest.fixture
def stack(valkey_url: str) -> Iterator[Stack]:
    stack = Stack(config=CONFIG, SOJOURN_REDIS_URL=valkey_url).start()
    yield stack
    stack.remove()


async def run(stack: Stack, sandbox_id: str, command: str) -> Any:
    """Again, where it is told to: in the moment of the wipe the store may not know yet what there is."""
    async with asyncio.timeout(LONG_SEC):
        while True:
            status, answer = await stack.call("POST", f"{ALL}/{sandbox_id}/exec", json={"command": command})
            if status == 200:
                return answer
            assert answer["error"]["retryable"], answer
            await asyncio.sleep(0.2)


async def made_at_last(stack: Stack) -> None:
    """Likewise: a machine that is busy takes its time with pods."""
    async with asyncio.timeout(LONG_SEC):
        while (found := await stack.call("POST", ALL, json={}))[0] != 201:
            assert found[1]["error"]["retryable"], found
            await asyncio.sleep(0.2)


async def held(stack: Stack) -> int:
    slots: int = (await stack.call("GET", "/api/v1/quotas"))[1]["quotas"][0]["slots_held"]
    return slots


async def test_redis_is_wiped_under_load_and_every_sandbox_file_quota_and_key_is_still_there(
    stack: Stack, valkey_url: str
) -> None:
    """Running ones are found from the provider, in the same pods with what runs in them; stopped ones in object
    storage; slots are counted anew before one is given out; keys work all the time."""
    refused: Counter[str] = Counter()
    async with stack, Redis.from_url(valkey_url) as redis:
        sleeps = await made(stack, name="sleeps")
        await run(stack, sleeps, "echo kept > a")
        status, answer = await stack.call("POST", f"{ALL}/{sleeps}/stop?wait_sec=110")
        assert (status, answer["state"]) == (200, "stopped"), answer
        running = [await made(stack, name=f"runs-{number}") for number in range(2)]
        pods = {one: (await run(stack, one, "echo 0 > count"))["pod_id"] for one in running}
        status, process = await stack.call("POST", f"{ALL}/{running[0]}/processes", json={"command": "sleep 1000"})
        assert status == 201, process
        counts, wiped = dict.fromkeys(running, 0), asyncio.Event()

        async def works(sandbox_id: str) -> None:
            while not wiped.is_set():
                await run(stack, sandbox_id, "echo $(( $(cat count) + 1 )) > count")
                counts[sandbox_id] += 1

        async def comes_and_goes() -> None:
            """Creates past the limit: what is refused says why."""
            while not wiped.is_set():
                status, answer = await stack.call("POST", ALL, json={"autostop_sec": 600})
                if status == 201:
                    await stack.call("DELETE", f"{ALL}/{answer['sandbox_id']}?purge=true&force=true")
                else:
                    refused[answer["error"]["code"]] += 1
                    assert answer["error"]["retryable"], answer
                    await asyncio.sleep(0.05)

        load = [asyncio.create_task(works(one)) for one in running]
        load += [asyncio.create_task(comes_and_goes()) for _ in range(LIMIT)]
        for _ in range(WIPES):
            before = dict(counts)
            await redis.flushall()
            async with asyncio.timeout(LONG_SEC):  # work goes on after each
                while any(counts[one] < before[one] + 2 for one in running):
                    for one in load:
                        if one.done():
                            one.result()
                    await asyncio.sleep(0.02)
        wiped.set()
        await asyncio.gather(*load)
        for sandbox_id in running:
            answer = await run(stack, sandbox_id, "cat count")
            assert (answer["pod_id"], int(answer["stdout"])) == (pods[sandbox_id], counts[sandbox_id])
        status, shown = await stack.call("GET", f"{ALL}/{running[0]}/processes/{process['id']}")
        assert (status, shown["state"]) == (200, "running")
        listed = {one["sandbox_id"]: one["state"] for one in (await stack.call("GET", ALL))[1]["sandboxes"]}
        assert {one: listed[one] for one in (sleeps, *running)} == {
            sleeps: "stopped", **dict.fromkeys(running, "running")
        }  # fmt: skip
        async with asyncio.timeout(LONG_SEC):  # a create that was broken off takes itself back
            while await held(stack) != len(running):
                await asyncio.sleep(0.1)
        for _ in range(LIMIT - len(running)):
            await made_at_last(stack)
        status, answer = await stack.call("POST", f"{ALL}/{sleeps}/start")
        assert (status, answer["error"]["code"]) == (429, "quota_exceeded")
        await stack.call("DELETE", f"{ALL}/{running[1]}?purge=true")
        status, answer = await stack.call("POST", f"{ALL}/{sleeps}/start?wait_sec=110")
        assert (status, answer["state"]) == (200, "running"), answer
        assert (await run(stack, sleeps, "cat a"))["stdout"] == "kept\n"
        assert refused["internal"] == 0, refused
