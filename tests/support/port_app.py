"""A web server such as somebody runs in a pod: it echoes, floods, waits, sets cookies, speaks WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator

from aiohttp import WSMsgType, web


class App:
    """A web server on one loopback address; what it does is in its path."""

    def __init__(self) -> None:
        self.seen: list[web.BaseRequest] = []
        self.port = 0
        self.sent = 0
        self.hung_up = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append(request)
        if request.headers.get("Upgrade") == "websocket":
            return await self._socket(request)
        call = getattr(self, "on_" + request.path.rpartition("/")[2], self.on_echo)
        reply: web.StreamResponse = await call(request)
        return reply

    async def on_echo(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        return web.json_response({
            "method": request.method, "target": request.raw_path, "headers": list(request.headers.items()),
            "body": body.decode("latin-1"),
        })  # fmt: skip

    async def on_count(self, request: web.BaseRequest) -> web.StreamResponse:
        size = 0
        async for piece in request.content.iter_any():
            size += len(piece)
        return web.json_response(size)

    async def on_flood(self, request: web.BaseRequest) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            for _ in range(4096):
                await reply.write(bytes(65_536))
                self.sent += 65_536
        except (ConnectionError, asyncio.CancelledError):
            self.hung_up.set()
            raise
        return reply

    async def on_cookies(self, request: web.BaseRequest) -> web.StreamResponse:
        reply = web.Response(status=302, headers={
            "Location": "https://elsewhere.example/", "Sandbox-Pod": "forged", "Sandbox-Port": "1",
            "Connection": "X-Private", "X-Private": "1", "X-Own": "kept",
        })  # fmt: skip
        reply.headers.add("Set-Cookie", "a=1; Domain=example.com; Path=/; HttpOnly")
        reply.headers.add("Set-Cookie", "b=2; domain = .com")
        reply.headers.add("Set-Cookie", "__Host-sojourn-session=stolen; Path=/")
        return reply

    async def on_packed(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=gzip.compress(b"x" * 1000), headers={"Content-Encoding": "gzip"})

    async def on_never(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        raise AssertionError("an event that nobody sets was set")

    async def _socket(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/refused"):
            return web.Response(status=403, text="no")
        ws = web.WebSocketResponse(protocols=("chat",), autoclose=True)
        await ws.prepare(request)
        async for message in ws:
            if message.type is WSMsgType.TEXT and message.data.startswith("close "):
                await ws.close(code=int(message.data[6:]), message=b"as asked")
            elif message.type is WSMsgType.TEXT:
                await ws.send_str(message.data)
            else:
                await ws.send_bytes(message.data)
        self.hung_up.set()
        return ws


@contextlib.asynccontextmanager
async def serving(host: str) -> AsyncIterator[App]:
    app = App()
    runner = web.ServerRunner(web.Server(app.answer, handler_cancellation=True), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    app.port = runner.addresses[0][1]
    try:
        yield app
    finally:
        await runner.cleanup()
