"""API keys outlive Redis, and a revoked one does not come back by any way. (S22, S23, F17)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from manager.errors import StoreUnavailable
from manager.model import Owner, Role, new_id
from manager.services.keyring import COMPARE_SEC, KeyRing
from manager.store.base import KeyRecord
from manager.store.cloud import CloudObjects
from tests.support.memory_objects import memory_objects
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME, SHOP, until


class Hands:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(owner: Owner = ACME, **fields: Any) -> KeyRecord:
    given: dict[str, Any] = {"key_id": new_id(), "secret_hash": "0" * 64, "role": Role.MEMBER, "created_at": 1.0}
    return KeyRecord(tenant=owner.tenant, project=owner.project, **(given | fields))


class At:
    def __init__(self, store: MemoryStore, objects: CloudObjects) -> None:
        self.store, self.objects, self.hands = store, objects, Hands()
        self.ring = KeyRing(store, objects, monotonic=self.hands)
        self.other = KeyRing(store, objects, monotonic=self.hands)  # another manager's


@pytest.fixture
async def at() -> AsyncIterator[At]:
    made = At(MemoryStore(), memory_objects())
    yield made
    await made.ring.close()
    await made.other.close()
    await made.objects.close()


async def test_a_key_works_on_after_redis_was_wiped(at: At) -> None:
    key = record()
    await at.ring.add(key)
    at.store.wipe_keys()
    assert await at.other.get(key.key_id) == key
    at.store.calls.clear()
    assert await at.ring.get(key.key_id) == key
    assert at.store.calls == ["cached_key"]  # Redis has its copy again


async def test_a_key_works_on_while_object_storage_is_away(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    key = record()
    await at.ring.add(key)

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(at.objects, "get", away)
    at.hands.now += 10 * COMPARE_SEC
    assert await at.other.get(key.key_id) == key
    with pytest.raises(StoreUnavailable):
        await at.ring.get("a" * 26)  # not known whether there is such a key
    with pytest.raises(StoreUnavailable):
        await at.ring.remove(ACME, key.key_id)


async def test_a_revocation_is_everywhere_when_it_is_acknowledged(at: At) -> None:
    key = record()
    await at.ring.add(key)
    assert await at.other.get(key.key_id) == key
    assert await at.ring.remove(ACME, key.key_id) == key
    for ring in (at.ring, at.other):
        assert await ring.get(key.key_id) is None
        assert await ring.of(ACME) == []
    at.store.wipe_keys()
    for ring in (at.ring, at.other):
        assert await ring.get(key.key_id) is None
    assert await at.ring.remove(ACME, key.key_id) is None


async def test_a_lookup_under_way_does_not_bring_a_revoked_key_back(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step of the lookup another manager revokes."""
    for moment in range(1, 4):
        key = record()
        await at.ring.add(key)
        at.store.wipe_keys()
        steps = 0

        async def revoke(call: str, moment: int = moment, key: KeyRecord = key) -> None:
            nonlocal steps
            if call in ("cached_key", "cache_key"):
                steps += 1
                if steps == moment:
                    at.store.hook = None
                    assert await at.other.remove(ACME, key.key_id) == key

        at.store.hook = revoke
        await at.ring.get(key.key_id)
        at.store.hook = None
        if steps < moment:
            assert await at.other.remove(ACME, key.key_id) == key
        assert await at.ring.get(key.key_id) is None
        assert await at.other.get(key.key_id) is None


async def test_a_revocation_that_redis_lost_takes_effect_by_itself(at: At) -> None:
    """Redis failed over without its last second: the copy is there again, the mark is not."""
    key = record()
    await at.ring.add(key)
    await at.ring.remove(ACME, key.key_id)
    at.store.wipe_keys()
    await at.store.cache_key(key)
    at.hands.now += COMPARE_SEC
    assert await at.other.get(key.key_id) == key

    async def refused() -> bool:
        return await at.other.get(key.key_id) is None

    await until(refused, 60)


async def test_a_crash_in_the_middle_of_a_revocation_is_mended_by_repeating_it(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = record()
    await at.ring.add(key)
    at.store.down = True
    with pytest.raises(StoreUnavailable):  # the truth is gone, Redis has not heard of it
        await at.ring.remove(ACME, key.key_id)
    at.store.down = False
    assert [one.key_id for one in await at.ring.of(ACME)] == [key.key_id]
    assert await at.ring.remove(ACME, key.key_id) == key
    assert await at.ring.get(key.key_id) is None
    assert await at.ring.of(ACME) == []


async def test_lists_hold_an_owners_keys_oldest_first_and_nobody_elses(at: At) -> None:
    first, second, foreign = record(created_at=1.0), record(created_at=2.0), record(SHOP, created_at=0.5)
    for key in (second, foreign, first):
        await at.ring.add(key)
    assert await at.ring.of(ACME) == [first, second]
    assert await at.ring.of(SHOP) == [foreign]
    assert await at.ring.every() == [foreign, first, second]
    assert await at.ring.remove(ACME, foreign.key_id) is None
    assert await at.ring.remove(ACME, second.key_id, lambda key: False) is None
    assert await at.ring.every() == [foreign, first, second]


async def test_one_key_used_by_many_is_compared_with_the_truth_once_in_a_while(at: At) -> None:
    key = record()
    await at.ring.add(key)
    looked = 0
    real = at.objects.get

    async def counted(*words: Any, **options: Any) -> Any:
        nonlocal looked
        looked += 1
        return await real(*words, **options)

    at.objects.get = counted  # type: ignore[method-assign]
    at.hands.now += COMPARE_SEC
    await asyncio.gather(*(at.ring.get(key.key_id) for _ in range(200)))
    await until(lambda: looked == 1, 60)
    await asyncio.gather(*(at.ring.get(key.key_id) for _ in range(200)))
    assert looked == 1


async def test_object_storage_holds_no_usable_key(at: At) -> None:
    key = record(member="ann@example.org", name="ci")
    await at.ring.add(key)
    found = [info.key async for page in at.objects.list("") for info in page]
    assert len(found) == 2
    for name in found:
        kept = await at.objects.get(name, limit=10_000)
        assert kept is not None
        assert key.secret_hash.encode() in kept.data
