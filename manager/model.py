"""The nouns and what may be done with them. No HTTP, Redis or Kubernetes here."""

from __future__ import annotations

import base64
import hashlib
import secrets
from enum import StrEnum
from typing import Final

import msgspec

from manager.errors import InvalidTaskId

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


class LeaseTerms(msgspec.Struct, frozen=True):
    """How long a sandbox keeps its pod; seconds."""

    active_sec: float  # one heartbeat of running work keeps the pod this long
    idle_sec: float  # and this long after the last operation has ended
    max_sec: float  # no heartbeat carries a pod past this age


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's named recipe for a pod. No request can change a field of it."""

    name: str
    image: str = "host"  # local target: `host` is this machine's own system, read-only
    isolation: str = "namespaces"  # or `none`, only with --insecure-no-isolation
    cpu: float | None = 1.0  # cores
    memory_bytes: int | None = 1 << 30
    pids: int | None = 512
    disk_bytes: int | None = None  # of the workspace; None: unbounded. A target that cannot bound it refuses
    network: str = "none"
    users: tuple[str, ...] = ("sandbox",)
    pool_min: int = 2
    pool_max: int = 16
    target: str = "here"
    active_sec: float | None = None  # None: the configuration's
    idle_sec: float | None = None
    max_sec: float | None = None

    @property
    def revision(self) -> str:
        """Changes when anything about the pod changes: pool pods of another revision are replaced, never claimed."""
        pod_fields = (
            self.image, self.isolation, self.cpu, self.memory_bytes, self.pids, self.disk_bytes, self.network,
            self.users,
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(pod_fields)).hexdigest()[:16]


class PodState(StrEnum):
    IDLE = "idle"  # of the warm pool, nobody's
    CLAIMED = "claimed"  # ran, or may run, a tenant's code: destroyed afterwards, never idle again


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

    @property
    def state(self) -> PodState:
        return PodState(self.labels.get(LABEL_STATE, PodState.CLAIMED))


class PodEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Why and when a pod ended: `destroyed`, `expired`, `evicted`, `oom`, `node_lost` or `lost`."""

    reason: str
    at: float  # seconds since the epoch


class BindingState(StrEnum):
    CLAIMING = "claiming"  # somebody with `token` is providing a pod
    BOUND = "bound"
    ENDED = "ended"  # the pod is gone; kept for what the next answer has to say


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """A task's sandbox and the pod under it. `(owner, task_id)` finds exactly one."""

    owner: Owner
    task_id: str
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
