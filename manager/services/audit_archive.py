"""The audit log's lasting half: events go from the store's stream to object storage, in batches, each exactly once.

One elected manager carries them. A batch is an object that is written once and never again; its events leave the stream
afterwards. Whoever comes after a crash in between finds the object in its way, and goes on behind what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from manager.errors import InvalidRequest, ManagerError
from manager.model import Owner
from manager.services.audit import AuditEvent
from manager.store.base import AuditEntry, Store
from manager.store.objects import ObjectChanged, ObjectInfo, Objects, owner_prefix

log = logging.getLogger(__name__)

ROOT: Final = "audit/"
NOBODYS: Final = "=all/"  # gaps, which are nobody's in particular; no tenant's part of a key looks so
LOOK_SEC: Final = 2.0
LEAD_SEC: Final = 15.0
BATCH: Final = 500
PAGE_MAX: Final = 500
_OBJECT_BYTES: Final = 16 << 20
_PRUNE_SEC: Final = 86_400.0
_PLACE_MS: Final = 13  # digits of the milliseconds in a place, and of the number behind them
_PLACE_NUMBER: Final = 10


class AuditLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of an object: where the event stood in the stream, which orders everything, and the event."""

    place: str
    event: AuditEvent


class AuditPage(msgspec.Struct, frozen=True):
    events: list[AuditEvent]
    next: str | None  # `after` of the next page; None: this is the end so far


_LINE: Final = msgspec.json.Decoder(AuditLine)
_EVENT: Final = msgspec.json.Decoder(AuditEvent)


