"""A command's events as its caller asked for them: binary frames, JSON lines, server-sent events, or output alone."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec

from executor.follow import STREAMS, TextPieces
from executor.guard import error_body
from executor.output import Piece
from executor.process import Command
from executor.wire import (
    CHUNK_BYTES,
    FRAMES_TYPE,
    NDJSON_TYPE,
    PROCESS_HEADER,
    RAW_TYPE,
    SSE_TYPE,
    Encoding,
    Gap,
    Heartbeat,
    ServerSentLines,
    Started,
    StderrEvent,
    StdoutEvent,
    StreamError,
    event_frame,
    output_frame_header,
)

_ENCODER: Final = msgspec.json.Encoder()
JOIN_BELOW_BYTES: Final = 4096  # output under this is copied behind its header: cheaper than another buffer to send


class EventWriter(Protocol):
    """What it gives may be empty: nothing is then sent."""

    content_type: str
    tells_gaps: bool  # where it cannot, a stream is broken off at a gap

    def headers(self, command: Command) -> dict[str, str]: ...

    def started(self, command: Command, joined: bool) -> bytes: ...

    def heartbeat(self) -> bytes: ...

    def output(self, pieces: list[tuple[int, Piece]]) -> list[bytes | memoryview]:
        """What to send, in order; large output stands in it as it is, uncopied."""
        ...

    def end(self, command: Command, missed: bool) -> bytes: ...


def writer_for(accept: str, encoding: Encoding) -> EventWriter | None:
    """None for a caller that wants one answer at the end."""
    if FRAMES_TYPE in accept:
        return FrameWriter()
    if NDJSON_TYPE in accept:
        return NdjsonWriter(encoding == "text")
    if SSE_TYPE in accept:
        return SseWriter(encoding == "text")
    if accept.partition(";")[0].strip() == RAW_TYPE:  # alone: a caller that takes JSON too is told more by that
        return RawWriter()
    return None


def now_rfc3339() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class FrameWriter:
    content_type = FRAMES_TYPE
    tells_gaps = True

    def headers(self, _command: Command) -> dict[str, str]:
        return {"Content-Type": self.content_type, "Cache-Control": "no-store"}

    def started(self, command: Command, joined: bool) -> bytes:
        return event_frame(Started(id=command.id, pid=command.pid or None, joined=joined))

    def heartbeat(self) -> bytes:
        return event_frame(Heartbeat(at=now_rfc3339()))

    def output(self, pieces: list[tuple[int, Piece]]) -> list[bytes | memoryview]:
        out: list[bytes | memoryview] = []
        for stream, piece in pieces:
            name, data = STREAMS[stream], piece.data
            if piece.gap:
                out.append(event_frame(Gap(stream=name, offset=piece.offset - piece.gap, bytes=piece.gap)))
            if len(data) < JOIN_BELOW_BYTES:
                if data:
                    out.append(output_frame_header(name, piece.offset, len(data)) + data)
                continue
            for at in range(0, len(data), CHUNK_BYTES):
                part = memoryview(data)[at : at + CHUNK_BYTES]
                out.append(output_frame_header(name, piece.offset + at, len(part)))
                out.append(part)
        return out

    def end(self, command: Command, missed: bool) -> bytes:
        if command.error is not None:
            return event_frame(StreamError(error=error_body(command.error)))
        return event_frame(command.exit_event(truncated=missed))


class RawWriter:
    """The bytes of stdout and no more; the outcome is asked for by the command's id."""

    content_type = RAW_TYPE
    tells_gaps = False

    def headers(self, command: Command) -> dict[str, str]:
        return {"Content-Type": self.content_type, "Cache-Control": "no-store", PROCESS_HEADER: command.id}

    def started(self, _command: Command, _joined: bool) -> bytes:
        return b""

    def heartbeat(self) -> bytes:
        return b""

    def output(self, pieces: list[tuple[int, Piece]]) -> list[bytes | memoryview]:
        return [piece.data for stream, piece in pieces if stream == 0 and piece.data]

    def end(self, _command: Command, _missed: bool) -> bytes:
        return b""


class NdjsonWriter:
    content_type = NDJSON_TYPE
    tells_gaps = True

    def headers(self, _command: Command) -> dict[str, str]:
        return {"Content-Type": self.content_type, "Cache-Control": "no-store"}

    def __init__(self, text: bool) -> None:
        self._texts = (TextPieces(0), TextPieces(0)) if text else None

    def _line(self, event: msgspec.Struct) -> bytes:
        return _ENCODER.encode(event) + b"\n"

    def started(self, command: Command, joined: bool) -> bytes:
        return self._line(Started(id=command.id, pid=command.pid or None, joined=joined))

    def heartbeat(self) -> bytes:
        return self._line(Heartbeat(at=now_rfc3339()))

    def output(self, pieces: list[tuple[int, Piece]]) -> list[bytes | memoryview]:
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
