"""Between a command and its executor: every way to it, every place of a secret, every process (S1, S2, S3, S35)."""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from executor.app import routes_of
from tests.support.attacks import REFUSALS, attack_script
from tests.support.canaries import search_script
from tests.support.executor_pod import (
    DEFAULT_TIER,
    IS_ROOT,
    PYTHON,
    ExecutorProcess,
    Pod,
    Tier,
    UnreachablePython,
    connected,
    running_executor,
)
from tests.support.sessions import session_in
from tests.support.sockets import socket_at

pytestmark = [pytest.mark.timeout(120)]
FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]


def canary(what: str) -> str:
    return f"canary-{what}-{secrets.token_hex(12)}"


TOKEN, BOUND = canary("token"), canary("bound")


def tiers() -> list[Tier]:
    return ["split", "single"] if IS_ROOT else ["single"]


@pytest.fixture(scope="module", params=tiers())
def started(request: pytest.FixtureRequest) -> Iterator[ExecutorProcess]:
    try:
        with running_executor(request.param, token=TOKEN) as process:
            yield process
    except UnreachablePython as why:
        pytest.skip(str(why))


@pytest.fixture
async def pod(started: ExecutorProcess) -> AsyncIterator[Pod]:
    async with connected(started) as pod:
        yield pod


async def python(pod: Pod, script: str, **fields: Any) -> Any:
    """What the script prints, as a value. Long scripts go in as input."""
    answer = await pod.exec([PYTHON, "-"], stdin=script, timeout_sec=90, **fields)
    assert answer["exit_code"] == 0, answer
    return ast.literal_eval(answer["stdout"])


# ── S1: no call without the token, from whatever address ────────────────────────────────────────────────────────

ASK = """
import socket
def ask(address, method, path, more):
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    s = socket.socket(family)
    s.settimeout(30)
    try:
        s.connect(address)
        body = "" if method in ("GET", "HEAD") else "{}"
        head = f"{method} {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n"
        s.sendall((head + "".join(line + "\\r\\n" for line in more) + "Connection: close\\r\\n\\r\\n" + body).encode())
        answer = b""
        while data := s.recv(65536):
            answer += data
    finally:
        s.close()
    return answer
wrong, bodies = [], set()
for address in ADDRESSES:
    for method, path in ROUTES:
        for more in HEADERS:
            status = ask(address, method, path, more).split(b" ", 2)[1]
            if status != b"401":
                wrong.append((address, method, path, more, status))
    for path in ("/healthz", "/readyz"):
        head, _, body = ask(address, "GET", path, []).partition(b"\\r\\n\\r\\n")
        bodies.add((head.split(b" ", 2)[1], body))
print(repr((wrong, sorted(bodies))))
"""
HEADERS: list[list[str]] = [
    [],
    ["Authorization: Bearer wrong"],
    ["X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1", "Forwarded: for=127.0.0.1"],
    ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
     "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol: sojourn.v1"],
]  # fmt: skip


def closed_routes() -> list[tuple[str, str]]:
    """(method, path) of every call but the open ones, with values in the place of names."""
    found = []
    for route in routes_of(MagicMock()):
        path = re.sub(r"\{[a-z]+(:[^}]*)?\}", "1", route.path)
        methods = ("GET", "POST", "PUT", "DELETE", "PATCH") if route.method == "*" else (route.method,)
        if path not in ("/healthz", "/readyz"):
            found += [(method, path) for method in methods]
    return [
        *found,
        ("GET", "/"),
        ("POST", "/nothing/here"),
        ("GET", "/v1/files?path=x"),
        ("GET", "//healthz/../v1/exec"),
    ]


