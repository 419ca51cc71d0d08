"""The way down of a long-lived sandbox: workspace, record, pod, in this order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from executor.wire import LeaseRequest
from manager.errors import ExecutorRefused, ManagerError, SandboxGone, SandboxStopped
from manager.executor_client import ExecutorClient
from manager.model import Binding, BindingState, PodEnded, Profile, SandboxRecord, SandboxState, new_id, own_name
from manager.services.audit import AuditLog
from manager.services.longlived.kept import COMING, WITHOUT_POD, By, Kept
from manager.services.longlived.workspaces import Note
from manager.services.renewing import Renewing
from manager.services.sandboxes import KEEP_SEC, Sandboxes, gone
from manager.store.base import Store

log = logging.getLogger(__name__)

RETRY_STOP_SEC: Final = (5.0, 60.0)  # after which one that could not be kept is looked at again: at first, at last
LAST_KEPT_SEC: Final = 7 * 86_400.0  # a destroyed sandbox's last checkpoint
_FAILURES: Final = 10_000  # of so many sandboxes is it remembered how often they could not be kept
_S: Final = SandboxState


class Closing(msgspec.Struct, frozen=True):
    """A sandbox that takes no calls any more while its workspace is kept."""

    binding: Binding
    closer: str
    renewing: Renewing


class Ending:
    def __init__(
        self,
        kept: Kept,
        store: Store,
        sandboxes: Sandboxes,
        client: ExecutorClient,
        profiles: Mapping[str, Profile],
        audit: AuditLog,
    ) -> None:
        self._kept = kept
        self._store = store
        self._sandboxes = sandboxes
        self._client = client
        self._profiles = profiles
        self._audit = audit
        self._failures: dict[str, int] = {}  # in a row to keep a sandbox's workspace, by its id; the last one last

    async def stop(self, record: SandboxRecord, by: By, reason: str, *, if_expired: bool = False) -> SandboxRecord:
        owner, sandbox_id = record.owner, record.sandbox_id
        async with self._closing(record, reason, if_expired=if_expired) as closing:
            if closing is None:
                return record
            await self._keep(record, closing)
            stopped = await self._kept.move(owner, sandbox_id, _S.STOPPED, reason)
        await self._sandboxes.end(closing.binding, "destroyed", closer=closing.closer, by=by)
        await self._audit.record("sandbox.stopped", sandbox_id, owner=owner, by=by, reason=reason)
        return stopped

    async def destroy(
        self, record: SandboxRecord, by: By, reason: str, *, purge: bool = False, force: bool = False
    ) -> SandboxRecord:
        owner, sandbox_id = record.owner, record.sandbox_id
        binding = await self._sandboxes.find(owner, own_name(sandbox_id))
        if binding is not None and binding.state is BindingState.CLAIMING:
            await self._store.abandon_binding(binding)
        if binding is None or binding.state not in (BindingState.BOUND, BindingState.CLOSING):
            return await self._bury(record, by, reason, purge=purge)
        # Nobody has put anything into a pod that came too late, or of which nobody was told yet.
        if purge or self._kept.workspaces is None or record.state in (*WITHOUT_POD, *COMING):
            ended = await self._bury(record, by, reason, purge=purge)
            await self._sandboxes.end(binding, reason, by=by)
            return ended
        try:
            async with self._closing(record, reason) as closing:
                assert closing is not None
                await self._keep(record, closing)
                ended = await self._bury(record, by, reason)
        except SandboxGone:  # its pod went by itself: what was kept before is all there is
            return await self._bury(record, by, reason)
        except ManagerError as why:
            if not force:
                raise
            log.warning("sandbox_ended_unkept", extra={"sandbox": sandbox_id, "why": why.message})
            ended = await self._bury(record, by, reason)
        await self._sandboxes.end(binding, reason, by=by)
        return ended

    async def _bury(self, record: SandboxRecord, by: By, reason: str, *, purge: bool = False) -> SandboxRecord:
        """DESTROYED, with what was kept last as a snapshot for a week."""
        owner, sandbox_id, workspaces = record.owner, record.sandbox_id, self._kept.workspaces
        if workspaces is not None and not purge and (head := await workspaces.head(owner, sandbox_id)) is not None:
            last = await workspaces.get_snapshot(owner, last_snapshot(sandbox_id))
            if last is not None and last.manifest.number != head.number:  # of an end that broke off, and it ran on
                await workspaces.delete_snapshot(owner, last.snapshot_id)
            await workspaces.snapshot(
                owner, sandbox_id, name=f"last of {record.name or sandbox_id}", snapshot_id=last_snapshot(sandbox_id),
                keep_until=time.time() + LAST_KEPT_SEC,
            )  # fmt: skip
        destroyed = await self._kept.move(owner, sandbox_id, _S.DESTROYED, reason)
        self._failures.pop(sandbox_id, None)
        if workspaces is not None:
            await workspaces.delete_workspace(owner, sandbox_id)
        await self._audit.record("sandbox.destroyed", sandbox_id, owner=owner, by=by, reason=reason, purged=purge)
        return destroyed

    async def _keep(self, record: SandboxRecord, closing: Closing) -> None:
        """Returns where the closing is still ours: what was kept is all that there is, since nobody could change it."""
        with self._kept.progressing(record.sandbox_id) as progress:
            await self.save(record, closing.binding, progress)
        await closing.renewing.confirm()
        self._failures.pop(record.sandbox_id, None)

    async def save(self, record: SandboxRecord, binding: Binding, progress: Note | None = None) -> None:
        profile = self._profiles.get(record.profile)
        disk_bytes = profile.disk_bytes if profile is not None else None
        pod = self._sandboxes.bound_of(binding).pod
        await self._kept.needed().save(record.owner, record.sandbox_id, pod, disk_bytes=disk_bytes, progress=progress)

    @asynccontextmanager
    async def _closing(
        self, record: SandboxRecord, reason: str, *, if_expired: bool = False
    ) -> AsyncIterator[Closing | None]:
        """The sandbox, closed to everybody else; None where it is in use again. What fails opens it again.

        Raises SandboxGone where it has no pod."""
        owner, sandbox_id = record.owner, record.sandbox_id
        binding = await self._sandboxes.find(owner, own_name(sandbox_id))
        if binding is None or binding.state not in (BindingState.BOUND, BindingState.CLOSING):
            await self._lost(record, binding.ended if binding is not None else None)
        assert binding is not None
        claim_sec, closer = self._sandboxes.claim_sec, new_id()
        if not await self._store.close_binding(binding, claim_sec, closer, if_expired=if_expired):
            if not if_expired:
                raise SandboxStopped("another manager is stopping the sandbox", state=str(_S.STOPPING))
            yield None
            return
        self._sandboxes.invalidate(binding)
        async with Renewing(self._store, binding, claim_sec, closer) as renewing:
            closing = Closing(binding, closer, renewing)
            try:
                with renewing.breaking_off():
                    await self._kept.move(owner, sandbox_id, _S.STOPPING, reason)
                    yield closing
            except BaseException as why:
                said = why.code if isinstance(why, ManagerError) else "interrupted"
                if not renewing.lost:
                    await asyncio.shield(self._reopen(closing, said))
                raise

    async def _reopen(self, closing: Closing, why: str) -> None:
        """It could not be kept: it runs on, if its pod is still there, and is looked at again.

        The record first: where it says already that all is done, or cannot be had, the reaper takes the closing up."""
        binding = closing.binding
        owner, sandbox_id = binding.owner, binding.sandbox_id
        failures = self._failures[sandbox_id] = self._failures.pop(sandbox_id, 0) + 1
        if len(self._failures) > _FAILURES:
            del self._failures[next(iter(self._failures))]
        first_sec, last_sec = RETRY_STOP_SEC
        retry_sec = min(last_sec, first_sec * 2 ** min(failures - 1, 10))
        try:
            await self._kept.move(owner, sandbox_id, _S.RUNNING, f"not_kept:{why}")
            if await self._store.reopen_binding(binding, retry_sec, closing.closer):
                pod = self._sandboxes.bound_of(binding).pod
                await self._client.push_lease(pod, LeaseRequest(hard_end_sec=KEEP_SEC + last_sec))
        except (ManagerError, ExecutorRefused) as error:
            log.warning("sandbox_not_reopened", extra={"sandbox": sandbox_id, "why": error.message})

    async def _lost(self, record: SandboxRecord, ended: PodEnded | None) -> None:
        """Raises SandboxGone, the record saying FAILED."""
        ended = ended if ended is not None else PodEnded(reason="lost", at=time.time())
        await self._kept.move(record.owner, record.sandbox_id, _S.FAILED, ended.reason)
        raise gone(ended)


def last_snapshot(sandbox_id: str) -> str:
    """The id of what a destroyed sandbox leaves behind."""
    return f"{sandbox_id}last"
