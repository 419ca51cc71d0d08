"""API keys and who they stand for: made, checked, listed, revoked. The tenant comes from the key, never a claim."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from manager.errors import (
    Forbidden,
    InvalidRequest,
    NotFound,
    RateLimited,
    ScopeRefused,
    ScopeRequired,
    Unauthenticated,
)
from manager.model import Owner, Principal, Role, new_id
from manager.services.audit import AuditLog, NoAudit
from manager.services.keyring import KeyRing
from manager.store.base import KeyRecord, Store
from manager.store.objects import Objects

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")  # of a tenant or project: fits labels, paths and keys
MEMBER: Final = re.compile(r"[^@\s]+@[^@\s]+\Z")  # an e-mail address
MEMBER_MAX_BYTES: Final = 254
KEY_NAME_MAX_BYTES: Final = 200

# `sk_<id>_<secret><checksum>`: 26, 32 (160 bits of 5 each) and 7 characters. The fixed shape is what secret scanners
# look for, and a mistyped key is refused without asking the store.
KEY_ID: Final = re.compile(r"[a-z2-7]{26}\Z")
KEY_SHAPE: Final = re.compile(r"sk_([a-z2-7]{26})_([a-z2-7]{32})([a-z2-7]{7})\Z")
_SECRET_CHARS: Final = 32
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"

VERIFIED_SEC: Final = 2.0  # a key is believed so long without asking the store: a revocation works within that
VERIFIED_MAX: Final = 10_000
FAILURES_MAX: Final = 20  # of one address in FAILURES_SEC; the next attempts are refused unseen
FAILURES_SEC: Final = 60.0
ADDRESSES_MAX: Final = 10_000
_NO_HASH: Final = "0" * 64


class Tenants:
    """`pepper`: what secrets are hashed with; the same for every manager of one store, and nowhere in it."""

    def __init__(
        self,
        store: Store,
        objects: Objects,
        pepper: bytes,
        *,
        audit: AuditLog | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(pepper) < 16:
            raise ValueError("the pepper of API keys needs at least 16 bytes")
        self._ring = KeyRing(store, objects, monotonic=monotonic)
        self._pepper = pepper
        self._audit: AuditLog = NoAudit() if audit is None else audit
        self._clock = clock
        self._verified = _Verified(monotonic)
        self._failures = _Failures(monotonic)
        self._lookups: dict[bytes, asyncio.Task[KeyRecord | None]] = {}  # at most one for each request under way

    # ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_key(
        self,
        owner: Owner,
        role: Role,
        name: str,
        member: str | None = None,
        expires_at: float | None = None,
        *,
        by: Principal | str = "operator",
    ) -> tuple[str, KeyRecord]:
        """The key's text, which nobody can show again, and what is kept of it. `expires_at`: seconds since the epoch;
        `by`: for the audit log.

        Raises InvalidRequest."""
        check_owner(owner)
        if _bytes_of(name) > KEY_NAME_MAX_BYTES or not name.isprintable():
            raise InvalidRequest(f"a key's name has at most {KEY_NAME_MAX_BYTES} bytes of printable text", field="name")
        if member is not None:
            check_member(member)
        now = self._clock()
        if expires_at is not None and not now < expires_at < 1e11:
            raise InvalidRequest("a key can only expire in the future", field="expires_at")
        key_id = new_id()
        secret = "".join(_ALPHABET[byte & 31] for byte in secrets.token_bytes(_SECRET_CHARS))
        record = KeyRecord(
            key_id=key_id,
            secret_hash=self._hash(secret),
            tenant=owner.tenant,
            project=owner.project,
            role=role,
            member=member,
            name=name,
            created_at=now,
            expires_at=expires_at,
        )
        await self._ring.add(record)
        await self._audit.record(
            "key.created", key_id, owner=owner, by=by, role_given=role.value, member_given=member, name=name
        )
        return f"sk_{key_id}_{secret}{_checksum(key_id, secret)}", record

    async def issue_key(
        self, principal: Principal, role: Role, name: str, member: str | None = None, expires_at: float | None = None
    ) -> tuple[str, KeyRecord]:
        """`create_key` for the principal's own project. Raises Forbidden for a member, and for a role above its own."""
        _refuse_members(principal)
        if role is Role.PLATFORM and principal.role is not Role.PLATFORM:
            raise Forbidden("only a platform key can make a platform key")
        return await self.create_key(principal.owner, role, name, member, expires_at, by=principal)

    async def list_keys(self, principal: Principal) -> Sequence[KeyRecord]:
        """The keys of the principal's project. Raises Forbidden for a member."""
        _refuse_members(principal)
        kept = await self._ring.of(principal.owner)
        return [record for record in kept if _may_see(principal, record)]

    async def revoke_key(self, principal: Principal, key_id: str) -> None:
        """The key is refused from now on here, and by every other manager within VERIFIED_SEC.

        Raises Forbidden for a member, NotFound where the project has no such key."""
        _refuse_members(principal)
        if KEY_ID.match(key_id) is None:
            raise NotFound("no such key")
        if await self._ring.remove(principal.owner, key_id, lambda record: _may_see(principal, record)) is None:
            raise NotFound("no such key")
        self._verified.forget_key(key_id)
        await self._audit.record("key.revoked", key_id, owner=principal.owner, by=principal)

    async def every_key(self) -> Sequence[KeyRecord]:
        """Everybody's, for operators."""
        return await self._ring.every()

    async def revoke_any(self, key_id: str, *, by: str = "operator") -> bool:
        """The same for an operator, whosever key it is; whether there was one."""
        record = await self._ring.find(key_id) if KEY_ID.match(key_id) else None
        if record is None:
            return False
        owner = Owner(record.tenant, record.project)
        await self._ring.remove(owner, key_id)
        self._verified.forget_key(key_id)
        await self._audit.record("key.revoked", key_id, owner=owner, by=by)
        return True

    async def close(self) -> None:
        await self._ring.close()

    # ── who is calling ──────────────────────────────────────────────────────────────────────────────────────────

    async def authenticate(self, key_text: str | None, address: str = "") -> KeyRecord:
        """The record of a key that is valid now.

        Raises Unauthenticated; RateLimited where `address` (the caller's, "" for none) has failed too often lately
        and this key was not seen valid before; StoreUnavailable."""
        key_text = key_text or ""
        digest = hashlib.sha256(key_text.encode("utf-8", "surrogatepass")).digest()
        record = self._verified.get(digest)
        if record is None:
            if not self._verified.knew(digest):  # a key that was good shares an address with who guesses, and works on
                self._failures.check(address)
            shape = KEY_SHAPE.match(key_text)
            if shape is not None and hmac.compare_digest(shape[3], _checksum(shape[1], shape[2])):
                record = await self._looked_up_once(digest, shape[1], shape[2])
        if record is not None and (record.expires_at is None or self._clock() < record.expires_at):
            return record
        self._verified.forget_text(digest)
        self._failures.note(address)
        raise Unauthenticated("the X-Api-Key header holds no valid key")

    @staticmethod
    def principal(
        record: KeyRecord,
        tenant_header: str | None,
        project_header: str | None,
        member_header: str | None,
        address: str = "",
    ) -> Principal:
        """Who the key stands for in this request; the headers are None where they were not sent. `address`: where the
        request came from.

        A platform key has to say for which project it acts (ScopeRequired, InvalidRequest). Any other has its own, and
        headers are refused even where they name just that (ScopeRefused)."""
        if record.role is not Role.PLATFORM:
            if not (tenant_header is None and project_header is None and member_header is None):
                raise ScopeRefused(
                    "only a platform key may send X-Sandbox-Tenant-Id, -Project-Id or -Member: leave them out"
                )
            return Principal(Owner(record.tenant, record.project), record.role, record.key_id, record.member, address)
        if not tenant_header or not project_header:
            raise ScopeRequired(
                "a platform key acts for a project: say which in X-Sandbox-Tenant-Id and X-Sandbox-Project-Id"
            )
        owner = check_owner(Owner(tenant_header, project_header))
        member = check_member(member_header) if member_header else record.member
        return Principal(owner, record.role, record.key_id, member, address)

    async def _looked_up_once(self, digest: bytes, key_id: str, secret: str) -> KeyRecord | None:
        """A thousand requests at once with one key ask the store once."""
        lookup = self._lookups.get(digest)
        if lookup is None:
            lookup = asyncio.create_task(self._looked_up(digest, key_id, secret), name="api-key-lookup")
            self._lookups[digest] = lookup
            lookup.add_done_callback(lambda done: self._looked_up_done(digest, done))
        return await asyncio.shield(lookup)

    def _looked_up_done(self, digest: bytes, lookup: asyncio.Task[KeyRecord | None]) -> None:
        del self._lookups[digest]
        if not lookup.cancelled():
            lookup.exception()  # seen here, in case that all who waited have hung up

    async def _looked_up(self, digest: bytes, key_id: str, secret: str) -> KeyRecord | None:
        record = await self._ring.get(key_id)
        # The same work where there is no such key: how long it takes does not tell which ids exist.
        expected = _NO_HASH if record is None else record.secret_hash
        if not hmac.compare_digest(self._hash(secret), expected) or record is None:
            return None
        self._verified.put(digest, record)
        return record

    def _hash(self, secret: str) -> str:
        return hmac.new(self._pepper, secret.encode("ascii"), hashlib.sha256).hexdigest()


