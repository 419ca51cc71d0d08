"""`/v1/usage` and `/metrics`: what the pod uses against what it may."""

from __future__ import annotations

from aiohttp import web

from executor.routes.reply import json_reply, read_query
from executor.usage import UsageService


def usage_routes(usage: UsageService) -> list[web.RouteDef]:
    async def report(request: web.Request) -> web.Response:
        read_query(request)
        return json_reply(await usage.report())

    async def metrics(request: web.Request) -> web.Response:
        text = await usage.metrics()
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    return [web.get("/v1/usage", report, allow_head=False), web.get("/metrics", metrics, allow_head=False)]
