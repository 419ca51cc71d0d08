"""A task's one sandbox: found where it is bound, provided where it is not.

Finding goes from memory to the store to the pods' labels. Providing takes the store's record first, with a token, then
a pod (a warm one by a patch that only one claim can win, else a new one), gives the pod its identity, and only then
says `bound`; whatever breaks in between takes back the record and ends the pod. So a task never has two pods, and a
pod that was ever claimed is never anybody else's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from manager.config import ProjectPolicy
from manager.errors import (
    ManagerError,
    NoTargetInRegion,
    ProfileMismatch,
    Provisioning,
    SandboxGone,
    StoreUnavailable,
    TaskBoundElsewhere,
    UnknownProfile,
)
from manager.executor_client import ExecutorClient, PodRef
from manager.model import (
    LABEL_STATE,
    NOTE_TOKEN,
    Binding,
    BindingState,
    LeaseTerms,
    Owner,
    Pod,
    PodEnded,
    PodState,
    Profile,
    check_task_id,
    new_id,
    task_label,
)
from manager.providers.base import PodEvent
from manager.services.claims import Claims, binding_of
from manager.services.leases import Leases, Operation
from manager.services.pods import EndedPods, PodWatch
from manager.store.base import Store

log = logging.getLogger(__name__)

FRESH_SEC: Final = 30.0  # a binding from memory is looked up again after this
MAX_CACHED: Final = 50_000
DELETE_TRIES: Final = 3

Provisioned = Literal["bound", "warm", "cold"]
Workspace = Literal["kept", "fresh"]
_Key = tuple[Owner, str]


class Bound(msgspec.Struct, frozen=True):
    """A task's sandbox, ready for a command, and how it came to be."""

    binding: Binding
    terms: LeaseTerms
    pod: PodRef
    provisioned: Provisioned = "bound"
    workspace: Workspace = "kept"
    previous: PodEnded | None = None  # where this very call had a pod provided: how the last one ended


class _Entry:
    __slots__ = ("bound", "until")

    def __init__(self, bound: Bound, until: float) -> None:
        self.bound = bound
        self.until = until  # monotonic


