"""The short way for the one call that is made most: a plain `POST /v1/exec`.

Every connection starts here. A request that is exactly an ordinary small `exec` (the request line, known headers once
each, a Content-Length, all of it there at once) is answered from here, without a task and without a framework.
Whatever else comes, on the first or any later request, hands the connection over to aiohttp with all bytes unread once
its head is there, and it stays there: so nothing is parsed by two parsers, and there is nothing here to smuggle past.

Worth its place by benchmarks/bench_exec.py: about a quarter of the executor's own work for a command."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp.web_protocol import RequestHandler

from executor.errors import ExecutorError, InvalidRequest
from executor.guard import Guard, error_reply
from executor.process import Command
from executor.processes import Processes
from executor.routes.reply import decode_json
from executor.wire import ExecRequest

log = logging.getLogger("executor.front")

REQUEST_LINE: Final = b"POST /v1/exec HTTP/1.1\r\n"
HEAD_BYTES: Final = 4096
LONG_HEAD_BYTES: Final = 65_536  # of other requests: aiohttp's own limits are below it
BODY_BYTES: Final = 131_072
PIPELINED_BYTES: Final = 262_144  # beyond it nothing more is read until the command has ended
FIRST_SEC: Final = 10.0  # a connection that sends nothing at first, or no whole head in this time, is closed
IDLE_SEC: Final = 75.0  # and a kept one between requests

_HEAD: Final = re.compile(rb"(?:[A-Za-z-]+: ?[\x21-\x7e][\x20-\x7e]*\r\n)+")
_KNOWN: Final = frozenset({
    b"host", b"authorization", b"sandbox-pod", b"sandbox-lease-sec", b"content-length", b"content-type", b"accept",
    b"accept-encoding", b"user-agent", b"connection",
})  # fmt: skip
_PLAIN_ACCEPT: Final = (None, b"*/*", b"application/json")
_ENCODER: Final = msgspec.json.Encoder()


class Front:
    """Makes the protocol of each connection, and closes those that are idle."""

    def __init__(self, processes: Processes, guard: Guard, others: Callable[[], RequestHandler]) -> None:
        self.processes = processes
        self.guard = guard
        self.others = others
        self.loop = asyncio.get_running_loop()
        self.open: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self.last_descriptor = processes.spawner.last_descriptor

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    def opened(self, connection: _Connection) -> None:
        self.open.add(connection)
        if self._sweep is None:
            self._sweep = self.loop.call_later(FIRST_SEC, self._close_idle)

    def _close_idle(self) -> None:
        now = self.loop.time()
        for connection in list(self.open):
            connection.close_if_idle(now)
        self._sweep = self.loop.call_later(FIRST_SEC, self._close_idle) if self.open else None

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.open):
            connection.transport.close()


class _Connection(asyncio.Protocol):
    __slots__ = (
        "_command", "_front", "_is_partial", "_kept", "_kill", "_paused", "_since", "_unread", "_used", "transport",
    )  # fmt: skip

    def __init__(self, front: Front) -> None:
        self._front = front
        self._is_partial = False  # a head has begun and not ended
        self._kept = b""
        self._command: Command | None = None
        self._kill = False
        self._paused = False
        self._unread = False  # the caller does not take its answers as fast as they come
        self._used = False
        self._since = front.loop.time()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio's
        if transport.get_extra_info("socket").fileno() > self._front.last_descriptor:
            self.transport.abort()
            return
        self._front.opened(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._front.open.discard(self)
        if self._command is not None and self._kill:
            self._command.end("cancelled")

    def data_received(self, data: bytes) -> None:
        self._kept = self._kept + data if self._kept else data
        if self._command is None and not self._unread:
            self._next()
        elif len(self._kept) > PIPELINED_BYTES and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self._unread = True

    def resume_writing(self) -> None:
        self._unread = False
        self._after()

    def _next(self) -> None:
        data = self._kept
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES)
        headers = (
            _plain_headers(data[len(REQUEST_LINE) : end + 2]) if end > 0 and data.startswith(REQUEST_LINE) else None
        )
        if headers is None:
            self._next_other()
            return
        body_end = end + 4 + int(headers[b"content-length"])
        if body_end - end > BODY_BYTES or body_end > len(data):
            self._hand_over()
            return
        self._kept = data[body_end:]
        self._used = True
        self._is_partial = False
        self._run(headers, data[end + 4 : body_end])

    def _next_other(self) -> None:
        """What is not for the short way, or not all of it there yet: aiohttp would wait for the rest for ever."""
        data = self._kept
        if b"\r\n\r\n" in data or not data[:1].isalpha():
            self._hand_over()
        elif len(data) > LONG_HEAD_BYTES:
            self._refuse(InvalidRequest(f"the request's head is over the limit of {LONG_HEAD_BYTES} bytes"))
            self.transport.close()
        elif not self._is_partial:
            self._is_partial = True
            self._since = self._front.loop.time()

    def _run(self, headers: dict[bytes, bytes], body: bytes) -> None:
        try:
            self._front.guard.admit(
                headers[b"authorization"].decode() if b"authorization" in headers else None,
                headers[b"sandbox-pod"].decode() if b"sandbox-pod" in headers else None,
                headers[b"sandbox-lease-sec"].decode() if b"sandbox-lease-sec" in headers else None,
            )
            request = decode_json(body, ExecRequest)
            command, _joined = self._front.processes.start(request)
        except ExecutorError as error:
            self._refuse(error)
            return
        except Exception:
            log.exception("request_failed", extra={"path": "/v1/exec"})
            self._refuse(ExecutorError("the executor failed; its log has the details"))
            return
        self._command = command
        self._kill = request.on_disconnect == "kill"
        if command.ended.done():
            self._answer(command)
        else:
            command.ended.add_done_callback(lambda _ended: self._answer(command))

    def _answer(self, command: Command) -> None:
        self._command = None
        if self.transport.is_closing():
            return
        try:
            body = _ENCODER.encode(command.result())
        except ExecutorError as error:
            self._refuse(error)
            return
        self._send(b"200 OK", body)

    def _refuse(self, error: ExecutorError) -> None:
        extra = b"\r\nRetry-After: 1" if error.retryable else b""
        self._send(b"%d Error" % error.status, _ENCODER.encode(error_reply(error)), extra)

    def _send(self, status: bytes, body: bytes, extra: bytes = b"") -> None:
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d%b\r\n\r\n"
        self.transport.write(head % (status, len(body), extra) + body)
        self._since = self._front.loop.time()
        if self._kept:
            self._front.loop.call_soon(self._after)
        elif self._paused:
            self._read_on()

    def _after(self) -> None:
        """The next of several requests that came at once."""
        if self._command is None and not self._unread and self._kept and not self.transport.is_closing():
            self._next()
            if self._paused and len(self._kept) <= PIPELINED_BYTES:
                self._read_on()

    def _read_on(self) -> None:
        self._paused = False
        self.transport.resume_reading()

    def _hand_over(self) -> None:
        if self._paused:
            self._read_on()
        self._front.open.discard(self)
        handler = self._front.others()
        self.transport.set_protocol(handler)
        handler.connection_made(self.transport)
        if self._unread:
            handler.pause_writing()
        handler.data_received(self._kept)

    def close_if_idle(self, now: float) -> None:
        patience = IDLE_SEC if self._used and not self._is_partial else FIRST_SEC
        if self._command is None and now - self._since > patience:
            self.transport.close()


def _plain_headers(head: bytes) -> dict[bytes, bytes] | None:
    """The headers of an ordinary call by their lower-case names; None for anything out of the ordinary."""
    if _HEAD.fullmatch(head) is None:
        return None
    headers: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name not in _KNOWN or name in headers:
            return None
        headers[name] = value.strip()
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or len(length) > 6 or b"host" not in headers:
        return None
    if (
        headers.get(b"accept") not in _PLAIN_ACCEPT
        or headers.get(b"connection", b"keep-alive").lower() != b"keep-alive"
    ):
        return None
    return headers
