"""A result whose output is on disk, since memory was short while its command ran: JSON as it is read, in pieces."""

from __future__ import annotations

import base64
import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec

from executor.errors import NotFound
from executor.output import OutputLog, Piece
from executor.pipes import READ_BYTES
from executor.process import STREAM_NAMES, Command, dropped_mark

_ENCODER: Final = msgspec.json.Encoder()


async def send_large(
    command: Command, begin: Callable[[int], Awaitable[None]], write: Callable[[bytes], Awaitable[None]]
) -> None:
    """Calls `begin` with the answer's size in bytes, then `write` for its pieces. All of it is read once before, so
    that what cannot be read is told as dropped and not found out half way.

    Raises NotFound where the command is forgotten meanwhile."""
    command.sending += 1
    try:
        while True:
            head = _ENCODER.encode(command.result_without_output())[:-1]
            size = len(head) + 1
            async for part in _output(command):
                size += len(part)
            if head == _ENCODER.encode(command.result_without_output())[:-1]:
                break
        await begin(size)
        await write(head)
        async for part in _output(command):
            await write(part)
        await write(b"}")
    finally:
        command.sending -= 1


async def _output(command: Command) -> AsyncIterator[bytes]:
    for name, log in zip(STREAM_NAMES, command.logs, strict=True):
        is_text = command.request.encoding == "text"
        yield f',"{name}":"'.encode() if is_text else f',"{name}_base64":"'.encode()
        async for part in (_text if is_text else _base64)(_pieces(log)):
            yield part
        yield b'"'


async def _pieces(log: OutputLog) -> AsyncGenerator[Piece, None]:
    offset = 0
    while offset < log.end:
        piece = log.read(offset, READ_BYTES)
        if piece is not None and not piece.data and not piece.gap:
            piece = await log.read_spill(offset, READ_BYTES)
        if piece is None or (not piece.data and not piece.gap):
            raise NotFound("the command was forgotten while its answer was sent")
        yield piece
        offset = piece.offset + len(piece.data)


async def _base64(pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        data = rest + piece.data
        whole = len(data) - len(data) % 3
        rest = data[whole:]
        yield base64.b64encode(data[:whole])
    yield base64.b64encode(rest)


async def _text(pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
    """As `Command.result` writes it: bytes of a character that stands across a gap count as dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    dropped = 0
    async for piece in pieces:
        data = piece.data
        if piece.gap:
            dropped += piece.gap + len(decoder.getstate()[0])
            decoder.reset()
        if not data:
            continue
        if dropped:
            skip = 0
            while skip < min(3, len(data)) and 0x80 <= data[skip] < 0xC0:
                skip += 1
            data = data[skip:]
            yield _escaped(dropped_mark(dropped + skip))
            dropped = 0
        yield _escaped(decoder.decode(data))
    yield _escaped(decoder.decode(b"", True) + (dropped_mark(dropped) if dropped else ""))


def _escaped(text: str) -> bytes:
    return _ENCODER.encode(text)[1:-1]
