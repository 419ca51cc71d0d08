"""`GET /v1/exec` as a WebSocket: a command whose input, signals and output share one connection."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from aiohttp import web

from executor import kernel
from executor.errors import Conflict, ExecutorError, InvalidRequest
from executor.follow import Follower
from executor.jsonbody import decode_json
from executor.process import Command
from executor.processes import Processes
from executor.routes.reply import read_query, whole_of
from executor.routes.sockets import ClientLeft, FrameSocket, first_of, is_upgrade
from executor.wire import (
    CLOSE_DONE,
    FRAME_PONG,
    FRAME_SIGNAL,
    FRAME_START,
    FRAME_STDIN,
    FRAME_STDIN_EOF,
    ExecRequest,
    SignalRequest,
    Started,
)

MAX_OFFSET: Final = 1 << 62


def exec_socket_routes(processes: Processes, heartbeat_sec: float) -> list[web.RouteDef]:
    async def run(request: web.Request) -> web.StreamResponse:
        query = read_query(request, "stdout_offset", "stderr_offset")
        offsets = [whole_of(query, f"{name}_offset", 0, 0, MAX_OFFSET) for name in ("stdout", "stderr")]
        if not is_upgrade(request):
            raise InvalidRequest("run a command with POST, or upgrade this call to a WebSocket", field="Upgrade")
        socket = await FrameSocket.accept(request, heartbeat_sec)
        try:
            await _serve(socket, processes, offsets)
        except ClientLeft:
            pass
        except ExecutorError as error:
            await socket.refuse(error)
        return socket.response

    return [web.get("/v1/exec", run, allow_head=False)]


async def _serve(socket: FrameSocket, processes: Processes, offsets: list[int]) -> None:
    """Raises ClientLeft, and ExecutorError for what cannot be started."""
    kind, payload = await socket.receive()
    if kind != FRAME_START:
        raise InvalidRequest(f"the first frame must be 0x10 with the exec body, not 0x{kind:02x}")
    body = decode_json(payload, ExecRequest)
    command, joined = processes.start(body, streamed=True, interactive=True)
    # Beyond the end there is nothing to wait for that was not seen: what a log no longer has is told as a gap.
    ends = [min(offset, log.end) for offset, log in zip(offsets, command.logs, strict=True)]
    follower = Follower(command, *ends, caller=not joined)
    try:
        if not command.is_launched:
            await asyncio.shield(command.launched)
        if command.error is not None:
            raise command.error
        await socket.send(Started(id=command.id, pid=command.pid or None, joined=joined))
        for pump in command.pumps:
            pump.arm()
        await first_of(**{
            f"ws-out-{command.id}": socket.follow(follower),
            f"ws-in-{command.id}": _take_input(socket, command),
        })  # fmt: skip
    except (ClientLeft, asyncio.CancelledError, ConnectionError):
        if body.on_disconnect == "kill":
            command.end("cancelled")
        raise
    finally:
        follower.close()
    if command.error is not None:
        raise command.error
    await socket.send(command.exit_event(truncated=follower.missed))
    await socket.close(CLOSE_DONE, "exit")


async def _take_input(socket: FrameSocket, command: Command) -> None:
    """Passes on what the client sends until it leaves. A frame that makes no sense is answered, and nothing ends."""
    while True:
        kind, payload = await socket.receive()
        try:
            await _take(command, kind, payload)
        except ExecutorError as error:
            await socket.tell(error)


async def _take(command: Command, kind: int, payload: bytes) -> None:
    if kind == FRAME_STDIN:
        await _write(command, payload)
    elif kind == FRAME_STDIN_EOF:
        if command.stdin is not None:
            command.stdin.end()
    elif kind == FRAME_SIGNAL:
        await command.send_signal(*signal_of(payload))
    elif kind != FRAME_PONG:
        raise InvalidRequest(f"a frame of type 0x{kind:02x} means nothing to a running command")


async def _write(command: Command, data: bytes) -> None:
    """A command that has ended, or does not want more, is no error, as with a pipe's reader that has left."""
    if command.stdin is None and not command.exited_already:
        raise Conflict(f"process {command.id} was started with its whole input; it takes no more")
    if command.stdin is not None:
        await command.stdin.write(data)


def signal_of(payload: bytes) -> tuple[int, Literal["leader", "tree"]]:
    """(number, "leader" or "tree"). Raises InvalidRequest."""
    body = decode_json(payload, SignalRequest)
    number = kernel.signal_number(body.signal)
    if number is None:
        raise InvalidRequest(f"there is no signal {str(body.signal)[:40]!r}; try INT, TERM or KILL", field="signal")
    return number, body.to
