"""The services of one manager, put together in the order in which they need each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from manager.config import ProjectPolicy
from manager.errors import ManagerError
from manager.executor_client import ExecutorClient
from manager.model import LeaseTerms, Owner, Profile, SandboxRecord
from manager.providers.base import Electing, Provider
from manager.services.audit import AuditLog
from manager.services.audit_archive import AuditArchive
from manager.services.checkpoints import Checkpoints
from manager.services.claims import Claims
from manager.services.idempotency import Marks
from manager.services.keeping import TaskWorkspaces
from manager.services.leases import Leases
from manager.services.longlived.keeper import Keeper
from manager.services.longlived.service import LongLived
from manager.services.pods import EndedPods, PodWatch
from manager.services.pool import WarmPool
from manager.services.reaper import Reaper
from manager.services.recovery import Recovery
from manager.services.sandboxes import Sandboxes
from manager.services.sweeping import Sweeper
from manager.services.tasks import TaskSessions
from manager.services.writethrough import WriteThrough
from manager.store.base import Cache, Store
from manager.store.objects import Objects
from manager.store.records import Records

_SWEEP_LEAD_SEC: Final = 15.0


class Services:
    """`start`, then `run_forever` beside the server, then `close`; store and providers stay their opener's."""

    def __init__(
        self,
        *,
        store: Store,
        providers: Mapping[str, Provider],
        regions: Mapping[str, str | None],
        profiles: Sequence[Profile],
        policy: Callable[[Owner], ProjectPolicy],
        terms: LeaseTerms,
        secret: bytes,
        holder: str,
        objects: Objects,
        cache: Cache,
        audit: AuditLog | None = None,
        audit_keep_sec: float = 400 * 86_400.0,
        start_limit_sec: float = 60.0,
        reap_sec: float = 2.0,
    ) -> None:
        """`objects` keeps what must outlive Redis, `cache` copies of it. `providers` and `regions` by target; `secret`
        is what pod tokens are derived from; `holder` names this manager's life: another one after each restart."""
        self.holder = holder
        self._store = store
        self.client = ExecutorClient(secret)
        self.ended = EndedPods()
        # Where a data plane can elect, it does: then a store that is away stops nobody from refilling.
        electing = next((provider for provider in providers.values() if isinstance(provider, Electing)), store)
        self._lead = electing.lead
        self.watches = {name: PodWatch(provider, self.ended) for name, provider in providers.items()}
        self.leases = Leases(store, holder)
        self.pool = WarmPool(self._lead, store.meet, self.watches, self.client, profiles, holder)
        self.claims = Claims(store, self.watches, self.client, self.pool)
        self.sandboxes = Sandboxes(
            store,
            self.watches,
            regions,
            self.client,
            self.leases,
            self.claims,
            profiles,
            policy,
            terms,
            self.ended,
            audit=audit,
            start_limit_sec=start_limit_sec,
        )
        self.marks = Marks(store)
        self.audit_archive = AuditArchive(store, objects, holder, keep_sec=audit_keep_sec)
        self.tasks = TaskSessions(store, self.sandboxes, self.leases, self.client, self.marks)
        self.longlived = LongLived(
            Records(objects, cache, "sandboxes", SandboxRecord),
            store,
            self.sandboxes,
            self.tasks,
            self.client,
            profiles,
            terms,
            audit=audit,
        )
        self.checkpoints = Checkpoints(objects, cache, self.client)
        self.sweeper = Sweeper(objects, self.checkpoints, self._sweeps)
        self.longlived.kept.workspaces = self.checkpoints
        self.kept_tasks = TaskWorkspaces(store, self.sandboxes, self.checkpoints, profiles, audit=audit)
        self.write_through = WriteThrough(self.checkpoints, self.client, profiles, self.sandboxes.is_current)
        self.tasks.write_through = self.write_through
        self.tasks.kept = self.sandboxes.task_keeper = self.kept_tasks
        self.sandboxes.keeper = self.keeper = Keeper(self.longlived, store, self.sandboxes, audit=audit)
        self.recovery = Recovery(store, self.sandboxes, self.watches, holder, lead=self._lead)
        self.reaper = Reaper(
            store,
            self.sandboxes,
            self.leases,
            self.client,
            self.watches,
            holder,
            lead=self._lead,
            recovery=self.recovery,
            look_sec=reap_sec,
            kept=self.keeper,
            tasks=self.kept_tasks,
        )
        self.sandboxes.settle = self.recovery.settle

    async def start(self) -> None:
        """Knows the pods and agrees with the store about them when it returns. Raises what store or provider raise."""
        for watch in self.watches.values():
            await watch.sync()
        await self.pool.meet()
        await self.recovery.recover()

    async def run_forever(self) -> None:
        """The background loops. A loop that dies of a defect ends them all and raises: the process should end too."""
        async with asyncio.TaskGroup() as loops:
            for target, watch in self.watches.items():
                loops.create_task(watch.watch_forever(), name=f"pod-watch-{target}")
            loops.create_task(self.leases.flush_forever(), name="lease-flush")
            loops.create_task(self.marks.flush_forever(), name="idempotency-marks")
            loops.create_task(self.reaper.reap_forever(), name="lease-reaper")
            loops.create_task(self.reaper.look_at_kept_forever(), name="kept-sandboxes")
            loops.create_task(self.sweeper.sweep_forever(), name="checkpoint-sweeper")
            loops.create_task(self.recovery.recover_forever(), name="recovery")
            loops.create_task(self.pool.refill_forever(), name="pool-refill")
            loops.create_task(self.pool.push_forever(), name="pool-push")
            loops.create_task(self.audit_archive.ship_forever(), name="audit-archive")

    async def _sweeps(self) -> bool:
        """Whether this manager is the one that sweeps object storage."""
        return await self._lead("checkpoints", self.holder, _SWEEP_LEAD_SEC)

    async def close(self) -> None:
        """Takes back claims under way, writes the last lease counts and closes the connections. Pods live on."""
        await self.longlived.close()
        await self.write_through.close()
        await self.kept_tasks.close()
        await self.sandboxes.close()
        await self.claims.close()
        await self.marks.close()
        await self.leases.close()
        await self.pool.leave()
        for name in ("pool", "reaper", "kept", "checkpoints", "recovery"):
            try:
                await self._lead(name, self.holder, 0.0)  # the next manager need not wait for it to lapse
            except ManagerError:
                break
        await self.client.close()
