"""What an executor does while nobody asks anything of it: nothing.

Waking up is a voluntary context switch before (proc_pid_status(5)), whatever else the machine does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.executor_pod import ExecutorProcess, connected

SETTLE_SEC = 60.0
QUIET_SEC = 5.0
WATCH_SEC = 10.0


def family(pid: int) -> list[int]:
    """The executor and its spawn helpers."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (thread / "children").read_text().split())
    return found


def wakes(pid: int) -> int:
    total = 0
    for one in family(pid):
        for thread in Path(f"/proc/{one}/task").iterdir():
            for line in (thread / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches:"):
                    total += int(line.split()[1])
    return total


@pytest.mark.timeout(120)
async def test_an_executor_that_nobody_calls_does_not_wake_up(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await asyncio.gather(*(pod.exec(["true"]) for _ in range(16)))
            await pod.exec("sleep 0.2; echo done")
            assert (await pod.call("GET", "/v1/processes")).status == 200  # the whole application is loaded
        give_up = time.monotonic() + SETTLE_SEC
        before = wakes(process.pid)
        while True:
            await asyncio.sleep(QUIET_SEC)
            now = wakes(process.pid)
            if now == before:
                break
            assert time.monotonic() < give_up, f"woken {now - before} times in {QUIET_SEC:g} s"
            before = now
        await asyncio.sleep(WATCH_SEC)
        # One deadline of what went before may still pass; what ticks would be seen more than once.
        assert wakes(process.pid) - before <= 1
