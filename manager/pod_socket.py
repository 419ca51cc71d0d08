"""A WebSocket to a pod's executor. The pod is a hostile server: every message is bounded, decoded strictly and due."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

from executor.wire import (
    CHUNK_BYTES,
    CLOSE_REFUSED,
    FRAME_ERROR,
    HEARTBEAT_SEC,
    FrameEvent,
    MalformedFrame,
    StreamError,
    decode_frame,
)
from manager.errors import ExecutorRefused, ExecutorUnreachable
from manager.executor_answers import (
    EXECUTOR_CODES,
    BadAnswer,
    ExecutorNotReached,
    WrongPodAnswer,
    check_event,
    clean,
    refused,
)

MESSAGE_BYTES: Final = 8 * CHUNK_BYTES  # an honest one has one chunk and an offset, or a small JSON text
SILENT_SEC: Final = 3 * HEARTBEAT_SEC
_CLOSE_SEC: Final = 2.0
_FLOOD: Final = 1000  # messages in a row that say nothing to us


class PodSocketClosed(Exception):
    """The executor closed the connection, with this code; None where it just broke."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"closed with {code}")
        self.code = code


class PodSocket:
    """`asked_id` is the id that everything in it must be about, where it is known."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, asked_id: str | None) -> None:
        self._ws = ws
        self._asked_id = asked_id

    async def send(self, kind: int, payload: bytes) -> None:
        """Waits while the pod does not read. Raises PodSocketClosed."""
        try:
            await self._ws.send_bytes(kind.to_bytes(1, "big") + payload)
        except (ConnectionError, aiohttp.ClientError) as why:
            raise PodSocketClosed(self._ws.close_code) from why

    async def receive(self) -> FrameEvent:
        """The next event; an error only with a code that an executor has.

        Raises PodSocketClosed at the end, ExecutorUnreachable for a pod that is silent or talks nonsense."""
        for _ in range(_FLOOD):
            try:
                message = await self._ws.receive(SILENT_SEC)
            except TimeoutError:
                raise ExecutorUnreachable("the pod was silent for three heartbeats") from None
            if message.type is aiohttp.WSMsgType.ERROR:
                raise ExecutorUnreachable(f"the pod broke off: {clean(str(message.data), 200)}")
            if message.type is not aiohttp.WSMsgType.BINARY:
                if message.type is aiohttp.WSMsgType.TEXT:
                    raise ExecutorUnreachable("the pod sent text where frames belong")
                raise PodSocketClosed(self._ws.close_code)
            try:
                event = self._event(message.data)
            except (BadAnswer, MalformedFrame) as why:
                raise ExecutorUnreachable(f"the pod sent a frame that is none: {clean(str(why), 200)}") from why
            if event is not None:
                return event
        raise ExecutorUnreachable("the pod sends nothing that means anything")

    def _event(self, data: bytes) -> FrameEvent | None:
        if not data:
            raise BadAnswer("an empty message")
        event = decode_frame(data[0], data[1:])
        if event is None:
            return None
        check_event(event, self._asked_id)
        if data[0] == FRAME_ERROR:
            assert isinstance(event, StreamError)
            if event.error.code not in EXECUTOR_CODES:
                raise BadAnswer(f"an error that no executor has: {clean(event.error.code, 64)}")
        return event

    async def close(self, code: int = aiohttp.WSCloseCode.GOING_AWAY) -> None:
        try:
            async with asyncio.timeout(_CLOSE_SEC):
                await self._ws.close(code=code)
        except TimeoutError:
            pass  # leaving the session's context cuts it


def refused_upgrade(why: aiohttp.WSServerHandshakeError) -> ExecutorRefused | ExecutorUnreachable:
    """The error for an upgrade that the executor answered with `why.status`; its words do not come with that."""
    known = {
        400: ("invalid_request", "the executor refuses the parameters: offset is a whole number, mode control or view"),
        404: ("not_found", "no such terminal in this sandbox: never opened, deleted, or ended too long ago"),
        429: ("rate_limited", "it has as many connections as it may"),
        503: ("shutting_down", "the pod is ending"),
    }  # fmt: skip
    if why.status == 409:
        return WrongPodAnswer("another pod answered at this pod's address")
    if why.status == 401:
        return ExecutorNotReached("the pod refuses this manager's token: was the manager's secret changed?")
    if why.status not in known:
        return ExecutorUnreachable(f"the pod refused the WebSocket with {why.status}")
    code, message = known[why.status]
    return ExecutorRefused(code, why.status, message, EXECUTOR_CODES[code][1], {})


def refused_port(status: int) -> ExecutorRefused | ExecutorUnreachable:
    """The error for a call to a port that the executor itself answered with `status`, where its words do not come."""
    known = {
        400: ("invalid_request", "the executor refuses the port or the path"),
        404: ("not_found", "nothing listens on that port of the sandbox; start the server, or wait until it is up"),
        429: ("rate_limited", "there are as many calls to the sandbox's ports as there may be"),
        503: ("shutting_down", "the pod is ending"),
        504: ("outcome_unknown", "the server took the request and gave no answer that can be read"),
    }  # fmt: skip
    if status == 409:
        return WrongPodAnswer("another pod answered at this pod's address")
    if status == 401:
        return ExecutorNotReached("the pod refuses this manager's token: was the manager's secret changed?")
    if status not in known:
        return ExecutorUnreachable(f"the pod failed with status {status}")
    code, message = known[status]
    return ExecutorRefused(code, status, message, EXECUTOR_CODES[code][1], {})


def told(event: StreamError) -> ExecutorRefused:
    """The error of a frame that `receive` let pass."""
    return refused(event.error)


def status_of(code: int | None) -> int:
    """The error status that a close code stands for; 0 where it stands for none."""
    return code - CLOSE_REFUSED if code is not None and CLOSE_REFUSED + 400 <= code < CLOSE_REFUSED + 600 else 0
