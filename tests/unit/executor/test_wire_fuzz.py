"""What comes over the wire, made up at random: read as another reader reads it, or refused with the one typed error.

Quick by default; SOJOURN_FUZZ_SEC=600 goes on for so long with each."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import http_parser
from aiohttp.base_protocol import BaseProtocol
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor import wire
from executor.errors import InvalidRequest
from executor.front import REQUEST_LINE, _plain_headers
from executor.jsonbody import decode_json
from manager.executor_answers import BadAnswer
from manager.pod_http import MAX_HEAD_BYTES, Interrupted, _Connection

FUZZ_SEC = float(os.environ.get("SOJOURN_FUZZ_SEC", "0"))
QUICK = settings(
    max_examples=500 if FUZZ_SEC else 300, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
pytestmark = pytest.mark.timeout(FUZZ_SEC + 120)

REQUESTS = (
    wire.ExecRequest, wire.SessionRequest, wire.SessionExecRequest, wire.TerminalRequest, wire.SignalRequest,
    wire.InterruptRequest, wire.ResizeRequest, wire.BindRequest, wire.LeaseRequest, wire.MkdirRequest,
    wire.MoveRequest, wire.ChmodRequest, wire.WatchRequest,
)  # fmt: skip

NAME = st.sampled_from(
    [b"Host", b"host", b"Content-Length", b"content-length", b"Transfer-Encoding", b"Connection", b"Accept", b"Expect",
     b"Authorization", b"Sandbox-Pod", b"Sandbox-Lease-Sec", b"Upgrade", b"User-Agent", b"Content-Length ", b" Host",
     b"", b"X\0", b"Content_Length", b"H\xc3\xb6st"]
)  # fmt: skip
VALUE = st.one_of(
    st.sampled_from([b"pod", b"1", b"12", b"+1", b"0x1", b"1, 1", b"-1", b"1_0", b"999999999", b"chunked", b"close",
                     b"keep-alive", b"100-continue", b"*/*", b"application/json", b"", b" 1", b"1 ", b"1\t", b"\x0b1",
                     b"Bearer t", b"a\rb", b"a\nb", b"a\0b", b"\xff"]),
    st.binary(max_size=12),
)  # fmt: skip
LINE_END = st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b"\r\n "])
COLON = st.sampled_from([b": "] * 6 + [b":", b" : ", b":\t", b""])


def as_long_as_told(fuzz: Callable[[], None]) -> None:
    until = time.monotonic() + FUZZ_SEC
    fuzz()
    while time.monotonic() < until:
        fuzz()


ORDINARY = st.tuples(
    st.sampled_from([b"Authorization", b"sandbox-pod", b"Sandbox-Lease-Sec", b"Content-Type", b"Accept-Encoding",
                     b"user-agent"]),
    st.sampled_from([b": ", b":"]),
    st.binary(max_size=12).map(lambda value: bytes(0x20 + byte % 0x5F for byte in value)),
)  # fmt: skip


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Made of what no client sends, of what every client sends, or of both."""
    odd = draw(st.lists(st.tuples(NAME, COLON, VALUE, LINE_END), max_size=draw(st.sampled_from([0, 1, 6]))))
    usual = draw(st.lists(ORDINARY, max_size=4, unique_by=lambda line: line[0].lower()))
    length = b"Content-Length: %d\r\n" % draw(st.integers(0, 30))
    start = b"Host: pod\r\n" + length if draw(st.integers(0, 3)) else b""
    return start + b"".join(b"".join(line) + b"\r\n" for line in usual) + b"".join(b"".join(line) for line in odd)


def test_what_the_short_way_takes_aiohttp_reads_in_the_same_way() -> None:
    loop = asyncio.new_event_loop()
    taken: list[bytes] = []

    @QUICK
    @given(heads())
    def fuzz(head: bytes) -> None:
        headers = _plain_headers(head)
        if headers is None:
            return
        taken.append(head)
        parser = http_parser.HttpRequestParser(
            BaseProtocol(loop), loop, 2**16, max_line_size=16_384, max_field_size=16_384
        )
        body = b"x" * int(headers[b"content-length"])
        messages, is_upgraded, rest = parser.feed_data(REQUEST_LINE + head + b"\r\n" + body + b"GET / HTTP/1.1\r\n")
        assert len(messages) == 1
        assert (is_upgraded, rest) == (False, b"")
        message = messages[0][0]
        assert (message.method, message.path, message.should_close, message.chunked) == (
            "POST",
            "/v1/exec",
            False,
            False,
        )
        read = {name.lower(): value for name, value in message.headers.items()}
        assert read == {name.decode(): value.decode() for name, value in headers.items()}
        assert len(message.headers) == len(headers)

    try:
        as_long_as_told(fuzz)
    finally:
        loop.close()
    assert len(taken) > 10


