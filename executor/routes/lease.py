"""`/v1/bind`, `/v1/lease` and the open `/healthz`, `/readyz`."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable

from aiohttp import web

from executor.errors import InvalidRequest
from executor.lease import Lease
from executor.processes import Processes
from executor.routes.reply import json_reply, read_json
from executor.wire import BindRequest, FileBody, Health, LeaseRequest, MiB, bad_env

WriteFile = Callable[[str, bytes, int | None], Awaitable[None]]
BIND_BODY_BYTES = 16 * MiB


def lease_routes(lease: Lease, processes: Processes, write_file: WriteFile) -> list[web.RouteDef]:
    async def bind(request: web.Request) -> web.Response:
        body = await read_json(request, BindRequest, BIND_BODY_BYTES)
        if not body.sandbox_id:
            raise InvalidRequest("sandbox_id is empty", field="sandbox_id")
        for name in ("env", "secrets"):
            what = bad_env(getattr(body, name))
            if what is not None:
                raise InvalidRequest(f"{name} {what}", field=name)
        files = [(file.path, _content(file), file.mode) for file in body.files]
        if lease.bind(body):
            processes.bind_env(body.env | body.secrets)
            for path, content, mode in files:
                await write_file(path, content, mode)
        return json_reply(lease.info())

    async def get(_request: web.Request) -> web.Response:
        return json_reply(lease.info())

    async def push(request: web.Request) -> web.Response:
        lease.push(await read_json(request, LeaseRequest))
        return json_reply(lease.info())

    return [web.post("/v1/bind", bind), web.get("/v1/lease", get), web.post("/v1/lease", push)]


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
    def health() -> Health:
        if processes.closing:
            return Health(status="shutting_down")
        if processes.broken is not None:
            return Health(status="degraded", message=processes.broken)
        return Health(status="ok")

    async def healthz(_request: web.Request) -> web.Response:
        return json_reply(health())

    async def readyz(_request: web.Request) -> web.Response:
        now = health()
        return json_reply(now, status=503 if now.status == "shutting_down" else 200)

    return [web.get("/healthz", healthz), web.get("/readyz", readyz)]
