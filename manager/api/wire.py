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
from manager.model import SandboxState as SandboxStateName
from manager.services.sources import Source

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
    "sandbox_stopped": 409,
    "sandbox_starting": 409,
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
    "workspace_attaching": 503,
    "image_pull_failed": 503,
    "isolation_unavailable": 503,
    "store_unavailable": 503,
    "target_unavailable": 503,
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


class CreateSandbox(wire.Request, frozen=True):
    """A new long-lived sandbox."""

    profile: str | None = None  # None: the project's own
    autostop_sec: int = 1800  # stopped when it was quiet for so long
    ttl_sec: int = 14_400  # ended for good so long after its creation, also while it is stopped
    autostart: bool = False  # a call to it while it is stopped starts it
    name: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)  # of every command
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    source: Source | None = None  # of its first content; None: empty
    wait_sec: float = 60.0  # for it to run; then the answer is 202 and it is still being made


class NoFields(wire.Request, frozen=True):
    """The body of a call that takes none."""


class ForkSandbox(wire.Request, frozen=True):
    """A new sandbox with what is in another's workspace now; of the same profile."""

    autostop_sec: int = 1800
    ttl_sec: int = 14_400
    autostart: bool = False
    name: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    wait_sec: float = 60.0


class TakeSnapshot(wire.Request, frozen=True):
    name: str = ""


class PatchSandbox(wire.Request, frozen=True):
    """What is to be different; a field that is left out stays as it is."""

    name: str | None = None
    metadata: dict[str, str] | None = None  # all of it
    autostop_sec: int | None = None
    ttl_sec: int | None = None  # from its creation
    autostart: bool | None = None


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


class KeptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the keeping or restoring of a workspace is."""

    bytes: int
    total_bytes: int | None


class LongLivedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A long-lived sandbox. It outlives its pods."""

    sandbox_id: str
    state: SandboxStateName
    reason: str  # why it is in this state: created, asked, idle, expired, oom, lost, an error's code, ...
    since: str
    name: str
    profile: str
    target: str
    region: str | None
    autostop_sec: int
    ttl_sec: int
    autostart: bool
    created_at: str
    expires_at: str
    metadata: dict[str, str]
    env_names: list[str]  # the values are not shown again
    pod_id: str | None
    lease: LeaseState | None
    progress: KeptProgress | None  # while its workspace is kept or restored


class LongLivedSandboxList(msgspec.Struct, frozen=True, kw_only=True):
    sandboxes: list[LongLivedSandbox]
    next: str | None  # `after` for the next page; None: this was the last


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was in a sandbox's workspace at a moment; nobody changes it."""

    snapshot_id: str
    name: str
    created_at: str
    sandbox_id: str  # whose workspace it was
    stored_bytes: int  # in object storage, shared with other snapshots and forks
    keep_until: str | None  # None: until it is deleted


class SnapshotList(msgspec.Struct, frozen=True, kw_only=True):
    snapshots: list[SnapshotInfo]
    next: str | None  # `after` for the next page; None: this was the last


class SandboxState(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as it is now. `stage`: `active` (operations run), `idle`, or `reclaimed` (it has no pod)."""

    sandbox_id: str
    task_id: str | None  # None: a long-lived sandbox
    state: SandboxStateName | None = None  # of a long-lived one
    name: str | None = None
    image: str = ""  # what its profile runs on
    image_digest: str = ""  # `sha256:...` of what its pod runs on; "" for this machine's own system, or without a pod
    stage: Literal["active", "idle", "reclaimed"]
    profile: str
    target: str
    region: str | None
    generation: int  # 1 for the task's first pod
    pod_id: str | None
    created_at: str  # when the pod became this task's
    lease: LeaseState | None
    ended: Previous | None  # how its pod ended, where it has
    usage: wire.UsageReport | None = None  # what it uses now, of one that was asked for by its id


class WorkspaceWritten(msgspec.Struct, frozen=True, kw_only=True):
    """What of a task's workspace is durable now."""

    sandbox_id: str
    pod_id: str
    checkpoint: int  # its number
    saved_at: str
    stored_bytes: int  # in object storage


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


class AuditEventInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One change: who made it, what it was, when and from where. `by`: a key's id, or a part of the manager."""

    event_id: str
    at: str
    action: str
    subject: str
    by: str
    role: str | None
    member: str | None
    address: str
    details: dict[str, str | int | float | bool | None]


class AuditEventList(msgspec.Struct, frozen=True):
    events: list[AuditEventInfo]
    next: str | None  # `after` for the next page; None: these were the last so far


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One profile's warm pods on its target: nobody's yet, ready to be claimed."""

    profile: str
    target: str
    ready: int
    pending: int  # asked for and not ready
    wanted: int  # ready and pending that there should be, now
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


class QuotaState(msgspec.Struct, frozen=True, kw_only=True):
    """A project's concurrency: a slot for every sandbox with a pod, task sessions and sandboxes being made included."""

    tenant: str
    project: str
    slots_held: int
    slots_limit: int | None  # None: no bound but the data plane's
    cpu_held: float  # cores, by the limits of the sandboxes' profiles
    cpu_limit: float | None
    memory_held_bytes: int
    memory_limit_bytes: int | None


class QuotaList(msgspec.Struct, frozen=True):
    quotas: list[QuotaState]


class HealthState(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok", "degraded", "shutting_down"]
    message: str | None = None
