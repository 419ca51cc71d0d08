"""The services of one manager, put together in the order in which they need each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from manager.config import ProjectPolicy
from manager.errors import StoreUnavailable
from manager.executor_client import ExecutorClient
from manager.model import LeaseTerms, Owner, Profile
from manager.providers.base import Provider
from manager.services.claims import Claims
from manager.services.idempotency import Marks
from manager.services.leases import Leases
from manager.services.pods import EndedPods, PodWatch
from manager.services.pool import WarmPool
from manager.services.reaper import Reaper
from manager.services.recovery import Recovery
from manager.services.sandboxes import Sandboxes
from manager.services.tasks import TaskSessions
from manager.store.base import Store


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
        start_limit_sec: float = 60.0,
        reap_sec: float = 2.0,
    ) -> None:
        """`providers` and `regions` by target; `secret` is what pod tokens are derived from; `holder` names this
        manager's life: another one after each restart."""
        self.holder = holder
        self._store = store
        self.client = ExecutorClient(secret)
        self.ended = EndedPods()
        self.watches = {name: PodWatch(provider, self.ended) for name, provider in providers.items()}
        self.leases = Leases(store, holder)
        self.pool = WarmPool(store, self.watches, self.client, profiles, holder)
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
            start_limit_sec=start_limit_sec,
        )
        self.marks = Marks(store)
        self.tasks = TaskSessions(store, self.sandboxes, self.leases, self.client, self.marks)
        self.reaper = Reaper(store, self.sandboxes, self.leases, self.client, self.watches, holder, look_sec=reap_sec)
        self.recovery = Recovery(store, self.sandboxes, self.watches, holder)

    async def start(self) -> None:
        """Knows the pods and agrees with the store about them when it returns. Raises what store or provider raise."""
        for watch in self.watches.values():
            await watch.sync()
        await self.recovery.recover()

    async def run_forever(self) -> None:
        """The background loops. A loop that dies of a defect ends them all and raises: the process should end too."""
        async with asyncio.TaskGroup() as loops:
            for target, watch in self.watches.items():
                loops.create_task(watch.watch_forever(), name=f"pod-watch-{target}")
            loops.create_task(self.leases.flush_forever(), name="lease-flush")
            loops.create_task(self.marks.flush_forever(), name="idempotency-marks")
            loops.create_task(self.reaper.reap_forever(), name="lease-reaper")
            loops.create_task(self.recovery.recover_forever(), name="recovery")
            loops.create_task(self.pool.refill_forever(), name="pool-refill")
            loops.create_task(self.pool.push_forever(), name="pool-push")

    async def close(self) -> None:
        """Takes back claims under way, writes the last lease counts and closes the connections. Pods live on."""
        await self.sandboxes.close()
        await self.claims.close()
        await self.marks.close()
        await self.leases.close()
        for name in ("pool", "reaper", "recovery"):
            try:
                await self._store.lead(name, self.holder, 0.0)  # the next manager need not wait for it to lapse
            except StoreUnavailable:
                break
        await self.client.close()
