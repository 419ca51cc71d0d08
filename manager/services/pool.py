"""Pods that are ready and belong to nobody, so that a first command need not wait for one to start.

Claims take pods from any manager's pool and depend on no election; refilling is done by the elected manager. What is
being created or deleted counts before the watch shows it, so that nothing is made twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
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
from manager.services.pods import PodWatch
from manager.store.base import Store

log = logging.getLogger(__name__)

RETIRED: Final = "retired"  # the claim token of a pool pod that was taken out to be deleted
UNCLAIMED_SEC: Final = 600.0  # a pool pod outlives its last manager by so long
_LEAD_SEC: Final = 10.0
_LOOK_SEC: Final = 5.0  # at least this often; a claim or an ended pod wakes at once
_MAX_FAILURES: Final = 3  # pushes in a row that a pool pod may miss
_EMPTY_NOTES: Final = dict.fromkeys(
    (NOTE_TENANT, NOTE_PROJECT, NOTE_TASK_ID, NOTE_TOKEN, NOTE_BOUND_AT, NOTE_GENERATION), ""
)


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A profile's pool as it is now, for `/api/v1/pools` and the metrics."""

    profile: str
    target: str
    ready: int
    wanted: int
    creating: int
    claims: int
    misses: int
    created: int
    failed: int
    last_error: str | None


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
        self.creating: set[str] = set()  # names; counted until their create has returned
        self.failures = 0
        self.not_before = 0.0  # monotonic: the pause after a failed create
        self.last_error: str | None = None
        self.claims = self.misses = self.created = self.failed = 0

    @property
    def wanted(self) -> int:
        return min(self.profile.pool_min, self.profile.pool_max)


class WarmPool:
    def __init__(
        self,
        store: Store,
        watches: Mapping[str, PodWatch],
        client: ExecutorClient,
        profiles: Sequence[Profile],
        holder: str,
        *,
        parallel_creates: int = 2,
        unclaimed_sec: float = UNCLAIMED_SEC,
    ) -> None:
        self._store = store
        self._watches = watches
        self._client = client
        self._holder = holder
        self._unclaimed_sec = unclaimed_sec
        self._shelves = {profile.name: _Shelf(profile) for profile in profiles}
        self._taken: dict[str, None] = {}  # reserved or claimed here; held until the pod has gone
        self._misses: dict[str, int] = {}  # pushes that a pod did not answer
        self._paced = {target: asyncio.Semaphore(parallel_creates) for target in watches}
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None  # of creates and deletes, while refill_forever runs
        self._leads_until = 0.0  # monotonic
        self._ask_at = 0.0  # monotonic: before then another manager leads
        for watch in watches.values():
            watch.listen(self._on_event)

    # ── claims ──────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, profile: Profile) -> Pod | None:
        """A ready pool pod of exactly this profile and revision, which no other claim in this process will get."""
        ready = [pod for pod in self._ready(profile) if pod.name not in self._taken]
        if not ready:
            return None
        # A random one: managers that all began with the first would lose to each other again and again.
        pod = random.choice(ready)
        self._taken[pod.name] = None
        return pod

    def claimed(self, profile: Profile, pod: str) -> None:
        """The reserved pod is a sandbox's now; the pool is refilled right away."""
        if (shelf := self._shelves.get(profile.name)) is not None:
            shelf.claims += 1
        self._client.forget(pod)  # connections without the sandbox's lease
        self._wake.set()

    def release(self, pod: str) -> None:
        """The reserved pod was not claimed after all; what the watch says of it counts again."""
        self._taken.pop(pod, None)

    def missed(self, profile: Profile) -> None:
        """A first command found no ready pod."""
        if (shelf := self._shelves.get(profile.name)) is not None:
            shelf.misses += 1
        self._wake.set()

    # ── refill ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def refill_forever(self) -> None:
        """Keeps every profile's pool full while this manager leads; cancelled: waits for what it was creating."""
        try:
            async with asyncio.TaskGroup() as self._group:
                while True:
                    try:
                        if await self._lead():
                            for shelf in self._shelves.values():
                                self._tend(shelf)
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
                wanted=shelf.wanted,
                creating=len(shelf.creating),
                claims=shelf.claims,
                misses=shelf.misses,
                created=shelf.created,
                failed=shelf.failed,
                last_error=shelf.last_error,
            )
            for shelf in self._shelves.values()
        ]

    @property
    def full(self) -> bool:
        return all(view.ready >= view.wanted for view in self.views())

    def _tend(self, shelf: _Shelf) -> None:
        """Starts what the pool needs: creates for what is missing, deletes for pods of another revision."""
        profile = shelf.profile
        watch = self._watches[profile.target]
        if not watch.synced:
            return  # a stale picture would have pods made that are there already
        current = 0
        for pod in list(watch.pods.values()):
            if not self._is_idle(pod) or pod.labels.get(LABEL_PROFILE) != profile.name or pod.name in self._taken:
                continue
            if pod.labels.get(LABEL_REVISION) != profile.revision:
                self._taken[pod.name] = None
                self._start(self._take_out(watch, pod), f"pool-take-out-{pod.name}")
            elif pod.name not in shelf.creating:
                current += 1
        if time.monotonic() < shelf.not_before:
            return
        for _ in range(shelf.wanted - current - len(shelf.creating)):
            name = new_id("p")
            shelf.creating.add(name)
            self._start(self._create(shelf, watch, name), f"pool-create-{name}")

    async def _create(self, shelf: _Shelf, watch: PodWatch, name: str) -> None:
        try:
            async with self._paced[shelf.profile.target]:
                if time.monotonic() < shelf.not_before:
                    return
                pod = await watch.provider.create(shelf.profile, name, idle_labels(shelf.profile), _EMPTY_NOTES)
            watch.put(pod)
            shelf.created += 1
            shelf.failures, shelf.last_error = 0, None
            await self._push(watch, pod)
        except (ManagerError, OSError) as why:
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
        try:
            await watch.provider.patch(pod.name, pod.version, {LABEL_STATE: PodState.CLAIMED}, {NOTE_TOKEN: RETIRED})
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
        if not await self._store.lead("pool", self._holder, _LEAD_SEC):
            self._leads_until, self._ask_at = 0.0, now + _LOOK_SEC / 2
            return False
        self._leads_until = now + _LEAD_SEC
        return True

    def _ready(self, profile: Profile) -> Iterator[Pod]:
        watch = self._watches.get(profile.target)
        for pod in watch.pods.values() if watch is not None else ():
            if (
                self._is_idle(pod)
                and pod.ready
                and pod.labels.get(LABEL_PROFILE) == profile.name
                and pod.labels.get(LABEL_REVISION) == profile.revision
            ):
                yield pod

    @staticmethod
    def _is_idle(pod: Pod) -> bool:
        return not pod.deleting and pod.labels.get(LABEL_STATE) == PodState.IDLE

    def _on_event(self, event: PodEvent) -> None:
        if event.gone:
            self._taken.pop(event.pod.name, None)
            self._misses.pop(event.pod.name, None)
            self._wake.set()
        elif event.pod.labels.get(LABEL_STATE) != PodState.IDLE:
            self._wake.set()  # another manager's claim leaves a gap here

    def _start(self, job: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            job.close()
        else:
            self._group.create_task(job, name=name)
