"""The short way for plain commands is the same call as the long way: same guard, same errors, no smuggling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from executor.front import _plain_headers
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected
from tests.support.streams import connection

BODY = b'{"command": ["echo", "hi"]}'
FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]


async def talk(pod: Pod, *pieces: bytes, answers: int = 1) -> list[tuple[int, dict[str, str], Any]]:
    """Sends the pieces over one connection; the answers in order, fewer where the connection was closed."""
    got = []
    async with connection(asyncio.open_unix_connection(pod.process.socket)) as (reader, writer), asyncio.timeout(60):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        with contextlib.suppress(asyncio.IncompleteReadError):
            for _ in range(answers):
                head = await reader.readuntil(b"\r\n\r\n")
                status, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                got.append((int(status.split()[1]), headers, json.loads(body) if body else None))
    return got


def request(pod: Pod, body: bytes = BODY, *, token: str | None = None, extra: str = "", line: str = "") -> bytes:
    token = pod.process.token if token is None else token
    return (
        f"{line or 'POST /v1/exec HTTP/1.1'}\r\nHost: pod\r\nAuthorization: Bearer {token}\r\n{extra}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def test_requests_on_one_connection_are_answered_in_order(executor: Pod) -> None:
    bodies = [b'{"command": "sleep 0.2; echo %d"}' % number for number in range(3)]
    answers = await talk(executor, b"".join(request(executor, body) for body in bodies), answers=3)
    assert [(status, body["stdout"]) for status, _, body in answers] == [(200, f"{n}\n") for n in range(3)]


async def test_a_request_in_pieces_and_one_of_another_kind_go_on_where_the_short_way_ends(executor: Pod) -> None:
    whole = request(executor)
    listing = request(executor, b"", line="GET /v1/processes HTTP/1.1")
    for cut in (5, 40, len(whole) - len(BODY), len(whole) - 3):
        answers = await talk(executor, whole, whole[:cut], whole[cut:] + listing + whole, answers=4)
        assert [status for status, _, _ in answers] == [200] * 4
        assert [body.get("stdout") for _, _, body in answers] == ["hi\n", "hi\n", None, "hi\n"]


@pytest.mark.parametrize("way", ["short", "long"])
@pytest.mark.parametrize(
    ("body", "token", "status", "code"),
    [
        (BODY, "wrong", 401, "unauthenticated"),
        (b"{", None, 400, "invalid_request"),
        (b'{"command": ["x"], "unknown": 1}', None, 400, "invalid_request"),
        (b'{"command": ["x"], "timeout_sec": -1}', None, 400, "invalid_request"),
        (b'{"command": ["x"], "cwd": "/nope"}', None, 400, "invalid_cwd"),
        (b'{"command": ["x"], "user": "root"}', None, 403, "user_not_allowed"),
        (b"[" * 100_000, None, 400, "invalid_request"),
        (b"\xff", None, 400, "invalid_request"),
        (b"", None, 400, "invalid_request"),
    ],
)
async def test_both_ways_refuse_alike(
    executor: Pod, way: str, body: bytes, token: str | None, status: int, code: str
) -> None:
    extra = "X-Other: 1\r\n" if way == "long" else ""
    [(got, headers, answer)] = await talk(executor, request(executor, body, token=token, extra=extra))
    assert (got, answer["error"]["code"]) == (status, code)
    assert headers["content-type"].startswith("application/json")


@pytest.mark.parametrize(
    "extra",
    ["Sandbox-Pod: another\r\n", "Sandbox-Pod: another\r\nX-Other: 1\r\n"],
)
async def test_both_ways_refuse_a_call_for_another_pod(executor: Pod, extra: str) -> None:
    [(status, _, answer)] = await talk(executor, request(executor, extra=extra))
    assert (status, answer["error"]["code"]) == (409, "wrong_pod")


@pytest.mark.parametrize(
    "head",
    [
        b"Host: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n",
        b"Host: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        b"Host: x\r\nContent-Length: +1\r\n",
        b"Host: x\r\nContent-Length : 1\r\n",
        b"Host: x\r\nContent-Length: 1\r\n folded\r\n",
        b"Host: x\r\nContent-Length: 1\r\nExpect: 100-continue\r\n",
        b"Host: x\r\nContent-Length: 1\r\nUpgrade: websocket\r\n",
        b"Host: x\r\nContent-Length: 1\r\nAccept: application/x-ndjson, text/html\r\n",
        b"Host: x\r\nContent-Length: 1\r\nConnection: close\r\n",
        b"Host: x\nContent-Length: 1\r\n",
        b"Host: x\r\nContent-Length: 1\x00\r\n",
        b"Host: x\r\nContent-Length: 99999999999\r\n",
        b"Host: x\r\n",
        b"Content-Length: 1\r\n",
        b"",
    ],
)
def test_nothing_out_of_the_ordinary_takes_the_short_way(head: bytes) -> None:
    assert _plain_headers(head) is None


def test_an_ordinary_head_takes_the_short_way() -> None:
    head = b"Host: pod\r\nAuthorization: Bearer t\r\nContent-Type: application/json\r\ncontent-length:12\r\n"
    assert _plain_headers(head) is not None


async def test_a_caller_that_hangs_up_ends_its_command_only_where_it_asked_for_that(executor: Pod) -> None:
    for policy, reason in (("kill", "cancelled"), ("continue", "exited")):
        body = json.dumps({"command": "sleep 2; exit 3", "id": f"front-{policy}", "on_disconnect": policy}).encode()
        async with connection(asyncio.open_unix_connection(executor.process.socket)) as (_, writer):
            writer.write(request(executor, body))
            while not any(
                one["id"] == f"front-{policy}"
                for one in (await executor.call("GET", "/v1/processes")).json["processes"]
            ):
                await asyncio.sleep(0.02)
        assert (await executor.ended(f"front-{policy}"))["reason"] == reason


@pytest.mark.skipif(not IS_ROOT, reason="nobody but root may look at the memory of an executor")
async def test_answers_that_nobody_reads_do_not_pile_up(executor: Pod) -> None:
    body = json.dumps({"command": "head -c 4000000 /dev/zero | tr '\\0' x"}).encode()
    await executor.call("POST", "/v1/exec", body)
    before = executor.process.status_kib("VmRSS")
    async with connection(asyncio.open_unix_connection(executor.process.socket)) as (reader, writer):
        writer.write(request(executor, body) * 100)
        for _ in range(4):  # what is answered before it is known that nobody reads
            await executor.exec(["sleep", "0.3"])
        assert executor.process.status_kib("VmRSS") - before < 100_000
        async with asyncio.timeout(60):
            for _ in range(20):  # and the rest comes once they are read
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))


async def test_a_connection_goes_on_after_an_answer_that_was_read_late(executor: Pod) -> None:
    since = len(executor.process.log.read_bytes())
    big = request(executor, json.dumps({"command": "head -c 3000000 /dev/zero | tr '\\0' x"}).encode())
    listing = request(executor, b"", line="GET /v1/lease HTTP/1.1")
    opening = asyncio.open_unix_connection(executor.process.socket, limit=1 << 23)
    async with connection(opening) as (reader, writer):
        writer.write(big + listing + request(executor))
        await executor.exec(["sleep", "0.5"])
        async with asyncio.timeout(60):
            for _ in range(3):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
    assert "failed" not in executor.process.log_text(since)


async def test_what_is_no_http_makes_few_and_short_lines_in_the_log(executor: Pod) -> None:
    since = len(executor.process.log.read_bytes())
    for _ in range(30):
        for junk in (b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nA b\r\n\r\n"):
            opening = asyncio.open_unix_connection(executor.process.socket)
            async with connection(opening) as (reader, writer), asyncio.timeout(60):
                writer.write(junk)
                assert b" 400 " in await reader.read()
    text = executor.process.log_text(since)
    assert "Traceback" not in text
    assert text.count("\n") <= 10
    assert len(text) < 4000


CLAIM: list[tuple[str, dict[str, Any], int]] = [  # in their order: a pod that is bound stays so
    ("/v1/lease", {"unclaimed_sec": 600}, 200),
    ("/v1/lease", {"unclaimed_sec": -1}, 400),
    ("/v1/lease", {"nonsense": 1}, 400),
    ("/v1/bind", {"sandbox_id": ""}, 400),
    ("/v1/bind", {"sandbox_id": "s1", "env": {"A=B": "x"}}, 400),
    ("/v1/bind", {"sandbox_id": "s1", "task_id": "t", "env": {"TOLD": "yes"}}, 200),
    ("/v1/bind", {"sandbox_id": "s1", "task_id": "t"}, 200),
    ("/v1/bind", {"sandbox_id": "s2", "task_id": "t"}, 409),
    ("/v1/lease", {"unclaimed_sec": 600}, 409),
]


async def test_the_calls_of_a_claim_answer_alike_on_both_ways(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as one, fresh_executor() as other:
        async with connected(one) as short, connected(other) as long:
            for path, body, status in CLAIM:
                text, line = json.dumps(body).encode(), f"POST {path} HTTP/1.1"
                (here,) = await talk(short, request(short, text, line=line))
                (there,) = await talk(long, request(long, text, line=line, extra="X-Other: 1\r\n"))
                assert (here[0], there[0]) == (status, status)
                assert here[2].keys() == there[2].keys()
                if status == 200:
                    assert (here[2]["bound"], here[2]["sandbox_id"]) == (there[2]["bound"], there[2]["sandbox_id"])
                else:
                    assert here[2] == there[2]
                (refused,) = await talk(short, request(short, text, line=line, token="wrong"))
                assert (refused[0], refused[2]["error"]["code"]) == (401, "unauthenticated")
            for pod in (short, long):
                (told,) = await talk(pod, request(pod, b'{"command": "echo $TOLD"}'))
                assert told[2]["stdout"] == "yes\n"


async def test_a_pushed_and_claimed_pod_runs_its_first_command_without_loading_the_application(
    fresh_executor: FreshExecutor,
) -> None:
    """It takes a fifth of a second of a processor: more than all the rest of a claim."""
    with fresh_executor() as process:
        async with connected(process) as pod:
            for path, body in (
                ("/v1/lease", {"unclaimed_sec": 600}),
                ("/v1/bind", {"sandbox_id": "s", "task_id": "t", "env": {"TOLD": "yes"}}),
                ("/v1/exec", {"command": "echo $TOLD"}),
            ):
                (answer,) = await talk(pod, request(pod, json.dumps(body).encode(), line=f"POST {path} HTTP/1.1"))
                assert answer[0] == 200
            assert not loaded(process)
            files = [{"path": "note.txt", "content": "kept"}]
            again = json.dumps({"sandbox_id": "s", "task_id": "t", "files": files}).encode()
            (answer,) = await talk(pod, request(pod, again, line="POST /v1/bind HTTP/1.1"))
            assert answer[0] == 200
            assert loaded(process)  # files are the application's to write


def loaded(process: ExecutorProcess) -> bool:
    return "aiohttp" in Path(f"/proc/{process.pid}/maps").read_text()
