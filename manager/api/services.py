"""What the surfaces need of the services, as Protocols: `manager.app` hands in the real ones, tests others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from executor.wire import ExecRequest
from manager.config import ManagerConfig
from manager.metrics import Metrics
from manager.model import Binding, Owner, Principal, Role
from manager.services.pool import PoolView
from manager.services.tasks import (
    TaskExecAnswer,
    TaskForward,
    TaskPort,
    TaskPortSocket,
    TaskSocket,
    TaskStream,
    TaskView,
)
from manager.store.base import KeyRecord


class InFlight:
    """How many requests are under way, and whether this manager is ending."""

    def __init__(self) -> None:
        self.ending = False
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.count += 1
        self._idle.clear()

    def leave(self) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle.set()

    async def drained(self, most_sec: float) -> bool:
        """Waits until nothing is under way, at most so long; whether it is so."""
        try:
            async with asyncio.timeout(most_sec):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class TaskService(Protocol):
    """`manager.services.tasks.TaskSessions`, which says what each call does."""

    async def exec(
        self,
        principal: Principal,
        task_id: str,
        request: ExecRequest,
        *,
        profile: str | None = None,
        region: str | None = None,
        idempotency_key: str | None = None,
        pod_expected: str | None = None,
    ) -> TaskExecAnswer: ...

    def stream(
        self,
        principal: Principal,
        task_id: str,
        request: ExecRequest,
        *,
        profile: str | None = None,
        region: str | None = None,
        idempotency_key: str | None = None,
        pod_expected: str | None = None,
    ) -> AbstractAsyncContextManager[TaskStream]: ...

    def forward(
        self,
        principal: Principal,
        task_id: str,
        method: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        body: AsyncIterator[bytes] | bytes | None,
        *,
        profile: str | None = None,
        region: str | None = None,
        idempotency_key: str | None = None,
        pod_expected: str | None = None,
        wait_sec: float | None = 0.0,
        outcome_of: str | None = None,
    ) -> AbstractAsyncContextManager[TaskForward]: ...

    def exec_socket(
        self,
        principal: Principal,
        task_id: str,
        request: ExecRequest,
        query: str = "",
        *,
        profile: str | None = None,
        region: str | None = None,
        idempotency_key: str | None = None,
        pod_expected: str | None = None,
    ) -> AbstractAsyncContextManager[TaskSocket]: ...

    def terminal_socket(
        self, principal: Principal, task_id: str, terminal_id: str, query: str, *, pod_expected: str | None = None
    ) -> AbstractAsyncContextManager[TaskSocket]: ...

    def port(
        self,
        principal: Principal,
        task_id: str,
        method: str,
        port: int,
        target: str,
        headers: list[tuple[str, str]],
        body: AsyncIterator[bytes] | None,
        *,
        pod_expected: str | None = None,
    ) -> AbstractAsyncContextManager[TaskPort]: ...

    def port_socket(
        self,
        principal: Principal,
        task_id: str,
        port: int,
        target: str,
        headers: list[tuple[str, str]],
        protocols: list[str],
        *,
        pod_expected: str | None = None,
    ) -> AbstractAsyncContextManager[TaskPortSocket]: ...

    async def get(self, principal: Principal, task_id: str) -> TaskView: ...

    async def list(self, principal: Principal) -> list[TaskView]: ...

    async def retire(self, owner: Owner, task_id: str) -> None: ...


class TenantService(Protocol):
    """`manager.services.tenants.Tenants`."""

    async def authenticate(self, key_text: str | None, address: str = "") -> KeyRecord: ...

    def principal(
        self, record: KeyRecord, tenant_header: str | None, project_header: str | None, member_header: str | None
    ) -> Principal: ...

    async def issue_key(
        self, principal: Principal, role: Role, name: str, member: str | None = None, expires_at: float | None = None
    ) -> tuple[str, KeyRecord]: ...

    async def list_keys(self, principal: Principal) -> Sequence[KeyRecord]: ...

    async def revoke_key(self, principal: Principal, key_id: str) -> None: ...


class PoolService(Protocol):
    """`manager.services.pool.WarmPool`."""

    def views(self) -> list[PoolView]: ...


@dataclass(kw_only=True)
class Services:
    """Everything that a handler may use."""

    config: ManagerConfig
    tasks: TaskService
    tenants: TenantService
    pool: PoolService
    metrics: Metrics
    find_sandbox: Callable[[str], Awaitable[Binding | None]]
    only_project: Callable[[], Awaitable[Owner | None]]  # the one project that there is; None where there are more
    not_ready: Callable[[], Awaitable[str | None]]  # what this manager still lacks to serve, for people
    in_flight: InFlight = field(default_factory=InFlight)
