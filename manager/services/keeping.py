"""Tasks' workspaces outlive their pods: kept when a quiet pod is reclaimed, put into the next one.

A task's workspace in object storage goes by the task's label, so that it is found again also where Redis knows nothing
of the task any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from manager.errors import ManagerError
from manager.executor_client import PodRef
from manager.model import Binding, Owner, Profile, new_id, task_label
from manager.services.audit import AuditLog, NoAudit
from manager.services.longlived.workspaces import Workspaces
from manager.services.manifests import Manifest
from manager.services.renewing import Renewing
from manager.services.sandboxes import Bound, Sandboxes, gone
from manager.store.base import Store

log = logging.getLogger(__name__)

RETRY_SEC: Final = 60.0  # a pod whose workspace could not be kept is looked at again after this


class TaskWorkspaces:
    def __init__(
        self,
        store: Store,
        sandboxes: Sandboxes,
        workspaces: Workspaces,
        profiles: Sequence[Profile],
        *,
        audit: AuditLog | None = None,
    ) -> None:
        self._store = store
        self._sandboxes = sandboxes
        self._workspaces = workspaces
        self._profiles: Mapping[str, Profile] = {profile.name: profile for profile in profiles}
        self._audit = audit or NoAudit()
        self._reclaiming: dict[str, asyncio.Task[None]] = {}  # by sandbox
        self.reclaimed = 0
        self.failures = 0

    @property
    def busy(self) -> bool:
        """Whether any task is being reclaimed here."""
        return bool(self._reclaiming)

    def keeps(self, profile: str) -> bool:
        known = self._profiles.get(profile)
        return known is not None and known.keep_workspace

    async def fill(self, held: Binding) -> Callable[[PodRef], Awaitable[None]] | None:
        """What puts the task's workspace into its new pod; None where nothing of it was kept. Raises StoreUnavailable:
        a task that may have a workspace is not begun without it."""
        workspace = task_label(held.owner, held.task_id)
        if await self._workspaces.head(held.owner, workspace) is None:
            return None

        async def put(pod: PodRef) -> None:
            await self._workspaces.restore(held.owner, workspace, pod)

        return put

    async def save(self, bound: Bound) -> Manifest:
        """What is in the pod's workspace now, and in no other's, durable when this returns."""
        binding = bound.binding
        profile = self._profiles.get(binding.profile)

        async def check() -> None:
            if not await self._sandboxes.is_current(binding):
                raise gone(self._sandboxes.ended(binding.pod))

        return await self._workspaces.save(
            binding.owner,
            task_label(binding.owner, binding.task_id),
            bound.pod,
            disk_bytes=profile.disk_bytes if profile is not None else None,
            check=check,
        )

    async def forget(self, owner: Owner, task_id: str) -> None:
        """The task is retired: nothing of it is kept."""
        await self._workspaces.delete_workspace(owner, task_label(owner, task_id))

    def reclaim(self, binding: Binding) -> None:
        """Keeps the workspace of a task whose lease has passed, then ends its pod. Returns at once; what cannot be kept
        is tried again, until the pod's own end."""
        if binding.sandbox_id in self._reclaiming:
            return
        reclaiming = asyncio.create_task(self._reclaim(binding), name=f"reclaim-{binding.sandbox_id}")
        self._reclaiming[binding.sandbox_id] = reclaiming
        reclaiming.add_done_callback(lambda done: self._done(binding, done))

    def _done(self, binding: Binding, done: asyncio.Task[None]) -> None:
        del self._reclaiming[binding.sandbox_id]
        if not done.cancelled() and (why := done.exception()) is not None:
            log.error("task_not_reclaimed", extra={"sandbox": binding.sandbox_id}, exc_info=why)

    async def _reclaim(self, binding: Binding) -> None:
        claim_sec, closer = self._sandboxes.claim_sec, new_id()
        try:
            if not await self._store.close_binding(binding, claim_sec, closer, if_expired=True):
                return  # in use again, or another manager is at it
            self._sandboxes.invalidate(binding)
            async with Renewing(self._store, binding, claim_sec, closer):
                try:
                    await self.save(self._sandboxes.bound_of(binding))
                except BaseException:
                    self.failures += 1
                    await asyncio.shield(self._store.reopen_binding(binding, RETRY_SEC, closer))
                    raise
            if not await self._sandboxes.end(binding, "expired", closer=closer, by="reaper"):
                now = await self._store.get_binding(binding.owner, binding.task_id)
                if now is not None and now.ended is not None and now.ended.reason == "destroyed":
                    await self.forget(binding.owner, binding.task_id)  # retired meanwhile: nothing is to be left
            else:
                self.reclaimed += 1
                await self._audit.record(
                    "task.reclaimed", binding.sandbox_id, owner=binding.owner, by="reaper", task=binding.task_id
                )
                age_sec = round(time.time() - binding.created_at)
                log.info(
                    "sandbox_expired", extra={"sandbox": binding.sandbox_id, "pod": binding.pod, "age_sec": age_sec}
                )
        except ManagerError as why:
            log.warning("workspace_not_kept", extra={"sandbox": binding.sandbox_id, "why": why.message})

    async def close(self) -> None:
        """Breaks off what is under way: the pods live on, and are looked at again."""
        for reclaiming in list(self._reclaiming.values()):
            reclaiming.cancel()
        while self._reclaiming:
            await asyncio.wait(list(self._reclaiming.values()))
