"""Other servers that run commands, beside ours in the same rounds: each unmodified, as its own makers ship it.

What comes from PyPI is installed once into an environment of its own under the user's cache directory, from the hashed
requirements in benchmarks/peers/; the Go server is built in each run. A peer that cannot be had here is absent, with
why, and never an error of the run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.harness.servers import (
    COMMAND_PATH,
    READY_SEC,
    ROOT,
    CannotMeasure,
    Target,
    Workshop,
    free_address,
    free_port,
    running,
    wait_until_ready,
)

PEERS_ROOT: Final = ROOT / "benchmarks" / "peers"
INSTALL_SEC: Final = 300.0
JSON_HEADER: Final = "Content-Type: application/json"


@contextmanager
def go_server(shop: Workshop) -> Iterator[Target]:
    """net/http and os/exec, benchmarks/peers/go/main.go. Raises CannotMeasure."""
    directory = shop.fresh("go")
    program = directory / "peer"
    _build_go(program)
    address = free_address(shop, directory)
    argv = [str(program), *address, "--files", str(shop.fresh("go", within=shop.memory))]
    with running(argv, {"PATH": COMMAND_PATH}, directory / "log") as process:
        target = Target(name="go", address=address, exec_path="/v1/exec", pid=process.pid, log=directory / "log")
        wait_until_ready(target, process, READY_SEC)
        yield target


@contextmanager
def swe_rex_server(shop: Workshop) -> Iterator[Target]:
    """SWE-ReX's `swerex-remote`. Raises CannotMeasure."""
    directory, token = shop.fresh("swe-rex"), secrets.token_hex(16)
    scripts = installed("swe-rex")
    port = str(free_port())
    argv = [str(scripts / "swerex-remote"), "--host", "127.0.0.1", "--port", port, "--auth-token", token]
    with running(argv, _env(directory), directory / "log") as process:
        target = Target(
            name="swe-rex", address=("--tcp", port), exec_path="/execute", health_path="/is_alive",
            headers=(f"X-API-Key: {token}",), pid=process.pid, log=directory / "log",
        )  # fmt: skip
        wait_until_ready(target, process, READY_SEC)
        yield target


@contextmanager
def agent_sandbox_server(shop: Workshop) -> Iterator[Target]:
    """Alibaba's Agent Sandbox: the service that its images start. Raises CannotMeasure."""
    directory = shop.fresh("agent-sandbox")
    scripts = installed("agent-sandbox-server")
    port = str(free_port())
    argv = [str(scripts / "agent-sandbox-server"), "serve", "--host", "127.0.0.1", "--port", port]
    argv += ["--pty-port", str(free_port())]
    with running(argv, _env(directory), directory / "log") as process:
        target = Target(
            name="agent-sandbox", address=("--tcp", port), exec_path="/shell", true_body='{"command": "true"}',
            true_expect='"exit_code": 0', health_path="/health", pid=process.pid, log=directory / "log",
        )  # fmt: skip
        wait_until_ready(target, process, READY_SEC)
        yield target


PEERS: Final[dict[str, Callable[[Workshop], AbstractContextManager[Target]]]] = {
    "go": go_server,
    "swe-rex": swe_rex_server,
    "agent-sandbox": agent_sandbox_server,
}


def _env(home: Path) -> dict[str, str]:
    return {"PATH": COMMAND_PATH, "HOME": str(home), "LANG": "C.UTF-8"}


def _build_go(program: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise CannotMeasure("go is not installed (https://go.dev/dl, or apt-get install golang-go)")
    env = dict(os.environ) | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "", "GOPROXY": "off"}
    _done([go, "build", "-o", str(program), "."], "go could not build the peer", cwd=PEERS_ROOT / "go", env=env)


def installed(name: str) -> Path:
    """The directory with the peer's programs, in an environment of its own. Raises CannotMeasure."""
    requirements = PEERS_ROOT / f"requirements-{name}.txt"
    version = ".".join(map(str, sys.version_info[:3]))
    key = hashlib.sha256(requirements.read_bytes() + sys.base_prefix.encode() + version.encode()).hexdigest()[:16]
    try:
        cache = cache_directory()
        where = cache / f"{name}-{key}"
        with (cache / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits for the first one's installation
            if not (where / "complete").exists():
                _install(where, requirements)
    except OSError as why:
        raise CannotMeasure(f"{name} could not be installed: {why}") from why
    return where / "bin"


def cache_directory() -> Path:
    """Where what takes long to make is kept between runs. Raises OSError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sojourn-bench"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _install(where: Path, requirements: Path) -> None:
    shutil.rmtree(where, ignore_errors=True)
    _done([sys.executable, "-m", "venv", str(where)], "an environment could not be made")
    _done(
        [str(where / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet",
         "--retries", "1", "--timeout", "20", "--require-hashes", "--only-binary", ":all:", "-r", str(requirements)],
        f"{requirements.name} could not be installed",
    )  # fmt: skip
    (where / "complete").touch()


def _done(argv: list[str], what: str, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    with tempfile.TemporaryFile() as output:
        try:
            ended = subprocess.run(
                argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=INSTALL_SEC,
                check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as why:
            raise CannotMeasure(f"{what}: {why}") from why
        if ended.returncode:
            output.seek(0)
            raise CannotMeasure(f"{what}: {output.read().decode(errors='replace').strip()[-600:]}")
