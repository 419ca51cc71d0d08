"""Keys and principals, without a store: shapes, scopes, names and the limits on guessing."""

from __future__ import annotations

import asyncio
import re
from typing import Literal, cast

import pytest

from manager.errors import (
    Forbidden,
    InvalidRequest,
    NotFound,
    RateLimited,
    ScopeRefused,
    ScopeRequired,
    StoreUnavailable,
    Unauthenticated,
)
from manager.model import Owner, Principal, Role
from manager.services import tenants
from manager.services.tenants import KEY_SHAPE, Tenants, check_owner
from manager.store.base import KeyRecord, Store
from tests.support.memory_objects import memory_objects

ACME = Owner("acme", "web")
PEPPER = b"p" * 32


class KeyShelf:
    """The calls of a Store that are about keys, in a dict."""

    def __init__(self) -> None:
        self.kept: dict[str, KeyRecord] = {}
        self.revoked: set[str] = set()
        self.asked = 0
        self.broken = False

    async def cache_key(self, record: KeyRecord) -> None:
        if record.key_id not in self.revoked:
            self.kept.setdefault(record.key_id, record)

    async def cached_key(self, key_id: str) -> KeyRecord | Literal["revoked"] | None:
        self.asked += 1
        await asyncio.sleep(0)
        if self.broken:
            raise StoreUnavailable("away")
        return "revoked" if key_id in self.revoked else self.kept.get(key_id)

    async def mark_key_revoked(self, key_id: str) -> None:
        self.kept.pop(key_id, None)
        self.revoked.add(key_id)


class Hands:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Setting:
    def __init__(self) -> None:
        self.shelf = KeyShelf()
        self.objects = memory_objects()
        self.hands = Hands()
        self.tenants = Tenants(cast(Store, self.shelf), self.objects, PEPPER, clock=self.hands, monotonic=self.hands)


@pytest.fixture
def at() -> Setting:
    return Setting()


def acting(role: Role, owner: Owner = ACME) -> Principal:
    return Principal(owner, role, "k")


# ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_key_has_a_shape_that_scanners_find_and_160_random_bits(at: Setting) -> None:
    text, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    shape = KEY_SHAPE.match(text)
    assert shape is not None
    assert shape[1] == record.key_id
    assert len(shape[2]) * 5 >= 160
    assert shape[2] not in repr(record)


async def test_what_is_kept_of_a_key_does_not_open_with_another_pepper(at: Setting) -> None:
    text, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    assert await at.tenants.authenticate(text) == record
    other = Tenants(cast(Store, at.shelf), at.objects, b"q" * 32)
    with pytest.raises(Unauthenticated):
        await other.authenticate(text)


async def test_a_mistyped_key_is_refused_without_asking_the_store(at: Setting) -> None:
    text, _ = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    for place in range(len(text)):
        wrong = text[:place] + ("a" if text[place] != "a" else "b") + text[place + 1 :]
        with pytest.raises(Unauthenticated):
            await at.tenants.authenticate(wrong)
    assert at.shelf.asked == 0


@pytest.mark.parametrize("text", [None, "", "sk_", "sk__", "x" * 100_000, "sk_\0_\0", "\ud800", "sk_é_é", "ſk_a_b"])
async def test_nonsense_is_no_key(at: Setting, text: str | None) -> None:
    with pytest.raises(Unauthenticated):
        await at.tenants.authenticate(text)
    assert at.shelf.asked == 0


async def test_an_unknown_id_and_a_wrong_secret_get_one_answer(at: Setting) -> None:
    text, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    foreign, other = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    shape = KEY_SHAPE.match(foreign)
    assert shape is not None
    wrong_secret = f"sk_{record.key_id}_{shape[2]}{tenants._checksum(record.key_id, shape[2])}"
    assert await at.tenants.revoke_any(other.key_id)
    answers = set()
    for key in (wrong_secret, foreign):
        with pytest.raises(Unauthenticated) as refusal:
            await at.tenants.authenticate(key)
        answers.add(refusal.value.message)
    assert at.shelf.asked == 2
    assert len(answers) == 1
    assert await at.tenants.authenticate(text) == record


async def test_a_key_ends_at_its_expiry_even_while_it_is_believed(at: Setting) -> None:
    text, _ = await at.tenants.create_key(ACME, Role.MEMBER, "ci", expires_at=at.hands.now + 1)
    await at.tenants.authenticate(text)
    at.hands.now += 1
    with pytest.raises(Unauthenticated):
        await at.tenants.authenticate(text)


