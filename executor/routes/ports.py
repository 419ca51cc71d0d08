"""`ANY /v1/ports/{port}/{path}`: a server in the pod, over HTTP and WebSockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Final

import aiohttp
from aiohttp import WSMsgType, web
from aiohttp.http_websocket import WSCloseCode

from executor.errors import InvalidRequest
from executor.ports import CLOSE_SEC, PortService
from executor.routes.reply import Patience, body_pieces
from executor.routes.sockets import is_upgrade
from executor.wire import (
    CLOSE_STALLED,
    EXECUTOR_PORT,
    PORT_HEADER,
    PORT_MESSAGE_BYTES,
    headers_from_port,
    headers_to_port,
    port_number,
    port_target,
)

PREFIX: Final = "/v1/ports/"
_NOT_PASSED: Final = frozenset({"CONNECT", "TRACE"})  # the one opens a tunnel, the other shows what we strip
AnySocket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


def port_routes(ports: PortService) -> list[web.RouteDef]:
    async def pass_on(request: web.Request) -> web.StreamResponse:
        port, target = _asked(request)
        if "Upgrade" in request.headers or "upgrade" in request.headers.get("Connection", "").lower():
            if not is_upgrade(request) or request.method != "GET":
                raise InvalidRequest("a connection to a port can be upgraded to websocket only", field="Upgrade")
            return await _websocket(ports, request, port, target)
        return await _http(ports, request, port, target)

    return [
        web.route("*", "/v1/ports/{port:[^/]*}", pass_on),
        web.route("*", "/v1/ports/{port:[^/]*}/{path:.*}", pass_on),
    ]


def _asked(request: web.Request) -> tuple[int, str]:
    """The port and the target, from the request line as it came. Raises InvalidRequest."""
    raw = request.raw_path
    if request.method in _NOT_PASSED:
        raise InvalidRequest(f"{request.method} is not passed on to a port")
    if not raw.startswith(PREFIX):  # the absolute form; the path that aiohttp sees in it is not all that it says
        raise InvalidRequest(f"the request's target must begin with {PREFIX}")
    whole, _, query = raw.removeprefix(PREFIX).partition("?")
    text, _, path = whole.partition("/")
    port = port_number(text)
    if port is None or port == _own_port(request):
        raise InvalidRequest(
            f"the port must be a number from 1 to 65535 in plain digits, and not {EXECUTOR_PORT}, the executor's own",
            field="port",
        )
    target = port_target("/" + path, query)
    if target is None:
        raise InvalidRequest("the path must be percent-encoded and without . or .. between slashes", field="path")
    return port, target


def _own_port(request: web.Request) -> int | None:
    name = None if request.transport is None else request.transport.get_extra_info("sockname")
    return int(name[1]) if isinstance(name, tuple) else None


# ── HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _http(ports: PortService, request: web.Request, port: int, target: str) -> web.StreamResponse:
    headers = headers_to_port(request.headers.items())
    if request.body_exists and request.content_length is not None:
        headers.append(("Content-Length", str(request.content_length)))
    body = _body(ports, request) if request.body_exists else None
    async with ports.call(port, request.method, target, headers, body) as answer:
        reply = web.StreamResponse(status=answer.status, reason=_reason(answer.reason))
        for name, value in headers_from_port(answer.headers.items()):
            reply.headers.add(name, value)
        reply.headers[PORT_HEADER] = str(port)
        await reply.prepare(request)
        try:
            if request.method != "HEAD":
                while piece := await answer.content.readany():
                    ports.passed()
                    async with asyncio.timeout(ports.idle_sec):
                        await reply.write(piece)
            await reply.write_eof()
        except (aiohttp.ClientError, TimeoutError) as why:
            # The status is out: only a broken connection can tell the caller that this is not all.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the server's answer broke off") from why
        return reply


async def _body(ports: PortService, request: web.Request) -> AsyncIterator[bytes]:
    """Raises InvalidRequest where it breaks off, LateRequest where it pauses for too long; streams have all day."""
    patience = Patience(math.inf, 1, ports.idle_sec)
    async with aclosing(body_pieces(request, patience, as_it_is=True)) as pieces:
        async for piece in pieces:
            ports.passed()
            yield piece


def _reason(given: str | None) -> str | None:
    return given if given and len(given) <= 200 and given.isascii() and given.isprintable() else None


# ── WebSockets ──────────────────────────────────────────────────────────────────────────────────────────────────


async def _websocket(ports: PortService, request: web.Request, port: int, target: str) -> web.StreamResponse:
    if not web.WebSocketResponse().can_prepare(request):
        raise InvalidRequest("the headers of the WebSocket upgrade are broken", field="Upgrade")
    offered = [each.strip() for each in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if each.strip()]
    try:
        async with ports.connect(port, target, headers_to_port(request.headers.items()), offered) as server:
            caller = web.WebSocketResponse(
                protocols=(server.protocol,) if server.protocol else (), autoclose=False, autoping=False,
                compress=False, max_msg_size=PORT_MESSAGE_BYTES, timeout=CLOSE_SEC,
            )  # fmt: skip
            caller.headers[PORT_HEADER] = str(port)
            await caller.prepare(request)
            try:
                await Relay(caller, server, ports.passed, ports.idle_sec).run()
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
            return caller
    except aiohttp.WSServerHandshakeError as why:
        status = why.status if why.status >= 300 else 502
        text = f"the server on port {port} answered the upgrade to WebSocket with {why.status}\n"
        return web.Response(status=status, text=text, headers={PORT_HEADER: str(port)})


class Relay:
    """Passes messages, pings and the close both ways until one side ends it. Each side waits for the other to read."""

    def __init__(
        self,
        caller: web.WebSocketResponse,
        server: aiohttp.ClientWebSocketResponse,
        passed: Callable[[], None],
        idle_sec: float,
    ) -> None:
        self._caller, self._server, self._passed, self._idle_sec = caller, server, passed, idle_sec
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    async def run(self) -> None:
        """Raises TimeoutError where one side does not even take the close."""
        code, why = await self._first_end()
        async with asyncio.timeout(2 * CLOSE_SEC):
            await self._caller.close(code=code, message=why)
            await self._server.close(code=code, message=why)

    async def _first_end(self) -> tuple[int, bytes]:
        ways = [
            asyncio.create_task(self._one_way(self._caller, self._server), name="port-to-server"),
            asyncio.create_task(self._one_way(self._server, self._caller), name="port-to-caller"),
            asyncio.create_task(self._until_idle(), name="port-idle"),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
        return next(way for way in ways if way in done).result()

    async def _one_way(self, source: AnySocket, sink: AnySocket) -> tuple[int, bytes]:
        """The close's code and reason."""
        while True:
            message = await source.receive()
            self._last = self._loop.time()
            try:
                if message.type is WSMsgType.TEXT:
                    self._passed()
                    await sink.send_str(message.data)
                elif message.type is WSMsgType.BINARY:
                    self._passed()
                    await sink.send_bytes(message.data)
                elif message.type is WSMsgType.PING:
                    await sink.ping(message.data)
                elif message.type is WSMsgType.PONG:
                    await sink.pong(message.data)
                elif message.type is WSMsgType.CLOSE:
                    return _sendable(message.data), (message.extra or "").encode()[:120]
                else:
                    return _sendable(source.close_code), b""
            except ConnectionError:
                return WSCloseCode.GOING_AWAY, b""

    async def _until_idle(self) -> tuple[int, bytes]:
        while True:
            left = self._last + self._idle_sec - self._loop.time()
            if left <= 0:
                return CLOSE_STALLED, b"silent for too long"
            await asyncio.sleep(left)


def _sendable(code: int | None) -> int:
    """The codes that say how a connection ended without a close must not be sent (RFC 6455, 7.4.1)."""
    if code is None or code in (1004, 1005, 1006, 1015) or not 1000 <= code < 5000:
        return WSCloseCode.GOING_AWAY if code == 1006 else WSCloseCode.OK
    return code
