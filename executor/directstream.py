"""A command's events written straight to its caller's connection as they come: no task, no copy, one send a read.

What the connection does not take stays in the command's log, and the command is held back by the full pipe, as with
every caller's own stream (`Command.caller`). A stream that no longer holds its command back, after a stall, or that
joined a command of somebody else's, is woken as any other reader and is told of the gaps it meets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from executor.output import JOIN_BELOW, Piece
from executor.pipes import READ_BYTES
from executor.process import Command
from executor.wire import HEARTBEAT_SEC, Encoding
from executor.writers import writer_for

_LAST_CHUNK: Final = b"0\r\n\r\n"


class DirectStream:
    """The answer to one call on one connection, whose owner passes on when to pause, to resume, and its loss."""

    __slots__ = (
        "_beat", "_command", "_done", "_fetching", "_has_begun", "_is_over", "_is_paused", "_joined", "_loop",
        "_missed", "_sent_at", "_transport", "_unsent", "_watched", "_writer", "kills_on_loss", "offsets",
    )  # fmt: skip

    def __init__(
        self, transport: asyncio.WriteTransport, command: Command, accept: str, done: Callable[[Command], None],
        *, encoding: Encoding, joined: bool, kills_on_loss: bool,
    ) -> None:  # fmt: skip
        """`accept` is one of the types of a stream. `done` is called once all is sent; or, where `command.error` says
        that nothing ran, with nothing sent."""
        self._transport = transport
        self._command = command
        writer = writer_for(accept, encoding)
        assert writer is not None
        self._writer = writer
        self._done = done
        self._joined = joined
        self.kills_on_loss = kills_on_loss
        self._loop = command.host.loop
        self.offsets = [0, 0]
        self._missed = False  # a gap was met
        self._is_paused = False  # the connection takes no more for now
        self._is_over = False
        self._has_begun = False
        self._fetching: asyncio.Task[None] | None = None
        self._watched: asyncio.Future[None] | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        headers = "".join(f"{name}: {value}\r\n" for name, value in writer.headers(command).items())
        # The head, made while the command is being started, waits for the first output.
        self._unsent = f"HTTP/1.1 200 OK\r\n{headers}Transfer-Encoding: chunked\r\n\r\n".encode()
        if not joined and command.outcome is None:
            command.caller = self
        if command.launched.done():
            self._loop.call_soon(self._begin)
        else:
            command.launched.add_done_callback(self._begin)

    def _begin(self, _launched: object = None) -> None:
        command = self._command
        if self._is_over or self._has_begun:
            return
        if command.error is not None:
            self._end()
            return
        self._has_begun = True
        self._unsent += _chunked(self._writer.started(command, self._joined))
        self._sent_at = self._loop.time()
        self.output_came()  # head and first output leave in one piece
        if self._is_over:
            return
        if self._unsent:
            self._transport.write(self._unsent)
            self._unsent = b""
        self._beat = self._loop.call_later(HEARTBEAT_SEC, self._keep_alive)
        # Once the pipes are read as the output comes, not when a timer says so, the first byte is not late.
        for pump in command.pumps:
            pump.arm()
        command.ended.add_done_callback(self._woken)

    # ── heard from the connection ───────────────────────────────────────────────────────────────────────────────

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.output_came()
        if self._command.caller is self:
            self._command.caller_read()

    def lost(self) -> None:
        """The caller has hung up, perhaps after the end."""
        if not self._is_over:
            if self.kills_on_loss:
                self._command.end("cancelled")
            self._stop()

    # ── output ──────────────────────────────────────────────────────────────────────────────────────────────────

    def output_came(self) -> None:
        """Sends what the log has and the connection takes; called by the command itself while this is its caller."""
        command = self._command
        if self._is_over or self._fetching is not None:
            return
        if not self._has_begun:
            # It runs, which its output may say before its pid does.
            if command.pid or (not command.tells_pid and any(log.end for log in command.logs)):
                self._begin()
            return
        while not self._is_paused:
            pieces: list[tuple[int, Piece]] = []
            on_disk: int | None = None
            for stream, log in enumerate(command.logs):
                piece = log.read(self.offsets[stream], READ_BYTES)
                if piece is None:
                    continue
                if piece.data or piece.gap:
                    if not self._took(stream, piece):
                        return
                    pieces.append((stream, piece))
                else:
                    on_disk = stream
            if pieces:
                self._send(self._writer.output(pieces))
                if self.offsets[0] == command.logs[0].end and self.offsets[1] == command.logs[1].end:
                    self._all_sent()  # with the connection perhaps full now: the end is not output, and short
                    return
            elif on_disk is not None:
                self._fetching = self._loop.create_task(self._fetch(on_disk), name=f"stream-{command.id}")
                return
            else:
                self._all_sent()
                return

    def _all_sent(self) -> None:
        command = self._command
        if command.outcome is not None or command.error is not None:
            self._transport.write(self._unsent + _chunked(self._writer.end(command, self._missed)) + _LAST_CHUNK)
            self._unsent = b""
            self._end()
        elif command.caller is not self and self._watched is None:
            self._watched = command.watch()
            self._watched.add_done_callback(self._woken)

    def _woken(self, future: asyncio.Future[None]) -> None:
        if future is self._watched:
            self._watched = None
        if not future.cancelled():
            self.output_came()

    async def _fetch(self, stream: int) -> None:
        """Only after a stall is anything of a caller's own stream on disk."""
        log = self._command.logs[stream]
        try:
            piece = await log.read_spill(self.offsets[stream], READ_BYTES)
        finally:
            self._fetching = None
        if self._is_over:
            return
        if piece is not None and (piece.data or piece.gap):
            if self._took(stream, piece):
                self._send(self._writer.output([(stream, piece)]))
                self.output_came()
        else:  # forgotten meanwhile
            self._all_sent()

    def _took(self, stream: int, piece: Piece) -> bool:
        """Whether the stream goes on."""
        self.offsets[stream] = piece.offset + len(piece.data)
        if piece.gap:
            self._missed = True
            if not self._writer.tells_gaps:  # nobody shall take what is behind it for what came next
                self._transport.abort()
                return False
        return True

    def _send(self, data: list[bytes | memoryview]) -> None:
        if data:
            size = sum(map(len, data))
            parts = [b"%b%x\r\n" % (self._unsent, size), *data, b"\r\n"]
            self._unsent = b""
            if size < JOIN_BELOW:
                self._transport.write(b"".join(parts))
            else:
                self._transport.writelines(parts)
            self._sent_at = self._loop.time()

    def _keep_alive(self) -> None:
        left = self._sent_at + HEARTBEAT_SEC - self._loop.time()
        if left <= 0:
            if not self._is_paused:
                self._transport.write(_chunked(self._writer.heartbeat()))
                self._sent_at = self._loop.time()
            left = HEARTBEAT_SEC
        self._beat = self._loop.call_later(left, self._keep_alive)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self) -> None:
        self._stop()
        self._done(self._command)

    def _stop(self) -> None:
        self._is_over = True
        if self._beat is not None:
            self._beat.cancel()
        if self._watched is not None:
            self._watched.cancel()
        if self._fetching is not None:
            self._fetching.cancel()
        if self._command.caller is self:
            self._command.caller_gone()


def _chunked(data: bytes) -> bytes:
    """Nothing for nothing: an empty chunk would be the last one."""
    return data and b"%x\r\n%b\r\n" % (len(data), data)
