"""What a manager makes of a pod's answers, an executor's and a liar's."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import hmac
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from executor.wire import (
    BindRequest,
    ErrorBody,
    ErrorReply,
    ExecRequest,
    Exit,
    FrameEvent,
    Heartbeat,
    LeaseRequest,
    OutputFrame,
    Started,
    StreamError,
    event_frame,
    frame,
    output_frame_header,
)
from manager import executor_client
from manager.errors import ExecutorRefused, ExecutorUnreachable, ManagerError, OutcomeUnknown, RateLimited
from manager.executor_answers import EXECUTOR_CODES, ExecutorNotReached, WrongPodAnswer, answer_limit
from manager.executor_client import ExecutorClient, PodRef, pod_token
from tests.support.fake_executor import FakeExecutor, exit_of, result_of
from tests.support.hostile import Caller, answer, chunked, hostile_pod
from tests.support.own_memory import peak_bytes, peak_from_now_bytes
from tests.support.world import until

SECRET = b"secret"
REQUEST = ExecRequest(command=["true"], id="p1")
GOOD = msgspec.json.encode(result_of(REQUEST, "out"))
STARTED = event_frame(Started(id="p1", pid=1))
BEAT = event_frame(Heartbeat(at="2025-01-01T00:00:00Z"))
EXIT = event_frame(exit_of(result_of(REQUEST)))


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sj") as made:
        yield Path(made)


@pytest.fixture
async def client() -> AsyncIterator[ExecutorClient]:
    made = ExecutorClient(SECRET)
    yield made
    await made.close()


@pytest.fixture
async def executor(directory: Path) -> AsyncIterator[FakeExecutor]:
    made = FakeExecutor("p", pod_token(SECRET, "p"), directory / "p.sock")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def pod(directory: Path) -> PodRef:
    return PodRef("p", f"unix:{directory}/p.sock", 60)


async def streamed(client: ExecutorClient, pod: PodRef, request: ExecRequest) -> list[FrameEvent]:
    async with client.stream(pod, request) as events:
        return [event async for event in events]


async def forwarded(client: ExecutorClient, pod: PodRef, path: str, query: str = "") -> bytes:
    async with client.forward(pod, "GET", path, query, {}, None) as answered:
        return b"".join([chunk async for chunk in answered.body])


# ── an honest executor ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pods_token_is_its_names_hmac_and_no_two_pods_share_one() -> None:
    assert pod_token(SECRET, "p") == hmac.new(SECRET, b"sojourn-pod\0p", hashlib.sha256).hexdigest()
    assert pod_token(SECRET, "p") != pod_token(SECRET, "q") != pod_token(b"other", "q")


async def test_a_command_comes_back_with_its_output(
    client: ExecutorClient, executor: FakeExecutor, pod: PodRef
) -> None:
    result = await client.exec(pod, ExecRequest(command=["echo", "hello"], id="x"))
    assert (result.id, result.stdout, result.exit_code) == ("x", "hello", 0)
    assert executor.lease_headers == ["60"]


async def test_a_streamed_command_comes_as_events(client: ExecutorClient, executor: FakeExecutor, pod: PodRef) -> None:
    got = await streamed(client, pod, ExecRequest(command=["echo", "hello"], id="x"))
    assert [type(event) for event in got] == [Started, OutputFrame, Exit]


async def test_connections_are_used_again(client: ExecutorClient, directory: Path, pod: PodRef) -> None:
    async with hostile_pod(directory / "p.sock", answer(200, GOOD)) as callers:
        for _ in range(3):
            await client.exec(pod, REQUEST)
        assert len(callers) == 1
    async with hostile_pod(directory / "p.sock", chunked(STARTED + EXIT) + b"0\r\n\r\n") as callers:
        for _ in range(3):
            await streamed(client, pod, REQUEST)
        assert len(callers) == 1


async def test_a_connection_that_the_pod_closed_is_found_out_before_a_command_is_sent_on_it(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    async with hostile_pod(directory / "p.sock", answer(200, GOOD)) as callers:
        await client.exec(pod, ExecRequest(command=["true"], id="p1"))
        callers[0].writer.transport.abort()  # the loop has had no chance to tell the client
        await client.exec(pod, ExecRequest(command=["true"], id="p1"))
        assert len(callers) == 2
    with pytest.raises(ExecutorNotReached):
        await client.exec(pod, REQUEST)


async def test_bytes_that_nobody_asked_for_are_no_answer_to_the_next_call(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    forged = answer(200, GOOD.replace(b'"out"', b'"forged"'))
    async with hostile_pod(directory / "p.sock", answer(200, GOOD) + forged) as callers:
        for _ in range(3):
            assert (await client.exec(pod, REQUEST)).stdout == "out"
        assert len(callers) == 3


async def test_binding_leases_and_health(client: ExecutorClient, executor: FakeExecutor, pod: PodRef) -> None:
    assert not (await client.lease(pod)).bound
    await client.bind(pod, BindRequest(sandbox_id="s"))
    assert (await client.lease(pod)).sandbox_id == "s"
    with pytest.raises(ExecutorRefused) as refused:
        await client.bind(pod, BindRequest(sandbox_id="other"))
    assert refused.value.code == "conflict"
    await client.push_lease(pod, LeaseRequest(unclaimed_sec=5.0))
    assert executor.pushed[0].unclaimed_sec == 5.0
    assert (await client.health(pod)).status == "ok"


async def test_another_pod_at_the_address_is_not_reached(
    client: ExecutorClient, executor: FakeExecutor, pod: PodRef
) -> None:
    """S17"""
    executor.pod = "q"
    with pytest.raises(WrongPodAnswer):
        await client.exec(pod, REQUEST)
    assert executor.runs == []


async def test_another_secret_is_not_reached_either(executor: FakeExecutor, pod: PodRef) -> None:
    """S17"""
    stranger = ExecutorClient(b"another")
    with pytest.raises(ExecutorNotReached):
        await stranger.exec(pod, REQUEST)
    await stranger.close()


async def test_nobody_at_the_address_is_not_reached(client: ExecutorClient, pod: PodRef) -> None:
    nowhere = PodRef("p", "http://127.0.0.1:1", 60)
    for call in (
        client.exec(pod, REQUEST), client.exec(nowhere, REQUEST), client.lease(pod), streamed(client, pod, REQUEST),
        forwarded(client, pod, "/v1/files"), forwarded(client, nowhere, "/v1/files"),
    ):  # fmt: skip
        with pytest.raises(ExecutorNotReached):
            await call


# ── connections that break ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_connection_that_breaks_is_joined_once_by_the_commands_id(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    """F26"""
    bodies: list[bytes] = []

    async def behave(caller: Caller) -> None:
        bodies.append(caller.body)
        if len(bodies) == 1:
            caller.writer.transport.abort()
        else:
            await caller.send(answer(200, GOOD))

    async with hostile_pod(directory / "p.sock", behave):
        assert (await client.exec(pod, REQUEST)).stdout == "out"
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("command_id", ["p1", None])
async def test_a_connection_that_breaks_again_is_outcome_unknown(
    client: ExecutorClient, directory: Path, pod: PodRef, command_id: str | None
) -> None:
    sent = 0

    async def behave(caller: Caller) -> None:
        nonlocal sent
        sent += 1
        await caller.send(answer(200, GOOD)[:-10])
        caller.writer.close()

    async with hostile_pod(directory / "p.sock", behave):
        with pytest.raises(OutcomeUnknown) as unknown:
            await client.exec(pod, ExecRequest(command=["true"], id=command_id))
    assert unknown.value.details == {"id": command_id}
    assert sent == (2 if command_id else 1)  # without an id a second try might be a second run


async def test_a_command_in_a_forgotten_pod_is_not_sent_again_to_what_still_takes_connections(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    """F22: of a lost node the kernel may go on to accept, and nobody answers."""
    sent = 0
    asked = asyncio.Event()

    async def behave(caller: Caller) -> None:
        nonlocal sent
        sent += 1
        asked.set()
        await asyncio.Event().wait()

    async with hostile_pod(directory / "p.sock", behave):
        command = asyncio.create_task(client.exec(pod, ExecRequest(command=["true"], id="p1")))
        async with asyncio.timeout(60):
            await asked.wait()
            client.forget(pod.name)
            with pytest.raises(OutcomeUnknown):
                await command
    assert sent == 1


async def test_forgetting_a_pod_ends_the_calls_to_it(
    client: ExecutorClient, executor: FakeExecutor, pod: PodRef
) -> None:
    command = asyncio.create_task(client.exec(pod, ExecRequest(command=["wait"])))
    await executor.waiting.wait()
    client.forget("p")
    with pytest.raises(OutcomeUnknown):
        await command


async def test_connections_to_the_longest_unused_pod_are_closed_and_none_in_use(directory: Path) -> None:
    client = ExecutorClient(SECRET, max_pods=2)
    executors = [FakeExecutor(name, pod_token(SECRET, name), directory / f"{name}.sock") for name in "abc"]
    for one in executors:
        await one.start()
    a, b, c = (PodRef(one.pod, one.address, 60) for one in executors)
    waiting = asyncio.create_task(client.exec(a, ExecRequest(command=["wait"], id="x")))
    await executors[0].waiting.wait()
    await client.exec(b, REQUEST)
    await client.exec(c, REQUEST)
    assert set(client._channels) == {a, c}
    also = asyncio.create_task(client.exec(c, ExecRequest(command=["wait"], id="x")))
    await executors[2].waiting.wait()
    with pytest.raises(RateLimited):
        await client.exec(b, REQUEST)
    for one in executors:
        one.release()
    await asyncio.gather(waiting, also)
    await client.close()
    for one in executors:
        await one.stop()


# ── liars ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def lie(**changes: object) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(GOOD), **changes})


LIES = {
    "no JSON": answer(200, b"hello"),
    "half a JSON": answer(200, GOOD[:50]),
    "another type": answer(200, b"[1, 2]"),
    "a text for a number": answer(200, lie(exit_code="0")),
    "a field missing": answer(200, b'{"id": "p1"}'),
    "not a number": answer(200, GOOD.replace(b'"duration_ms":1.0', b'"duration_ms":NaN')),
    "an infinite number": answer(200, GOOD.replace(b'"duration_ms":1.0', b'"duration_ms":1e999')),
    "a negative duration": answer(200, lie(duration_ms=-1.0)),
    "a huge exit code": answer(200, GOOD.replace(b'"exit_code":0', b'"exit_code":' + b"9" * 4000)),
    "an exit code of 256": answer(200, lie(exit_code=256)),
    "a count beyond 64 bits": answer(200, GOOD.replace(b'"stdout_bytes":3', b'"stdout_bytes":' + b"9" * 30)),
    "depth": answer(200, b'{"id":' + b"[" * 1_000_000),
    "depth in an ignored field": answer(200, GOOD[:-1] + b',"else":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "another command's outcome": answer(200, lie(id="p2")),
    "a reason of its own": answer(200, lie(reason="because")),
    "a lone surrogate": answer(200, GOOD.replace(b'"out"', b'"\\ud800"')),
    "bytes that are no UTF-8": answer(200, GOOD.replace(b'"out"', b'"\xff\xfe"')),
    "a long time": answer(200, lie(started_at="x" * 100)),
    "a packed answer": answer(200, gzip.compress(GOOD), "Content-Encoding: gzip"),
    "a length over the bound": b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n",
    "no HTTP": b"\x00\x01\x02\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "a header bomb": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
    "a long header": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "nothing": answer(200, b""),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "a redirect": answer(302, b"", "Location: http://127.0.0.1:1/"),
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "an error that is none": answer(500, b"<html>"),
    "an error of ours": answer(410, b'{"error":{"code":"sandbox_gone","message":"x","retryable":false}}'),
    "a code under another status": answer(200 + 200, b'{"error":{"code":"not_found","message":"x","retryable":false}}'),
    "a defect": answer(500, b'{"error":{"code":"internal","message":"x","retryable":false}}'),
    "a huge error": answer(404, b'{"error":{"code":"not_found","message":"' + b"x" * 10_000_000),
}


@pytest.mark.parametrize("what", LIES)
async def test_a_lie_is_a_typed_error_and_costs_little(
    client: ExecutorClient, directory: Path, pod: PodRef, what: str
) -> None:
    """S19"""
    before = peak_from_now_bytes()

    async def behave(caller: Caller) -> None:
        await caller.send(LIES[what])
        caller.writer.close()

    async with hostile_pod(directory / "p.sock", behave):
        for call in (client.exec(pod, REQUEST), client.lease(pod), streamed(client, pod, REQUEST)):
            with pytest.raises((OutcomeUnknown, ExecutorUnreachable)) as refused:
                await call
            assert refused.value.status in (502, 504)
            assert len(refused.value.message) < 1000
            assert refused.value.message.isprintable()
        for other in (client.bind(pod, BindRequest(sandbox_id="s")), forwarded(client, pod, "/v1/usage")):
            (outcome,) = await asyncio.gather(other, return_exceptions=True)
            # These do not look into a 200; whatever else it is has to be typed.
            assert not isinstance(outcome, BaseException) or getattr(outcome, "status", 0) in (502, 504)
    assert peak_bytes() - before < 64 << 20


async def test_an_answer_without_end_is_cut_at_the_requests_own_bound(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    """S19"""
    request = ExecRequest(command=["true"], id="p1", max_output_bytes=1000)
    sent = 0

    async def behave(caller: Caller) -> None:
        nonlocal sent
        await caller.send(chunked(b"{"))
        while True:
            await caller.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
            sent += 65536

    async with hostile_pod(directory / "p.sock", behave):
        with pytest.raises(OutcomeUnknown):
            await client.exec(pod, request)
    assert sent < answer_limit(request) + (4 << 20)


async def test_an_honest_answer_of_the_worst_bytes_fits_the_bound(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    request = ExecRequest(command=["true"], id="p1", max_output_bytes=10_000)
    body = GOOD.replace(b'"out"', b'"' + b"\\u0000" * 10_000 + b'"')
    async with hostile_pod(directory / "p.sock", answer(200, body)):
        assert (await client.exec(pod, request)).stdout == "\0" * 10_000


async def test_every_code_of_an_executor_passes_on_under_its_own_status_only(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    told: list[bytes] = []

    async def behave(caller: Caller) -> None:
        await caller.send(told[-1])

    async with hostile_pod(directory / "p.sock", behave):
        for code, (status, retryable) in EXECUTOR_CODES.items():
            body = msgspec.json.encode(ErrorReply(ErrorBody(code=code, message="why\x1b[2J", retryable=not retryable)))
            told.append(answer(status, body))
            with pytest.raises(ExecutorRefused) as refused:
                await client.exec(pod, REQUEST)
            assert (refused.value.code, refused.value.status, refused.value.retryable) == (code, status, retryable)
            assert refused.value.message == "why [2J"
            told.append(answer(418, body))
            with pytest.raises(ExecutorUnreachable):
                await client.exec(pod, REQUEST)


async def test_details_of_an_error_are_bounded_and_cannot_pose_as_ours(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    details = {
        "limit": 5, "deep": [[[1]]], "huge": 10**30, "long": "x" * 100_000, "message": "m", "self": 1, "code": "c",
        "retry_after_sec": 1, **{f"k{n}": n for n in range(100)},
    }  # fmt: skip
    body = msgspec.json.encode({"error": {"code": "too_large", "message": "m" * 100_000, "retryable": False,
                                          "details": details}})  # fmt: skip
    async with hostile_pod(directory / "p.sock", answer(413, body[:60_000] if len(body) < 60_000 else body)):
        with pytest.raises(ManagerError) as refused:
            await client.exec(pod, REQUEST)
    assert isinstance(refused.value, OutcomeUnknown)  # longer than an error may be: it says nothing
    details["long"] = "x" * 5000
    body = msgspec.json.encode({"error": {"code": "too_large", "message": "m", "retryable": False, "details": details}})
    async with hostile_pod(directory / "p.sock", answer(413, body)):
        with pytest.raises(ExecutorRefused) as short:
            await client.exec(pod, REQUEST)
    assert short.value.details["limit"] == 5
    assert len(short.value.details) <= 16
    assert not {"deep", "huge", "message", "self", "code"} & set(short.value.details)
    assert len(short.value.details["long"]) == 1024


async def test_cookies_of_a_pod_are_not_kept_and_redirects_not_followed(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    """S19"""
    heads: list[bytes] = []

    async def behave(caller: Caller) -> None:
        heads.append(caller.head)
        await caller.send(answer(200, GOOD, "Set-Cookie: a=b", "Location: /elsewhere"))

    async with hostile_pod(directory / "p.sock", behave):
        for _ in range(2):
            await client.exec(pod, REQUEST)
    assert len(heads) == 2
    assert not any(b"cookie" in head.lower() for head in heads)


# ── streams of liars ────────────────────────────────────────────────────────────────────────────────────────────────

BAD_STREAMS = {
    "no exit": STARTED + BEAT,
    "nothing": b"",
    "a cut frame": STARTED + EXIT[:-3],
    "a frame over the bound": STARTED + b"\x02\xff\xff\xff\xff",
    "output without an offset": STARTED + frame(0x02, b"abc"),
    "an offset beyond 62 bits": STARTED + frame(0x02, b"\xff" * 8 + b"x"),
    "another command's start": event_frame(Started(id="p2", pid=1)) + EXIT,
    "another command's end": STARTED + event_frame(exit_of(result_of(ExecRequest(command=["x"], id="p2")))),
    "no JSON in a frame": STARTED + frame(0x06, b"\xff\xff"),
    "an error event": STARTED
    + event_frame(StreamError(error=ErrorBody(code="\x1b]52;", message="x" * 10_000, retryable=False))),
}


@pytest.mark.parametrize("what", BAD_STREAMS)
async def test_a_stream_that_is_none_ends_in_outcome_unknown(
    client: ExecutorClient, directory: Path, pod: PodRef, what: str
) -> None:
    """S19"""
    body = chunked(BAD_STREAMS[what]) if BAD_STREAMS[what] else chunked()
    async with hostile_pod(directory / "p.sock", body + b"0\r\n\r\n"):
        with pytest.raises(OutcomeUnknown) as unknown:
            await streamed(client, pod, REQUEST)
    assert unknown.value.details == {"id": "p1"}
    assert len(unknown.value.message) < 1000
    assert unknown.value.message.isprintable()


async def test_bytes_after_the_exit_are_not_read_and_their_connection_not_used_again(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    async with hostile_pod(directory / "p.sock", chunked(STARTED + EXIT + EXIT, EXIT)) as callers:
        for _ in range(2):
            async with client.stream(pod, REQUEST) as events:
                assert [type(event) for event in [event async for event in events]] == [Started, Exit]
        assert len(callers) == 2


@pytest.mark.parametrize("drip", [b"", b"\x04"], ids=["silence", "a frame that is never whole"])
async def test_a_stream_without_frames_is_given_up(
    client: ExecutorClient, directory: Path, pod: PodRef, monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    """S19, F26"""
    monkeypatch.setattr(executor_client, "STREAM_IDLE_SEC", 0.2)

    async def behave(caller: Caller) -> None:
        await caller.send(chunked(STARTED + b"\x04\x00\x01\x00\x00"))
        while True:
            if drip:
                await caller.send(b"1\r\n" + drip + b"\r\n")
            await asyncio.sleep(0.01)

    async with hostile_pod(directory / "p.sock", behave):
        with pytest.raises(OutcomeUnknown):
            await streamed(client, pod, REQUEST)


async def test_heartbeats_do_not_carry_a_command_past_its_own_timeout(
    client: ExecutorClient, directory: Path, pod: PodRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S19"""
    monkeypatch.setattr(executor_client, "MARGIN_SEC", 0.1)

    async def behave(caller: Caller) -> None:
        await caller.send(chunked(STARTED))
        while True:
            await caller.send(f"{len(BEAT):x}\r\n".encode() + BEAT + b"\r\n")
            await asyncio.sleep(0.01)

    async with hostile_pod(directory / "p.sock", behave):
        with pytest.raises(OutcomeUnknown):
            await streamed(client, pod, msgspec.structs.replace(REQUEST, timeout_sec=0.1, grace_sec=0.0))


