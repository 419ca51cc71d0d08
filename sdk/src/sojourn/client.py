"""The way in: `AsyncClient`, from which everything else is reached."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from sojourn.config import Server, find_server
from sojourn.paths import piece
from sojourn.sandboxes import AsyncSandbox, AsyncSandboxes
from sojourn.tasks import AsyncTask
from sojourn.transport import RETRY_SEC, Transport, decode
from sojourn.types import AuditPage, Health, KeyCreated, KeyInfo, KeyList, Quota, QuotaList, SandboxList, SandboxState


class AsyncClient:
    """A client of one server, for one event loop.

    Address and key come from the arguments, else from SANDBOX_GATEWAY_URL and SANDBOX_API_KEY, else from the data
    directory of a local stack. `tenant` and `project` are for platform keys, which act for any project. `retry_sec` is
    how long a server may be away or say "later" before a call gives up. Raises ConfigurationError."""

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        tenant: str | None = None,
        project: str | None = None,
        member: str | None = None,
        max_connections: int = 100,
        retry_sec: float = RETRY_SEC,
    ) -> None:
        scope = {"X-Sandbox-Tenant-Id": tenant, "X-Sandbox-Project-Id": project, "X-Sandbox-Member": member}
        headers = {name: value for name, value in scope.items() if value is not None}
        self._transport = Transport(
            find_server(address, api_key), headers, max_connections=max_connections, retry_sec=retry_sec
        )
        self.keys = AsyncKeys(self._transport)
        self.long_lived = AsyncSandboxes(self._transport)

    @property
    def server(self) -> Server:
        return self._transport.server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all connections. Commands that run go on. Safe to repeat."""
        await self._transport.close()

    def task(self, task_id: str, *, profile: str | None = None, region: str | None = None) -> AsyncTask:
        """A handle on the task; calls nobody. Raises InvalidTaskId."""
        return AsyncTask(self._transport, task_id, profile=profile, region=region)

    def sandbox(self, sandbox_id: str) -> AsyncSandbox:
        """A handle on a long-lived sandbox; calls nobody. `long_lived.create` makes one."""
        return AsyncSandbox(self._transport, sandbox_id)

    async def quotas(self) -> list[Quota]:
        """What the project holds, and may hold."""
        answer = await self._transport.call("GET", "/api/v1/quotas", retry="safe")
        return decode(answer.body, QuotaList).quotas

    async def sandboxes(self) -> list[SandboxState]:
        """The project's sandboxes, tasks' and long-lived ones."""
        answer = await self._transport.call("GET", "/api/v1/sandboxes/", retry="safe")
        return decode(answer.body, SandboxList).sandboxes

    async def audit(self, *, since: str | None = None, after: str | None = None, limit: int = 100) -> AuditPage:
        """The project's audit log, oldest first; `since` is a time as in RFC 3339. Needs an admin's key."""
        wanted = {"since": since, "after": after, "limit": str(limit)}
        params = {name: value for name, value in wanted.items() if value is not None}
        answer = await self._transport.call("GET", "/api/v1/audit", retry="safe", params=params)
        return decode(answer.body, AuditPage)

    async def health(self) -> Health:
        """Whether the server is there and what it says of itself."""
        answer = await self._transport.call("GET", "/healthz", retry="safe")
        return decode(answer.body, Health)


class AsyncKeys:
    """The project's API keys. Needs an admin's key."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self,
        name: str = "",
        *,
        role: str = "member",
        member: str | None = None,
        expires_in_sec: float | None = None,
    ) -> KeyCreated:
        """A new key; its secret is shown this once. Raises Forbidden."""
        wanted = {"name": name, "role": role, "member": member, "expires_in_sec": expires_in_sec}
        body = {field: value for field, value in wanted.items() if value is not None}
        answer = await self._transport.call("POST", "/api/v1/keys", retry="unsent", json=body)
        return decode(answer.body, KeyCreated)

    async def list(self) -> list[KeyInfo]:
        """The keys that are valid, without their secrets."""
        answer = await self._transport.call("GET", "/api/v1/keys", retry="safe")
        return decode(answer.body, KeyList).keys

    async def revoke(self, key_id: str) -> None:
        """Makes the key invalid at once. Raises NotFound."""
        await self._transport.call("DELETE", f"/api/v1/keys/{piece(key_id)}", retry="unsent")
