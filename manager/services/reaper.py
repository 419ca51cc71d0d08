"""Takes back what nobody needs any more: sandboxes whose lease has ended.

One elected manager looks. A lease that ran out is only the question; the executor's answer decides, and the record is
ended in the same step that finds the lease still expired.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from typing import Final

from manager.errors import ManagerError
from manager.executor_client import ExecutorClient
from manager.model import Binding, BindingState, LeaseTerms
from manager.services.leases import Leases
from manager.services.pods import PodWatch
from manager.services.sandboxes import Sandboxes
from manager.store.base import Lease, Store

log = logging.getLogger(__name__)

_LEAD_SEC: Final = 15.0
_AT_ONCE: Final = 8
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
        look_sec: float = 2.0,
    ) -> None:
        self._store = store
        self._sandboxes = sandboxes
        self._leases = leases
        self._client = client
        self._watches = watches
        self._holder = holder
        self._look_sec = look_sec
        self._silent: dict[str, int] = {}  # by sandbox
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self.reaped = 0
        self.spared = 0

    async def reap_forever(self) -> None:
        """Looks while this manager leads; an outage of the store only pauses it."""
        while True:
            await asyncio.sleep(self._look_sec * random.uniform(0.8, 1.2))
            try:
                if await self._store.lead("reaper", self._holder, _LEAD_SEC):
                    await self.reap()
            except ManagerError as why:
                log.warning("reaper_paused", extra={"why": why.message})

    async def reap(self) -> None:
        """One look at every expired lease. Raises StoreUnavailable."""
        expired = await self._store.expired_leases(_BATCH)
        self._silent = {lease.sandbox_id: self._silent.get(lease.sandbox_id, 0) for lease in expired}
        results = await asyncio.gather(*(self._look(lease) for lease in expired), return_exceptions=True)
        for result in results:
            if isinstance(result, ManagerError):
                log.warning("sandbox_not_reaped", extra={"why": result.message})
            elif isinstance(result, BaseException):
                raise result

    async def _look(self, lease: Lease) -> None:
        async with self._at_once:
            sandbox_id = lease.sandbox_id
            binding = await self._store.find_sandbox(sandbox_id)
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
            if await self._sandboxes.end(binding, ended.reason if ended else "expired", if_expired=True):
                self.reaped += 1
                age_sec = round(time.time() - binding.created_at)
                log.info("sandbox_expired", extra={"sandbox": sandbox_id, "pod": binding.pod, "age_sec": age_sec})

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
        if info.running > 0 or info.operations > 0:
            return terms.active_sec
        # A terminal is work while it shows something, also to nobody: it lives on for what is left of the idle length.
        return max(0.0, terms.idle_sec - info.quiet_for_sec) if info.terminals else 0.0
