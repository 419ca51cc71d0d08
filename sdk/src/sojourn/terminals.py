"""Terminals: a process on a pseudo-terminal, and connections to it that go on where they broke."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Literal, Self

import aiohttp
import msgspec

from sojourn.errors import ConnectionFailed, NotFound, SojournError, TakenOver, UnexpectedAnswer
from sojourn.frames import HEARTBEAT, decode_frame
from sojourn.paths import piece
from sojourn.transport import Patience, Transport, decode, error_of
from sojourn.types import ErrorBody, ErrorReply, Exit, Gap, Output, Started, TerminalInfo

SILENCE_SEC: Final = 45.0  # three heartbeats: then the connection is dead, whatever TCP says
INPUT_BYTES: Final = 256 << 10  # of one message
TAKEN_OVER: Final = 4001
REFUSED: Final = 4000  # and the error's status

_STDIN, _STDIN_EOF, _SIGNAL, _RESIZE, _PONG = 0x11, 0x12, 0x13, 0x14, 0x15

TerminalEvent = Output | Gap | Exit
Mode = Literal["control", "view"]


class AsyncTerminal:
    """A handle on one terminal of a task. Its process goes on without any connection."""

    def __init__(self, transport: Transport, task: str, terminal_id: str) -> None:
        self.id = terminal_id
        self._transport = transport
        self._path = f"{task}/terminals/{piece(terminal_id)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def info(self) -> TerminalInfo:
        """Its state now. Raises NotFound, SandboxGone."""
        answer = await self._transport.call("GET", self._path, retry="safe")
        return decode(answer.body, TerminalInfo)

    async def delete(self) -> None:
        """Hangs up and ends everything that runs on it. No error where there is none."""
        try:
            await self._transport.call("DELETE", self._path, retry="safe")
        except NotFound:
            pass

    def connect(
        self,
        *,
        mode: Mode = "control",
        offset: int | None = None,
        on_break: Callable[[SojournError], None] | None = None,
    ) -> AsyncTerminalConnection:
        """Output from byte `offset` on, by default from the last screens on; see AsyncTerminalConnection.

        Who controls takes over from whoever did. `on_break` is called each time that the connection broke and is
        tried again."""
        return AsyncTerminalConnection(self._transport, self._path, mode, offset, on_break)


class AsyncTerminalConnection:
    """What a terminal shows, as it happens: Output and Gap, then Exit. Iterate it, in `async with`.

    A connection that breaks is made again where it broke, for as long as a call would be retried; input that was on
    its way then may be lost. Raises TakenOver where another connection took control, and APIError, ConnectionFailed
    where the terminal cannot be reached any more. Leaving ends nothing."""

    def __init__(
        self,
        transport: Transport,
        path: str,
        mode: Mode,
        offset: int | None,
        on_break: Callable[[SojournError], None] | None,
    ) -> None:
        self.exit: Exit | None = None
        self.offset = offset  # of the next byte; None before the first
        self._transport = transport
        self._path = path
        self._mode = mode
        self._on_break = on_break
        self._size: tuple[int, int] | None = None
        self._ws: aiohttp.ClientWebSocketResponse | None = None
        self._up = asyncio.Event()
        self._error: ErrorBody | None = None  # the last that came
        self.events = self._whole()

    def __aiter__(self) -> AsyncIterator[TerminalEvent]:
        return self

    async def __anext__(self) -> TerminalEvent:
        return await anext(self.events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.events.aclose()

    # ── input ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def write(self, data: bytes) -> None:
        """Types it. Waits while there is no connection, and while the program does not read."""
        for at in range(0, len(data), INPUT_BYTES):
            await self._send(_STDIN, data[at : at + INPUT_BYTES])

    async def end_input(self) -> None:
        """Types the terminal's end-of-input character."""
        await self._send(_STDIN_EOF, b"")

    async def signal(self, name: str, to: Literal["leader", "tree"] = "tree") -> None:
        await self._send(_SIGNAL, msgspec.json.encode({"signal": name, "to": to}))

    async def resize(self, cols: int, rows: int) -> None:
        """Also told to every connection that follows this one."""
        self._size = cols, rows
        if self._up.is_set():
            await self._send(_RESIZE, self._size_body())

    def _size_body(self) -> bytes:
        assert self._size is not None
        return msgspec.json.encode({"cols": self._size[0], "rows": self._size[1]})

    async def _send(self, kind: int, payload: bytes) -> None:
        await self._up.wait()
        ws = self._ws
        if ws is not None:
            try:
                await ws.send_bytes(kind.to_bytes(1, "big") + payload)
            except (ConnectionError, aiohttp.ClientError):
                pass  # whoever reads finds out why, and connects again

    # ── one terminal, whatever happens to its connections ───────────────────────────────────────────────────────

    async def _whole(self) -> AsyncGenerator[TerminalEvent, None]:
        patience = Patience(self._transport)
        while True:
            try:
                async with aclosing(self._one()) as events:
                    async for event in events:
                        patience.renew()
                        if event is not None:
                            yield event
                        if self.exit is not None:
                            return
            except SojournError as why:
                if isinstance(why, TakenOver):
                    raise
                if self._on_break is not None:
                    self._on_break(why)
                await patience.bear(why)

    async def _one(self) -> AsyncGenerator[TerminalEvent | None, None]:
        """One connection's events, None for its start. Raises where it ends before the terminal's process."""
        params = {"mode": self._mode} | ({} if self.offset is None else {"offset": str(self.offset)})
        async with self._transport.websocket(self._path, params) as ws:
            self._ws, self._error = ws, None
            try:
                if self._size is not None and self._mode == "control":
                    await ws.send_bytes(bytes([_RESIZE]) + self._size_body())
                self._up.set()
                while True:
                    event = await self._next(ws)
                    if event is not None:
                        yield event if isinstance(event, Output | Gap | Exit) else None
                    if self.exit is not None:
                        return
            finally:
                self._up.clear()
                self._ws = None

    async def _next(self, ws: aiohttp.ClientWebSocketResponse) -> Started | TerminalEvent | None:
        try:
            message = await ws.receive(SILENCE_SEC)
        except TimeoutError:
            raise ConnectionFailed(f"nothing came for {SILENCE_SEC:.0f} s") from None
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise self._ended(ws.close_code)
        data: bytes = message.data
        if not data:
            raise UnexpectedAnswer("an empty frame")
        if data[0] == HEARTBEAT:
            await ws.send_bytes(bytes([_PONG]))
            return None
        frame = decode_frame(data[0], data[1:])
        match frame:
            case ErrorReply():
                self._error = frame.error
                return None
            case Output():
                self.offset = frame.offset + len(frame.data)
            case Gap():
                self.offset = frame.offset + frame.bytes
            case Exit():
                self.exit = frame
        return frame

    def _ended(self, code: int | None) -> SojournError:
        if code == TAKEN_OVER:
            return TakenOver("another connection took this terminal over; its process runs on")
        status = code - REFUSED if code is not None and REFUSED + 400 <= code < REFUSED + 600 else 0
        if status and self._error is not None:
            return error_of(self._error, status=status)
        return ConnectionFailed(f"the connection to the terminal ended{f' with {code}' if code else ''}")


def terminal_body(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
