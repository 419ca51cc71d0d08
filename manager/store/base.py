"""Where bindings, leases, keys and idempotency marks are kept; one Protocol over Redis.

Times of leases are Redis `TIME` less the steps that it made, so that nobody's clock ends anything. Every method raises
StoreUnavailable when Redis does not answer in time or refuses, and is then safe to repeat.
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
    """A sandbox's right to its pod; seconds since the epoch by the store's clock. Compare them only with `now`."""

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


class MarkWanted(msgspec.Struct, frozen=True):
    """A use of an idempotency key: who, where (`scope`), and what for."""

    owner: Owner
    scope: str
    key: str
    fingerprint: str
    pod: str


class Store(Protocol):
    # bindings
    async def begin_binding(self, wanted: Binding, claim_sec: float, slots: int | None) -> Binding:
        """The task's binding after at most one atomic step.

        Where there is none, an ended one, or a `claiming` one older than `claim_sec`, `wanted` (state CLAIMING) is
        stored with the right `generation`, `previous` and `created_at`, and returned: its token is the caller's. The
        sandbox outlives its pods: where there was a record, its `sandbox_id` stays, so go on with the answer and not
        with `wanted`. Otherwise the present one is returned unchanged. `slots`: how many sandboxes the owner may hold,
        this one included (claims that nobody finished in their `claim_sec` are not held); raises QuotaExceeded beyond
        (details: held, limit)."""
        ...

    async def commit_binding(self, binding: Binding, terms: LeaseTerms) -> bool:
        """CLAIMING -> BOUND with pod, address, profile and target, with an active lease from now. False: the token is
        no longer ours, and the pod is nobody's."""
        ...

    async def abandon_binding(self, binding: Binding) -> None:
        """Takes a CLAIMING record with this token back, and its slot: the ended record before it is there again. No
        error where it is not there."""
        ...

    async def adopt_binding(self, binding: Binding, terms: LeaseTerms) -> bool:
        """Writes a BOUND record found from a pod's labels, with an idle lease. True as well where the task's record
        is already of this token, CLAIMING or BOUND; an existing lease is kept then.

        False: the task has another record that is not ended, or an ended one of this or a later generation. Then the
        pod is a stray."""
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
        active); 0 with no other live holder: until = now + idle, so say 0 once, after the last has ended. Never past
        the hard end. Unknown ids are ignored. One pipelined round trip for all.

        It is also the holder's heartbeat, with an empty mapping too: after HOLDER_SEC (60 s) without one its
        operations no longer count."""
        ...

    async def extend_lease(self, sandbox_id: str, seconds: float) -> None:
        """until = max(until, now + seconds), never past the hard end."""
        ...

    async def get_lease(self, sandbox_id: str) -> Lease | None: ...

    async def expired_leases(self, limit: int = 100) -> list[Lease]:
        """Those whose until (or hard end) has passed, oldest first. None right after a step of Redis' clock: leases
        are then moved by the step, so that they end when they would have."""
        ...

    async def drop_holder(self, holder: str) -> None:
        """A manager's operations are over: leases that it alone held active are idle from now on."""
        ...

    # idempotency
    async def mark(
        self, owner: Owner, scope: str, key: str, fingerprint: str, pod: str, keep_sec: float
    ) -> IdempotencyMark:
        """The mark of (owner, scope, key), made now where there was none.

        Repeated after StoreUnavailable it may say `fresh=False` of the caller's own mark."""
        ...

    async def mark_many(self, wanted: Sequence[MarkWanted], keep_sec: float) -> list[IdempotencyMark]:
        """The same for each of them, in their order, in one step and round trip."""
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
        """Takes or renews the leadership `name` for so long; False where another holds it. 0 seconds give it up."""
        ...

    async def close(self) -> None: ...
