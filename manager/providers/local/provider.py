"""Pods as isolated containers on this machine: bubblewrap around our executor, reached over a Unix socket.

The data directory holds all that is known of them, so that any manager, also one started after a crash, finds every
living pod and clears up what is left of dead ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from manager.errors import (
    CapacityExhausted,
    InvalidRequest,
    IsolationUnavailable,
    ManagerError,
    Provisioning,
    ShuttingDown,
)
from manager.model import Pod, Profile
from manager.providers.base import PodEvent
from manager.providers.local import cgroups
from manager.providers.local.capability import Capabilities, probe
from manager.providers.local.deaths import Deaths
from manager.providers.local.ending import end_pod, log_tail, trim_log
from manager.providers.local.entry import Entry, find_entry
from manager.providers.local.making import Making, Plan, cgroup_name, new_record, plan_for, start
from manager.providers.local.processes import boot_id
from manager.providers.local.removal import remove_tree
from manager.providers.local.state import PodRecord, PodStore, pod_of
from manager.providers.local.watching import Watchers

log = logging.getLogger(__name__)

READY_SEC: Final = 30.0
DELETE_SEC: Final = 60.0
READY_POLL_SEC: Final = 0.02
RESCAN_SEC: Final = 2.0  # how late a watcher learns of what another manager did
LOG_BYTES: Final = 1 << 20  # of a pod's log, before it is cut to its end
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z")
_NO_ROOM: Final = (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)

T = TypeVar("T")


class LocalProvider:
    """A `Provider`. `token_for` gives a pod's token; the pod itself gets only its SHA-256.

    `insecure` runs plain processes where isolation is not to be had, or not asked for. `allow_missing_limits` lets
    pods run without the limits that this machine cannot set; both say so loudly. `package` is the directory of another
    `executor` than the installed one."""

    def __init__(
        self,
        name: str,
        data_dir: Path,
        token_for: Callable[[str], str],
        *,
        insecure: bool = False,
        allow_missing_limits: bool = False,
        max_pods: int = 256,
        ready_sec: float = READY_SEC,
        unclaimed_sec: float | None = None,
        package: Path | None = None,
    ) -> None:
        self.name = name
        self._data_dir = data_dir.absolute()
        self._token_for = token_for
        self._insecure = insecure
        self._allow_missing_limits = allow_missing_limits
        self._max_pods = max_pods
        self._ready_sec = ready_sec
        self._unclaimed_sec = unclaimed_sec
        self._package = package
        self._boot = boot_id()
        self._store = PodStore(self._data_dir / "pods")
        # Two pools: a huge workspace being removed must not keep claims waiting.
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="local-pods")
        self._removers = ThreadPoolExecutor(2, thread_name_prefix="local-pod-removal")
        self._found: tuple[Capabilities, Entry | None] | None = None
        self._finding = asyncio.Lock()
        self._warned: set[str] = set()
        self._making: set[str] = set()
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._clearing: asyncio.Task[None] | None = None
        self._deaths = Deaths(self._died)
        self._watchers = Watchers()
        self.closed = False

    async def capabilities(self) -> Capabilities:
        """What pods get on this machine; tried out at the first call."""
        return (await self._survey())[0]

    async def create(
        self, profile: Profile, name: str, labels: Mapping[str, str], annotations: Mapping[str, str]
    ) -> Pod:
        if not _NAME.match(name):
            raise InvalidRequest(f"{name!r} is no pod name: lower-case letters, digits and -, at most 63")
        found, entry = await self._survey()
        plan = plan_for(profile, found, insecure=self._insecure, allow_missing_limits=self._allow_missing_limits)
        self._warn(plan, found)
        if entry is None:
            entry = await self._in_thread(partial(find_entry, self._data_dir, self._package, isolated=plan.isolated))
        if (there := await self.get(name)) is not None:
            return there
        if name in self._making:
            raise Provisioning(f"pod {name} is being made")
        names = await self._in_thread(self._store.names)
        if len(set(names) | self._making) >= self._max_pods:
            raise CapacityExhausted(f"this target holds its most of {self._max_pods} pods")
        self._making.add(name)
        try:
            record = await self._in_thread(
                partial(
                    new_record, name, self.name, self._store, found, plan, labels=dict(labels),
                    annotations=dict(annotations), now=time.time(), boot=self._boot,
                )
            )  # fmt: skip
            making = Making(record)
            try:
                async with asyncio.timeout(self._ready_sec):
                    return await self._make(making, found, entry, plan)
            except BaseException as why:
                # Read before the directory goes.
                said = log_tail(making.log)
                if making.held is not None:
                    await self._until_done(self._end_soon(name, deleted=True))
                if (known := _explained(why, name, said, self._ready_sec)) is not None:
                    raise known from why
                raise
            finally:
                making.release()
        finally:
            self._making.discard(name)

    async def get(self, name: str) -> Pod | None:
        if not _NAME.match(name):
            return None
        record = await self._in_thread(self._store.read, name)
        if record is None or record.target != self.name or record.phase != "ready" or not record.alive(self._boot):
            return None
        self._watch_over(record)
        return pod_of(record)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[Pod]:
        living, dead = await self._in_thread(_scan, self._store, self._boot)
        for name in dead:
            if name not in self._making and not self.closed:
                self._end_soon(name, deleted=False)
        if self._clearing is None and not self.closed:
            self._clearing = asyncio.create_task(self._clear_leftovers(), name="local-leftovers")
        ours = [record for record in living if record.target == self.name]
        for record in ours:
            self._watch_over(record)
        wanted = (labels or {}).items()
        return [pod_of(record) for record in ours if wanted <= record.labels.items()]

    async def patch(
        self, name: str, version: str, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> Pod:
        record = await self._in_thread(self._store.patch, name, version, labels, annotations)
        self._watchers.changed(name)
        return pod_of(record)

    async def delete(self, name: str) -> None:
        if not _NAME.match(name):
            return
        if (under_way := self._ending.get(name)) is not None:
            await asyncio.wait([under_way])
        ending = self._end_soon(name, deleted=True)
        done, _ = await asyncio.wait([ending], timeout=DELETE_SEC)
        if done:
            ending.result()
        elif await self.get(name) is None:
            log.warning("pod_removal_slow", extra={"pod": name})  # it has ended; its files go on being removed
        else:
            raise ManagerError(f"pod {name} has not ended within {DELETE_SEC:.0f} s")

    async def watch(self) -> AsyncIterator[PodEvent]:
        watcher = self._watchers.join()
        known: dict[str, Pod] = {}
        names: list[str] = []
        try:
            while not self.closed:
                # Every name at the start, and again now and then: another manager's doings are seen in the store only.
                if not names:
                    found = {pod.name: pod for pod in await self.list()}
                    await self._in_thread(_trim_logs, self._store, [*found])
                    names = [name for name in {**known, **found} if known.get(name) != found.get(name)]
                else:
                    found = {pod.name: pod for name in names if (pod := await self.get(name)) is not None}
                for name in names:
                    before, now = known.get(name), found.get(name)
                    if now is not None and now != before:
                        known[name] = now
                        yield PodEvent(now)
                    elif now is None and before is not None:
                        del known[name]
                        yield PodEvent(before, gone=True, reason=self._watchers.reason(name))
                names = await watcher.take(RESCAN_SEC)
        finally:
            self._watchers.leave(watcher)

    async def close(self) -> None:
        self.closed = True
        await self._deaths.close()
        tasks = [*self._ending.values(), *([self._clearing] if self._clearing else [])]
        if tasks:
            await asyncio.wait(tasks, timeout=DELETE_SEC)  # what is left then, the next manager removes
        self._threads.shutdown(wait=False)
        self._removers.shutdown(wait=False)

    # ── the making ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _make(self, making: Making, found: Capabilities, entry: Entry, plan: Plan) -> Pod:
        name = making.record.name
        token_sha256 = hashlib.sha256(self._token_for(name).encode()).hexdigest()
        await self._in_thread(
            partial(
                start, making, self._store, found, entry, plan, token_sha256=token_sha256,
                unclaimed_sec=self._unclaimed_sec,
            )
        )  # fmt: skip
        inner = making.record.inner
        if inner is None:
            raise Provisioning(f"pod {name}: the executor ended at its start: {log_tail(making.log)}")
        connector = aiohttp.UnixConnector(making.record.socket, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not await _ready(session, making.record.socket):
                if not inner.alive():
                    raise Provisioning(f"pod {name}: the executor ended before it was ready: {log_tail(making.log)}")
                await asyncio.sleep(READY_POLL_SEC)
        record = await self._in_thread(
            self._store.change, name, lambda stored: msgspec.structs.replace(stored, phase="ready")
        )
        self._making.discard(name)  # before the watch: from here on its death is the end of a pod
        self._watch_over(record)
        self._watchers.changed(name)
        log.info("pod_ready", extra={"pod": name, "took_sec": round(time.time() - record.created_at, 3)})
        return pod_of(record)

    async def _survey(self) -> tuple[Capabilities, Entry | None]:
        if self.closed:
            raise ShuttingDown("the local provider is closed")
        async with self._finding:
            if self._found is None:
                self._found = await self._in_thread(self._look)
            return self._found

    def _look(self) -> tuple[Capabilities, Entry | None]:
        self._store.prepare()
        try:
            entry = find_entry(self._data_dir, self._package)
        except IsolationUnavailable:
            entry = None
        return probe(self._data_dir, entry), entry

    def _warn(self, plan: Plan, found: Capabilities) -> None:
        """Of each kind once."""
        warnings = {} if plan.isolated else {"pods_not_isolated": found.why_not}
        if plan.unenforced:
            whys = (f"{name}: {found.missing_limits[name]}" for name in plan.unenforced)
            warnings["limits_not_enforced"] = "; ".join(whys)
        for event, why in warnings.items():
            if event not in self._warned:
                self._warned.add(event)
                log.warning(event, extra={"target": self.name, "why": why})

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _died(self, name: str) -> None:
        if not self.closed and name not in self._making:
            self._end_soon(name, deleted=False)

    def _end_soon(self, name: str, *, deleted: bool) -> asyncio.Task[None]:
        task = self._ending.get(name)
        if task is None:
            task = asyncio.create_task(self._end(name, deleted=deleted), name=f"local-end-{name}")
            self._ending[name] = task
            task.add_done_callback(partial(self._ended, name))
        return task

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._ending.pop(name, None)
        if not task.cancelled() and (why := task.exception()) is not None:
            log.error("pod_not_ended", extra={"pod": name, "why": repr(why)})

    async def _end(self, name: str, *, deleted: bool) -> None:
        self._deaths.discard(name)
        blank = PodRecord(
            name=name, target=self.name, version=0, phase="creating", labels={}, annotations={}, created_at=0.0,
            boot_id=self._boot, socket="", run_dir="",
            cgroups=cgroups.paths(cgroups.find_hierarchies(), cgroup_name(self._store, name)),
        )  # fmt: skip
        reason, left = await self._in_thread(partial(end_pod, self._store, name, blank, deleted=deleted))
        if left is None:
            self._watchers.changed(name)  # another manager was faster
            return
        self._watchers.ended(name, reason)
        log.info("pod_ended", extra={"pod": name, "reason": reason})
        await self._settled(self._removers, remove_tree, left)

    async def _clear_leftovers(self) -> None:
        for path in await self._in_thread(self._store.leftovers):
            with contextlib.suppress(OSError):
                await self._settled(self._removers, remove_tree, path)

    def _watch_over(self, record: PodRecord) -> None:
        if record.inner is not None and not self.closed and record.name not in self._ending:
            self._deaths.add(record.name, record.inner)

    # ── threads ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await self._settled(self._threads, call, *args)

    async def _settled(self, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        """Runs `call` in a thread; a cancellation waits for it, since a thread that runs cannot be taken back."""
        future = asyncio.get_running_loop().run_in_executor(pool, partial(call, *args))
        await self._until_done(future)
        return future.result()

    async def _until_done(self, future: asyncio.Future[Any]) -> None:
        """Waits for `future`, however often we are cancelled meanwhile, then passes the cancellation on."""
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as why:
                cancelled = why
        if cancelled is not None:
            if not future.cancelled():
                future.exception()  # marked as seen: the cancellation goes first
            raise cancelled


def _scan(store: PodStore, boot: str) -> tuple[list[PodRecord], list[str]]:
    """The records of living pods, and the names of those of which only something is left."""
    living, dead = [], []
    for name in store.names():
        record = store.read(name)
        if record is None or record.phase == "creating":
            if store.abandoned(name):
                dead.append(name)
        elif record.phase == "ready" and record.alive(boot):
            living.append(record)
        else:
            dead.append(name)
    return living, dead


def _trim_logs(store: PodStore, names: Iterable[str]) -> None:
    for name in names:
        trim_log(store.path(name) / "log", LOG_BYTES)


async def _ready(session: aiohttp.ClientSession, socket: str) -> bool:
    if not os.path.exists(socket):  # noqa: ASYNC240 - one system call, cheaper than a connection that is refused
        return False
    try:
        async with session.get("http://pod/readyz", timeout=aiohttp.ClientTimeout(total=5.0)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _explained(why: BaseException, name: str, said: str, ready_sec: float) -> ManagerError | None:
    """What a failure of `create` is to the caller; None: itself."""
    if isinstance(why, ManagerError | asyncio.CancelledError) or not isinstance(why, Exception):
        return None
    if isinstance(why, FileExistsError):
        return Provisioning(f"pod {name} is being made or removed")
    if isinstance(why, TimeoutError):
        return Provisioning(f"pod {name} was not ready within {ready_sec:g} s; it said: {said or 'nothing'}")
    if isinstance(why, OSError) and why.errno in _NO_ROOM:
        return CapacityExhausted(f"no room for pod {name}: {why.strerror}")
    if isinstance(why, OSError):
        return IsolationUnavailable(f"pod {name} cannot be made here: {why}")
    return None
