"""The steps that make a pod a sandbox's, and the way back from each of them."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final, Literal

import msgspec

from executor.wire import BindRequest, LeaseTermsBody
from manager.config import ProjectPolicy
from manager.errors import (
    ExecutorRefused,
    ExecutorUnreachable,
    ManagerError,
    Provisioning,
    StoreUnavailable,
    WorkspaceAttaching,
)
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
    Load,
    Owner,
    Pod,
    PodState,
    Profile,
    new_id,
    own_name,
    owned_by_name,
    task_label,
)
from manager.providers.base import ClaimLost, PodGone
from manager.services.fair import FairRoom
from manager.services.pods import PodWatch
from manager.services.pool import WarmPool
from manager.store.base import Store

log = logging.getLogger(__name__)

MAX_WARM_TRIES: Final = 8  # lost or broken candidates before a new pod is made
UNDO_TRIES: Final = 4
UNDO_WAIT_SEC: Final = 3.0
PATCH_TRIES: Final = 4  # of one candidate: its version may have been old, an answer lost
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")


class Provided(msgspec.Struct, frozen=True):
    binding: Binding  # BOUND
    how: Literal["warm", "cold"]
    leased_at: float  # monotonic: the active lease began no earlier


class Wants(msgspec.Struct, frozen=True):
    """What a pod is made for: its profile, how long it may live, and what is in it before its first command."""

    recipe: Profile
    terms: LeaseTerms
    quiet_sec: int  # of no call from any manager, after which the pod ends itself
    hard_end_sec: float  # after which it does so whatever happens
    env: Mapping[str, str] = {}
    fill: Callable[[PodRef], Awaitable[None]] | None = None  # puts the workspace into it; may take long


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
        self._cold = {target: FairRoom[Owner](parallel_creates) for target in watches}
        pool.listen(self._call)
        self._undoing: set[asyncio.Task[None]] = set()
        self.lost_candidates = 0
        self.undone = 0

    async def begin(self, wanted: Binding, claim_sec: float, policy: ProjectPolicy, recipe: Profile) -> Binding:
        """The store's `begin_binding`; a call that was broken off takes back what it may have left."""
        load, most = Load(recipe.cpu, recipe.memory_bytes), Load(policy.cpu, policy.memory_bytes)
        try:
            return await self._store.begin_binding(wanted, claim_sec, policy.concurrency, load, most)
        except BaseException:
            await self._undo(wanted, [])
            raise

    async def provide(self, held: Binding, wants: Wants) -> Provided | None:
        """A pod for the CLAIMING record `held`, committed as BOUND. None: the record was taken from us meanwhile.

        On every way out but success the record is abandoned and each pod that was touched is deleted."""
        touched: list[str] = []
        how: Literal["warm", "cold"] = "warm"
        recipe = wants.recipe
        try:
            pod = None if self._others_first(recipe) else await self._warm(held, wants, touched)
            if pod is None:
                self._pool.missed(recipe)
                pod, how = await self._in_turn(held, wants, touched)
            if wants.fill is not None:
                # Before it is bound: a pod that was filled by half is adopted by nobody.
                await wants.fill(PodRef(pod.name, pod.address, wants.quiet_sec))
                await self._bind(pod, held, wants)
            leased_at = time.monotonic()
            bound = msgspec.structs.replace(held, state=BindingState.BOUND, pod=pod.name, address=pod.address)
            if not await self._store.commit_binding(bound, wants.terms):
                await self._undo(held, touched)
                return None
        except BaseException:
            await self._undo(held, touched)
            raise
        return Provided(bound, how, leased_at)

    async def _in_turn(self, held: Binding, wants: Wants, touched: list[str]) -> tuple[Pod, Literal["warm", "cold"]]:
        """A pod of the pool that became ready when it was this claim's turn, else one that is made for it."""
        recipe, room, again = wants.recipe, self._cold[wants.recipe.target], False
        while True:
            async with AsyncExitStack() as turn:
                with self._pool.waiting(recipe):
                    placed = await turn.enter_async_context(room.of(held.owner, recipe.name, again=again))
                pod = await self._warm(held, wants, touched)
                if pod is not None:
                    return pod, "warm"
                if placed:
                    return await self._create(held, wants, touched), "cold"
            again = True  # another manager was faster

    def _others_first(self, recipe: Profile) -> bool:
        """Whether all that is ready is for claims that came before this one and wait."""
        waiting = self._cold[recipe.target].waiting(recipe.name)
        return waiting > 0 and self._pool.ready(recipe, waiting + 1) <= waiting

    def _call(self, profile: Profile) -> None:
        """A pod of the pool became ready: for whoever waits, not for whoever comes next."""
        self._cold[profile.target].call(profile.name)

    async def abandon(self, held: Binding) -> None:
        """Gives a claim back for which no pod was touched."""
        await self._undo(held, [])

    async def close(self) -> None:
        while self._undoing:
            await asyncio.wait(set(self._undoing))

    async def _warm(self, held: Binding, wants: Wants, touched: list[str]) -> Pod | None:
        recipe = wants.recipe
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
                await self._begun(pod, held, wants)
            except (ExecutorUnreachable, ExecutorRefused) as why:
                log.warning("warm_pod_broken", extra={"pod": pod.name, "why": why.message})
                await self._delete(held.target, pod.name)
                touched.remove(pod.name)
                continue
            return pod
        return None

    async def _create(self, held: Binding, wants: Wants, touched: list[str]) -> Pod:
        recipe = wants.recipe
        watch = self._watches[recipe.target]
        name = new_id("p")
        touched.append(name)
        labels, notes = marks_of(held)
        labels |= {LABEL_PROFILE: recipe.name, LABEL_REVISION: recipe.revision}
        try:
            pod = await watch.provider.create(recipe, name, labels, notes)
        except WorkspaceAttaching:
            raise
        except Provisioning as why:
            # It quotes the pod's own log, with paths of the data plane: for its operator, not for a tenant.
            log.warning("pod_not_made", extra={"pod": name, "why": why.message})
            raise Provisioning("the sandbox's pod did not start; the manager's log says why") from why
        watch.put(pod)
        await self._begun(pod, held, wants)
        return pod

    async def _patch(self, candidate: Pod, held: Binding) -> Pod | None:
        """The candidate with our claim on it; None where it is not to be had."""
        watch = self._watches[held.target]
        labels, notes = marks_of(held)
        version = candidate.version
        doubt: BaseException | None = None
        for _ in range(PATCH_TRIES):
            try:
                pod = await watch.provider.patch(candidate.name, version, labels, notes)
            except PodGone:
                watch.drop(candidate, "lost")
                return None
            except (ClaimLost, ManagerError, OSError) as why:
                # The answer may have been lost, or the version been old: the pod itself says whose it is.
                now = await watch.provider.get(candidate.name)
                if now is None:
                    watch.drop(candidate, "lost")
                    return None
                if now.annotations.get(NOTE_TOKEN) == held.token:
                    pod = now
                elif now.labels.get(LABEL_STATE) == PodState.IDLE and not now.deleting and now.version != version:
                    version, doubt = now.version, None
                    continue
                elif not isinstance(why, ClaimLost) and now.version == version:
                    doubt = why  # what had no answer may be done yet: the very same again settles it
                    continue
                else:
                    watch.put(now)
                    return None
            watch.put(pod)
            return pod
        if doubt is not None:
            raise doubt  # never a second candidate before it is known
        return None

    async def _begun(self, pod: Pod, held: Binding, wants: Wants) -> None:
        """The first word to a claimed pod; raises where it does not answer, so that another candidate is tried."""
        if wants.fill is None:
            await self._bind(pod, held, wants)
        else:
            await self._client.lease(PodRef(pod.name, pod.address, wants.quiet_sec))

    async def _bind(self, pod: Pod, held: Binding, wants: Wants) -> None:
        await self._client.bind(
            PodRef(pod.name, pod.address, wants.quiet_sec),
            BindRequest(
                sandbox_id=held.sandbox_id,
                task_id=None if owned_by_name(held.task_id) else held.task_id,
                env={**wants.env, "SOJOURN_SANDBOX_ID": held.sandbox_id},
                lease=LeaseTermsBody(quiet_sec=float(wants.quiet_sec), hard_end_sec=wants.hard_end_sec),
            ),
        )

    async def _undo(self, held: Binding, pods: list[str]) -> None:
        """Pods first: while one of them lives, the record keeps others from finding the task free."""
        undoing = asyncio.get_running_loop().create_task(
            self._undo_all(held, list(pods)), name=f"undo-claim-{held.sandbox_id}"
        )
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)
        # Goes on by itself where it takes longer: who asked need not wait for a data plane that does not answer.
        await asyncio.wait([undoing], timeout=UNDO_WAIT_SEC)

    async def _undo_all(self, held: Binding, pods: list[str]) -> None:
        self.undone += 1
        if pods and await self._is_in_use(held):
            return  # it was taken for dead, and another adopted the pod; or what had no answer was done
        for name in pods:
            if not await _tried(functools.partial(self._delete_ours, held, name), "claimed_pod_not_looked_at", name):
                self._pool.release(name)  # what the watch says of it counts
        await _tried(lambda: self._store.abandon_binding(held), "claim_not_abandoned", held.sandbox_id)

    async def _is_in_use(self, held: Binding) -> bool:
        """Whether the claim has become a sandbox's pod; as far as the store says."""
        try:
            now = await self._store.get_binding(held.owner, held.task_id)
        except StoreUnavailable:
            return False
        return now is not None and now.token == held.token and now.state in (BindingState.BOUND, BindingState.CLOSING)

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


