"""Cases of *Who may call*, against a running executor."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.executor_pod import PYTHON, ExecutorProcess, Pod, connected, running_executor
from tests.support.streams import connection

FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]

CALLS = [
    ("POST", "/v1/bind"), ("POST", "/v1/exec"), ("GET", "/v1/exec"), ("POST", "/v1/processes"),
    ("GET", "/v1/processes"), ("GET", "/v1/processes/x"), ("DELETE", "/v1/processes/x"),
    ("GET", "/v1/processes/x/output"), ("POST", "/v1/terminals"), ("GET", "/v1/terminals"), ("GET", "/v1/terminals/x"),
    ("DELETE", "/v1/terminals/x"),
    ("POST", "/v1/processes/x/stdin"), ("POST", "/v1/processes/x/stdin/close"), ("POST", "/v1/processes/x/signal"),
    ("GET", "/v1/files?path=x"), ("HEAD", "/v1/files?path=x"), ("PUT", "/v1/files?path=x"),
    ("DELETE", "/v1/files?path=x"), ("GET", "/v1/files/stat?path=x"), ("GET", "/v1/files/list?path=x"),
    ("POST", "/v1/files/mkdir"),
    ("POST", "/v1/files/move"), ("GET", "/v1/usage"), ("GET", "/metrics"), ("GET", "/v1/lease"), ("POST", "/v1/lease"),
    ("GET", "/"), ("GET", "/no/such/path"), ("OPTIONS", "/v1/exec"), ("TRACE", "/v1/exec"),
    ("POST", "/healthz/../v1/exec"),    ("GET", "//healthz"), ("GET", "/healthz/"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_no_call_is_answered_without_the_token(executor: Pod, method: str, path: str) -> None:
    """AU01"""
    token = executor.token
    wrong = [
        "", "Bearer", "Bearer ", "Bearer wrong", f"Bearer {token[:-1]}", f"Bearer {token}x", f"Basic {token}", token,
        f"Bearer {hashlib.sha256(token.encode()).hexdigest()}",
    ]  # fmt: skip
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    offered = [{}, {"X-Api-Key": token}, upgrade, *({"Authorization": value} for value in wrong)]
    for headers in offered:
        async with executor.session.request(method, executor.url + path, headers=headers) as answer:
            body = await answer.read()
        assert answer.status == 401, (headers, answer.status)
        if method != "HEAD":
            assert b'"unauthenticated"' in body


async def test_two_tokens_in_one_request_are_none(executor: Pod) -> None:
    """AU01"""
    for values in (["Bearer wrong", f"Bearer {executor.token}"], [f"Bearer {executor.token}", "Bearer wrong"]):
        headers = [("Authorization", value) for value in values]
        async with executor.session.get(executor.url + "/v1/lease", headers=headers) as answer:
            assert answer.status in (400, 401)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_health_is_open_and_tells_no_ids(executor: Pod, path: str) -> None:
    """AU01"""
    reply = await executor.call("GET", path, token="")
    assert reply.status == 200
    assert set(reply.json) <= {"status", "message"}


async def test_a_refused_body_is_not_taken_for_the_next_request(executor_process: ExecutorProcess) -> None:
    """AU01"""
    hidden = b"GET /v1/lease HTTP/1.1\r\nHost: x\r\n\r\n"
    rest = b""
    opening = asyncio.open_unix_connection(executor_process.socket)
    async with connection(opening) as (reader, writer), asyncio.timeout(60):
        writer.write(b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (len(hidden) + 1000))
        writer.write(hidden)
        assert b" 401 " in await reader.readuntil(b"\r\n")
        writer.write(b" " * 1000)
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 20):
                rest += piece
    assert rest.count(b"HTTP/1.1") == 0, "the connection answers nothing more"


@pytest.mark.parametrize("head", [
    b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
])  # fmt: skip
async def test_a_request_that_is_none_is_refused_and_the_connection_closed(
    executor: Pod, executor_process: ExecutorProcess, head: bytes
) -> None:
    """AU01"""
    got = b""
    opening = asyncio.open_unix_connection(executor_process.socket)
    async with connection(opening) as (reader, writer), asyncio.timeout(60):
        writer.write(head)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 20):
                got += piece
    statuses = [line.split()[1] for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    assert all(status in (b"400", b"401", b"411", b"413", b"414", b"431", b"501") for status in statuses), got[:500]
    assert len(statuses) <= 1
    assert (await executor.call("GET", "/healthz", token="")).status == 200


async def test_a_call_for_another_pod_is_refused(fresh_executor: FreshExecutor) -> None:
    """AU01"""
    with fresh_executor(env={"SOJOURN_POD_NAME": "pod-a"}) as process:
        async with connected(process) as pod:
            body = {"command": ["echo", "ok"]}
            mine = await pod.call("POST", "/v1/exec", body, headers={"Sandbox-Pod": "pod-a"})
            assert mine.status == 200
            other = await pod.call("POST", "/v1/exec", body, headers={"Sandbox-Pod": "pod-b"})
            assert (other.status, other.code) == (409, "wrong_pod")
            unnamed = await pod.call("POST", "/v1/exec", body)
            assert unnamed.status == 200


@pytest.mark.parametrize("value", [None, "", "0", "not-hex", "a" * 63, "a" * 65])
def test_an_executor_without_a_token_refuses_to_start(value: str | None) -> None:
    """AU01"""
    env = {"SOJOURN_POD_TOKEN_SHA256": value or ""}
    with pytest.raises(AssertionError, match="SOJOURN_POD_TOKEN_SHA256"), running_executor(env=env):
        pass


async def test_commands_inherit_nothing_of_the_executors_secrets(any_tier: Pod) -> None:
    """AU03"""
    digest = hashlib.sha256(any_tier.token.encode()).hexdigest()
    script = (
        f"P=/proc/{any_tier.pid}; env; cat /proc/1/environ /proc/$PPID/environ $P/environ /proc/self/environ; "
        "for f in environ mem maps cmdline; do head -c 100000 $P/$f; done; ls -l $P/fd"
    )
    result = await any_tier.exec(script)
    said = result["stdout"] + result["stderr"]
    assert any_tier.token not in said
    assert digest not in said
    assert "SOJOURN" not in result["stdout"]


async def test_the_executors_memory_and_environment_are_closed_to_commands(any_tier: Pod) -> None:
    """AU03"""
    for name in ("environ", "mem", "maps", "fd/0", "root/etc/passwd", "cwd/."):
        result = await any_tier.exec(["cat", f"/proc/{any_tier.pid}/{name}"])
        assert result["exit_code"] != 0, name
        assert result["stdout"] == ""
    traced = await any_tier.exec([PYTHON, "-c", TRACE, str(any_tier.pid)])
    assert traced["stdout"].strip() == "-1"


TRACE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, int(sys.argv[1]), 0, 0))
"""


