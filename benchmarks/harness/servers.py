"""What is measured, started and ended: the C floor, an executor, a whole manager stack.

Each server is a context manager that yields a Target once it answers, and ends the processes it started, only those,
on every way out. The floor and the load client are compiled anew for each run.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ROOT / "benchmarks" / "floor"
READY_SEC: Final = 30.0
STACK_READY_SEC: Final = 120.0  # the first `up` may set up a store and a first pod
END_SEC: Final = 15.0
MEMORY_ROOT: Final = "/dev/shm"
MEMORY_BYTES: Final = 4 << 30
COMMAND_PATH: Final = "/usr/local/bin:/usr/bin:/bin"  # the same search for the floor's commands and the executor's

TRUE_BODY: Final = '{"command": ["true"]}'
EXEC_OK: Final = '"exit_code":0'

Transport = Literal["tcp", "unix"]


class CannotMeasure(Exception):
    """Something that the benchmark needs is missing or did not start; the message says what and what to do."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that answers, and how the load client reaches it."""

    name: str
    address: tuple[str, str]  # the load client's option and value: ("--tcp", "8080") or ("--unix", "/run/x")
    exec_path: str
    true_body: str = TRUE_BODY  # what runs `true`, and what a right answer to it holds
    true_expect: str = EXEC_OK
    health_path: str = "/healthz"
    files_path: str = "/v1/files"
    sessions_path: str = "/v1/sessions"
    headers: tuple[str, ...] = ()
    pid: int = 0
    log: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CommandUser:
    name: str
    uid: int
    gid: int


@dataclass(kw_only=True)
class Workshop:
    """A temporary directory with the compiled tools, and whom commands run as (None: as ourselves, nobody else can)."""

    directory: Path
    memory: Path  # likewise, on a file system in memory where there is one with room: files must not wait for a disk
    user: CommandUser | None
    transport: Transport
    _turn: int = field(default=0)

    @property
    def floor(self) -> Path:
        return self.directory / "floor"

    @property
    def load(self) -> Path:
        return self.directory / "load"

    @property
    def tier(self) -> str:
        return "split" if self.user is not None else "single"

    def fresh(self, name: str, mode: int = 0o700, *, within: Path | None = None) -> Path:
        """An empty directory; 0711 where the command user has to pass through."""
        self._turn += 1
        path = (within or self.directory) / f"{name}{self._turn}"
        path.mkdir()
        path.chmod(mode)
        return path


@contextmanager
def workshop(transport: Transport) -> Iterator[Workshop]:
    """Raises CannotMeasure where there is no C compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise CannotMeasure("the floor and the load client are C: install a compiler (apt-get install gcc libc6-dev)")
    with (
        tempfile.TemporaryDirectory(prefix="sojourn-bench-", ignore_cleanup_errors=True) as name,
        tempfile.TemporaryDirectory(prefix="sojourn-bench-", dir=_memory(), ignore_cleanup_errors=True) as other,
    ):
        directory, memory = Path(name), Path(other)
        for path in (directory, memory):
            path.chmod(0o711)
        for tool in ("floor", "load"):
            built = subprocess.run(
                [compiler, "-O2", "-o", str(directory / tool), str(SOURCES / f"{tool}.c")],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            if built.returncode:
                raise CannotMeasure(f"{compiler} could not build {tool}.c:\n{built.stderr}")
        yield Workshop(directory=directory, memory=memory, user=command_user(), transport=transport)


def _memory() -> str | None:
    """A directory in memory with room for the files of all servers; None for the usual one."""
    try:
        free = os.statvfs(MEMORY_ROOT)
    except OSError:
        return None
    return MEMORY_ROOT if free.f_bavail * free.f_frsize > MEMORY_BYTES and os.access(MEMORY_ROOT, os.W_OK) else None


def command_user() -> CommandUser | None:
    """As root the user `sandbox`, or `nobody` where there is none; None as anybody else."""
    if os.geteuid() != 0:
        return None
    for name in ("sandbox", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return CommandUser(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise CannotMeasure("there is neither a user `sandbox` nor `nobody` for commands to run as")


@contextmanager
def floor_server(shop: Workshop, *, helpers: int = 1) -> Iterator[Target]:
    directory = shop.fresh("floor")
    address = free_address(shop, directory)
    argv = [str(shop.floor), *address, "--helpers", str(helpers)]
    argv += ["--files", str(shop.fresh("files", within=shop.memory))]
    if shop.user is not None:
        argv += ["--user", f"{shop.user.uid}:{shop.user.gid}"]
    name = "floor" if helpers == 1 else f"floor-x{helpers}"
    with running(argv, {"PATH": COMMAND_PATH}, directory / "log") as process:
        target = Target(name=name, address=address, exec_path="/v1/exec", pid=process.pid, log=directory / "log")
        wait_until_ready(target, process, READY_SEC)
        yield target


def executor_argv(python: str = sys.executable) -> list[str]:
    """How to start the executor with nothing of the caller's environment; from the source tree where not installed."""
    look = "import importlib.util as u, sys; s = u.find_spec('executor.wire'); sys.stdout.write(s.origin if s else '')"
    try:
        looked = subprocess.run([python, "-I", "-c", look], capture_output=True, text=True, timeout=60, check=False)
    except OSError as why:
        raise CannotMeasure(f"{python} cannot be run: {why}") from why
    found = looked.stdout
    if found and Path(found).resolve().parents[1] == ROOT:
        return [python, "-I", "-m", "executor"]
    start = f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module('executor', run_name='__main__')"
    return [python, "-I", "-c", start]


