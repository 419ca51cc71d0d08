"""The binary frames of a streamed command: type byte, 4-byte big-endian length, payload."""

from __future__ import annotations

from typing import Final

import msgspec

from sojourn.errors import UnexpectedAnswer
from sojourn.types import ErrorReply, Exit, Gap, Output, Started

FRAMES_TYPE: Final = "application/vnd.sojourn.frames"
MAX_FRAME_BYTES: Final = 16 << 20

STARTED, STDOUT, STDERR, HEARTBEAT, GAP, EXIT, ERROR = range(1, 8)

_STARTED: Final = msgspec.json.Decoder(Started)
_GAP: Final = msgspec.json.Decoder(Gap)
_EXIT: Final = msgspec.json.Decoder(Exit)
_ERROR: Final = msgspec.json.Decoder(ErrorReply)

Frame = Started | Output | Gap | Exit | ErrorReply


def decode_frame(kind: int, payload: bytes) -> Frame | None:
    """What the frame says; None for a heartbeat and for kinds that this version does not know.

    Raises UnexpectedAnswer where the payload is not what its kind promises."""
    try:
        if kind in (STDOUT, STDERR):
            if len(payload) < 8:
                raise UnexpectedAnswer(f"an output frame of {len(payload)} bytes has no offset")
            return Output("stdout" if kind == STDOUT else "stderr", int.from_bytes(payload[:8], "big"), payload[8:])
        if kind == STARTED:
            return _STARTED.decode(payload)
        if kind == GAP:
            return _GAP.decode(payload)
        if kind == EXIT:
            return _EXIT.decode(payload)
        if kind == ERROR:
            return _ERROR.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        raise UnexpectedAnswer(f"a frame of kind {kind} cannot be read: {why}") from why
    return None


class FrameReader:
    """Cuts a byte stream into (kind, payload); keeps at most one frame's bytes."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that `data` completes, each payload copied once. Raises UnexpectedAnswer for one over
        MAX_FRAME_BYTES."""
        kept, at = self._kept, 0
        frames: list[tuple[int, bytes]] = []
        with memoryview(data) as view:
            if kept:  # a frame that began earlier: only what it lacks is joined to it
                at = max(0, 5 - len(kept))
                kept += view[:at]
                if len(kept) < 5:
                    return frames
                lacking = 5 + _length(kept) - len(kept)
                kept += view[at : at + lacking]
                if len(view) - at < lacking:
                    return frames
                at += lacking
                with memoryview(kept) as whole:
                    frames.append((kept[0], bytes(whole[5:])))
                kept.clear()
            while len(view) - at >= 5:
                end = at + 5 + _length(view[at : at + 5])
                if end > len(view):
                    break
                frames.append((view[at], bytes(view[at + 5 : end])))
                at = end
            kept += view[at:]
        return frames


def _length(head: bytearray | memoryview) -> int:
    length = int.from_bytes(head[1:5], "big")
    if length > MAX_FRAME_BYTES:
        raise UnexpectedAnswer(f"a frame of {length} bytes is over the bound of {MAX_FRAME_BYTES}")
    return length
