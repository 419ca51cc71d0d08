"""Where bindings, leases, keys and idempotency marks are kept; one Protocol over Redis.

Times are Redis `TIME`, so that a step of this machine's clock ends nothing. Every method raises StoreUnavailable
when Redis does not answer in time or refuses, and is then safe to repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from manager.model import Binding, LeaseTerms, Owner, PodEnded, Role


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An API key as stored: never the secret, only its keyed hash."""

    key_id: str
    secret_hash: str  # hex HMAC-SHA-256 of the secret under the manager's pepper
    tenant: str
    project: str
    role: Role
    member: str | None = None
    name: str = ""
    created_at: float = 0.0
    expires_at: float | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox's right to its pod; seconds since the epoch of Redis."""

    sandbox_id: str
    until: float
    hard_end: float
    operations: int  # under way, over all managers
    now: float  # when this was read
    terms: LeaseTerms


class IdempotencyMark(msgspec.Struct, frozen=True):
    """What an idempotency key was first used for."""

    fingerprint: str
    pod: str
    fresh: bool  # this call made it


class Store(Protocol):
    # bindings
    async def begin_binding(self, wanted: Binding, claim_sec: float, slots: int | None) -> Binding:
        """The task's binding after at most one atomic step.

        Where there is none, an ended one, or a `claiming` one older than `claim_sec`, `wanted` (state CLAIMING) is
        stored with the right `generation` and `previous`, and returned: its token is the caller's. Otherwise the
        present one is returned unchanged. `slots`: how many sandboxes the owner may hold, this one included; raises
        QuotaExceeded beyond (details: held, limit)."""
        ...

    async def commit_binding(self, binding: Binding, terms: LeaseTerms) -> bool:
        """CLAIMING -> BOUND with pod and address, with an active lease from now. False: the token is no longer ours."""
        ...

    async def abandon_binding(self, binding: Binding) -> None:
        """Takes a CLAIMING record with this token back, and its slot; no error where it is not there."""
        ...

    async def adopt_binding(self, binding: Binding, terms: LeaseTerms) -> bool:
        """Writes a BOUND record found from a pod's labels, with a lease, unless the task has a record that is not
        ended (False). Keeps an existing lease of the same token."""
        ...

    async def get_binding(self, owner: Owner, task_id: str) -> Binding | None: ...

    async def find_sandbox(self, sandbox_id: str) -> Binding | None: ...

    async def list_bindings(self, owner: Owner | None = None) -> list[Binding]:
        """All that are not ENDED, of one owner or of everybody."""
        ...

    async def end_binding(self, binding: Binding, ended: PodEnded, *, if_expired: bool = False) -> bool:
        """-> ENDED, lease and slot given back; the record is kept a week. False: another token or already ended.

        `if_expired`: only where the lease's until or hard end has passed, checked in the same step; False where it
        was renewed meanwhile. The reaper ends bindings only so: an operation that began after it looked wins."""
        ...

    # leases
    async def touch_leases(self, holder: str, running: Mapping[str, int]) -> None:
        """For each sandbox id: `holder` has this many operations under way. More than 0: until = max(until, now +
        active); 0 with no other live holder: until = now + idle. Never past the hard end. Unknown ids are ignored.
        One pipelined round trip for all."""
        ...

    async def extend_lease(self, sandbox_id: str, seconds: float) -> None:
        """until = max(until, now + seconds), never past the hard end."""
        ...

    async def get_lease(self, sandbox_id: str) -> Lease | None: ...

    async def expired_leases(self, limit: int = 100) -> list[Lease]:
        """Those whose until (or hard end) has passed, oldest first."""
        ...

    async def drop_holder(self, holder: str) -> None:
        """A manager's operations are over: its counts no longer hold leases active."""
        ...

    # idempotency
    async def mark(self, owner: Owner, scope: str, key: str, fingerprint: str, pod: str, keep_sec: float) -> IdempotencyMark:
        """The mark of (owner, scope, key), made now where there was none."""
        ...

    # keys
    async def put_key(self, record: KeyRecord) -> None: ...

    async def get_key(self, key_id: str) -> KeyRecord | None: ...

    async def list_keys(self, owner: Owner | None) -> Sequence[KeyRecord]: ...

    async def delete_key(self, key_id: str) -> bool: ...

    # health and election
    async def ping(self) -> float:
        """Seconds of a round trip."""
        ...

    async def warnings(self) -> list[str]:
        """What about this Redis can lose acknowledged writes (`appendonly no`, an evicting policy), for people."""
        ...

    async def lead(self, name: str, holder: str, seconds: float) -> bool:
        """Takes or renews the leadership `name` for so long; False where another holds it."""
        ...

    async def close(self) -> None: ...
