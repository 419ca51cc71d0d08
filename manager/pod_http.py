"""A thin HTTP/1.1 client for small calls to one pod: a third of what a general client costs, and no more permissive.

It understands what an executor sends: one status line, one Content-Length, that many bytes. Anything else is a
BadAnswer. It knows whether a request was sent: a kept-alive connection that the pod has closed is found out before
it is used.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import urlsplit

from manager.errors import RateLimited
from manager.executor_answers import ERROR_BYTES, BadAnswer, ExecutorNotReached, clean

CONNECT_SEC: Final = 10.0
MAX_HEAD_BYTES: Final = 16 << 10
MAX_WAITING: Final = 4096  # calls that wait for one of a pod's connections
_BACKLOG_PAUSE_SEC: Final = 0.005
_STATUS: Final = re.compile(rb"HTTP/1\.1 ([2-5]\d\d)(?: [\x20-\x7e\x80-\xff]{0,200})?\Z")
_LENGTH: Final = re.compile(rb"\d{1,15}\Z")


class Interrupted(Exception):
    """The request may have reached the pod; the answer did not reach us whole."""


class _Connection(asyncio.Protocol):
    """One connection, with at most one request under way."""

    __slots__ = (
        "_body_at", "_kept", "_limit", "_lost", "_size", "_sock", "_status", "_waiter", "reusable", "transport",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, lost: Callable[[_Connection], None]) -> None:
        self._sock = sock
        self.transport: asyncio.Transport | None = None
        self.reusable = True
        self._limit = 0
        self._lost = lost
        self._waiter: asyncio.Future[tuple[int, bytes]] | None = None
        self._kept = bytearray()
        self._body_at = 0  # where the body begins in what was kept; 0: the head is not whole yet
        self._size = 0
        self._status = 0

    def send(self, head: bytes, body: bytes, limit: int) -> asyncio.Future[tuple[int, bytes]]:
        """The future of (status, body) of at most `limit` bytes; it raises Interrupted or BadAnswer."""
        assert self.transport is not None
        self._limit = limit
        self._body_at = 0
        self._waiter = asyncio.get_running_loop().create_future()
        if len(body) < 1 << 16:
            self.transport.write(head + body)
        else:
            self.transport.writelines([head, body])
        return self._waiter

    def stale(self) -> bool:
        """Whether the pod closed the connection, or sent something unasked for, since its last answer."""
        if self.transport is None or self.transport.is_closing():
            return True
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def abort(self) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()

    # ── asyncio's calls ─────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one without being its subclass

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.abort()  # an answer to nothing: whatever follows it could be taken for the next one's
            return
        if self._waiter.done():
            return
        self._kept += data
        try:
            if self._body_at or self._read_head():
                self._read_body()
        except BadAnswer as why:
            self._fail(why)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(Interrupted(clean(str(exc)) if exc is not None else "the pod closed the connection"))
        self._lost(self)

    # ── an answer ───────────────────────────────────────────────────────────────────────────────────────────────

    def _read_head(self) -> bool:
        """Whether the head is whole. Raises BadAnswer."""
        end = self._kept.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._kept) >= MAX_HEAD_BYTES:
                raise BadAnswer(f"headers over the bound of {MAX_HEAD_BYTES} bytes")
            return False
        status_line, *lines = bytes(self._kept[:end]).split(b"\r\n")
        status = _STATUS.match(status_line)
        if status is None:
            raise BadAnswer("no HTTP answer")
        self._status = int(status[1])
        size = -1
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not name or b"\n" in line or name[0] in b" \t":
                raise BadAnswer("a header that is none")
            kind = name.lower()
            if kind == b"content-length":
                if size >= 0 or not _LENGTH.match(value.strip()):
                    raise BadAnswer("a length that is none")
                size = int(value)
            elif kind == b"transfer-encoding":
                raise BadAnswer("an answer without a length")
            elif kind == b"connection" and value.strip().lower() != b"keep-alive":
                self.reusable = False
        if size < 0:
            if self._status != 204:
                raise BadAnswer("an answer without a length")
            size = 0
        limit = self._limit if self._status == 200 else ERROR_BYTES
        if size > limit:
            raise BadAnswer(f"an answer of {size} bytes is over the bound of {limit}")
        self._size = size
        self._body_at = end + 4
        return True

    def _read_body(self) -> None:
        have = len(self._kept) - self._body_at
        if have < self._size:
            return
        if have > self._size:
            self.reusable = False
        body = bytes(memoryview(self._kept)[self._body_at : self._body_at + self._size])
        self._kept = bytearray()
        assert self._waiter is not None
        if not self._waiter.done():
            self._waiter.set_result((self._status, body))
        self._waiter = None

    def _fail(self, why: Exception) -> None:
        self.reusable = False
        self._kept = bytearray()
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(why)
        if self.transport is not None:
            self.transport.abort()


class PodConnections:
    """The kept-alive connections to one pod, made as calls need them, at most `most` of them."""

    def __init__(self, address: str, most: int) -> None:
        self._address = address
        self._most = most
        self._idle: list[_Connection] = []  # the last used last, so that those beyond what is needed grow old
        self._all: set[_Connection] = set()
        self._connecting = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False

    @property
    def open(self) -> int:
        return len(self._all)

    @property
    def closed(self) -> bool:
        return self._closed

    async def call(self, head: bytes, body: bytes, limit: int, total_sec: float) -> tuple[int, bytes]:
        """Sends one request, `head` complete with its empty line; (status, body) of its answer.

        Raises ExecutorNotReached where it was not sent, Interrupted, BadAnswer, TimeoutError, RateLimited."""
        connection = self._take() or await self._connect()
        answer = connection.send(head, body, limit)
        deadline = asyncio.get_running_loop().call_later(total_sec, _late, answer)
        try:
            status_and_body = await answer
        except BaseException:  # the caller's cancellation too: an answer that is still to come is nobody's
            connection.abort()
            raise
        finally:
            deadline.cancel()
        self._give_back(connection)
        return status_and_body

    def close(self) -> None:
        """Calls under way fail with Interrupted."""
        self._closed = True
        for connection in list(self._all):
            connection.abort()
        while self._waiting:
            _wake(self._waiting.popleft())

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.stale():
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_SEC):
                while len(self._all) + self._connecting >= self._most and not self._closed:
                    await self._turn()
                    if (connection := self._take()) is not None:
                        return connection
                if self._closed:
                    raise ExecutorNotReached("the pod has ended")
                self._connecting += 1
                try:
                    return await self._dial()
                except BaseException:
                    self._next()
                    raise
                finally:
                    self._connecting -= 1
        except TimeoutError as why:
            raise ExecutorNotReached(f"the pod's executor took no connection within {CONNECT_SEC:.0f} s") from why
        except OSError as why:
            raise ExecutorNotReached(f"the pod's executor cannot be reached: {clean(str(why), 200)}") from why

    async def _turn(self) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise RateLimited("as many calls as may wait for this sandbox are waiting already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()  # the turn was given, and this caller cannot use it
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    async def _dial(self) -> _Connection:
        loop = asyncio.get_running_loop()
        sock = await dial_unix(self._address[5:]) if self._address.startswith("unix:") else await _tcp(self._address)
        try:
            if self._address.startswith("unix:"):
                _, connection = await loop.create_unix_connection(lambda: _Connection(sock, self._gone), sock=sock)
            else:
                _, connection = await loop.create_connection(lambda: _Connection(sock, self._gone), sock=sock)
        except BaseException:
            sock.close()
            raise
        self._all.add(connection)
        if self._closed:
            connection.abort()
            raise ExecutorNotReached("the pod has ended")
        return connection

    def _give_back(self, connection: _Connection) -> None:
        if connection.reusable and not self._closed:
            self._idle.append(connection)
            self._next()
        else:
            connection.abort()

    def _gone(self, connection: _Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if _wake(turn):
                return


def _wake(turn: asyncio.Future[None]) -> bool:
    if turn.done():
        return False
    turn.set_result(None)
    return True


def _late(answer: asyncio.Future[tuple[int, bytes]]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError("no answer came in time"))


async def dial_unix(path: str) -> socket.socket:
    """A connected socket, waiting while the pod's backlog is full. Raises OSError where nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                # On a Unix socket EAGAIN is a full backlog (connect(2)); asyncio takes it for a connection under way.
                await asyncio.sleep(_BACKLOG_PAUSE_SEC)
    except BaseException:
        sock.close()
        raise


async def _tcp(address: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    parts = urlsplit(address)
    found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock
