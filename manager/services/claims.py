"""The steps that make a pod a sandbox's, and the way back from each of them."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal

import msgspec

from executor.wire import BindRequest, LeaseTermsBody
from manager.errors import ExecutorRefused, ExecutorUnreachable, ManagerError, Provisioning
from manager.executor_client import ExecutorClient, PodRef
from manager.model import (
    LABEL_PROFILE,
    LABEL_REVISION,
    LABEL_SANDBOX,
    LABEL_STATE,
    LABEL_TASK,
    LABEL_TASK_ID,
    NOTE_BOUND_AT,
    NOTE_GENERATION,
    NOTE_PROJECT,
    NOTE_TASK_ID,
    NOTE_TENANT,
    NOTE_TOKEN,
    Binding,
    BindingState,
    LeaseTerms,
    Owner,
    Pod,
    PodState,
    Profile,
    new_id,
    task_label,
)
from manager.providers.base import ClaimLost, PodGone
from manager.services.pods import PodWatch
from manager.services.pool import WarmPool
from manager.store.base import Store

log = logging.getLogger(__name__)

MAX_WARM_TRIES: Final = 8  # lost or broken candidates before a new pod is made
UNDO_TRIES: Final = 4
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")


class Provided(msgspec.Struct, frozen=True):
    binding: Binding  # BOUND
    how: Literal["warm", "cold"]
    leased_at: float  # monotonic: the active lease began no earlier


class Claims:
    def __init__(
        self,
        store: Store,
        watches: Mapping[str, PodWatch],
        client: ExecutorClient,
        pool: WarmPool,
        *,
        parallel_creates: int = 4,
    ) -> None:
        self._store = store
        self._watches = watches
        self._client = client
        self._pool = pool
        # More at once only make each of them later: a start is bound by the machine's cores.
        self._cold = {target: asyncio.Semaphore(parallel_creates) for target in watches}
        self._undoing: set[asyncio.Task[None]] = set()
        self.lost_candidates = 0
        self.undone = 0

    async def begin(self, wanted: Binding, claim_sec: float, slots: int | None) -> Binding:
        """The store's `begin_binding`; a call that was broken off takes back what it may have left."""
        try:
            return await self._store.begin_binding(wanted, claim_sec, slots)
        except BaseException:
            await self._undo(wanted, [])
            raise

    async def provide(self, held: Binding, recipe: Profile, terms: LeaseTerms, quiet_sec: int) -> Provided | None:
        """A pod for the CLAIMING record `held`, committed as BOUND. None: the record was taken from us meanwhile.

        On every way out but success the record is abandoned and each pod that was touched is deleted."""
        touched: list[str] = []
        how: Literal["warm", "cold"] = "warm"
        try:
            pod = await self._warm(held, recipe, terms, quiet_sec, touched)
            if pod is None:
                self._pool.missed(recipe)
                async with self._cold[recipe.target]:
                    pod = await self._warm(held, recipe, terms, quiet_sec, touched)  # one came while this waited
                    if pod is None:
                        pod, how = await self._create(held, recipe, terms, quiet_sec, touched), "cold"
            leased_at = time.monotonic()
            bound = msgspec.structs.replace(held, state=BindingState.BOUND, pod=pod.name, address=pod.address)
            if not await self._store.commit_binding(bound, terms):
                await self._undo(held, touched)
                return None
        except BaseException:
            await self._undo(held, touched)
            raise
        return Provided(bound, how, leased_at)

    async def close(self) -> None:
        while self._undoing:
            await asyncio.wait(set(self._undoing))

    async def _warm(
        self, held: Binding, recipe: Profile, terms: LeaseTerms, quiet_sec: int, touched: list[str]
    ) -> Pod | None:
        for _ in range(MAX_WARM_TRIES):
            candidate = self._pool.reserve(recipe)
            if candidate is None:
                return None
            touched.append(candidate.name)  # from here on a patch may have happened
            pod = await self._patch(candidate, held)
            if pod is None:
                touched.remove(candidate.name)  # somebody else's, or gone: not ours to delete
                self._pool.release(candidate.name)
                self.lost_candidates += 1
                continue
            self._pool.claimed(recipe, pod.name)
            try:
                await self._bind(pod, held, terms, quiet_sec)
            except (ExecutorUnreachable, ExecutorRefused) as why:
                log.warning("warm_pod_broken", extra={"pod": pod.name, "why": why.message})
                await self._delete(held.target, pod.name)
                touched.remove(pod.name)
                continue
            return pod
        return None

    async def _create(
        self, held: Binding, recipe: Profile, terms: LeaseTerms, quiet_sec: int, touched: list[str]
    ) -> Pod:
        watch = self._watches[recipe.target]
        name = new_id("p")
        touched.append(name)
        labels, notes = marks_of(held)
        labels |= {LABEL_PROFILE: recipe.name, LABEL_REVISION: recipe.revision}
        try:
            pod = await watch.provider.create(recipe, name, labels, notes)
        except Provisioning as why:
            # It quotes the pod's own log, with paths of the data plane: for its operator, not for a tenant.
            log.warning("pod_not_made", extra={"pod": name, "why": why.message})
            raise Provisioning("the sandbox's pod did not start; the manager's log says why") from why
        watch.put(pod)
        await self._bind(pod, held, terms, quiet_sec)
        return pod

    async def _patch(self, candidate: Pod, held: Binding) -> Pod | None:
        """The candidate with our claim on it; None where it is not to be had."""
        watch = self._watches[held.target]
        labels, notes = marks_of(held)
        version = candidate.version
        for _ in range(2):
            try:
                pod = await watch.provider.patch(candidate.name, version, labels, notes)
            except PodGone:
                watch.drop(candidate, "lost")
                return None
            except (ClaimLost, ManagerError, OSError):
                # The answer may have been lost, or the version been old: the pod itself says whose it is.
                now = await watch.provider.get(candidate.name)
                if now is None:
                    watch.drop(candidate, "lost")
                    return None
                if now.annotations.get(NOTE_TOKEN) == held.token:
                    pod = now
                elif now.labels.get(LABEL_STATE) == PodState.IDLE and not now.deleting and now.version != version:
                    version = now.version
                    continue
                else:
                    watch.put(now)
                    return None
            watch.put(pod)
            return pod
        return None

    async def _bind(self, pod: Pod, held: Binding, terms: LeaseTerms, quiet_sec: int) -> None:
        await self._client.bind(
            PodRef(pod.name, pod.address, quiet_sec),
            BindRequest(
                sandbox_id=held.sandbox_id,
                task_id=held.task_id,
                env={"SOJOURN_SANDBOX_ID": held.sandbox_id},
                lease=LeaseTermsBody(quiet_sec=float(quiet_sec), hard_end_sec=terms.max_sec),
            ),
        )

    async def _undo(self, held: Binding, pods: list[str]) -> None:
        """Pods first: while one of them lives, the record keeps others from finding the task free."""
        undoing = asyncio.get_running_loop().create_task(
            self._undo_all(held, list(pods)), name=f"undo-claim-{held.sandbox_id}"
        )
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)
        await asyncio.shield(undoing)

    async def _undo_all(self, held: Binding, pods: list[str]) -> None:
        self.undone += 1
        for name in pods:
            await _tried(functools.partial(self._delete_ours, held, name), "claimed_pod_not_looked_at", name)
        await _tried(lambda: self._store.abandon_binding(held), "claim_not_abandoned", held.sandbox_id)

    async def _delete_ours(self, held: Binding, name: str) -> None:
        pod = await self._watches[held.target].provider.get(name)
        if pod is not None and pod.annotations.get(NOTE_TOKEN) != held.token:
            self._pool.release(name)  # the patch never happened, or another claim won
        else:
            await self._delete(held.target, name)

    async def _delete(self, target: str, name: str) -> None:
        """What cannot be deleted now is found by the next reconciliation: it is claimed, and nobody's."""
        watch = self._watches[target]
        await _tried(lambda: watch.provider.delete(name), "claimed_pod_not_deleted", name)
        self._client.forget(name)
        if (pod := watch.pods.get(name)) is not None:
            watch.drop(pod, "destroyed")


