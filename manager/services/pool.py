"""Pods that are ready and belong to nobody, so that a first command need not wait for one to start.

Claims take pods from any manager's pool and depend on no election; refilling is done by the elected manager. What is
being created or deleted counts before the watch shows it, so that nothing is made twice. What was claimed, by whichever
manager, is learned from the pods' labels as the watch tells them: it costs a claim nothing, and every manager knows
what the one that leads knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from executor.wire import LeaseRequest
from manager.errors import ManagerError
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
    Pod,
    PodState,
    Profile,
    new_id,
)
from manager.providers.base import ClaimLost, PodEvent, PodGone
from manager.services.pods import Lead, PodWatch
from manager.services.pool_sizing import PoolSizer

log = logging.getLogger(__name__)

RETIRED: Final = "retired"  # the claim token of a pool pod that was taken out to be deleted
UNCLAIMED_SEC: Final = 600.0  # a pool pod outlives its last manager by so long
_LEAD_SEC: Final = 10.0
_LOOK_SEC: Final = 5.0  # at least this often; a claim or an ended pod wakes at once
_STUCK_SEC: Final = 600.0  # since its creation, after which a pod that is not ready, and waits for nothing, goes
_MEET_SEC: Final = 5.0  # between two looks at which managers there are
_MAX_FAILURES: Final = 3  # pushes in a row that a pool pod may miss
_TAKE_OUTS: Final = 4  # at once, of one target: a pool that shrinks leaves the data plane to the claims
_SKEW_SEC: Final = 30.0  # by which another manager's clock may be ahead of this one's
_EMPTY_NOTES: Final = dict.fromkeys(
    (NOTE_TENANT, NOTE_PROJECT, NOTE_TASK_ID, NOTE_TOKEN, NOTE_BOUND_AT, NOTE_GENERATION), ""
)


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A profile's pool as it is now, for `/api/v1/pools` and the metrics. What is counted, this manager counted."""

    profile: str
    target: str
    ready: int
    pending: int  # asked for and not ready
    wanted: int  # ready and pending that there should be
    demand: int  # claimed within the length of a start, by any manager
    start_sec: float
    claims: int
    misses: int
    created: int
    failed: int
    last_error: str | None

    @property
    def utilisation(self) -> float:
        """1.0: what is claimed during a start is all that there is; more than that is missed."""
        return self.demand / max(1, self.ready + self.pending)


def idle_labels(profile: Profile) -> dict[str, str]:
    """Every label that a claim will replace is there from the start."""
    return {
        LABEL_STATE: PodState.IDLE,
        LABEL_PROFILE: profile.name,
        LABEL_REVISION: profile.revision,
        LABEL_TASK: "",
        LABEL_TASK_ID: "",
        LABEL_SANDBOX: "",
    }