@QUICK
@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=8), st.data())
def _cut_anywhere(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    sent = b"".join(wire.frame(kind, payload) for kind, payload in frames)
    reader, got, at = wire.FrameReader(), [], 0
    while at < len(sent):
        size = data.draw(st.integers(1, len(sent) - at))
        got += reader.feed(sent[at : at + size])
        at += size
    assert got == frames
    assert reader.pending == 0


def test_frames_are_the_same_wherever_the_stream_is_cut() -> None:
    as_long_as_told(_cut_anywhere)


EVENT = st.dictionaries(
    st.sampled_from(["type", "id", "pid", "stream", "offset", "bytes", "error", "exit_code", "usage", "at", "x"]),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5),
              st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)),
    max_size=6,
)  # fmt: skip


@QUICK
@given(st.integers(0, 255), st.one_of(st.binary(max_size=60), EVENT.map(lambda event: json.dumps(event).encode())))
def _any_frame(kind: int, payload: bytes) -> None:
    try:
        event = wire.decode_frame(kind, payload)
    except wire.MalformedFrame:
        return
    assert event is None or isinstance(event, msgspec.Struct)


@QUICK
@given(st.binary(max_size=200))
def _any_stream(data: bytes) -> None:
    reader = wire.FrameReader(max_bytes=64)
    try:
        frames = reader.feed(data)
    except wire.MalformedFrame:
        return
    assert sum(5 + len(payload) for _, payload in frames) + reader.pending == len(data)
    assert reader.pending <= 5 + 64


def test_a_frame_of_any_bytes_is_an_event_or_malformed() -> None:
    as_long_as_told(_any_frame)


def test_a_stream_of_any_bytes_is_frames_within_their_bound_or_malformed() -> None:
    as_long_as_told(_any_stream)


FIELD = st.sampled_from(
    ["command", "cwd", "env", "stdin", "user", "timeout_sec", "grace_sec", "id", "signal", "to", "cols", "rows", "path",
     "mode", "source", "target", "sandbox_id", "files", "lease", "quiet_sec", "other"]
)  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(FIELD, inner, max_size=4)),
    max_leaves=8,
)
BODY = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(FIELD, JSON, max_size=5).map(lambda body: json.dumps(body).encode()),
    st.sampled_from([b"[" * 5000, b'{"env":' * 3000, b'{"command":"\\ud800"}', b'{"command":1e999}', b"NaN", b"\xff",
                     b'{"command":"a","command":"b"}', b'{"timeout_sec":' + b"9" * 5000 + b"}"]),
)  # fmt: skip


@QUICK
@given(st.sampled_from(REQUESTS), BODY)
def _any_body(kind: type[Any], body: bytes) -> None:
    try:
        value = decode_json(body, kind)
    except InvalidRequest:
        return
    assert isinstance(value, kind)
    if isinstance(value, wire.ExecRequest):
        wire.bad_field(value)


def test_any_body_is_a_request_or_a_typed_refusal() -> None:
    as_long_as_told(_any_body)


class _Deaf:
    """A transport that only knows whether it was given up."""

    closed = False

    def write(self, _data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


STATUS = st.sampled_from(
    [b"HTTP/1.1 200 OK", b"HTTP/1.1 204 No Content", b"HTTP/1.1 404 x", b"HTTP/1.0 200 OK", b"HTTP/1.1 100 Continue",
     b"HTTP/1.1 99 x", b"HTTP/1.1 200 " + b"x" * 300, b"", b"GET / HTTP/1.1"]
)  # fmt: skip


def test_any_answer_of_a_pod_is_one_within_its_bounds_or_ends_the_connection() -> None:
    @QUICK
    @given(STATUS, heads(), st.binary(max_size=40), st.data())
    def fuzz(status: bytes, head: bytes, body: bytes, data: st.DataObject) -> None:
        connection = _Connection(None, lambda _lost: None)  # type: ignore[arg-type]
        transport = _Deaf()
        connection.connection_made(transport)  # type: ignore[arg-type]
        answer = connection.send(b"", b"", 30)
        sent, at = status + b"\r\n" + head + b"\r\n" + body, 0
        while at < len(sent) and not transport.closed:
            size = data.draw(st.integers(1, len(sent) - at))
            connection.data_received(sent[at : at + size])
            assert len(connection._kept) <= MAX_HEAD_BYTES + 30 + size
            at += size
        if not answer.done():
            connection.connection_lost(None)
        error = answer.exception()
        if error is not None:
            assert isinstance(error, BadAnswer | Interrupted)
            assert not connection.reusable
            return
        number, content = answer.result()
        assert status.startswith(b"HTTP/1.1 %d" % number)
        read, _, rest = sent.partition(b"\r\n\r\n")  # what was drawn as the head may hold the end of one
        assert content == rest[: len(content)]
        lengths = [line for line in read.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        assert len(lengths) == 1 or (number == 204 and not lengths)

    async def within_a_loop() -> None:
        as_long_as_told(fuzz)

    asyncio.run(within_a_loop())