def when(at: float) -> str:
    """RFC 3339 in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def gone(ended: PodEnded | None) -> SandboxGone:
    ended = ended or PodEnded(reason="lost", at=time.time())
    return SandboxGone(
        f"the sandbox's pod has ended ({ended.reason}) and what ran in it with it; the next command of the task gets a "
        "new one",
        reason=ended.reason,
        at=when(ended.at),
    )


class Sandboxes:
    def __init__(
        self,
        store: Store,
        watches: Mapping[str, PodWatch],
        regions: Mapping[str, str | None],
        client: ExecutorClient,
        leases: Leases,
        claims: Claims,
        profiles: Sequence[Profile],
        policy: Callable[[Owner], ProjectPolicy],
        terms: LeaseTerms,
        ended: EndedPods,
        *,
        start_limit_sec: float = 60.0,
    ) -> None:
        self._store = store
        self._watches = watches
        self._regions = regions  # of each target
        self._client = client
        self._leases = leases
        self._claims = claims
        self._profiles = {profile.name: profile for profile in profiles}
        self._policy = policy
        self._terms = terms
        self._ended = ended
        self._start_limit_sec = start_limit_sec
        # A claim that takes longer than a request may wait for it has died with its manager.
        self.claim_sec = start_limit_sec + 30.0
        self._cache: OrderedDict[_Key, _Entry] = OrderedDict()
        self._key_of_pod: dict[str, _Key] = {}
        self._making: dict[_Key, asyncio.Task[Bound]] = {}
        self._jobs: set[asyncio.Task[Any]] = set()
        self.provisioned = {"warm": 0, "cold": 0}
        self.provision_failures = 0
        self.ended_by_reason: dict[str, int] = {}
        for watch in watches.values():
            watch.listen(self._on_event)

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def ensure(self, owner: Owner, task_id: str, profile: str | None = None, region: str | None = None) -> Bound:
        """The task's sandbox with time left on its lease, provided now where there is none.

        Raises UnknownProfile, ProfileMismatch, NoTargetInRegion, TaskBoundElsewhere, InvalidTaskId, QuotaExceeded,
        what the provider raises, Provisioning past the start limit, and StoreUnavailable."""
        entry = self._cache.get((owner, task_id))
        if entry is not None and time.monotonic() < entry.until and self._leases.safe(entry.bound.binding.sandbox_id):
            if profile is not None or region is not None:
                self._check_asked(entry.bound.binding, profile, region)
            return entry.bound
        check_task_id(task_id)
        bound = await self._present(owner, task_id)
        if bound is None:
            bound = await self._shared(owner, task_id, self._recipe(owner, profile, region))
        self._check_asked(bound.binding, profile, region)
        return bound

    async def find(self, owner: Owner, task_id: str) -> Binding | None:
        """The task's binding in whatever state, provided nothing. None: the task was never used."""
        entry = self._cache.get((owner, task_id))
        if entry is not None and time.monotonic() < entry.until:
            return entry.bound.binding
        check_task_id(task_id)
        binding = await self._store.get_binding(owner, task_id)
        if binding is None:
            adopted = await self._from_labels(owner, task_id)
            return adopted
        return binding

    async def ensure_found(self, binding: Binding) -> Bound | None:
        """The sandbox of a binding that `find` gave, with time left on its lease; None where its pod has ended."""
        entry = self._cache.get((binding.owner, binding.task_id))
        if entry is not None and self._leases.safe(binding.sandbox_id) and entry.bound.binding.token == binding.token:
            return entry.bound
        return await self._accept(binding)

    def bound_of(self, binding: Binding) -> Bound:
        """For a call that renews nothing."""
        terms = self.terms_of(binding.profile)
        return Bound(binding, terms, PodRef(binding.pod, binding.address, _quiet_sec(terms)))

    def operation(self, bound: Bound) -> Operation:
        """Counts as work on the sandbox while it is entered. `bound` comes from `ensure` a moment ago."""
        return self._leases.operation(bound.binding.sandbox_id, bound.terms)

    def terms_of(self, profile: str) -> LeaseTerms:
        known = self._profiles.get(profile)
        return self._terms if known is None else terms_of(known, self._terms)

    def ended(self, pod: str) -> PodEnded | None:
        """How the pod ended, if that is known here: nothing that it still says counts."""
        return self._ended.get(pod)

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def retire(self, owner: Owner, task_id: str) -> None:
        """Ends the task's sandbox and its pod; no error where there is none."""
        check_task_id(task_id)
        binding = await self._store.get_binding(owner, task_id) or await self._from_labels(owner, task_id)
        if binding is None:
            return
        if binding.state is BindingState.CLAIMING:
            # Its claim finds the record gone and ends its own pod; a command that waits for it begins anew.
            await self._store.abandon_binding(binding)
        elif binding.state is BindingState.BOUND:
            await self.end(binding, "destroyed")

    async def end(self, binding: Binding, reason: str, *, if_expired: bool = False) -> bool:
        """Ends a BOUND binding, then its pod. False: it was not this one any more, or is in use again."""
        ended = PodEnded(reason=reason, at=time.time())
        if not await self._store.end_binding(binding, ended, if_expired=if_expired):
            self.invalidate(binding)
            return False
        self.ended_by_reason[reason] = self.ended_by_reason.get(reason, 0) + 1
        self._ended.add(binding.pod, ended)
        self.invalidate(binding)
        self._leases.forget(binding.sandbox_id)
        self._client.forget(binding.pod)
        # A client that hangs up must not leave the pod behind that nobody else would look for.
        await asyncio.shield(self._job(self._delete(binding.target, binding.pod), f"delete-pod-{binding.pod}"))
        return True

    async def check_gone(self, bound: Bound) -> bool:
        """After an executor could not be reached: whether its pod has ended. If so the binding is ended too."""
        binding = bound.binding
        self.invalidate(binding)
        if self._ended.get(binding.pod) is None:
            watch = self._watches.get(binding.target)
            pod = await watch.provider.get(binding.pod) if watch is not None else None
            if pod is not None and not pod.deleting:
                return False
        ended = self._ended.get(binding.pod)
        await self.end(binding, ended.reason if ended is not None else "lost")
        return True

    def invalidate(self, binding: Binding) -> None:
        """Forgets the binding in memory: the next lookup asks the store."""
        entry = self._cache.get((binding.owner, binding.task_id))
        if entry is not None and entry.bound.binding.token == binding.token:
            del self._cache[(binding.owner, binding.task_id)]
            self._key_of_pod.pop(binding.pod, None)

    async def close(self) -> None:
        """Stops providing; every claim under way takes itself back first."""
        for making in list(self._making.values()):
            making.cancel()
        while waits := {*self._making.values(), *self._jobs}:
            await asyncio.wait(waits)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _present(self, owner: Owner, task_id: str) -> Bound | None:
        """The task's sandbox if it has one that lives, with its lease renewed; None: one has to be provided."""
        try:
            binding = await self._store.get_binding(owner, task_id)
        except StoreUnavailable:
            entry = self._cache.get((owner, task_id))
            if entry is None or not self._leases.safe(entry.bound.binding.sandbox_id):
                raise
            return entry.bound  # bound not long ago, with time left: commands go on while the store is away
        if binding is None:
            binding = await self._from_labels(owner, task_id)
        if binding is None or binding.state is not BindingState.BOUND:
            return None
        return await self._accept(binding)

    async def _accept(self, binding: Binding) -> Bound | None:
        """A BOUND record for use: its pod lives and its lease has time. None where either is over."""
        watch = self._watches.get(binding.target)
        if watch is None:
            raise NoTargetInRegion(f"the task's sandbox is on target {binding.target!r}, which this manager lacks")
        if self._ended.get(binding.pod) is not None or (
            binding.pod not in watch.pods and await watch.provider.get(binding.pod) is None
        ):
            ended = self._ended.get(binding.pod)
            await self.end(binding, ended.reason if ended is not None else "lost")
            return None
        bound = self.bound_of(binding)
        if not self._leases.safe(binding.sandbox_id):
            await self._store.extend_lease(binding.sandbox_id, min(bound.terms.idle_sec, bound.terms.active_sec))
            asked_at = time.monotonic()
            lease = await self._store.get_lease(binding.sandbox_id)
            if lease is None:
                return None  # ended since it was read
            if lease.until <= lease.now:  # its hard end has passed: it cannot be renewed
                await self.end(binding, "expired", if_expired=True)
                return None
            self._leases.confirmed(
                binding.sandbox_id, bound.terms, lease.until - lease.now - (time.monotonic() - asked_at)
            )
        self._remember(bound)
        return bound

    async def _from_labels(self, owner: Owner, task_id: str) -> Binding | None:
        """Where the store knows nothing: the sandbox that a pod's labels tell of, taken back into the store."""
        label = task_label(owner, task_id)
        for watch in self._watches.values():
            for seen in watch.of_task(label):
                pod = await watch.provider.get(seen.name)
                binding = binding_of(pod) if pod is not None else None
                if (
                    pod is None
                    or binding is None
                    or pod.deleting
                    or (binding.owner, binding.task_id) != (owner, task_id)
                ):
                    continue
                if await self.adopt(pod, binding):
                    return binding
        return None

    async def adopt(self, pod: Pod, binding: Binding) -> bool:
        """Takes a pod's own word into the store, if the pod was bound to the end and the task has no other record."""
        terms = self.terms_of(binding.profile)
        info = await self._client.lease(PodRef(pod.name, pod.address, _quiet_sec(terms)))
        if not info.bound or info.sandbox_id != binding.sandbox_id:
            return False
        adopted = await self._store.adopt_binding(binding, terms)
        log.info("sandbox_adopted", extra={"sandbox": binding.sandbox_id, "pod": pod.name, "adopted": adopted})
        return adopted

    async def _shared(self, owner: Owner, task_id: str, recipe: Profile) -> Bound:
        """One provisioning for all who wait for it here; a waiter that goes away stops nothing."""
        key = (owner, task_id)
        making = self._making.get(key)
        if making is None:
            name = f"provision-{task_label(owner, task_id)}"
            making = asyncio.get_running_loop().create_task(self._provide(owner, task_id, recipe), name=name)
            self._making[key] = making
            making.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(making)

    def _made(self, key: _Key, done: asyncio.Task[Bound]) -> None:
        del self._making[key]
        if done.cancelled() or done.exception() is not None:  # looked at here: its waiters may all have gone
            self.provision_failures += 1
        else:  # where they have, nothing runs, and the lease is an idle one
            self._leases.changed(done.result().binding.sandbox_id)

    async def _provide(self, owner: Owner, task_id: str, recipe: Profile) -> Bound:
        try:
            async with asyncio.timeout(self._start_limit_sec):
                return await self._provide_until_bound(owner, task_id, recipe)
        except TimeoutError as why:
            raise Provisioning(
                f"the sandbox was not ready within {self._start_limit_sec:.0f} s; the same call a little later finds it"
            ) from why

    async def _provide_until_bound(self, owner: Owner, task_id: str, recipe: Profile) -> Bound:
        terms = terms_of(recipe, self._terms)
        pause = 0.02
        while True:
            wanted = Binding(
                owner=owner,
                task_id=task_id,
                sandbox_id=new_id(),
                state=BindingState.CLAIMING,
                token=new_id(),
                profile=recipe.name,
                target=recipe.target,
                generation=1,
            )
            held = await self._claims.begin(wanted, self.claim_sec, self._policy(owner).concurrency)
            if held.token == wanted.token:
                made = await self._claims.provide(held, recipe, terms, _quiet_sec(terms))
                if made is None:
                    continue  # the record was taken from us: whoever has the task now decides
                binding = made.binding
                self.provisioned[made.how] += 1
                pod = PodRef(binding.pod, binding.address, _quiet_sec(terms))
                left_sec = terms.active_sec - (time.monotonic() - made.leased_at)
                self._leases.confirmed(binding.sandbox_id, terms, left_sec)
                self._remember(Bound(binding, terms, pod))
                return Bound(binding, terms, pod, made.how, "fresh", binding.previous)
            if held.state is BindingState.BOUND:
                if (bound := await self._accept(held)) is not None:
                    return bound
                continue
            # Another manager is providing it; this one waits for the record to say so.
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(0.5, pause * 1.5)

    def _remember(self, bound: Bound) -> None:
        key = (bound.binding.owner, bound.binding.task_id)
        if (old := self._cache.pop(key, None)) is not None:
            self._key_of_pod.pop(old.bound.binding.pod, None)
        if self._ended.get(bound.binding.pod) is not None:
            return
        self._cache[key] = _Entry(bound, time.monotonic() + FRESH_SEC)
        self._key_of_pod[bound.binding.pod] = key
        if len(self._cache) > MAX_CACHED:
            _, oldest = self._cache.popitem(last=False)
            self._key_of_pod.pop(oldest.bound.binding.pod, None)

    def _recipe(self, owner: Owner, profile: str | None, region: str | None) -> Profile:
        """The profile to make a pod from. Raises UnknownProfile, NoTargetInRegion."""
        allowed = [self._profiles[name] for name in self._policy(owner).profiles if name in self._profiles]
        if profile is not None:
            allowed_names = [known.name for known in allowed]
            if profile not in allowed_names:
                raise UnknownProfile(profile[:128], allowed_names)
            allowed = [self._profiles[profile]]
        if not allowed:
            raise UnknownProfile("", [])
        if region is None:
            return allowed[0]
        for known in allowed:
            if self._regions.get(known.target) == region:
                return known
        raise NoTargetInRegion(f"no target of this project's profiles is in region {region[:128]!r}")

    def _check_asked(self, binding: Binding, profile: str | None, region: str | None) -> None:
        if profile is not None and profile != binding.profile:
            self._recipe(binding.owner, profile, None)  # a name that is not allowed is the first thing wrong
            raise ProfileMismatch(
                f"the task's sandbox runs profile {binding.profile!r}; retire the task to start it with another",
                profile=binding.profile,
            )
        if region is not None and self._regions.get(binding.target) != region:
            raise TaskBoundElsewhere(f"the task's sandbox is on target {binding.target!r}, which is not in that region")

    def _on_event(self, event: PodEvent) -> None:
        if not event.gone:
            return
        name = event.pod.name
        self._client.forget(name)
        if (key := self._key_of_pod.pop(name, None)) is not None:
            self._cache.pop(key, None)
        if event.pod.labels.get(LABEL_STATE) == PodState.CLAIMED and event.pod.annotations.get(NOTE_TOKEN):
            self._job(self._note_end(event.pod), f"note-end-{name}")

    async def _note_end(self, pod: Pod) -> None:
        """A sandbox's pod ended by itself: its record says so at once, not only when the next command finds out."""
        claimed = binding_of(pod)
        ended = self._ended.get(pod.name)
        if claimed is None or ended is None:
            return
        try:
            binding = await self._store.get_binding(claimed.owner, claimed.task_id)
            if binding is not None and binding.state is BindingState.BOUND and binding.pod == pod.name:
                if await self._store.end_binding(binding, ended):
                    self.ended_by_reason[ended.reason] = self.ended_by_reason.get(ended.reason, 0) + 1
                self._leases.forget(binding.sandbox_id)
        except ManagerError as why:
            log.warning("pod_end_not_noted", extra={"pod": pod.name, "why": why.message})

    async def _delete(self, target: str, name: str) -> None:
        watch = self._watches.get(target)
        if watch is None:
            return
        for attempt in range(DELETE_TRIES):
            try:
                await watch.provider.delete(name)
                if (pod := watch.pods.get(name)) is not None:
                    watch.drop(pod, "destroyed")
                return
            except (ManagerError, OSError) as why:
                log.warning("pod_delete_failed", extra={"pod": name, "why": str(why), "attempt": attempt})
                await asyncio.sleep(0.2 * 2**attempt)

    def _job(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        job = asyncio.get_running_loop().create_task(work, name=name)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job


def terms_of(profile: Profile, default: LeaseTerms) -> LeaseTerms:
    return LeaseTerms(
        active_sec=default.active_sec if profile.active_sec is None else profile.active_sec,
        idle_sec=default.idle_sec if profile.idle_sec is None else profile.idle_sec,
        max_sec=default.max_sec if profile.max_sec is None else profile.max_sec,
    )


def _quiet_sec(terms: LeaseTerms) -> int:
    """Of no call from any manager, after which the pod ends itself: never before its lease, which may be active."""
    return max(1, round(max(terms.active_sec, terms.idle_sec)))
