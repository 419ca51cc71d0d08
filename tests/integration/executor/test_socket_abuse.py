"""WebSockets whose other end means harm, byte by byte: threat S30."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Final

import pytest

from executor.wire import FRAME_PONG, FRAME_START, PROTOCOL
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected
from tests.support.raw_http import Raw, raw, request

pytestmark = [pytest.mark.timeout(180)]
Fresh = Callable[..., AbstractContextManager[ExecutorProcess]]
CONTINUES, TEXT, BINARY, CLOSE, PING = 0, 1, 2, 8, 9
MiB: Final = 1 << 20
GROWTH_KIB: Final = 40_000
needs_root = pytest.mark.skipif(not IS_ROOT, reason="nobody but root may look at the memory of an executor")


def frame(
    kind: int,
    payload: bytes = b"",
    *,
    final: bool = True,
    masked: bool = True,
    bits: int = 0,
    length: int | None = None,
) -> bytes:
    """With a mask of zeros, which is one; `length` is announced instead of the payload's own."""
    size = len(payload) if length is None else length
    mark = 0x80 if masked else 0
    head = bytes([(0x80 if final else 0) | bits | kind])
    if size < 126:
        head += bytes([mark | size])
    elif size < 1 << 16:
        head += bytes([mark | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([mark | 127]) + size.to_bytes(8, "big")
    return head + (b"\0\0\0\0" if masked else b"") + payload


@asynccontextmanager
async def upgraded(pod: Pod, path: str = "/v1/exec", *headers: str) -> AsyncIterator[tuple[Raw, dict[str, str]]]:
    """The connection after its upgrade, and the answer's headers."""
    async with raw(pod) as connection:
        key = base64.b64encode(os.urandom(16)).decode()
        connection.send(
            request(
                pod,
                f"GET {path}",
                None,
                "Upgrade: websocket",
                "Connection: Upgrade",
                "Sec-WebSocket-Version: 13",
                f"Sec-WebSocket-Key: {key}",
                f"Sec-WebSocket-Protocol: {PROTOCOL}",
                *headers,
            )
        )
        answer = await connection.answer()
        assert answer.status == 101, answer
        yield connection, answer.headers


def start(command: str, **fields: object) -> bytes:
    return frame(BINARY, bytes([FRAME_START]) + json.dumps({"command": command, **fields}).encode())


def close_code(text: bytes) -> int | None:
    """Of the close frame that ends what came; None where there is none."""
    at = text.rfind(b"\x88")
    return None if at < 0 or len(text) < at + 4 else int.from_bytes(text[at + 2 : at + 4], "big")


@pytest.fixture(params=["/v1/exec", "terminal"])
async def path(request: pytest.FixtureRequest, executor: Pod) -> AsyncIterator[str]:
    """Of each kind of WebSocket, in turn."""
    if request.param != "terminal":
        yield request.param
        return
    made = await executor.call("POST", "/v1/terminals", {"command": ["sleep", "600"]})
    assert made.status == 201, made.body
    try:
        yield f"/v1/terminals/{made.json['id']}"
    finally:
        await executor.call("DELETE", f"/v1/terminals/{made.json['id']}")


def _part(kind: int) -> bytes:
    return frame(kind, b"x" * MiB, final=False)


_CASES = {
    "a length of 2^62": (frame(BINARY, b"", length=1 << 62), 1009),
    "a length over the bound": (frame(BINARY, b"", length=17 * MiB), 1009),
    "fragments over the bound": (
        frame(BINARY, b"x" * MiB, final=False) + frame(CONTINUES, b"x" * MiB, final=False) * 16,
        1009,
    ),
    "deflate": (frame(BINARY, b"x", bits=0x40), 1002),
    "a reserved bit": (frame(BINARY, b"x", bits=0x20), 1002),
    "an unknown kind": (frame(3, b"x"), 1002),
    "an unknown control": (frame(0xB, b"x"), 1002),
    "continues nothing": (frame(CONTINUES, b"x"), 1002),
    "a long ping": (frame(PING, b"x" * 126), 1002),
    "a ping in fragments": (frame(PING, b"x", final=False), 1002),
    "a message within one": (frame(BINARY, b"x", final=False) + frame(BINARY, b"y"), 1002),
    "text that is none": (frame(TEXT, b"\xff\xfe"), 1007),
    "half a close code": (frame(CLOSE, b"\x03"), 1002),
    "a close code that is none": (frame(CLOSE, (999).to_bytes(2, "big")), 1002),
    "no mask": (frame(BINARY, b"\x11x", masked=False), 1002),
}


@pytest.mark.parametrize("what", _CASES)
async def test_a_broken_or_huge_frame_ends_its_connection_with_the_code_that_says_why(
    executor: Pod, path: str, what: str
) -> None:
    """S30: lengths out of all bounds, fragments without end, deflate that was not agreed on, no mask"""
    bad, code = _CASES[what]
    async with upgraded(executor, path) as (connection, _headers):
        connection.send(bad)
        assert close_code(await connection.ended(30)) == code
    assert (await executor.call("GET", "/healthz")).status == 200


async def test_compression_is_never_agreed_on(executor: Pod, path: str) -> None:
    """S30: so there is no deflate bomb"""
    offer = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"
    async with upgraded(executor, path, offer) as (_connection, headers):
        assert "sec-websocket-extensions" not in headers


@needs_root
@pytest.mark.parametrize("what", ["empty fragments", "one byte fragments", "pings", "frames that mean nothing"])
async def test_a_flood_of_small_frames_costs_no_memory_and_holds_up_nobody(fresh_executor: Fresh, what: str) -> None:
    """S30"""
    floods = {
        "empty fragments": frame(CONTINUES, b"", final=False),
        "one byte fragments": frame(CONTINUES, b"x", final=False),
        "pings": frame(PING, b"x" * 100),
        "frames that mean nothing": frame(BINARY, b"\x77"),
    }
    with fresh_executor() as process:
        async with connected(process) as pod, upgraded(pod) as (connection, _headers):
            connection.send(start("sleep 600"))
            if "fragments" in what:
                connection.send(frame(BINARY, b"\x11", final=False))
            before = process.status_kib("VmRSS")
            flood = floods[what] * 5000

            async def pour() -> None:
                with contextlib.suppress(ConnectionError):
                    for _ in range(100):
                        connection.send(flood)
                        await connection.writer.drain()

            pouring = asyncio.create_task(pour(), name="pour")  # which may end in the socket: nothing reads answers
            for _ in range(20):
                async with asyncio.timeout(60):
                    assert (await pod.call("GET", "/healthz")).status == 200
                await asyncio.sleep(0.1)
            pouring.cancel()
            assert process.status_kib("VmRSS") - before < GROWTH_KIB


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("pongs", [True, False])
async def test_who_never_reads_is_cut_off_and_what_he_did_not_read_costs_little(
    fresh_executor: Fresh, pongs: bool
) -> None:
    """S30: with signs of life or without; the command goes on"""
    with fresh_executor(env={"SOJOURN_READER_SEC": "8", "SOJOURN_HEARTBEAT_SEC": "2"}) as process:
        async with connected(process) as pod, upgraded(pod) as (connection, _headers):
            before = process.status_kib("VmRSS")
            connection.reader._limit = 1  # type: ignore[attr-defined]  # so asyncio reads nothing either
            connection.send(start("head -c 100000000 /dev/zero; sleep 600", id="unread"))
            ended = False
            for _ in range(160):
                await asyncio.sleep(0.5)
                if pongs:
                    connection.send(frame(BINARY, bytes([FRAME_PONG])))
                metrics = (await pod.call("GET", "/metrics")).body.decode()
                if "\nsojourn_connections 1.0\n" in metrics:  # our own
                    ended = True
                    break
            assert ended
            assert process.status_kib("VmRSS") - before < GROWTH_KIB
            info = await pod.info("unread")
            assert info["state"] == "running"


async def test_an_upgrade_that_is_none_is_refused_in_our_shape(executor: Pod) -> None:
    """S30"""
    good = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: " + "A" * 24)
    for without in range(4):
        headers = [header for number, header in enumerate(good) if number != without]
        async with raw(executor) as connection:
            connection.send(request(executor, "GET /v1/exec", None, *headers, f"Sec-WebSocket-Protocol: {PROTOCOL}"))
            answer = await connection.answer()
            assert (answer.status, answer.code) == (400, "invalid_request"), good[without]
