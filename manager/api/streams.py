"""A command's events as the caller asked for them: JSON lines, server-sent events or binary frames.

Offsets count bytes in all of them. In JSON with `encoding` "text" no character is split over two events: bytes of an
unfinished one wait for the rest, and what can never become a character is shown as U+FFFD.
"""

from __future__ import annotations

import base64
import codecs
from typing import Final, Protocol

import msgspec

from executor import wire
from manager.api.wire import CommandStarted

_ENCODER: Final = msgspec.json.Encoder()
_PIECES: Final = {"stdout": wire.StdoutEvent, "stderr": wire.StderrEvent}
_new_decoder: Final = codecs.getincrementaldecoder("utf-8")

PlainEvent = CommandStarted | wire.Heartbeat | wire.Exit | wire.StreamError


class TextCutter:
    """One stream's bytes as text, each piece with the offsets of the bytes that it stands for."""

    def __init__(self) -> None:
        self._decoder = _new_decoder("replace")
        self._done = 0  # offset of the first byte that no text has been given for

    def feed(self, offset: int, data: bytes) -> tuple[int, int, str] | None:
        """(offset, end offset, text) of what is complete now; None where nothing is."""
        waiting = self._decoder.getstate()[0]
        if not waiting:
            self._done = offset
        text = self._decoder.decode(data)
        return self._cut(offset + len(data) - len(self._decoder.getstate()[0]), text)

    def flush(self) -> tuple[int, int, str] | None:
        """What was still waiting for the rest of a character that will not come."""
        end = self._done + len(self._decoder.getstate()[0])
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return self._cut(end, text)

    def _cut(self, end: int, text: str) -> tuple[int, int, str] | None:
        start, self._done = self._done, end
        return (start, end, text) if text else None


class Renderer(Protocol):
    """How one stream's events are written. Every method gives the bytes to send, b"" for none."""

    content_type: str

    def output(self, piece: wire.OutputFrame) -> bytes: ...

    def gap(self, gap: wire.Gap) -> bytes: ...

    def plain(self, event: PlainEvent) -> bytes: ...


class JsonLines:
    content_type: str = wire.NDJSON_TYPE

    def __init__(self, encoding: wire.Encoding) -> None:
        self._cutters = {"stdout": TextCutter(), "stderr": TextCutter()} if encoding == "text" else None

    def output(self, piece: wire.OutputFrame) -> bytes:
        if self._cutters is None:
            end = piece.offset + len(piece.data)
            encoded = base64.b64encode(piece.data).decode()
            return self._line(_PIECES[piece.stream](offset=piece.offset, end_offset=end, data_base64=encoded))
        return self._text(piece.stream, self._cutters[piece.stream].feed(piece.offset, piece.data))

    def gap(self, gap: wire.Gap) -> bytes:
        return self._flushed(gap.stream) + self._line(gap)

    def plain(self, event: PlainEvent) -> bytes:
        if isinstance(event, wire.Exit | wire.StreamError):
            return self._flushed("stdout") + self._flushed("stderr") + self._line(event)
        return self._line(event)

    def _flushed(self, stream: wire.StreamName) -> bytes:
        return b"" if self._cutters is None else self._text(stream, self._cutters[stream].flush())

    def _text(self, stream: wire.StreamName, cut: tuple[int, int, str] | None) -> bytes:
        if cut is None:
            return b""
        return self._line(_PIECES[stream](offset=cut[0], end_offset=cut[1], text=cut[2]))

    def _line(self, event: msgspec.Struct) -> bytes:
        return _ENCODER.encode(event) + b"\n"


class ServerSentEvents(JsonLines):
    content_type: str = wire.SSE_TYPE

    def __init__(self, encoding: wire.Encoding) -> None:
        super().__init__(encoding)
        self._lines = wire.ServerSentLines()

    def _line(self, event: msgspec.Struct) -> bytes:
        return self._lines.write(event)


class Frames:
    content_type: str = wire.FRAMES_TYPE

    def output(self, piece: wire.OutputFrame) -> bytes:
        return wire.output_frame_header(piece.stream, piece.offset, len(piece.data)) + piece.data

    def gap(self, gap: wire.Gap) -> bytes:
        return wire.event_frame(gap)

    def plain(self, event: PlainEvent) -> bytes:
        if isinstance(event, CommandStarted):
            return wire.frame(wire.FRAME_STARTED, _ENCODER.encode(event))
        return wire.event_frame(event)


class Messages:
    """One WebSocket message an event: type byte and payload."""

    @staticmethod
    def output(piece: wire.OutputFrame) -> bytes:
        return wire.output_message(piece.stream, piece.offset, piece.data)

    @staticmethod
    def plain(event: PlainEvent | wire.Gap) -> bytes:
        if isinstance(event, CommandStarted):
            return bytes([wire.FRAME_STARTED]) + _ENCODER.encode(event)
        return wire.event_message(event)
