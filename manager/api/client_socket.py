"""The caller's end of a WebSocket: who may open one, frames in and out, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final

from aiohttp import WSMsgType, web
from aiohttp.http_websocket import WSCloseCode

from executor.wire import CLOSE_REFUSED, CLOSE_STALLED, HEARTBEAT_SEC, MAX_FRAME_BYTES, PROTOCOL, StreamError
from manager.api.parsing import single
from manager.api.server import as_error, error_body
from manager.api.streams import Messages
from manager.errors import Forbidden, InvalidRequest

SILENT_SEC: float = 3 * HEARTBEAT_SEC  # without anything from the caller, not even the answer to a heartbeat
CLOSE_SEC: Final = 5.0  # for the caller's part of the close


class CallerLeft(Exception):
    """Nothing can be sent any more: the connection was closed, broke, or was dropped by us."""


def is_upgrade(request: web.BaseRequest) -> bool:
    return request.headers.get("Upgrade", "").strip().lower() == "websocket"


class ClientSocket:
    """One frame a binary message, both ways. Sending waits while the caller does not read."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.WebSocketResponse(
            protocols=(PROTOCOL,), compress=False, max_msg_size=MAX_FRAME_BYTES + 1, timeout=CLOSE_SEC
        )

    @classmethod
    async def accept(cls, request: web.Request) -> ClientSocket:
        """Raises InvalidRequest, and Forbidden for a browser's page, before anything is upgraded."""
        check_upgrade(request)
        socket = cls(request)
        try:
            await socket._response.prepare(request)
        except web.HTTPException:
            raise InvalidRequest("the headers of the WebSocket upgrade are broken", field="Upgrade") from None
        return socket

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, message: bytes) -> None:
        """Raises CallerLeft."""
        try:
            await self._response.send_bytes(message)
        except ConnectionError as why:
            raise CallerLeft from why

    async def receive(self) -> tuple[int, bytes]:
        """(type, payload) of the next frame. Raises CallerLeft, also where the caller was silent too long."""
        try:
            message = await self._response.receive(SILENT_SEC)
        except TimeoutError:
            await self.close(CLOSE_STALLED, "silent for three heartbeats")
            raise CallerLeft from None
        if message.type is WSMsgType.BINARY and message.data:
            return message.data[0], message.data[1:]
        if message.type in (WSMsgType.BINARY, WSMsgType.TEXT):
            await self.close(WSCloseCode.UNSUPPORTED_DATA, "a frame is one binary message that is not empty")
        raise CallerLeft

    async def refuse(self, why: Exception) -> None:
        """The error as a frame, and the close code that goes with its status."""
        error = as_error(why)
        with contextlib.suppress(CallerLeft):
            await self.send(Messages.plain(StreamError(error=error_body(error))))
        await self.close(CLOSE_REFUSED + error.status, error.code)

    async def close(self, code: int, why: str = "") -> None:
        """A caller that does not take part in it within CLOSE_SEC is cut off."""
        try:
            async with asyncio.timeout(CLOSE_SEC):
                await self._response.close(code=code, message=why.encode()[:120])
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()


def check_upgrade(request: web.BaseRequest) -> None:
    """Raises Forbidden where a page in a browser asks: it acts with what the browser knows, whoever made it."""
    if "Origin" in request.headers:
        raise Forbidden("WebSockets are not opened for pages in a browser: leave out the Origin header")
    if not is_upgrade(request):
        raise InvalidRequest("upgrade this call to a WebSocket, or use POST", field="Upgrade")
    offered = [name.strip() for name in (single(request.headers, "Sec-WebSocket-Protocol") or "").split(",")]
    if PROTOCOL not in offered:
        raise InvalidRequest(f"offer the WebSocket subprotocol {PROTOCOL}", field="Sec-WebSocket-Protocol")


async def first_of(**work: Coroutine[Any, Any, None]) -> None:
    """Runs all until the first has ended, ends the others, and raises what that one raised."""
    tasks = [asyncio.create_task(each, name=name) for name, each in work.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if task in done:
            task.result()
