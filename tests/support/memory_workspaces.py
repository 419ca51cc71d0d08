"""Workspaces in memory: what fake executors have in them, kept and put back. The rules' tests need no layers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from manager.errors import NotFound
from manager.executor_client import PodRef
from manager.model import Owner, new_id
from manager.services.longlived.workspaces import Note
from manager.services.manifests import Manifest, Snapshot
from tests.support.memory_provider import MemoryProvider

Content = dict[str, bytes]


class MemoryWorkspaces:
    """Workspaces of long-lived sandboxes. `hook` is awaited with the name of every step before it has any effect."""

    def __init__(self, provider: MemoryProvider) -> None:
        self._provider = provider
        self.hook: Callable[[str], Awaitable[None]] | None = None
        self.heads: dict[tuple[Owner, str], tuple[Manifest, Content]] = {}
        self.snapshots: dict[tuple[Owner, str], tuple[Snapshot, Content]] = {}
        self.saves = 0

    async def _enter(self, step: str) -> None:
        if self.hook is not None:
            await self.hook(step)

    async def head(self, owner: Owner, workspace: str) -> Manifest | None:
        found = self.heads.get((owner, workspace))
        return None if found is None else found[0]

    async def save(
        self,
        owner: Owner,
        workspace: str,
        pod: PodRef,
        *,
        disk_bytes: int | None = None,
        progress: Note | None = None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> Manifest:
        await self._enter("save")
        if check is not None:
            await check()
        if progress is not None:
            progress(1, 2)
        content = dict(self._provider.executors[pod.name].files)
        self.saves += 1
        return self._put(owner, workspace, content)

    def _put(self, owner: Owner, workspace: str, content: Content) -> Manifest:
        before = self.heads.get((owner, workspace))
        number = 1 if before is None else before[0].number + 1
        manifest = Manifest(owner=owner, workspace=workspace, number=number, saved_at=time.time())
        self.heads[owner, workspace] = (manifest, content)
        return manifest

    async def restore(
        self, owner: Owner, workspace: str, pod: PodRef, *, progress: Note | None = None
    ) -> Manifest | None:
        await self._enter("restore")
        found = self.heads.get((owner, workspace))
        if found is None:
            return None
        executor = self._provider.executors[pod.name]
        assert not executor.files, "a workspace is put into a pod that nobody has used"
        assert executor.bound is None, "a pod that is filled by half must be nobody's"
        executor.files.update(found[1])
        return found[0]

    async def fork(self, owner: Owner, workspace: str, new_workspace: str) -> Manifest:
        await self._enter("fork")
        found = self.heads.get((owner, workspace))
        if found is None:
            raise NotFound("nothing was saved")
        return self._put(owner, new_workspace, found[1])

    async def from_snapshot(self, owner: Owner, snapshot_id: str, new_workspace: str) -> Manifest:
        found = self.snapshots.get((owner, snapshot_id))
        if found is None:
            raise NotFound("there is no such snapshot")
        return self._put(owner, new_workspace, found[1])

    async def snapshot(
        self,
        owner: Owner,
        workspace: str,
        *,
        name: str = "",
        snapshot_id: str | None = None,
        keep_until: float | None = None,
    ) -> Snapshot:
        await self._enter("snapshot")
        manifest, content = self.heads[owner, workspace]
        key = (owner, snapshot_id or new_id("n"))
        if key not in self.snapshots:
            snapshot = Snapshot(
                snapshot_id=key[1], name=name, created_at=time.time(), manifest=manifest, keep_until=keep_until
            )
            self.snapshots[key] = (snapshot, content)
        return self.snapshots[key][0]

    async def get_snapshot(self, owner: Owner, snapshot_id: str) -> Snapshot | None:
        found = self.snapshots.get((owner, snapshot_id))
        return None if found is None else found[0]

    async def list_snapshots(self, owner: Owner, *, after: str = "", limit: int = 100) -> list[Snapshot]:
        mine = [one for (whose, _), (one, _) in self.snapshots.items() if whose == owner and one.snapshot_id > after]
        return sorted(mine, key=lambda one: one.snapshot_id)[:limit]

    async def delete_snapshot(self, owner: Owner, snapshot_id: str) -> bool:
        return self.snapshots.pop((owner, snapshot_id), None) is not None

    async def delete_workspace(self, owner: Owner, workspace: str) -> bool:
        return self.heads.pop((owner, workspace), None) is not None
