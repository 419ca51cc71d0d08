"""`/v1/bind`, `/v1/lease` and the open `/healthz`, `/readyz`."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable

from aiohttp import web

from executor.binding import bind
from executor.errors import InvalidRequest
from executor.lease import Lease
from executor.processes import Processes
from executor.routes.reply import json_reply, read_json, read_query
from executor.wire import BindRequest, FileBody, LeaseRequest, MiB

WriteFile = Callable[[str, bytes, int | None], Awaitable[None]]
BIND_BODY_BYTES = 16 * MiB


def lease_routes(lease: Lease, processes: Processes, write_file: WriteFile) -> list[web.RouteDef]:
    async def take(request: web.Request) -> web.Response:
        read_query(request)
        body = await read_json(request, BindRequest, BIND_BODY_BYTES)
        files = [(file.path, _content(file), file.mode) for file in body.files]
        if bind(lease, processes, body):
            for path, content, mode in files:
                await write_file(path, content, mode)
        return json_reply(lease.info())

    async def get(request: web.Request) -> web.Response:
        read_query(request)
        return json_reply(lease.info())

    async def push(request: web.Request) -> web.Response:
        read_query(request)
        lease.push(await read_json(request, LeaseRequest))
        return json_reply(lease.info())

    return [web.post("/v1/bind", take), web.get("/v1/lease", get), web.post("/v1/lease", push)]


def _content(file: FileBody) -> bytes:
    if (file.content is None) == (file.content_base64 is None):
        raise InvalidRequest("a file needs content or content_base64", field="files")
    if file.content is not None:
        return file.content.encode()
    assert file.content_base64 is not None
    try:
        return base64.b64decode(file.content_base64, validate=True)
    except ValueError:
        raise InvalidRequest("content_base64 is not base64", field="files") from None


def health_routes(processes: Processes) -> list[web.RouteDef]:
    async def healthz(_request: web.Request) -> web.Response:
        return json_reply(processes.health())

    async def readyz(_request: web.Request) -> web.Response:
        now = processes.health()
        return json_reply(now, status=503 if now.status == "shutting_down" else 200)

    return [web.get("/healthz", healthz), web.get("/readyz", readyz)]
