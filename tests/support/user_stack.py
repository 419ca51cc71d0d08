"""A whole stack as a user starts it: `manager up` in a process of its own, with a data directory of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sojourn import Client

START_SEC = 90.0
END_SEC = 60.0


def clean_env(**more: str) -> dict[str, str]:
    """This process's environment without any setting of a stack, and `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SOJOURN_", "SANDBOX_"))}
    return kept | more


class Stack:
    def __init__(self, data_dir: Path, port: int = 0) -> None:
        self.data_dir = data_dir
        self.port = port
        self.log = data_dir / "up.log"
        self.env = clean_env(SOJOURN_DATA_DIR=str(data_dir))

    @property
    def address(self) -> str:
        return (self.data_dir / "address").read_text().strip()

    @property
    def api_key(self) -> str:
        return (self.data_dir / "api-key").read_text().strip()

    def client(self) -> Client:
        return Client(self.address, self.api_key)


def start(stack: Stack) -> subprocess.Popen[bytes]:
    """The manager's process; it has not listened yet."""
    with stack.log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "manager", "up", "--port", str(stack.port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=stack.env | {"SOJOURN_METRICS_PORT": "off"},
            start_new_session=True,
        )


def ready(stack: Stack, process: subprocess.Popen[bytes]) -> None:
    """Waits until a first start has left address and key. Raises RuntimeError with what the stack said otherwise."""
    deadline = time.monotonic() + START_SEC
    while not ((stack.data_dir / "address").exists() and (stack.data_dir / "api-key").exists()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the stack did not start:\n{stack.log.read_text(errors='replace')}")
        time.sleep(0.05)


def end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does: with all sandboxes."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SEC)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def running_stack(data_dir: Path) -> Iterator[Stack]:
    """A stack at a free port, ended with everything in it."""
    stack = Stack(data_dir)
    process = start(stack)
    try:
        ready(stack, process)
        yield stack
    finally:
        end(process)
