"""kill -9 of a sandbox's executor under its commands: they die with it, callers are told, nothing runs again (F1)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manager.providers.local.state import PodRecord
from tests.support.stack import Stack

pytestmark = pytest.mark.timeout(200)
ROUNDS = 5
SOON_SEC = 30.0  # ten at the most (LM07), on a machine that does other work too


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack().start()
    yield stack
    stack.remove()


def executor_of(stack: Stack, pod: str) -> int:
    record = msgspec.json.decode((stack.data / "pods" / pod / "pod.json").read_bytes(), type=PodRecord)
    assert record.inner is not None
    return record.inner.pid


def processes_with(marker: str) -> list[int]:
    """Living processes of this machine that name the marker on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def test_a_killed_executor_takes_its_commands_along_and_nothing_is_run_again(stack: Stack) -> None:
    """F1, RE05: not to be taken for a timeout"""
    async with stack:
        for number in range(ROUNDS):
            task, marker = f"killed-{number}", f"f1-marker-{number}-{os.getpid()}"
            pod = (await stack.exec(task, "true"))["pod_id"]
            body = {"command": f"setsid bash -c 'sleep 300; :' {marker} & bash -c 'sleep 300; :' {marker}; :"}
            path, headers = f"{stack.task(task)}/exec", {"Idempotency-Key": marker}
            waiting = asyncio.create_task(stack.call("POST", path, json=body, headers=headers))
            while not processes_with(marker):
                assert not waiting.done(), waiting.result()
                await asyncio.sleep(0.05)
            killed_at = time.monotonic()
            os.kill(executor_of(stack, pod), signal.SIGKILL)
            status, answer = await waiting
            # That the pod has ended, where this machine is quick enough to see it before the caller has to be answered.
            assert (status, answer["error"]["code"]) in ((410, "sandbox_gone"), (504, "outcome_unknown")), answer
            assert time.monotonic() - killed_at < SOON_SEC
            while processes_with(marker):
                assert time.monotonic() - killed_at < SOON_SEC
                await asyncio.sleep(0.05)
            await _noted(stack, task, killed_at)
            # The key's command may have run: it is not run again, in whatever pod the task has next.
            status, answer = await stack.call("POST", path, json=body, headers=headers)
            assert (status, answer["error"]["code"]) == (504, "outcome_unknown"), answer
            assert processes_with(marker) == []
            after = await stack.exec(task, "echo on")
            assert after["stdout"] == "on\n"
            assert after["pod_id"] != pod
            assert pod not in stack.pods()


async def _noted(stack: Stack, task: str, killed_at: float) -> None:
    """The task's record soon says that its pod has ended, and why."""
    view: Any = None
    while time.monotonic() - killed_at < SOON_SEC:
        _, view = await stack.call("GET", stack.task(task))
        if view["stage"] == "reclaimed":
            assert view["ended"]["reason"] == "lost"
            return
        await asyncio.sleep(0.05)
    raise AssertionError(view)