async def _tried(step: Callable[[], Awaitable[None]], event: str, subject: str) -> None:
    for attempt in range(UNDO_TRIES):
        try:
            await step()
            return
        except (ManagerError, OSError) as why:
            log.warning(event, extra={"subject": subject, "why": str(why), "attempt": attempt})
            await asyncio.sleep(0.1 * 3**attempt)


def marks_of(held: Binding) -> tuple[dict[str, str], dict[str, str]]:
    """The labels and annotations of a pod that `held` claims: enough to find the sandbox again without a store."""
    labels = {
        LABEL_STATE: str(PodState.CLAIMED),
        LABEL_TASK: task_label(held.owner, held.task_id),
        LABEL_TASK_ID: held.task_id if _LABEL_VALUE.match(held.task_id) else "",
        LABEL_SANDBOX: held.sandbox_id,
    }
    notes = {
        NOTE_TENANT: held.owner.tenant,
        NOTE_PROJECT: held.owner.project,
        NOTE_TASK_ID: held.task_id,
        NOTE_TOKEN: held.token,
        NOTE_BOUND_AT: f"{time.time():.3f}",
        NOTE_GENERATION: str(held.generation),
    }
    return labels, notes


def binding_of(pod: Pod) -> Binding | None:
    """The binding that a claimed pod's labels and annotations tell of; None where they do not tell one."""
    notes = pod.annotations
    owner = Owner(notes.get(NOTE_TENANT, ""), notes.get(NOTE_PROJECT, ""))
    task_id, token, sandbox_id = notes.get(NOTE_TASK_ID, ""), notes.get(NOTE_TOKEN, ""), pod.labels.get(LABEL_SANDBOX)
    if not task_id or not token or not sandbox_id or pod.labels.get(LABEL_STATE) != PodState.CLAIMED:
        return None
    if pod.labels.get(LABEL_TASK) != task_label(owner, task_id):
        return None
    try:
        generation, bound_at = int(notes.get(NOTE_GENERATION, "1")), float(notes.get(NOTE_BOUND_AT, "0"))
    except ValueError:
        return None
    return Binding(
        owner=owner,
        task_id=task_id,
        sandbox_id=sandbox_id,
        state=BindingState.BOUND,
        token=token,
        profile=pod.labels.get(LABEL_PROFILE, ""),
        target=pod.target,
        generation=generation,
        pod=pod.name,
        address=pod.address,
        created_at=bound_at,
    )
