"""The server under the routes: bounded connections, headers and times, and every refusal in the one shape.

aiohttp closes a connection that has sent no whole request within the keep-alive time, the first one included; bodies
have deadlines of their own where they are read (`parsing`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from manager.api.server import error_reply
from manager.errors import InvalidRequest, ManagerError, RateLimited

log = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 16_384  # a task id of 512 bytes and a path of 4096, percent-encoded
MAX_HEADERS: Final = 64
BACKLOG: Final = 2048
_LINGER_SEC: Final = 2.0  # for the rest of a body that was refused


class _Handler(RequestHandler):
    """aiohttp's connection, but that what is no HTTP gets our error shape too."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the reply had begun")
        if status == 500:
            log.error("request_failed", exc_info=exc)
            error = ManagerError("something is broken here; the log has it")
        else:
            error = InvalidRequest(f"this is no HTTP request that can be read: {(message or 'malformed')[:200]}")
        reply = error_reply(error)
        reply.force_close()
        return reply


class _Full(asyncio.Protocol):
    """Answers a connection over the bound, and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.WriteTransport, transport)  # uvloop's are none of asyncio's classes
        body = error_reply(RateLimited("this manager holds as many connections as it may; try again in a moment")).body
        assert isinstance(body, bytes)
        head = (
            "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.write(head.encode() + body)
        connection.close()


class Listener:
    """An application on one address. `port` is the real one, once opened."""

    def __init__(
        self, app: web.Application, *, host: str, port: int, keepalive_sec: float, max_connections: int
    ) -> None:
        self._app, self._host, self.port = app, host, port
        self._keepalive_sec, self._max_connections = keepalive_sec, max_connections
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Raises OSError where the address cannot be had."""
        options: dict[str, Any] = {
            "keepalive_timeout": self._keepalive_sec,
            "max_line_size": MAX_LINE_BYTES,
            "max_field_size": MAX_LINE_BYTES,
            "max_headers": MAX_HEADERS,
            "lingering_time": _LINGER_SEC,
            "auto_decompress": False,  # a small body may unpack to any size
            "access_log": None,
        }
        # A caller that hangs up ends its handler, and with that a command that asked for `on_disconnect: kill`.
        self._runner = web.AppRunner(self._app, handler_cancellation=True, shutdown_timeout=1.0, **options)
        await self._runner.setup()
        accepting, loop = self._runner.server, asyncio.get_running_loop()
        assert accepting is not None

        def connection() -> asyncio.Protocol:
            if len(accepting._connections) >= self._max_connections:  # `.connections` copies the list
                return _Full()
            return _Handler(accepting, loop=loop, **options)

        try:
            self._server = await loop.create_server(connection, self._host, self.port, backlog=BACKLOG)
        except BaseException:
            await self._runner.cleanup()
            raise
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_accepting(self) -> None:
        """No new connection from here on; those there are go on."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Ends every connection; handlers still under way are cancelled."""
        self.stop_accepting()
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> Listener:
        await self.open()
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.close()