@contextmanager
def executor_server(shop: Workshop, argv: list[str], *, ready: bool = True) -> Iterator[Target]:
    """`ready` false: yields at once after the start, for whoever measures how long it takes."""
    directory, workspace = shop.fresh("exec"), shop.fresh("work", 0o755, within=shop.memory)
    address = free_address(shop, directory)
    token = secrets.token_hex(16)
    env = {
        "PATH": COMMAND_PATH,
        "SOJOURN_POD_TOKEN_SHA256": hashlib.sha256(token.encode()).hexdigest(),
        "SOJOURN_WORKSPACE": str(workspace),
    }
    if shop.user is not None:
        env["SOJOURN_COMMAND_USER"] = shop.user.name
        os.chown(workspace, shop.user.uid, shop.user.gid)
    if address[0] == "--unix":
        env["SOJOURN_EXECUTOR_SOCKET"] = address[1]
    else:
        env |= {"SOJOURN_EXECUTOR_HOST": "127.0.0.1", "SOJOURN_EXECUTOR_PORT": address[1]}
    with running(argv, env, directory / "log") as process:
        target = Target(
            name="executor", address=address, exec_path="/v1/exec", headers=(f"Authorization: Bearer {token}",),
            pid=process.pid, log=directory / "log",
        )  # fmt: skip
        if ready:
            wait_until_ready(target, process, READY_SEC)
        yield target


# The same machine for the pod as for the executor that is called directly, and room for 1,000 shells and their sleeps.
PROFILE: Final = """\
[[profiles]]
name = "sandboxes-default"
cpu = {cores}
memory = "4Gi"
pids = 8192
pool = {{ min = 1, max = 4 }}
"""


def stack_env(directory: Path, port: str, **settings: str) -> dict[str, str]:
    """The environment of `manager up` with its files in the directory, its data in `data` there."""
    config = directory / "config.toml"
    config.write_text(PROFILE.format(cores=len(os.sched_getaffinity(0))))
    return dict(os.environ) | {
        "SOJOURN_CONFIG": str(config), "SOJOURN_DATA_DIR": str(directory / "data"), "SOJOURN_PORT": port,
        "SOJOURN_METRICS_PORT": "off",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        **settings,
    }  # fmt: skip