async def _tried(step: Callable[[], Awaitable[None]], event: str, subject: str) -> bool:
    for attempt in range(UNDO_TRIES):
        try:
            await step()
            return True
        except (ManagerError, OSError) as why:
            log.warning(event, extra={"subject": subject, "why": str(why), "attempt": attempt})
            await asyncio.sleep(0.1 * 3**attempt)
    return False


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
        NOTE_TASK_ID: "" if owned_by_name(held.task_id) else held.task_id,
        NOTE_TOKEN: held.token,
        NOTE_BOUND_AT: f"{time.time():.3f}",
        NOTE_GENERATION: str(held.generation),
    }
    return labels, notes


def binding_of(pod: Pod) -> Binding | None:
    """The binding that a claimed pod's labels and annotations tell of; None where they do not tell one."""
    notes = pod.annotations
    owner = Owner(notes.get(NOTE_TENANT, ""), notes.get(NOTE_PROJECT, ""))
    token, sandbox_id = notes.get(NOTE_TOKEN, ""), pod.labels.get(LABEL_SANDBOX)
    if not token or not sandbox_id or pod.labels.get(LABEL_STATE) != PodState.CLAIMED:
        return None
    task_id = notes.get(NOTE_TASK_ID, "") or own_name(sandbox_id)
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
