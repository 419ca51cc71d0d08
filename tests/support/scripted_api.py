"""NOT an API server: a double that answers as a test says, for what a real one does only when something is broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio.client import Configuration

from manager.providers.kubernetes.client import ClusterClient

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Call:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    at: float  # of the event loop's clock


@dataclass
class ScriptedApi:
    """Answers calls with `script`, in their order, and those after it with `otherwise`."""

    script: list[Answer] = field(default_factory=list)
    otherwise: Answer | None = None
    calls: list[Call] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        body = json.loads(data) if data else None
        at = asyncio.get_running_loop().time()
        self.calls.append(Call(request.method, request.path, dict(request.query), body, at))
        chosen = self.script.pop(0) if self.script else self.otherwise
        assert chosen is not None, f"nothing is scripted for {request.method} {request.path}"
        return await chosen(request)

    def count(self, *, watches: bool) -> int:
        return sum(("watch" in call.query) == watches for call in self.calls)


def says(body: Any = None, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(body if body is not None else {}, status=status, headers=headers)

    return answer


def refuses(status: int, reason: str = "", message: str = "", headers: Mapping[str, str] | None = None) -> Answer:
    return says({"kind": "Status", "code": status, "reason": reason, "message": message}, status, headers)


async def hangs_up(request: web.Request) -> web.StreamResponse:
    """Closes the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def lists(*pods: Mapping[str, Any], version: str = "100", more: str = "") -> Answer:
    return says({"kind": "PodList", "metadata": {"resourceVersion": version, "continue": more}, "items": list(pods)})


def tells(*events: Mapping[str, Any], then_sec: float = 0.0) -> Answer:
    """A watch with these events, open for `then_sec` after them; it ends cleanly."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.sleep(then_sec)
        return response

    return answer


def pod(name: str, version: int, **changes: Any) -> dict[str, Any]:
    """As an API server shows one that is ready; `changes` are of its metadata, or `status`."""
    status = changes.pop("status", None) or {
        "phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}],
    }  # fmt: skip
    metadata = {
        "name": name, "uid": f"uid-{name}", "resourceVersion": str(version),
        "labels": {"app.kubernetes.io/name": "sojourn-sandbox", "sojourn/target": "here", "sojourn/state": "idle"},
        "annotations": {}, "creationTimestamp": "2026-01-01T00:00:00Z", **changes,
    }  # fmt: skip
    return {"metadata": metadata, "spec": {}, "status": status}


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[ScriptedApi, ClusterClient]]:
    api = ScriptedApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    api.url = f"http://{host}:{port}"
    client = ClusterClient(Configuration(host=api.url))
    try:
        yield api, client
    finally:
        await client.close()
        await runner.cleanup()
