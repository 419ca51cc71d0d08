"""The nouns and what may be done with them. No HTTP, Redis or Kubernetes here."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal

import msgspec

from manager.errors import (
    CapacityExhausted,
    IllegalMove,
    ImagePullFailed,
    InvalidTaskId,
    ManagerError,
    Provisioning,
    WorkspaceAttaching,
)

TASK_ID_MAX_BYTES: Final = 512

# Labels that a pod carries wherever it runs; see docs/architecture.md.
LABEL_STATE: Final = "sojourn/state"
LABEL_PROFILE: Final = "sojourn/profile"
LABEL_REVISION: Final = "sojourn/revision"
LABEL_TASK: Final = "sojourn/task"
LABEL_TASK_ID: Final = "sojourn/task-id"  # for people and selectors, never for lookup
LABEL_SANDBOX: Final = "sojourn/sandbox"
NOTE_TENANT: Final = "sojourn/tenant"
NOTE_PROJECT: Final = "sojourn/project"
NOTE_TASK_ID: Final = "sojourn/task-id-raw"
NOTE_TOKEN: Final = "sojourn/claim-token"
NOTE_BOUND_AT: Final = "sojourn/bound-at"
NOTE_GENERATION: Final = "sojourn/generation"

_ID_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"


def new_id(prefix: str = "") -> str:
    """`prefix` and 26 lower-case letters and digits with 130 random bits: fits labels, host names and paths."""
    return prefix + "".join(_ID_ALPHABET[byte & 31] for byte in secrets.token_bytes(26))


class Owner(msgspec.Struct, frozen=True, order=True):
    """Who a thing belongs to. Comes from the authenticated key, never from what a caller claims."""

    tenant: str
    project: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.project}"


class Role(StrEnum):
    MEMBER = "member"  # uses its project
    ADMIN = "admin"  # and manages its keys
    PLATFORM = "platform"  # acts for any project, named on every request


class Principal(msgspec.Struct, frozen=True):
    """Who is calling, as the key says. For a platform key `owner` is the project it acts for in this request."""

    owner: Owner
    role: Role
    key_id: str
    member: str | None = None
    address: str = ""  # the network address that the request came from, for the audit log


class LeaseTerms(msgspec.Struct, frozen=True):
    """How long a sandbox keeps its pod; seconds."""

    active_sec: float  # one heartbeat of running work keeps the pod this long
    idle_sec: float  # and this long after the last operation has ended
    max_sec: float  # no heartbeat carries a pod past this age


class ClusterPod(msgspec.Struct, frozen=True, kw_only=True):
    """What only the pods of a cluster have: the target's word, or the profile's own instead of it."""

    tier: Literal["split", "single"] = "split"
    user_namespace: bool = False  # the pod's root is nobody on its node
    runtime_class: str | None = None
    executor_image: str | None = None  # by digest; the executor is copied in from it. None: the image has its own
    workspace: Literal["scratch", "volume"] = "scratch"  # on the node's disk, or on a volume that lives as the pod does
    storage_class: str | None = None  # of a volume; None: the cluster's default
    pull_secrets: tuple[str, ...] = ()
    priority_class: str | None = None
    node_selector: tuple[tuple[str, str], ...] = ()
    resolvers: tuple[str, ...] = ()  # name servers of pods with a network


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    """How many warm pods an operator wants, and what they are to be sized by."""

    min: int
    max: int
    utilisation: float = 0.7  # what is claimed within the length of a start, by the size of the pool
    shrink_sec: float = 600.0  # after which nothing is left of a peak; held for a half of it


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's named recipe for a pod. No request can change a field of it."""

    name: str
    image: str = "host"  # local target: this machine's own system, read-only, or an image on its disk (docs/local.md)
    isolation: str = "namespaces"  # or `gvisor`; `none`, only with --insecure-no-isolation
    cpu: float | None = 1.0  # cores
    memory_bytes: int | None = 1 << 30
    pids: int | None = 512
    disk_bytes: int | None = None  # of /workspace and /tmp; None: unbounded. A target that cannot bound it refuses
    network: str = "none"  # or `outbound`: public addresses only; in a cluster also a class of its network policies
    bandwidth_bytes_sec: int = 16 << 20  # each way, of a pod with a network
    connections: int = 256  # at once, of a pod with a network
    users: tuple[str, ...] = ("sandbox",)
    keep_workspace: bool = True  # a task's workspace is kept when its pod is reclaimed, and is in its next one
    write_through: bool = True  # what a file call changes is durable before it answers, where workspaces are kept
    pool_min: int = 2
    pool_max: int | None = None  # None: `pool_min`, a pool of a fixed size
    pool_utilisation: float = 0.7
    pool_shrink_sec: float = 600.0
    target: str = "here"
    active_sec: float | None = None  # None: the configuration's
    idle_sec: float | None = None
    max_sec: float | None = None
    cluster: ClusterPod | None = None  # of a profile whose target is a cluster

    @property
    def pool(self) -> PoolSize:
        return PoolSize(
            min=self.pool_min,
            max=self.pool_min if self.pool_max is None else self.pool_max,
            utilisation=self.pool_utilisation,
            shrink_sec=self.pool_shrink_sec,
        )

    @property
    def revision(self) -> str:
        """Changes when anything about the pod changes: pool pods of another revision are replaced, never claimed."""
        pod_fields: tuple[object, ...] = (
            self.image, self.isolation, self.cpu, self.memory_bytes, self.pids, self.disk_bytes, self.network,
            self.users, self.bandwidth_bytes_sec, self.connections,
        )  # fmt: skip
        if self.cluster is not None:
            pod_fields += (self.cluster,)
        return hashlib.sha256(msgspec.json.encode(pod_fields)).hexdigest()[:16]


