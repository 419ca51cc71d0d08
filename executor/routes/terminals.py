"""`/v1/terminals`: open, list, look at and end terminals, and connect to one with a WebSocket."""

from __future__ import annotations

import asyncio

from aiohttp import web

from executor.errors import Conflict, ExecutorError, InvalidRequest
from executor.jsonbody import decode_json
from executor.routes.commands import EXEC_BODY_BYTES
from executor.routes.exec_socket import MAX_OFFSET, signal_of
from executor.routes.reply import json_reply, read_json, read_query, whole_of
from executor.routes.sockets import ClientLeft, FrameSocket, first_of, is_upgrade
from executor.terminals import Attachment, Terminal, Terminals
from executor.wire import (
    CLOSE_DONE,
    CLOSE_TAKEN_OVER,
    FRAME_PONG,
    FRAME_RESIZE,
    FRAME_SIGNAL,
    FRAME_STDIN,
    FRAME_STDIN_EOF,
    ResizeRequest,
    Started,
    TerminalList,
    TerminalRequest,
)


def terminal_routes(terminals: Terminals, heartbeat_sec: float) -> list[web.RouteDef]:
    def of(request: web.Request) -> Terminal:
        return terminals.get(request.match_info["id"])

    async def create(request: web.Request) -> web.Response:
        read_query(request)
        body = await read_json(request, TerminalRequest, EXEC_BODY_BYTES)
        terminal, joined = terminals.create(body)
        command = terminal.command
        if not command.is_launched:
            await asyncio.shield(command.launched)
        if command.error is not None:
            raise command.error
        return json_reply(terminal.info(), status=200 if joined else 201)

    async def list_all(request: web.Request) -> web.Response:
        read_query(request)
        return json_reply(TerminalList([terminal.info() for terminal in terminals.all()]))

    async def connect(request: web.Request) -> web.StreamResponse:
        if not is_upgrade(request):
            read_query(request)
            return json_reply(of(request).info())
        query = read_query(request, "offset", "mode")
        offset = whole_of(query, "offset", 0, 0, MAX_OFFSET) if "offset" in query else None
        mode = query.get("mode", "control")
        if mode not in ("control", "view"):
            raise InvalidRequest("query: mode must be control or view", field="mode")
        terminal = of(request)
        terminal.check_room()
        socket = await FrameSocket.accept(request, heartbeat_sec)
        attachment = terminal.attach(offset, control=mode == "control")
        try:
            await _serve(socket, attachment)
        except ClientLeft:
            pass
        finally:
            attachment.close()
        return socket.response

    async def delete(request: web.Request) -> web.Response:
        read_query(request)
        await terminals.delete(request.match_info["id"])
        return web.Response(status=204)

    return [
        web.post("/v1/terminals", create),
        web.get("/v1/terminals", list_all),
        web.get("/v1/terminals/{id}", connect, allow_head=False),
        web.delete("/v1/terminals/{id}", delete),
    ]


async def _serve(socket: FrameSocket, attachment: Attachment) -> None:
    """Raises ClientLeft."""
    command, id = attachment.terminal.command, attachment.terminal.id
    await socket.send(Started(id=id, pid=command.pid or None, joined=True))
    await first_of(**{
        f"terminal-taken-{id}": attachment.until_taken(),
        f"terminal-out-{id}": socket.follow(attachment.follower),
        f"terminal-in-{id}": _take_input(socket, attachment),
    })  # fmt: skip
    if attachment.taken.is_set() and command.outcome is None:
        await socket.close(CLOSE_TAKEN_OVER, "another connection took over; the process runs on")
        return
    if command.error is not None:
        await socket.refuse(command.error)
        return
    await socket.send(command.exit_event(truncated=attachment.follower.missed))
    await socket.close(CLOSE_DONE, "exit")


async def _take_input(socket: FrameSocket, attachment: Attachment) -> None:
    while True:
        kind, payload = await socket.receive()
        try:
            await _take(attachment, kind, payload)
        except ExecutorError as error:
            await socket.tell(error)


async def _take(attachment: Attachment, kind: int, payload: bytes) -> None:
    if kind == FRAME_PONG:
        return
    if kind not in (FRAME_STDIN, FRAME_STDIN_EOF, FRAME_SIGNAL, FRAME_RESIZE):
        raise InvalidRequest(f"a frame of type 0x{kind:02x} means nothing to a terminal")
    if not attachment.controls:
        raise Conflict("this connection only views the terminal; connect with mode=control to type")
    if attachment.taken.is_set():
        return
    terminal = attachment.terminal
    if kind == FRAME_STDIN:
        await terminal.command.type(payload)
    elif kind == FRAME_STDIN_EOF:
        await terminal.command.type_end()
    elif kind == FRAME_SIGNAL:
        await terminal.command.send_signal(*signal_of(payload))
    else:
        size = decode_json(payload, ResizeRequest)
        terminal.resize(size.cols, size.rows)
