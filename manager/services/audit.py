"""Who changed what, when and from where: every change of state leaves one event behind, which nobody can edit.

An event is in the store's stream (which survives a crash of this manager) before the change is answered; `AuditArchive`
carries it on to object storage. A log that is away holds nothing up: events then wait here, so many at most, and all
are lines of the manager's own log as well.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from manager.errors import StoreUnavailable
from manager.model import Owner, Principal, new_id
from manager.store.base import Store

log = logging.getLogger(__name__)

Detail = str | int | float | bool | None

STREAM_MAX: Final = 100_000  # events that wait for object storage: some 40 MB of Redis; those beyond are counted
WAITING_MAX: Final = 10_000  # events that wait here for a store that is away; the oldest go first, and are counted
WAIT_SEC: Final = 2.0  # a change is not answered later than this for its event's sake
CLOSE_SEC: Final = 5.0
_BATCH: Final = 200
_TEXT_MAX: Final = 512  # characters of a subject or detail
_DETAILS_MAX: Final = 16


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change. `by` is a key's id, or the name of the manager's own part that made the change."""

    event_id: str
    at: float  # seconds since the epoch, by the clock of the manager that made the change
    tenant: str
    project: str
    action: str
    subject: str
    by: str
    role: str | None = None  # the key's
    member: str | None = None
    address: str = ""  # that the request came from
    details: dict[str, Detail] = {}


class AuditLog(Protocol):
    """What services that change something call."""

    async def record(self, action: str, subject: str, *, owner: Owner, by: Principal | str, **details: Detail) -> None:
        """Call it when the change has happened and before it is answered. Never raises but CancelledError."""
        ...


class NoAudit:
    """Keeps nothing: for tests of other rules."""

    async def record(self, action: str, subject: str, *, owner: Owner, by: Principal | str, **details: Detail) -> None:
        return


class Audit:
    """The one that managers use. Events that come together go to the store together."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        most: int = STREAM_MAX,
        wait_sec: float = WAIT_SEC,
    ) -> None:
        self._store = store
        self._clock = clock
        self._most = most
        self._wait_sec = wait_sec
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self.recorded = 0
        self.lost = 0  # for want of room, here or in the stream

    async def record(self, action: str, subject: str, *, owner: Owner, by: Principal | str, **details: Detail) -> None:
        event = _event(action, subject, owner, by, details, self._clock())
        log.info("audit", extra=_line(event))
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((msgspec.json.encode(event), kept))
        if len(self._waiting) > WAITING_MAX:
            self._drop(1, "this manager")
            self._waiting.popleft()[1].cancel()
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="audit-write")
        try:
            async with asyncio.timeout(self._wait_sec):
                await asyncio.wait([kept])
        except TimeoutError:
            pass  # the store is away: the event goes on waiting, its caller does not

    async def close(self) -> None:
        """Waits, not long, for what the store does not have yet."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=CLOSE_SEC)
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        if self._waiting:
            self._drop(len(self._waiting), "a store that is away")

    async def _write(self) -> None:
        """Until nothing waits."""
        failures = 0
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                try:
                    lost = await self._store.append_audit([event for event, _ in batch], self._most)
                except BaseException as why:
                    self._waiting.extendleft(reversed(batch))
                    if not isinstance(why, StoreUnavailable):
                        raise
                    failures += 1
                    log.warning("audit_waits", extra={"why": why.message, "waiting": len(self._waiting)})
                    await asyncio.sleep(min(2.0, 0.1 * 2 ** min(failures, 5)) * random.uniform(0.5, 1.5))
                    continue
                failures = 0
                self.recorded += len(batch) - lost
                if lost:
                    self._drop(lost, "the stream: object storage takes none")
                for _, kept in batch:
                    if not kept.done():
                        kept.set_result(None)
        finally:
            self._writing = None

    def _drop(self, events: int, where: str) -> None:
        self.lost += events
        log.error("audit_events_lost", extra={"events": events, "full": where})


def _event(
    action: str, subject: str, owner: Owner, by: Principal | str, details: dict[str, Detail], now: float
) -> AuditEvent:
    role = member = None
    name, address = by if isinstance(by, str) else by.key_id, ""
    if isinstance(by, Principal):
        role, member, address = by.role.value, by.member, by.address
    return AuditEvent(
        event_id=new_id(),
        at=now,
        tenant=owner.tenant,
        project=owner.project,
        action=action,
        subject=_short(subject),
        by=_short(name),
        role=role,
        member=member,
        address=address,
        details=_bounded(details),
    )


def _bounded(details: dict[str, Detail]) -> dict[str, Detail]:
    said = [(key, value) for key, value in details.items() if value is not None][:_DETAILS_MAX]
    return {key: _short(value) if isinstance(value, str) else value for key, value in said}


def _short(text: str) -> str:
    """Bounded, and what JSON in UTF-8 can carry."""
    text = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def _line(event: AuditEvent) -> dict[str, object]:
    return {
        "audit": event.event_id,
        "tenant": event.tenant,
        "project": event.project,
        "action": event.action,
        "subject": event.subject,
        "by": event.by,
        "address": event.address,
        "details": event.details,
    }
