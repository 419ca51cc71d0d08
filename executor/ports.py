"""Calls to servers in the pod: on its loopback and nowhere else, streamed both ways, with nothing of ours in them.

What comes back is a stranger's: its head is bounded, it is not unpacked or followed, and every wait has an end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from executor.errors import NotFound, PortUnanswered, RateLimited
from executor.lease import Lease
from executor.wire import PORT_FIELD_BYTES, PORT_HEADERS, PORT_IDLE_SEC, PORT_MESSAGE_BYTES

CONNECT_SEC: Final = 5.0
MAX_CALLS: Final = 512  # at once, WebSockets among them
BUFFER_BYTES: Final = 65_536  # of a body, each way
CLOSE_SEC: Final = 5.0  # for a server's part in the end of a WebSocket
_ADDED_BY_ITSELF: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class _Loopback(AbstractResolver):
    """Whatever the name: this pod, first as 127.0.0.1, then as ::1."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for address, kind in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))
        ]

    async def close(self) -> None:
        pass


class PortService:
    """Each call has a connection of its own, so that no answer can be taken for another's."""

    def __init__(self, lease: Lease, idle_sec: float = PORT_IDLE_SEC) -> None:
        self._lease = lease
        self.idle_sec = idle_sec
        self._calls = 0
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def passed(self) -> None:
        """To be called for content that passes, either way: that is work, an open connection is none."""
        self._lease.worked()

    @asynccontextmanager
    async def call(
        self,
        port: int,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: AsyncIterator[bytes] | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of the server's answer, its body unread. `headers` may have the body's Content-Length; without it
        the body goes in chunks. Leaving closes the connection.

        Raises NotFound where nobody listens, RateLimited, PortUnanswered."""
        with self._counted():
            with self._working(), _told(port):
                answer = await self._ours().request(
                    method,
                    _url(port, target),
                    headers=headers,
                    data=body,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SEC, sock_read=self.idle_sec),
                )
            try:
                if answer.status < 200:
                    raise PortUnanswered(f"the server on port {port} changed to a protocol that nobody asked for")
                yield answer
            finally:
                answer.close()

    @asynccontextmanager
    async def connect(
        self, port: int, target: str, headers: list[tuple[str, str]], protocols: list[str]
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket. Raises as `call`, and aiohttp.WSServerHandshakeError where the server answers with a status."""
        with self._counted():
            with self._working(), _told(port):
                async with asyncio.timeout(CONNECT_SEC + self.idle_sec):
                    ws = await self._ours().ws_connect(
                        _url(port, target), headers=headers, protocols=protocols, autoclose=False, autoping=False,
                        compress=0, max_msg_size=PORT_MESSAGE_BYTES,
                        timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SEC),
                    )  # fmt: skip
            try:
                yield ws
            finally:
                await ws.close()

    def _ours(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, force_close=True, resolver=_Loopback(), use_dns_cache=False, happy_eyeballs_delay=None,
                    ssl=False,
                ),
                cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=_ADDED_BY_ITSELF, auto_decompress=False,
                trust_env=False, read_bufsize=BUFFER_BYTES, max_line_size=PORT_FIELD_BYTES,
                max_field_size=PORT_FIELD_BYTES, max_headers=PORT_HEADERS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SEC),
            )  # fmt: skip
        return self._session

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._calls >= MAX_CALLS:
            raise RateLimited(f"{MAX_CALLS} calls to this pod's ports are under way, as many as there may be")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._lease.begin()
        try:
            yield
        finally:
            self._lease.done()


def _url(port: int, target: str) -> URL:
    return URL(f"http://localhost:{port}{target}", encoded=True)


@contextmanager
def _told(port: int) -> Iterator[None]:
    """Turns what aiohttp raises into our errors; a WebSocket's refusal stays."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError:
        raise RateLimited(f"the server on port {port} took no connection within {CONNECT_SEC:.0f} s") from None
    except aiohttp.ClientConnectorError:
        raise NotFound(
            f"nothing listens on port {port} of the pod's 127.0.0.1 or ::1; start the server, or wait until it is up"
        ) from None
    except aiohttp.WSServerHandshakeError:
        raise
    except TimeoutError:
        raise PortUnanswered(f"the server on port {port} took too long over its answer") from None
    except (aiohttp.ClientError, OSError, ValueError) as why:
        raise PortUnanswered(f"the server on port {port} gave no HTTP answer: {type(why).__name__}") from None
