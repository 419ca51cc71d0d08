"""`POST /v1/exec`: run and wait, or the same as NDJSON events, server-sent events or binary frames."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec
from aiohttp import web

from executor.follow import STREAMS, Follower, TextPieces
from executor.guard import error_body
from executor.output import Piece
from executor.process import Command
from executor.processes import Processes
from executor.routes.reply import read_json
from executor.wire import (
    CHUNK_BYTES,
    FRAMES_TYPE,
    JSON_TYPE,
    NDJSON_TYPE,
    SSE_TYPE,
    ExecRequest,
    Gap,
    Heartbeat,
    MiB,
    ServerSentLines,
    SessionExecRequest,
    Started,
    StderrEvent,
    StdoutEvent,
    StreamError,
    event_frame,
    output_frame_header,
)

EXEC_BODY_BYTES: Final = 96 * MiB  # stdin comes in it
_ENCODER: Final = msgspec.json.Encoder()
AnyExec = ExecRequest | SessionExecRequest


def command_routes(processes: Processes) -> list[web.RouteDef]:
    async def run(request: web.Request) -> web.StreamResponse:
        body = await read_json(request, ExecRequest, EXEC_BODY_BYTES)
        return await run_and_answer(request, body, lambda streamed: processes.start(body, streamed=streamed))

    return [web.post("/v1/exec", run)]


async def run_and_answer(
    request: web.Request, body: AnyExec, start: Callable[[bool], tuple[Command, bool]]
) -> web.StreamResponse:
    """What `start` (given whether the answer is a stream) makes, in the form that the caller accepts."""
    accept = request.headers.get("Accept", "")
    if FRAMES_TYPE in accept:
        return await _stream(request, body, start, FrameWriter())
    if NDJSON_TYPE in accept:
        return await _stream(request, body, start, NdjsonWriter(body.encoding == "text"))
    if SSE_TYPE in accept:
        return await _stream(request, body, start, SseWriter(body.encoding == "text"))
    command, _joined = start(False)
    with _ending_on_abort(command, body):
        await _until_ended(command)
    return web.Response(body=_ENCODER.encode(command.result()), content_type=JSON_TYPE)


class _ending_on_abort:
    """A direct caller that hangs up ends its command where it asked for that; otherwise the command goes on."""

    __slots__ = ("_body", "_command")

    def __init__(self, command: Command, body: AnyExec) -> None:
        self._command, self._body = command, body

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        gone = kind is not None and issubclass(kind, (asyncio.CancelledError, ConnectionError))
        if gone and self._body.on_disconnect == "kill":
            self._command.end("cancelled")


async def _until_ended(command: Command) -> None:
    if not command.ended.done():
        await asyncio.shield(command.ended)  # the future is everybody's who waits, not only this caller's


async def _stream(
    request: web.Request,
    body: AnyExec,
    start: Callable[[bool], tuple[Command, bool]],
    writer: FrameWriter | NdjsonWriter,
) -> web.StreamResponse:
    command, joined = start(True)
    follower = Follower(command, caller=not joined)
    try:
        with _ending_on_abort(command, body):
            if not command.launched.done():
                await asyncio.shield(command.launched)
            if command.error is not None:
                raise command.error
            response = web.StreamResponse(headers={"Content-Type": writer.content_type, "Cache-Control": "no-store"})
            await response.prepare(request)
            await response.write(writer.started(command, joined))
            await _send_all(response, follower, writer)
            await response.write_eof()
            return response
    finally:
        follower.close()


async def _send_all(response: web.StreamResponse, follower: Follower, writer: FrameWriter | NdjsonWriter) -> None:
    command = follower.command
    # Once the pipes are read as the output comes, not when a timer says so, the first byte is not late.
    for pump in command.pumps:
        pump.arm()
    while True:
        pieces = await follower.next()
        if pieces == "end":
            break
        if pieces == "quiet":
            await response.write(writer.heartbeat())
        else:
            for data in writer.output(pieces):
                await response.write(data)
    await response.write(writer.end(command, follower.missed))


def now_rfc3339() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class FrameWriter:
    content_type = FRAMES_TYPE

    def started(self, command: Command, joined: bool) -> bytes:
        return event_frame(Started(id=command.id, pid=command.pid or None, joined=joined))

    def heartbeat(self) -> bytes:
        return event_frame(Heartbeat(at=now_rfc3339()))

    def output(self, pieces: list[tuple[int, Piece]]) -> list[bytes]:
        out = []
        for stream, piece in pieces:
            name = STREAMS[stream]
            if piece.gap:
                out.append(event_frame(Gap(stream=name, offset=piece.offset - piece.gap, bytes=piece.gap)))
            for at in range(0, len(piece.data), CHUNK_BYTES):
                data = piece.data if len(piece.data) <= CHUNK_BYTES else piece.data[at : at + CHUNK_BYTES]
                out.append(output_frame_header(name, piece.offset + at, len(data)) + data)
        return out

    def end(self, command: Command, missed: bool) -> bytes:
        if command.error is not None:
            return event_frame(StreamError(error=error_body(command.error)))
        return event_frame(command.exit_event(truncated=missed))


class NdjsonWriter:
    content_type = NDJSON_TYPE

    def __init__(self, text: bool) -> None:
        self._texts = (TextPieces(0), TextPieces(0)) if text else None

    def _line(self, event: msgspec.Struct) -> bytes:
        return _ENCODER.encode(event) + b"\n"

    def started(self, command: Command, joined: bool) -> bytes:
        return self._line(Started(id=command.id, pid=command.pid or None, joined=joined))

    def heartbeat(self) -> bytes:
        return self._line(Heartbeat(at=now_rfc3339()))

    def output(self, pieces: list[tuple[int, Piece]]) -> list[bytes]:
        out = []
        for stream, piece in pieces:
            event = StdoutEvent if stream == 0 else StderrEvent
            if piece.gap:
                if self._texts is not None:
                    cut = self._texts[stream].restart(piece.offset)
                    if cut is not None:
                        out.append(self._line(event(offset=cut[0], end_offset=cut[1], text=cut[2])))
                out.append(self._line(Gap(stream=STREAMS[stream], offset=piece.offset - piece.gap, bytes=piece.gap)))
            if not piece.data:
                continue
            for at in range(0, len(piece.data), CHUNK_BYTES):
                part = Piece(piece.offset + at, piece.data[at : at + CHUNK_BYTES])
                if self._texts is None:
                    end = part.offset + len(part.data)
                    encoded = base64.b64encode(part.data).decode()
                    out.append(self._line(event(offset=part.offset, end_offset=end, data_base64=encoded)))
                else:
                    start, end, text = self._texts[stream].feed(part)
                    if text:
                        out.append(self._line(event(offset=start, end_offset=end, text=text)))
        return [b"".join(out)] if out else []

    def end(self, command: Command, missed: bool) -> bytes:
        out = []
        if self._texts is not None:
            for stream, text in enumerate(self._texts):
                start, end, rest = text.feed(Piece(command.logs[stream].end, b""), final=True)
                if rest:
                    event = StdoutEvent if stream == 0 else StderrEvent
                    out.append(self._line(event(offset=start, end_offset=end, text=rest)))
        if command.error is not None:
            out.append(self._line(StreamError(error=error_body(command.error))))
        else:
            out.append(self._line(command.exit_event(truncated=missed)))
        return b"".join(out)


class SseWriter(NdjsonWriter):
    content_type = SSE_TYPE

    def __init__(self, text: bool) -> None:
        super().__init__(text)
        self._lines = ServerSentLines()

    def _line(self, event: msgspec.Struct) -> bytes:
        return self._lines.write(event)
