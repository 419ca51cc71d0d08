"""Pods as isolated containers on this machine: bubblewrap around our executor, reached over a Unix socket.

The data directory holds all that is known of them, so that any manager, also one started after a crash, finds every
living pod and clears up what is left of dead ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
from manager.providers.local import cgroups, images, routed
from manager.providers.local.capability import Capabilities, probe, probe_disk, probe_gvisor, probe_network
from manager.providers.local.deaths import Deaths
from manager.providers.local.ending import end_pod, log_tail, trim_log
from manager.providers.local.entry import Entry, bundle_entry, find_entry
from manager.providers.local.making import Making, Plan, cgroup_name, cgroup_suffix, new_record, plan_for, start
from manager.providers.local.network import OutboundSettings, network_for
from manager.providers.local.nftwatch import FilterWatch
from manager.providers.local.processes import boot_id
from manager.providers.local.proxies import Proxies
from manager.providers.local.removal import remove_tree
from manager.providers.local.state import PodRecord, PodStore, pod_of
from manager.providers.local.watching import Watchers

log = logging.getLogger(__name__)

READY_SEC: Final = 30.0
DELETE_SEC: Final = 60.0
READY_POLL_SEC: Final = 0.02
RESCAN_SEC: Final = 2.0  # how late a watcher learns of what another manager did
BUNDLE: Final = Path(__file__).resolve().parents[3] / "dist" / "sojourn-executor"  # where `make bundle` puts it
LOG_BYTES: Final = 1 << 20  # of a pod's log, before it is cut to its end
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z")
_NO_ROOM: Final = (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)

T = TypeVar("T")


class LocalProvider:
    """A `Provider`. `token_for` gives a pod's token; the pod itself gets only its SHA-256.

    `insecure` runs plain processes where isolation is not to be had, or not asked for. `allow_missing_limits` lets
    pods run without the limits that this machine cannot set; both say so loudly. `package` is the directory of another
    `executor` than the installed one. `outbound`: how pods with that network reach the outside.
    `files_sec`: how long a deletion waits for the files of a pod that has ended."""

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
        bundle: Path | None = None,
        outbound: OutboundSettings | None = None,
        files_sec: float = DELETE_SEC,
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
        self._bundle = (bundle or BUNDLE).absolute()
        self._unpacking = asyncio.Lock()
        self._outbound = outbound or OutboundSettings()
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
        self._removing: dict[str, asyncio.Task[None]] = {}  # what pods that have ended leave behind
        self._files_sec = files_sec
        self._clearing: asyncio.Task[None] | None = None
        self._deaths = Deaths(self._died)
        self._watchers = Watchers()
        self._proxies = Proxies(self._outbound)
        self._filter = FilterWatch(self._filter_removed)
        self._restoring: asyncio.Task[None] | None = None
        self.closed = False

    async def capabilities(self, *, disk: bool = False, network: bool = False, gvisor: bool = False) -> Capabilities:
        """What pods get on this machine; tried out at the first call, and what is named here when it is first named:
        bounds on their disks, how they reach the outside, gVisor."""
        return (await self._survey(disk=disk, network=network, gvisor=gvisor))[0]

    @property
    def current(self) -> bool:
        return True

    async def create(
        self,
        profile: Profile,
        name: str,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        *,
        wait: bool = True,
    ) -> Pod:
        """`wait` or not: what there is room for is ready in a moment, and nothing else is begun."""
        if not _NAME.match(name):
            raise InvalidRequest(f"{name!r} is no pod name: lower-case letters, digits and -, at most 63")
        found, entry = await self._survey(
            disk=profile.disk_bytes is not None, network=profile.network != "none",
            gvisor=profile.isolation == "gvisor",
        )  # fmt: skip
        plan = plan_for(profile, found, insecure=self._insecure, allow_missing_limits=self._allow_missing_limits)
        self._warn(plan, found)
        if profile.image != images.HOST:
            entry = bundle_entry(self._bundle, images.BUNDLE_PATH)
            async with self._unpacking:  # one at a time: the others find it unpacked
                image = await self._in_thread(images.open_image, profile.image, self._data_dir / "images")
            plan = dataclasses.replace(plan, image=image)
        elif entry is None:
            isolated = plan.tier is not None
            entry = await self._in_thread(partial(find_entry, self._data_dir, self._package, isolated=isolated))
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
                    if (removing := self._removing.get(name)) is not None:
                        await self._until_done(removing)
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
        if (removing := self._removing.get(name)) is not None:
            done, _ = await asyncio.wait([removing], timeout=self._files_sec)
            if done:
                removing.result()

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
        self._filter.close()
        if self._ending:
            await asyncio.wait([*self._ending.values()], timeout=DELETE_SEC)
        others = (task for task in (self._clearing, self._restoring) if task)
        tasks = [*self._ending.values(), *self._removing.values(), *others]
        if tasks:
            await asyncio.wait(tasks, timeout=DELETE_SEC)  # what is left then, the next manager removes
        await self._proxies.aclose()
        self._threads.shutdown(wait=False)
        self._removers.shutdown(wait=False)

    # ── the making ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _make(self, making: Making, found: Capabilities, entry: Entry, plan: Plan) -> Pod:
        name = making.record.name
        token_sha256 = hashlib.sha256(self._token_for(name).encode()).hexdigest()
        await self._in_thread(
            partial(
                start, making, self._store, found, entry, plan, token_sha256=token_sha256,
                unclaimed_sec=self._unclaimed_sec, outbound=self._outbound,
            )
        )  # fmt: skip
        inner = making.record.inner
        if inner is None:
            raise Provisioning(f"pod {name}: the executor ended at its start: {log_tail(making.log)}")
        self._tend_network(making.record)
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

    async def _survey(
        self, *, disk: bool = False, network: bool = False, gvisor: bool = False
    ) -> tuple[Capabilities, Entry | None]:
        """What is found once; what takes longer to find out only where a profile asks for it."""
        if self.closed:
            raise ShuttingDown("the local provider is closed")
        async with self._finding:
            if self._found is None:
                self._found = await self._in_thread(self._look)
            found, entry = self._found
            if disk and found.disk is None:
                found = await self._in_thread(probe_disk, found, self._data_dir)
            if network and found.network is None:
                found = await self._in_thread(probe_network, found, self._outbound)
            if gvisor and found.gvisor is None:
                found = await self._in_thread(probe_gvisor, found, self._data_dir, entry)
            self._found = found, entry
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
        warnings = {} if plan.tier is not None else {"pods_not_isolated": found.why_not}
        if plan.unenforced:
            whys = (f"{name}: {found.missing_limits[name]}" for name in plan.unenforced)
            warnings["limits_not_enforced"] = "; ".join(whys)
        if plan.disk_bytes is not None and found.disk is not None and found.disk.way == "memory":
            warnings["disk_in_memory"] = f"what pods store counts against their memory: {found.disk.weaker_because}"
        if plan.isolation == "gvisor" and found.gvisor is not None and found.gvisor.too_old:
            warnings["gvisor_too_old"] = f"runsc {found.gvisor.version}: {found.gvisor.too_old}"
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
        self._proxies.close(name)
        key = cgroup_name(self._store, name)
        network = network_for("routed", key, bytes_per_sec=0, connections=0)
        blank = PodRecord(
            name=name, target=self.name, version=0, phase="creating", labels={}, annotations={}, created_at=0.0,
            boot_id=self._boot, socket="", run_dir="",
            cgroups=cgroups.paths(cgroups.find_hierarchies(), key),
            network=network if os.path.exists(network.netns_path) else None,  # noqa: ASYNC240 - one system call
        )  # fmt: skip
        reason, left = await self._in_thread(partial(end_pod, self._store, name, blank, deleted=deleted))
        if left is None:
            self._watchers.changed(name)  # another manager was faster
            return
        self._watchers.ended(name, reason)
        log.info("pod_ended", extra={"pod": name, "reason": reason})
        removal = self._remove(left, self._removing.get(name))
        self._removing[name] = removing = asyncio.create_task(removal, name=f"local-removal-{name}")
        removing.add_done_callback(partial(self._removed, name))

    async def _remove(self, left: Path, before: asyncio.Task[None] | None) -> None:
        """`before`: the removal of what an earlier pod of the name has left."""
        if before is not None:
            await asyncio.wait([before])
        await self._settled(self._removers, remove_tree, left)

    def _removed(self, name: str, task: asyncio.Task[None]) -> None:
        if self._removing.get(name) is task:
            del self._removing[name]
        if not task.cancelled() and (why := task.exception()) is not None:
            log.error("pod_not_removed", extra={"pod": name, "why": repr(why)})

    async def _clear_leftovers(self) -> None:
        for path in await self._in_thread(self._store.leftovers):
            with contextlib.suppress(OSError):
                await self._settled(self._removers, remove_tree, path)
        await self._in_thread(self._clear_images)
        if os.geteuid() == 0:
            await self._in_thread(self._clear_networks)

    def _clear_networks(self) -> None:
        """Those of pods whose directories somebody has removed by hand."""
        known = [cgroup_name(self._store, name) for name in {*self._store.names(), *self._making}]
        for key in routed.leftovers(cgroup_suffix(self._store), known):
            with contextlib.suppress(OSError, IsolationUnavailable):
                routed.remove(network_for("routed", key, bytes_per_sec=0, connections=0))

    def _clear_images(self) -> None:
        living, _ = _scan(self._store, self._boot)
        images.sweep(self._data_dir / "images", [record.image for record in living])

    def _watch_over(self, record: PodRecord) -> None:
        if record.inner is not None and not self.closed and record.name not in self._ending:
            self._deaths.add(record.name, record.inner)
            self._tend_network(record)

    # ── networks ────────────────────────────────────────────────────────────────────────────────────────────────

    def _tend_network(self, record: PodRecord) -> None:
        """What a pod's network needs of a living manager."""
        if record.network is None:
            return
        try:
            if record.network.way == "proxy":
                self._proxies.open(record.name, self._store.path(record.name), record.network)
            else:
                self._filter.start()
        except OSError as why:
            log.error("network_not_tended", extra={"pod": record.name, "why": str(why)})

    def _filter_removed(self) -> None:
        if self._restoring is None or self._restoring.done():
            self._restoring = asyncio.create_task(self._restore_filter(), name="local-packet-filter")

    async def _restore_filter(self) -> None:
        """Without their rules, routed pods could reach this machine. Those of pods found again follow the settings."""
        try:
            if await self._in_thread(self._restore_now):
                log.error("packet_filter_restored", extra={"why": "somebody had removed the table `sojourn`"})
        except (OSError, IsolationUnavailable) as why:
            log.critical("packet_filter_missing", extra={"why": str(why)})

    def _restore_now(self) -> bool:
        living, _ = _scan(self._store, self._boot)
        networks = [record.network for record in living if record.network is not None]
        routed_ones = [network for network in networks if network.way == "routed"]
        return bool(routed_ones) and routed.restore(routed_ones, self._outbound)

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
