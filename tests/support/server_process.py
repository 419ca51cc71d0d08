"""`python -m manager ...` as a process of its own, on loopback and with a data directory of the test's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parent.parent.parent
START_SEC = 60.0


class Stack:
    """One running server. `lines` is what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process, data_dir: Path) -> None:
        self.process = process
        self.data_dir = data_dir
        self.lines: list[str] = []
        self.address = ""

    async def said(self, words: str) -> str:
        """The first line with the words, waited for. Raises AssertionError where the process ends without."""
        for line in self.lines:
            if words in line:
                return line
        assert self.process.stdout is not None
        async with asyncio.timeout(START_SEC):
            while raw := await self.process.stdout.readline():
                self.lines.append(raw.decode().rstrip("\n"))
                if words in self.lines[-1]:
                    return self.lines[-1]
        raise AssertionError(f"ended without saying {words!r}:\n" + "\n".join(self.lines))

    async def ended(self, number: signal.Signals | None = None, *, group: bool = False) -> int:
        """The exit code, after a signal to the process, or to its whole group as a terminal's Ctrl-C goes."""
        if number is not None and self.process.returncode is None:
            if group:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        assert self.process.stdout is not None
        async with asyncio.timeout(START_SEC):
            while raw := await self.process.stdout.readline():
                self.lines.append(raw.decode().rstrip("\n"))
            return await self.process.wait()

    @property
    def key(self) -> str:
        return (self.data_dir / "api-key").read_text().strip()

    async def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of the answer."""
        sent = {"X-Api-Key": self.key} if headers is None else dict(headers)
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.address + path, json=body, headers=sent) as response,
        ):
            return await response.json()

    async def exec(self, task: str, command: str | list[str], **fields: Any) -> Any:
        return await self.call("POST", f"/sandbox/task/{task}/exec", {"command": command, **fields})


@asynccontextmanager
async def started(data_dir: Path, *arguments: str, **env: str) -> AsyncIterator[Stack]:
    """The process, in a session of its own; ended, with its pods, on the way out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SOJOURN_", "SANDBOX_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "manager",
        *arguments,
        cwd=ROOT,
        env=kept | {"SOJOURN_DATA_DIR": str(data_dir), "SOJOURN_PORT": "0"} | env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_default_signals,
    )
    stack = Stack(process, data_dir)
    try:
        yield stack
    finally:
        if process.returncode is None:
            try:
                await stack.ended(signal.SIGINT)
            except TimeoutError:
                process.kill()
                await process.wait()


def _default_signals() -> None:
    """A test run in the background ignores SIGINT, and would hand that down."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@asynccontextmanager
async def up(data_dir: Path, *arguments: str, **env: str) -> AsyncIterator[Stack]:
    """`up`, once it serves."""
    async with started(data_dir, "up", *arguments, **env) as stack:
        line = await stack.said("  address ")
        stack.address = line.split()[1]
        await stack.said("curl -s")
        yield stack