def own_addresses(family: socket.AddressFamily) -> list[str]:
    """Addresses of this machine beyond the loopback."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    return [one for one in found if (":" in one) == (family is socket.AF_INET6)]


@pytest.mark.parametrize("tier", tiers())
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_no_address_gives_a_command_a_way_in(fresh_executor: FreshExecutor, tier: Tier, host: str) -> None:
    """S1, AU01: each route of the table, from inside, without the token or with a wrong one."""
    env = {"SOJOURN_EXECUTOR_SOCKET": "", "SOJOURN_EXECUTOR_HOST": host, "SOJOURN_EXECUTOR_PORT": "0"}
    family = socket.AF_INET if host == "0.0.0.0" else socket.AF_INET6
    with running_executor(tier, env=env, token=TOKEN) as process:
        hosts = ["127.0.0.1" if family is socket.AF_INET else "::1", host, *own_addresses(family)]
        addresses: list[Any] = [(one, process.port) for one in hosts]
        async with connected(process) as pod:
            if family is socket.AF_INET6:
                pod.url = f"http://[::1]:{process.port}"
            routes = closed_routes()
            assert len(routes) > 40
            script = f"ADDRESSES, ROUTES, HEADERS = {addresses!r}, {routes!r}, {HEADERS!r}\n{ASK}"
            wrong, bodies = await python(pod, script)
            assert wrong == []
            assert bodies == [(b"200", b'{"status":"ok","message":null}')]


async def test_the_unix_socket_gives_a_command_no_way_in_either(pod: Pod) -> None:
    """S1: in the split tier it cannot even be reached; in the single one the token keeps it shut."""
    path = pod.process.socket
    script = f"ADDRESSES, ROUTES, HEADERS = {[path]!r}, {closed_routes()!r}, {HEADERS!r}\n{ASK}"
    if pod.process.tier == "split":
        answer = await pod.exec([PYTHON, "-"], stdin=script)
        assert "PermissionError" in answer["stderr"]
        return
    wrong, bodies = await python(pod, script)
    assert wrong == []
    assert bodies == [(b"200", b'{"status":"ok","message":null}')]


# ── S2: nothing to find ─────────────────────────────────────────────────────────────────────────────────────────


async def test_code_in_the_pod_finds_no_token_and_no_secret_anywhere(pod: Pod) -> None:
    """S2, AU03, AU07: /proc of every process, its memory, descriptors, the environment, files, sockets."""
    digest = pod.call("GET", "/v1/lease", token=canary("guessed"))
    assert (await digest).code == "unauthenticated"
    async with session_in(pod) as session:  # long-lived neighbours, whose memory can be looked into
        await session.said("sleep 60 & true")
        id = await pod.start("sleep 60")
        await pod.call("PUT", "/v1/files?path=some/file", b"content")
        places = [str(pod.workspace.parent), "/run", "/dev/shm", "/etc"]
        sockets = (str(Path(pod.process.socket).parent), "@sojourn")
        found = await python(pod, search_script([TOKEN], places, sockets=sockets))
        await pod.call("DELETE", f"/v1/processes/{id}")
    assert found["hits"] == []
    assert found["fds"] == []
    looked = found["looked"]
    assert looked["cmdline"] > 3
    assert looked["mem"] >= 1, "memory of the neighbours was there to be read"
    assert looked["file"] > 20
    assert set(found["sockets"].values()) <= ({"PermissionError"} if pod.process.tier == "split" else {"401"})


async def test_the_search_finds_what_is_there_to_be_found(pod: Pod) -> None:
    """So that an empty result means something."""
    needle = canary("planted")
    (pod.workspace / "planted").write_text(needle)
    id = await pod.start(["sh", "-c", "sleep 60; :", needle])
    found = await python(pod, search_script([needle], [str(pod.workspace)]), env={"PLANTED": needle})
    await pod.call("DELETE", f"/v1/processes/{id}")
    (pod.workspace / "planted").unlink()
    pid = next(hit for hit in found["hits"] if hit.endswith("/mem"))
    assert {"environment", str(pod.workspace / "planted"), pid, pid.replace("mem", "cmdline")} <= set(found["hits"])


async def test_a_bound_secret_reaches_commands_and_nothing_that_we_say(fresh_executor: FreshExecutor) -> None:
    """S2, S32: answers, errors, figures, listings and the log."""
    said: list[str] = []
    with fresh_executor(DEFAULT_TIER, token=TOKEN) as process:
        async with connected(process) as pod:

            async def call(method: str, path: str, body: Any = None, **more: Any) -> Any:
                reply = await pod.call(method, path, body, **more)
                said.append(f"{reply.headers!r} {reply.body!r}")
                return reply

            bind = {"sandbox_id": "s", "task_id": "t", "secrets": {"MY_KEY": BOUND}, "env": {"PLAIN": "seen"}}
            await call("POST", "/v1/bind", {**bind, "secrets": {"MY=KEY": BOUND}})
            await call("POST", "/v1/bind", {**bind, "secrets": {"MY_KEY": [BOUND]}})
            await call("POST", "/v1/bind", json.dumps(bind).encode()[:-1])
            assert (await call("POST", "/v1/bind", bind)).status == 200
            assert (await call("POST", "/v1/bind", bind)).status == 200
            assert (await call("POST", "/v1/bind", {**bind, "sandbox_id": "other"})).status == 409
            told = await pod.exec('test "$MY_KEY" = "$WANTED" && echo same', env={"WANTED": BOUND})
            assert told["stdout"] == "same\n"
            said.append(repr(told))
            await pod.start("sleep 60", id="p", env={"ALSO": BOUND})
            made = await call("POST", "/v1/sessions", {"id": "s", "env": {"ALSO": BOUND}})
            assert made.status == 201
            await call("POST", "/v1/terminals", {"id": "t", "command": "sleep 60", "env": {"ALSO": BOUND}})
            await call("POST", "/v1/exec", {"command": "true", "env": {"A=B": BOUND}})
            await call("POST", "/v1/exec", {"command": ["no-such-program"], "env": {"A": BOUND}})
            await call("POST", "/v1/exec", {"command": "true", "env": {"A": BOUND + "\0"}})
            for route in routes_of(MagicMock()):
                if route.method == "GET" and "watch" not in route.path and "stream" not in route.path:
                    await call("GET", re.sub(r"\{[a-z]+(:[^}]*)?\}", "p", route.path))
                    await call("GET", re.sub(r"\{[a-z]+(:[^}]*)?\}", "p", route.path), token=TOKEN + "x")
            for path in ("/v1/sessions/s", "/v1/terminals/t", "/v1/processes/p/output?stream=stdout"):
                await call("GET", path)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with socket_at(pod.session, f"{pod.url}/v1/exec", headers) as ws:
                await ws.start("true", env={"A=B": BOUND})
                await ws.to_end()
                said.append(repr(ws.events))
        log = process.log_text()
    assert len(said) > 40
    for secret in (TOKEN, BOUND):
        assert not [text for text in said if secret in text]
        assert secret not in log
    assert "executor_ready" in log


async def test_what_the_executor_was_told_is_closed_to_commands_and_no_core_is_written(pod: Pod) -> None:
    """S2: its first environment has the token's hash, which gives nothing, and is closed all the same."""
    for name in ("environ", "mem", "maps", "auxv", "stack", "io"):
        answer = await pod.exec(["head", "-c", "1", f"/proc/{pod.pid}/{name}"])
        assert (answer["exit_code"], answer["stdout"]) == (1, ""), name
    assert os.stat(f"/proc/{pod.pid}/environ").st_uid == 0  # as of what may not be dumped
    with open(f"/proc/{pod.pid}/limits") as limits:
        core = next(line for line in limits if line.startswith("Max core file size"))
    assert core.split()[4] == "0"


