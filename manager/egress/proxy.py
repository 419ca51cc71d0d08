"""An HTTP proxy for one pod: CONNECT for anything, plain HTTP rewritten. Bounded in connections, bytes and time."""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from manager.egress.dial import DialFailed, Dialler, DialRefused, DialRules
from manager.egress.heads import HEAD_BYTES, BadHead, parse_request, parse_response
from manager.egress.meter import Meter

log = logging.getLogger(__name__)

HEAD_SEC: Final = 15.0  # for a request's head to arrive
IDLE_SEC: Final = 300.0  # without a byte in either direction
LINGER_SEC: Final = 5.0  # for a client to take an answer of ours
LINGER_PIECES: Final = 32  # of what it still sends meanwhile
_OVER_THE_CAP: Final = 16  # connections beyond the cap that are told so at one time; those beyond are closed

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PodProxy:
    """Serves one listening socket, whose clients are one pod's."""

    def __init__(
        self, listener: socket.socket, rules: DialRules, threads: ThreadPoolExecutor, *, bytes_per_sec: int,
        connections: int, idle_sec: float = IDLE_SEC,
    ) -> None:  # fmt: skip
        self._listener = listener
        self._dialler = Dialler(rules, threads)
        self._out, self._back = Meter(bytes_per_sec), Meter(bytes_per_sec)
        self._connections = connections
        self._idle_sec = idle_sec
        self._serving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(self._connections + _OVER_THE_CAP)
        self._listen()

    async def close(self) -> None:
        """Ends every connection."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _listen(self) -> None:
        if self._listener.fileno() != -1:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as why:  # out of descriptors
            log.warning("outbound_accept_failed", extra={"why": str(why)})
            loop.remove_reader(self._listener)
            loop.call_later(0.2, self._listen)
            return
        connection.setblocking(False)
        over = len(self._serving) - self._connections
        if over >= _OVER_THE_CAP:
            connection.close()
            return
        task = loop.create_task(self._serve(connection, full=over >= 0), name="outbound-connection")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        task.add_done_callback(lambda _: connection.close())  # also where it was cancelled before it began

    async def _serve(self, connection: socket.socket, *, full: bool) -> None:
        client = await asyncio.open_unix_connection(sock=connection, limit=HEAD_BYTES)
        try:
            if full:
                await _answer(client, 503, f"this sandbox holds its most of {self._connections} connections")
            else:
                await self._exchange(client)
        except (OSError, EOFError, TimeoutError):
            pass  # either side went away, or was silent for too long
        except Exception:
            log.exception("outbound_connection_broke")
        finally:
            client[1].transport.abort()

    async def _exchange(self, client: Stream) -> None:
        reader, writer = client
        try:
            async with asyncio.timeout(HEAD_SEC):
                request = parse_request(await reader.readuntil(b"\r\n\r\n"))
        except BadHead as why:
            return await _answer(client, 400, str(why))
        except asyncio.LimitOverrunError:
            return await _answer(client, 431, f"a head is at most {HEAD_BYTES} bytes")
        try:
            connection = await self._dialler.dial(request.host, request.port)
        except DialRefused as why:
            return await _answer(client, 403, f"{why}; this sandbox reaches public addresses only")
        except DialFailed as why:
            return await _answer(client, 502, str(why))
        try:
            server = await asyncio.open_connection(sock=connection, limit=HEAD_BYTES)
        except BaseException:
            connection.close()
            raise
        for stream in (writer, server[1]):
            stream.transport.set_write_buffer_limits(high=0)  # `drain` then waits for the last byte, before any abort
        try:
            if request.tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await self._join(client, server)
            else:
                await self._forward(request.head, client, server)
        finally:
            server[1].transport.abort()

    async def _forward(self, head: bytes, client: Stream, server: Stream) -> None:
        await self._out.take(len(head))
        server[1].write(head)
        last = _Activity(self._idle_sec)
        # A server may answer before it has taken the whole body, and then hang up on the rest.
        sending = asyncio.create_task(self._pump(client[0], server[1], self._out, last), name="outbound-body")
        try:
            await self._pass_answer(client[1], server[0], last)
        except BadHead as why:
            await _ended(sending)  # which reads from the client, too
            await _answer(client, 502, str(why))
        finally:
            await _ended(sending)

    async def _pass_answer(self, client: asyncio.StreamWriter, server: asyncio.StreamReader, last: _Activity) -> None:
        status = 100
        while 100 <= status < 200:
            status, answer = parse_response(await last.read_head(server))
            await self._back.take(len(answer))
            client.write(answer)
        await self._pump(server, client, self._back, last)

    async def _join(self, client: Stream, server: Stream) -> None:
        last = _Activity(self._idle_sec)
        await _all_ended(
            asyncio.create_task(self._pump(client[0], server[1], self._out, last), name="outbound-there"),
            asyncio.create_task(self._pump(server[0], client[1], self._back, last), name="outbound-back"),
        )

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, meter: Meter, last: _Activity
    ) -> None:
        """To the source's end, which the sink is told of. Raises OSError, TimeoutError."""
        while piece := await last.read(source, meter.piece_bytes):
            await meter.take(len(piece))
            sink.write(piece)
            await last.drained(sink)
        if sink.can_write_eof():
            sink.write_eof()


class _Activity:
    """Of one connection, both ways: only when nothing has passed in either is it idle."""

    def __init__(self, idle_sec: float) -> None:
        self._idle_sec = idle_sec
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    async def read(self, source: asyncio.StreamReader, count: int) -> bytes:
        while True:
            try:
                async with asyncio.timeout_at(self._last + self._idle_sec):
                    piece = await source.read(count)
            except TimeoutError:
                if self._loop.time() - self._last < self._idle_sec:
                    continue  # the other direction has been busy
                raise
            self._last = self._loop.time()
            return piece

    async def read_head(self, source: asyncio.StreamReader) -> bytes:
        """Raises BadHead."""
        try:
            async with asyncio.timeout(self._idle_sec):
                return await source.readuntil(b"\r\n\r\n")
        except (asyncio.LimitOverrunError, EOFError):
            raise BadHead("the server's answer has no head, or too long a one") from None

    async def drained(self, sink: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._idle_sec):
            await sink.drain()
        self._last = self._loop.time()


async def _all_ended(*ways: asyncio.Task[None]) -> None:
    """Waits for all, or until one of them breaks, which ends the others."""
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _ended(*ways)


async def _ended(*ways: asyncio.Task[None]) -> None:
    """Ends them. What they broke of is of no interest: either side has gone away."""
    for way in ways:
        way.cancel()
    await asyncio.wait(ways)
    for way in ways:
        if not way.cancelled():
            way.exception()


_REASONS: Final = {
    400: "Bad Request", 403: "Forbidden", 431: "Request Header Fields Too Large", 502: "Bad Gateway",
    503: "Service Unavailable",
}  # fmt: skip


async def _answer(client: Stream, status: int, text: str) -> None:
    body = f"sojourn: {text}\n".encode("ascii", "replace")
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    reader, writer = client
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    async with asyncio.timeout(LINGER_SEC):
        await writer.drain()
        writer.write_eof()
        # What is thrown away unread would reset the connection, and the answer with it.
        for _ in range(LINGER_PIECES):
            if not await reader.read(HEAD_BYTES):
                break
