"""What the surfaces need of the services, as Protocols: `manager.app` hands in the real ones, tests others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from executor.wire import ExecRequest
from manager.api.rates import Rates
from manager.api.turns import Turns
from manager.config import ManagerConfig
from manager.errors import RateLimited
from manager.metrics import Metrics
from manager.model import Binding, Owner, Principal, Role
from manager.services.audit_archive import AuditPage
from manager.services.longlived.service import LongLived
from manager.services.pool import PoolView
from manager.services.tasks import (
    TaskExecAnswer,
    TaskForward,
    TaskPort,
    TaskPortSocket,
    TaskSocket,
    TaskStream,
    TaskView,
    Written,
)
from manager.store.base import Held, KeyRecord


class InFlight:
    """How many requests are under way, of all and of each project, and whether this manager is ending.

    `leaving`: requests are still taken, and their connections closed. `ending`: new ones are refused."""

    def __init__(self) -> None:
        self.leaving = False
        self.ending = False
        self.count = 0
        self._of: dict[Owner, int] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.count += 1
        self._idle.clear()

    def leave(self) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle.set()

    def enter_of(self, owner: Owner, most: int) -> None:
        """One project's flood leaves room for all others. Raises RateLimited."""
        count = self._of.get(owner, 0)
        if count >= most:
            raise RateLimited(f"{count} requests of this project are under way here, as many as may be; try again soon")
        self._of[owner] = count + 1

    def leave_of(self, owner: Owner) -> None:
        if (count := self._of[owner]) > 1:
            self._of[owner] = count - 1
        else:
            del self._of[owner]

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

    async def writeback(self, principal: Principal, task_id: str, *, pod_expected: str | None = None) -> Written: ...

    async def view(self, binding: Binding, *, ask: bool = True) -> TaskView: ...

    async def usage(self, binding: Binding) -> bytes | None: ...

    async def retire(self, owner: Owner, task_id: str, *, by: Principal | str) -> None: ...


class TenantService(Protocol):
    """`manager.services.tenants.Tenants`."""

    async def authenticate(self, key_text: str | None, address: str = "") -> KeyRecord: ...

    def principal(
        self,
        record: KeyRecord,
        tenant_header: str | None,
        project_header: str | None,
        member_header: str | None,
        address: str = "",
    ) -> Principal: ...

    async def issue_key(
        self, principal: Principal, role: Role, name: str, member: str | None = None, expires_at: float | None = None
    ) -> tuple[str, KeyRecord]: ...

    async def list_keys(self, principal: Principal) -> Sequence[KeyRecord]: ...

    async def revoke_key(self, principal: Principal, key_id: str) -> None: ...


class AuditReader(Protocol):
    """`manager.services.audit_archive.AuditArchive`."""

    async def page(self, owner: Owner, *, since: float = 0.0, after: str = "", limit: int = 100) -> AuditPage: ...


class PoolService(Protocol):
    """`manager.services.pool.WarmPool`."""

    def views(self) -> list[PoolView]: ...


@dataclass(kw_only=True)
class Services:
    """Everything that a handler may use."""

    config: ManagerConfig
    tasks: TaskService
    longlived: LongLived
    tenants: TenantService
    audit: AuditReader
    pool: PoolService
    metrics: Metrics
    held: Callable[[Owner], Awaitable[Held]]
    find_sandbox: Callable[[str], Awaitable[Binding | None]]
    only_project: Callable[[], Awaitable[Owner | None]]  # the one project that there is; None where there are more
    not_ready: Callable[[], Awaitable[str | None]]  # what this manager still lacks to serve, for people
    in_flight: InFlight = field(default_factory=InFlight)
    rates: Rates = field(default_factory=Rates)
    turns: Turns = field(default_factory=Turns)

    def region_of(self, target: str) -> str | None:
        return next((known.region for known in self.config.targets if known.name == target), None)
