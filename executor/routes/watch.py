"""`/v1/files/watch`: changes below a directory as a stream of JSON lines, until the caller hangs up."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

import msgspec
from aiohttp import web

from executor.files import STALL_SEC
from executor.routes.reply import flag_of, read_json, read_query
from executor.watch import WatchService
from executor.wire import NDJSON_TYPE, WatchEvent, WatchRequest

_ENCODER: Final = msgspec.json.Encoder()


def watch_routes(watches: WatchService) -> list[web.RouteDef]:
    async def get(request: web.Request) -> web.StreamResponse:
        query = read_query(request, "path", "recursive", "user")
        terms = WatchRequest(path=query.get("path", "."), recursive=flag_of(query, "recursive", True))
        return await _stream(request, watches, terms, query.get("user"))

    async def post(request: web.Request) -> web.StreamResponse:
        query = read_query(request, "user")
        return await _stream(request, watches, await read_json(request, WatchRequest), query.get("user"))

    return [web.get("/v1/files/watch", get, allow_head=False), web.post("/v1/files/watch", post)]


async def _stream(
    request: web.Request, watches: WatchService, terms: WatchRequest, user: str | None
) -> web.StreamResponse:
    async with aclosing(watches.watch(terms.path, terms.recursive, user)) as batches:
        first = await anext(batches)  # what cannot be watched is told before the answer begins
        response = web.StreamResponse(headers={"Content-Type": NDJSON_TYPE, "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            await _write(response, first)
            async for batch in batches:
                await _write(response, batch)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # a reader that takes nothing, and holds a watch
            return response
        await response.write_eof()
        return response


async def _write(response: web.StreamResponse, batch: list[WatchEvent]) -> None:
    async with asyncio.timeout(STALL_SEC):
        await response.write(b"".join(_ENCODER.encode(event) + b"\n" for event in batch))
