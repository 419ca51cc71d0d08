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
from collections.abc import Mapping, Sequence
from typing import Final

from manager.errors import ManagerError, StoreUnavailable
from manager.model import (
    LABEL_STATE,
    NOTE_BOUND_AT,
    NOTE_TOKEN,
    Binding,
    BindingState,
    Pod,
    PodState,
)
from manager.services.claims import binding_of
from manager.services.pods import Lead, PodWatch
from manager.services.sandboxes import Sandboxes
from manager.steps import in_steps
from manager.store.base import Store

log = logging.getLogger(__name__)

_WITH_POD: Final = (BindingState.BOUND, BindingState.CLOSING)
EVERY_SEC: Final = 45.0
LIST_SEC: Final = 600.0  # a pass takes the watch's word for what pods there are, but for one in so long
_LOOK_SEC: Final = 5.0  # between two looks at who leads, and whether a pass is due
_LEAD_SEC: Final = 15.0
_STRAY_SEC: Final = 30.0  # a claimed pod that no record tells of is nobody's after this
# Whoever dies, and whenever, a pod that is nobody's is gone within a minute: the next pass begins EVERY_SEC + _LOOK_SEC
# after the last, and one that saw a pod too young is followed by another as soon as that is old enough.


class Recovery:
    def __init__(
        self, store: Store, sandboxes: Sandboxes, watches: Mapping[str, PodWatch], holder: str, *, lead: Lead
    ) -> None:
        self._store = store
        self._lead = lead
        self._sandboxes = sandboxes
        self._watches = watches
        self._holder = holder
        self.adopted = 0
        self.deleted = 0
        self.ended = 0
        self.recounted = 0  # slots that were nobody's
        self._due_at = 0.0  # monotonic: of the next pass
        self._list_at = 0.0  # monotonic: of the next pass that lists the pods
        self._settling: asyncio.Task[None] | None = None

    async def recover_forever(self) -> None:
        """A pass every so often, and one as soon as this manager leads: whoever led before it may have died."""
        led = False
        while True:
            await asyncio.sleep(_LOOK_SEC * random.uniform(0.8, 1.2))
            try:
                leads = await self._lead("recovery", self._holder, _LEAD_SEC)
                if leads and (not led or time.monotonic() >= self._due_at):
                    self._due_at = time.monotonic() + (EVERY_SEC if led else _STRAY_SEC)
                    await self.recover(anew=not led)
                led = leads
            except (ManagerError, OSError) as why:
                log.warning("recovery_paused", extra={"why": str(why)})

    async def settle_claims(self, claims: Sequence[Binding]) -> None:
        """Ends claims whose managers have died: a pod that was bound already is adopted, any other goes, and then the
        record and the slot. Raises StoreUnavailable, and what a provider's list raises; safe to repeat."""
        for claim in claims:
            if claim.target not in self._watches:  # whoever has that target finds the pod as one that is nobody's
                await self._store.abandon_binding(claim)
        for target in {claim.target for claim in claims} & self._watches.keys():
            watch = self._watches[target]
            by_token = {pod.annotations.get(NOTE_TOKEN): pod for pod in await watch.provider.list() if not pod.deleting}
            for claim in claims:
                if claim.target != target:
                    continue
                try:
                    await self._settle_claim(watch, claim, by_token.get(claim.token))
                except StoreUnavailable:
                    raise
                except (ManagerError, OSError) as why:
                    log.warning("claim_not_settled", extra={"sandbox": claim.sandbox_id, "why": str(why)})

    async def _settle_claim(self, watch: PodWatch, claim: Binding, pod: Pod | None) -> None:
        if pod is not None and await self._adopted(pod):
            return
        if pod is not None:
            await self._delete(watch, pod, "whoever claimed it has died")
        await self._store.abandon_binding(claim)
        self._due_at = min(self._due_at, time.monotonic() + _STRAY_SEC)  # a pod may come yet

    async def _adopted(self, pod: Pod) -> bool:
        told = binding_of(pod)
        try:
            adopted = told is not None and await self._sandboxes.adopt(pod, told)
        except StoreUnavailable:
            raise
        except ManagerError as why:  # it does not answer, and nobody was told of it
            log.warning("claimed_pod_silent", extra={"pod": pod.name, "why": why.message})
            return False
        self.adopted += adopted
        return adopted

    async def settle(self) -> None:
        """The pass that everybody waits for who found the store empty: one for all of them."""
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self.recover(), name="recovery-of-all")
        await asyncio.shield(self._settling)

    async def recover(self, *, anew: bool = True) -> None:
        """One pass, after which quotas can be counted. Raises StoreUnavailable, and what a provider's list raises; safe
        to repeat. `anew`: by lists of the pods, whatever the watches say; a list of thousands costs the API server and
        this manager most of a second."""
        if anew or time.monotonic() >= self._list_at:
            anew, self._list_at = True, time.monotonic() + LIST_SEC
        # Looked at before the records are read: a pod made in between belongs to a record that is still claiming.
        listed = {
            target: await watch.provider.list() if anew or not watch.synced else list(watch.pods.values())
            for target, watch in self._watches.items()
        }
        living = {(target, pod.name) for target, pods in listed.items() for pod in pods}
        bindings = [binding for binding in await self._store.list_bindings() if binding.state in _WITH_POD]
        held = {(binding.target, binding.pod): binding for binding in bindings}
        for target, pods in listed.items():
            strange = [  # a few of thousands: those that carry what their record says cost no look each
                pod
                async for pod in in_steps(pods)
                if pod.labels.get(LABEL_STATE) != PodState.IDLE
                and not pod.deleting
                and not _carries(pod, held.get((target, pod.name)))
            ]
            strange.sort(key=_claimed_at)  # of two pods with one task the older claim is seen, and kept, first
            for pod in strange:
                try:
                    await self._settle(self._watches[target], pod)
                except StoreUnavailable:
                    raise
                except (ManagerError, OSError) as why:
                    log.warning("pod_not_settled", extra={"pod": pod.name, "why": str(why)})
        for binding in bindings:
            if (binding.target, binding.pod) not in living:
                await self._end_if_gone(binding)
        self.recounted += await self._store.recount()
        await self._store.settle()

    async def _settle(self, watch: PodWatch, pod: Pod) -> None:
        told = binding_of(pod)
        if told is None:
            if self._overdue(pod):
                await self._delete(watch, pod, "names no task")
            return
        record = await self._store.get_binding(told.owner, told.task_id)
        if record is not None and record.pod == pod.name and record.state in _WITH_POD:
            return
        ours = record is not None and record.state is BindingState.CLAIMING and record.token == told.token
        if record is not None and not ours:
            await self._delete(watch, pod, "its task has another pod, or none since its own was ended")
        elif await self._sandboxes.adopt(pod, told):
            self.adopted += 1  # no record, or the claim of a manager that died before it could say so
        elif self._overdue(pod) and not (record is not None and await self._store.claim_left_sec(record)):
            await self._delete(watch, pod, "it was claimed and never bound")

    def _overdue(self, pod: Pod) -> bool:
        """Older than any claim that may still be under way; where it is not, there is a pass as soon as it is."""
        left_sec = _claimed_at(pod) + _STRAY_SEC - time.time()
        if left_sec >= 0:
            self._due_at = min(self._due_at, time.monotonic() + left_sec)
        return left_sec < 0

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
            await self._sandboxes.note_gone(binding, by="recovery")
            self.ended += 1


def _carries(pod: Pod, binding: Binding | None) -> bool:
    """Whether the pod says that it is the binding's."""
    told = binding_of(pod)
    return binding is not None and told is not None and (told.owner, told.task_id) == (binding.owner, binding.task_id)


def _claimed_at(pod: Pod) -> float:
    """Seconds since the epoch; of the pod's creation where its claim does not say."""
    try:
        return float(pod.annotations.get(NOTE_BOUND_AT) or pod.created_at)
    except ValueError:
        return pod.created_at
