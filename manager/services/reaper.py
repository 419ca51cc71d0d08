"""Takes back what nobody needs any more: sandboxes whose lease has ended.

One elected manager looks. A lease that ran out is only the question; the executor's answer decides, and the record is
ended in the same step that finds the lease still expired.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from manager.errors import ManagerError
from manager.executor_client import ExecutorClient
from manager.model import Binding, BindingState, LeaseTerms, owned_by_name
from manager.services.keeping import TaskWorkspaces
from manager.services.leases import Leases
from manager.services.longlived.keeper import Keeper
from manager.services.pods import Lead, PodWatch
from manager.services.recovery import Recovery
from manager.services.sandboxes import Sandboxes
from manager.store.base import Lease, Store

log = logging.getLogger(__name__)

_LEAD_SEC: Final = 15.0
_KEPT_SEC: Final = 20.0
_ROUND_SEC: Final = 5.0  # then the next look begins, beside what is not over
_AT_ONCE: Final = 32
_BATCH: Final = 100
_MAX_SILENT: Final = 3  # looks in a row at which an executor did not answer, its pod being there


class Reaper:
    def __init__(
        self,
        store: Store,
        sandboxes: Sandboxes,
        leases: Leases,
        client: ExecutorClient,
        watches: Mapping[str, PodWatch],
        holder: str,
        *,
        lead: Lead,
        recovery: Recovery,
        look_sec: float = 2.0,
        kept: Keeper | None = None,
        tasks: TaskWorkspaces | None = None,
    ) -> None:
        self._store = store
        self._sandboxes = sandboxes
        self._leases = leases
        self._client = client
        self._watches = watches
        self._holder = holder
        self._lead = lead
        self._look_sec = look_sec
        self._recovery = recovery
        self._kept = kept
        self._tasks = tasks
        self._silent: dict[str, int] = {}  # by sandbox
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self.reaped = 0
        self.spared = 0

    async def reap_forever(self) -> None:
        """Looks while this manager leads; an outage of the store only pauses it."""
        try:
            while True:
                await asyncio.sleep(self._look_sec * random.uniform(0.8, 1.2))
                try:
                    if await self._lead("reaper", self._holder, _LEAD_SEC):
                        await self.reap()
                except ManagerError as why:
                    log.warning("reaper_paused", extra={"why": why.message})
        finally:
            await self._break_off()

    async def look_at_kept_forever(self) -> None:
        """The records of long-lived sandboxes, which no lease tells of while they have no pod."""
        while True:
            await asyncio.sleep(_KEPT_SEC * random.uniform(0.8, 1.2))
            try:
                if self._kept is not None and await self._lead("kept", self._holder, _KEPT_SEC * 1.5):
                    await self._kept.look()
            except ManagerError as why:
                log.warning("kept_sandboxes_not_looked_at", extra={"why": why.message})

    async def reap(self) -> None:
        """One look at every expired lease and claim; what takes its time goes on beside the next. Raises
        StoreUnavailable."""
        expired = await self._store.expired_leases(_BATCH)
        self._silent = {lease.sandbox_id: self._silent.get(lease.sandbox_id, 0) for lease in expired}
        for lease in expired:
            self._begin(f"reap-{lease.sandbox_id}", self._look(lease))
        self._begin("settle-claims", self._settle())
        await asyncio.wait(self._under_way.values(), timeout=_ROUND_SEC)
        for name in [name for name, looking in self._under_way.items() if looking.done()]:
            looked = self._under_way.pop(name)
            why = None if looked.cancelled() else looked.exception()
            if isinstance(why, ManagerError | OSError):
                log.warning("sandbox_not_reaped", extra={"look": name, "why": str(why)})
            elif why is not None:
                raise why

    def _begin(self, name: str, look: Coroutine[Any, Any, None]) -> None:
        """One of a name at a time: an executor that is silent keeps nobody else waiting."""
        if name in self._under_way:
            look.close()
        else:
            self._under_way[name] = asyncio.create_task(look, name=name)

    async def _break_off(self) -> None:
        for looking in self._under_way.values():
            looking.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way.values())
        self._under_way.clear()

    async def _look(self, lease: Lease) -> None:
        async with self._at_once:
            sandbox_id = lease.sandbox_id
            binding = await self._store.find_sandbox(sandbox_id)
            if binding is not None and binding.state is BindingState.CLOSING:
                await self._take_up(binding)
                return
            if binding is None or binding.state is not BindingState.BOUND:
                return
            if lease.now < lease.hard_end:
                if self._leases.operations(sandbox_id):
                    self._leases.changed(sandbox_id)  # its renewal is late, not its work over
                    return
                if self._sandboxes.ended(binding.pod) is None:
                    working = await self._works(binding, lease.terms)
                    if working is None:
                        return
                    if working:
                        self.spared += 1
                        await self._store.extend_lease(sandbox_id, working)
                        return
            ended = self._sandboxes.ended(binding.pod)
            if ended is None and self._kept is not None and owned_by_name(binding.task_id) is not None:
                await (self._kept.stop_quiet if lease.now < lease.hard_end else self._kept.expire)(binding)
                return
            if ended is None and self._tasks is not None and self._tasks.keeps(binding.profile):
                self._tasks.reclaim(binding)
                return
            if await self._sandboxes.end(binding, ended.reason if ended else "expired", if_expired=True, by="reaper"):
                self.reaped += 1
                age_sec = round(time.time() - binding.created_at)
                log.info("sandbox_expired", extra={"sandbox": sandbox_id, "pod": binding.pod, "age_sec": age_sec})

    async def _settle(self) -> None:
        """Whoever was making their pods has fallen silent over it."""
        # Of one that is made here the renewal is late, not the work over.
        dead = [claim for claim in await self._store.expired_claims(_BATCH) if not self._sandboxes.making(claim)]
        await self._recovery.settle_claims(dead)
        for claim in dead:
            if self._kept is not None and owned_by_name(claim.task_id) is not None:
                await self._kept.claim_died(claim.owner, claim.sandbox_id)

    async def _take_up(self, binding: Binding) -> None:
        """Whoever was closing it has fallen silent over it."""
        if owned_by_name(binding.task_id) is None and self._tasks is not None:
            self._tasks.reclaim(binding)
        elif self._kept is not None:
            await self._kept.take_up(binding)

    async def _works(self, binding: Binding, terms: LeaseTerms) -> float | None:
        """How many seconds more the sandbox is to live for what its pod does: 0 where that is nothing; None: it cannot
        be said yet."""
        try:
            info = await self._client.lease(self._sandboxes.bound_of(binding).pod)
        except ManagerError as why:
            watch = self._watches.get(binding.target)
            if watch is not None and await watch.provider.get(binding.pod) is None:
                return 0.0
            silent = self._silent[binding.sandbox_id] = self._silent.get(binding.sandbox_id, 0) + 1
            log.warning("executor_silent", extra={"pod": binding.pod, "why": why.message, "times": silent})
            return None if silent < _MAX_SILENT else 0.0
        # What works without an open call, a background process or a terminal's output, tells nobody of its end: so it
        # is asked for again when an idle length has passed; then the pod lives on for what is left of one since then.
        return max(0.0, terms.idle_sec - info.quiet_for_sec)
