"""A connection as the application has it: aiohttp's protocol, with our answers where aiohttp would give its own, and
the deadlines that it has not."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_websocket import WSCloseCode
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from executor.connections import HEAD_SEC, IDLE_SEC, NEVER, Connections
from executor.errors import ExecutorError, InvalidRequest, LateRequest, LongHead
from executor.guard import error_reply
from executor.httplog import Complaints
from executor.wire import JSON_TYPE

LINE_BYTES: Final = 16_384
LINGERING_SEC: Final = 2.0  # for the rest of a body that was refused, so that its sender reads the answer
_SERVER: Final = "Server"
_UNMASKED: Final = b"\x88\x02" + WSCloseCode.PROTOCOL_ERROR.to_bytes(2, "big")


class Edge(RequestHandler):
    __slots__ = ("_address", "_complaints", "_connections", "_head_since", "_is_masked", "_last_body", "_unread_since")

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, complaints: Complaints, connections: Connections,
        address: str,
    ) -> None:  # fmt: skip
        """`address` is what the connection was counted under."""
        super().__init__(
            server, loop=loop,
            access_log=None,  # type: ignore[arg-type]  # what its runner gives too: nothing is written
            keepalive_timeout=IDLE_SEC, lingering_time=LINGERING_SEC, max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES,
            auto_decompress=False,  # what goes to a port goes as it is; no other body of ours may come compressed
        )  # fmt: skip
        self._complaints = complaints
        self._connections = connections
        self._address = address
        self._head_since = NEVER  # the first bytes of a head that is not all there
        self._last_body: StreamReader | None = None  # of the request that came last
        self._is_masked = False  # the first frame of a WebSocket was seen, and is (RFC 6455, 5.1)
        self._unread_since = NEVER  # the caller takes nothing more of its answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.watch(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.forget(self)
        self._connections.leave(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._payload_parser is not None and not self._is_masked and len(data) > 1:
            self._is_masked = True
            if not data[1] & 0x80:  # aiohttp takes either; a client that masks its first frame masks all
                assert self.transport is not None
                self.transport.write(_UNMASKED)
                self.force_close()
                return
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._last_body = self._messages[-1][1] if self._messages else None
            self._head_since = NEVER
        elif data and self._head_since is NEVER and not self._upgraded and self._at_head:
            self._head_since = self._loop.time()
            self._connections.look_at(self.deadline())

    @property
    def _at_head(self) -> bool:
        """Whether what comes next belongs to a head."""
        return self._last_body is None or self._last_body.is_eof()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since = self._loop.time()
        self._connections.look_at(self.deadline())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = NEVER

    def deadline(self) -> float:
        return min(self._head_since + HEAD_SEC, self._unread_since + self._connections.reader_sec)

    def expire(self) -> None:
        if self.transport is None:
            return
        if self._unread_since + self._connections.reader_sec <= self._loop.time():
            self.transport.abort()
            return
        if self._waiter is None or self._waiter.done():  # an earlier request is under way: this head's time is to come
            self._head_since = self._loop.time()
            self._connections.watch(self)
            return
        body = _body_of(LateRequest(f"the request's head did not arrive within {HEAD_SEC:.0f} s"))
        head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: {JSON_TYPE}\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.force_close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What has no HTTP in it that could be read. Every other error is the application's."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer is out")
        if status < 500:
            why = " ".join((message or "").split())[:200]
            self._complaints.tell(why)
            kind = LongHead if isinstance(exc, LineTooLong) or "Too many headers" in why else InvalidRequest
            error: ExecutorError = kind(f"this is no request that can be read: {why}")
        else:
            self.logger.error("request_failed", exc_info=exc)
            error = ExecutorError("the executor failed; its log has the details")
        answer = _Refusal(body=_body_of(error), status=error.status, content_type=JSON_TYPE)
        answer.force_close()
        return answer


class _Refusal(web.Response):
    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall(_SERVER, None)


async def without_server(_request: web.Request, response: web.StreamResponse) -> None:
    """For an application's `on_response_prepare`: what runs here is nobody's business."""
    response.headers.popall(_SERVER, None)


def _body_of(error: ExecutorError) -> bytes:
    return msgspec.json.encode(error_reply(error))