class AuditArchive:
    def __init__(
        self,
        store: Store,
        objects: Objects,
        holder: str,
        *,
        keep_sec: float,
        look_sec: float = LOOK_SEC,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`keep_sec`: older events are deleted, a day's at once."""
        self._store, self._objects, self._holder = store, objects, holder
        self._keep_sec, self._look_sec, self._clock = keep_sec, look_sec, clock
        self._pruned_at = clock()
        self.shipped = 0

    # ── to object storage ───────────────────────────────────────────────────────────────────────────────────────

    async def ship_forever(self) -> None:
        """While this manager leads; an outage of either side only pauses it."""
        while True:
            await asyncio.sleep(self._look_sec * random.uniform(0.8, 1.2))
            try:
                if await self._store.lead("audit", self._holder, LEAD_SEC):
                    await self.ship()
                    if self._clock() - self._pruned_at > _PRUNE_SEC:
                        self._pruned_at = self._clock()
                        await self.prune()
            except ManagerError as why:
                log.warning("audit_not_shipped", extra={"why": why.message})

    async def ship(self) -> None:
        """All that is in the stream now. Raises StoreUnavailable, having lost and doubled nothing."""
        while entries := await self._store.read_audit(limit=BATCH):
            for prefix, lines in _by_owner(entries, self._clock()).items():
                await self._put(prefix, lines)
            await self._store.trim_audit(entries[-1].place)
            self.shipped += len(entries)
            if len(entries) < BATCH:
                return

    async def _put(self, prefix: str, lines: Sequence[AuditLine]) -> None:
        while lines:
            key = f"{prefix}{_day(lines[0].place)}/{lines[0].place}-{lines[0].event.event_id}"
            data = b"\n".join(msgspec.json.encode(line) for line in lines)
            try:
                await self._objects.put(key, data, if_absent=True)
                return
            except ObjectChanged:
                # Of a batch whose writer did not get to taking its events off the stream.
                there = [line.place async for line in self._lines(key)]
                lines = [line for line in lines if line.place > max(there, default="")]

    async def prune(self) -> None:
        """Deletes what is older than it is kept. Raises StoreUnavailable, having deleted some."""
        until, deleted = self._clock() - self._keep_sec, 0
        async for infos in self._objects.list(ROOT):
            for info in infos:
                if info.modified_at < until:
                    await self._objects.delete(info.key)
                    deleted += 1
        if deleted:
            log.info("audit_pruned", extra={"objects": deleted})

    # ── for readers ─────────────────────────────────────────────────────────────────────────────────────────────

    async def page(self, owner: Owner, *, since: float = 0.0, after: str = "", limit: int = 100) -> AuditPage:
        """The owner's events from `since` (seconds since the epoch) on, oldest first, behind the one that `after`
        names. What was recorded before the call is there. Raises InvalidRequest, StoreUnavailable."""
        if after and not _is_place(after):
            raise InvalidRequest("`after` is what `next` of a page said", field="after")
        limit = max(1, min(limit, PAGE_MAX))
        behind = max(after, _place_at(since))
        found: list[AuditLine] = []
        # The stream first: what leaves it meanwhile is then found in object storage.
        waiting = [line async for line in self._waiting(owner, behind)]
        prefix = f"{ROOT}{owner_prefix(owner)}"
        async for info in self._from(prefix, behind):
            found += [line async for line in self._lines(info.key) if line.place > behind]
            if len(found) > limit:
                break
        else:
            last = found[-1].place if found else behind
            found += [line for line in waiting if line.place > last]
        more = len(found) > limit
        found = found[:limit]
        return AuditPage([line.event for line in found], found[-1].place if more else None)

    async def _waiting(self, owner: Owner, behind: str) -> AsyncIterator[AuditLine]:
        at = ""
        while entries := await self._store.read_audit(at, BATCH):
            for entry in entries:
                place, event = _padded(entry.place), _event_of(entry)
                if event is None or (event.tenant, event.project) != (owner.tenant, owner.project):
                    continue
                if place > behind:
                    yield AuditLine(place, event)
            at = entries[-1].place

    async def _from(self, prefix: str, behind: str) -> AsyncIterator[ObjectInfo]:
        """The objects that may hold something behind the place, in their order."""
        before: ObjectInfo | None = None
        start = f"{prefix}{_day(behind, days_before=1)}" if behind else ""  # a batch may have begun the day before
        async for infos in self._objects.list(prefix, start):
            for info in infos:
                if before is not None and info.key.rpartition("/")[2] > behind:
                    yield before
                before = info
        if before is not None:
            yield before

    async def _lines(self, key: str) -> AsyncIterator[AuditLine]:
        kept = await self._objects.get(key, limit=_OBJECT_BYTES)
        for line in [] if kept is None else kept.data.split(b"\n"):
            yield _LINE.decode(line)


def _by_owner(entries: Iterable[AuditEntry], now: float) -> dict[str, list[AuditLine]]:
    """By the prefix of their keys. An event that came into the stream twice, for an answer that was lost, once."""
    found: dict[str, list[AuditLine]] = {}
    seen: set[str] = set()
    for entry in entries:
        told = _event_of(entry)
        if told is not None:
            event, prefix = told, f"{ROOT}{owner_prefix(Owner(told.tenant, told.project))}"
        else:
            event = AuditEvent(
                event_id=f"gap{entry.place}", at=now, tenant="", project="", action="audit.gap", subject="audit",
                by="manager", details={"events": entry.lost or 1},
            )  # fmt: skip
            prefix = f"{ROOT}{NOBODYS}"
        if event.event_id not in seen:
            seen.add(event.event_id)
            found.setdefault(prefix, []).append(AuditLine(_padded(entry.place), event))
    return found


def _event_of(entry: AuditEntry) -> AuditEvent | None:
    """None for a gap; so is what cannot be read."""
    try:
        return _EVENT.decode(entry.event) if entry.event else None
    except msgspec.MsgspecError as why:
        log.error("audit_event_unreadable", extra={"place": entry.place, "why": str(why)[:300]})
        return None


# ── places: a stream's `<milliseconds>-<number>`, with zeros in front so that they sort as text ─────────────────────


def _padded(place: str) -> str:
    milliseconds, _, number = place.partition("-")
    return f"{int(milliseconds):0{_PLACE_MS}d}-{int(number):0{_PLACE_NUMBER}d}"


def _place_at(at: float) -> str:
    """Before everything of that moment."""
    return f"{max(0, int(at * 1000) - 1):0{_PLACE_MS}d}-{'9' * _PLACE_NUMBER}" if at > 0 else ""


def _is_place(text: str) -> bool:
    milliseconds, dash, number = text.partition("-")
    whole = len(milliseconds) == _PLACE_MS and len(number) == _PLACE_NUMBER and bool(dash)
    return whole and text.isascii() and milliseconds.isdigit() and number.isdigit()


def _day(place: str, *, days_before: int = 0) -> str:
    at = int(place.partition("-")[0]) / 1000 - days_before * 86_400
    return datetime.fromtimestamp(max(0.0, at), UTC).strftime("%Y-%m-%d")
