"""The public types of the HTTP interface, both directions, and the table of its error codes.

What crosses to and from a pod is `executor.wire`'s; the requests here add what the manager needs, and the answers what
it knows. Requests refuse unknown fields. Durations are seconds, sizes bytes, times RFC 3339 in UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from executor import wire
from manager.model import Role

API_KEY_HEADER: Final = "X-Api-Key"
TENANT_HEADER: Final = "X-Sandbox-Tenant-Id"
PROJECT_HEADER: Final = "X-Sandbox-Project-Id"
MEMBER_HEADER: Final = "X-Sandbox-Member"
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
IF_POD_HEADER: Final = "If-Sandbox-Pod"

EXEC_BODY_BYTES: Final = 16 * wire.MiB
BODY_BYTES: Final = wire.MiB

Provisioned = Literal["bound", "warm", "cold"]
Workspace = Literal["kept", "restored", "fresh"]

# Every code of the interface with its status: the manager's own and those that an executor's answer is passed on with.
ERROR_CODES: Final[dict[str, int]] = {
    "invalid_request": 400,
    "invalid_task_id": 400,
    "invalid_path": 400,
    "invalid_cwd": 400,
    "not_utf8": 400,
    "unknown_profile": 400,
    "scope_required": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "scope_refused": 403,
    "user_not_allowed": 403,
    "permission_denied": 403,
    "not_found": 404,
    "file_not_found": 404,
    "conflict": 409,
    "wrong_pod": 409,
    "sandbox_replaced": 409,
    "profile_mismatch": 409,
    "no_target_in_region": 409,
    "task_bound_elsewhere": 409,
    "not_a_file": 409,
    "not_a_directory": 409,
    "sandbox_gone": 410,
    "precondition_failed": 412,
    "too_large": 413,
    "range_not_satisfiable": 416,
    "idempotency_mismatch": 422,
    "quota_exceeded": 429,
    "rate_limited": 429,
    "internal": 500,
    "not_supported": 501,
    "executor_unreachable": 502,
    "outcome_unknown": 504,
    "capacity_exhausted": 503,
    "provisioning": 503,
    "image_pull_failed": 503,
    "isolation_unavailable": 503,
    "store_unavailable": 503,
    "shutting_down": 503,
    "no_space": 507,
}


def rfc3339(seconds: float) -> str:
    """A time in seconds since the epoch, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────


class TaskCommand(wire.ExecRequest, frozen=True):
    """One command in a task's sandbox: the executor's exec body, and what may be said about the sandbox."""

    profile: str | None = None  # None: the project's own, or whatever the task is bound with
    region: str | None = None  # None: the default target, or wherever the task is bound


_EXEC_FIELDS: Final = wire.ExecRequest.__struct_fields__


def exec_request(command: TaskCommand) -> wire.ExecRequest:
    """What goes to the executor."""
    return wire.ExecRequest(**{name: getattr(command, name) for name in _EXEC_FIELDS})


class TaskTerminal(wire.TerminalRequest, frozen=True):
    """A new terminal in a task's sandbox: the executor's body, and what may be said about the sandbox."""

    profile: str | None = None
    region: str | None = None


_TERMINAL_FIELDS: Final = wire.TerminalRequest.__struct_fields__


def terminal_request(asked: TaskTerminal) -> wire.TerminalRequest:
    """What goes to the executor."""
    return wire.TerminalRequest(**{name: getattr(asked, name) for name in _TERMINAL_FIELDS})


class TaskSession(wire.SessionRequest, frozen=True):
    """A new session in a task's sandbox: the executor's body, and what may be said about the sandbox."""

    profile: str | None = None
    region: str | None = None


_SESSION_FIELDS: Final = wire.SessionRequest.__struct_fields__


def session_request(asked: TaskSession) -> wire.SessionRequest:
    """What goes to the executor."""
    return wire.SessionRequest(**{name: getattr(asked, name) for name in _SESSION_FIELDS})


class CreateKey(wire.Request, frozen=True):
    """A new API key of the caller's project (for a platform key: of the project that it names)."""

    name: str = ""
    role: Role = Role.MEMBER
    member: str | None = None  # the person whose key it is, an e-mail address
    expires_in_sec: float | None = None  # None: valid until revoked


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Previous(msgspec.Struct, frozen=True, kw_only=True):
    """How the task's last pod ended."""

    reason: str  # destroyed, expired, evicted, oom, node_lost or lost
    at: str


class CommandResult(wire.ExecResult, frozen=True, kw_only=True):
    """How a command ended, with its output, and where it ran."""

    sandbox_id: str
    pod_id: str
    provisioned: Provisioned
    workspace: Workspace
    previous: Previous | msgspec.UnsetType = msgspec.UNSET


class CommandStarted(wire.Started, frozen=True, tag="started", kw_only=True):
    """The first event of a streamed command, and where it runs."""

    sandbox_id: str
    pod_id: str
    provisioned: Provisioned
    workspace: Workspace
    previous: Previous | msgspec.UnsetType = msgspec.UNSET


StreamEvent = (
    CommandStarted | wire.StdoutEvent | wire.StderrEvent | wire.Gap | wire.Heartbeat | wire.Exit | wire.StreamError
)


class LeaseState(msgspec.Struct, frozen=True, kw_only=True):
    until: str  # the sandbox is reclaimed then, unless something renews the lease
    hard_end: str  # whatever renews it
    operations: int  # under way now
    left_sec: float


class SandboxState(msgspec.Struct, frozen=True, kw_only=True):
    """A task's sandbox. `stage`: `active` (operations run), `idle`, or `reclaimed` (its pod has ended)."""

    sandbox_id: str
    task_id: str
    stage: Literal["active", "idle", "reclaimed"]
    profile: str
    target: str
    region: str | None
    generation: int  # 1 for the task's first pod
    pod_id: str | None
    created_at: str  # when the pod became this task's
    lease: LeaseState | None
    ended: Previous | None  # how its pod ended, where it has


class SandboxList(msgspec.Struct, frozen=True):
    sandboxes: list[SandboxState]


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An API key, without its secret."""

    key_id: str
    name: str
    tenant: str
    project: str
    role: Role
    member: str | None
    created_at: str
    expires_at: str | None


class KeyCreated(KeyInfo, frozen=True, kw_only=True):
    """A new key. `key` is shown this once and kept nowhere."""

    key: str


class KeyList(msgspec.Struct, frozen=True):
    keys: list[KeyInfo]


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One profile's warm pods on its target: nobody's yet, ready to be claimed."""

    profile: str
    target: str
    ready: int
    starting: int
    wanted: int
    message: str | None  # why the pool is smaller than it should be


class PoolList(msgspec.Struct, frozen=True):
    pools: list[PoolState]


class TargetState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    provider: str
    region: str | None
    default: bool
    profiles: list[str]


class TargetList(msgspec.Struct, frozen=True):
    targets: list[TargetState]


class HealthState(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok", "degraded", "shutting_down"]
    message: str | None = None
