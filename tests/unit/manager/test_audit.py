"""The audit log's first half: from the services that change something to the store's stream. (design 11: what must
outlive Redis; issue: audit log of every state change)"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from manager.model import Owner, Principal, Role
from manager.services import audit as module
from manager.services.audit import Audit, AuditEvent, Detail
from manager.services.tenants import Tenants
from tests.support.memory_objects import memory_objects
from tests.support.memory_store import MemoryStore
from tests.support.world import ACME, principal, until, world

ANN = Principal(ACME, Role.ADMIN, "k1", "ann@example.org", "192.0.2.7")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def audit(store: MemoryStore) -> AsyncIterator[Audit]:
    made = Audit(store, clock=lambda: 1234.5)
    yield made
    store.down = False
    await made.close()


async def events(store: MemoryStore) -> list[AuditEvent]:
    return [msgspec.json.decode(entry.event, type=AuditEvent) for entry in await store.read_audit() if entry.event]


async def test_an_event_says_who_did_what_when_and_from_where(store: MemoryStore, audit: Audit) -> None:
    await audit.record("sandbox.created", "s1", owner=ACME, by=ANN, profile="small", nothing=None)
    await audit.record("sandbox.stopped", "s1", owner=ACME, by="reaper")
    first, second = await events(store)
    assert (first.tenant, first.project, first.action, first.subject) == ("acme", "web", "sandbox.created", "s1")
    assert (first.by, first.role, first.member, first.address) == ("k1", "admin", "ann@example.org", "192.0.2.7")
    assert (first.at, first.details) == (1234.5, {"profile": "small"})
    assert (second.by, second.role, second.address) == ("reaper", None, "")
    assert first.event_id != second.event_id


async def test_an_event_is_in_the_store_before_its_change_is_answered(store: MemoryStore, audit: Audit) -> None:
    for number in range(5):
        await audit.record("a.b", str(number), owner=ACME, by="t")
        assert [event.subject for event in await events(store)] == [str(each) for each in range(number + 1)]


async def test_events_that_come_together_go_to_the_store_together_and_in_order(
    store: MemoryStore, audit: Audit
) -> None:
    await asyncio.gather(*(audit.record("a.b", str(number), owner=ACME, by="t") for number in range(100)))
    assert [event.subject for event in await events(store)] == [str(number) for number in range(100)]
    assert store.calls.count("append_audit") < 10


async def test_a_store_that_is_away_holds_no_change_up_and_gets_the_events_when_it_is_back(store: MemoryStore) -> None:
    audit = Audit(store, wait_sec=0.05)
    store.down = True
    for number in range(3):
        await audit.record("a.b", str(number), owner=ACME, by="t")
    store.down = False
    await until(lambda: audit.recorded == 3, 60)
    assert [event.subject for event in await events(store)] == ["0", "1", "2"]
    await audit.close()


async def test_events_that_found_no_room_are_counted_and_the_gap_is_marked(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    audit = Audit(store, most=3)
    for number in range(5):
        await audit.record("a.b", str(number), owner=ACME, by="t")
    assert audit.lost == 2
    assert [event.subject for event in await events(store)] == ["0", "1", "2"]
    assert any(record.getMessage() == "audit_events_lost" for record in caplog.records)
    await store.trim_audit((await store.read_audit())[-1].place)
    await audit.record("a.b", "5", owner=ACME, by="t")
    gap, kept = await store.read_audit()
    assert (gap.lost, gap.event) == (2, b"")
    assert msgspec.json.decode(kept.event, type=AuditEvent).subject == "5"
    await audit.close()


async def test_what_waits_here_is_bounded_and_a_close_does_not_hang(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 10)
    monkeypatch.setattr(module, "CLOSE_SEC", 0.05)
    audit = Audit(store, wait_sec=0.0)
    store.down = True
    for number in range(30):
        await audit.record("a.b", str(number), owner=ACME, by="t")
    await audit.close()
    assert audit.recorded == 0
    assert audit.lost == 30
    assert any(record.getMessage() == "audit_events_lost" for record in caplog.records)


async def test_a_callers_text_is_bounded_and_cannot_forge_a_line(
    store: MemoryStore, audit: Audit, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "manager.services.audit")
    evil = 'x\r\n{"action": "key.revoked"}\x1b]52;\udcff' + "y" * 10_000
    await audit.record("a.b", evil, owner=ACME, by=ANN, name=evil)
    (entry,) = await store.read_audit()
    assert entry.event.count(b"\n") == 0
    assert len(entry.event) < 3000
    (event,) = await events(store)
    assert event.details["name"] == event.subject
    assert event.subject.endswith("...")


async def test_a_hung_up_caller_takes_no_event_back(store: MemoryStore, audit: Audit) -> None:
    held = asyncio.Event()

    async def hold(call: str) -> None:
        if call == "append_audit":
            await held.wait()

    store.hook = hold
    caller = asyncio.create_task(audit.record("a.b", "1", owner=ACME, by="t"))
    await until(lambda: "append_audit" in store.calls)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    held.set()
    await until(lambda: audit.recorded == 1)


async def test_making_and_revoking_keys_is_told_without_the_keys(store: MemoryStore, audit: Audit) -> None:
    tenants = Tenants(store, memory_objects(), b"p" * 32, audit=audit)
    text, record = await tenants.issue_key(ANN, Role.MEMBER, "ci", "bob@example.org")
    await tenants.revoke_key(ANN, record.key_id)
    made, revoked = await events(store)
    assert (made.action, made.subject, made.by, made.details["member_given"]) == (
        "key.created", record.key_id, "k1", "bob@example.org",
    )  # fmt: skip
    assert (revoked.action, revoked.subject, revoked.by) == ("key.revoked", record.key_id, "k1")
    assert text.split("_")[2].encode() not in b"".join([entry.event for entry in await store.read_audit()])


class Told:
    """An audit log that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str, dict[str, Detail]]] = []

    async def record(self, action: str, subject: str, *, owner: Owner, by: Principal | str, **details: Detail) -> None:
        assert owner == ACME
        self.events.append((action, subject, by if isinstance(by, str) else by.key_id, details))


async def test_a_pod_that_a_task_got_and_lost_is_told_once_each_and_plain_commands_are_not() -> None:
    told = Told()
    async with world(audit=told) as here:
        await asyncio.gather(*(here.run("t") for _ in range(5)))
        for _ in range(5):
            await here.run("t")
        binding = await here.binding("t")
        await here.services.tasks.retire(ACME, "t", by=principal())
        await until(lambda: len(told.events) == 2)
        bound, ended = told.events
        assert bound[:3] == ("pod.bound", binding.sandbox_id, "k")
        assert bound[3]["task"] == "t"
        assert bound[3]["pod"] == binding.pod
        assert ended[:3] == ("pod.ended", binding.sandbox_id, "k")
        assert ended[3]["reason"] == "destroyed"


async def test_a_pod_that_ended_by_itself_is_told_as_the_managers_finding() -> None:
    told = Told()
    async with world(audit=told) as here:
        await here.run("t")
        binding = await here.binding("t")
        await here.services.sandboxes.end(binding, "lost", by="recovery")
        await until(lambda: len(told.events) == 2)
        assert told.events[1][2] == "recovery"
