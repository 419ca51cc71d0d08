"""What the executor holds after work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.executor_pod import IS_ROOT, ExecutorProcess, connected, until

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="nobody but root may look at the memory of an executor")
FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]


def pss_kib(process: ExecutorProcess) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


async def test_thousands_of_short_commands_leave_little_behind(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await asyncio.gather(*(pod.exec(["true"]) for _ in range(100)))
            before = pss_kib(process)
            for _ in range(20):
                await asyncio.gather(*(pod.exec(["true"]) for _ in range(100)))
            await until(lambda: pss_kib(process) - before < 9_000, "under 4.5 KiB for each outcome", 20)


async def test_memory_that_large_outputs_took_is_given_back(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.exec(["true"])
            before = pss_kib(process)
            ids = [await pod.start("head -c 8000000 /dev/zero") for _ in range(12)]
            for id in ids:
                await pod.ended(id)
                await pod.call("DELETE", f"/v1/processes/{id}")
            await pod.exec(["true"])
            await until(lambda: pss_kib(process) - before < 25_000, "most of it given back", 30)
