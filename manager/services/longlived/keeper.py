"""What `Sandboxes` and the reaper ask of long-lived sandboxes: what they are without a pod, and their end.

Every move that a crash left half way is taken up here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from manager.errors import ManagerError, SandboxStarting, SandboxStopped
from manager.model import (
    Binding,
    BindingState,
    LeaseTerms,
    Owner,
    PodEnded,
    SandboxRecord,
    SandboxState,
    moved,
    own_name,
)
from manager.services.audit import AuditLog, NoAudit
from manager.services.longlived.ending import LAST_KEPT_SEC
from manager.services.longlived.kept import COMING, POLL_SEC, WITHOUT_POD, failed, refuse_destroyed
from manager.services.longlived.service import LongLived
from manager.services.sandboxes import Bound, Sandboxes
from manager.store.base import Store
from manager.store.records import RecordChanged, Versioned

log = logging.getLogger(__name__)

ENDS: Final = ("destroyed", "expired")  # why a sandbox is closed that is to be ended for good
STOP_SEC: Final = 60.0  # for keeping a workspace where everything ends
_S: Final = SandboxState


class Keeper:
    """`manager.services.sandboxes.Keeper`."""

    def __init__(
        self, longlived: LongLived, store: Store, sandboxes: Sandboxes, *, audit: AuditLog | None = None
    ) -> None:
        self._longlived = longlived
        self._kept, self._making, self._ending = longlived.kept, longlived.making, longlived.ending
        self._store = store
        self._sandboxes = sandboxes
        self._audit = audit or NoAudit()

    async def revive(self, owner: Owner, sandbox_id: str) -> Bound:
        """The sandbox that has no pod to be used: waited for, started with `autostart`, or refused with what it is."""
        record = await self._kept.fresh(owner, sandbox_id)
        give_up = time.monotonic() + self._sandboxes.start_limit_sec
        while True:
            record = await self._kept.awaited(record, give_up - time.monotonic())
            refuse_destroyed(record)
            if record.state in COMING:
                raise SandboxStarting("the sandbox is still being made; try again shortly", state=str(record.state))
            if record.state is _S.RUNNING:
                bound = await self._sandboxes.present(owner, own_name(sandbox_id))
                if bound is not None:
                    return bound
                record = await self._lost_unless_moved(record)
            elif record.autostart and record.state is _S.STOPPING and time.monotonic() < give_up:
                await asyncio.sleep(POLL_SEC)
                record = await self._kept.fresh(owner, sandbox_id)
            elif record.autostart and record.state in WITHOUT_POD:
                record = await self._longlived.start(
                    "autostart", owner, sandbox_id, wait_sec=give_up - time.monotonic()
                )
            elif record.state is _S.FAILED:
                raise failed(record)
            else:
                raise SandboxStopped(
                    f"the sandbox is {record.state}; start it, or give it autostart", state=str(record.state)
                )

    async def terms(self, binding: Binding) -> LeaseTerms | None:
        found = await self._kept.records.get(binding.owner, binding.sandbox_id, fresh=True)
        if found is None or found.value.state in (_S.STOPPED, _S.DESTROYED):
            return None
        return self._longlived.terms(found.value, binding)

    async def ended(self, binding: Binding, ended: PodEnded) -> None:
        """The pod ended by itself: oom, eviction, its node. What was kept last can be started."""

        def change(record: SandboxRecord) -> SandboxRecord | None:
            if record.state not in (_S.RUNNING, _S.STOPPING):
                return None
            return moved(record, _S.FAILED, ended.reason, ended.at)

        found = await self._kept.records.update(binding.owner, binding.sandbox_id, change)
        if found is not None and (found.value.state, found.value.since) == (_S.FAILED, ended.at):
            await self._audit.record(
                "sandbox.failed", binding.sandbox_id, owner=binding.owner, by="manager", reason=ended.reason
            )

    async def _lost_unless_moved(self, record: SandboxRecord) -> SandboxRecord:
        """RUNNING, and without a pod: unless it moved on meanwhile, the pod was lost."""
        again = await self._kept.fresh(record.owner, record.sandbox_id)
        if again.state is not _S.RUNNING or again.since != record.since:
            return again
        binding = await self._store.get_binding(record.owner, own_name(record.sandbox_id))
        if binding is not None and binding.state is BindingState.CLOSING:
            raise SandboxStopped("the sandbox is being stopped", state=str(_S.STOPPING))
        ended = binding.ended if binding is not None else None
        ended = ended if ended is not None else PodEnded(reason="lost", at=time.time())
        return await self._kept.move(record.owner, record.sandbox_id, _S.FAILED, ended.reason)

    # ── ends of the reaper ────────────────────────────────────────────────────────────────────────────────────────

    async def stop_quiet(self, binding: Binding) -> None:
        """What the reaper does with one whose lease has passed without work. Returns at once."""
        if self._kept.workspaces is None:
            await self.expire(binding)
            return
        await self._begin_of_reaper(
            binding, lambda record: self._ending.stop(record, "reaper", "idle", if_expired=True)
        )

    async def stop_for_good(self, binding: Binding) -> None:
        """Where everything ends: it is stopped, if its workspace can be kept; its pod ends in any case."""
        record = await self._kept.fresh(binding.owner, binding.sandbox_id)
        if self._kept.workspaces is not None and record.state is _S.RUNNING:
            await self._longlived.stop(
                "manager", binding.owner, binding.sandbox_id, reason="manager_ended", wait_sec=STOP_SEC
            )

    async def expire(self, binding: Binding) -> None:
        """Likewise with one whose time is over."""
        await self._begin_of_reaper(binding, lambda record: self._ending.destroy(record, "reaper", "expired"))

    async def take_up(self, binding: Binding) -> None:
        """Likewise with one that a manager was closing, and fell silent over it: what it was closed for goes on."""

        def work(record: SandboxRecord) -> Coroutine[Any, Any, SandboxRecord]:
            begun = record.reason if record.state is _S.STOPPING else ""
            if begun in ENDS or record.expires_at <= time.time():
                return self._ending.destroy(record, "reaper", begun if begun in ENDS else "expired")
            return self._ending.stop(record, "reaper", begun or "taken_up")

        await self._begin_of_reaper(binding, work)

    async def claim_died(self, owner: Owner, sandbox_id: str) -> None:
        """Of a sandbox whose maker fell silent over it, once its claim is settled: it runs, or has failed."""
        found = await self._kept.records.get(owner, sandbox_id, fresh=True)
        if found is not None and found.value.state in COMING and not self._kept.moving(sandbox_id):
            await self._settle(found.value)

    async def _settle(self, record: SandboxRecord) -> None:
        """The record of what nobody is changing follows the pod that there is, or is not."""
        owner, sandbox_id = record.owner, record.sandbox_id
        name = own_name(sandbox_id)  # past what is cached here: another manager may have changed it since
        binding = await self._store.get_binding(owner, name) or await self._sandboxes.find(owner, name)
        if binding is not None and binding.state is BindingState.BOUND:
            if record.state is not _S.RUNNING:
                await self._kept.move(owner, sandbox_id, _S.RUNNING, "found")
        elif (binding is None or binding.state is BindingState.ENDED) and record.state in COMING:
            await self._making.came_to_nothing(owner, sandbox_id, "interrupted", record.since)
        elif binding is None or binding.state is BindingState.ENDED:
            reason = binding.ended.reason if binding is not None and binding.ended is not None else "lost"
            await self._kept.move(owner, sandbox_id, _S.FAILED, reason)

    async def _begin_of_reaper(
        self, binding: Binding, work: Callable[[SandboxRecord], Coroutine[Any, Any, SandboxRecord]]
    ) -> None:
        if self._kept.moving(binding.sandbox_id):
            return
        found = await self._kept.records.get(binding.owner, binding.sandbox_id, fresh=True)
        if found is None or found.value.state in (_S.STOPPED, _S.DESTROYED):  # all but its pod is done with
            await self._sandboxes.end(binding, "destroyed", by="reaper")
            return
        record = found.value
        self._kept.begin(binding.sandbox_id, "stop", lambda: self._quietly(record, work(record)))

    async def _quietly(self, record: SandboxRecord, work: Coroutine[Any, Any, SandboxRecord]) -> SandboxRecord:
        """What fails is tried again at a later look: its lease lasts until then."""
        try:
            return await work
        except ManagerError as why:
            log.warning("sandbox_not_kept", extra={"sandbox": record.sandbox_id, "why": why.message})
            return record

    # ── what nobody waits for ─────────────────────────────────────────────────────────────────────────────────────

    async def look(self) -> None:
        """One look at every record: those whose time is over without a pod, and those that a crash left half way."""
        async for found in self._kept.records.every():
            record = found.value
            if self._kept.moving(record.sandbox_id):
                continue
            try:
                await self._look_at(found)
            except (ManagerError, RecordChanged) as why:
                log.warning("sandbox_not_looked_at", extra={"sandbox": record.sandbox_id, "why": str(why)})

    async def _look_at(self, found: Versioned[SandboxRecord]) -> None:
        record, now = found.value, time.time()
        owner, sandbox_id = record.owner, record.sandbox_id
        if record.state is _S.DESTROYED:
            if now - record.since > LAST_KEPT_SEC:
                await self._kept.records.delete(owner, sandbox_id)
            return
        if record.state in WITHOUT_POD and record.expires_at <= now:

            async def ending() -> SandboxRecord:
                return await self._quietly(record, self._ending.destroy(record, "reaper", "expired"))

            self._kept.begin(sandbox_id, "destroy", ending)
            return
        if record.state not in WITHOUT_POD and now - record.since >= self._sandboxes.claim_sec:
            await self._settle(record)  # a claim or a closing that nobody finishes is the reaper's
