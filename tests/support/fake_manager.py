"""A server that speaks the manager's interface just far enough to break it off wherever a test wants.

What a real stack cannot be made to do on purpose: a stream without its end, an answer that never comes, a connection
that is cut in the middle of a frame.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

FRAMES_TYPE = "application/vnd.sojourn.frames"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STARTED, STDOUT, STDERR, HEARTBEAT, GAP, EXIT, ERROR = range(1, 8)


def frame(kind: int, payload: bytes | dict[str, Any]) -> bytes:
    raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return kind.to_bytes(1, "big") + len(raw).to_bytes(4, "big") + raw


def output(kind: int, offset: int, data: bytes) -> bytes:
    return frame(kind, offset.to_bytes(8, "big") + data)


def started(process_id: str, **more: Any) -> bytes:
    return frame(STARTED, {"type": "started", "id": process_id, "pid": 7, **more})


def outcome(process_id: str, exit_code: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "id": process_id,
        "pid": 7,
        "exit_code": exit_code,
        "signal": None,
        "reason": "exited",
        "timed_out": False,
        "stdout_bytes": 0,
        "stderr_bytes": 0,
        "truncated": False,
        "descendants_left": False,
        "started_at": "2026-01-01T00:00:00Z",
        "duration_ms": 1.0,
        "usage": {"user_ms": 0.0, "system_ms": 0.0, "max_rss_bytes": 0},
        **more,
    }


def exited(process_id: str, exit_code: int = 0, **more: Any) -> bytes:
    return frame(EXIT, {"type": "exit", **outcome(process_id, exit_code, **more)})


def error(code: str, status: int, *, retryable: bool = False, headers: dict[str, str] | None = None) -> web.Response:
    body = {"error": {"code": code, "message": f"about {code}", "retryable": retryable, "details": {"id": "x"}}}
    return web.json_response(body, status=status, headers=headers)


async def frames(request: web.Request, *parts: bytes, cut: bool = False) -> web.StreamResponse:
    """Sends `parts`; with `cut` the connection then breaks, without the end of the answer."""
    response = web.StreamResponse(headers={"Content-Type": FRAMES_TYPE})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    if cut:
        await drop(request)
    else:
        await response.write_eof()
    return response


async def drop(request: web.Request) -> None:
    """Breaks the connection once what was written has left."""
    assert request.transport is not None
    request.transport.close()


class FakeManager:
    """Handlers by "METHOD /path"; each call takes the next of its list, the last one stays."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.connections: Counter[Any] = Counter()
        self._handlers: dict[str, list[Handler]] = {}

    def on(self, call: str, *handlers: Handler) -> None:
        self._handlers[call] = list(handlers)

    def seen(self, call: str) -> list[web.Request]:
        method, path = call.split(" ")
        return [request for request in self.requests if request.method == method and request.path == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(request)
        self.bodies.append(body)
        self.connections[request.transport] += 1
        handlers = self._handlers.get(f"{request.method} {request.path}")
        if not handlers:
            return error("not_found", 404)
        handler = handlers.pop(0) if len(handlers) > 1 else handlers[0]
        return await handler(request)


@asynccontextmanager
async def fake_manager() -> AsyncIterator[FakeManager]:
    fake = FakeManager()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", fake.handle)
    async with TestServer(app) as server:
        fake.address = f"http://127.0.0.1:{server.port}"
        yield fake
