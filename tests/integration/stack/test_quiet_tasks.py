"""Quiet tasks: what their sandboxes keep while nobody calls, and how their end is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.support.stack import Stack

IDLE_SEC = 3


@pytest.fixture
async def short() -> AsyncIterator[Stack]:
    """Its sandboxes are taken back after a short while without work."""
    stack = await asyncio.to_thread(lambda: Stack(SANDBOX_TASK_IDLE_TTL=str(IDLE_SEC)).start())
    try:
        async with stack:
            yield stack
    finally:
        await asyncio.to_thread(stack.remove)


async def test_a_background_process_is_found_after_quiet_minutes_and_then_the_end_of_its_sandbox_is_told(
    short: Stack,
) -> None:
    """RE01, RE05, RE07, RE13"""
    task = short.task("quiet")
    await short.exec("quiet", "mkdir -p src && echo kept > src/file")
    timed_out = await short.exec("quiet", ["sleep", "60"], timeout_sec=1)
    assert (timed_out["reason"], timed_out["timed_out"]) == ("timeout", True)
    status, started = await short.call(
        "POST", f"{task}/processes", json={"id": "build", "command": "until [ -e go ]; do sleep 0.1; done; exit 3"}
    )
    assert status == 201
    await asyncio.sleep(IDLE_SEC * 2)  # nobody calls; the process is work enough to keep the sandbox
    status, running = await short.call("GET", f"{task}/processes/build")
    assert (status, running["pid"], running["state"]) == (200, started["pid"], "running")
    assert (await short.call("PUT", f"{task}/files?path=go", data=b""))[0] == 201
    status, ended = await short.call("GET", f"{task}/processes/build", params={"wait_sec": "60"})
    assert (status, ended["exit_code"], ended["reason"]) == (200, 3, "exited")

    give_up = time.monotonic() + 60
    while (await short.call("GET", task))[1]["stage"] != "reclaimed":
        assert time.monotonic() < give_up, "a quiet sandbox is kept"
        await asyncio.sleep(0.2)
    status, gone = await short.call("GET", f"{task}/processes/build")
    error = gone["error"]
    assert (status, error["code"], error["details"]["reason"]) == (410, "sandbox_gone", "expired")
    assert error["details"]["at"].startswith("20")
    again = await short.exec("quiet", "cat src/file")
    assert (again["stdout"], again["workspace"], again["previous"]["reason"]) == ("kept\n", "restored", "expired")
    await short.exec("quiet", "echo new > src/file")
    pod = {"If-Sandbox-Pod": again["pod_id"]}
    status, written = await short.call("POST", f"{task}/writeback", headers=pod)
    assert (status, written["pod_id"]) == (200, again["pod_id"])
    assert (await short.call("DELETE", task))[0] == 204
    status, gone = await short.call("POST", f"{task}/writeback", headers=pod)
    assert (status, gone["error"]["code"]) == (410, "sandbox_gone")
    assert (await short.exec("quiet", "ls"))["workspace"] == "fresh"  # a retired task leaves nothing
