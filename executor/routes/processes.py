"""`/v1/processes`: background commands, and every command by its id: state, output, input, signals, end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, Final, Literal

from aiohttp import web

from executor import kernel
from executor.errors import Conflict, InvalidRequest
from executor.follow import STREAMS, Follower
from executor.output import Piece
from executor.pipes import READ_BYTES, StdinWriter
from executor.process import Command
from executor.processes import Processes
from executor.routes.commands import EXEC_BODY_BYTES
from executor.routes.reply import body_pieces, flag_of, json_reply, read_json, read_query, whole_of
from executor.wire import OFFSET_HEADER, ExecRequest, ProcessList, SignalRequest

MAX_WAIT_SEC: Final = 3600
MAX_OFFSET: Final = 1 << 62
OUTPUT_BYTES: Final = 1 << 20  # the most that one answer without `follow` carries, unless `limit` says less


def process_routes(processes: Processes) -> list[web.RouteDef]:
    def of(request: web.Request) -> Command:
        return processes.get(request.match_info["id"])

    async def start(request: web.Request) -> web.Response:
        read_query(request)
        body = await read_json(request, ExecRequest, EXEC_BODY_BYTES)
        command, joined = processes.start(body, background=True)
        if not command.is_launched:
            await asyncio.shield(command.launched)
        if command.error is not None:
            raise command.error
        return json_reply(command.info(), status=200 if joined else 201)

    async def list_all(request: web.Request) -> web.Response:
        read_query(request)
        return json_reply(ProcessList([command.info() for command in processes.all()]))

    async def get(request: web.Request) -> web.Response:
        wait_sec = whole_of(read_query(request, "wait_sec"), "wait_sec", 0, 0, MAX_WAIT_SEC)
        command = of(request)
        if wait_sec and not command.is_settled:
            await asyncio.wait([command.ended], timeout=wait_sec)
        if command.error is not None:
            raise command.error
        return json_reply(command.info())

    async def output(request: web.Request) -> web.StreamResponse:
        query = read_query(request, "stream", "offset", "follow", "limit")
        name = query.get("stream", "stdout")
        if name not in STREAMS:
            raise InvalidRequest("query: stream must be stdout or stderr", field="stream")
        offset = whole_of(query, "offset", 0, 0, MAX_OFFSET)
        limit = whole_of(query, "limit", OUTPUT_BYTES, 1, OUTPUT_BYTES)
        stream = 0 if name == "stdout" else 1
        command = of(request)
        if flag_of(query, "follow"):
            return await _follow(request, command, stream, offset)
        # The bytes that are there now, up to the next gap; beyond the end: none, and the end's offset.
        pieces = await _read_now(command, stream, offset, limit)
        first = pieces[0].offset if pieces else min(offset, command.logs[stream].end)
        data = b"".join(piece.data for piece in pieces)
        return web.Response(body=data, content_type="application/octet-stream", headers={OFFSET_HEADER: str(first)})

    async def stdin(request: web.Request) -> web.Response:
        read_query(request)
        command = of(request)
        writer = command.stdin
        if writer is None or not writer.open or command.exited_already:
            raise Conflict(f"the standard input of process {command.id} is closed")
        feeding = asyncio.create_task(_feed(request, writer), name=f"stdin-{command.id}")
        try:
            either: list[asyncio.Future[Any]] = [feeding, command.ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not feeding.done() or not feeding.result():
                raise Conflict(
                    f"process {command.id} has ended or closed its standard input; what else was sent went nowhere"
                )
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])  # before anybody else reads what is left of the body
        return web.Response(status=204)

    async def close_stdin(request: web.Request) -> web.Response:
        read_query(request)
        command = of(request)
        if command.stdin is not None:
            command.stdin.end()
        return web.Response(status=204)

    async def signal(request: web.Request) -> web.Response:
        read_query(request)
        body = await read_json(request, SignalRequest)
        number = kernel.signal_number(body.signal)
        if number is None:
            raise InvalidRequest(f"there is no signal {str(body.signal)[:40]!r}; try INT, TERM or KILL", field="signal")
        command = of(request)
        await command.send_signal(number, body.to)
        return web.Response(status=204)

    async def delete(request: web.Request) -> web.Response:
        read_query(request)
        await processes.delete(request.match_info["id"])
        return web.Response(status=204)

    return [
        web.post("/v1/processes", start),
        web.get("/v1/processes", list_all),
        web.get("/v1/processes/{id}", get),
        web.delete("/v1/processes/{id}", delete),
        web.get("/v1/processes/{id}/output", output),
        web.post("/v1/processes/{id}/stdin", stdin),
        web.post("/v1/processes/{id}/stdin/close", close_stdin),
        web.post("/v1/processes/{id}/signal", signal),
    ]


async def _feed(request: web.Request, writer: StdinWriter) -> bool:
    """Whether all of the body was taken. It comes as it comes: no deadline."""
    async with aclosing(body_pieces(request, None)) as pieces:
        async for data in pieces:
            await writer.write(data)
            if not writer.open:
                return False
    return True


async def _read_now(command: Command, stream: int, offset: int, limit: int) -> list[Piece]:
    log = command.logs[stream]
    pieces: list[Piece] = []
    size = 0
    while size < limit:
        piece = log.read(offset, limit - size)
        if piece is not None and not piece.data and not piece.gap:
            piece = await log.read_spill(offset, limit - size)
        if piece is None or (pieces and piece.gap) or (not piece.data and not piece.gap):
            break
        offset = piece.offset + len(piece.data)
        size += len(piece.data)
        if piece.data:
            pieces.append(piece)
    return pieces


async def _follow(request: web.Request, command: Command, stream: int, offset: int) -> web.StreamResponse:
    """Raw bytes until the command ends, or up to a gap: nobody shall take what is behind it for what came next."""
    offset = min(offset, command.logs[stream].end)
    follower = Follower(command, offset, offset, only=stream, piece_bytes=READ_BYTES)
    there = await follower.now()
    first = there[0][1].offset if there else offset
    headers = {"Content-Type": "application/octet-stream", OFFSET_HEADER: str(first), "Cache-Control": "no-store"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    pieces: list[tuple[int, Piece]] | Literal["quiet", "end"] = there
    while pieces != "end":
        if isinstance(pieces, list):
            for _stream, piece in pieces:
                if piece.gap and piece.offset != first:
                    await response.write_eof()
                    return response
                if piece.data:
                    await response.write(piece.data)
        pieces = await follower.next()
    await response.write_eof()
    return response
