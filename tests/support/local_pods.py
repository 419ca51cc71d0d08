"""For tests that run real pods: their tokens, and commands in them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from manager.executor_client import pod_token
from manager.model import Pod, Profile
from manager.providers.local import cgroups
from manager.providers.local.making import cgroup_name
from manager.providers.local.provider import LocalProvider
from manager.providers.local.state import PodRecord, PodStore
from tests.support.sockets import Socket, socket_at

WAIT_SEC: Final = 60.0
FREE: Final = Profile(name="free", cpu=None, memory_bytes=None, pids=None)
MIB: Final = 1 << 20
SECRET: Final = b"the secret of a test's manager"

Open = Callable[..., LocalProvider]

# An executor that starts and never answers, for what happens before a pod is ready.
MUTE_EXECUTOR: Final = "import sys, time\nprint('mute executor here', flush=True)\ntime.sleep(3600)\n"


def token_for(name: str) -> str:
    return pod_token(SECRET, name)


class _Always(AbstractResolver):
    """Every name is this address."""

    def __init__(self, address: str) -> None:
        self._url = URL(address)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        assert self._url.host is not None
        assert self._url.port is not None
        return [
            ResolveResult(
                hostname=host, host=self._url.host, port=self._url.port, family=socket.AF_INET, proto=0, flags=0
            )
        ]

    async def close(self) -> None:
        pass


def session_to(pod: Pod) -> aiohttp.ClientSession:
    """A session with the pod's executor, at http://pod."""
    if pod.address.startswith("unix:"):
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(pod.address.removeprefix("unix:"))
    else:
        connector = aiohttp.TCPConnector(resolver=_Always(pod.address))
    return aiohttp.ClientSession(
        connector=connector,
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


def store_of(data_dir: Path) -> PodStore:
    return PodStore(data_dir / "pods")


def record_of(data_dir: Path, name: str) -> PodRecord:
    record = store_of(data_dir).read(name)
    assert record is not None
    return record


def cgroups_left(data_dir: Path, name: str) -> list[str]:
    groups = cgroups.paths(cgroups.find_hierarchies(), cgroup_name(store_of(data_dir), name))
    return [group.path for group in groups if os.path.exists(group.path)]


def nothing_left(data_dir: Path, name: str) -> bool:
    return not os.listdir(data_dir / "pods") and not cgroups_left(data_dir, name) and not processes_with(str(data_dir))


async def skip_without_isolation(provider: LocalProvider) -> None:
    import pytest  # here: environments without it use the rest of this file

    found = await provider.capabilities()
    if found.tier is None:
        pytest.skip(f"no isolation on this machine: {found.why_not}")
