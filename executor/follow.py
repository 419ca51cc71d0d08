"""A reader's place in a command's output: pieces as they come, gaps told, the end exactly once."""

from __future__ import annotations

import asyncio
import codecs
from typing import Final, Literal

from executor.output import PIECE_BYTES, Piece
from executor.process import Command
from executor.wire import HEARTBEAT_SEC, StreamName

STREAMS: Final[tuple[StreamName, StreamName]] = ("stdout", "stderr")


class Follower:
    """Reads both streams of a command, or `only` one (0 stdout, 1 stderr), from given offsets on.

    As `caller` it is the command's own stream: the command waits while it is behind. No piece is over `piece_bytes`;
    where that is as much as is read from a pipe at once, none is copied."""

    def __init__(
        self,
        command: Command,
        stdout: int = 0,
        stderr: int = 0,
        *,
        only: int | None = None,
        caller: bool = False,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.command = command
        self.offsets = [stdout, stderr]
        self._piece_bytes = piece_bytes
        self._streams = (0, 1) if only is None else (only,)
        self.missed = False  # a gap was met
        self._ran = False  # the last call returned without waiting
        if caller and command.outcome is None:
            command.caller = self

    async def next(
        self, limit_bytes: int = 262_144, quiet_sec: float = HEARTBEAT_SEC
    ) -> list[tuple[int, Piece]] | Literal["quiet", "end"]:
        """(0 for stdout or 1 for stderr, piece) of what there is now; "quiet" after `quiet_sec` without any; "end"
        once the command has ended and all of its output was returned."""
        command = self.command
        if self._ran:  # a fast reader far behind would else have the loop to itself until it has caught up
            await asyncio.sleep(0)
        self._ran = True
        while True:
            pieces = await self.now(limit_bytes)
            if pieces:
                return pieces
            self._ran = False
            if command.outcome is not None or command.error is not None:
                return "end"
            future = command.watch()
            try:
                async with asyncio.timeout(quiet_sec):
                    await future
            except TimeoutError:
                return "quiet"
            finally:
                future.cancel()

    def output_came(self) -> None:
        """It looks by itself, when its task has its turn."""

    async def now(self, limit_bytes: int = 262_144) -> list[tuple[int, Piece]]:
        """What there is now, without waiting for more: perhaps nothing."""
        pieces = self._take(limit_bytes) or await self._take_from_disk(limit_bytes)
        if pieces:
            self.missed = self.missed or any(piece.gap for _stream, piece in pieces)
            if self.command.caller is self:
                self.command.caller_read()
        return pieces

    def _take(self, limit_bytes: int) -> list[tuple[int, Piece]]:
        taken: list[tuple[int, Piece]] = []
        for stream in self._streams:
            log = self.command.logs[stream]
            size = 0
            while size < limit_bytes:
                piece = log.read(self.offsets[stream], self._piece_bytes)
                if piece is None or (not piece.data and not piece.gap):
                    break
                taken.append((stream, piece))
                size += len(piece.data) or 1
                self.offsets[stream] = piece.offset + len(piece.data)
        return taken

    async def _take_from_disk(self, limit_bytes: int) -> list[tuple[int, Piece]]:
        taken: list[tuple[int, Piece]] = []
        for stream in self._streams:
            log = self.command.logs[stream]
            if self.offsets[stream] < log.end:
                piece = await log.read_spill(self.offsets[stream], limit_bytes)
                if piece is not None and (piece.data or piece.gap):
                    taken.append((stream, piece))
                    self.offsets[stream] = piece.offset + len(piece.data)
        return taken

    def close(self) -> None:
        if self.command.caller is self:
            self.command.caller_gone()


class TextPieces:
    """Turns the pieces of one stream into text without ever breaking a character; offsets stay those of the bytes."""

    def __init__(self, offset: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset  # of the first byte that was not yet returned as text

    def feed(self, piece: Piece, *, final: bool = False) -> tuple[int, int, str]:
        """(offset, end offset, text); the text may be empty while a character is incomplete."""
        start = self._offset
        text = self._decoder.decode(piece.data, final)
        pending = 0 if final else len(self._decoder.getstate()[0])
        self._offset = piece.offset + len(piece.data) - pending
        return start, self._offset, text

    def restart(self, offset: int) -> tuple[int, int, str] | None:
        """Call at a gap, with the offset behind it: what was incomplete before the gap."""
        start = self._offset
        pending = len(self._decoder.getstate()[0])
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        self._offset = offset
        return (start, start + pending, text) if text else None
