"""The manager's HTTP interface on loopback, over services in memory and executors without processes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from manager.api.listener import Listener
from manager.api.routes import create_app
from manager.api.server import Route
from manager.api.services import Services
from manager.api.wire import API_KEY_HEADER, PROJECT_HEADER, TENANT_HEADER
from manager.app import surface
from manager.config import ManagerConfig, ProjectPolicy, TargetConfig
from manager.model import Owner, Role
from manager.services.tenants import Tenants
from tests.support.memory_objects import memory_objects
from tests.support.streams import connection
from tests.support.world import ACME, LARGE, SHOP, SMALL, TERMS, World, world

PEPPER = b"a pepper of the tests alone"
CLEANUP = "cleanup-secret-of-the-tests"
PLACES = {
    "task_id": "a-task", "process_id": "a-process", "session_id": "a-session", "terminal_id": "a-terminal",
    "sandbox_id": "a-sandbox", "snapshot_id": "a-snapshot", "key_id": "a" * 26, "port": "3000", "path": "x",
}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """The error's code; None for what is no error of the one shape."""
        try:
            error = self.json["error"]
            assert set(error) == {"code", "message", "retryable", "details"}
            return str(error["code"])
        except (ValueError, KeyError, TypeError):
            return None


@dataclass
class Api:
    """`keys`: "member", "admin" and "platform" of ACME, "foreign" an admin of another tenant."""

    world: World
    services: Services
    port: int
    session: aiohttp.ClientSession
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def as_role(self, role: str) -> dict[str, str]:
        """Headers of a caller: a platform one names ACME."""
        headers = {API_KEY_HEADER: self.keys[role]}
        if role == "platform":
            headers |= {TENANT_HEADER: ACME.tenant, PROJECT_HEADER: ACME.project}
        return headers

    async def call(
        self,
        method: str,
        path: str,
        *,
        role: str | None = "member",
        headers: Mapping[str, str] | list[tuple[str, str]] | None = None,
        body: object = None,
    ) -> Reply:
        """`path` goes out as it is written. `body`: bytes, a file or an async iterator of them, or a value for JSON."""
        sent = list((self.as_role(role) if role is not None else {}).items())
        sent += list(headers.items()) if isinstance(headers, Mapping) else headers or []
        data: Any = body
        if body is not None and not isinstance(body, bytes | io.BytesIO) and not hasattr(body, "__aiter__"):
            data = json.dumps(body).encode()
        url = URL(self.address + path, encoded=True)
        async with self.session.request(method, url, headers=sent, data=data) as response:
            return Reply(response.status, response.headers, await response.read())

    async def call_route(self, route: Route, *, role: str | None, headers: Mapping[str, str] | None = None) -> Reply:
        """The route with made-up ids and, where it takes one, a body."""
        body: object = None
        if route.request is bytes:
            body = b"content"
        elif route.request is not None:
            body = {"command": "true"} if "exec" in route.path or route.path.endswith("processes") else {}
        return await self.call(route.method, route.template.format(**PLACES), role=role, headers=headers, body=body)

    async def exec(self, task: str, *command: str, role: str = "member", **fields: Any) -> Reply:
        body = {"command": list(command) or ["true"], **fields}
        return await self.call("POST", f"/sandbox/task/{task}/exec", role=role, body=body)

    async def raw(self, data: bytes) -> bytes:
        """What comes back, up to the end of the connection, for exactly these bytes."""
        opening = asyncio.open_connection("127.0.0.1", self.port)
        async with connection(opening) as (reader, writer), asyncio.timeout(60):
            writer.write(data)
            await writer.drain()
            return await reader.read()


@asynccontextmanager
async def api(
    *,
    cleanup_secret: str | None = CLEANUP,
    max_connections: int = 1000,
    project_requests: int = 1000,
    key_requests_per_sec: int = 1_000_000,
    projects: Mapping[Owner, ProjectPolicy] | None = None,
) -> AsyncIterator[Api]:
    policy = ProjectPolicy(profiles=(SMALL.name, LARGE.name), concurrency=None)
    config = ManagerConfig(
        cleanup_secret=cleanup_secret,
        profiles=(SMALL, LARGE),
        projects={ACME: policy} if projects is None else projects,
        targets=(TargetConfig(name="here", provider="local", region="north"),),
        body_timeout_sec=2,
        max_connections=max_connections,
        project_requests=project_requests,
        key_requests_per_sec=key_requests_per_sec,
    )
    async with world(terms=TERMS, policies=projects) as made:
        tenants = Tenants(made.store, memory_objects(), PEPPER)
        services = surface(config, made.services, tenants, made.store)
        keys = {
            role.value: (await tenants.create_key(ACME, role, role.value))[0]
            for role in (Role.MEMBER, Role.ADMIN, Role.PLATFORM)
        }
        keys["foreign"] = (await tenants.create_key(Owner("other", "web"), Role.ADMIN, "foreign"))[0]
        keys["sibling"] = (await tenants.create_key(SHOP, Role.ADMIN, "another project of the tenant"))[0]
        listener = Listener(
            create_app(services), host="127.0.0.1", port=0, keepalive_sec=5.0, max_connections=max_connections
        )
        async with listener, aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            yield Api(made, services, listener.port, session, keys)