def check_owner(owner: Owner) -> Owner:
    """`owner` itself. Raises InvalidRequest where a name could not be a label, a path and a key."""
    for field, name in (("tenant", owner.tenant), ("project", owner.project)):
        if NAME.match(name) is None:
            raise InvalidRequest(
                f"a {field} is named by 1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first",
                field=field,
            )
    return owner


def check_member(member: str) -> str:
    """`member` itself. Raises InvalidRequest."""
    if MEMBER.match(member) is None or not member.isprintable() or _bytes_of(member) > MEMBER_MAX_BYTES:
        raise InvalidRequest(f"a member is an e-mail address of at most {MEMBER_MAX_BYTES} bytes", field="member")
    return member


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _refuse_members(principal: Principal) -> None:
    if principal.role is Role.MEMBER:
        raise Forbidden("a project's keys are for its admins: use an admin key")


def _may_see(principal: Principal, record: KeyRecord) -> bool:
    """What an admin may not see is not there for it."""
    mine = Owner(record.tenant, record.project) == principal.owner
    return mine and (record.role is not Role.PLATFORM or principal.role is Role.PLATFORM)


def _checksum(key_id: str, secret: str) -> str:
    """CRC-32 in 7 characters. It protects nothing; it tells a key from a typo or a random string."""
    value = zlib.crc32(f"{key_id}_{secret}".encode("ascii"))
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(30, -1, -5))


