"""A command's events as they happen. A stream that breaks is taken up again where it broke; one that ends without the
exit event is an error, never an end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from sojourn.capture import Capture
from sojourn.errors import ConnectionFailed, DeadlineExceeded, NotFound, OutcomeUnknown, SojournError
from sojourn.frames import FRAMES_TYPE, FrameReader, decode_frame
from sojourn.output import read_both
from sojourn.processes import AsyncProcess
from sojourn.transport import Patience, Transport, error_of, may_repeat
from sojourn.types import ErrorReply, Event, ExecResult, Exit, Gap, Output, Started, StreamName, Where

START_SEC: Final = 120.0  # until the sandbox is there and the command runs
SILENCE_SEC: Final = 45.0  # three heartbeats: then the connection is dead, whatever TCP says
DEFAULT_GRACE_SEC: Final = 2.0  # the server's own, from TERM to KILL
MARGIN_SEC: Final = 15.0  # over a command's own limits, for its kill and for the network


class AsyncCommandStream:
    """The events of one command: Started, then Output and Gap, then Exit. Iterate it, or use it in `async with`.

    Leaving early leaves the command running; `process` is its handle. The command starts with the first step."""

    def __init__(
        self,
        transport: Transport,
        task: str,
        body: dict[str, Any],
        *,
        stdin: AsyncIterable[bytes] | None = None,
        path: str = "/exec",
        start_sec: float = START_SEC,
    ) -> None:
        self.process = AsyncProcess(transport, task, body["id"])
        self.exit: Exit | None = None
        self.where = Where()
        self._transport = transport
        self._task = task
        self._body = body
        self._path = path
        self._start_sec = start_sec
        self._stdin = stdin
        self._input_error: Exception | None = None
        self._feeder: asyncio.Task[None] | None = None
        timeout_sec = body.get("timeout_sec")
        own_sec = math.inf if timeout_sec is None else timeout_sec + body.get("grace_sec", DEFAULT_GRACE_SEC)
        self._limit_sec = own_sec + MARGIN_SEC
        self._offsets: dict[StreamName, int] = {"stdout": 0, "stderr": 0}
        self._started = False
        self.events = self._whole()  # the same events, as a generator

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        return await anext(self.events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops reading. The command goes on."""
        await self.events.aclose()

    async def collect(self, max_output_bytes: int) -> ExecResult:
        """Reads to the end. Of each stream at most `max_output_bytes` are kept: half from the head, half the tail."""
        capture = Capture(max_output_bytes)
        async with self:
            async for event in self:
                capture.add(event)
        if self.exit is None:
            raise SojournError("these events were read by somebody else")
        return capture.result(self.exit, self.where)

    # ── one command, whatever happens to its connections ────────────────────────────────────────────────────────

    async def _whole(self) -> AsyncGenerator[Event, None]:
        try:
            for part in (self._own_stream(), self._taken_up()):
                async with aclosing(part) as events:
                    async for event in events:
                        self._note(event)
                        if self.exit is not None and self._input_error is not None:
                            raise self._input_error
                        yield event
                        if self.exit is not None:
                            return
        finally:
            if self._feeder is not None:
                self._feeder.cancel()
                await asyncio.gather(self._feeder, return_exceptions=True)

    def _note(self, event: Event) -> None:
        match event:
            case Output():
                self._offsets[event.stream] = event.offset + len(event.data)
            case Gap():
                self._offsets[event.stream] = event.offset + event.bytes
            case Started():
                self.where = event
                self._started = True
                if self._stdin is not None:
                    self._feeder = asyncio.create_task(self._feed(self._stdin), name="sojourn-stdin")
            case Exit():
                self.exit = event

    async def _feed(self, source: AsyncIterable[bytes]) -> None:
        """All of the input. A command that cannot get it whole is killed rather than left waiting for the rest."""
        try:
            await self.process.feed_stdin(source)
        except Exception as why:
            self._input_error = why
            try:
                await self.process.kill()
            except SojournError:
                pass  # it has ended, or the stream will find out why nothing can be reached

    async def _own_stream(self) -> AsyncGenerator[Event, None]:
        """The answer to the command itself. Until the command is known to run, a failed request is sent again under the
        same id, so that it runs once. Returns where a running command's stream broke."""
        patience = Patience(self._transport)
        while not self._started:
            try:
                async with aclosing(self._one_answer()) as events:
                    async for event in events:
                        yield event
            except SojournError as why:
                if not self._started:
                    await patience.bear(why)
                elif isinstance(why, DeadlineExceeded) or not may_repeat(why, "safe"):
                    raise

    async def _one_answer(self) -> AsyncGenerator[Event, None]:
        headers = {"Accept": FRAMES_TYPE, "Idempotency-Key": self.process.id}
        now = asyncio.get_running_loop().time
        reader = FrameReader()
        ends_at = math.inf
        async with self._transport.open(
            "POST", f"{self._task}{self._path}", json=self._body, headers=headers, idle_sec=self._start_sec
        ) as response:
            while True:
                async with asyncio.timeout(SILENCE_SEC if self._started else self._start_sec):
                    data = await response.content.readany()
                if not data:
                    raise ConnectionFailed(f"the stream of command {self.process.id} ended without its exit event")
                frames = [decode_frame(kind, payload) for kind, payload in reader.feed(data)]
                for frame in frames:
                    if isinstance(frame, ErrorReply):
                        raise error_of(frame.error)
                    if isinstance(frame, Started):
                        ends_at = now() + self._limit_sec
                    if isinstance(frame, Exit):
                        await _read_end(response)
                    if frame is not None:
                        yield frame
                if now() > ends_at and not any(frames):
                    raise DeadlineExceeded(f"command {self.process.id} goes on past its own timeout_sec")

    async def _taken_up(self) -> AsyncGenerator[Event, None]:
        """The rest of a running command's output, and its outcome, over new connections."""
        try:
            pieces = read_both(self._transport, self._task, self.process.id, dict(self._offsets), follow=True)
            async with aclosing(pieces):
                async for got in pieces:
                    yield got
            yield await self.process.wait(timeout_sec=None)
        except NotFound as why:
            message = f"the end of command {self.process.id} was not seen, and the server no longer knows it"
            raise OutcomeUnknown(message, status=why.status, details={"id": self.process.id}) from why


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """The end of the body behind its last frame, so that the connection can carry the next command."""
    try:
        async with asyncio.timeout(1.0):
            await response.content.readany()
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass  # the outcome is known; only the connection is lost
