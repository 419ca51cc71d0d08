"""Audit events in object storage: each once, whatever dies in between, and read by their project alone. (S21, F24)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from manager.errors import InvalidRequest, StoreUnavailable
from manager.model import Owner
from manager.services.audit import Audit
from manager.services.audit_archive import AuditArchive
from manager.store.base import Store
from manager.store.cloud import CloudObjects
from tests.support.memory_objects import memory_objects
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME, SHOP, until

DAY_SEC = 86_400.0


class At:
    def __init__(self, store: Store, objects: CloudObjects) -> None:
        self.store, self.objects = store, objects
        self.audit = Audit(store)
        self.archive = AuditArchive(store, objects, "m1", keep_sec=30 * DAY_SEC, look_sec=0.01)
        self.other = AuditArchive(store, objects, "m2", keep_sec=30 * DAY_SEC)

    async def record(self, *subjects: str, owner: Owner = ACME) -> None:
        for subject in subjects:
            await self.audit.record("thing.changed", subject, owner=owner, by="t")

    async def read(self, owner: Owner = ACME, **terms: Any) -> list[str]:
        return [event.subject for event in (await self.other.page(owner, **terms)).events]

    async def objects_there(self) -> list[str]:
        return [info.key async for page in self.objects.list("") for info in page]


@pytest.fixture(params=["memory", "redis"])
async def at(request: pytest.FixtureRequest, store: Store) -> AsyncIterator[At]:
    made = At(MemoryStore() if request.param == "memory" else store, memory_objects())
    yield made
    await made.audit.close()
    await made.objects.close()


@pytest.fixture
async def here() -> AsyncIterator[At]:
    made = At(MemoryStore(), memory_objects())
    yield made
    await made.audit.close()
    await made.objects.close()


async def test_events_are_read_at_once_and_again_after_they_went_to_object_storage(at: At) -> None:
    await at.record("1", "2")
    await at.record("theirs", owner=SHOP)
    assert await at.read() == ["1", "2"]
    await at.archive.ship()
    assert await at.store.read_audit() == []
    assert await at.read() == ["1", "2"]
    await at.record("3")
    assert await at.read() == ["1", "2", "3"]
    assert await at.read(SHOP) == ["theirs"]
    assert await at.read(Owner("acme", "we")) == []
    names = await at.objects_there()
    assert len(names) == 2
    assert {name.rsplit("/", 2)[0] for name in names} == {"audit/acme/web", "audit/acme/shop"}


async def test_pages_follow_each_other_without_gaps_or_doubles(at: At) -> None:
    wanted = []
    for batch in range(5):
        for number in range(7):
            wanted.append(f"{batch}.{number}")
            await at.record(wanted[-1])
        if batch < 4:
            await at.archive.ship()
    found, after, pages = [], "", 0
    while True:
        page = await at.other.page(ACME, after=after, limit=3)
        found += [event.subject for event in page.events]
        pages += 1
        if page.next is None:
            break
        after = page.next
        if pages == 4:
            await at.archive.ship()  # what was read from the stream is in an object by the next page
    assert found == wanted
    assert pages == 12
    for wrong in ("x", "../..", "1-1", "9" * 13 + "-" + "x" * 10):
        with pytest.raises(InvalidRequest):
            await at.other.page(ACME, after=wrong)


async def test_a_crash_between_storing_and_trimming_doubles_and_loses_nothing(
    here: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.record("1", "2")
    await here.record("theirs", owner=SHOP)
    store = here.store
    assert isinstance(store, MemoryStore)

    async def dies(call: str) -> None:
        if call == "trim_audit":
            raise StoreUnavailable("killed")

    store.hook = dies
    with pytest.raises(StoreUnavailable):
        await here.archive.ship()
    store.hook = None
    await here.record("3")
    assert await here.read() == ["1", "2", "3"]  # while both places have it
    await here.other.ship()
    assert await here.read() == ["1", "2", "3"]
    assert await here.read(SHOP) == ["theirs"]
    assert await store.read_audit() == []
    assert len(await here.objects_there()) == 3


async def test_two_managers_that_both_think_they_lead_store_each_event_once(here: At) -> None:
    for round_ in range(5):
        await here.record(*(f"{round_}.{number}" for number in range(20)))
        await asyncio.gather(here.archive.ship(), here.other.ship(), here.archive.ship())
    assert await here.read(limit=500) == [f"{round_}.{number}" for round_ in range(5) for number in range(20)]


async def test_object_storage_that_is_away_keeps_events_in_the_stream(
    here: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> str:
        raise StoreUnavailable("away")

    await here.record("1")
    with monkeypatch.context() as patch:
        patch.setattr(here.objects, "put", away)
        with pytest.raises(StoreUnavailable):
            await here.archive.ship()
        assert len(await here.store.read_audit()) == 1
    shipping = asyncio.create_task(here.archive.ship_forever())
    await until(lambda: here.archive.shipped == 1, 60)
    shipping.cancel()
    await asyncio.wait([shipping])
    assert await here.read() == ["1"]


async def test_what_cannot_be_read_becomes_a_gap_and_stops_nothing(here: At) -> None:
    await here.store.append_audit([b"{nonsense"], 100)
    await here.record("1")
    await here.archive.ship()
    assert await here.read() == ["1"]
    assert any(name.startswith("audit/=all/") for name in await here.objects_there())


async def test_old_events_are_deleted_and_younger_ones_stay(here: At) -> None:
    await here.record("1")
    await here.archive.ship()
    await here.archive.prune()
    assert await here.read() == ["1"]
    late = AuditArchive(here.store, here.objects, "m3", keep_sec=1.0, clock=lambda: 4e9)
    await late.prune()
    assert await here.read() == []


async def test_only_events_since_a_time_are_read_when_it_is_given(store: Store) -> None:
    at = At(store, memory_objects())
    await at.record("1")
    await at.archive.ship()
    (entry,) = (await at.other.page(ACME)).events
    assert await at.read(since=entry.at - 3600) == ["1"]
    assert await at.read(since=entry.at + 3600) == []
    await at.audit.close()
    await at.objects.close()