class _Verified:
    """Keys that were valid lately, by the SHA-256 of their text, never the text. Bounded: the longest unused goes."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._known: OrderedDict[bytes, tuple[float, KeyRecord]] = OrderedDict()

    def get(self, digest: bytes) -> KeyRecord | None:
        """The record, if it is so fresh that the store need not be asked."""
        entry = self._known.get(digest)
        if entry is None or self._monotonic() - entry[0] > VERIFIED_SEC:
            return None
        return entry[1]

    def knew(self, digest: bytes) -> bool:
        """Whether the key was valid when the store was last asked."""
        return digest in self._known

    def put(self, digest: bytes, record: KeyRecord) -> None:
        self._known[digest] = (self._monotonic(), record)
        self._known.move_to_end(digest)
        while len(self._known) > VERIFIED_MAX:
            self._known.popitem(last=False)

    def forget_text(self, digest: bytes) -> None:
        self._known.pop(digest, None)

    def forget_key(self, key_id: str) -> None:
        for digest in [digest for digest, (_, record) in self._known.items() if record.key_id == key_id]:
            del self._known[digest]


class _Failures:
    """When each address failed lately. Bounded: the address whose last failure is longest ago is forgotten."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Raises RateLimited where the address has used up its failures."""
        times = self._times.get(_who(address))
        if times is None or len(times) < FAILURES_MAX:
            return
        wait_sec = times[0] + FAILURES_SEC - self._monotonic()
        if wait_sec > 0:
            raise RateLimited("too many invalid keys from this address; wait a moment", retry_after_sec=wait_sec)

    def note(self, address: str) -> None:
        if not address:
            return
        who = _who(address)
        times = self._times.setdefault(who, deque(maxlen=FAILURES_MAX))
        times.append(self._monotonic())
        self._times.move_to_end(who)
        while len(self._times) > ADDRESSES_MAX:
            self._times.popitem(last=False)


def _who(address: str) -> str:
    """An IPv6 address stands for its /64: one host has all of it to choose from."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
