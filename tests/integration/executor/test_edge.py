"""Callers that are slow, greedy or no HTTP at all, on both ways into the executor: threats S27 and S28.

`front` is a connection's first request, before the application has it; `application` one that came later."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager

import pytest

from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected
from tests.support.raw_http import Raw, raw, request

pytestmark = [pytest.mark.timeout(180)]
Fresh = Callable[..., AbstractContextManager[ExecutorProcess]]
WAYS = pytest.mark.parametrize("way", ["front", "application"])
needs_root = pytest.mark.skipif(not IS_ROOT, reason="nobody but root may look at the memory of an executor")


@asynccontextmanager
async def on(pod: Pod, way: str) -> AsyncIterator[Raw]:
    async with raw(pod) as connection:
        if way == "application":
            connection.send(request(pod, "GET /v1/lease"))
            assert (await connection.answer()).status == 200
        yield connection


# ── S27: slow ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_a_head_that_does_not_come_whole_in_ten_seconds_ends_its_connection_however_it_drips(
    executor: Pod,
) -> None:
    """S27: connect and send nothing, half a request line, unfinished headers, and a header byte every half second"""
    starts = {"nothing": b"", "line": b"GET /v1/pro", "headers": b"GET /v1/lease HTTP/1.1\r\nHost: pod\r\nX: "}

    async def one(way: str, start: bytes, drips: bool) -> tuple[bytes, float]:
        async with on(executor, way) as connection:
            began = time.monotonic()
            connection.send(start)

            async def drip() -> None:
                while True:
                    await asyncio.sleep(0.5)
                    connection.send(b"y")

            dripping = asyncio.create_task(drip() if drips else asyncio.sleep(0), name="drip")
            try:
                return await connection.ended(60), time.monotonic() - began
            finally:
                dripping.cancel()

    cases = [
        (way, name, drips)
        for way in ("front", "application")
        for name in starts
        for drips in (False, True)
        if not (name == "nothing" and (drips or way == "application"))  # kept connections may be idle
    ]
    got = await asyncio.gather(*(one(way, starts[name], drips) for way, name, drips in cases))
    for case, (text, took) in zip(cases, got, strict=True):
        assert 8 < took < 50, (case, took)
        assert text.startswith(b"HTTP/1.1 408 ") is (case[1] != "nothing"), (case, text)
        assert case[1] == "nothing" or b'"code":"invalid_request"' in text


@pytest.mark.slow
async def test_a_body_that_stops_or_drips_is_given_up_and_a_streams_is_not(executor: Pod) -> None:
    """S27: unfinished bodies; the input of a command is a stream and may take all day"""

    async def body(line: str, length: int, piece: bytes, pause_sec: float) -> tuple[int, float]:
        async with raw(executor) as connection:
            began = time.monotonic()
            connection.send(request(executor, line, length=length))

            async def drip() -> None:
                while True:
                    connection.send(piece)
                    await asyncio.sleep(pause_sec)

            dripping = asyncio.create_task(drip(), name="drip")
            try:
                return (await connection.answer(60)).status, time.monotonic() - began
            finally:
                dripping.cancel()

    id = await executor.start(["cat"])
    got = await asyncio.gather(
        body("POST /v1/exec", 1000, b"{", 600),
        body("POST /v1/files/mkdir", 1000, b"{", 0.5),
        body("PUT /v1/files?path=slow", 1 << 20, b"z" * 100, 0.5),
        body(f"POST /v1/processes/{id}/stdin", 40, b"\n", 0.5),
    )
    assert [status for status, _ in got] == [408, 408, 408, 204]
    assert all(8 < took < 58 for _, took in got), got
    assert not list(executor.workspace.glob("*slow*")), "nothing of the file may be seen"
    await executor.call("DELETE", f"/v1/processes/{id}")


# ── S27: many ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_connections_over_the_cap_are_refused_and_counted_and_the_place_of_one_that_left_is_free(
    fresh_executor: Fresh,
) -> None:
    """S27"""
    with fresh_executor(env={"SOJOURN_MAX_CONNECTIONS": "20"}) as process:
        async with connected(process) as pod, AsyncExitStack() as stack:
            assert (await pod.call("GET", "/v1/lease")).status == 200  # holds one of them
            held = [await stack.enter_async_context(raw(pod)) for _ in range(19)]
            for _ in range(5):
                async with raw(pod) as refused:
                    answer = await refused.answer()
                    assert (answer.status, answer.code) == (429, "rate_limited")
                    assert answer.headers["retry-after"] == "1"
                    assert await refused.ended() == b""
            held[0].writer.transport.abort()
            for _ in range(200):
                async with raw(pod) as free:
                    free.send(request(pod, "GET /v1/lease"))
                    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                        if (await free.answer()).status == 200:
                            break
            else:
                pytest.fail("the place of a connection that has ended is not free")
            metrics = (await pod.call("GET", "/metrics")).body.decode()
    assert "# TYPE sojourn_connections_refused_total counter\nsojourn_connections_refused_total " in metrics
    assert float(metrics.split("\nsojourn_connections_refused_total ")[1].split("\n")[0]) >= 5


@pytest.mark.slow
@needs_root
@WAYS
async def test_ten_thousand_idle_connections_cost_little_and_harm_nobody(fresh_executor: Fresh, way: str) -> None:
    """S27: at most 20 KiB each; others' calls are as fast as before"""
    count = 10_000
    ask = b"GET /healthz HTTP/1.1\r\nHost: pod\r\n%b\r\n" % (b"" if way == "front" else b"Expect: nothing\r\n")
    with more_files(count + 1000), fresh_executor() as process:
        async with connected(process) as pod:
            await pod.call("GET", "/v1/lease")
            for _ in range(50):
                await pod.exec(["true"])
            calm = await spread(pod)
            before = process.status_kib("VmRSS")
            sockets = await asyncio.to_thread(idle_connections, process.socket, ask, count)
            try:
                grown = process.status_kib("VmRSS") - before
                # What else this machine does only adds to a measurement, so the best of some tells.
                busy = min([await spread(pod) for _ in range(5)])
            finally:
                for one in sockets:
                    one.close()
            assert grown / count < 20, f"{grown / count:.1f} KiB for each"
            assert busy < 3 * calm + 0.02, (calm, busy)


