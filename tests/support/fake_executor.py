"""An executor without processes, for tests of what calls one: tokens, identity, ids that join, streams, a lease."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from executor.config import ExecutorConfig
from executor.errors import ExecutorError
from executor.lease import Lease
from executor.ports import PortService
from executor.routes.ports import port_routes
from executor.wire import (
    CHUNK_BYTES,
    FRAME_STDIN,
    FRAME_STDIN_EOF,
    FRAMES_TYPE,
    LEASE_HEADER,
    POD_HEADER,
    PROTOCOL,
    BindRequest,
    ErrorBody,
    ErrorReply,
    ExecRequest,
    ExecResult,
    Exit,
    Health,
    LeaseInfo,
    LeaseRequest,
    ProcessInfo,
    ResourceUse,
    Started,
    TerminalInfo,
    TerminalRequest,
    event_frame,
    event_message,
    frame,
    output_frame_header,
    output_message,
)

_USE = ResourceUse(user_ms=0.1, system_ms=0.1, max_rss_bytes=1 << 20)
AT = "2025-01-01T00:00:00.000Z"


def result_of(request: ExecRequest, stdout: str = "", exit_code: int = 0) -> ExecResult:
    return ExecResult(
        id=request.id or "made-up",
        pid=42,
        exit_code=exit_code,
        signal=None,
        reason="exited",
        timed_out=False,
        stdout=stdout,
        stderr="",
        stdout_bytes=len(stdout),
        stderr_bytes=0,
        truncated=False,
        descendants_left=False,
        started_at=AT,
        duration_ms=1.0,
        usage=_USE,
    )


def exit_of(result: ExecResult) -> Exit:
    fields = {name: getattr(result, name) for name in Exit.__struct_fields__}
    return Exit(**fields)


class FakeExecutor:
    """Commands: ["echo", word...] answers, ["wait"] blocks until `release()`, anything else exits with 0."""

    def __init__(self, pod: str, token: str, socket: Path) -> None:
        self.pod = pod
        self._token = token
        self._socket = socket
        self.address = f"unix:{socket}"
        self.bound: BindRequest | None = None
        self.runs: list[ExecRequest] = []  # commands that really ran, not joins
        self.lease_headers: list[str | None] = []
        self.pushed: list[LeaseRequest] = []
        self.is_claimed = False  # and refuses to be pushed on like a pool pod
        self.running = 0  # background work that the lease tells of
        self.operations = 0
        self.quiet_for_sec = 86_400.0  # since the last work, while none is under way
        self.before_exec: Callable[[], Awaitable[None]] | None = None
        self.before_bind: Callable[[], Awaitable[None]] | None = None
        self._outcomes: dict[str, tuple[bytes, asyncio.Future[ExecResult]]] = {}
        self._released = asyncio.Event()
        self.waiting = asyncio.Event()  # a ["wait"] has begun
        self._runner: web.AppRunner | None = None
        self.files: dict[str, bytes] = {}
        self.terminals: dict[str, TerminalRequest] = {}
        self.messages: list[bytes] = []  # what came over WebSockets
        self.closed_with: list[int | None] = []  # how the manager ended them
        self.says: list[bytes] = []  # sent to every terminal's connection at its start, whatever it is
        self.sockets: list[web.WebSocketResponse] = []
        self.port_says: Callable[[], web.StreamResponse] | None = None  # instead of what a server behind a port says
        self._ports: PortService | None = None

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_post("/v1/bind", self._bind)
        app.router.add_post("/v1/exec", self._exec)
        app.router.add_get("/v1/exec", self._exec_socket)
        app.router.add_post("/v1/terminals", self._open_terminal)
        app.router.add_get("/v1/terminals/{id}", self._terminal)
        app.router.add_get("/v1/lease", self._lease)
        app.router.add_post("/v1/lease", self._push)
        app.router.add_get("/healthz", self._health)
        app.router.add_post("/v1/processes", self._start_process)
        app.router.add_get("/v1/processes/{id}", self._process)
        app.router.add_put("/v1/files", self._put_file)
        app.router.add_get("/v1/files", self._get_file)
        app.router.add_get("/v1/usage", self._health)
        app.router.add_route("*", "/v1/ports/{port:[^/]*}/{path:.*}", self._port)
        self._ports = PortService(Lease(ExecutorConfig(token_sha256="0" * 64), lambda: 0, lambda _why: None))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._socket)).start()

    async def stop(self) -> None:
        """As when the pod ends: connections break, nothing listens any more."""
        runner, self._runner = self._runner, None
        if runner is not None:
            if self._ports is not None:
                await self._ports.close()
            for connection in runner.server.connections if runner.server is not None else ():
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()
            self._socket.unlink(missing_ok=True)
            for _ in range(5):
                await asyncio.sleep(0)  # both ends of a connection are on this loop: the other sees its end now

    def release(self) -> None:
        self._released.set()

    @property
    def commands(self) -> list[str | list[str]]:
        return [request.command for request in self.runs]

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path != "/healthz":
            if not hmac.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self._token}"):
                return refuse(401, "unauthenticated", "no pod token")
            if request.headers.get(POD_HEADER) != self.pod:
                return refuse(409, "wrong_pod", "another pod")
        self.lease_headers.append(request.headers.get(LEASE_HEADER))
        return await handler(request)

    async def _bind(self, request: web.Request) -> web.StreamResponse:
        if self.before_bind is not None:
            await self.before_bind()
        body = msgspec.json.decode(await request.read(), type=BindRequest)
        if self.bound is not None and self.bound.sandbox_id != body.sandbox_id:
            return refuse(409, "conflict", "bound to another sandbox")
        self.bound = body
        return web.json_response({})

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        if self.before_exec is not None:
            await self.before_exec()
        raw = await request.read()
        body = msgspec.json.decode(raw, type=ExecRequest)
        outcome = self._outcome(body)
        if outcome is None:
            return refuse(422, "idempotency_mismatch", "the id is taken")
        if request.headers.get("Accept") != FRAMES_TYPE:
            return _json(await asyncio.shield(outcome))
        response = web.StreamResponse(headers={"Content-Type": FRAMES_TYPE})
        await response.prepare(request)
        await response.write(event_frame(Started(id=body.id or "", pid=42)))
        result = await asyncio.shield(outcome)
        text = result.stdout.encode() if isinstance(result.stdout, str) else b""
        if text:
            await response.write(output_frame_header("stdout", 0, len(text)) + text)
        await response.write(frame(0x7F, b"of a later version"))
        await response.write(event_frame(exit_of(result)))
        return response

    def _outcome(self, body: ExecRequest) -> asyncio.Future[ExecResult] | None:
        asked = msgspec.json.encode(body)
        if body.id is not None and body.id in self._outcomes:
            known, outcome = self._outcomes[body.id]
            return outcome if known == asked else None
        self.runs.append(body)
        task = asyncio.ensure_future(self._run(body))
        if body.id is not None:
            self._outcomes[body.id] = (asked, task)
        return task

    async def _run(self, body: ExecRequest) -> ExecResult:
        if body.command == ["wait"]:
            self.waiting.set()
            await self._released.wait()
        text = " ".join(body.command[1:]) if body.command[0] == "echo" else ""
        return result_of(body, text)

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        return _json(
            LeaseInfo(
                bound=self.bound is not None,
                sandbox_id=self.bound.sandbox_id if self.bound is not None else None,
                boot_id="boot",
                operations=self.operations,
                running=self.running,
                terminals=len(self.terminals),
                quiet_for_sec=0.0 if self.running or self.operations else self.quiet_for_sec,
                quiet_left_sec=None,
                hard_left_sec=None,
                unclaimed_left_sec=None,
            )
        )

    async def _push(self, request: web.Request) -> web.StreamResponse:
        self.pushed.append(msgspec.json.decode(await request.read(), type=LeaseRequest))
        if self.is_claimed:
            return refuse(409, "conflict", "this pod belongs to a sandbox")
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return _json(Health(status="ok"))

    async def _start_process(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read(), type=ExecRequest)
        if self._outcome(body) is None:
            return refuse(422, "idempotency_mismatch", "the id is taken")
        info = ProcessInfo(id=body.id or "", pid=42, state="running", command=body.command, started_at=AT)
        return web.Response(status=201, body=msgspec.json.encode(info), content_type="application/json")

    async def _exec_socket(self, request: web.Request) -> web.StreamResponse:
        """["cat"] echoes its input until the end of it; anything else ends at once."""
        ws = await self._upgraded(request)
        body = msgspec.json.decode((await ws.receive()).data[1:], type=ExecRequest)
        self.runs.append(body)
        await ws.send_bytes(event_message(Started(id=body.id or "", pid=42)))
        if body.command == ["cat"]:
            await self._echo(ws)
        if not ws.closed:
            await ws.send_bytes(event_message(exit_of(result_of(body))))
        await ws.close(code=1000)
        self.closed_with.append(ws.close_code)
        return ws

    async def _open_terminal(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read(), type=TerminalRequest)
        self.terminals[body.id or ""] = body
        info = TerminalInfo(
            id=body.id or "", pid=42, state="running", command=["sh"], cols=body.cols, rows=body.rows, started_at=AT,
        )  # fmt: skip
        return web.Response(status=201, body=msgspec.json.encode(info), content_type="application/json")

    async def _terminal(self, request: web.Request) -> web.StreamResponse:
        """Echoes what is typed until the end of input."""
        if request.match_info["id"] not in self.terminals:
            return refuse(404, "not_found", "no such terminal")
        ws = await self._upgraded(request)
        await ws.send_bytes(event_message(Started(id=request.match_info["id"], pid=42, joined=True)))
        for message in self.says:
            await ws.send_bytes(message)
        await self._echo(ws)
        if not ws.closed:
            await ws.send_bytes(event_message(exit_of(result_of(ExecRequest(command=["sh"])))))
        await ws.close(code=1000)
        self.closed_with.append(ws.close_code)
        return ws

    async def _upgraded(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=32 << 20)
        await ws.prepare(request)
        self.sockets.append(ws)
        return ws

    async def _echo(self, ws: web.WebSocketResponse) -> None:
        offset = 0
        async for message in ws:
            self.messages.append(message.data)
            if message.data[0] == FRAME_STDIN_EOF:
                return
            if message.data[0] == FRAME_STDIN:
                await ws.send_bytes(output_message("stdout", offset, message.data[1 : 1 + CHUNK_BYTES]))
                offset += len(message.data[1 : 1 + CHUNK_BYTES])

    async def _process(self, request: web.Request) -> web.StreamResponse:
        return refuse(404, "not_found", "no such process")

    async def _port(self, request: web.Request) -> web.StreamResponse:
        """What a real executor does: the server is on the loopback that we all share here."""
        if self.port_says is not None:
            return self.port_says()
        assert self._ports is not None
        try:
            reply: web.StreamResponse = await port_routes(self._ports)[1].handler(request)
            return reply
        except ExecutorError as error:
            return refuse(error.status, error.code, error.message)

    async def _put_file(self, request: web.Request) -> web.StreamResponse:
        self.files[request.query["path"]] = await request.read()
        return web.json_response({}, status=201)

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        content = self.files.get(request.query["path"])
        if content is None:
            return refuse(404, "file_not_found", "no such file")
        return web.Response(body=content, headers={"ETag": '"x"', "Set-Cookie": "a=b", "X-Else": "1"})


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def refuse(status: int, code: str, message: str) -> web.Response:
    reply = ErrorReply(ErrorBody(code=code, message=message, retryable=False))
    return web.Response(status=status, body=msgspec.json.encode(reply), content_type="application/json")
