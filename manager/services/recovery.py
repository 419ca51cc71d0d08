"""Makes the store and the pods agree again: at the start, and now and then.

A crash may have come between any two steps. Pods that are claimed and whose task the store does not know are adopted,
by their labels alone; claimed pods that nobody will ever use are deleted; records whose pod is gone are ended. Pool
pods are the pool's business.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from typing import Final

from manager.errors import ManagerError, StoreUnavailable
from manager.model import LABEL_STATE, NOTE_BOUND_AT, Binding, BindingState, Pod, PodState
from manager.services.claims import binding_of
from manager.services.pods import PodWatch
from manager.services.sandboxes import Sandboxes
from manager.store.base import Store

log = logging.getLogger(__name__)

EVERY_SEC: Final = 60.0
_LEAD_SEC: Final = 90.0


class Recovery:
    def __init__(self, store: Store, sandboxes: Sandboxes, watches: Mapping[str, PodWatch], holder: str) -> None:
        self._store = store
        self._sandboxes = sandboxes
        self._watches = watches
        self._holder = holder
        self.adopted = 0
        self.deleted = 0
        self.ended = 0

    async def recover_forever(self) -> None:
        while True:
            await asyncio.sleep(EVERY_SEC * random.uniform(0.8, 1.2))
            try:
                if await self._store.lead("recovery", self._holder, _LEAD_SEC):
                    await self.recover()
            except (ManagerError, OSError) as why:
                log.warning("recovery_paused", extra={"why": str(why)})

    async def recover(self) -> None:
        """One pass. Raises StoreUnavailable, and what a provider's list raises; safe to repeat."""
        living: set[tuple[str, str]] = set()
        for target, watch in self._watches.items():
            # Listed before the records are read: a pod made in between belongs to a record that is still claiming.
            pods = await watch.provider.list()
            living |= {(target, pod.name) for pod in pods}
            claimed = [pod for pod in pods if pod.labels.get(LABEL_STATE) != PodState.IDLE and not pod.deleting]
            claimed.sort(key=_claimed_at)  # of two pods with one task the older claim is seen, and kept, first
            for pod in claimed:
                try:
                    await self._settle(watch, pod)
                except StoreUnavailable:
                    raise
                except (ManagerError, OSError) as why:
                    log.warning("pod_not_settled", extra={"pod": pod.name, "why": str(why)})
        for binding in await self._store.list_bindings():
            if binding.state is BindingState.BOUND and (binding.target, binding.pod) not in living:
                await self._end_if_gone(binding)

    async def _settle(self, watch: PodWatch, pod: Pod) -> None:
        told = binding_of(pod)
        if told is None:
            if self._overdue(pod):
                await self._delete(watch, pod, "names no task")
            return
        record = await self._store.get_binding(told.owner, told.task_id)
        if record is not None and record.pod == pod.name and record.state is BindingState.BOUND:
            return
        ours = record is not None and record.state is BindingState.CLAIMING and record.token == told.token
        if record is not None and not ours:
            await self._delete(watch, pod, "its task has another pod, or none since its own was ended")
        elif await self._sandboxes.adopt(pod, told):
            self.adopted += 1  # no record, or the claim of a manager that died before it could say so
        elif self._overdue(pod):
            await self._delete(watch, pod, "it was claimed and never bound")

    def _overdue(self, pod: Pod) -> bool:
        """Older than any claim that may still be under way."""
        return time.time() - _claimed_at(pod) > self._sandboxes.claim_sec

    async def _delete(self, watch: PodWatch, pod: Pod, why: str) -> None:
        log.warning("stray_pod_deleted", extra={"pod": pod.name, "why": why})
        await watch.provider.delete(pod.name)
        watch.drop(pod, "destroyed")
        self.deleted += 1

    async def _end_if_gone(self, binding: Binding) -> None:
        watch = self._watches.get(binding.target)
        if watch is None:
            return  # another manager's target
        if await watch.provider.get(binding.pod) is None:
            ended = self._sandboxes.ended(binding.pod)
            if await self._sandboxes.end(binding, ended.reason if ended is not None else "lost"):
                self.ended += 1


def _claimed_at(pod: Pod) -> float:
    """Seconds since the epoch; of the pod's creation where its claim does not say."""
    try:
        return float(pod.annotations.get(NOTE_BOUND_AT) or pod.created_at)
    except ValueError:
        return pod.created_at