class _Shelf:
    """One profile's pool."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.revision = profile.revision
        self.creating: set[str] = set()  # names; counted until their create has returned
        self.failures = 0
        self.not_before = 0.0  # monotonic: the pause after a failed create
        self.last_error: str | None = None
        self.claims = self.misses = self.created = self.failed = 0
        self.sizer = PoolSizer(profile.pool)
        self.known = False  # the pool as it was found here
        self.starting: dict[str, float | None] = {}  # pods, since when; None: it waits for more than that


class WarmPool:
    def __init__(
        self,
        lead: Lead,
        meet: Callable[[str, float], Awaitable[list[str]]],
        watches: Mapping[str, PodWatch],
        client: ExecutorClient,
        profiles: Sequence[Profile],
        holder: str,
        *,
        parallel_creates: int = 2,
        unclaimed_sec: float = UNCLAIMED_SEC,
    ) -> None:
        self._ask_to_lead = lead
        self._meet = meet
        self._peers: list[str] = []  # managers, this one among them
        self._met_at = -_MEET_SEC  # monotonic
        self._ranks: dict[str, tuple[bool, bytes]] = {}  # of pods
        self._near: dict[str, list[str]] = {}  # by profile: pods that come first here, the first of them last
        self._watches = watches
        self.clock: Callable[[], float] = time.monotonic  # what sizes go by
        self._client = client
        self._holder = holder
        self._unclaimed_sec = unclaimed_sec
        self._shelves = {profile.name: _Shelf(profile) for profile in profiles}
        self._taken: dict[str, None] = {}  # reserved or claimed here; held until the pod has gone
        self._idle: dict[str, dict[str, None]] = {}  # by profile: names of pods that are nobody's, as the watch tells
        self._misses: dict[str, int] = {}  # pushes that a pod did not answer
        self._claimed: set[str] = set()  # living pods whose claim was counted
        self._paced = {target: asyncio.Semaphore(parallel_creates) for target in watches}
        self._take_outs = {target: asyncio.Semaphore(_TAKE_OUTS) for target in watches}
        self._listeners: list[Callable[[Profile], None]] = []
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None  # of creates and deletes, while refill_forever runs
        self._leads_until = 0.0  # monotonic
        self._ask_at = 0.0  # monotonic: before then another manager leads
        for watch in watches.values():
            watch.listen(self._on_event)

    # ── claims ──────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, profile: Profile) -> Pod | None:
        """A ready pool pod of exactly this profile and revision, which no other claim in this process will get."""
        pod = self._next(profile)
        if pod is None:
            return None
        self._taken[pod.name] = None
        return pod

    def _next(self, profile: Profile) -> Pod | None:
        """Each manager has pods that it takes first, in an order of its own; when they are used up, it takes those that
        the others would take last. Managers that all began with the same would lose to each other again and again."""
        watch, near = self._watches.get(profile.target), self._near.setdefault(profile.name, [])
        while near and watch is not None:  # sorted once for many claims: a pool can be large
            pod = watch.pods.get(near.pop())
            if pod is not None and pod.name not in self._taken and self._is_idle(pod) and self._fits(pod, profile):
                return pod
        ready = [pod for pod in self._ready(profile) if pod.name not in self._taken]
        near += (pod.name for pod in sorted(ready, key=self._order) if self._rank(pod.name)[0])
        if near:
            name = near.pop()
            return next(pod for pod in ready if pod.name == name)
        return min(ready, key=self._order, default=None)

    def listen(self, listener: Callable[[Profile], None]) -> None:
        """`listener` is called when there is a pod more to be had of a profile; it must not block."""
        self._listeners.append(listener)

    def ready(self, profile: Profile, most: int) -> int:
        """Pods that could be reserved, counted up to `most`."""
        free = (pod for pod in self._ready(profile) if pod.name not in self._taken)
        return sum(1 for _ in itertools.islice(free, most))

    def claimed(self, profile: Profile, pod: str) -> None:
        """The reserved pod is a sandbox's now; the pool is refilled right away."""
        if (shelf := self._shelves.get(profile.name)) is not None:
            shelf.claims += 1
        self._client.forget(pod)  # connections without the sandbox's lease
        self._wake.set()

    def release(self, pod: str) -> None:
        """The reserved pod was not claimed after all; what the watch says of it counts again."""
        self._taken.pop(pod, None)
        for watch in self._watches.values():
            if (known := watch.pods.get(pod)) is not None:
                self._tell(known)

    def missed(self, profile: Profile) -> None:
        """A first command found no ready pod."""
        if (shelf := self._shelves.get(profile.name)) is not None:
            shelf.misses += 1
        self._wake.set()

    @contextmanager
    def waiting(self, profile: Profile) -> Iterator[None]:
        """While a claim that found no ready pod waits until one may be made for it: the pool makes some meanwhile."""
        shelf = self._shelves.get(profile.name)
        if shelf is None:
            yield
            return
        shelf.sizer.waits(self.clock(), +1)
        self._wake.set()
        try:
            yield
        finally:
            shelf.sizer.waits(self.clock(), -1)

    async def meet(self) -> None:
        """Tells the other managers of this one, and learns which there are. An outage of the store only delays it."""
        if time.monotonic() - self._met_at < _MEET_SEC:
            return
        try:
            peers = await self._meet(self._holder, 4 * _MEET_SEC)
        except ManagerError as why:
            log.warning("managers_not_met", extra={"why": why.message})
            return
        self._met_at = time.monotonic()
        if sorted(peers) != sorted(self._peers):
            self._peers = peers
            self._ranks.clear()
            self._near.clear()

    async def leave(self) -> None:
        with contextlib.suppress(ManagerError):
            await self._meet(self._holder, 0.0)

    def _order(self, pod: Pod) -> bytes:
        return self._rank(pod.name)[1]

    def _rank(self, pod: str) -> tuple[bool, bytes]:
        """Whether this manager comes first for the pod (rendezvous hashing), and how early whoever does takes it."""
        rank = self._ranks.get(pod)
        if rank is None:
            bids = [
                (hashlib.blake2b(f"{peer}/{pod}".encode()).digest(), peer) for peer in self._peers or [self._holder]
            ]
            bid, first = max(bids)
            rank = self._ranks[pod] = (first == self._holder, bid)
        return rank

    # ── refill ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def refill_forever(self) -> None:
        """Holds every pool to its size while this manager leads. Cancelled: waits for what it was creating."""
        try:
            async with asyncio.TaskGroup() as self._group:
                while True:
                    await self.meet()
                    try:
                        leads = await self._lead()
                        for shelf in self._shelves.values():
                            self._meet_pods(shelf)
                            wanted = shelf.sizer.wanted(
                                self.clock()
                            )  # its time goes on where another manager leads, too
                            if leads:
                                self._tend(shelf, wanted)
                    except ManagerError as why:
                        log.warning("pool_refill_paused", extra={"why": why.message})
                    try:
                        async with asyncio.timeout(_LOOK_SEC * random.uniform(0.8, 1.2)):
                            await self._wake.wait()
                    except TimeoutError:
                        pass
                    self._wake.clear()
        finally:
            self._group = None

    async def push_forever(self) -> None:
        """Pushes the idle pods' own deadline on, so that they outlive their manager by no more than it."""
        while True:
            await asyncio.sleep(self._unclaimed_sec / 4 * random.uniform(0.8, 1.0))
            if time.monotonic() < self._leads_until:
                await self.push()

    async def push(self) -> None:
        """Not for pods of a profile that there is no more: they end by themselves."""
        for watch in self._watches.values():
            for pod in list(watch.pods.values()):
                known = pod.labels.get(LABEL_PROFILE) in self._shelves
                if known and self._is_idle(pod) and pod.ready and pod.name not in self._taken:
                    await self._push(watch, pod)

    def views(self) -> list[PoolView]:
        return [
            PoolView(
                profile=shelf.profile.name,
                target=shelf.profile.target,
                ready=sum(pod.name not in self._taken for pod in self._ready(shelf.profile)),
                pending=self._pending(shelf),
                wanted=shelf.sizer.wanted(self.clock()),
                demand=shelf.sizer.demand(self.clock()),
                start_sec=shelf.sizer.start_sec,
                claims=shelf.claims,
                misses=shelf.misses,
                created=shelf.created,
                failed=shelf.failed,
                last_error=shelf.last_error or self._held_back(shelf.profile),
            )
            for shelf in self._shelves.values()
        ]

    @property
    def full(self) -> bool:
        return all(view.ready >= view.wanted for view in self.views())

    @property
    def leads(self) -> bool:
        """Whether this manager is the one that refills."""
        return time.monotonic() < self._leads_until

    def _pending(self, shelf: _Shelf) -> int:
        known = {pod.name: pod.ready for pod in self._pool_pods(shelf.profile)}
        return sum(not known.get(name, False) for name in shelf.creating | known.keys())

    def _meet_pods(self, shelf: _Shelf) -> None:
        """What an earlier manager kept ready is not thrown away for want of knowing why."""
        if not shelf.known and self._watches[shelf.profile.target].known:
            shelf.known = True
            there = sum(pod.labels.get(LABEL_REVISION) == shelf.revision for pod in self._pool_pods(shelf.profile))
            shelf.sizer.found(self.clock(), there)

    def _tend(self, shelf: _Shelf, wanted: int) -> None:
        """Starts what the pool needs: creates for what is missing, deletes for what is too much or of another
        revision."""
        profile = shelf.profile
        watch = self._watches[profile.target]
        if not watch.synced:
            return  # a stale picture would have pods made that are there already
        current, kept = 0, []
        for pod in list(self._pool_pods(profile)):
            if pod.name in self._taken:
                continue
            if pod.deleting:
                current += 1  # it holds its room until it has gone
            elif self._stuck(pod):
                self._taken[pod.name] = None
                log.warning("pool_pod_stuck", extra={"pod": pod.name, "why": pod.waits.words if pod.waits else ""})
                self._start(self._take_out(watch, pod), f"pool-take-out-{pod.name}")
            elif pod.labels.get(LABEL_REVISION) != shelf.revision:
                self._taken[pod.name] = None
                self._start(self._take_out(watch, pod), f"pool-take-out-{pod.name}")
            elif pod.name not in shelf.creating:
                current += 1
                kept.append(pod)
        missing = wanted - current - len(shelf.creating)
        if missing < 0:
            # First those that serve nobody yet, then the youngest: they hold the nodes that a cluster added last.
            for pod in sorted(kept, key=lambda pod: (pod.ready, -pod.created_at))[:-missing]:
                self._taken[pod.name] = None
                self._start(self._take_out(watch, pod), f"pool-take-out-{pod.name}")
        if time.monotonic() < shelf.not_before:
            return
        for _ in range(missing):
            name = new_id("p")
            shelf.creating.add(name)
            self._start(self._create(shelf, watch, name), f"pool-create-{name}")

    async def _create(self, shelf: _Shelf, watch: PodWatch, name: str) -> None:
        try:
            async with self._paced[shelf.profile.target]:
                if time.monotonic() < shelf.not_before:
                    return
                shelf.starting[name] = self.clock()
                # One that has to wait for room is held, and counted, until there is some: making it anew would only
                # put it at the end of the line.
                pod = await watch.provider.create(
                    shelf.profile, name, idle_labels(shelf.profile), _EMPTY_NOTES, wait=False
                )
            watch.put(pod)
            shelf.created += 1
            shelf.failures, shelf.last_error = 0, None
            if pod.ready:
                await self._push(watch, pod)
        except (ManagerError, OSError) as why:
            shelf.starting.pop(name, None)
            shelf.failed += 1
            shelf.failures += 1
            shelf.last_error = str(why)
            shelf.not_before = time.monotonic() + min(30.0, 2.0 ** min(shelf.failures, 5)) * random.uniform(0.5, 1.0)
            log.warning("pool_create_failed", extra={"profile": shelf.profile.name, "why": str(why)})
        finally:
            shelf.creating.discard(name)
            if not shelf.failures:
                self._wake.set()

    async def _take_out(self, watch: PodWatch, pod: Pod) -> None:
        """Deletes a pool pod that nobody has claimed meanwhile: it is claimed for that first."""
        retired = ({LABEL_STATE: PodState.CLAIMED}, {NOTE_TOKEN: RETIRED})
        try:
            async with self._take_outs[pod.target]:
                await watch.provider.patch(pod.name, pod.version, *retired)
                await watch.provider.delete(pod.name)
            watch.drop(pod, "destroyed")
        except (ClaimLost, PodGone):
            self._taken.pop(pod.name, None)  # it changed, or is no more: the watch tells which
        except (ManagerError, OSError) as why:
            self._taken.pop(pod.name, None)
            log.warning("pool_take_out_failed", extra={"pod": pod.name, "why": str(why)})

    async def _push(self, watch: PodWatch, pod: Pod) -> None:
        try:
            await self._client.push_lease(
                PodRef(pod.name, pod.address), LeaseRequest(unclaimed_sec=self._unclaimed_sec)
            )
            self._misses.pop(pod.name, None)
        except ManagerError as why:
            if why.code == "conflict":  # it was claimed a moment ago
                self._misses.pop(pod.name, None)
                return
            missed = self._misses[pod.name] = self._misses.get(pod.name, 0) + 1
            log.warning("pool_push_failed", extra={"pod": pod.name, "why": why.message, "missed": missed})
            if missed >= _MAX_FAILURES and pod.name not in self._taken:
                self._taken[pod.name] = None
                self._start(self._take_out(watch, pod), f"pool-take-out-{pod.name}")

    async def _lead(self) -> bool:
        now = time.monotonic()
        if now < self._leads_until - _LEAD_SEC / 2:
            return True
        if now < self._ask_at:
            return False
        if not await self._ask_to_lead("pool", self._holder, _LEAD_SEC):
            self._leads_until, self._ask_at = 0.0, now + _LOOK_SEC / 2
            return False
        if now >= self._leads_until:  # what the one before made last, the watch may not have told yet
            for watch in self._watches.values():
                await watch.sync()
        self._leads_until = now + _LEAD_SEC
        return True

    def _ready(self, profile: Profile) -> Iterator[Pod]:
        for pod in self._pool_pods(profile):
            if not pod.deleting and self._fits(pod, profile):
                yield pod

    def _fits(self, pod: Pod, profile: Profile) -> bool:
        return pod.ready and pod.labels.get(LABEL_REVISION) == self._revision(profile)

    def _revision(self, profile: Profile) -> str:
        """Computed once: it is compared for every pod at every look."""
        shelf = self._shelves.get(profile.name)
        return shelf.revision if shelf is not None and shelf.profile is profile else profile.revision

    def _pool_pods(self, profile: Profile) -> Iterator[Pod]:
        """Those that are nobody's, ready or not."""
        watch = self._watches.get(profile.target)
        for name in self._idle.get(profile.name, ()) if watch is not None else ():
            if watch is not None and (pod := watch.pods.get(name)) is not None:
                yield pod

    def _held_back(self, profile: Profile) -> str | None:
        """What a pod of the pool that is not ready waits for, if that is more than its start."""
        for pod in self._pool_pods(profile):
            if pod.waits is not None and pod.waits.code != "provisioning":
                return pod.waits.error().message
        return None

    @staticmethod
    def _stuck(pod: Pod) -> bool:
        """Neither ready nor held back by anything that could change."""
        if pod.ready or (pod.waits is not None and pod.waits.code != "provisioning"):
            return False
        return time.time() - pod.created_at > _STUCK_SEC

    @staticmethod
    def _is_idle(pod: Pod) -> bool:
        return not pod.deleting and pod.labels.get(LABEL_STATE) == PodState.IDLE

    def _learn(self, event: PodEvent, was_idle: bool) -> None:
        """What an event tells of how long pods take to start and of how many are claimed."""
        pod, now = event.pod, self.clock()
        shelf = self._shelves.get(pod.labels.get(LABEL_PROFILE, ""))
        if event.gone:
            self._claimed.discard(pod.name)
        if shelf is None or event.gone or pod.labels.get(LABEL_STATE) != PodState.IDLE:
            if shelf is not None:
                shelf.starting.pop(pod.name, None)
                if not event.gone and pod.labels.get(LABEL_SANDBOX) and pod.name not in self._claimed:
                    self._claimed.add(pod.name)
                    age_sec = 0.0 if was_idle else _age_sec(pod)
                    if -_SKEW_SEC <= age_sec < shelf.profile.pool_shrink_sec:
                        shelf.sizer.claimed(now, age_sec)
        elif pod.ready:
            began = shelf.starting.pop(pod.name, None)
            if began is not None:
                shelf.sizer.started(now, now - began)
        elif pod.waits is not None and pod.waits.code != "provisioning":
            shelf.starting[pod.name] = None  # for room, say: that is not how long a start takes
        elif self._watches[pod.target].known:  # of those that were there before, nobody knows since when
            shelf.starting.setdefault(pod.name, now)

    def _on_event(self, event: PodEvent) -> None:
        self._learn(event, event.pod.name in self._idle.get(event.pod.labels.get(LABEL_PROFILE, ""), ()))
        idle = self._idle.setdefault(event.pod.labels.get(LABEL_PROFILE, ""), {})
        if not event.gone and event.pod.labels.get(LABEL_STATE) == PodState.IDLE:
            idle[event.pod.name] = None
            self._tell(event.pod)
        else:
            idle.pop(event.pod.name, None)
        if event.gone:
            self._taken.pop(event.pod.name, None)
            self._misses.pop(event.pod.name, None)
            self._ranks.pop(event.pod.name, None)
            self._wake.set()
        elif event.pod.labels.get(LABEL_STATE) != PodState.IDLE:
            self._wake.set()  # another manager's claim leaves a gap here

    def _tell(self, pod: Pod) -> None:
        """Of a pod that may be had now."""
        shelf = self._shelves.get(pod.labels.get(LABEL_PROFILE, ""))
        if shelf is None or pod.name in self._taken or not self._is_idle(pod) or not self._fits(pod, shelf.profile):
            return
        for listener in self._listeners:
            listener(shelf.profile)

    def _start(self, job: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            job.close()
        else:
            self._group.create_task(job, name=name)


def _age_sec(pod: Pod) -> float:
    """Since the pod was claimed, by the clock of whoever did it; infinite where the pod does not say."""
    try:
        return time.time() - float(pod.annotations.get(NOTE_BOUND_AT, "-inf"))
    except ValueError:
        return math.inf
