"""`.../ports/{port}/{path}` of a task or a long-lived sandbox: a server in it, for whoever has the key.

What it says is a stranger's on our origin: it sets no cookie beyond its own path, sends nobody elsewhere, changes no
rule of the origin, and a browser that is led here runs none of it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Final
from urllib.parse import urljoin

import aiohttp
from aiohttp import WSMsgType, web
from aiohttp.http_websocket import WSCloseCode

from executor.wire import (
    CLOSE_REFUSED,
    CLOSE_STALLED,
    EXECUTOR_PORT,
    PORT_HEADER,
    PORT_IDLE_SEC,
    PORT_MESSAGE_BYTES,
    headers_from_port,
    headers_to_port,
    port_number,
    port_target,
)
from manager.api.client_socket import CLOSE_SEC, is_upgrade
from manager.api.parsing import body_stream, if_pod
from manager.api.server import KEY_LOOK_SEC, PRINCIPAL, SERVICES, as_error, while_allowed
from manager.api.services import Services
from manager.api.tasks import name_in
from manager.errors import InvalidRequest, ShuttingDown
from manager.executor_client import PortDeclined
from manager.services.tasks import SandboxFacts, TaskPortSocket

log = logging.getLogger(__name__)

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
MOVED_HEADER: Final = "Sandbox-App-Location"  # where a server wanted to send the caller, away from itself
_PREFIX: Final = re.compile(r"/sandbox/(?:task|sandboxes/v1)/[^/?]*/ports/([^/?]*)(?=[/?]|\Z)")
_OURS: Final = {
    "Cache-Control": "no-store",  # a cache on the way does not know that X-Api-Key decides who may see it
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "X-Content-Type-Options": "nosniff",
}
_OF_THE_ORIGIN: Final = re.compile(
    r"(?:access-control-.*|alt-svc|cache-control|clear-site-data|content-security-policy.*|nel|origin-agent-cluster"
    r"|public-key-pins.*|refresh|report-to|reporting-endpoints|service-worker-allowed|strict-transport-security"
    r"|www-authenticate|x-content-type-options)\Z",
    re.IGNORECASE,
)
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
AnySocket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def port_call(request: web.Request) -> web.StreamResponse:
    place = Place(request)
    if "Upgrade" in request.headers or "upgrade" in request.headers.get("Connection", "").lower():
        if not is_upgrade(request) or request.method != "GET":
            raise InvalidRequest("a connection to a port can be upgraded to websocket only", field="Upgrade")
        return await _websocket(request, place)
    return await _http(request, place)


class Place:
    """Which server a request is for, and what it is asked. Raises InvalidRequest."""

    def __init__(self, request: web.Request) -> None:
        found = _PREFIX.match(request.raw_path)  # the absolute form is none
        port = port_number(found[1]) if found else None
        if found is None or port is None:
            raise InvalidRequest(
                f"the port must be a number from 1 to 65535 in plain digits, and not {EXECUTOR_PORT}", field="port"
            )
        path, _, query = request.raw_path[found.end() :].partition("?")
        self.port = port
        self.prefix = found[0]
        self.path = path or "/"
        target = port_target(self.path, query)
        if target is None:
            raise InvalidRequest("the path must be percent-encoded and without . or .. between slashes", field="path")
        self.target = target

    def headers(self, given: list[tuple[str, str]], facts: SandboxFacts) -> list[tuple[str, str]]:
        """A server's headers as they may stand on our origin, and ours."""
        passed = []
        for name, value in headers_from_port(given):
            plain = name.lower()
            if _OF_THE_ORIGIN.match(plain):
                continue
            if plain == "set-cookie":
                value = self._cookie(value)
            elif plain == "location":
                own = self.location(value)
                name, value = (name, own) if own is not None else (MOVED_HEADER, value)
            passed.append((name, value))
        ours = {PORT_HEADER: str(self.port), "Sandbox-Id": facts.sandbox_id, "Sandbox-Pod": facts.pod_id}
        return [*passed, *_OURS.items(), *ours.items()]

    def location(self, given: str) -> str | None:
        """The path on our origin for a place of the same server; None for any other: a caller that follows it would
        take its key there."""
        for origin in ("localhost", "127.0.0.1", "[::1]"):
            if given.startswith((f"http://{origin}:{self.port}/", f"//{origin}:{self.port}/")):
                given = given.partition("//")[2]
                given = given[given.index("/") :]
                break
        if _SCHEME.match(given) or given.startswith("//") or "\\" in given:
            return None
        whole = urljoin(f"http://server{self.path}", given).removeprefix("http://server")
        path, _, query = whole.partition("#")[0].partition("?")
        target = port_target(path, query)
        return None if target is None or target.startswith("//") else self.prefix + target

    def _cookie(self, value: str) -> str:
        """For the server's own path and no more of our origin."""
        pair, *attributes = value.split("; ")
        kept = [each for each in attributes if each.partition("=")[0].strip().lower() != "path"]
        path = next((each.partition("=")[2].strip() for each in attributes if each.lower().startswith("path=")), "/")
        return "; ".join([pair, *kept, f"Path={self.prefix}{path if port_target(path, '') else '/'}"])


# ── HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _http(request: web.Request, place: Place) -> web.StreamResponse:
    services, headers = request.app[SERVICES], headers_to_port(request.headers.items())
    if request.body_exists and request.content_length is not None:
        headers.append(("Content-Length", str(request.content_length)))
    body = body_stream(request, PORT_IDLE_SEC) if request.body_exists else None
    call = services.tasks.port(
        request[PRINCIPAL], name_in(request), request.method, place.port, place.target, headers, body,
        pod_expected=if_pod(request),
    )  # fmt: skip
    async with call as port:
        reply = web.StreamResponse(status=port.answer.status)
        for name, value in place.headers(port.answer.headers, port.facts):
            reply.headers.add(name, value)
        await reply.prepare(request)
        try:
            if request.method != "HEAD":
                async with while_allowed(request):
                    async for piece in port.answer.body:
                        port.traffic()
                        async with asyncio.timeout(PORT_IDLE_SEC):
                            await reply.write(piece)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as why:
            # The status is out already: only a broken connection tells the caller that this is not all.
            log.warning("answer_broke_off", extra={"why": str(why), "path": place.path[:200]})
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the server's answer broke off") from why
        await reply.write_eof()
        return reply


# ── WebSockets ──────────────────────────────────────────────────────────────────────────────────────────────────


async def _websocket(request: web.Request, place: Place) -> web.StreamResponse:
    services = request.app[SERVICES]
    if not web.WebSocketResponse().can_prepare(request):
        raise InvalidRequest("the headers of the WebSocket upgrade are broken", field="Upgrade")
    offered = [each.strip() for each in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if each.strip()]
    opening = services.tasks.port_socket(
        request[PRINCIPAL], name_in(request), place.port, place.target, headers_to_port(request.headers.items()),
        offered, pod_expected=if_pod(request),
    )  # fmt: skip
    try:
        async with opening as socket:  # what is refused here is an HTTP answer
            protocol = socket.ws.protocol if socket.ws.protocol in offered else None
            caller = web.WebSocketResponse(
                protocols=(protocol,) if protocol else (), autoclose=False, autoping=False, compress=False,
                max_msg_size=PORT_MESSAGE_BYTES, timeout=CLOSE_SEC,
            )  # fmt: skip
            caller.headers.update({
                PORT_HEADER: str(place.port), "Sandbox-Id": socket.facts.sandbox_id, "Sandbox-Pod": socket.facts.pod_id,
            })  # fmt: skip
            await caller.prepare(request)
            await _Relay(request, services, caller, socket).run()
            return caller
    except PortDeclined as why:
        text = f"the server on port {place.port} answered the upgrade to WebSocket with {why.status}\n"
        return web.Response(status=why.status, text=text, headers={PORT_HEADER: str(place.port), **_OURS})


class _Relay:
    """Passes messages, pings and the close both ways until one side ends it, the key is revoked, the pod or this
    manager ends, or nothing passes for too long."""

    def __init__(
        self, request: web.Request, services: Services, caller: web.WebSocketResponse, socket: TaskPortSocket
    ) -> None:
        self._request, self._services, self._caller, self._socket = request, services, caller, socket
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    async def run(self) -> None:
        try:
            async with while_allowed(self._request):
                code, why = await self._first_end()
        except Exception as error:
            told = as_error(error)
            code, why = CLOSE_REFUSED + told.status, told.code.encode()
        try:
            async with asyncio.timeout(2 * CLOSE_SEC):
                await self._caller.close(code=code, message=why)
                await self._socket.ws.close(code=code, message=why)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()

    async def _first_end(self) -> tuple[int, bytes]:
        pod, caller = self._socket.ws, self._caller
        ways = [
            asyncio.create_task(self._one_way(caller, pod, _nothing), name="port-to-pod"),
            asyncio.create_task(self._one_way(pod, caller, self._socket.check), name="port-to-caller"),
            asyncio.create_task(self._until_over(), name="port-over"),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
        return next(way for way in ways if way in done).result()

    async def _one_way(self, source: AnySocket, sink: AnySocket, check: Callable[[], None]) -> tuple[int, bytes]:
        """The close's code and reason."""
        while True:
            message = await source.receive()
            check()
            self._last = self._loop.time()
            try:
                if message.type is WSMsgType.TEXT:
                    self._socket.traffic()
                    await sink.send_str(message.data)
                elif message.type is WSMsgType.BINARY:
                    self._socket.traffic()
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

    async def _until_over(self) -> tuple[int, bytes]:
        while self._loop.time() < self._last + PORT_IDLE_SEC:
            if self._services.in_flight.ending:
                raise ShuttingDown("this manager is shutting down; connect again in a moment")
            self._socket.check()
            await asyncio.sleep(KEY_LOOK_SEC)
        return CLOSE_STALLED, b"silent for too long"


def _nothing() -> None:
    pass


def _sendable(code: int | None) -> int:
    """The codes that say how a connection ended without a close must not be sent (RFC 6455, 7.4.1)."""
    if code is None or code in (1004, 1005, 1006, 1015) or not 1000 <= code < 5000:
        return WSCloseCode.GOING_AWAY if code == 1006 else WSCloseCode.OK
    return code