async def test_a_revocation_elsewhere_works_within_five_seconds(at: Setting) -> None:
    text, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    await at.tenants.authenticate(text)
    elsewhere = Tenants(cast(Store, at.shelf), at.objects, PEPPER)
    assert await elsewhere.revoke_any(record.key_id)
    at.hands.now += 5
    with pytest.raises(Unauthenticated):
        await at.tenants.authenticate(text)


async def test_a_revocation_here_works_at_once(at: Setting) -> None:
    text, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    await at.tenants.authenticate(text)
    await at.tenants.revoke_key(acting(Role.ADMIN), record.key_id)
    with pytest.raises(Unauthenticated):
        await at.tenants.authenticate(text)


async def test_a_thousand_requests_with_one_key_ask_the_store_once(at: Setting) -> None:
    text, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    answers = await asyncio.gather(*(at.tenants.authenticate(text) for _ in range(1000)))
    assert answers == [record] * 1000
    assert at.shelf.asked == 1


async def test_who_hangs_up_takes_nobody_elses_answer_away(at: Setting) -> None:
    text, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    first = asyncio.create_task(at.tenants.authenticate(text))
    second = asyncio.create_task(at.tenants.authenticate(text))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == record
    assert first.cancelled()


async def test_a_store_that_is_away_is_no_wrong_key(at: Setting) -> None:
    text, _ = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    at.shelf.broken = True
    for _ in range(tenants.FAILURES_MAX + 1):
        with pytest.raises(StoreUnavailable):
            await at.tenants.authenticate(text, "192.0.2.1")


async def test_the_memory_of_valid_keys_is_bounded_and_holds_no_text(
    at: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "VERIFIED_MAX", 5)
    texts = [(await at.tenants.create_key(ACME, Role.MEMBER, "ci"))[0] for _ in range(8)]
    for text in texts:
        await at.tenants.authenticate(text)
    known = at.tenants._verified._known
    assert len(known) == 5
    assert not any(text in repr(known) or text.encode() in known for text in texts)


# ── whom a key stands for ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", [Role.MEMBER, Role.ADMIN])
async def test_a_projects_key_has_its_own_scope_and_may_name_none(at: Setting, role: Role) -> None:
    _, record = await at.tenants.create_key(ACME, role, "ci", member="ann@example.org")
    assert at.tenants.principal(record, None, None, None) == Principal(ACME, role, record.key_id, "ann@example.org")
    for headers in [
        ("acme", "web", None), ("acme", None, None), (None, "web", None), (None, None, "ann@example.org"),
        ("other", "web", None), ("", None, None),
    ]:  # fmt: skip
        with pytest.raises(ScopeRefused):
            at.tenants.principal(record, *headers)


async def test_a_platform_key_has_to_say_for_whom_it_acts(at: Setting) -> None:
    _, record = await at.tenants.create_key(Owner("platform", "platform"), Role.PLATFORM, "ops")
    for tenant, project in [(None, None), ("acme", None), (None, "web"), ("", "web"), ("acme", "")]:
        with pytest.raises(ScopeRequired):
            at.tenants.principal(record, tenant, project, None)
    assert at.tenants.principal(record, "acme", "web", "bob@example.org") == Principal(
        ACME, Role.PLATFORM, record.key_id, "bob@example.org"
    )
    for bad in ["a/b", "a:b", "-a", "a" * 64, "ä", "a b", "a\n", "\udc80"]:
        with pytest.raises(InvalidRequest):
            at.tenants.principal(record, bad, "web", None)
        with pytest.raises(InvalidRequest):
            at.tenants.principal(record, "acme", bad, None)


def test_names_of_tenants_and_projects_fit_labels_paths_and_keys() -> None:
    for good in ["a", "A1", "0", "a.b_c-d", "x" * 63]:
        assert check_owner(Owner(good, good)) == Owner(good, good)
    for bad in ["", ".", "..", ".a", "_a", "a/b", "a:b", "a%b", "x" * 64, "a\n", "a\0", "é"]:
        with pytest.raises(InvalidRequest) as refusal:
            check_owner(Owner("a", bad))
        assert refusal.value.details == {"field": "project"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "n" * 201},
        {"name": "a\nb"},
        {"name": "\ud800"},
        {"member": ""},
        {"member": "a b"},
        {"member": "ann"},
        {"member": "@example.org"},
        {"member": "ann@"},
        {"member": "ann@a@b"},
        {"member": "a" * 300},
        {"expires_at": 5.0},
        {"expires_at": float("inf")},
        {"expires_at": float("nan")},
    ],
)
async def test_a_bad_wish_makes_no_key(at: Setting, wrong: dict[str, str | float]) -> None:
    wish: dict[str, object] = {"name": "ci", **wrong}
    with pytest.raises(InvalidRequest):
        await at.tenants.create_key(ACME, Role.MEMBER, **wish)  # type: ignore[arg-type]
    assert at.shelf.kept == {}