class PodState(StrEnum):
    IDLE = "idle"  # of the warm pool, nobody's
    CLAIMED = "claimed"  # ran, or may run, a tenant's code: destroyed afterwards, never idle again


class PodWaits(msgspec.Struct, frozen=True):
    """What a pod that is not ready waits for: an error's code, and the data plane's own words."""

    code: Literal["provisioning", "capacity_exhausted", "image_pull_failed", "workspace_attaching"]
    words: str

    def error(self) -> ManagerError:
        """To whoever asked for the pod."""
        if self.code == "capacity_exhausted":
            return CapacityExhausted(f"the cluster has no room for the sandbox's pod: {self.words}")
        if self.code == "image_pull_failed":
            return ImagePullFailed(f"the profile's image cannot be pulled: {self.words}")
        if self.code == "workspace_attaching":
            return WorkspaceAttaching(f"the sandbox waits for its workspace's volume: {self.words}")
        return Provisioning(f"the sandbox's pod waits for {self.words}")


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One running instance, as its provider's labels tell it."""

    name: str
    version: str  # changes with every change of labels or annotations
    target: str
    labels: dict[str, str]
    annotations: dict[str, str]
    address: str  # "unix:/path" or "http://host:port"
    ready: bool  # its executor has answered
    deleting: bool = False
    created_at: float  # seconds since the epoch
    serial: int = 0  # of two pictures of one pod the higher is the later; 0: cannot be told
    waits: PodWaits | None = None  # where it is not ready
    image_digest: str = ""  # `sha256:...` of what it really runs on; "" where that has none, or is not known yet
    ending: str = ""  # of one that is being deleted: why, as PodEnded's reason, where that is known

    @property
    def state(self) -> PodState:
        return PodState(self.labels.get(LABEL_STATE, PodState.CLAIMED))


class PodEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Why and when a pod ended: `destroyed`, `expired`, `evicted`, `oom`, `node_lost` or `lost`."""

    reason: str
    at: float  # seconds since the epoch


class SandboxState(StrEnum):
    """Of a long-lived sandbox. It outlives its pods, so that it can be without one."""

    CREATING = "creating"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    STARTING = "starting"
    FAILED = "failed"  # its pod was lost, or none could be made; its last checkpoint can be started
    DESTROYED = "destroyed"


_S: Final = SandboxState
MOVES: Final[Mapping[SandboxState, frozenset[SandboxState]]] = {
    _S.CREATING: frozenset({_S.RUNNING, _S.FAILED, _S.DESTROYED}),
    _S.RUNNING: frozenset({_S.STOPPING, _S.FAILED, _S.DESTROYED}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.RUNNING, _S.FAILED, _S.DESTROYED}),  # running again: it could not be kept
    _S.STOPPED: frozenset({_S.STARTING, _S.DESTROYED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.STOPPED, _S.FAILED, _S.DESTROYED}),
    _S.FAILED: frozenset({_S.STARTING, _S.RUNNING, _S.DESTROYED}),  # running: its pod was there after all
    _S.DESTROYED: frozenset(),
}


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A long-lived sandbox as it is kept outside of Redis. Times are seconds since the epoch."""

    owner: Owner
    sandbox_id: str
    profile: str
    target: str
    autostop_sec: int
    ttl_sec: int  # from its creation, also while it is stopped
    created_at: float
    autostart: bool = False
    name: str = ""
    env: dict[str, str] = {}
    metadata: dict[str, str] = {}
    state: SandboxState = SandboxState.CREATING
    reason: str = ""  # why it is in this state, for people and programs: "created", "idle", "oom", ...
    since: float = 0.0
    member: str | None = None  # who made it
    fingerprint: str = ""  # of what was asked for, under an idempotency key

    @property
    def expires_at(self) -> float:
        return self.created_at + self.ttl_sec


def moved(record: SandboxRecord, to: SandboxState, reason: str, at: float) -> SandboxRecord:
    """Raises IllegalMove unless the state may become `to`."""
    if to not in MOVES[record.state]:
        raise IllegalMove(record.sandbox_id, record.state, to)
    return msgspec.structs.replace(record, state=to, reason=reason, since=at)


class BindingState(StrEnum):
    CLAIMING = "claiming"  # somebody with `token` is providing a pod
    BOUND = "bound"
    CLOSING = "closing"  # its workspace is being kept, then its pod ends; it takes no calls any more
    ENDED = "ended"  # the pod is gone; kept for what the next answer has to say


class Load(msgspec.Struct, frozen=True):
    """What a sandbox may use at most, as its profile says, or a project in all."""

    cpu: float | None = None  # cores; None: not said
    memory_bytes: int | None = None


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox and the pod under it. `(owner, task_id)` finds exactly one."""

    owner: Owner
    task_id: str  # or the `own_name` of a sandbox that no task made
    sandbox_id: str
    state: BindingState
    token: str  # of the claim; every later write compares it
    profile: str
    target: str
    generation: int  # 1 for the task's first pod
    pod: str = ""
    address: str = ""
    created_at: float = 0.0  # of this pod's claim, seconds since the epoch
    previous: PodEnded | None = None  # how the pod before this one ended
    ended: PodEnded | None = None  # how this one did
    terms: LeaseTerms | None = None  # of its lease; None: its profile's


# ── what finds a sandbox ────────────────────────────────────────────────────────────────────────────────────────

_OWN: Final = "\0"  # no task id holds it, so no task can be called like this


def own_name(sandbox_id: str) -> str:
    """What stands in a task id's place where no task made the sandbox: it is found by its own id.

    Everything that is keyed by owner and task id serves sandboxes of either kind so."""
    return _OWN + sandbox_id


def owned_by_name(name: str) -> str | None:
    """The sandbox id of an `own_name`; None for a task id."""
    return name[1:] if name.startswith(_OWN) else None


def check_task_id(task_id: str) -> str:
    """`task_id` itself. Raises InvalidTaskId unless it is 1 to 512 bytes of UTF-8 without NUL."""
    try:
        length = len(task_id.encode("utf-8"))
    except UnicodeEncodeError as why:
        raise InvalidTaskId("a task id must be valid UTF-8") from why
    if not 1 <= length <= TASK_ID_MAX_BYTES:
        raise InvalidTaskId(f"a task id has 1 to {TASK_ID_MAX_BYTES} bytes of UTF-8, this one has {length}")
    if "\0" in task_id:
        raise InvalidTaskId("a task id cannot hold a NUL character")
    return task_id


def task_label(owner: Owner, task_id: str) -> str:
    """`t-` and 26 characters that stand for exactly this tenant, project and task: a valid label value.

    SHA-256 over the three as UTF-8, each behind its 4-byte big-endian length; lower-case RFC 4648 base32."""
    digest = hashlib.sha256()
    for part in (owner.tenant, owner.project, task_id):
        raw = part.encode("utf-8")
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return "t-" + base64.b32encode(digest.digest()).decode().lower()[:26]
