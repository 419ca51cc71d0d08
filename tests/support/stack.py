"""The whole product on this machine, started as its user starts it: `python -m manager up` in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp

REPOSITORY: Final = Path(__file__).parents[2]
READY_SEC: Final = 90.0
# A machine whose root cannot have pods of two users: they are then of the single tier.
SINGLE_TIER: Final = """
import runpy, sys
from manager.providers.local import capability
tried = capability._try
capability._try = lambda program, tier, entry: "not here" if tier == "split" else tried(program, tier, entry)
sys.argv = ["manager", "up"]
runpy.run_module("manager", run_name="__main__")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Stack:
    """Survives the manager's crash: `start` again finds the same data directory, port and key."""

    def __init__(self, *, config: str = "", single: bool = False, **settings: str) -> None:
        """`single`: its pods are of the single tier also where root could have the other."""
        self.base = Path(tempfile.mkdtemp(prefix="sojourn-", dir="/var/tmp"))
        self.data = self.base / "data"
        self.log = self.base / "log"
        self.port = free_port()
        self._config = self.base / "config.toml"
        self._config.write_text(config)
        self._settings = settings
        self._program = ["-c", SINGLE_TIER] if single else ["-m", "manager", "up"]
        self._http: aiohttp.ClientSession | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SOJOURN_", "SANDBOX_"))}
        env |= {
            "PYTHONPATH": str(REPOSITORY),
            "SOJOURN_DATA_DIR": str(self.data),
            "SOJOURN_PORT": str(self.port),
            "SOJOURN_METRICS_PORT": "off",
            "SOJOURN_CONFIG": str(self._config),
            **self._settings,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self._program],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_SEC
        while not self._ready():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)
        return self

    def _ready(self) -> bool:
        """`up` leaves its address when all that it promised at the start is there."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                return bool(answer.status == 200) and (self.data / "address").exists()
        except (urllib.error.URLError, OSError):
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return (self.data / "api-key").read_text().strip()

    def end(self, number: int) -> int:
        """Sends the manager a signal; its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)

    def remove(self) -> None:
        """Ends everything, as Ctrl-C does; after a crash a new manager has to do it."""
        assert self.process is not None
        if self.process.poll() is not None and (self.data / "pods").exists():
            self.start()
        self.end(signal.SIGINT)
        shutil.rmtree(self.base, ignore_errors=True)

    def pods(self) -> set[str]:
        """Names of the pods that have a state directory."""
        directory = self.data / "pods"
        return {entry.name for entry in directory.iterdir() if entry.is_dir()} if directory.exists() else set()

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"X-Api-Key": self.key},
            timeout=aiohttp.ClientTimeout(total=120),
        )
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        await self._http.close()
        await asyncio.sleep(0)

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """(status, decoded JSON, or the bytes of anything else)."""
        async with self.http.request(method, self.url + path, **options) as answer:
            body = await answer.read()
            return answer.status, json.loads(body) if answer.content_type == "application/json" and body else body

    def task(self, task: str) -> str:
        return f"/sandbox/task/{quote(task, safe='')}"

    async def exec(self, task: str, command: str | list[str], *, key: str | None = None, **fields: Any) -> Any:
        headers = {"Idempotency-Key": key} if key is not None else {}
        body = {"command": command, **fields}
        status, answer = await self.call("POST", f"{self.task(task)}/exec", json=body, headers=headers)
        assert status == 200, answer
        return answer
