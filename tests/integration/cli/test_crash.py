"""The manager dies under a running command, and the client's caller does not notice."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn import Exit, Gap, Output, Started
from tests.support.user_stack import Stack, end, ready, start


@pytest.fixture
def own_stack() -> Iterator[tuple[Stack, list[subprocess.Popen[bytes]]]]:
    """A stack of the test's own at a fixed port, and its managers, of which the last one is ended afterwards."""
    data_dir = Path(tempfile.mkdtemp(prefix="sojourn-crash-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stack = Stack(data_dir, port)
    managers = [start(stack)]
    try:
        ready(stack, managers[0])
        yield stack, managers
    finally:
        end(managers[-1])
        shutil.rmtree(data_dir, ignore_errors=True)


def test_a_stream_goes_on_over_a_killed_and_restarted_manager(
    own_stack: tuple[Stack, list[subprocess.Popen[bytes]]],
) -> None:
    stack, managers = own_stack
    script = "for i in $(seq 1 60); do echo line $i; echo err $i >&2; sleep 0.1; done; exit 7"
    restarted = threading.Event()

    def restart() -> None:
        os.kill(managers[0].pid, signal.SIGKILL)
        managers[0].wait()
        managers.append(start(stack))
        restarted.set()

    restarter = threading.Thread(target=restart)
    pieces: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    kinds: list[type] = []
    with stack.client() as client, client.task("t").stream(["bash", "-c", script]) as events:
        for event in events:
            kinds.append(type(event))
            assert not isinstance(event, Gap)
            if isinstance(event, Output):
                assert event.offset == len(pieces[event.stream])
                pieces[event.stream] += event.data
                if b"line 5\n" in pieces["stdout"] and restarter.ident is None:
                    restarter.start()
        restarter.join()
        assert restarted.is_set()
        assert events.exit is not None
        assert events.exit.exit_code == 7
        info = client.task("t").info()
        assert info.generation == 1
    assert pieces["stdout"].decode().splitlines() == [f"line {i}" for i in range(1, 61)]
    assert pieces["stderr"].decode().splitlines() == [f"err {i}" for i in range(1, 61)]
    assert kinds.count(Started) == 1
    assert kinds.count(Exit) == 1


def test_the_command_line_goes_on_too(own_stack: tuple[Stack, list[subprocess.Popen[bytes]]]) -> None:
    stack, managers = own_stack
    script = "for i in $(seq 1 40); do echo $i; sleep 0.1; done; exit 3"
    command = [sys.executable, "-m", "sojourn", "exec", "-n", "t", "--", "bash", "-c", script]
    child = subprocess.Popen(command, env=stack.env, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout as output:
        first = output.readline()
        os.kill(managers[0].pid, signal.SIGKILL)
        managers[0].wait()
        managers.append(start(stack))
        lines = (first + output.read()).decode().split()
    assert child.wait(60) == 3
    assert lines == [str(i) for i in range(1, 41)]