# ── managing keys ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_member_manages_no_keys(at: Setting) -> None:
    _, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    member = acting(Role.MEMBER)
    with pytest.raises(Forbidden):
        await at.tenants.list_keys(member)
    with pytest.raises(Forbidden):
        await at.tenants.revoke_key(member, record.key_id)
    with pytest.raises(Forbidden):
        await at.tenants.issue_key(member, Role.MEMBER, "mine")
    assert list(at.shelf.kept) == [record.key_id]


async def test_an_admin_sees_and_ends_the_keys_of_its_project_only(at: Setting) -> None:
    _, mine = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    _, foreign = await at.tenants.create_key(Owner("acme", "shop"), Role.MEMBER, "ci")
    _, platform = await at.tenants.create_key(ACME, Role.PLATFORM, "ops")
    admin = acting(Role.ADMIN)
    assert list(await at.tenants.list_keys(admin)) == [mine]
    refusals = set()
    for key_id in (foreign.key_id, platform.key_id, "a" * 26, "../" * 9, "x" * 100_000):
        with pytest.raises(NotFound) as refusal:
            await at.tenants.revoke_key(admin, key_id)
        refusals.add(refusal.value.message)
    assert len(refusals) == 1
    await at.tenants.revoke_key(admin, mine.key_id)
    assert set(at.shelf.kept) == {foreign.key_id, platform.key_id}
    assert list(await at.tenants.list_keys(acting(Role.PLATFORM))) == [platform]


async def test_nobody_makes_a_key_above_its_own(at: Setting) -> None:
    with pytest.raises(Forbidden):
        await at.tenants.issue_key(acting(Role.ADMIN), Role.PLATFORM, "up")
    assert at.shelf.kept == {}
    _, record = await at.tenants.issue_key(acting(Role.ADMIN), Role.ADMIN, "next")
    assert (record.tenant, record.project, record.role) == ("acme", "web", Role.ADMIN)


# ── guessing ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def failing(at: Setting, address: str, times: int) -> None:
    for _ in range(times):
        with pytest.raises(Unauthenticated):
            await at.tenants.authenticate("wrong", address)


async def test_an_address_that_fails_too_often_waits(at: Setting) -> None:
    await failing(at, "192.0.2.1", tenants.FAILURES_MAX)
    with pytest.raises(RateLimited) as refusal:
        await at.tenants.authenticate("wrong", "192.0.2.1")
    assert refusal.value.retry_after_sec == pytest.approx(tenants.FAILURES_SEC)
    at.hands.now += tenants.FAILURES_SEC
    await failing(at, "192.0.2.1", 1)


async def test_others_work_on_while_one_address_guesses(at: Setting) -> None:
    text, record = await at.tenants.create_key(ACME, Role.MEMBER, "ci")
    await at.tenants.authenticate(text, "192.0.2.1")
    await failing(at, "192.0.2.1", tenants.FAILURES_MAX)
    assert await at.tenants.authenticate(text, "192.0.2.2") == record
    at.hands.now += tenants.VERIFIED_SEC + 1
    # From the very address too: it may be a proxy's.
    assert await at.tenants.authenticate(text, "192.0.2.1") == record
    fresh, _ = await at.tenants.create_key(ACME, Role.MEMBER, "new")
    with pytest.raises(RateLimited):
        await at.tenants.authenticate(fresh, "192.0.2.1")


async def test_a_host_cannot_guess_on_with_its_other_ipv6_addresses(at: Setting) -> None:
    for last in range(tenants.FAILURES_MAX):
        await failing(at, f"2001:db8::{last:x}", 1)
    with pytest.raises(RateLimited):
        await at.tenants.authenticate("wrong", "2001:db8::ffff")
    await failing(at, "2001:db8:0:1::1", 1)


async def test_the_memory_of_failures_is_bounded(at: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "ADDRESSES_MAX", 100)
    for number in range(500):
        await failing(at, f"198.51.{number // 250}.{number % 250}", 1)
    assert len(at.tenants._failures._times) == 100


def test_a_short_pepper_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("at least 16 bytes")):
        Tenants(cast(Store, KeyShelf()), memory_objects(), b"short")
