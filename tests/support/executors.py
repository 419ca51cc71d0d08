"""A real executor as its users run it: a process of its own on a Unix socket, in one of the two tiers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

TOKEN = "canary-token-b7Qx2"
IS_ROOT = os.geteuid() == 0
REPOSITORY = Path(__file__).parents[2]
# `-I` hides the working directory, so a tree that is not installed is put in front by hand.
START = f"import sys, runpy; sys.path.insert(0, {str(REPOSITORY)!r}); runpy.run_module('executor', run_name='__main__')"


class Executor:
    """`tier` "split" needs root; "single" as root is run as an unprivileged user."""

    def __init__(self, *, tier: str | None = None, umask: int = 0o022, **settings: str) -> None:
        self.tier = tier or ("split" if IS_ROOT else "single")
        self.base = Path(tempfile.mkdtemp(prefix="sojourn-", dir="/var/tmp"))
        self.base.chmod(0o755)
        self.workspace = self.base / "workspace"
        self.private = self.base / "private"
        self.address = f"{self.private}/executor.sock"
        self.log = self.base / "log"
        self.user = pwd.getpwnam("nobody") if IS_ROOT else pwd.getpwuid(os.geteuid())
        self._settings = settings
        self._umask = umask
        self._http: aiohttp.ClientSession | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        self.private.mkdir(mode=0o700, exist_ok=True)
        self.workspace.mkdir(exist_ok=True)
        if IS_ROOT:
            os.chown(self.workspace, self.user.pw_uid, self.user.pw_gid)
            if self.tier == "single":
                os.chown(self.private, self.user.pw_uid, self.user.pw_gid)
        env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "SOJOURN_POD_NAME": "pod-1",
            "SOJOURN_POD_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            "SOJOURN_EXECUTOR_SOCKET": self.address,
            "SOJOURN_WORKSPACE": str(self.workspace),
            **({"SOJOURN_COMMAND_USER": self.user.pw_name} if self.tier == "split" else {}),
            **self._settings,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._as_single(), sys.executable, "-I", "-c", START],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=self._umask,
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return self

    def _as_single(self) -> list[str]:
        """As root: becomes the unprivileged user, for whom an interpreter or tree under a closed home is opened."""
        if not IS_ROOT or self.tier != "single":
            return []
        script = "set -e\n"
        for number, path in enumerate(sorted({sys.base_prefix, sys.prefix, str(REPOSITORY)})):
            script += f"mkdir -p {self.base}/m{number}; mount --rbind {path} {self.base}/m{number}\n"
            script += f'mounted="$mounted {number}:{path}"\n'
        script += "for home in /root /home; do mount -t tmpfs -o mode=755 none $home; done\n"
        script += (
            f"for one in $mounted; do mkdir -p ${{one#*:}}; mount --rbind {self.base}/m${{one%%:*}} ${{one#*:}}; done\n"
        )
        script += 'exec setpriv --reuid="$0" --regid="$1" --clear-groups "${@:2}"'
        return ["unshare", "--mount", "bash", "-c", script, str(self.user.pw_uid), str(self.user.pw_gid)]

    def _answers(self) -> bool:

        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.address)
            except OSError:
                return False
        return True

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Its exit code, once it has ended."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)

    def remove(self) -> None:
        self.kill(signal.SIGTERM)
        shutil.rmtree(self.base, ignore_errors=True)

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self.address, limit=0),
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=aiohttp.ClientTimeout(total=60),
        )
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        await self._http.close()
        await asyncio.sleep(0)  # the connections are closed in the loop's next turn only

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """(status, decoded JSON or None)."""
        async with self.http.request(method, f"http://pod{path}", **options) as answer:
            body = await answer.read()
            return answer.status, await answer.json() if answer.content_type == "application/json" and body else None

    async def exec(self, command: str | list[str], **fields: Any) -> Any:
        status, answer = await self.call("POST", "/v1/exec", json={"command": command, **fields})
        assert status == 200, answer
        return answer


def processes_with(text: str) -> list[int]:
    """The pids of living processes with `text` in their command line."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if text.encode() in line and state not in "ZX":
                found.append(int(name))
    return found


async def until(condition: Any, seconds: float = 20.0) -> None:
    """Waits for `condition()` to be true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.02)
