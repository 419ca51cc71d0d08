"""One stack for all tests of the command line, and the command itself as a process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.user_stack import Stack, running_stack

Sojourn = Callable[..., "subprocess.CompletedProcess[bytes]"]
COMMAND_SEC = 60.0


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    data_dir = Path(tempfile.mkdtemp(prefix="sojourn-cli-"))  # short: sockets in it have at most 107 bytes of path
    try:
        with running_stack(data_dir) as running:
            yield running
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)


@pytest.fixture
def task(stack: Stack) -> Iterator[str]:
    """A task of the test's own, retired afterwards."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    yield name
    with stack.client() as client:
        client.task(name).delete()


@pytest.fixture
def sojourn(stack: Stack) -> Sojourn:
    """Runs `sojourn` with the words, to its end; `input` is its stdin, none is /dev/null."""

    def run(*words: str, input: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "sojourn", *words]
        if input is not None:
            return subprocess.run(
                command, env=stack.env, input=input, capture_output=True, timeout=COMMAND_SEC, check=False
            )
        return subprocess.run(
            command, env=stack.env, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SEC, check=False
        )

    return run