@contextlib.contextmanager
def more_files(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < count:
        pytest.skip(f"no more than {before[1]} descriptors may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def idle_connections(path: str, ask: bytes, count: int) -> list[socket.socket]:
    sockets = []
    for _ in range(count):
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(60)
        one.connect(path)
        one.sendall(ask)
        sockets.append(one)
        assert one.recv(4096).startswith(b"HTTP/1.1 200 ")
    return sockets


async def spread(pod: Pod) -> float:
    """What 99 in 100 health checks stay below, in seconds."""
    took = []
    for _ in range(300):
        began = time.perf_counter()
        assert (await pod.call("GET", "/healthz")).status == 200
        took.append(time.perf_counter() - began)
    return sorted(took)[-4]


@needs_root
@WAYS
async def test_a_flood_of_pipelined_requests_that_nobody_reads_the_answers_of_is_held_in_its_socket(
    fresh_executor: Fresh, way: str
) -> None:
    """S27"""
    with fresh_executor() as process:  # whose memory grows by nothing else
        async with connected(process) as pod:
            await pod.call("GET", "/v1/lease")
            async with on(pod, way) as connection:
                before = process.status_kib("VmRSS")
                flood = request(pod, "GET /v1/lease" if way == "application" else "GET /healthz") * 1000
                with contextlib.suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(3):
                        while True:
                            connection.send(flood)
                            await connection.writer.drain()
                assert (await pod.call("GET", "/healthz")).status == 200
                assert process.status_kib("VmRSS") - before < 12_000


# ── S27, S28: what is too much ──────────────────────────────────────────────────────────────────────────────────


@WAYS
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X: y\r\n" * 500, 431),
        (b"X: " + b"y" * 20_000 + b"\r\n", 431),
        (b"X" * 20_000 + b": y\r\n", 431),
        (b"X: " + b"y" * 100_000 + b"\r\n", 431),
        (b"X: y\r\n" * 40_000, 431),
        (b"A b: c\r\n", 400),
        (b"X: \x00\r\n", 400),
        (b"Content-Length: 1\r\nContent-Length: 2\r\n", 400),
        (b"Content-Length: -1\r\n", 400),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Transfer-Encoding: gzip, x\r\n", 400),
    ],
)
async def test_what_is_no_request_is_answered_in_our_shape_and_its_connection_ended(
    executor: Pod, way: str, head: bytes, status: int
) -> None:
    """S27: header bombs; S28: lengths that contradict each other"""
    async with on(executor, way) as connection:
        connection.send(b"GET /v1/lease HTTP/1.1\r\nHost: pod\r\n" + head + b"\r\n")
        answer = await connection.answer()
        assert (answer.status, answer.code) == (status, "invalid_request")
        assert "server" not in answer.headers
        await connection.ended()


