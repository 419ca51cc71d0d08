"""`POST /v1/exec`: run and wait, or the same as NDJSON events, server-sent events or binary frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web

from executor.follow import Follower
from executor.largeresult import send_large
from executor.pipes import READ_BYTES
from executor.process import Command
from executor.processes import Processes
from executor.routes.reply import read_json, read_query
from executor.wire import JSON_TYPE, ExecRequest, MiB, SessionExecRequest
from executor.writers import EventWriter, writer_for

EXEC_BODY_BYTES: Final = 96 * MiB  # stdin comes in it
_ENCODER: Final = msgspec.json.Encoder()
AnyExec = ExecRequest | SessionExecRequest


def command_routes(processes: Processes) -> list[web.RouteDef]:
    async def run(request: web.Request) -> web.StreamResponse:
        read_query(request)
        body = await read_json(request, ExecRequest, EXEC_BODY_BYTES)
        return await run_and_answer(request, body, lambda streamed: processes.start(body, streamed=streamed))

    return [web.post("/v1/exec", run)]


async def run_and_answer(
    request: web.Request, body: AnyExec, start: Callable[[bool], tuple[Command, bool]]
) -> web.StreamResponse:
    """What `start` (given whether the answer is a stream) makes, in the form that the caller accepts."""
    writer = writer_for(request.headers.get("Accept", ""), body.encoding)
    if writer is not None:
        return await _stream(request, body, start, writer)
    command, _joined = start(False)
    with _ending_on_abort(command, body):
        await _until_ended(command)
    if command.has_large_result:
        return await _from_disk(request, command)
    return web.Response(body=_ENCODER.encode(command.result()), content_type=JSON_TYPE)


async def _from_disk(request: web.Request, command: Command) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": JSON_TYPE})

    async def begin(size: int) -> None:
        response.content_length = size
        await response.prepare(request)

    await send_large(command, begin, response.write)
    await response.write_eof()
    return response


class _ending_on_abort:
    """A direct caller that hangs up ends its command where it asked for that; otherwise the command goes on."""

    __slots__ = ("_body", "_command")

    def __init__(self, command: Command, body: AnyExec) -> None:
        self._command, self._body = command, body

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        gone = kind is not None and issubclass(kind, (asyncio.CancelledError, ConnectionError))
        if gone and self._body.on_disconnect == "kill":
            self._command.end("cancelled")


async def _until_ended(command: Command) -> None:
    if not command.is_settled:
        await asyncio.shield(command.ended)  # the future is everybody's who waits, not only this caller's


async def _stream(
    request: web.Request,
    body: AnyExec,
    start: Callable[[bool], tuple[Command, bool]],
    writer: EventWriter,
) -> web.StreamResponse:
    command, joined = start(True)
    follower = Follower(command, caller=not joined, piece_bytes=READ_BYTES)
    try:
        with _ending_on_abort(command, body):
            if not command.is_launched:
                await asyncio.shield(command.launched)
            if command.error is not None:
                raise command.error
            response = web.StreamResponse(headers=writer.headers(command))
            await response.prepare(request)
            await response.write(writer.started(command, joined))
            await _send_all(response, follower, writer)
            if follower.missed and not writer.tells_gaps and request.transport is not None:
                request.transport.abort()
            else:
                await response.write_eof()
            return response
    finally:
        follower.close()


async def _send_all(response: web.StreamResponse, follower: Follower, writer: EventWriter) -> None:
    command = follower.command
    # Once the pipes are read as the output comes, not when a timer says so, the first byte is not late.
    for pump in command.pumps:
        pump.arm()
    while True:
        pieces = await follower.next()
        if pieces == "end":
            break
        if pieces == "quiet":
            await response.write(writer.heartbeat())
        else:
            if follower.missed and not writer.tells_gaps:
                return
            for data in writer.output(pieces):
                await response.write(data)
    await response.write(writer.end(command, follower.missed))
