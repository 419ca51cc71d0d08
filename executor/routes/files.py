"""`/v1/files`: content in and out as streams of any size, and what is there."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from email.utils import formatdate
from typing import Final

from aiohttp import web

from executor.errors import ExecutorError, InvalidRequest, PreconditionFailed, RangeNotSatisfiable
from executor.files import STALL_SEC, FileService, OpenFile
from executor.filetree import MAX_DEPTH
from executor.routes.reply import body_pieces, flag_of, json_reply, read_json, read_query, whole_of
from executor.upload import WriteTerms, matches
from executor.wire import ChmodRequest, MkdirRequest, MoveRequest

MAX_PAGE: Final = 10_000
DEFAULT_PAGE: Final = 1_000
DIRECT_BYTES: Final = 262_144  # what is longer goes from the file to the socket inside the kernel
HEAD_TURNS: Final = 4  # of the loop, for the head to leave; longer only where the caller still has an earlier answer
_MODE: Final = re.compile(r"[0-7]{1,4}\Z")
_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})\Z", re.ASCII | re.IGNORECASE)  # RFC 9110, 14.1


def files_routes(files: FileService) -> list[web.RouteDef]:
    routes = _FileRoutes(files)
    return [
        web.get("/v1/files", routes.get, allow_head=False),
        web.head("/v1/files", routes.get),
        web.put("/v1/files", routes.put),
        web.delete("/v1/files", routes.delete),
        web.get("/v1/files/stat", routes.stat),
        web.get("/v1/files/list", routes.list),
        web.post("/v1/files/mkdir", routes.mkdir),
        web.post("/v1/files/move", routes.move),
        web.post("/v1/files/chmod", routes.chmod),
    ]


class _FileRoutes:
    def __init__(self, files: FileService) -> None:
        self._files = files

    async def get(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, "path", "text", "user")
        as_text = flag_of(query, "text")
        async with self._files.open(path_of(query), query.get("user")) as file:
            return await _send(request, file, as_text)

    async def put(self, request: web.Request) -> web.Response:
        query = read_query(request, "path", "mode", "user")
        terms = WriteTerms(
            mode=_mode_of(query), if_match=request.headers.get("If-Match"), create_only=_is_create_only(request)
        )
        size = request.content_length
        entry, is_new = await self._files.write(path_of(query), body_pieces(request), size, terms, query.get("user"))
        return json_reply(entry, 201 if is_new else 200, {"ETag": entry.etag or ""})

    async def delete(self, request: web.Request) -> web.Response:
        query = read_query(request, "path", "recursive", "user")
        recursive, if_match = flag_of(query, "recursive"), request.headers.get("If-Match")
        await self._files.delete(path_of(query), recursive, if_match, query.get("user"))
        return web.Response(status=204)

    async def stat(self, request: web.Request) -> web.Response:
        query = read_query(request, "path", "user")
        return json_reply(await self._files.stat(path_of(query), query.get("user")))

    async def list(self, request: web.Request) -> web.Response:
        query = read_query(request, "path", "depth", "limit", "after", "user")
        depth = whole_of(query, "depth", 1, 1, MAX_DEPTH)
        limit = whole_of(query, "limit", DEFAULT_PAGE, 1, MAX_PAGE)
        path = query.get("path", ".")
        return json_reply(await self._files.list(path, depth, limit, query.get("after"), query.get("user")))

    async def mkdir(self, request: web.Request) -> web.Response:
        query = read_query(request, "user")
        body = await read_json(request, MkdirRequest)
        entry, is_new = await self._files.mkdir(body, query.get("user"))
        return json_reply(entry, 201 if is_new else 200)

    async def move(self, request: web.Request) -> web.Response:
        query = read_query(request, "user")
        body = await read_json(request, MoveRequest)
        return json_reply(await self._files.move(body, query.get("user")))

    async def chmod(self, request: web.Request) -> web.Response:
        query = read_query(request, "user")
        body = await read_json(request, ChmodRequest)
        return json_reply(await self._files.chmod(body, query.get("user")))


async def _send(request: web.Request, file: OpenFile, as_text: bool) -> web.StreamResponse:
    facts, size = file.facts, file.facts.entry.size
    _check_if_match(request, facts.etag)
    headers = {"ETag": facts.etag, "Accept-Ranges": "bytes", "Cache-Control": "no-cache"}
    if matches(request.headers.get("If-None-Match", "").replace("W/", ""), facts.etag):
        return web.Response(status=304, headers=headers)
    part = _range_of(request, size, facts.etag)
    start, end = part or (0, size)
    if as_text:
        await file.check_utf8(start, end)
    headers["Content-Type"] = "text/plain; charset=utf-8" if as_text else "application/octet-stream"
    headers["Last-Modified"] = _http_date(facts.mtime)
    headers["Content-Length"] = str(end - start)
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    response = web.StreamResponse(status=200 if part is None else 206, headers=headers)
    await response.prepare(request)
    if request.method != "HEAD":
        try:
            if end - start > DIRECT_BYTES and (socket := await _socket_of(request)) is not None:
                start = await file.send(socket, start, end)
            async for piece in file.pieces(start, end):
                async with asyncio.timeout(STALL_SEC):
                    await response.write(piece)
                start += len(piece)
        except (TimeoutError, ExecutorError):
            pass  # a reader that takes nothing, or a disk that gives nothing
        if start < end:  # that, or the file was cut: only a broken connection tells the caller that this is not all
            if request.transport is not None:
                request.transport.abort()
            return response
    await response.write_eof()
    return response


async def _socket_of(request: web.Request) -> int | None:
    """A descriptor of our own for the connection's socket, once the answer's head is out; None where that cannot be."""
    transport = request.transport
    for _ in range(HEAD_TURNS):
        if transport is None or transport.is_closing():
            return None
        if not transport.get_write_buffer_size():
            try:
                return os.dup(transport.get_extra_info("socket").fileno())
            except OSError:  # no descriptor is left
                return None
        await asyncio.sleep(0)
    return None


def _http_date(seconds: float) -> str:
    return formatdate(min(max(seconds, 0.0), 253_402_300_799.0), usegmt=True)  # the year 9999 ends; touch(1) goes on


def _check_if_match(request: web.Request, etag: str) -> None:
    wanted = request.headers.get("If-Match")
    if wanted is not None and not matches(wanted, etag):
        raise PreconditionFailed(f"the file changed since it was read: its ETag is now {etag}")


def _range_of(request: web.Request, size: int, etag: str) -> tuple[int, int] | None:
    """First byte and the one after the last; None for the whole file, which RFC 9110 also gives to what is no GET, to
    what is no single range of bytes and to an If-Range that does not hold. Raises RangeNotSatisfiable."""
    if request.method != "GET":
        return None
    match = _RANGE.match(request.headers.get("Range", "").replace(" ", ""))
    if match is None or request.headers.get("If-Range", etag) != etag:
        return None
    first, last = match.groups()
    if first:
        start, end = int(first), min(int(last) + 1 if last else size, size)
        if last and int(last) < start:
            return None  # malformed, says the RFC
    elif last:
        start, end = max(size - int(last), 0), size
    else:
        return None
    if start >= end:
        raise RangeNotSatisfiable(f"the file has {size} bytes", size=size)
    return start, end


def path_of(query: Mapping[str, str]) -> str:
    if "path" not in query:
        raise InvalidRequest("query: path is missing", field="path")
    return query["path"]


def _mode_of(query: Mapping[str, str]) -> int | None:
    text = query.get("mode")
    if text is None:
        return None
    if not _MODE.match(text) or int(text, 8) > 0o777:
        raise InvalidRequest("query: mode must be octal permission bits, such as 644 or 0755", field="mode")
    return int(text, 8)


def _is_create_only(request: web.Request) -> bool:
    header = request.headers.get("If-None-Match")
    if header not in (None, "*"):
        raise InvalidRequest("If-None-Match: a write takes only *", field="If-None-Match")
    return header == "*"
