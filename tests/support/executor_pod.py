"""A real executor in a process of its own, and a client that speaks to it as the manager would.

The process's files: `area` belongs to the command user and holds the workspace, `private` belongs to the executor's
user and holds its socket. Both lie under the system's temporary directory, which every user may pass through.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp

from executor.wire import FRAMES_TYPE, Exit, FrameEvent, FrameReader, OutputFrame, decode_frame

ROOT: Final = Path(__file__).resolve().parents[2]
IS_ROOT: Final = os.geteuid() == 0
READY_SEC: Final = 60.0
LONG_SEC: Final = 60.0  # for what takes moments on an idle machine
Tier = Literal["split", "single"]
DEFAULT_TIER: Final[Tier] = "split" if IS_ROOT else "single"

COMMAND_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
PYTHON: Final = shutil.which("python3", path=COMMAND_PATH) or sys.executable  # for commands
PATHS: Final = [str(ROOT), sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
START: Final = f"import sys, runpy; sys.path[:0] = {PATHS!r}; runpy.run_module('executor', run_name='__main__')"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The error's code; "" where it is no error of ours."""
        try:
            return str(self.json["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return ""


@dataclass(frozen=True, kw_only=True)
class ExecutorProcess:
    """A running executor and where its things are. `user` is whom commands run as."""

    process: subprocess.Popen[bytes]
    tier: Tier
    socket: str  # empty where it listens on TCP
    token: str
    workspace: Path
    log: Path
    user: pwd.struct_passwd

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        """Of TCP, out of its log."""
        return int(re.findall(r'"executor_ready", "where": "[^"]*:(\d+)"', self.log_text())[0])

    def log_text(self, since: int = 0) -> str:
        """The log, from that many bytes on."""
        return self.log.read_bytes()[since:].decode(errors="replace")

    def descendants(self) -> dict[int, str]:
        """pid -> state letter of all that the executor started and what these started, zombies included."""
        return descendants_of(self.pid)

    def status_kib(self, field: str) -> int:
        """A size out of /proc/PID/status, such as VmRSS."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
        raise AssertionError(f"/proc has no {field}")

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def command_account(tier: Tier) -> pwd.struct_passwd:
    """Whom commands run as: an unprivileged account as root, else ourselves.

    The tiers have different ones: what a command of one does to all that its user runs must not end the other."""
    if not IS_ROOT:
        return pwd.getpwuid(os.geteuid())
    for name in ("sandbox", "nobody") if tier == "split" else ("games", "daemon"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError(f"no unprivileged account for the {tier} tier")


class UnreachablePython(Exception):
    """No interpreter that can run our dependencies may be started by an unprivileged user of this machine."""


@functools.cache
def python_for(uid: int, gid: int) -> str:
    """An interpreter that this user can start: ours may lie in a directory that only root may enter. Raises
    UnreachablePython."""
    same = f"python{sys.version_info.major}.{sys.version_info.minor}"  # else our extension modules do not load
    for python in (sys.executable, shutil.which(same, path=COMMAND_PATH)):
        probe = f"import sys; sys.path[:0] = {PATHS!r}; import aiohttp, uvloop, executor.wire"
        with contextlib.suppress(OSError):
            if python and not subprocess.run(
                [python, "-I", "-c", probe], user=uid, group=gid, extra_groups=[], capture_output=True, cwd="/",
                timeout=60, check=False,
            ).returncode:  # fmt: skip
                return python
    raise UnreachablePython(f"{sys.executable} and what it imports are closed to uid {uid}, and there is no {same}")


@contextlib.contextmanager
def running_executor(
    tier: Tier = DEFAULT_TIER,
    *,
    env: dict[str, str] | None = None,
    umask: int | None = None,
    prefix: tuple[str, ...] = (),
    token: str | None = None,
) -> Iterator[ExecutorProcess]:
    """Starts an executor with a workspace of its own and ends it, with all it started, on the way out.

    `prefix` goes before the command line: a program that sets something up and then runs the rest of its arguments.
    With SOJOURN_EXECUTOR_SOCKET empty in `env` it listens on TCP."""
    user, token = command_account(tier), token or secrets.token_hex(16)
    directory = Path(tempfile.mkdtemp(prefix="sojourn-test-"))
    directory.chmod(0o711)
    private, area, log = directory / "private", directory / "area", directory / "log"
    workspace = area / "workspace"
    for path, mode in ((private, 0o700), (area, 0o755), (workspace, 0o755)):
        path.mkdir(mode=mode)
        path.chmod(mode)
    if IS_ROOT:
        for path in (area, workspace, *((private,) if tier == "single" else ())):
            os.chown(path, user.pw_uid, user.pw_gid)
    settings = {
        "PATH": COMMAND_PATH,
        "SOJOURN_POD_TOKEN_SHA256": hashlib.sha256(token.encode()).hexdigest(),
        "SOJOURN_EXECUTOR_SOCKET": str(private / "s"),
        "SOJOURN_WORKSPACE": str(workspace),
        **(env or {}),
    }
    become: dict[str, Any] = {}
    if IS_ROOT and tier == "split":
        settings.setdefault("SOJOURN_COMMAND_USER", user.pw_name)
    elif IS_ROOT:
        become = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    python = python_for(user.pw_uid, user.pw_gid) if become else sys.executable
    argv = [*prefix, python, "-I", "-c", START]
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                argv, env=settings, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/",
                start_new_session=True, umask=-1 if umask is None else umask, **become,
            )  # fmt: skip
        try:
            pod = ExecutorProcess(
                process=process, tier=tier, socket=settings["SOJOURN_EXECUTOR_SOCKET"], token=token,
                workspace=workspace, log=log, user=user,
            )  # fmt: skip
            _wait_until_listening(pod)
            yield pod
        finally:
            _end(process)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_listening(pod: ExecutorProcess) -> None:
    give_up = time.monotonic() + READY_SEC
    while True:
        if "executor_ready" in pod.log_text():
            return
        if pod.process.poll() is not None or time.monotonic() > give_up:
            raise AssertionError(f"the executor did not start ({pod.process.returncode}):\n{pod.log_text()[-3000:]}")
        time.sleep(0.01)


def _end(process: subprocess.Popen[bytes]) -> None:
    left = descendants_of(process.pid)
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)
    for pid in left:  # what a failed test made the executor leave behind
        if _is_running(pid, left[pid]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _is_running(pid: int, _state: str) -> bool:
    found = _stat(pid)
    return found is not None and found[0] not in "ZX"


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, parent) of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[1])


def descendants_of(pid: int) -> dict[int, str]:
    everything = {int(name): found for name in os.listdir("/proc") if name.isdigit() and (found := _stat(int(name)))}
    wanted, got = [pid], dict[int, str]()
    for parent in wanted:
        for child, (state, its_parent) in everything.items():
            if its_parent == parent and child not in got:
                got[child] = state
                wanted.append(child)
    return got


def processes_with(text: str) -> list[int]:
    """Living processes whose command line holds `text`."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if text.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


async def until(condition: Callable[[], bool], what: str, limit_sec: float = LONG_SEC) -> None:
    """Waits for the condition; fails with `what` when it does not come true in time."""
    give_up = time.monotonic() + limit_sec
    while not condition():
        assert time.monotonic() < give_up, f"not within {limit_sec:.0f} s: {what}"
        await asyncio.sleep(0.02)


class Pod:
    """An ExecutorProcess with a client session."""

    def __init__(self, process: ExecutorProcess, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.session = session
        self.url = "http://pod"
        self.token = process.token
        self.pid = process.pid
        self.log = process.log
        self.workspace = process.workspace
        self.user = process.user

    async def call(self, method: str, path: str, body: Any = None, *, token: str | None = None, **more: Any) -> Reply:
        """Any call. `body` is sent as JSON, or as it is where it is bytes; `token` "" sends none."""
        headers = dict(more.pop("headers", {}))
        token = self.token if token is None else token
        if token:
            headers.setdefault("Authorization", f"Bearer {token}")
        if body is not None:
            more["data"] = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.request(method, self.url + path, headers=headers, **more) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def exec(self, command: str | list[str], **fields: Any) -> dict[str, Any]:
        """Runs and waits; fails where the answer is not 200."""
        reply = await self.call("POST", "/v1/exec", {"command": command, **fields})
        assert reply.status == 200, reply.body
        result: dict[str, Any] = reply.json
        return result

    async def start(self, command: str | list[str], **fields: Any) -> str:
        """Starts in the background; the process's id."""
        reply = await self.call("POST", "/v1/processes", {"command": command, **fields})
        assert reply.status == 201, reply.body
        return str(reply.json["id"])

    async def info(self, id: str) -> dict[str, Any]:
        reply = await self.call("GET", f"/v1/processes/{id}")
        assert reply.status == 200, reply.body
        found: dict[str, Any] = reply.json
        return found

    async def ended(self, id: str, limit_sec: float = LONG_SEC) -> dict[str, Any]:
        """The process's state once it has ended."""
        reply = await self.call("GET", f"/v1/processes/{id}?wait_sec={limit_sec:.0f}")
        assert reply.status == 200, reply.body
        found: dict[str, Any] = reply.json
        assert found["state"] == "ended", found
        return found

    async def output(self, id: str, stream: str = "stdout", offset: int = 0, **query: Any) -> Reply:
        more = "".join(f"&{name}={value}" for name, value in query.items())
        return await self.call("GET", f"/v1/processes/{id}/output?stream={stream}&offset={offset}{more}")

    def open_stream(
        self, command: str | list[str], accept: str = FRAMES_TYPE, *, path: str = "/v1/exec", **fields: Any
    ) -> Any:
        """The answer as it comes, to be used with `async with`."""
        return self.session.post(
            self.url + path, data=json.dumps({"command": command, **fields}).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Accept": accept},
        )  # fmt: skip

    async def stream(self, command: str | list[str], **fields: Any) -> Streamed:
        """All of a streamed command; fails where it does not end with an exit."""
        async with self.open_stream(command, **fields) as answer:
            assert answer.status == 200, await answer.read()
            got = Streamed()
            async for event in frames_of(answer):
                got.add(event)
        assert got.exit is not None, "the stream ended without an exit event"
        return got


class Streamed:
    """What came over a stream, put together."""

    def __init__(self) -> None:
        self.out = {"stdout": bytearray(), "stderr": bytearray()}
        self.exit: Exit | None = None
        self.events: list[str] = []

    def add(self, event: FrameEvent) -> None:
        assert self.exit is None, "an event after the exit"
        self.events.append(type(event).__name__)
        if isinstance(event, OutputFrame):
            assert event.offset == len(self.out[event.stream]), "output is missing or comes twice"
            self.out[event.stream] += event.data
        elif isinstance(event, Exit):
            self.exit = event

    @property
    def stdout(self) -> bytes:
        return bytes(self.out["stdout"])

    @property
    def stderr(self) -> bytes:
        return bytes(self.out["stderr"])


async def frames_of(answer: aiohttp.ClientResponse) -> AsyncIterator[FrameEvent]:
    reader = FrameReader()
    async for data in answer.content.iter_any():
        for kind, payload in reader.feed(data):
            event = decode_frame(kind, payload)
            if event is not None:
                yield event
    assert not reader.pending, "the stream was cut within a frame"


@contextlib.asynccontextmanager
async def connected(process: ExecutorProcess, connections: int = 0) -> AsyncIterator[Pod]:
    """`connections` 0: as many as are needed."""
    connector: aiohttp.BaseConnector
    if process.socket:
        connector = aiohttp.UnixConnector(process.socket, limit=connections)
    else:
        connector = aiohttp.TCPConnector(limit=connections)
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        pod = Pod(process, session)
        if not process.socket:
            pod.url = f"http://127.0.0.1:{process.port}"
        yield pod