async def test_the_environment_of_a_command_is_a_short_list(fresh_executor: FreshExecutor) -> None:
    """AU03"""
    canary = secrets.token_hex(8)
    planted = {"AWS_SECRET_ACCESS_KEY": canary, "LD_PRELOAD": "", "PYTHONPATH": f"/{canary}", "SOJOURN_X": canary}
    with fresh_executor(env=planted) as process:
        async with connected(process) as pod:
            env = dict(line.split("=", 1) for line in (await pod.exec(["env"]))["stdout"].splitlines())
            assert set(env) <= {"PATH", "LANG", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TZ", "LC_CTYPE"}
            assert canary not in str(env)


async def test_in_the_split_tier_a_command_cannot_end_its_executor(any_tier: Pod) -> None:
    """AU03"""
    if any_tier.process.tier == "single":
        pytest.skip("in the single tier a command can end its own pod, and the documents say so")
    for name in ("KILL", "STOP", "TERM"):
        result = await any_tier.exec(f"kill -{name} {any_tier.pid}")
        assert result["exit_code"] != 0
    result = await any_tier.exec(["ls", str(Path(any_tier.process.socket).parent)])
    assert result["exit_code"] != 0, "the directory of the executor's socket is closed to commands"
    assert (await any_tier.call("GET", "/healthz", token="")).json["status"] == "ok"


async def test_the_token_is_on_no_command_line(any_tier: Pod) -> None:
    """AU07"""
    digest = hashlib.sha256(any_tier.token.encode()).hexdigest()
    result = await any_tier.exec("for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2>/dev/null; ps axww")
    assert any_tier.token not in result["stdout"]
    assert digest not in result["stdout"]
    for pid in [any_tier.pid, *any_tier.process.descendants()]:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert any_tier.token not in line
        assert digest not in line


async def test_the_token_is_in_no_log(executor: Pod) -> None:
    """AU07"""
    await executor.exec("echo hi")
    await executor.call("GET", "/v1/lease", token=f"{executor.token}x")
    assert executor.token not in executor.process.log_text()