@WAYS
@pytest.mark.parametrize("junk", [b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"])
async def test_another_protocol_is_answered_in_our_shape(executor: Pod, way: str, junk: bytes) -> None:
    async with on(executor, way) as connection:
        connection.send(junk)
        assert (await connection.answer()).code == "invalid_request"


async def test_no_answer_says_what_the_executor_is_made_of(executor: Pod) -> None:
    for method, path in (
        ("GET", "/healthz"), ("HEAD", "/healthz"), ("GET", "/v1/lease"), ("GET", "/nothing"), ("PUT", "/v1/lease"),
        ("POST", "/v1/exec"), ("GET", "/metrics"), ("GET", "/v1/files?path=nope"), ("GET", "/v1/exec"),
    ):  # fmt: skip
        reply = await executor.call(method, path)
        assert "Server" not in reply.headers, (method, path)
        assert b"aiohttp" not in reply.body.lower()


@pytest.mark.parametrize(
    ("line", "token", "length", "status"),
    [
        ("PUT /v1/files?path=e", "wrong", 1000, 401),
        ("POST /v1/files/mkdir", None, 2 << 20, 413),
        ("PUT /v1/files?path=e", None, 1 << 40, 413),
    ],
)
async def test_who_asks_before_he_sends_is_not_told_to_go_on_where_the_answer_is_no(
    executor: Pod, line: str, token: str | None, length: int, status: int
) -> None:
    """S28"""
    async with raw(executor) as connection:
        connection.send(request(executor, line, None, "Expect: 100-continue", token=token, length=length))
        assert (await connection.answer()).status == status


async def test_who_asks_before_he_sends_is_told_to_go_on(executor: Pod) -> None:
    """S28"""
    async with raw(executor) as connection:
        connection.send(request(executor, "PUT /v1/files?path=expected", None, "Expect: 100-continue", length=5))
        assert (await connection.answer()).status == 100
        connection.send(b"hello")
        assert (await connection.answer()).status == 201
        connection.send(request(executor, "PUT /v1/files?path=expected", None, "Expect: the-worst", length=5))
        answer = await connection.answer()
        assert (answer.status, answer.code) == (400, "invalid_request")
    assert (executor.workspace / "expected").read_text() == "hello"


@needs_root
@pytest.mark.parametrize("line", ["POST /v1/exec", "POST /v1/files/mkdir"])
async def test_a_chunked_body_without_an_end_is_cut_at_its_limit(executor: Pod, line: str) -> None:
    """S28"""
    limit = (96 << 20) if line == "POST /v1/exec" else 1 << 20
    await executor.call("GET", "/v1/lease")
    before = executor.process.status_kib("VmRSS")
    chunk = b'100000\r\n{"a":"' + b"x" * (0x100000 - 6) + b"\r\n"
    async with raw(executor) as connection:
        connection.send(request(executor, line, None, "Transfer-Encoding: chunked"))
        answer = asyncio.create_task(connection.answer(), name="answer")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not answer.done() and sent < limit + (64 << 20):
                connection.send(chunk)
                sent += len(chunk)
                await connection.writer.drain()
                await asyncio.sleep(0)
        got = await answer
    assert (got.status, got.code) == (413, "too_large")
    assert got.json["error"]["details"]["limit"] == limit
    assert executor.process.status_kib("VmRSS") - before < limit // 1024 + 32_000


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=b", "application/x-www-form-urlencoded", None])
async def test_a_form_is_refused_before_it_is_read(executor: Pod, kind: str | None) -> None:
    """S28: part bombs and fields by the hundred thousand are not even looked at"""
    headers = [f"Content-Type: {kind}"] if kind else []
    async with raw(executor) as connection:
        connection.send(request(executor, "POST /v1/exec", None, *headers, length=90 << 20))
        connection.send(b"a=b&" * 1000)
        answer = await connection.answer(20)
        assert (answer.status, answer.code) == (400, "invalid_request")
