"""`/openapi.json`: the executor's own description."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from executor import __version__
from executor.routes.reply import read_query
from executor.wire import JSON_TYPE


def openapi_routes() -> list[web.RouteDef]:
    async def describe(request: web.Request) -> web.Response:
        read_query(request)
        body = await asyncio.get_running_loop().run_in_executor(None, _document)
        return web.Response(body=body, content_type=JSON_TYPE)

    return [web.get("/openapi.json", describe, allow_head=False)]


def _document() -> bytes:
    from executor.openapi import document  # nothing of it stays in the memory of pods that nobody asks

    return msgspec.json.encode(document(__version__))
