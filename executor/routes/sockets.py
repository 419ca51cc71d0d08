"""A WebSocket that carries our frames: checked before its upgrade, bounded both ways, cut when its client is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from aiohttp import WSMsgType, web
from aiohttp.http_websocket import WSCloseCode

from executor.errors import ExecutorError, InvalidRequest
from executor.follow import STREAMS, Follower
from executor.guard import error_body
from executor.output import Piece
from executor.wire import (
    CHUNK_BYTES,
    CLOSE_REFUSED,
    CLOSE_STALLED,
    MAX_FRAME_BYTES,
    PROTOCOL,
    Exit,
    Gap,
    Heartbeat,
    Started,
    StreamError,
    event_message,
    output_message,
)
from executor.writers import now_rfc3339

CLOSE_SEC: Final = 5.0  # for the other side's part of the close
SILENT_BEATS: Final = 3


class ClientLeft(Exception):
    """The connection is over and nothing can be sent any more: closed, broken, or dropped by us."""


class FrameSocket:
    """One frame a binary message: type byte and payload. Sending waits while the client does not read."""

    def __init__(self, request: web.Request, heartbeat_sec: float) -> None:
        self._request = request
        self._heartbeat_sec = heartbeat_sec
        self.response = web.WebSocketResponse(
            protocols=(PROTOCOL,), compress=False, max_msg_size=MAX_FRAME_BYTES + 1, timeout=CLOSE_SEC
        )

    @classmethod
    async def accept(cls, request: web.Request, heartbeat_sec: float) -> FrameSocket:
        """Raises InvalidRequest, before anything was upgraded."""
        offered = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        if PROTOCOL not in offered:
            raise InvalidRequest(f"offer the WebSocket subprotocol {PROTOCOL}", field="Sec-WebSocket-Protocol")
        socket = cls(request, heartbeat_sec)
        try:
            await socket.response.prepare(request)
        except web.HTTPException:
            raise InvalidRequest("the headers of the WebSocket upgrade are broken", field="Upgrade") from None
        return socket

    # ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def send(self, event: Started | Gap | Heartbeat | Exit | StreamError) -> None:
        """Raises ClientLeft."""
        await self._send(event_message(event))

    async def send_pieces(self, pieces: list[tuple[int, Piece]]) -> None:
        """(stream, piece) as gap and output frames. Raises ClientLeft."""
        for stream, piece in pieces:
            name = STREAMS[stream]
            if piece.gap:
                await self.send(Gap(stream=name, offset=piece.offset - piece.gap, bytes=piece.gap))
            for at in range(0, len(piece.data), CHUNK_BYTES):
                await self._send(output_message(name, piece.offset + at, piece.data[at : at + CHUNK_BYTES]))

    async def tell(self, error: ExecutorError) -> None:
        """What was wrong with a frame; nothing ends. Raises ClientLeft."""
        await self.send(StreamError(error=error_body(error)))

    async def refuse(self, error: ExecutorError) -> None:
        """Tells the error and closes with its code."""
        try:
            await self.tell(error)
        except ClientLeft:
            pass
        await self.close(CLOSE_REFUSED + error.status, error.code)

    async def _send(self, message: bytes) -> None:
        try:
            await self.response.send_bytes(message)
        except ConnectionError as why:
            raise ClientLeft from why

    # ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def receive(self) -> tuple[int, bytes]:
        """(type, payload) of the next frame. Raises ClientLeft, for a client that was silent too long as well."""
        while True:
            try:
                message = await self.response.receive(SILENT_BEATS * self._heartbeat_sec)
            except TimeoutError:
                await self.close(CLOSE_STALLED, "silent for three heartbeats")
                raise ClientLeft from None
            if message.type is WSMsgType.BINARY and message.data:
                return message.data[0], message.data[1:]
            if message.type in (WSMsgType.BINARY, WSMsgType.TEXT):
                await self.close(WSCloseCode.UNSUPPORTED_DATA, "a frame is one binary message that is not empty")
            raise ClientLeft

    async def close(self, code: int, why: str = "") -> None:
        """Ends the connection; one that does not take part in it within CLOSE_SEC is cut."""
        try:
            async with asyncio.timeout(CLOSE_SEC):
                await self.response.close(code=code, message=why.encode()[:120])
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()

    # ── both ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def follow(self, follower: Follower) -> None:
        """Sends all of the output until the command's end, and heartbeats in between, output or not: the client's
        answers to them are the signs of its life."""
        loop = asyncio.get_running_loop()
        beat = loop.time() + self._heartbeat_sec
        while True:
            got = await follower.next(quiet_sec=max(0.0, beat - loop.time()))
            if got == "end":
                return
            if got != "quiet":
                await self.send_pieces(got)
            if loop.time() >= beat:
                await self.send(Heartbeat(at=now_rfc3339()))
                beat = loop.time() + self._heartbeat_sec


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


def is_upgrade(request: web.Request) -> bool:
    return request.headers.get("Upgrade", "").strip().lower() == "websocket"
