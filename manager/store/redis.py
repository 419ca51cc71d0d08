"""The Store over Redis or Valkey: every step that reads and then writes is one Lua script of scripts/."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Self, TypeVar

import msgspec

from manager.errors import QuotaExceeded, StoreUnavailable, StoreUnsettled
from manager.model import Binding, BindingState, LeaseTerms, Load, Owner, PodEnded
from manager.store import keys
from manager.store.base import NO_LOAD, AuditEntry, Held, IdempotencyMark, KeyRecord, Lease, MarkWanted
from manager.store.scripting import Call, Script, ScriptClient

log = logging.getLogger(__name__)

T = TypeVar("T")

HOLDER_SEC: Final = 60.0  # a manager that has not touched its leases for so long is dead: its operations do not count
_REVOKED: Final = "revoked"  # in place of a key's copy
_REVOKED_SEC: Final = 3600.0
_HOLDING_SEC: Final = 86_400.0
_BATCH: Final = 200  # sandboxes a script looks at: a few ms, in which Redis serves nobody else
_CLOCK_STEP_SEC: Final = 10.0  # a difference between Redis' clock and ours that no slow answer explains
_RETRY_QUOTA_SEC: Final = (1.0, 60.0)  # what Retry-After says at least and at most
_CLOCK_TRUST_SEC: Final = 1.0  # an answer that took longer says nothing about the clock

_BEGIN = Script("begin_binding")
_COMMIT = Script("commit_binding")
_ABANDON = Script("abandon_binding")
_ADOPT = Script("adopt_binding")
_RENEW = Script("renew_claim")
_CLAIM_LEFT = Script("claim_left")
_EXPIRED_CLAIMS = Script("expired_claims")
_CLOSE = Script("close_binding")
_REOPEN = Script("reopen_binding")
_SET_TERMS = Script("set_terms")
_HELD = Script("held")
_RECOUNT = Script("recount")
_END = Script("end_binding")
_READ = Script("read_sandboxes")
_TOUCH = Script("touch_leases")
_EXTEND = Script("extend_lease")
_GET_LEASE = Script("get_lease")
_EXPIRED = Script("expired_leases")
_SHIFT_CLOCK = Script("shift_clock")
_DROP_HOLDER = Script("drop_holder")
_MARK = Script("mark")
_MARK_MANY = Script("mark_many")
_LEAD = Script("lead")
_MEET = Script("meet")
_APPEND_AUDIT = Script("append_audit")


class RedisStore:
    """manager.store.base.Store over one Redis. See there for what each method does."""

    def __init__(self, client: ScriptClient) -> None:
        self._client = client
        self._clock: tuple[float, float] | None = None  # Redis' time without its steps, ours monotonic; of one moment

    @classmethod
    def at(cls, url: str, *, max_connections: int = 32, call_sec: float = 2.0) -> Self:
        """A store at `redis://`, `rediss://` or `unix://`; connects at the first call."""
        return cls(ScriptClient(url, max_connections=max_connections, call_sec=call_sec))

    async def close(self) -> None:
        await self._client.close()

    # ── bindings ────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin_binding(
        self, wanted: Binding, claim_sec: float, slots: int | None, load: Load = NO_LOAD, most: Load = NO_LOAD
    ) -> Binding:
        owner = wanted.owner
        answer = await self._client.run(
            _BEGIN,
            _binding_keys(wanted),
            [
                owner.tenant, owner.project, wanted.task_id, wanted.sandbox_id, wanted.token, wanted.profile,
                wanted.target, wanted.created_at, _ms(claim_sec), -1 if slots is None else slots,
                _json(wanted.terms), *_load(load, 0), *_load(most, -1),
            ],
        )  # fmt: skip
        if answer[0] == "unsettled":
            raise StoreUnsettled("Redis was emptied and the running sandboxes are being found again; try again shortly")
        if answer[0] == "quota":
            raise _over_quota(owner, answer)
        return _binding_of(answer[1])

    async def renew_claim(self, binding: Binding, claim_sec: float, closer: str = "") -> bool:
        return bool(await self._client.run(_RENEW, _binding_keys(binding), [binding.token, _ms(claim_sec), closer]))

    async def claim_left_sec(self, binding: Binding) -> float:
        left_ms: int = await self._client.run(_CLAIM_LEFT, _binding_keys(binding), [binding.token])
        return left_ms / 1000

    async def expired_claims(self, limit: int = 100) -> list[Binding]:
        return [_binding_of(row) for row in await self._client.run(_EXPIRED_CLAIMS, (), [limit])]

    async def close_binding(
        self, binding: Binding, claim_sec: float, closer: str = "", *, if_expired: bool = False
    ) -> bool:
        args: list[str | int] = [binding.token, _ms(claim_sec), int(if_expired), closer]
        return bool(await self._client.run(_CLOSE, _binding_keys(binding)[:1], args))

    async def reopen_binding(self, binding: Binding, lease_sec: float, closer: str = "") -> bool:
        args: list[str | int] = [binding.token, _ms(lease_sec), closer]
        return bool(await self._client.run(_REOPEN, _binding_keys(binding)[:1], args))

    async def set_terms(self, binding: Binding, terms: LeaseTerms) -> bool:
        args: list[str | int] = [binding.token, _json(terms), *_terms_ms(terms)]
        return bool(await self._client.run(_SET_TERMS, _binding_keys(binding)[:1], args))

    async def held(self, owner: Owner) -> Held:
        slots, cpu, memory = await self._client.run(_HELD, [keys.slots_key(owner)])
        return Held(slots=slots, cpu=float(cpu) / 1000, memory_bytes=int(memory))

    async def recount(self) -> int:
        wrong, cursor = 0, "0"
        while True:
            cursor, found = await self._client.command(
                "SCAN", cursor, "MATCH", f"{keys.PREFIX}slots:*", "COUNT", _BATCH
            )
            for key in found:
                for ids in _batches(await self._client.command("ZRANGE", key, 0, -1)):
                    wrong += await self._client.run(_RECOUNT, [key], ids)
            if str(cursor) == "0":
                return wrong

    async def settle(self) -> None:
        await self._client.command("SET", keys.settled_key(), "1")

    async def commit_binding(self, binding: Binding, terms: LeaseTerms) -> bool:
        args: list[str | int] = [
            binding.token,
            binding.pod,
            binding.address,
            binding.profile,
            binding.target,
            *_terms_ms(terms),
        ]
        return bool(await self._client.run(_COMMIT, _binding_keys(binding), args))

    async def abandon_binding(self, binding: Binding) -> None:
        await self._client.run(_ABANDON, _binding_keys(binding), [binding.token])

    async def adopt_binding(self, binding: Binding, terms: LeaseTerms, load: Load = NO_LOAD) -> bool:
        owner = binding.owner
        answer = await self._client.run(
            _ADOPT,
            _binding_keys(binding),
            [
                owner.tenant, owner.project, binding.task_id, binding.sandbox_id, binding.token, binding.profile,
                binding.target, binding.created_at, binding.generation, binding.pod, binding.address,
                _json(binding.previous), *_terms_ms(terms), _json(binding.terms), *_load(load, 0),
            ],
        )  # fmt: skip
        return bool(answer)

    async def get_binding(self, owner: Owner, task_id: str) -> Binding | None:
        fields = await self._client.command("HGETALL", keys.binding_key(owner, task_id))
        return _binding_of(fields) if fields else None

    async def find_sandbox(self, sandbox_id: str) -> Binding | None:
        return next(iter(await self._read([sandbox_id])), None)

    async def list_bindings(self, owner: Owner | None = None) -> list[Binding]:
        if owner is None:
            ids = await self._client.command("SMEMBERS", keys.live_key())
        else:
            ids = await self._client.command("ZRANGE", keys.slots_key(owner), 0, -1)
        found = [binding for batch in _batches(sorted(ids)) for binding in await self._read(batch)]
        return [binding for binding in found if binding.state is not BindingState.ENDED]

    async def end_binding(
        self, binding: Binding, ended: PodEnded, *, if_expired: bool = False, closer: str = ""
    ) -> bool:
        args: list[str | int] = [binding.token, _json(ended), int(if_expired), closer]
        return bool(await self._client.run(_END, _binding_keys(binding), args))

    async def _read(self, sandbox_ids: Sequence[str]) -> list[Binding]:
        rows = await self._client.run(_READ, (), sandbox_ids)
        return [_binding_of(row) for row in rows if row]

    # ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def touch_leases(self, holder: str, running: Mapping[str, int]) -> None:
        head = (holder, _ms(HOLDER_SEC), _ms(_HOLDING_SEC))
        calls = []
        for batch in _batches(list(running.items())) or [[]]:  # also without any: the heartbeat
            pairs: Iterator[str | int] = itertools.chain.from_iterable(batch)
            calls.append(Call(_TOUCH, (), [*head, *pairs]))
        await self._client.run_all(calls)

    async def extend_lease(self, sandbox_id: str, seconds: float) -> None:
        await self._client.run(_EXTEND, (), [sandbox_id, _ms(seconds)])

    async def get_lease(self, sandbox_id: str) -> Lease | None:
        row = await self._client.run(_GET_LEASE, (), [sandbox_id])
        return None if row is None else _lease_of(row)

    async def expired_leases(self, limit: int = 100) -> list[Lease]:
        sent = time.monotonic()
        now_ms, offset_ms, rows = await self._client.run(_EXPIRED, (), [limit])
        if await self._clock_stepped(sent, float(now_ms) / 1000, offset_ms):
            return []  # by the wrong clock; the next sweep has the right one
        return [_lease_of(row) for row in rows]

    async def _clock_stepped(self, sent: float, redis_now: float, offset_ms: str) -> bool:
        """True where Redis' clock was set, or its machine slept, since the last call: leases then go on where they
        were. Whichever manager sees the step first corrects it for all."""
        here = time.monotonic()
        if here - sent > _CLOCK_TRUST_SEC:
            self._clock = None
            return False
        before, self._clock = self._clock, (redis_now, here)
        if before is None:
            return False
        step_sec = (redis_now - before[0]) - (here - before[1])
        if abs(step_sec) <= _CLOCK_STEP_SEC:
            return False
        log.warning("store_clock_stepped", extra={"step_sec": round(step_sec, 1)})
        self._clock = None
        await self._client.run(_SHIFT_CLOCK, (), [offset_ms, _ms(step_sec)])
        return True

    async def drop_holder(self, holder: str) -> None:
        while await self._client.run(_DROP_HOLDER, (), [holder, _BATCH]):
            pass

    # ── idempotency ─────────────────────────────────────────────────────────────────────────────────────────────

    async def mark(
        self, owner: Owner, scope: str, key: str, fingerprint: str, pod: str, keep_sec: float
    ) -> IdempotencyMark:
        wanted = msgspec.json.encode((fingerprint, pod)).decode()
        fresh, kept = await self._client.run(_MARK, [keys.mark_key(owner, scope, key)], [wanted, _ms(keep_sec)])
        was_fingerprint, was_pod = _decoded(kept, tuple[str, str])
        return IdempotencyMark(was_fingerprint, was_pod, fresh == 1)

    async def mark_many(self, wanted: Sequence[MarkWanted], keep_sec: float) -> list[IdempotencyMark]:
        marks: list[IdempotencyMark] = []
        for batch in _batches(wanted):
            answers = await self._client.run(
                _MARK_MANY,
                [keys.mark_key(one.owner, one.scope, one.key) for one in batch],
                [_ms(keep_sec), *(msgspec.json.encode((one.fingerprint, one.pod)).decode() for one in batch)],
            )
            for fresh, kept in zip(answers[::2], answers[1::2], strict=True):
                was_fingerprint, was_pod = _decoded(kept, tuple[str, str])
                marks.append(IdempotencyMark(was_fingerprint, was_pod, fresh == 1))
        return marks

    # ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def cache_key(self, record: KeyRecord) -> None:
        await self._client.command("SET", keys.api_key_key(record.key_id), _json(record), "NX")

    async def cached_key(self, key_id: str) -> KeyRecord | Literal["revoked"] | None:
        text = await self._client.command("GET", keys.api_key_key(key_id))
        if text is None:
            return None
        return "revoked" if text == _REVOKED else _decoded(text, KeyRecord)

    async def mark_key_revoked(self, key_id: str) -> None:
        await self._client.command("SET", keys.api_key_key(key_id), _REVOKED, "PX", _ms(_REVOKED_SEC))

    # ── audit events ────────────────────────────────────────────────────────────────────────────────────────────

    async def append_audit(self, events: Sequence[bytes], most: int) -> int:
        audit_keys = [keys.audit_key(), keys.audit_lost_key()]
        return int(await self._client.run(_APPEND_AUDIT, audit_keys, [most, *(event.decode() for event in events)]))

    async def read_audit(self, after: str = "", limit: int = 500) -> list[AuditEntry]:
        first = f"({after}" if after else "-"
        rows = await self._client.command("XRANGE", keys.audit_key(), first, "+", "COUNT", limit)
        return [_audit_entry(place, fields) for place, fields in rows]

    async def trim_audit(self, upto: str) -> None:
        milliseconds, _, number = upto.partition("-")
        await self._client.command("XTRIM", keys.audit_key(), "MINID", f"{milliseconds}-{int(number) + 1}")

    # ── cache ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def cache_get(self, keys: Sequence[str]) -> Sequence[str | None]:
        found: list[str | None] = await self._client.command("MGET", *keys) if keys else []
        return found

    async def cache_put(self, key: str, text: str, ttl_sec: float, *, only_absent: bool = False) -> None:
        await self._client.command("SET", key, text, "PX", _ms(ttl_sec), *(("NX",) if only_absent else ()))

    async def cache_drop(self, key: str) -> None:
        await self._client.command("DEL", key)

    # ── health and election ─────────────────────────────────────────────────────────────────────────────────────

    async def ping(self) -> float:
        started = time.monotonic()
        await self._client.command("PING")
        return time.monotonic() - started

    async def warnings(self) -> list[str]:
        facts: dict[str, Any] = {
            **await self._client.command("INFO", "persistence"),
            **await self._client.command("INFO", "memory"),
        }
        found = []
        if str(facts.get("aof_enabled")) != "1":
            found.append(
                "Redis has `appendonly no`: what it acknowledged is lost when it crashes. Set `appendonly yes`"
            )
        elif facts.get("aof_last_write_status", "ok") != "ok":
            found.append("Redis failed to write its append-only file: look at its disk and its log")
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            found.append(
                f"Redis has `maxmemory-policy {policy}`: it throws records away when memory runs short. "
                "Set `maxmemory-policy noeviction`"
            )
        return found

    async def lead(self, name: str, holder: str, seconds: float) -> bool:
        return bool(await self._client.run(_LEAD, [keys.leader_key(name)], [holder, _ms(seconds)]))

    async def meet(self, holder: str, seconds: float) -> list[str]:
        there = await self._client.run(_MEET, [keys.managers_key()], [holder, _ms(seconds)])
        return [str(name) for name in there]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _load(load: Load, unsaid: int) -> tuple[int, int]:
    """Thousandths of a core, and bytes."""
    cpu = unsaid if load.cpu is None else round(load.cpu * 1000)
    return cpu, unsaid if load.memory_bytes is None else load.memory_bytes


def _over_quota(owner: Owner, answer: Sequence[str]) -> QuotaExceeded:
    """From a script's {'quota', what, held, limit, ms until something may come free or -1}."""
    what, soonest_ms = answer[1], float(answer[4])
    held, limit = (int(text) / 1000 if what == "cpu" else int(text) for text in answer[2:4])
    free_in_sec = None if soonest_ms < 0 else round(soonest_ms / 1000, 1)
    used = {"slots": "sandboxes", "cpu": "cores", "memory": "bytes of memory"}[what]
    least, most = _RETRY_QUOTA_SEC
    return QuotaExceeded(
        f"project {str(owner)!r} holds {held} of {limit} {used}; end a sandbox or wait for one to end",
        retry_after_sec=min(most, max(least, most if free_in_sec is None else free_in_sec)),
        what=what,
        held=held,
        limit=limit,
        free_in_sec=free_in_sec,
    )


