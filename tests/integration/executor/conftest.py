"""A real executor for the tests of this folder, one process for all that do not disturb it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.support.executor_pod import (
    DEFAULT_TIER,
    IS_ROOT,
    ExecutorProcess,
    Pod,
    Tier,
    UnreachablePython,
    connected,
    running_executor,
)


@pytest.fixture(scope="session")
def executor_process() -> Iterator[ExecutorProcess]:
    with running_executor() as process:
        yield process


@pytest.fixture(scope="session")
def other_tier_process() -> Iterator[ExecutorProcess]:
    try:
        with running_executor("single") as process:
            yield process
    except UnreachablePython as why:
        pytest.skip(str(why))


@pytest.fixture
async def executor(executor_process: ExecutorProcess) -> AsyncIterator[Pod]:
    """The shared executor, in the tier that this machine's user gives."""
    async with connected(executor_process) as pod:
        yield pod


@pytest.fixture(params=["split", "single"])
async def any_tier(request: pytest.FixtureRequest) -> AsyncIterator[Pod]:
    """The same in each of the two tiers, in turn."""
    tier: Tier = request.param
    if tier == "split" and not IS_ROOT:
        pytest.skip("the split tier needs root")
    process = request.getfixturevalue("executor_process" if tier == DEFAULT_TIER else "other_tier_process")
    async with connected(process) as pod:
        yield pod


@pytest.fixture
def fresh_executor() -> Callable[..., AbstractContextManager[ExecutorProcess]]:
    """For tests that end, break or configure one: `with fresh_executor(...) as process`."""
    return running_executor
