"""The client's end of a WebSocket that carries our frames."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from executor.wire import (
    FRAME_PONG,
    FRAME_SIGNAL,
    FRAME_START,
    FRAME_STDIN,
    FRAME_STDIN_EOF,
    PROTOCOL,
    Exit,
    FrameEvent,
    Gap,
    Heartbeat,
    OutputFrame,
    Started,
    StreamError,
    decode_frame,
)

LONG_SEC: Final = 60.0  # for what takes moments on an idle machine
FRAME_RESIZE: Final = 0x14


class Socket:
    """Everything that came, put together; heartbeats are answered as they are read."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, answers: bool = True) -> None:
        self.ws = ws
        self.answers = answers
        self.events: list[FrameEvent] = []
        self.out = {"stdout": bytearray(), "stderr": bytearray()}
        self.first: dict[str, int] = {}  # offset of the first byte of each stream
        self.gaps: list[Gap] = []
        self.errors: list[StreamError] = []
        self.started: Started | None = None
        self.exit: Exit | None = None
        self.heartbeats = 0
        self.close_code: int | None = None

    async def send(self, kind: int, payload: bytes = b"") -> None:
        await self.ws.send_bytes(kind.to_bytes(1, "big") + payload)

    async def send_json(self, kind: int, value: Any) -> None:
        await self.send(kind, json.dumps(value).encode())

    async def start(self, command: str | list[str], **fields: Any) -> None:
        await self.send_json(FRAME_START, {"command": command, **fields})

    async def type(self, data: bytes) -> None:
        await self.send(FRAME_STDIN, data)

    async def end_input(self) -> None:
        await self.send(FRAME_STDIN_EOF)

    async def signal(self, name: str, to: str = "tree") -> None:
        await self.send_json(FRAME_SIGNAL, {"signal": name, "to": to})

    async def resize(self, cols: Any, rows: Any) -> None:
        await self.send_json(FRAME_RESIZE, {"cols": cols, "rows": rows})

    async def next(self) -> FrameEvent | None:
        """The next event; None at the end of the connection."""
        async with asyncio.timeout(LONG_SEC):
            message = await self.ws.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            self.close_code = self.ws.close_code
            return None
        event = decode_frame(message.data[0], message.data[1:])
        assert event is not None, f"an unknown frame: {message.data[0]}"
        await self._keep(event)
        return event

    async def _keep(self, event: FrameEvent) -> None:
        assert self.exit is None, f"an event after the exit: {event}"
        self.events.append(event)
        if isinstance(event, OutputFrame):
            first = self.first.setdefault(event.stream, event.offset)
            missed = sum(gap.bytes for gap in self.gaps if gap.stream == event.stream and gap.offset >= first)
            assert event.offset == first + len(self.out[event.stream]) + missed, "output is missing or comes twice"
            self.out[event.stream] += event.data
        elif isinstance(event, Gap):
            self.gaps.append(event)
        elif isinstance(event, Started):
            self.started = event
        elif isinstance(event, Exit):
            self.exit = event
        elif isinstance(event, StreamError):
            self.errors.append(event)
        elif isinstance(event, Heartbeat):
            self.heartbeats += 1
            if self.answers:
                await self.send(FRAME_PONG)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Reads on until the condition holds."""
        give_up = time.monotonic() + LONG_SEC
        while not condition():
            assert time.monotonic() < give_up, f"not within {LONG_SEC:.0f} s: {what}; got {self.stdout[-300:]!r}"
            assert await self.next() is not None, f"the end ({self.close_code}) came before: {what}; {self.stdout!r}"

    async def until_text(self, text: bytes) -> None:
        await self.until(lambda: text in self.stdout, f"{text!r} in the output")

    async def to_end(self) -> Socket:
        """Reads until the connection is closed."""
        give_up = time.monotonic() + LONG_SEC
        while await self.next() is not None:
            assert time.monotonic() < give_up, f"not at its end within {LONG_SEC:.0f} s; got {self.stdout[-300:]!r}"
        return self

    @property
    def stdout(self) -> bytes:
        return bytes(self.out["stdout"])

    @property
    def stderr(self) -> bytes:
        return bytes(self.out["stderr"])


@asynccontextmanager
async def socket_at(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], *, answers: bool = True
) -> AsyncIterator[Socket]:
    async with session.ws_connect(
        url, headers=headers, protocols=(PROTOCOL,), max_msg_size=1 << 20, autoping=True, heartbeat=None
    ) as ws:
        yield Socket(ws, answers)
