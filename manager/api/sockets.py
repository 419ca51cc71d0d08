"""WebSockets into a task's sandbox: a command with its input and signals, and terminals. Frames pass both ways, each
checked; nothing is kept but the one that is just passing."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from executor.wire import (
    CLOSE_DONE,
    CLOSE_STALLED,
    CLOSE_TAKEN_OVER,
    FRAME_PONG,
    FRAME_RESIZE,
    FRAME_SIGNAL,
    FRAME_START,
    FRAME_STDIN,
    FRAME_STDIN_EOF,
    Exit,
    FrameEvent,
    Gap,
    OutputFrame,
    Started,
    StreamError,
)
from manager.api.client_socket import CallerLeft, ClientSocket, check_upgrade, first_of, is_upgrade
from manager.api.parsing import check_command, decode, idempotency_key, if_pod, process_id_of, raw_query, segment
from manager.api.server import KEY_LOOK_SEC, PRINCIPAL, SERVICES, authenticate, error_body
from manager.api.services import Services
from manager.api.streams import Messages
from manager.api.tasks import forward, name_in, place_in, started
from manager.api.wire import TaskCommand, exec_request
from manager.errors import (
    ExecutorUnreachable,
    InvalidRequest,
    OutcomeUnknown,
    ShuttingDown,
    StoreUnavailable,
)
from manager.pod_socket import PodSocketClosed, status_of, told
from manager.services.tasks import TaskSocket

_INPUT: Final = frozenset({FRAME_STDIN, FRAME_STDIN_EOF, FRAME_SIGNAL, FRAME_RESIZE})


async def run_socket(request: web.Request) -> web.StreamResponse:
    """A command whose exec body comes as the first frame."""
    services, task_id = request.app[SERVICES], name_in(request)
    query, key, pod = raw_query(request), idempotency_key(request), if_pod(request)
    caller = await ClientSocket.accept(request)
    reason = "disconnected"
    try:
        kind, payload = await caller.receive()
        if kind != FRAME_START:
            raise InvalidRequest(f"the first frame must be 0x10 with the exec body, not 0x{kind:02x}")
        command = decode(payload, TaskCommand)
        check_command(command)
        opening = services.tasks.exec_socket(
            request[PRINCIPAL], task_id, exec_request(command), query,
            profile=command.profile, region=command.region, idempotency_key=key, pod_expected=pod,
        )  # fmt: skip
        async with opening as socket:
            reason = await _Relay(request, services, caller, socket).run()
    except CallerLeft:
        pass
    except Exception as why:
        reason = "lost"
        await caller.refuse(_words(why))
    finally:
        services.metrics.command_ended(reason, "bound")
    return caller.response


async def terminal_call(request: web.Request) -> web.StreamResponse:
    """A terminal's state, or a connection to it where the call is upgraded."""
    if not is_upgrade(request):
        return await forward(request)
    services, task_id = request.app[SERVICES], name_in(request)
    terminal_id = process_id_of(segment(request, place_in(request) + 2))  # .../terminals/{terminal_id}
    query, pod = raw_query(request), if_pod(request)
    check_upgrade(request)
    opening = services.tasks.terminal_socket(request[PRINCIPAL], task_id, terminal_id, query, pod_expected=pod)
    async with opening as socket:  # what is refused here is an HTTP answer
        caller = await ClientSocket.accept(request)
        try:
            await _Relay(request, services, caller, socket, endless=True).run()
        except CallerLeft:
            pass
        except Exception as why:
            await caller.refuse(_words(why))
        return caller.response


class _Relay:
    """Passes frames between a caller and a pod until one of them ends it.

    `endless`: the connection may be taken up again, so that it need not outlive a manager that is ending."""

    def __init__(
        self,
        request: web.Request,
        services: Services,
        caller: ClientSocket,
        socket: TaskSocket,
        *,
        endless: bool = False,
    ) -> None:
        self._request = request
        self._services = services
        self._caller = caller
        self._socket = socket
        self._endless = endless
        self._started = False
        self._reason = ""

    async def run(self) -> str:
        """The reason that the process ended with, "" where the connection ended before it. Raises CallerLeft."""
        await first_of(ws_to_caller=self._to_caller(), ws_to_pod=self._to_pod(), ws_key=self._while_allowed())
        return self._reason

    async def _to_caller(self) -> None:
        pod, caller = self._socket.socket, self._caller
        while True:
            try:
                event = await pod.receive()
            except (PodSocketClosed, ExecutorUnreachable) as why:
                self._socket.check()
                if isinstance(why, ExecutorUnreachable):
                    raise await self._socket.truth(why) from why
                await self._pod_closed(why.code)
                return
            self._socket.check()
            await caller.send(self._message(event))
            if isinstance(event, Exit):
                self._reason = event.reason
                await caller.close(CLOSE_DONE, "exit")
                return

    def _message(self, event: FrameEvent) -> bytes:
        """Raises the pod's error where nothing was started."""
        if isinstance(event, OutputFrame):
            self._socket.traffic()
            return Messages.output(event)
        if isinstance(event, StreamError):
            error = told(event)
            if not self._started:
                raise error
            return Messages.plain(StreamError(error=error_body(error)))
        if isinstance(event, Started):
            self._started = True
            return Messages.plain(started(event, self._socket.facts))
        if isinstance(event, Exit | Gap):
            self._socket.traffic()
        return Messages.plain(event)

    async def _pod_closed(self, code: int | None) -> None:
        if code == CLOSE_TAKEN_OVER:
            await self._caller.close(CLOSE_TAKEN_OVER, "another connection took over; the process runs on")
        elif code == CLOSE_STALLED:
            await self._caller.close(CLOSE_STALLED, "silent for three heartbeats")
        elif self._started and not self._endless:
            unknown = OutcomeUnknown("the connection to the pod ended before the command did; ask for it by its id")
            raise await self._socket.truth(unknown)
        elif known := status_of(code):
            raise ExecutorUnreachable(f"the pod ended the connection with status {known}")
        else:
            raise await self._socket.truth(ExecutorUnreachable("the pod ended the connection"))

    async def _to_pod(self) -> None:
        pod, caller = self._socket.socket, self._caller
        while True:
            kind, payload = await caller.receive()
            if kind in _INPUT:
                self._socket.traffic()
            elif kind != FRAME_PONG:
                refused = InvalidRequest(f"a frame of type 0x{kind:02x} means nothing here")
                await caller.send(Messages.plain(StreamError(error=error_body(refused))))
                continue
            try:
                await pod.send(kind, payload)
            except PodSocketClosed:
                await asyncio.Event().wait()  # why it closed is for whoever reads from it to say

    async def _while_allowed(self) -> None:
        """Raises what the caller's key is refused with once it is."""
        while True:
            await asyncio.sleep(KEY_LOOK_SEC)
            if self._endless and self._services.in_flight.ending:
                raise ShuttingDown("this manager is shutting down; connect again in a moment")
            try:
                await authenticate(self._request)
            except StoreUnavailable:
                pass  # it was good a moment ago, and what it may do does not need the store


def _words(why: Exception) -> Exception:
    """A pod's connection that broke before anything was started is the pod's failure, not a defect of ours."""
    if isinstance(why, PodSocketClosed):
        return ExecutorUnreachable("the pod ended the connection before the command was started")
    return why