async def test_a_plain_answer_that_never_comes_is_given_up_after_the_commands_own_timeout(
    client: ExecutorClient, directory: Path, pod: PodRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S19, F26"""
    monkeypatch.setattr(executor_client, "MARGIN_SEC", 0.1)

    async def behave(caller: Caller) -> None:
        while True:
            await caller.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await asyncio.sleep(0.01)

    async with hostile_pod(directory / "p.sock", behave):
        with pytest.raises(OutcomeUnknown):
            await client.exec(pod, msgspec.structs.replace(REQUEST, timeout_sec=0.1, grace_sec=0.0))


async def test_a_stream_is_read_no_faster_than_it_is_asked_for(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    sent = 0

    async def behave(caller: Caller) -> None:
        nonlocal sent
        await caller.send(chunked(STARTED))
        for number in range(1000):
            piece = output_frame_header("stdout", number * 65536, 65536) + b"x" * 65536
            await caller.send(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            sent += 65536
        await caller.send(f"{len(EXIT):x}\r\n".encode() + EXIT + b"\r\n0\r\n\r\n")

    async with hostile_pod(directory / "p.sock", behave), client.stream(pod, REQUEST) as events:
        assert isinstance(await anext(events), Started)
        still = -1
        while sent != still:  # until the pod is held back
            still = sent
            for _ in range(50):
                await asyncio.sleep(0.001)
        assert sent < 8 << 20
        got = 0
        async for event in events:
            if isinstance(event, OutputFrame):
                got += len(event.data)
        assert got == 65536 * 1000


# ── forwarded calls ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_only_headers_that_belong_to_a_file_go_either_way(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    heads: list[bytes] = []

    async def behave(caller: Caller) -> None:
        heads.append(caller.head)
        await caller.send(
            answer(206, b"abc", 'ETag: "1"', "Content-Range: bytes 0-2/9", "Set-Cookie: a=b", "X-Powered-By: y",
                   "Sandbox-Output-Offset: 7", "Last-Modified: \x01")
        )  # fmt: skip

    given = {"Range": "bytes=0-2", "Authorization": "Bearer mine", "Cookie": "c", "X-Sandbox-Tenant-Id": "t"}
    async with (
        hostile_pod(directory / "p.sock", behave),
        client.forward(pod, "GET", "/v1/files", "path=%2Fa", given, None) as passed,
    ):
        assert b"".join([chunk async for chunk in passed.body]) == b"abc"
    assert passed.status == 206
    assert passed.headers == {
        "Content-Length": "3", "Content-Type": "application/json", "ETag": '"1"', "Content-Range": "bytes 0-2/9",
        "Sandbox-Output-Offset": "7",
    }  # fmt: skip
    head = heads[0].decode().lower()
    assert head.startswith("get /v1/files?path=%2fa http/1.1")
    assert f"bearer {pod_token(SECRET, 'p')}" in head
    assert "range: bytes=0-2" in head
    assert "mine" not in head
    assert "cookie" not in head
    assert "tenant" not in head


@pytest.mark.parametrize(
    "path", ["/v1/../healthz", "/v1/files/..", "/v1/a b", "/v1/a\r\nX: y", "/healthz", "http://else/v1/x", "/v1/\u00e9"]
)
async def test_a_path_out_of_the_executors_own_is_never_sent(client: ExecutorClient, pod: PodRef, path: str) -> None:
    with pytest.raises(ValueError, match="no path"):
        async with client.forward(pod, "GET", path, "", {}, None):
            pass


async def test_a_body_that_breaks_on_the_callers_side_is_the_callers_error_and_no_whole_request(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    class CallerLeft(Exception):
        pass

    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 100
        raise CallerLeft

    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())
        writer.close()

    server = await asyncio.start_unix_server(serve, str(directory / "p.sock"))
    with pytest.raises(CallerLeft):
        async with client.forward(pod, "PUT", "/v1/files", "path=a", {}, body()):
            pass
    await until(lambda: bool(received))
    assert not received[0].endswith(b"0\r\n\r\n")
    server.close()
    await server.wait_closed()


async def test_leaving_a_body_early_closes_its_connection(client: ExecutorClient, directory: Path, pod: PodRef) -> None:
    closed = asyncio.Event()

    async def behave(caller: Caller) -> None:
        try:
            await caller.send(chunked(b"x" * 100))
            await caller.reader.read()
        finally:
            closed.set()

    async with hostile_pod(directory / "p.sock", behave):
        async with client.forward(pod, "GET", "/v1/files", "path=a", {}, None) as passed:
            assert await anext(passed.body) == b"x" * 100
        await closed.wait()


async def test_a_head_keeps_its_status_and_no_other_method_an_errors(
    client: ExecutorClient, directory: Path, pod: PodRef
) -> None:
    async with (
        hostile_pod(directory / "p.sock", b"HTTP/1.1 404 X\r\nContent-Length: 20\r\n\r\n"),
        client.forward(pod, "HEAD", "/v1/files", "path=a", {}, None) as passed,
    ):
        assert passed.status == 404


async def test_many_commands_at_once_on_one_pod(client: ExecutorClient, executor: FakeExecutor, pod: PodRef) -> None:
    async def one(number: int) -> bool:
        result = await client.exec(pod, ExecRequest(command=["echo", str(number)], id=f"x{number}"))
        return result.stdout == str(number)

    assert all(await asyncio.gather(*(one(number) for number in range(300))))


def test_every_code_of_the_executors_tree_is_known_here() -> None:
    from executor import errors

    def all_of(kind: type[errors.ExecutorError]) -> Callable[[], set[tuple[str, int, bool]]]:
        own = {(kind.code, kind.status, kind.retryable)}
        return lambda: own.union(*(all_of(child)() for child in kind.__subclasses__()))

    between_us = {"internal", "unauthenticated", "wrong_pod"}
    of_the_connection = {408, 431}  # of a request that came too slowly, or with too long a head: none of ours
    known = {(code, status, retryable) for code, (status, retryable) in EXECUTOR_CODES.items()}
    told = {one for one in all_of(errors.ExecutorError)() if one[0] not in between_us}
    assert {one for one in told if one[1] not in of_the_connection} == known


def test_all_of_it_also_holds_on_the_loop_that_managers_run_on(directory: Path) -> None:
    async def scenario() -> None:
        client, pod = ExecutorClient(SECRET), PodRef("p", f"unix:{directory}/p.sock", 60)
        async with hostile_pod(directory / "p.sock", answer(200, GOOD)) as callers:
            await asyncio.gather(*(client.exec(pod, REQUEST) for _ in range(300)))
            for caller in callers:
                caller.writer.transport.abort()
            assert (await client.exec(pod, REQUEST)).stdout == "out"
        with pytest.raises(ExecutorNotReached):
            await client.exec(pod, REQUEST)
        async with hostile_pod(directory / "p.sock", chunked(STARTED + EXIT) + b"0\r\n\r\n"):
            streams = await asyncio.gather(*(streamed(client, pod, REQUEST) for _ in range(300)))
        assert {len(events) for events in streams} == {2}
        await client.close()

    uvloop.run(scenario())


async def test_a_pod_that_is_slow_to_take_connections_gets_them_all_in_time(directory: Path, pod: PodRef) -> None:
    """A Unix socket whose backlog is full refuses with EAGAIN: that is no pod that is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "p.sock"))
    listener.listen(1)
    client = ExecutorClient(SECRET)
    calls: list[asyncio.Task[Any]] = [asyncio.create_task(client.exec(pod, REQUEST)) for _ in range(20)]
    calls += [asyncio.create_task(streamed(client, pod, REQUEST)) for _ in range(20)]
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not any(call.done() for call in calls)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = Caller(reader, writer)
        while await caller.request():
            frames = b"sojourn.frames" in caller.head
            await caller.send(chunked(STARTED + EXIT) + b"0\r\n\r\n" if frames else answer(200, GOOD))
        writer.close()

    server = await asyncio.start_unix_server(serve, sock=listener)
    results = await asyncio.gather(*calls)
    assert len(results) == 40
    await client.close()
    server.close()
    await asyncio.sleep(0.01)


async def test_no_more_connections_are_made_than_a_pod_may_have(directory: Path, pod: PodRef) -> None:
    client = ExecutorClient(SECRET, connections_per_pod=3)
    async with hostile_pod(directory / "p.sock", answer(200, GOOD)) as callers:
        await asyncio.gather(*(client.exec(pod, REQUEST) for _ in range(100)))
        assert len(callers) == 3
    await client.close()


async def test_a_caller_that_goes_away_leaves_its_turn_to_the_next(directory: Path, pod: PodRef) -> None:
    client = ExecutorClient(SECRET, connections_per_pod=1)
    gate = asyncio.Event()

    async def behave(caller: Caller) -> None:
        await gate.wait()
        await caller.send(answer(200, GOOD))

    async with hostile_pod(directory / "p.sock", behave) as callers:
        calls = [asyncio.create_task(client.exec(pod, REQUEST)) for _ in range(10)]
        await until(lambda: bool(callers))
        for call in calls[:5]:  # the one that is under way, and four that wait
            call.cancel()
        gate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True] * 5 + [False] * 5
    assert not any(isinstance(result, Exception) for result in results)
    await client.close()