@contextmanager
def manager_server(shop: Workshop, python: str = sys.executable) -> Iterator[Target]:
    """The whole stack of `up` on a free port in a data directory of its own. Raises CannotMeasure."""
    directory = shop.fresh("up", 0o711)
    data, log, port = directory / "data", directory / "log", str(free_port())
    env = stack_env(directory, port)
    with running([python, "-m", "manager", "up"], env, log, end=signal.SIGINT) as process:
        bare = Target(name="manager", address=("--tcp", port), exec_path="", pid=process.pid, log=log)
        wait_until_ready(bare, process, STACK_READY_SEC)
        key = _key_of(data / "api-key")
        target = Target(
            name="manager", address=bare.address, exec_path="/sandbox/task/bench/exec",
            files_path="/sandbox/task/bench/files", sessions_path="/sandbox/task/bench/sessions",
            headers=(f"X-Api-Key: {key}",), pid=process.pid, log=log,
        )  # fmt: skip
        provision(target)
        yield target


def _key_of(file: Path) -> str:
    """The development key, which a starting stack writes after it began to answer. Raises CannotMeasure."""
    give_up = time.monotonic() + READY_SEC
    while True:
        key = file.read_text().strip() if file.exists() else ""
        if key:
            return key
        if time.monotonic() > give_up:
            raise CannotMeasure(f"the manager left no API key in {file.name} of its data directory")
        time.sleep(0.01)


def provision(target: Target) -> None:
    """The task's first command, so that what is measured is the bound case."""
    give_up = time.monotonic() + STACK_READY_SEC
    while True:
        status, body = request(target, "POST", target.exec_path, '{"command": ["true"]}')
        if status == 200:
            return
        if time.monotonic() > give_up or not 500 <= status < 600:
            raise CannotMeasure(f"the manager answered {status} to the first command: {body[:400]}")
        time.sleep(0.2)


def request(target: Target, method: str, path: str, body: str = "", timeout_sec: float = 60.0) -> tuple[int, str]:
    """(status, body) of one call on a connection of its own. Raises OSError, HTTPException."""
    connection = HTTPConnection("127.0.0.1", timeout=timeout_sec)
    connection.sock = _connected(target, timeout_sec)
    try:
        connection.putrequest(method, path)
        for header in target.headers:
            name, _, value = header.partition(": ")
            connection.putheader(name, value)
        if body:
            connection.putheader("Content-Type", "application/json")
        if body or method != "GET":  # as probes and clients do
            connection.putheader("Content-Length", str(len(body.encode())))
        connection.endheaders(body.encode())
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


def wait_until_ready(target: Target, process: subprocess.Popen[bytes] | None, limit_sec: float) -> None:
    """Returns at the first 200 of its health check. Raises CannotMeasure with the end of the log."""
    give_up = time.monotonic() + limit_sec
    while True:
        try:
            if request(target, "GET", target.health_path, timeout_sec=5)[0] == 200:
                return
        except (OSError, HTTPException):
            pass
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > give_up:
            tail = target.log.read_text(errors="replace")[-1500:] if target.log and target.log.exists() else ""
            how = f"ended with {process.returncode}" if process is not None and ended else f"no answer in {limit_sec} s"
            raise CannotMeasure(f"{target.name} did not start ({how}):\n{tail}")
        time.sleep(0.001)


def _connected(target: Target, timeout_sec: float) -> socket.socket:
    option, value = target.address
    if option == "--tcp":
        return socket.create_connection(("127.0.0.1", int(value)), timeout_sec)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_sec)
    try:
        sock.connect(value)
    except BaseException:
        sock.close()
        raise
    return sock


def free_address(shop: Workshop, directory: Path) -> tuple[str, str]:
    return ("--unix", str(directory / "s")) if shop.transport == "unix" else ("--tcp", str(free_port()))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(
    argv: list[str], env: dict[str, str], log: Path, end: signal.Signals = signal.SIGTERM
) -> Iterator[subprocess.Popen[bytes]]:
    """A server until the block ends, its output in `log`."""
    with log.open("wb") as file:
        # A session of its own: Ctrl-C at the terminal reaches us alone, and we end the servers in order.
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/", start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(end)
        try:
            process.wait(END_SEC)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_SEC)