def _terms_ms(terms: LeaseTerms) -> tuple[int, int, int]:
    return _ms(terms.active_sec), _ms(terms.idle_sec), _ms(terms.max_sec)


def _batches(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[first : first + _BATCH] for first in range(0, len(items), _BATCH)]


def _binding_keys(binding: Binding) -> list[str]:
    return [keys.binding_key(binding.owner, binding.task_id), keys.slots_key(binding.owner)]


def _json(record: msgspec.Struct | None) -> str:
    return "" if record is None else msgspec.json.encode(record).decode()


def _decoded(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as why:
        raise _unreadable(why) from why


def _binding_of(hash_: Mapping[str, str] | Sequence[str]) -> Binding:
    """From a hash's fields, as a mapping or flat."""
    fields = dict(hash_) if isinstance(hash_, Mapping) else dict(zip(hash_[::2], hash_[1::2], strict=True))
    try:
        return Binding(
            owner=Owner(fields["tenant"], fields["project"]),
            task_id=fields["task_id"],
            sandbox_id=fields["sandbox_id"],
            state=BindingState(fields["state"]),
            token=fields["token"],
            profile=fields["profile"],
            target=fields["target"],
            generation=int(fields["generation"]),
            pod=fields["pod"],
            address=fields["address"],
            created_at=float(fields["created_at"]),
            previous=_decoded(fields["previous"], PodEnded) if fields["previous"] else None,
            ended=_decoded(fields["ended"], PodEnded) if fields["ended"] else None,
            terms=_decoded(fields["terms"], LeaseTerms) if fields.get("terms") else None,
        )
    except (KeyError, ValueError) as why:
        raise _unreadable(why) from why


def _lease_of(row: Sequence[str]) -> Lease:
    """From a script's {id, until, hard, operations, now, active, idle, max}, times in ms."""
    try:
        until, hard_end, operations, now, active, idle, maximum = map(float, row[1:])
    except ValueError as why:
        raise _unreadable(why) from why
    return Lease(
        sandbox_id=row[0],
        until=until / 1000,
        hard_end=hard_end / 1000,
        operations=int(operations),
        now=now / 1000,
        terms=LeaseTerms(active / 1000, idle / 1000, maximum / 1000),
    )


def _audit_entry(place: str, fields: Mapping[str, str]) -> AuditEntry:
    if "gap" in fields:
        return AuditEntry(place, b"", int(fields["gap"]))
    return AuditEntry(place, fields.get("event", "").encode())


def _unreadable(why: Exception) -> StoreUnavailable:
    log.error("store_unreadable", extra={"why": repr(why)[:500]})
    return StoreUnavailable("Redis holds a record that cannot be read; the operator has to look at it")
