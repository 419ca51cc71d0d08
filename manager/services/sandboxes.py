"""A sandbox and the one pod under it: found where it is bound, provided where it is not.

A task finds its sandbox by the task's id, a long-lived one is found by its own (`model.own_name`): no other difference.

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
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol

import msgspec

from manager.config import ProjectPolicy
from manager.errors import (
    ManagerError,
    NoTargetInRegion,
    ProfileMismatch,
    Provisioning,
    SandboxGone,
    StoreUnavailable,
    StoreUnsettled,
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
    Load,
    Owner,
    Pod,
    PodEnded,
    PodState,
    PodWaits,
    Principal,
    Profile,
    check_task_id,
    new_id,
    owned_by_name,
    task_label,
)
from manager.providers.base import PodEvent
from manager.services.audit import AuditLog, NoAudit
from manager.services.claims import Claims, Provided, Wants, binding_of
from manager.services.leases import Leases, Operation
from manager.services.pods import EndedPods, PodWatch
from manager.services.renewing import CLAIM_SEC, Renewing
from manager.store.base import NO_LOAD, Store

log = logging.getLogger(__name__)

FRESH_SEC: Final = 30.0  # a binding from memory is looked up again after this
MAX_CACHED: Final = 50_000
DELETE_TRIES: Final = 3
KEEP_SEC: Final = 3600.0  # a pod whose workspace is to be kept outlives its lease by so long, for the last checkpoint
_WITH_POD: Final = (BindingState.BOUND, BindingState.CLOSING)
WAITS_LOOK_SEC: Final = 0.5  # between two looks at what a pod that is being made waits for
CAPACITY_SEC: Final = 5.0  # without room for so long, a caller is told so
FILL_LIMIT_SEC: Final = 4 * 3600.0  # of putting a workspace into a pod
REASON_SEC: Final = 2.0  # for the watch to say how a pod ended that is known to be gone
NODE_WORD_SEC: Final = 4.0  # for a node to say that a container has ended, once its connections broke

Provisioned = Literal["bound", "warm", "cold"]
Workspace = Literal["kept", "restored", "fresh"]
_Key = tuple[Owner, str]


class TaskKeeper(Protocol):
    """Whoever keeps tasks' workspaces (`services.keeping`)."""

    def keeps(self, profile: str) -> bool: ...

    async def fill(self, held: Binding) -> Callable[[PodRef], Awaitable[None]] | None: ...

    async def forget(self, owner: Owner, task_id: str) -> None: ...


class Plan(msgspec.Struct, frozen=True):
    """How a pod is to be provided."""

    wants: Wants
    find_fill: Callable[[Binding], Awaitable[Callable[[PodRef], Awaitable[None]] | None]] | None = None  # once claimed
    begun: Callable[[Binding], Awaitable[None]] | None = None  # awaited once the slot is taken, before there is a pod
    limit_sec: float = 0.0  # of all of it, where there is something to fill the pod with
    by: Principal | str = "manager"  # for the audit log


class Bound(msgspec.Struct, frozen=True):
    """A task's sandbox, ready for a command, and how it came to be."""

    binding: Binding
    terms: LeaseTerms
    pod: PodRef
    provisioned: Provisioned = "bound"
    workspace: Workspace = "kept"
    previous: PodEnded | None = None  # where this very call had a pod provided: how the last one ended