# ── S3: every process that a command can see ────────────────────────────────────────────────────────────────────


async def test_a_command_can_neither_trace_nor_read_nor_write_executor_helper_or_first_process(pod: Pod) -> None:
    """S3: in both tiers, as neither may be dumped."""
    helpers = [pid for pid in pod.process.descendants() if b"spawn_helper" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert helpers
    pids = {"executor": pod.pid, "helper": helpers[0]} | ({"first": 1} if IS_ROOT else {})
    found = await python(pod, attack_script(pids))
    for name, tried in found.items():
        assert set(tried.values()) <= REFUSALS, (name, tried)
    assert (await pod.exec(["true"]))["exit_code"] == 0


@pytest.mark.skipif(not IS_ROOT, reason="two users need root")
async def test_in_the_split_tier_a_command_cannot_signal_or_slow_executor_and_first_process_either(
    fresh_executor: FreshExecutor,
) -> None:
    """S3. The single tier shares its user with the executor, which a command there can end, and with it its own pod."""
    with fresh_executor("split") as process:
        async with connected(process) as pod:
            pids = {"executor": pod.pid, "first": 1}
            found = await python(pod, attack_script(pids, signalled=tuple(pids)))
            for name, tried in found.items():
                assert len(tried) == 15
                assert set(tried.values()) <= REFUSALS, (name, tried)
            assert (await pod.exec(["true"]))["exit_code"] == 0


# ── S35: what it stands on ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_laxer_parser_cannot_be_asked_for(fresh_executor: FreshExecutor) -> None:
    """S35: the setting is taken away with a warning, and requests are parsed in C."""
    with fresh_executor(DEFAULT_TIER, env={"AIOHTTP_NO_EXTENSIONS": "1"}) as process:
        async with connected(process) as pod:
            assert (await pod.call("GET", "/v1/files/list?path=.")).status == 200
            assert (await pod.exec("echo ${AIOHTTP_NO_EXTENSIONS-unset}"))["stdout"] == "unset\n"
        assert "/_http_parser." in Path(f"/proc/{process.pid}/maps").read_text()
        warned = [line for line in process.log_text().splitlines() if "AIOHTTP_NO_EXTENSIONS" in line]
    assert len(warned) == 1
    assert json.loads(warned[0])["level"] == "warning"
