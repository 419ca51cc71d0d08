"""Where bindings, leases, keys and idempotency marks are kept; one Protocol over Redis.

Times of leases are Redis `TIME` less the steps that it made, so that nobody's clock ends anything. Every method raises
StoreUnavailable when Redis does not answer in time or refuses, and is then safe to repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

import msgspec

from manager.model import Binding, LeaseTerms, Load, Owner, PodEnded, Role

NO_LOAD: Final = Load()


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


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What of its quota a project has in use."""

    slots: int
    cpu: float  # cores, of the sandboxes whose profile bounds it
    memory_bytes: int


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


class AuditEntry(msgspec.Struct, frozen=True):
    """One event that waits for object storage, by its place in the stream."""

    place: str
    event: bytes  # JSON; b"" where `lost` events found no room
    lost: int = 0


class Cache(Protocol):
    """Copies of what lies elsewhere, for some seconds. Raises StoreUnavailable; nothing depends on it."""

    async def cache_get(self, keys: Sequence[str]) -> Sequence[str | None]:
        """In one round trip; None where there is none."""
        ...

    async def cache_put(self, key: str, text: str, ttl_sec: float, *, only_absent: bool = False) -> None: ...
    async def cache_drop(self, key: str) -> None: ...


class Store(Protocol):
    # bindings
    async def begin_binding(
        self, wanted: Binding, claim_sec: float, slots: int | None, load: Load = NO_LOAD, most: Load = NO_LOAD
    ) -> Binding:
        """The task's binding after at most one atomic step.

        Where there is none or an ended one, `wanted` (state CLAIMING, stale after `claim_sec` without a renewal) is
        stored with the right `generation`, `previous` and `created_at`, and returned: its token is the caller's. The
        sandbox outlives its pods: where there was a record, its `sandbox_id` stays, so go on with the answer and not
        with `wanted`. Otherwise the present one is returned unchanged. `slots`: how many sandboxes the owner may hold,
        this one included (a stale claim holds its slot until its pod is gone, see `expired_claims`); `load`: what this
        one may use, `most`: what the owner's may in all. Raises QuotaExceeded beyond (details: what, held, limit), and
        StoreUnsettled in a Redis that is empty: see `settle`."""
        ...

    async def renew_claim(self, binding: Binding, claim_sec: float, closer: str = "") -> bool:
        """The claim, or the closing of `closer`, is not stale for so long from now. False: it is not ours any more."""
        ...

    async def claim_left_sec(self, binding: Binding) -> float:
        """Seconds until the claim of this token is stale; 0 where it is, or is no claim."""
        ...

    async def expired_claims(self, limit: int = 100) -> list[Binding]:
        """CLAIMING records whose claim is stale: whoever was at it has died. Oldest first."""
        ...

    async def close_binding(
        self, binding: Binding, claim_sec: float, closer: str = "", *, if_expired: bool = False
    ) -> bool:
        """BOUND -> CLOSING by `closer` for at most `claim_sec` (see `renew_claim`), or taken over from one that fell
        silent at it, and can neither renew, reopen nor end it from then on.

        Its lease cannot be renewed from now on and its slot stays taken. `if_expired`: only where the lease has passed,
        checked in the same step. False: another token or state, or renewed, or somebody is closing it."""
        ...

    async def reopen_binding(self, binding: Binding, lease_sec: float, closer: str = "") -> bool:
        """CLOSING -> BOUND, with a lease of so long from now. False: it has ended, or is another's."""
        ...

    async def set_terms(self, binding: Binding, terms: LeaseTerms) -> bool:
        """Other terms for a sandbox with a pod, its lease counted anew by them. False: it has none of this token."""
        ...

    async def held(self, owner: Owner) -> Held: ...

    async def recount(self) -> int:
        """Takes away slots of sandboxes that have ended or are unknown; how many there were."""
        ...

    async def settle(self) -> None:
        """Says that every pod there is has been looked at, so that quotas can be counted: until then, and again after
        Redis was wiped, `begin_binding` refuses."""
        ...

    async def commit_binding(self, binding: Binding, terms: LeaseTerms) -> bool:
        """CLAIMING -> BOUND with pod, address, profile and target, with an active lease from now. False: the token is
        no longer ours, and the pod is nobody's."""
        ...

    async def abandon_binding(self, binding: Binding) -> None:
        """Takes a CLAIMING record with this token back, and its slot: the ended record before it is there again. No
        error where it is not there."""
        ...

    async def adopt_binding(self, binding: Binding, terms: LeaseTerms, load: Load = NO_LOAD) -> bool:
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

    async def end_binding(
        self, binding: Binding, ended: PodEnded, *, if_expired: bool = False, closer: str = ""
    ) -> bool:
        """-> ENDED, lease and slot given back; the record is kept a week. False: another token or already ended.

        `if_expired`: only where the lease's until or hard end has passed, checked in the same step; False where it
        was renewed meanwhile. The reaper ends bindings only so: an operation that began after it looked wins. `closer`:
        only where it is CLOSING by that one."""
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

    # API keys: copies of what object storage has
    async def cache_key(self, record: KeyRecord) -> None:
        """Keeps a copy; not where there is one, nor over the mark of a revocation."""
        ...

    async def cached_key(self, key_id: str) -> KeyRecord | Literal["revoked"] | None: ...

    async def mark_key_revoked(self, key_id: str) -> None:
        """In place of any copy; for an hour, in which every lookup that was under way has ended."""
        ...

    # audit events on their way to object storage
    async def append_audit(self, events: Sequence[bytes], most: int) -> int:
        """Each event (JSON) at the end of the stream, in one step. How many found it full, at `most` entries: they are
        not kept, only counted, and the next entry that has room is preceded by one that says so."""
        ...

    async def read_audit(self, after: str = "", limit: int = 500) -> list[AuditEntry]:
        """The oldest entries behind the place `after`."""
        ...

    async def trim_audit(self, upto: str) -> None:
        """Forgets the entries up to the place `upto`, that one too."""
        ...

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

    async def meet(self, holder: str, seconds: float) -> list[str]:
        """Says that this manager is there for so long, and gives all that are. 0 seconds: it goes."""
        ...

    async def close(self) -> None: ...
