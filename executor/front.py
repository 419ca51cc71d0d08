"""Where every connection starts, and the short way for the calls that are made most: a plain `POST /v1/exec`, the
same in a session, both as streams too, `GET /healthz` and `/readyz`, and what makes a pod a sandbox's: `POST
/v1/bind` and `/v1/lease`.

A request that is exactly an ordinary small `exec` (the request line, known headers once each, a Content-Length, all of
it there at once) is answered from here, without a task and without a framework; so is a health check as probes send it,
and so are the calls around a claim, whose first would else wait until the application is loaded.
Whatever else comes, on the first or any later request, hands the connection over to the application with all bytes
unread once its head is there, and it stays there: so nothing is parsed by two parsers, and there is nothing here to
smuggle past. While the application is being loaded, the bytes wait here.

Worth its place by benchmarks/bench_exec.py: about a quarter of the executor's own work for a command."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from executor.binding import bind
from executor.connections import HEAD_SEC, IDLE_SEC, NEVER, Connections
from executor.errors import ExecutorError, LateRequest, LongHead, RateLimited
from executor.guard import Guard, error_reply
from executor.jsonbody import decode_json
from executor.lease import Lease
from executor.mount import Mount
from executor.process import Command
from executor.processes import Processes
from executor.wire import (
    FRAMES_TYPE,
    NDJSON_TYPE,
    RAW_TYPE,
    SSE_TYPE,
    BindRequest,
    ExecRequest,
    LeaseRequest,
    SessionExecRequest,
)

if TYPE_CHECKING:
    from executor.app import Application
    from executor.directstream import DirectStream

log = logging.getLogger("executor.front")

REQUEST_LINE: Final = b"POST /v1/exec HTTP/1.1\r\n"
SESSION_LINE: Final = re.compile(rb"POST /v1/sessions/([A-Za-z0-9][A-Za-z0-9._-]{0,127})/exec HTTP/1\.1\r\n")
HEALTH_LINES: Final[Mapping[bytes, bool]] = {  # whether the answer is 503 where the pod is ending
    b"GET /healthz HTTP/1.1\r\n": False, b"GET /readyz HTTP/1.1\r\n": True,
}  # fmt: skip
LEASE_LINES: Final[Mapping[bytes, type[BindRequest] | type[LeaseRequest]]] = {  # what their body is
    b"POST /v1/bind HTTP/1.1\r\n": BindRequest, b"POST /v1/lease HTTP/1.1\r\n": LeaseRequest,
}  # fmt: skip
HEAD_BYTES: Final = 4096
LONG_HEAD_BYTES: Final = 65_536  # of other requests: aiohttp's own limits are below it
BODY_BYTES: Final = 131_072
PIPELINED_BYTES: Final = 262_144  # beyond it nothing more is read until the command has ended

_HEAD: Final = re.compile(rb"(?:[A-Za-z-]+: ?[\x21-\x7e][\x20-\x7e]*\r\n)+")
_ANY_HEAD: Final = re.compile(rb"(?:[A-Za-z0-9_.-]+:[\t\x20-\x7e]*\r\n)+")
_KNOWN: Final = frozenset({
    b"host", b"authorization", b"sandbox-pod", b"sandbox-lease-sec", b"content-length", b"content-type", b"accept",
    b"accept-encoding", b"user-agent", b"connection",
})  # fmt: skip
_FRAMING: Final = re.compile(  # of what can follow the head, or change what the connection is
    rb"(?i)(?:^|\r\n)(?:content-length|transfer-encoding|expect|upgrade|te|trailer):|"
    rb"(?:^|\r\n)connection:(?! ?(?:close|keep-alive)\r\n)"
)
_HOST: Final = re.compile(rb"(?i)(?:^|\r\n)host:")
_CLOSE: Final = re.compile(rb"(?i)(?:^|\r\n)connection: ?close\r\n")
_STREAMED: Final = {kind.encode(): kind for kind in (FRAMES_TYPE, NDJSON_TYPE, SSE_TYPE, RAW_TYPE)}
_PLAIN_ACCEPT: Final = frozenset({None, b"*/*", b"application/json", *_STREAMED})
_ENCODER: Final = msgspec.json.Encoder()
_HEAD_OF_ANSWER: Final = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d%b\r\n\r\n%b"


class Front:
    """Makes the protocol of each connection, and closes those that are idle."""

    def __init__(
        self, processes: Processes, lease: Lease, guard: Guard, mount: Mount, connections: Connections
    ) -> None:
        self.processes = processes
        self.lease = lease
        self.guard = guard
        self.mount = mount
        self.connections = connections
        self.loop = asyncio.get_running_loop()

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    @cached_property
    def direct_stream(self) -> type[DirectStream]:
        from executor.directstream import DirectStream  # a pod may never need it

        return DirectStream

    def close(self) -> None:
        self.connections.close()
        for connection in self.connections.all():
            if isinstance(connection, _Connection):
                connection.transport.close()


class _Connection(asyncio.Protocol):
    __slots__ = (
        "_address", "_command", "_front", "_head", "_is_admitted", "_is_partial", "_kept", "_kill", "_paused", "_room",
        "_sending", "_since", "_stream", "_terms", "_unread", "_used", "_waiting", "transport",
    )  # fmt: skip

    def __init__(self, front: Front) -> None:
        self._front = front
        self._is_partial = False  # a head has begun and not ended
        self._kept = b""
        self._head = b""  # of the latest request, whole: the next one's is mostly the same, byte for byte
        self._terms: _Terms
        self._is_admitted = False  # with exactly this head
        self._command: Command | None = None
        self._stream: DirectStream | None = None  # of the command
        self._kill = False
        self._paused = False
        self._unread = False  # the caller does not take its answers as fast as they come
        self._used = False
        self._waiting = False  # for the application, which is being loaded, or for an answer that is being sent
        self._sending: asyncio.Task[None] | None = None  # an answer that is too large to be written at once
        self._room: asyncio.Future[None] | None = None  # what it waits for where the caller is slow
        self._since = front.loop.time()
        self._address: str | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio's
        connections = self._front.connections
        self._address = connections.enter(transport)
        if self._address is None:
            self._refuse(RateLimited("there are as many connections here, or from your address, as there may be"))
            self.transport.close()
        else:
            connections.watch(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._front.connections.forget(self)
        if self._address is not None:
            self._front.connections.leave(self._address)
        if self._sending is not None:
            self._sending.cancel()
        if self._stream is not None:
            self._stream.lost()
        elif self._command is not None and self._kill:
            self._command.end("cancelled")

    def data_received(self, data: bytes) -> None:
        self._kept = self._kept + data if self._kept else data
        if self._command is None and not self._unread and not self._waiting:
            self._next()
        if len(self._kept) > PIPELINED_BYTES and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self._unread = True
        self._since = self._front.loop.time()
        self._front.connections.look_at(self.deadline())
        if self._stream is not None:
            self._stream.pause()

    def resume_writing(self) -> None:
        self._unread = False
        self._since = self._front.loop.time()
        if self._stream is not None:
            self._stream.resume()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._after()

    def _next(self) -> None:
        data = self._kept
        head = self._head
        if not head or not data.startswith(head):
            end = data.find(b"\r\n\r\n", 0, HEAD_BYTES) + 4
            headers = session = None
            if end >= 4:
                if data.startswith(REQUEST_LINE):
                    headers = _plain_headers(data[len(REQUEST_LINE) : end - 2])
                elif (match := SESSION_LINE.match(data)) is not None and self._front.mount.application is not None:
                    session = match[1].decode()
                    headers = _plain_headers(data[match.end() : end - 2])
            if headers is None:
                self._next_other()
                return
            head = self._head = data[:end]
            self._terms = _terms_of(headers, session)
            self._is_admitted = False
        terms = self._terms
        body_at = len(head)
        body_end = body_at + terms.body_bytes
        if terms.body_bytes > BODY_BYTES or body_end > len(data):
            self._hand_over()
            return
        self._kept = data[body_end:]
        self._used = True
        self._is_partial = False
        self._run(terms, data[body_at:body_end])

    def _next_other(self) -> None:
        """What is no command, or not all of it there yet: the application would wait for the rest for ever."""
        data = self._kept
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            line_end = data.find(b"\r\n") + 2
            if data[:line_end] in HEALTH_LINES and _is_plain(data[line_end : end + 2]):
                self._kept = data[end + 4 :]
                self._used = True
                self._is_partial = False
                self._tell_health(HEALTH_LINES[data[:line_end]], _CLOSE.search(data[line_end : end + 2]) is not None)
            elif data[:line_end] not in LEASE_LINES or not self._tell_lease(data, line_end, end + 4):
                self._hand_over()
        elif not data[:1].isalpha():
            self._hand_over()
        elif len(data) > LONG_HEAD_BYTES:
            self._refuse(LongHead(f"the request's head is over the limit of {LONG_HEAD_BYTES} bytes"))
            self.transport.close()
        elif not self._is_partial:
            self._is_partial = True
            self._since = self._front.loop.time()
            self._front.connections.look_at(self.deadline())

    def _tell_health(self, is_ready: bool, closes: bool) -> None:
        health = self._front.processes.health()
        gone = is_ready and health.status == "shutting_down"
        status = b"503 Service Unavailable" if gone else b"200 OK"
        if closes:
            self._kept = b""
        self._send(status, _ENCODER.encode(health), b"\r\nConnection: close" if closes else b"")
        if closes:
            self.transport.close()

    def _tell_lease(self, data: bytes, line_end: int, body_at: int) -> bool:
        """False where the application has to: the call is out of the ordinary, or brings files."""
        kind, front, headers = LEASE_LINES[data[:line_end]], self._front, _plain_headers(data[line_end : body_at - 2])
        if headers is None or headers.get(b"content-type", b"").startswith(b"multipart/"):
            return False
        terms = _terms_of(headers, None)
        body_end = body_at + terms.body_bytes
        if terms.accept is not None or terms.body_bytes > BODY_BYTES or body_end > len(data):
            return False
        refused: ExecutorError | None = None
        answer = b""
        try:
            front.guard.admit(terms.authorization, terms.pod, terms.lease_sec)
            asked = decode_json(data[body_at:body_end], kind)
            if isinstance(asked, LeaseRequest):
                front.lease.push(asked)
            elif asked.files:
                return False
            else:
                bind(front.lease, front.processes, asked)
            answer = _ENCODER.encode(front.lease.info())
        except ExecutorError as error:
            refused = error
        except Exception:
            log.exception("request_failed", extra={"path": "lease"})
            refused = ExecutorError("the executor failed; its log has the details")
        self._kept = data[body_end:]
        self._used = True
        self._is_partial = False
        if refused is not None:
            self._refuse(refused)
        else:
            self._send(b"200 OK", answer)
        return True

    def _run(self, terms: _Terms, body: bytes) -> None:
        front, accept = self._front, terms.accept
        try:
            if not self._is_admitted:
                front.guard.admit(terms.authorization, terms.pod, terms.lease_sec)
                self._is_admitted = True
            elif terms.lease_sec is not None:
                front.guard.heard_lease(terms.lease_sec)
            request: ExecRequest | SessionExecRequest
            if terms.session is None:
                request = decode_json(body, ExecRequest)
                command, joined = front.processes.start(
                    request, streamed=accept is not None, tells_pid=accept != RAW_TYPE
                )
            else:
                assert front.mount.application is not None
                sessions = front.mount.application.sessions
                request = decode_json(body, SessionExecRequest)
                command, joined = sessions.run(terms.session, request, streamed=accept is not None)
        except ExecutorError as error:
            self._refuse(error)
            return
        except Exception:
            log.exception("request_failed", extra={"path": "exec"})
            self._refuse(ExecutorError("the executor failed; its log has the details"))
            return
        self._command = command
        self._kill = request.on_disconnect == "kill"
        if accept is not None:
            self._stream = front.direct_stream(
                self.transport, command, accept, self._streamed,
                encoding=request.encoding, joined=joined, kills_on_loss=self._kill,
            )  # fmt: skip
        elif command.is_settled:
            self._answer(command)
        elif command.answer is None:
            command.answer = self._answer
        else:  # another connection waits for the same command
            command.ended.add_done_callback(lambda _ended: self._answer(command))

    def _answer(self, command: Command) -> None:
        self._command = None
        if self.transport.is_closing():
            return
        if command.has_large_result:
            self._waiting = True
            self._sending = self._front.loop.create_task(self._send_large(command), name=f"answer-{command.id}")
            return
        try:
            body = _ENCODER.encode(command.result())
        except ExecutorError as error:
            self._refuse(error)
            return
        except Exception:
            log.exception("request_failed", extra={"path": "exec"})
            self._refuse(ExecutorError("the executor failed; its log has the details"))
            return
        self._send(b"200 OK", body)

    async def _send_large(self, command: Command) -> None:
        from executor.largeresult import send_large  # a pod may never need it

        begun = False

        async def begin(size: int) -> None:
            nonlocal begun
            begun = True
            self.transport.write(_HEAD_OF_ANSWER % (b"200 OK", size, b"", b""))

        async def write(part: bytes) -> None:
            while self._unread:
                self._room = self._front.loop.create_future()
                await self._room
            self.transport.write(part)

        try:
            await send_large(command, begin, write)
        except ExecutorError as error:
            self._waiting = False
            self.transport.abort() if begun else self._refuse(error)
        except Exception:
            log.exception("request_failed", extra={"path": "exec"})
            self.transport.abort()
        else:
            self._waiting = False
            self._answered()
        finally:
            self._sending = None

    def _streamed(self, command: Command) -> None:
        self._command = self._stream = None
        if command.error is not None:
            self._refuse(command.error)
        else:
            self._answered()

    def _refuse(self, error: ExecutorError) -> None:
        extra = b"\r\nRetry-After: 1" if error.retryable else b""
        self._send(b"%d Error" % error.status, _ENCODER.encode(error_reply(error)), extra)

    def _send(self, status: bytes, body: bytes, extra: bytes = b"") -> None:
        self.transport.write(_HEAD_OF_ANSWER % (status, len(body), extra, body))
        self._answered()

    def _answered(self) -> None:
        self._since = self._front.loop.time()
        if self._kept:
            self._front.loop.call_soon(self._after)
        elif self._paused:
            self._read_on()

    def _after(self) -> None:
        """The next of several requests that came at once."""
        is_ours = self._command is None and not self._unread and not self._waiting
        if is_ours and self._kept and not self.transport.is_closing():
            self._next()
            if self._paused and len(self._kept) <= PIPELINED_BYTES:
                self._read_on()

    def _read_on(self) -> None:
        self._paused = False
        self.transport.resume_reading()

    def _hand_over(self) -> None:
        application = self._front.mount.application
        if application is None:
            self._waiting = True
            self._front.mount.load().add_done_callback(self._loaded)
            return
        if self._paused:
            self._read_on()
        assert self._address is not None
        self._front.connections.forget(self)
        handler = application.handler(self._address)
        self.transport.set_protocol(handler)
        handler.connection_made(self.transport)
        if self._unread:
            handler.pause_writing()
        handler.data_received(self._kept)
        self._kept = b""

    def _loaded(self, done: asyncio.Task[Application]) -> None:
        self._waiting = False
        if self.transport.is_closing():
            return
        error = None if done.cancelled() else done.exception()
        if isinstance(error, ExecutorError):
            self._refuse(error)
        if done.cancelled() or error is not None:
            self.transport.close()
        else:
            self._hand_over()

    def deadline(self) -> float:
        if self._unread:
            return self._since + self._front.connections.reader_sec
        if self._command is not None or self._waiting:
            return NEVER
        return self._since + (IDLE_SEC if self._used and not self._is_partial else HEAD_SEC)

    def expire(self) -> None:
        if self._unread:
            self.transport.abort()
            return
        if self._is_partial:
            self._refuse(LateRequest(f"the request's head did not arrive within {HEAD_SEC:.0f} s"))
        self.transport.close()


def _is_plain(head: bytes) -> bool:
    """Whether these are the headers of a call without a body, whatever else they say."""
    return _ANY_HEAD.fullmatch(head) is not None and _FRAMING.search(head) is None and len(_HOST.findall(head)) == 1


class _Terms(NamedTuple):
    """What the headers of an ordinary call say."""

    body_bytes: int
    authorization: str | None
    pod: str | None
    lease_sec: str | None
    accept: str | None  # the kind of stream that the answer is to be; None: it comes whole
    session: str | None


def _plain_headers(head: bytes) -> dict[bytes, bytes] | None:
    """The headers of an ordinary call by their lower-case names; None for anything out of the ordinary."""
    if _HEAD.fullmatch(head) is None:
        return None
    headers: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name not in _KNOWN or name in headers:
            return None
        headers[name] = value.strip()
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or len(length) > 6 or b"host" not in headers:
        return None
    if (
        headers.get(b"accept") not in _PLAIN_ACCEPT
        or headers.get(b"connection", b"keep-alive").lower() != b"keep-alive"
    ):
        return None
    return headers


def _terms_of(headers: dict[bytes, bytes], session: str | None) -> _Terms:
    authorization, pod, lease_sec = (
        headers[name].decode() if name in headers else None
        for name in (b"authorization", b"sandbox-pod", b"sandbox-lease-sec")
    )
    accept = _STREAMED.get(headers.get(b"accept", b""))
    return _Terms(int(headers[b"content-length"]), authorization, pod, lease_sec, accept, session)
