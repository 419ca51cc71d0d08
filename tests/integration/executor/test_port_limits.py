"""The limits of calls to ports, with clocks that a test can wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler

from executor import ports
from executor.config import ExecutorConfig
from executor.errors import ExecutorError
from executor.guard import error_reply
from executor.lease import Lease
from executor.ports import PortService
from executor.routes.ports import port_routes
from executor.routes.reply import json_reply


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ExecutorError as error:
        return json_reply(error_reply(error), status=error.status)


@contextlib.asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[int]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@pytest.fixture
async def proxy() -> AsyncIterator[int]:
    """The port of a server with nothing but the calls to ports, and an idle limit of a moment."""
    lease = Lease(ExecutorConfig(token_sha256="0" * 64), lambda: 0, lambda _why: None)
    service = PortService(lease, idle_sec=0.5)
    app = web.Application(middlewares=[_errors])
    app.router.add_routes(port_routes(service))
    async with listening(app) as port:
        yield port
    await service.close()


@pytest.fixture
async def silent() -> AsyncIterator[int]:
    """The port of a server that takes everything and says nothing."""

    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.WebSocketResponse() if request.headers.get("Upgrade") else web.StreamResponse()
        if request.path != "/head":
            await reply.prepare(request)
            if isinstance(reply, web.WebSocketResponse):
                await reply.receive()
                return reply
            await reply.write(b"first")
        await asyncio.Event().wait()
        return reply

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with listening(app) as port:
        yield port


async def test_the_port_that_the_call_came_in_on_is_refused_whichever_it_is(proxy: int) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{proxy}/v1/ports/{proxy}/v1/ports/{proxy}/") as reply,
    ):
        assert reply.status == 400
        assert (await reply.json())["error"]["details"] == {"field": "port"}


async def test_a_server_that_never_answers_is_given_up(proxy: int, silent: int) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{proxy}/v1/ports/{silent}/head") as reply:
            assert reply.status == 504
            assert (await reply.json())["error"]["code"] == "outcome_unknown"
        with pytest.raises(aiohttp.ClientError):
            async with session.get(f"http://127.0.0.1:{proxy}/v1/ports/{silent}/body") as reply:
                await reply.read()


async def test_a_websocket_that_is_silent_both_ways_is_closed(proxy: int, silent: int) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{proxy}/v1/ports/{silent}/", autoclose=False) as ws,
    ):
        end = await asyncio.wait_for(ws.receive(), 30)
        assert (end.type, end.data) == (WSMsgType.CLOSE, 4008)


async def test_calls_over_their_number_are_refused_and_their_end_makes_room(
    proxy: int, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "MAX_CALLS", 1)
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{proxy}/v1/ports/{silent}/"
        async with session.ws_connect(url), session.get(url) as reply:
            assert reply.status == 429
        async with asyncio.timeout(30):
            while True:
                async with session.get(url) as reply:
                    if reply.status == 200:
                        break
                await asyncio.sleep(0.02)