class Keeper(Protocol):
    """Whoever keeps sandboxes that no task made (`services.longlived.keeper`): they outlive their pods."""

    async def revive(self, owner: Owner, sandbox_id: str) -> Bound:
        """The sandbox that has no pod to be used: waited for, started, or refused with what it is instead."""
        ...

    async def terms(self, binding: Binding) -> LeaseTerms | None:
        """Of the lease of a pod that was found by its labels; None: there is no such sandbox, the pod is a stray."""
        ...

    async def ended(self, binding: Binding, ended: PodEnded) -> None:
        """The sandbox's pod has ended, and nobody here ended it."""
        ...


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
        audit: AuditLog | None = None,
        start_limit_sec: float = 60.0,
    ) -> None:
        self._audit: AuditLog = NoAudit() if audit is None else audit
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
        self.start_limit_sec = start_limit_sec
        self.claim_sec = CLAIM_SEC
        self._cache: OrderedDict[_Key, _Entry] = OrderedDict()
        self._key_of_pod: dict[str, _Key] = {}
        self._making: dict[_Key, asyncio.Task[Bound]] = {}
        self.keeper: Keeper | None = None
        self.task_keeper: TaskKeeper | None = None
        self.settle: Callable[[], Awaitable[None]] | None = None  # looks at every pod, where the store is found empty
        self._jobs: set[asyncio.Task[Any]] = set()
        self.provisioned = {"warm": 0, "cold": 0}
        self.provision_failures = 0
        self.ended_by_reason: dict[str, int] = {}
        for watch in watches.values():
            watch.listen(self._on_event)

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def ensure(
        self,
        owner: Owner,
        task_id: str,
        profile: str | None = None,
        region: str | None = None,
        *,
        by: Principal | str = "manager",
    ) -> Bound:
        """The task's sandbox with time left on its lease, provided now where there is none. `by`: for the audit log.

        One that no task made is never provided here: its keeper says what it is without a pod. Raises UnknownProfile,
        ProfileMismatch, NoTargetInRegion, TaskBoundElsewhere, InvalidTaskId, QuotaExceeded, what the provider raises,
        Provisioning past the start limit, and StoreUnavailable."""
        entry = self._cache.get((owner, task_id))
        if entry is not None and time.monotonic() < entry.until and self._leases.safe(entry.bound.binding.sandbox_id):
            if profile is not None or region is not None:
                self._check_asked(entry.bound.binding, profile, region)
            return entry.bound
        own_id = owned_by_name(task_id)
        if own_id is None:
            check_task_id(task_id)
        bound = await self.present(owner, task_id)
        if bound is None and own_id is not None and self.keeper is not None:
            bound = await self.keeper.revive(owner, own_id)
        elif bound is None:
            recipe = self.recipe(owner, profile, region)
            bound = await self.provide(owner, task_id, self._plan(recipe, terms_of(recipe, self._terms), by))
        self._check_asked(bound.binding, profile, region)
        return bound

    async def find(self, owner: Owner, task_id: str) -> Binding | None:
        """The task's binding in whatever state, provided nothing. None: the task was never used."""
        entry = self._cache.get((owner, task_id))
        if entry is not None and time.monotonic() < entry.until:
            return entry.bound.binding
        if owned_by_name(task_id) is None:
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

    async def is_current(self, binding: Binding) -> bool:
        """Whether the binding still stands, asked past all memory."""
        self.invalidate(binding)
        now = await self.find(binding.owner, binding.task_id)
        return now is not None and now.token == binding.token and now.state in _WITH_POD

    def bound_of(self, binding: Binding) -> Bound:
        """For a call that renews nothing."""
        terms = binding.terms or self.terms_of(binding.profile)
        return Bound(binding, terms, PodRef(binding.pod, binding.address, _quiet_sec(terms, binding.terms is not None)))

    def image_digest(self, binding: Binding) -> str:
        """Of what its pod runs on; "" where that has none, or no pod is known here."""
        watch = self._watches.get(binding.target)
        pod = watch.pods.get(binding.pod) if watch is not None else None
        return "" if pod is None else pod.image_digest

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

    async def retire(self, owner: Owner, task_id: str, *, by: Principal | str = "manager") -> None:
        """Ends the task's sandbox and its pod; no error where there is none."""
        check_task_id(task_id)
        binding = await self._store.get_binding(owner, task_id) or await self._from_labels(owner, task_id)
        if binding is None:
            pass  # but something of it may be kept: Redis can be wiped
        elif binding.state is BindingState.CLAIMING:
            # Its claim finds the record gone and ends its own pod; a command that waits for it begins anew.
            await self._store.abandon_binding(binding)
        elif binding.state is not BindingState.ENDED:
            await self.end(binding, "destroyed", by=by)
        if self.task_keeper is not None:
            await self.task_keeper.forget(owner, task_id)

    async def end(
        self,
        binding: Binding,
        reason: str,
        *,
        if_expired: bool = False,
        closer: str = "",
        by: Principal | str = "manager",
    ) -> bool:
        """Ends a binding that has a pod, then the pod. False: it was not this one any more, or is in use again, or is
        not closed by `closer` any more."""
        ended = PodEnded(reason=reason, at=time.time())
        if not await self._store.end_binding(binding, ended, if_expired=if_expired, closer=closer):
            self.invalidate(binding)
            return False
        self.ended_by_reason[reason] = self.ended_by_reason.get(reason, 0) + 1
        self._ended.add(binding.pod, ended)
        self.invalidate(binding)
        self._leases.forget(binding.sandbox_id)
        self._client.forget(binding.pod)
        # A client that hangs up must not leave the pod behind that nobody else would look for.
        deleting = self._job(self._delete(binding.target, binding.pod), f"delete-pod-{binding.pod}")
        await asyncio.shield(self._job(self._tell_ended(binding, reason, by), f"audit-end-{binding.pod}"))
        await asyncio.shield(deleting)
        return True

    async def check_gone(self, bound: Bound) -> bool:
        """After an executor could not be reached: whether its pod has ended. If so the binding is ended too."""
        binding = bound.binding
        self.invalidate(binding)
        pod: Pod | None = None
        if self._ended.get(binding.pod) is None:
            watch = self._watches.get(binding.target)
            pod = await watch.provider.get(binding.pod) if watch is not None else None
            if pod is not None and not pod.deleting:
                return False
        await self.note_gone(binding, going=pod)
        return True

    async def ended_under(self, bound: Bound) -> PodEnded | None:
        """After a call that was under way broke off: how its pod has ended, if it has; waits no longer than a caller of
        a command that is over anyway may have to. Its container's end is often seen before its node tells of it."""
        binding = bound.binding
        self.invalidate(binding)
        watch = self._watches.get(binding.target)
        pod: Pod | None = None
        if (ended := self._ended.get(binding.pod)) is None and watch is not None:
            try:
                async with asyncio.timeout(REASON_SEC):
                    pod = await watch.provider.get(binding.pod)
            except (ManagerError, OSError, TimeoutError):
                return None  # nobody can say
            if pod is not None and not pod.deleting:
                if (ended := await self._ended.told(binding.pod, NODE_WORD_SEC)) is None:
                    return None
                pod = None
        noting = self._job(self._note_gone_quietly(binding, pod), f"note-gone-{binding.pod}")
        await asyncio.wait([noting], timeout=REASON_SEC)  # it goes on by itself: a pod's deletion takes its time
        return ended or self._ended.get(binding.pod) or PodEnded(reason="lost", at=time.time())

    async def _note_gone_quietly(self, binding: Binding, going: Pod | None) -> None:
        try:
            await self.note_gone(binding, going=going)
        except ManagerError as why:  # the next call of the task finds out
            log.warning("pod_end_not_noted", extra={"pod": binding.pod, "why": why.message})

    async def note_gone(self, binding: Binding, by: str = "manager", *, going: Pod | None = None) -> None:
        """Ends the binding of a pod that is gone, or `going`, for the reason that the watch gives, or is about to."""
        watch = self._watches.get(binding.target)
        known = going.ending if going is not None else ""
        expected = not known and watch is not None and binding.pod in watch.pods
        ended = await self._ended.told(binding.pod, REASON_SEC if expected else 0.0)
        ended = ended if ended is not None else PodEnded(reason=known or "lost", at=time.time())
        if await self.end(binding, ended.reason, by=by) and self.keeper is not None and owned_by_name(binding.task_id):
            await self.keeper.ended(binding, ended)

    def making(self, binding: Binding) -> bool:
        """Whether its pod is being made here."""
        return (binding.owner, binding.task_id) in self._making

    def invalidate(self, binding: Binding) -> None:
        """Forgets the binding in memory: the next lookup asks the store."""
        entry = self._cache.get((binding.owner, binding.task_id))
        if entry is not None and entry.bound.binding.token == binding.token:
            del self._cache[(binding.owner, binding.task_id)]
            self._key_of_pod.pop(binding.pod, None)

    def new_terms(self, binding: Binding, terms: LeaseTerms) -> None:
        """They are in the store already: what is known of the lease is asked for again."""
        self.invalidate(binding)
        self._leases.new_terms(binding.sandbox_id, terms)

    async def close(self) -> None:
        """Stops providing; every claim under way takes itself back first."""
        for making in list(self._making.values()):
            making.cancel()
        while waits := {*self._making.values(), *self._jobs}:
            await asyncio.wait(waits)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def present(self, owner: Owner, task_id: str) -> Bound | None:
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
            await self.note_gone(binding)
            return None
        bound = self.bound_of(binding)
        if not self._leases.safe(binding.sandbox_id):
            await self._store.extend_lease(binding.sandbox_id, min(bound.terms.idle_sec, bound.terms.active_sec))
            asked_at = time.monotonic()
            lease = await self._store.get_lease(binding.sandbox_id)
            if lease is None:
                return None  # ended since it was read
            if lease.until <= lease.now and binding.terms is not None:  # it is about to be kept, and then ended
                raise gone(PodEnded(reason="expired", at=time.time() + lease.until - lease.now))
            if lease.until <= lease.now and self.task_keeper is not None and self.task_keeper.keeps(binding.profile):
                raise Provisioning("the task's sandbox has reached its age, and its files are being kept; try again")
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
        if not pod.ready:
            return False  # nothing runs in it yet, and nobody was told of it
        terms, kept = self.terms_of(binding.profile), owned_by_name(binding.task_id) is not None
        if kept:
            found = await self.keeper.terms(binding) if self.keeper is not None else None
            if found is None:
                return False
            terms, binding = found, msgspec.structs.replace(binding, terms=found)
        info = await self._client.lease(PodRef(pod.name, pod.address, _quiet_sec(terms, kept)))
        if not info.bound or info.sandbox_id != binding.sandbox_id:
            return False
        recipe = self._profiles.get(binding.profile)
        load = NO_LOAD if recipe is None else Load(recipe.cpu, recipe.memory_bytes)
        adopted = await self._store.adopt_binding(binding, terms, load)
        log.info("sandbox_adopted", extra={"sandbox": binding.sandbox_id, "pod": pod.name, "adopted": adopted})
        return adopted

    async def provide(self, owner: Owner, task_id: str, plan: Plan) -> Bound:
        """A pod for what has none. One provisioning for all who wait for it here; a waiter that goes away stops
        nothing."""
        key = (owner, task_id)
        making = self._making.get(key)
        if making is None:
            name = f"provision-{task_label(owner, task_id)}"
            making = asyncio.get_running_loop().create_task(self._provide(owner, task_id, plan), name=name)
            self._making[key] = making
            making.add_done_callback(lambda done: self._made(key, done))
        waits: PodWaits | None = None
        full_since: float | None = None
        while True:
            done, _ = await asyncio.wait([making], timeout=WAITS_LOOK_SEC)  # a waiter's end is not the making's
            if done:
                break
            waits = self._waits(plan.wants.recipe.target, task_label(owner, task_id)) or waits
            if waits is None or waits.code != "capacity_exhausted":
                full_since = None
                continue
            full_since = full_since or time.monotonic()
            if time.monotonic() - full_since > CAPACITY_SEC:
                raise waits.error()  # its pod stays where it is in the line: the next call may find it ready
        try:
            return making.result()
        except Provisioning as why:
            if waits is None or waits.code == "provisioning":
                raise
            raise waits.error() from why

    def _waits(self, target: str, label: str) -> PodWaits | None:
        """What the pod that is being made for the task waits for, as its data plane says."""
        pods = self._watches[target].of_task(label) if target in self._watches else []
        return next((pod.waits for pod in pods if pod.waits is not None), None)

    def _made(self, key: _Key, done: asyncio.Task[Bound]) -> None:
        del self._making[key]
        if done.cancelled() or done.exception() is not None:  # looked at here: its waiters may all have gone
            self.provision_failures += 1
        else:  # where they have, nothing runs, and the lease is an idle one
            self._leases.changed(done.result().binding.sandbox_id)

    async def _provide(self, owner: Owner, task_id: str, plan: Plan) -> Bound:
        try:
            async with asyncio.timeout(self.start_limit_sec) as limit:
                return await self._provide_until_bound(owner, task_id, plan, limit)
        except TimeoutError as why:
            raise Provisioning(
                f"the sandbox was not ready within {self.start_limit_sec:.0f} s; the same call a little later finds it"
            ) from why

    async def _provide_until_bound(self, owner: Owner, task_id: str, plan: Plan, limit: asyncio.Timeout) -> Bound:
        recipe, terms = plan.wants.recipe, plan.wants.terms
        pause = 0.02
        while True:
            wanted = Binding(
                owner=owner,
                task_id=task_id,
                sandbox_id=owned_by_name(task_id) or new_id(),
                state=BindingState.CLAIMING,
                token=new_id(),
                profile=recipe.name,
                target=recipe.target,
                generation=1,
                terms=terms if owned_by_name(task_id) is not None else None,
            )
            held = await self._begin(wanted, recipe)
            if held.token == wanted.token:
                async with Renewing(self._store, held, self.claim_sec) as renewing:
                    whole = await self._found_fill(held, plan)
                    made = await self._provide_held(held, whole, limit, renewing)
                if made is None:
                    continue  # the record was taken from us: whoever has the task now decides
                binding = made.binding
                self.provisioned[made.how] += 1
                self._job(
                    self._tell_bound(binding, made.how, plan.by), f"audit-bound-{binding.pod}"
                )  # beside the command
                pod = PodRef(binding.pod, binding.address, plan.wants.quiet_sec)
                left_sec = terms.active_sec - (time.monotonic() - made.leased_at)
                self._leases.confirmed(binding.sandbox_id, terms, left_sec)
                self._remember(Bound(binding, terms, pod))
                filled: Workspace = "fresh" if whole.wants.fill is None else "restored"
                return Bound(binding, terms, pod, made.how, filled, binding.previous)
            if held.state is BindingState.BOUND:
                if (bound := await self._accept(held)) is not None:
                    return bound
                continue
            # Another manager is providing it; this one waits for the record to say so.
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(0.5, pause * 1.5)

    async def _begin(self, wanted: Binding, recipe: Profile) -> Binding:
        """A slot and the record, after a look at all pods where the store was emptied."""
        policy = self._policy(wanted.owner)
        try:
            return await self._claims.begin(wanted, self.claim_sec, policy, recipe)
        except StoreUnsettled:
            if self.settle is None:
                raise
            await self.settle()
            return await self._claims.begin(wanted, self.claim_sec, policy, recipe)

    async def _found_fill(self, held: Binding, plan: Plan) -> Plan:
        """The plan with what is to be in the pod: looked for only now that nobody else can be keeping it."""
        if plan.find_fill is None:
            return plan
        try:
            fill = await plan.find_fill(held)
        except BaseException:
            await self._claims.abandon(held)
            raise
        if fill is None:
            return plan
        wants = msgspec.structs.replace(plan.wants, fill=fill)
        return msgspec.structs.replace(plan, wants=wants, limit_sec=FILL_LIMIT_SEC)

    async def _provide_held(
        self, held: Binding, plan: Plan, limit: asyncio.Timeout, renewing: Renewing
    ) -> Provided | None:
        """The start limit is for the pod, and not for what takes its time with a workspace."""
        wants = plan.wants
        if plan.begun is None and wants.fill is None:
            return await self._claims.provide(held, wants)
        limit.reschedule(None)
        if plan.begun is not None:
            try:
                with renewing.breaking_off():
                    await plan.begun(held)
            except BaseException:
                await self._claims.abandon(held)
                raise
        if (put := wants.fill) is not None:

            async def fill(pod: PodRef) -> None:
                with renewing.breaking_off():
                    await put(pod)

            wants = msgspec.structs.replace(wants, fill=fill)
        async with asyncio.timeout(plan.limit_sec):
            return await self._claims.provide(held, wants)

    def _plan(self, recipe: Profile, terms: LeaseTerms, by: Principal | str) -> Plan:
        keeper = self.task_keeper
        if keeper is None or not keeper.keeps(recipe.name):
            return Plan(Wants(recipe, terms, _quiet_sec(terms), terms.max_sec), by=by)
        return Plan(Wants(recipe, terms, _quiet_sec(terms), terms.max_sec + KEEP_SEC), keeper.fill, by=by)

    def plan_to_keep(
        self,
        recipe: Profile,
        terms: LeaseTerms,
        *,
        env: Mapping[str, str],
        begun: Callable[[Binding], Awaitable[None]] | None,
        fill: Callable[[PodRef], Awaitable[None]] | None,
        limit_sec: float,
        by: Principal | str,
    ) -> Plan:
        """For a sandbox whose workspace outlives its pod."""
        wants = Wants(recipe, terms, _quiet_sec(terms, kept=True), terms.max_sec + KEEP_SEC, env, fill)
        return Plan(wants, None, begun, limit_sec, by)

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

    def recipe(self, owner: Owner, profile: str | None, region: str | None) -> Profile:
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
            self.recipe(binding.owner, profile, None)  # a name that is not allowed is the first thing wrong
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
            if binding is not None and binding.state in _WITH_POD and binding.pod == pod.name:
                if await self._store.end_binding(binding, ended):
                    self.ended_by_reason[ended.reason] = self.ended_by_reason.get(ended.reason, 0) + 1
                    await self._tell_ended(binding, ended.reason, "manager")
                    if self.keeper is not None and owned_by_name(binding.task_id) is not None:
                        await self.keeper.ended(binding, ended)
                self._leases.forget(binding.sandbox_id)
        except ManagerError as why:
            log.warning("pod_end_not_noted", extra={"pod": pod.name, "why": why.message})

    async def _tell_bound(self, binding: Binding, how: str, by: Principal | str) -> None:
        await self._audit.record(
            "pod.bound",
            binding.sandbox_id,
            owner=binding.owner,
            by=by,
            task=binding.task_id if owned_by_name(binding.task_id) is None else None,
            pod=binding.pod,
            profile=binding.profile,
            provisioned=how,
        )

    async def _tell_ended(self, binding: Binding, reason: str, by: Principal | str) -> None:
        await self._audit.record(
            "pod.ended",
            binding.sandbox_id,
            owner=binding.owner,
            by=by,
            task=binding.task_id if owned_by_name(binding.task_id) is None else None,
            pod=binding.pod,
            reason=reason,
        )

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


def _quiet_sec(terms: LeaseTerms, kept: bool = False) -> int:
    """Of no call from any manager, after which the pod ends itself: never before its lease, which may be active.

    `kept`: nor before a manager that was away had the time to come back and keep its workspace."""
    return max(1, round(max(terms.active_sec, terms.idle_sec) + (KEEP_SEC if kept else 0.0)))
