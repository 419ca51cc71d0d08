"""What long-lived sandboxes and tasks need of whoever keeps workspaces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from manager.executor_client import PodRef
from manager.model import Owner
from manager.services.manifests import Manifest, Snapshot
from manager.services.sources import Source

Note = Callable[[int, int | None], None]  # bytes done, and of how many


class Workspaces(Protocol):
    """`manager.services.checkpoints.Checkpoints`: what is in a sandbox's workspace, kept in object storage."""

    async def head(self, owner: Owner, workspace: str) -> Manifest | None: ...

    async def save(
        self,
        owner: Owner,
        workspace: str,
        pod: PodRef,
        *,
        disk_bytes: int | None = None,
        progress: Note | None = None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> Manifest: ...

    async def restore(
        self, owner: Owner, workspace: str, pod: PodRef, *, progress: Note | None = None
    ) -> Manifest | None: ...

    async def fork(self, owner: Owner, workspace: str, new_workspace: str) -> Manifest: ...

    async def from_snapshot(self, owner: Owner, snapshot_id: str, new_workspace: str) -> Manifest: ...

    async def snapshot(
        self,
        owner: Owner,
        workspace: str,
        *,
        name: str = "",
        snapshot_id: str | None = None,
        keep_until: float | None = None,
    ) -> Snapshot: ...

    async def get_snapshot(self, owner: Owner, snapshot_id: str) -> Snapshot | None: ...

    async def list_snapshots(self, owner: Owner, *, after: str = "", limit: int = 100) -> list[Snapshot]: ...

    async def delete_snapshot(self, owner: Owner, snapshot_id: str) -> bool: ...

    async def delete_workspace(self, owner: Owner, workspace: str) -> bool: ...


class SourceService(Protocol):
    """`manager.services.sources.Sources`."""

    def check(self, owner: Owner, source: Source) -> None: ...

    async def prepare(
        self, owner: Owner, workspace: str, source: Source, *, disk_bytes: int | None = None
    ) -> Manifest: ...
