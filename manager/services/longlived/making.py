"""The way up of a long-lived sandbox: claim, record, pod, in this order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from manager.errors import Conflict, ManagerError
from manager.executor_client import PodRef
from manager.model import Binding, LeaseTerms, Owner, Profile, SandboxRecord, SandboxState, moved, own_name
from manager.services.audit import AuditLog
from manager.services.longlived.kept import By, Kept
from manager.services.sandboxes import FILL_LIMIT_SEC, Bound, Sandboxes
from manager.store.records import RecordChanged

log = logging.getLogger(__name__)

_S: Final = SandboxState


class Making:
    def __init__(
        self,
        kept: Kept,
        sandboxes: Sandboxes,
        audit: AuditLog,
        active_sec: float,
        new_terms: Callable[[SandboxRecord], Awaitable[None]],
    ) -> None:
        """`new_terms`: has the pod's lease follow its record."""
        self._kept = kept
        self._sandboxes = sandboxes
        self._audit = audit
        self._active_sec = active_sec
        self._new_terms = new_terms

    async def make(
        self,
        record: SandboxRecord,
        recipe: Profile,
        by: By,
        first: Callable[[str], Awaitable[None]] | None,
        taken: asyncio.Future[float],
    ) -> SandboxRecord:
        """`taken` is set to the record's `since` once it is there: the sandbox is this call's to make."""
        owner, sandbox_id = record.owner, record.sandbox_id

        async def begun(_held: Binding) -> None:
            try:
                await self._kept.records.create(owner, sandbox_id, record)
            except RecordChanged as why:
                made = await self._kept.records.get(owner, sandbox_id, fresh=True)
                if made is not None and made.value == record:
                    return  # ours: its claim was lost with a Redis that was wiped, and this is the next
                raise Conflict("this sandbox is being made already by a request with the same key") from why
            if not taken.done():
                taken.set_result(record.since)
            if first is not None:
                await first(sandbox_id)

        made = await self._provided(record, recipe, by, begun, taken, "created", fills=first is not None)
        if taken.done():
            await self._audit.record("sandbox.created", sandbox_id, owner=owner, by=by, profile=recipe.name)
        return made

    async def start(self, record: SandboxRecord, by: By) -> SandboxRecord:
        owner, sandbox_id = record.owner, record.sandbox_id
        recipe = self._sandboxes.recipe(owner, record.profile, None)
        taken: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        async def begun(_held: Binding) -> None:
            starting = await self._kept.move(owner, sandbox_id, _S.STARTING, "asked")
            if not taken.done():
                taken.set_result(starting.since)

        started = await self._provided(record, recipe, by, begun, taken, "started", fills=True)
        if taken.done():
            await self._audit.record("sandbox.started", sandbox_id, owner=owner, by=by)
        return started

    async def _provided(
        self,
        record: SandboxRecord,
        recipe: Profile,
        by: By,
        begun: Callable[[Binding], Awaitable[None]],
        taken: asyncio.Future[float],
        reason: str,
        *,
        fills: bool,
    ) -> SandboxRecord:
        """RUNNING, for `reason`. What comes to nothing leaves no pod and no slot, and the record says so, unless it is
        another manager's to say: only who was `taken` up on its claim has begun it."""
        owner, sandbox_id = record.owner, record.sandbox_id
        workspaces = self._kept.workspaces

        async def fill(pod: PodRef) -> None:
            assert workspaces is not None
            with self._kept.progressing(sandbox_id) as progress:
                await workspaces.restore(owner, sandbox_id, pod, progress=progress)

        terms = LeaseTerms(self._active_sec, float(record.autostop_sec), max(1.0, record.expires_at - time.time()))
        plan = self._sandboxes.plan_to_keep(
            recipe, terms, env=record.env, begun=begun, fill=fill if fills else None, limit_sec=FILL_LIMIT_SEC, by=by
        )
        bound: Bound | None = None
        try:
            bound = await self._sandboxes.provide(owner, own_name(sandbox_id), plan)
            running = await self._kept.move(owner, sandbox_id, _S.RUNNING, reason)
            if (running.autostop_sec, running.ttl_sec) != (record.autostop_sec, record.ttl_sec):
                await self._new_terms(running)  # changed while its pod was made with the old ones
            return running
        except BaseException as why:
            if taken.done():
                code = why.code if isinstance(why, ManagerError) else "interrupted"
                await asyncio.shield(self._undo(owner, sandbox_id, bound, code, taken.result()))
            raise

    async def _undo(self, owner: Owner, sandbox_id: str, bound: Bound | None, code: str, since: float) -> None:
        try:
            if bound is not None:  # nobody was told that it runs
                await self._sandboxes.end(bound.binding, "destroyed")
        except ManagerError as why:  # its lease ends it
            log.warning("pod_not_ended", extra={"sandbox": sandbox_id, "why": why.message})
        await self.came_to_nothing(owner, sandbox_id, code, since)

    async def came_to_nothing(self, owner: Owner, sandbox_id: str, code: str, since: float) -> None:
        """A new one is FAILED; one that was to be started again is where it was, with all that was kept. Nothing
        changes where it is another's to make by now: its state is not the one of `since` any more."""

        def change(record: SandboxRecord) -> SandboxRecord | None:
            if record.since != since:
                return None
            if record.state is _S.STARTING:
                return moved(record, _S.STOPPED, f"not_started:{code}", time.time())
            return moved(record, _S.FAILED, code, time.time()) if record.state is _S.CREATING else None

        try:
            await self._kept.records.update(owner, sandbox_id, change)
        except ManagerError as why:  # the next look at what is overdue says so
            log.warning("failure_not_recorded", extra={"sandbox": sandbox_id, "why": why.message})

    async def forget(self, owner: Owner, sandbox_id: str) -> None:
        """Of a sandbox that never ran, and whose caller is told why."""
        found = await self._kept.records.get(owner, sandbox_id, fresh=True)
        if found is not None and found.value.state is _S.FAILED:
            await self._kept.records.delete(owner, sandbox_id)
            if self._kept.workspaces is not None:
                await self._kept.workspaces.delete_workspace(owner, sandbox_id)
