"""A Store in memory: the same promises as over Redis, with a clock that tests move and outages that they make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from manager.errors import QuotaExceeded, StoreUnavailable, StoreUnsettled
from manager.model import Binding, BindingState, LeaseTerms, Load, Owner, PodEnded
from manager.store.base import NO_LOAD, AuditEntry, Held, IdempotencyMark, KeyRecord, Lease, MarkWanted

HOLDER_SEC = 60.0
_LIVE = (BindingState.CLAIMING, BindingState.BOUND, BindingState.CLOSING)


@dataclass
class _Record:
    binding: Binding
    claimed_at: float
    claim_sec: float = 0.0
    before: Binding | None = None  # the ended record under a claim
    load: Load = NO_LOAD


@dataclass
class _Leased:
    until: float
    hard_end: float
    terms: LeaseTerms
    operations: dict[str, int] = field(default_factory=dict)
    closer: str | None = None  # where it is being closed


class MemoryStore:
    """manager.store.base.Store. `hook` is awaited with the name of every call before it has any effect."""

    def __init__(self) -> None:
        self.offset_sec = 0.0  # tests move the clock on with it
        self.down = False
        self.settled = False
        self.hook: Callable[[str], Awaitable[None]] | None = None
        self.calls: list[str] = []
        self._there: dict[str, float] = {}
        self._records: dict[tuple[Owner, str], _Record] = {}
        self._leases: dict[str, _Leased] = {}
        self._holders: dict[str, float] = {}
        self._marks: dict[tuple[Owner, str, str], IdempotencyMark] = {}
        self._keys: dict[str, KeyRecord | Literal["revoked"]] = {}
        self._leaders: dict[str, tuple[str, float]] = {}
        self._audit: list[AuditEntry] = []
        self._audit_place = 0
        self._audit_lost = 0

    def forget_everything(self) -> None:
        """FLUSHALL."""
        self.settled = False
        for kept in (self._records, self._leases, self._holders, self._marks, self._leaders):
            kept.clear()

    @property
    def now(self) -> float:
        return time.time() + self.offset_sec

    async def _enter(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)  # as over a network, others come between
        if self.hook is not None:
            await self.hook(call)
        if self.down:
            raise StoreUnavailable("Redis does not answer")

    # ── bindings ────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin_binding(
        self, wanted: Binding, claim_sec: float, slots: int | None, load: Load = NO_LOAD, most: Load = NO_LOAD
    ) -> Binding:
        await self._enter("begin_binding")
        key = (wanted.owner, wanted.task_id)
        old = self._records.get(key)
        if old is not None and old.binding.state in _LIVE:
            return old.binding
        if not self.settled:
            raise StoreUnsettled("the store is empty")
        if slots is not None:
            self._check_slots(key, slots)
        self._check_load(key, load, most)
        generation, previous, before, sandbox_id = 1, None, None, wanted.sandbox_id
        if old is not None:
            sandbox_id = old.binding.sandbox_id
            generation, previous, before = old.binding.generation + 1, old.binding.ended, old.binding
        binding = msgspec.structs.replace(
            wanted,
            sandbox_id=sandbox_id,
            state=BindingState.CLAIMING,
            generation=generation,
            previous=previous,
            ended=None,
            pod="",
            address="",
            created_at=wanted.created_at or self.now,
        )
        self._records[key] = _Record(binding, self.now, claim_sec, before, load)
        return binding

    def _check_load(self, key: tuple[Owner, str], load: Load, most: Load) -> None:
        held = self._held(key[0], but=key)
        for what, wanted, used, limit in (
            ("cpu", load.cpu, held.cpu, most.cpu),
            ("memory", load.memory_bytes, held.memory_bytes, most.memory_bytes),
        ):
            if limit is not None and used + (wanted or 0) > limit:
                raise QuotaExceeded(f"no {what} is left", what=what, held=used, limit=limit)

    def _held(self, owner: Owner, but: tuple[Owner, str] | None = None) -> Held:
        mine = [
            record
            for key, record in self._records.items()
            if key != but and key[0] == owner and record.binding.state in _LIVE
        ]
        return Held(
            slots=len(mine),
            cpu=sum(record.load.cpu or 0.0 for record in mine),
            memory_bytes=sum(record.load.memory_bytes or 0 for record in mine),
        )

    def _stale(self, record: _Record) -> bool:
        return record.binding.state is BindingState.CLAIMING and self.now - record.claimed_at > record.claim_sec

    async def held(self, owner: Owner) -> Held:
        await self._enter("held")
        return self._held(owner)

    def _ours(self, binding: Binding, *states: BindingState) -> _Record | None:
        record = self._records.get((binding.owner, binding.task_id))
        if record is None or record.binding.token != binding.token or record.binding.state not in states:
            return None
        return record

    async def renew_claim(self, binding: Binding, claim_sec: float, closer: str = "") -> bool:
        await self._enter("renew_claim")
        record = self._ours(binding, BindingState.CLAIMING, BindingState.CLOSING)
        if record is None:
            return False
        if record.binding.state is BindingState.CLOSING:
            lease = self._leases[binding.sandbox_id]
            if lease.closer != closer:
                return False
            lease.until = self.now + claim_sec
        record.claimed_at, record.claim_sec = self.now, claim_sec
        return True

    async def claim_left_sec(self, binding: Binding) -> float:
        await self._enter("claim_left_sec")
        record = self._ours(binding, BindingState.CLAIMING)
        return max(0.0, record.claimed_at + record.claim_sec - self.now) if record is not None else 0.0

    async def expired_claims(self, limit: int = 100) -> list[Binding]:
        await self._enter("expired_claims")
        return [record.binding for record in self._records.values() if self._stale(record)][:limit]

    async def close_binding(
        self, binding: Binding, claim_sec: float, closer: str = "", *, if_expired: bool = False
    ) -> bool:
        await self._enter("close_binding")
        record = self._ours(binding, BindingState.BOUND, BindingState.CLOSING)
        lease = self._leases.get(binding.sandbox_id)
        if record is None or lease is None:
            return False
        if (record.binding.state is BindingState.CLOSING or if_expired) and lease.until > self.now:
            return False
        record.binding = msgspec.structs.replace(record.binding, state=BindingState.CLOSING)
        lease.closer, lease.until = closer, self.now + claim_sec
        return True

    async def reopen_binding(self, binding: Binding, lease_sec: float, closer: str = "") -> bool:
        await self._enter("reopen_binding")
        record = self._ours(binding, BindingState.BOUND, BindingState.CLOSING)
        lease = self._leases.get(binding.sandbox_id)
        if record is None or lease is None:
            return False
        if record.binding.state is BindingState.CLOSING and lease.closer != closer:
            return False
        record.binding = msgspec.structs.replace(record.binding, state=BindingState.BOUND)
        lease.closer, lease.until = None, self.now + lease_sec
        return True

    async def set_terms(self, binding: Binding, terms: LeaseTerms) -> bool:
        await self._enter("set_terms")
        record = self._ours(binding, BindingState.BOUND, BindingState.CLOSING)
        lease = self._leases.get(binding.sandbox_id)
        if record is None or lease is None:
            return False
        record.binding = msgspec.structs.replace(record.binding, terms=terms)
        lease.terms, lease.hard_end = terms, record.binding.created_at + terms.max_sec
        if lease.closer is None:
            if self._operations(lease) == 0:
                lease.until = self.now + terms.idle_sec
            lease.until = min(lease.until, lease.hard_end)
        return True

    async def recount(self) -> int:
        await self._enter("recount")
        return 0  # the records are the slots

    async def settle(self) -> None:
        await self._enter("settle")
        self.settled = True

    def _check_slots(self, key: tuple[Owner, str], limit: int) -> None:
        held = self._held(key[0], but=key).slots
        if held >= limit:
            raise QuotaExceeded("no slot is free", held=held, limit=limit)

    async def commit_binding(self, binding: Binding, terms: LeaseTerms) -> bool:
        await self._enter("commit_binding")
        record = self._records.get((binding.owner, binding.task_id))
        if record is None or record.binding.token != binding.token:
            return False
        if record.binding.state is BindingState.BOUND:
            return True
        if record.binding.state is not BindingState.CLAIMING:
            return False
        record.binding = msgspec.structs.replace(
            record.binding,
            state=BindingState.BOUND,
            pod=binding.pod,
            address=binding.address,
            profile=binding.profile,
            target=binding.target,
        )
        record.before = None
        self._lease(binding.sandbox_id, terms.active_sec, terms.max_sec, terms)
        return True

    async def abandon_binding(self, binding: Binding) -> None:
        await self._enter("abandon_binding")
        key = (binding.owner, binding.task_id)
        record = self._records.get(key)
        if record is None or record.binding.token != binding.token:
            return
        if record.binding.state is BindingState.CLAIMING:
            self._take_back(key)

    def _take_back(self, key: tuple[Owner, str]) -> None:
        record = self._records.pop(key)
        if record.before is not None:
            self._records[key] = _Record(record.before, 0.0)

    async def adopt_binding(self, binding: Binding, terms: LeaseTerms, load: Load = NO_LOAD) -> bool:
        await self._enter("adopt_binding")
        key = (binding.owner, binding.task_id)
        old = self._records.get(key)
        ours = old is not None and (old.binding.token, old.binding.sandbox_id) == (binding.token, binding.sandbox_id)
        created_at, previous = binding.created_at, binding.previous
        if old is not None:
            if old.binding.state in _LIVE and not ours:
                return False
            if old.binding.state is BindingState.CLOSING:
                return True
            if old.binding.state is BindingState.ENDED and binding.generation <= old.binding.generation:
                return False
            if ours:
                created_at = old.binding.created_at
            if old.binding.state is BindingState.ENDED:
                previous = old.binding.ended
            elif ours and previous is None:
                previous = old.binding.previous
        kept = msgspec.structs.replace(
            binding, state=BindingState.BOUND, created_at=created_at, previous=previous, ended=None
        )
        self._records[key] = _Record(kept, 0.0, load=load)
        if not (ours and binding.sandbox_id in self._leases):
            left = terms.max_sec - (self.now - created_at) if created_at > 0 else terms.max_sec
            self._lease(binding.sandbox_id, terms.idle_sec, min(left, terms.max_sec), terms)
        return True

    async def get_binding(self, owner: Owner, task_id: str) -> Binding | None:
        await self._enter("get_binding")
        record = self._records.get((owner, task_id))
        return record.binding if record is not None else None

    async def find_sandbox(self, sandbox_id: str) -> Binding | None:
        await self._enter("find_sandbox")
        found = [one.binding for one in self._records.values() if one.binding.sandbox_id == sandbox_id]
        return found[0] if found else None

    async def list_bindings(self, owner: Owner | None = None) -> list[Binding]:
        await self._enter("list_bindings")
        live = [one.binding for one in self._records.values() if one.binding.state in _LIVE]
        return [binding for binding in live if owner is None or binding.owner == owner]

    async def end_binding(
        self, binding: Binding, ended: PodEnded, *, if_expired: bool = False, closer: str = ""
    ) -> bool:
        await self._enter("end_binding")
        record = self._records.get((binding.owner, binding.task_id))
        if record is None or record.binding.token != binding.token or record.binding.state is BindingState.ENDED:
            return False
        lease = self._leases.get(binding.sandbox_id)
        if if_expired and (
            record.binding.state is not BindingState.BOUND or (lease is not None and lease.until > self.now)
        ):
            return False
        if closer and (record.binding.state is not BindingState.CLOSING or lease is None or lease.closer != closer):
            return False
        record.binding = msgspec.structs.replace(record.binding, state=BindingState.ENDED, ended=ended)
        record.before = None
        self._leases.pop(binding.sandbox_id, None)
        return True

    # ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _lease(self, sandbox_id: str, first_sec: float, hard_sec: float, terms: LeaseTerms) -> None:
        hard_end = self.now + hard_sec
        self._leases[sandbox_id] = _Leased(min(self.now + first_sec, hard_end), hard_end, terms)

    async def touch_leases(self, holder: str, running: Mapping[str, int]) -> None:
        await self._enter("touch_leases")
        self._holders[holder] = self.now + HOLDER_SEC
        for sandbox_id, count in running.items():
            lease = self._leases.get(sandbox_id)
            if lease is None or lease.closer is not None:
                continue
            if count > 0:
                lease.operations[holder] = count
                lease.until = max(lease.until, min(self.now + lease.terms.active_sec, lease.hard_end))
            else:
                self._rest(lease, holder)

    def _rest(self, lease: _Leased, holder: str) -> None:
        lease.operations.pop(holder, None)
        if self._operations(lease) == 0:
            lease.until = min(self.now + lease.terms.idle_sec, lease.hard_end)

    def _operations(self, lease: _Leased) -> int:
        return sum(count for holder, count in lease.operations.items() if self._holders.get(holder, 0.0) > self.now)

    async def extend_lease(self, sandbox_id: str, seconds: float) -> None:
        await self._enter("extend_lease")
        if (lease := self._leases.get(sandbox_id)) is not None and lease.closer is None:
            lease.until = max(lease.until, min(self.now + seconds, lease.hard_end))

    async def get_lease(self, sandbox_id: str) -> Lease | None:
        await self._enter("get_lease")
        lease = self._leases.get(sandbox_id)
        return self._shown(sandbox_id, lease) if lease is not None else None

    async def expired_leases(self, limit: int = 100) -> list[Lease]:
        await self._enter("expired_leases")
        gone = [(lease.until, sandbox_id) for sandbox_id, lease in self._leases.items() if lease.until <= self.now]
        return [self._shown(sandbox_id, self._leases[sandbox_id]) for _, sandbox_id in sorted(gone)[:limit]]

    def _shown(self, sandbox_id: str, lease: _Leased) -> Lease:
        return Lease(
            sandbox_id=sandbox_id,
            until=lease.until,
            hard_end=lease.hard_end,
            operations=self._operations(lease),
            now=self.now,
            terms=lease.terms,
        )

    async def drop_holder(self, holder: str) -> None:
        await self._enter("drop_holder")
        self._holders.pop(holder, None)
        for lease in self._leases.values():
            if holder in lease.operations:
                self._rest(lease, holder)

    # ── audit events ────────────────────────────────────────────────────────────────────────────────────────────

    async def append_audit(self, events: Sequence[bytes], most: int) -> int:
        await self._enter("append_audit")
        if self._audit_lost and most - len(self._audit) > 1:
            self._append_audit(b"", self._audit_lost)
            self._audit_lost = 0
        kept = max(0, most - len(self._audit))
        for event in events[:kept]:
            self._append_audit(event, 0)
        lost = len(events[kept:])
        self._audit_lost += lost
        return lost

    def _append_audit(self, event: bytes, lost: int) -> None:
        self._audit_place += 1
        self._audit.append(AuditEntry(f"{int(self.now * 1000)}-{self._audit_place:010d}", event, lost))

    async def read_audit(self, after: str = "", limit: int = 500) -> list[AuditEntry]:
        await self._enter("read_audit")
        return [entry for entry in self._audit if entry.place > after][:limit]

    async def trim_audit(self, upto: str) -> None:
        await self._enter("trim_audit")
        self._audit = [entry for entry in self._audit if entry.place > upto]

    # ── the rest ────────────────────────────────────────────────────────────────────────────────────────────────

    async def mark(
        self, owner: Owner, scope: str, key: str, fingerprint: str, pod: str, keep_sec: float
    ) -> IdempotencyMark:
        await self._enter("mark")
        return self._mark(MarkWanted(owner, scope, key, fingerprint, pod))

    def _mark(self, wanted: MarkWanted) -> IdempotencyMark:
        place = (wanted.owner, wanted.scope, wanted.key)
        old = self._marks.get(place)
        if old is not None:
            return msgspec.structs.replace(old, fresh=False)
        self._marks[place] = made = IdempotencyMark(wanted.fingerprint, wanted.pod, True)
        return made

    async def mark_many(self, wanted: Sequence[MarkWanted], keep_sec: float) -> list[IdempotencyMark]:
        await self._enter("mark_many")
        return [self._mark(one) for one in wanted]

    async def cache_key(self, record: KeyRecord) -> None:
        await self._enter("cache_key")
        self._keys.setdefault(record.key_id, record)

    async def cached_key(self, key_id: str) -> KeyRecord | Literal["revoked"] | None:
        await self._enter("cached_key")
        return self._keys.get(key_id)

    async def mark_key_revoked(self, key_id: str) -> None:
        await self._enter("mark_key_revoked")
        self._keys[key_id] = "revoked"

    def wipe_keys(self) -> None:
        """What a FLUSHALL does to them."""
        self._keys.clear()

    async def ping(self) -> float:
        began = time.monotonic()
        await self._enter("ping")
        return time.monotonic() - began

    async def warnings(self) -> list[str]:
        return []

    async def meet(self, holder: str, seconds: float) -> list[str]:
        await self._enter("meet")
        self._there[holder] = self.now + seconds
        self._there = {name: until for name, until in self._there.items() if until > self.now}
        return sorted(self._there)

    async def lead(self, name: str, holder: str, seconds: float) -> bool:
        await self._enter("lead")
        other, until = self._leaders.get(name, (holder, 0.0))
        if other != holder and until > self.now:
            return False
        self._leaders[name] = (holder, self.now + seconds)
        return seconds > 0

    async def close(self) -> None:
        pass
