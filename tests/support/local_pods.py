"""For tests that run real pods: their tokens, and commands in them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp

from manager.executor_client import pod_token
from manager.model import Pod
from tests.support.sockets import Socket, socket_at

WAIT_SEC: Final = 30.0
SECRET: Final = b"the secret of a test's manager"

# An executor that starts and never answers, for what happens before a pod is ready.
MUTE_EXECUTOR: Final = "import sys, time\nprint('mute executor here', flush=True)\ntime.sleep(3600)\n"


def token_for(name: str) -> str:
    return pod_token(SECRET, name)


def session_to(pod: Pod) -> aiohttp.ClientSession:
    """A session with the pod's executor, at http://pod."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(pod.address.removeprefix("unix:")),
        headers={"Authorization": f"Bearer {token_for(pod.name)}", "Sandbox-Pod": pod.name},
        timeout=aiohttp.ClientTimeout(total=60),
    )


async def run(pod: Pod, command: str | list[str], **fields: Any) -> dict[str, Any]:
    """The executor's answer to one command."""
    request = {"command": command, **fields}
    async with session_to(pod) as session, session.post("http://pod/v1/exec", json=request) as answer:
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        return body


async def on_terminal(pod: Pod, command: str) -> Socket:
    """All that the command shows on a terminal of the pod, 100 columns by 30 rows."""
    async with session_to(pod) as session:
        body = {"command": command, "cols": 100, "rows": 30}
        async with session.post("http://pod/v1/terminals", json=body) as answer:
            assert answer.status == 201, await answer.text()
            id = (await answer.json())["id"]
        async with socket_at(session, f"http://pod/v1/terminals/{id}", {}) as socket:
            await socket.to_end()
    assert socket.exit is not None
    return socket


def executor_package(directory: Path, source: str) -> Path:
    """A package `executor` whose program is `source`, to stand in for the real one."""
    package = directory / "stand-in" / "executor"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(source)
    return package


async def until(holds: Callable[[], bool], what: str) -> None:
    """Waits until `holds()`; fails with `what` after WAIT_SEC."""
    try:
        async with asyncio.timeout(WAIT_SEC):
            while not holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_SEC:.0f} s: {what}") from None


def lives(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def processes_with(text: str) -> list[int]:
    """Pids of living processes of which the command line or environment holds `text`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and lives(int(entry)):
            for file in ("environ", "cmdline"):
                try:
                    if text.encode() in Path("/proc", entry, file).read_bytes():
                        found.append(int(entry))
                        break
                except OSError:
                    continue
    return found
