"""What an executor holds after thousands of commands, sessions and terminals: what it held before.

`SOJOURN_LEAK_SCALE=0.1` makes it a tenth of that, for machines where the whole takes too long."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import aiohttp
import pytest

from benchmarks.harness.leaks import Amounts, LeakRun
from tests.support.executor_pod import IS_ROOT, ExecutorProcess

SCALE = float(os.environ.get("SOJOURN_LEAK_SCALE", "1"))
GROWTH_BYTES = 20 << 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not IS_ROOT, reason="only root may count the descriptors of an executor")
async def test_thousands_of_commands_sessions_and_terminals_leave_nothing_behind(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    amounts = Amounts(commands=int(10_000 * SCALE), sessions=int(500 * SCALE), terminals=int(300 * SCALE))
    with fresh_executor() as process:
        run = LeakRun(
            process.pid, "http://pod", {"Authorization": f"Bearer {process.token}"},
            lambda: aiohttp.UnixConnector(process.socket, limit=0),
        )  # fmt: skip
        leaks = await run.run(amounts)
    assert leaks.left == {"pids": 0, "fds": 0, "tasks": 0}, leaks
    assert leaks.rss_growth_bytes < GROWTH_BYTES, leaks
