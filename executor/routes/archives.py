"""`/v1/archive`: a directory as tar, plain or packed by gzip or zstd, both ways."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, cast

from aiohttp import web

from executor.archives import ArchiveService, Format
from executor.errors import ExecutorError, InvalidRequest
from executor.files import STALL_SEC
from executor.routes.files import path_of
from executor.routes.reply import body_pieces, json_reply, read_query
from executor.tarpack import PackLimit

TYPES: Final[Mapping[Format, str]] = {
    "tar": "application/x-tar",
    "gzip": "application/gzip",
    "zstd": "application/zstd",
}
_BY_TYPE: Final[Mapping[str, Format]] = {
    **{kind: name for name, kind in TYPES.items()},
    "application/tar": "tar", "application/x-gzip": "gzip", "application/x-gtar-compressed": "gzip",
    "application/x-zstd": "zstd",
}  # fmt: skip


def archive_routes(archives: ArchiveService) -> list[web.RouteDef]:
    routes = _ArchiveRoutes(archives)
    return [
        web.get("/v1/archive", routes.get, allow_head=False),
        web.put("/v1/archive", routes.put),
    ]


class _ArchiveRoutes:
    def __init__(self, archives: ArchiveService) -> None:
        self._archives = archives

    async def put(self, request: web.Request) -> web.Response:
        query = read_query(request, "path", "format", "user")
        format = _format_of(query) or _BY_TYPE.get(request.content_type)  # else its first bytes tell
        answer, is_new = await self._archives.unpack(path_of(query), body_pieces(request), format, query.get("user"))
        return json_reply(answer, 201 if is_new else 200)

    async def get(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, "path", "format", "user")
        format = _format_of(query) or "tar"
        async with self._archives.pack(query.get("path", "."), format, query.get("user")) as chunks:
            response = web.StreamResponse(headers={"Content-Type": TYPES[format], "Cache-Control": "no-cache"})
            await response.prepare(request)
            try:
                async for chunk in chunks:
                    async with asyncio.timeout(STALL_SEC):
                        await response.write(chunk)
            except (TimeoutError, ExecutorError, PackLimit, OSError):
                if request.transport is not None:  # only a broken connection tells the caller that this is not all
                    request.transport.abort()
                return response
            await response.write_eof()
            return response


def _format_of(query: Mapping[str, str]) -> Format | None:
    name = query.get("format")
    if name is not None and name not in TYPES:
        raise InvalidRequest(f"query: format must be one of {', '.join(TYPES)}", field="format")
    return cast(Format | None, name)
