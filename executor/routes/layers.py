"""`/v1/changes` and `/v1/layers`: the workspace's changes as a layer out, layers in."""

from __future__ import annotations

import asyncio

from aiohttp import web

from executor.errors import ExecutorError, InvalidRequest
from executor.files import STALL_SEC
from executor.layers import LayerService, Stopped
from executor.layerwire import (
    LAYER_BASE_HEADER,
    LAYER_STATE_HEADER,
    LAYER_TYPE,
    MAX_BYTES,
    MAX_ENTRIES,
    NO_BASE,
    is_sha256,
    is_state,
)
from executor.routes.reply import body_pieces, flag_of, json_reply, read_query, whole_of
from executor.writtenlayers import WrittenLayers


def layer_routes(layers: LayerService, written: WrittenLayers) -> list[web.RouteDef]:
    routes = _LayerRoutes(layers, written)
    return [
        web.get("/v1/changes", routes.get, allow_head=False),
        web.put("/v1/layers", routes.put),
    ]


class _LayerRoutes:
    def __init__(self, layers: LayerService, written: WrittenLayers) -> None:
        self._layers = layers
        self._written = written

    async def get(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, "since", "written")
        since, written = query.get("since"), query.get("written")
        for field, state in (("since", since), ("written", written)):
            if state is not None and not is_state(state):
                raise InvalidRequest(f"query: {field} must be the name of a state, 32 hex digits", field=field)
        if since is not None and written is not None:
            raise InvalidRequest("query: since and written ask for different layers", field="written")
        changes = self._layers.changes(since) if written is None else self._written.changes(written)
        async with changes as layer:
            response = web.StreamResponse(
                headers={
                    "Content-Type": LAYER_TYPE,
                    "Cache-Control": "no-cache",
                    LAYER_BASE_HEADER: layer.base or NO_BASE,
                    LAYER_STATE_HEADER: layer.state,
                }
            )
            await response.prepare(request)
            try:
                async for chunk in layer.chunks:
                    async with asyncio.timeout(STALL_SEC):
                        await response.write(chunk)
            except (TimeoutError, ExecutorError, OSError, Stopped):
                if (
                    request.transport is not None
                ):  # a broken connection and a missing end mark tell that this is not all
                    request.transport.abort()
                return response
            await response.write_eof()
            return response

    async def put(self, request: web.Request) -> web.Response:
        query = read_query(request, "sha256", "last", "max_bytes", "max_entries", "as_command_user")
        sha256 = query.get("sha256", "")
        if not is_sha256(sha256):
            raise InvalidRequest("query: sha256 must be the layer's SHA-256 as 64 hex digits", field="sha256")
        answer = await self._layers.apply(
            body_pieces(request), sha256, is_last=flag_of(query, "last"),
            max_bytes=whole_of(query, "max_bytes", MAX_BYTES, 0, MAX_BYTES),
            max_entries=whole_of(query, "max_entries", MAX_ENTRIES, 0, MAX_ENTRIES),
            as_command_user=flag_of(query, "as_command_user"),
        )  # fmt: skip
        headers = {LAYER_STATE_HEADER: answer.state} if answer.state is not None else None
        return json_reply(answer, headers=headers)
