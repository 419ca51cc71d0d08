"""A real executor for the tests of this folder, one process for all that do not disturb it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

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
from tests.support.sessions import SessionOf, session_in

SH_TOOLS: Final = (
    "cat", "env", "grep", "head", "id", "kill", "ls", "nohup", "rmdir", "mkdir", "readlink", "rm", "seq", "setsid",
    "sleep", "tr", "true", "wc", "yes",
)  # fmt: skip


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


@pytest.fixture(scope="session")
def bashless_process() -> Iterator[ExecutorProcess]:
    """An executor whose image has sh, but no bash."""
    sh = shutil.which("dash") or shutil.which("busybox")
    if sh is None:
        pytest.skip("neither dash nor busybox is here")
    with tempfile.TemporaryDirectory(prefix="sojourn-test-") as directory:
        Path(directory).chmod(0o755)
        os.symlink(sh, f"{directory}/sh")
        for tool in SH_TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            os.symlink(found, f"{directory}/{tool}")
        with running_executor(env={"PATH": directory}) as process:
            yield process


@pytest.fixture(params=["bash-split", "bash-single", "sh"])
async def session(request: pytest.FixtureRequest) -> AsyncIterator[SessionOf]:
    """A session in each kind of pod, in turn."""
    kind: str = request.param
    if kind == "sh":
        process = request.getfixturevalue("bashless_process")
    else:
        if kind == "bash-split" and not IS_ROOT:
            pytest.skip("the split tier needs root")
        name = "executor_process" if kind == f"bash-{DEFAULT_TIER}" else "other_tier_process"
        process = request.getfixturevalue(name)
    async with connected(process) as pod, session_in(pod) as one:
        yield one


@pytest.fixture
async def bash(executor_process: ExecutorProcess) -> AsyncIterator[SessionOf]:
    async with connected(executor_process) as pod, session_in(pod) as one:
        assert (await one.info())["shell"].endswith("/bash")
        yield one
