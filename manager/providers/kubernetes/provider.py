"""Pods in one namespace of a Kubernetes cluster.

What is asked for is done by the API server and read back from it; a watch, shared by everything here, tells when a pod
is ready, changed or gone. A change of a pod is one JSON Patch that tests which pod it is, its version and its state, so
that of any number of managers exactly one makes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from manager.errors import (
    CapacityExhausted,
    InvalidRequest,
    IsolationUnavailable,
    ManagerError,
    Provisioning,
    TargetUnavailable,
)
from manager.model import LABEL_SANDBOX, LABEL_STATE, Pod, PodState, Profile
from manager.providers.base import ClaimLost, PodEvent, PodGone
from manager.providers.kubernetes.client import JSON_PATCH, ApiRefused, ClusterClient
from manager.providers.kubernetes.election import Election
from manager.providers.kubernetes.objects import (
    PodObject,
    last_words,
    pod_of,
    reason_of,
    unheard_of,
    waits_of,
)
from manager.providers.kubernetes.pod import (
    GRACE_SEC,
    NOTE_EVICTABLE,
    UNUSED_GRACE_SEC,
    Identity,
    eviction_note,
    manifest,
    pod_spec,
    selector,
)
from manager.providers.kubernetes.watch import Changed, Listed, PodFollower, list_pods
from manager.steps import in_steps

log = logging.getLogger(__name__)

READY_SEC: Final = 300.0
DELETE_SEC: Final = 60.0
LOST_SEC: Final = GRACE_SEC + 2.0  # how long the end of a pod on a lost node is waited for
READ_SEC: Final = 5.0  # of one pod, over all tries
LOOK_SEC: Final = 5.0  # a pod that is waited for is looked at so often where the watch says nothing
TAKE_BACK_TRIES: Final = 12
TIDY_SEC: Final = 3.0  # after its end was seen, a pod's record goes within this
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_QUOTA: Final = "exceeded quota"


class KubernetesProvider:
    """A `Provider`. `token_for` gives a pod's token; the pod itself gets only its SHA-256."""

    def __init__(
        self,
        name: str,
        client: ClusterClient,
        namespace: str,
        token_for: Callable[[str], str],
        *,
        ready_sec: float = READY_SEC,
        unclaimed_sec: float | None = None,
        follower: PodFollower | None = None,
    ) -> None:
        self.name = name
        self._client = client
        self._namespace = namespace
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._token_for = token_for
        self._ready_sec = ready_sec
        self._unclaimed_sec = unclaimed_sec
        self._labels = selector(name)
        self._follower = follower or PodFollower(client, self._path, self._labels)
        self._election = Election(client, namespace)
        self._seen: dict[str, PodObject] = {}  # as the watch has told, pods that have ended included
        self._listed = asyncio.Event()
        self._moved: dict[str, asyncio.Event] = {}  # of pods that somebody here waits for
        self._watchers: set[asyncio.Queue[PodEvent | None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[None]] = set()

    @property
    def current(self) -> bool:
        return self._follower.current

    async def check(self) -> str:
        """The cluster's version. Raises TargetUnavailable where its API server does not answer or refuses the pods."""
        data = await self._client.request("GET", "/version")
        await self._client.request("GET", self._path, query={"limit": "1"})
        version = msgspec.json.decode(data, type=dict[str, Any]).get("gitVersion", "unknown")
        return str(version)[:64]

    async def lead(self, name: str, holder: str, seconds: float) -> bool:
        return await self._election.lead(name, holder, seconds)

    async def create(
        self,
        profile: Profile,
        name: str,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        *,
        wait: bool = True,
    ) -> Pod:
        if not _NAME.match(name):
            raise InvalidRequest(f"{name!r} is no pod name: lower-case letters, digits and -, at most 63")
        identity = Identity(
            name=name,
            namespace=self._namespace,
            target=self.name,
            labels=labels,
            annotations=annotations,
            token_sha256=hashlib.sha256(self._token_for(name).encode()).hexdigest(),
            unclaimed_sec=self._unclaimed_sec,
        )
        self._follow()
        moved = self._moved.setdefault(name, asyncio.Event())
        body = manifest(pod_spec(profile, identity))
        posting = asyncio.create_task(self._post(name, body), name=f"cluster-post-{name}")
        kept = False
        try:
            made = await asyncio.shield(posting)
            try:
                async with asyncio.timeout(self._ready_sec if wait else None):
                    pod = pod_of(await self._until_ready(made, moved) if wait else made, self.name)
            except TimeoutError as why:
                raise waits_of(self._seen.get(name, made)).error() from why
            kept = True
            return pod
        finally:
            self._moved.pop(name, None)
            if not kept:
                # Also where the call was broken off: what it asked for may come yet.
                self._job(self._take_back(posting, name), f"cluster-take-back-{name}")

    async def get(self, name: str) -> Pod | None:
        found = await self._read(name)
        return None if found is None or found.ended else pod_of(found, self.name)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[Pod]:
        found, _ = await list_pods(self._client, self._path, self._labels)
        wanted = (labels or {}).items()
        pods = [pod_of(pod, self.name) async for pod in in_steps(found) if not pod.ended]
        return [pod for pod in pods if wanted <= pod.labels.items()]

    async def patch(
        self, name: str, version: str, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> Pod:
        if not _NAME.match(name):
            raise PodGone(name)
        uid, resource_version, state = (*version.split(":", 2), "", "")[:3]
        notes = dict(annotations)
        tests = [_test("/metadata/uid", uid), _test("/metadata/resourceVersion", resource_version)]
        if LABEL_STATE in labels:
            if state:
                tests.append(_test(_pointer("labels", LABEL_STATE), state))
            notes[NOTE_EVICTABLE] = eviction_note(labels[LABEL_STATE])
        body = tests + _changes("labels", labels) + _changes("annotations", notes)
        try:
            data = await self._client.request("PATCH", f"{self._path}/{name}", body=body, content_type=JSON_PATCH)
        except ApiRefused as why:
            if why.api_status == 404:
                raise PodGone(name) from why
            if why.api_status not in (409, 422):
                raise
            # Not if nobody can have made it but us: an earlier try of this patch, whose answer was lost.
            found = await self._read(name) if why.doubtful else None
            if found is None or found.metadata.uid != uid or found.deleting or not _carries(found, labels, notes):
                raise ClaimLost(name) from why
            return pod_of(found, self.name)
        return pod_of(_decoded(data), self.name)

    async def delete(self, name: str) -> None:
        if not _NAME.match(name):
            return
        self._follow()
        moved = self._moved.setdefault(name, asyncio.Event())
        try:
            found = await self._read(name)
            if found is None:
                return
            uid = found.metadata.uid
            await self._delete_object(found)
            began = time.monotonic()
            while (found := await self._read(name)) is not None and found.metadata.uid == uid:
                left = (LOST_SEC if unheard_of(found) else DELETE_SEC) - (time.monotonic() - began)
                if left <= 0:
                    break
                await _pulse(moved, min(LOOK_SEC, left, 1.0))
            else:
                return
            if not unheard_of(found):
                raise ManagerError(f"pod {name} has not ended within {DELETE_SEC:.0f} s")
            # Nobody can say whether it still runs; its executor ends itself when nobody has called for long enough.
            log.error("pod_end_not_confirmed", extra={"pod": name, "why": "its node says nothing"})
        finally:
            self._moved.pop(name, None)

    async def watch(self) -> AsyncIterator[PodEvent]:
        self._follow()
        await self._listed.wait()
        queue: asyncio.Queue[PodEvent | None] = asyncio.Queue()
        for seen in self._seen.values():
            queue.put_nowait(self._event(seen))
        self._watchers.add(queue)
        try:
            while True:
                event = await queue.get()
                if event is None:
                    raise TargetUnavailable("the watch of the cluster's pods has died; it is begun anew")
                yield event
        finally:
            self._watchers.discard(queue)

    async def close(self) -> None:
        tasks = set(self._jobs)
        if self._following is not None:
            self._following.cancel()
            tasks.add(self._following)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=DELETE_SEC / 4)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        await self._client.close()

    # ── the watch ───────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self) -> None:
        if self._following is None:
            self._following = asyncio.create_task(self._take_in(), name=f"cluster-watch-{self.name}")

    async def _take_in(self) -> None:
        try:
            await self._take_in_forever()
        except Exception:
            # A defect of ours must not leave a picture that stands still and looks like the present.
            log.exception("cluster_watch_died")
            self._follower.current = False
            self._following = None
            self._listed.clear()
            for watcher in self._watchers:
                watcher.put_nowait(None)

    async def _take_in_forever(self) -> None:
        async for told in self._follower.follow():
            if isinstance(told, Listed):
                names = {pod.name for pod in told.pods}
                for gone in [pod for name, pod in self._seen.items() if name not in names]:
                    self._removed(gone)
                for pod in told.pods:
                    self._put(pod)
                self._listed.set()
            elif isinstance(told, Changed):
                if told.deleted:
                    self._removed(told.pod)
                else:
                    self._put(told.pod)

    def _put(self, pod: PodObject) -> None:
        before = self._seen.get(pod.name)
        if before is not None and before.metadata.uid == pod.metadata.uid and before.serial >= pod.serial:
            return
        self._seen[pod.name] = pod
        told = before is not None and before.metadata.uid == pod.metadata.uid and before.ended
        if pod.ended and not told and not pod.deleting:
            self._job(self._tidy(pod), f"cluster-tidy-{pod.name}")
        self._tell(pod.name, None if told else self._event(pod))

    def _removed(self, pod: PodObject) -> None:
        before = self._seen.pop(pod.name, None)
        if before is not None and before.ended:
            self._tell(pod.name, None)  # its end was told already
        else:
            self._tell(pod.name, PodEvent(pod_of(pod, self.name), gone=True, reason=_final_reason(pod, before)))

    def _event(self, pod: PodObject) -> PodEvent:
        return PodEvent(pod_of(pod, self.name), gone=pod.ended, reason=reason_of(pod) if pod.ended else "")

    def _tell(self, name: str, event: PodEvent | None) -> None:
        if (moved := self._moved.get(name)) is not None:
            moved.set()
        if event is not None:
            for watcher in self._watchers:
                watcher.put_nowait(event)

    async def _tidy(self, pod: PodObject) -> None:
        """The record of a pod that has ended by itself goes; of several managers one is the first."""
        await asyncio.sleep(random.uniform(0.2, TIDY_SEC))
        seen = self._seen.get(pod.name)
        if seen is None or seen.deleting or seen.metadata.uid != pod.metadata.uid:
            return
        try:
            await self._delete_object(seen)
        except ManagerError as why:
            log.warning("cluster_pod_left", extra={"pod": pod.name, "why": why.message})

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _post(self, name: str, body: dict[str, Any]) -> PodObject:
        try:
            return _decoded(await self._client.request("POST", self._path, body=body))
        except ApiRefused as why:
            if why.api_status == 409 and why.reason == "AlreadyExists":
                found = await self._read(name)
                if found is None or found.deleting:
                    raise Provisioning(f"pod {name} is being removed") from why
                return found
            log.warning("pod_refused", extra={"pod": name, "status": why.api_status, "why": why.words})
            if why.api_status == 403 and _QUOTA in why.words:
                raise CapacityExhausted(f"the cluster's quota is used up: {why.words}") from why
            if why.api_status in (400, 403, 422):
                raise IsolationUnavailable(
                    "the cluster refuses the profile's pod, and nothing runs weaker; the manager's log says why"
                ) from why
            raise

    async def _read(self, name: str) -> PodObject | None:
        """As it is now, by a read that no cache answers."""
        if not _NAME.match(name):
            return None
        try:
            within_sec = min(READ_SEC, self._client.deadline_sec)
            found = _decoded(await self._client.request("GET", f"{self._path}/{name}", deadline_sec=within_sec))
        except ApiRefused as why:
            if why.api_status == 404:
                return None
            raise
        wanted = self._labels.items()
        return found if wanted <= (found.metadata.labels or {}).items() else None

    async def _until_ready(self, made: PodObject, moved: asyncio.Event) -> PodObject:
        """Raises ImagePullFailed, and Provisioning where the pod ended; else waits."""
        seen: PodObject | None = made
        while True:
            if seen is None or seen.metadata.uid != made.metadata.uid:
                raise Provisioning(f"pod {made.name} was deleted before it was ready")
            if seen.ended:
                raise Provisioning(f"pod {made.name} ended before it was ready ({reason_of(seen)}): {last_words(seen)}")
            if seen.deleting:
                raise Provisioning(f"pod {made.name} was deleted before it was ready")
            if pod_of(seen, self.name).ready:
                return seen
            if (waits := waits_of(seen)).code == "image_pull_failed":
                raise waits.error()
            if await _pulse(moved, LOOK_SEC * random.uniform(0.8, 1.2)):
                seen = self._seen.get(made.name)
            else:
                seen = await self._read(made.name)

    async def _delete_object(self, found: PodObject) -> None:
        """Asks for the pod's end; no error where it is gone, or is another one by now."""
        labels = found.metadata.labels or {}
        unused = labels.get(LABEL_STATE) == PodState.IDLE or labels.get(LABEL_SANDBOX) == ""
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": found.metadata.uid},
            "gracePeriodSeconds": UNUSED_GRACE_SEC if unused else GRACE_SEC,
        }
        try:
            await self._client.request("DELETE", f"{self._path}/{found.name}", body=body)
        except ApiRefused as why:
            if why.api_status not in (404, 409):
                raise

    async def _take_back(self, posting: asyncio.Task[PodObject], name: str) -> None:
        """Ends what `posting` made, or may have made without our hearing of it."""
        try:
            await posting
        except (CapacityExhausted, IsolationUnavailable):
            return  # refused
        except ManagerError as why:
            log.warning("cluster_pod_in_doubt", extra={"pod": name, "why": why.message})
        for _ in range(TAKE_BACK_TRIES):
            try:
                found = await self._read(name)
                if found is not None:
                    await self._delete_object(found)
                return
            except ManagerError:
                await asyncio.sleep(LOOK_SEC)
        # It is claimed and nobody's, or of the pool and counted: whoever looks next finds it.
        log.warning("cluster_pod_left", extra={"pod": name})

    def _job(self, work: Coroutine[Any, Any, None], name: str) -> None:
        job = asyncio.get_running_loop().create_task(work, name=name)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)


async def _pulse(moved: asyncio.Event, within_sec: float) -> bool:
    """Whether the watch told something of the pod within that time."""
    try:
        async with asyncio.timeout(within_sec):
            await moved.wait()
    except TimeoutError:
        return False
    moved.clear()
    return True


def _final_reason(last: PodObject, before: PodObject | None) -> str:
    """Of a pod that is not there any more: what its last picture says, or the one before where that says more."""
    reasons = [reason_of(seen) for seen in (last, before) if seen is not None]
    telling = [reason for reason in reasons if reason not in ("destroyed", "lost")]
    if telling:
        return telling[0]
    return "destroyed" if last.deleting or (before is not None and before.deleting) else reasons[0]


def _test(path: str, value: str) -> dict[str, str]:
    return {"op": "test", "path": path, "value": value}


def _pointer(where: str, key: str) -> str:
    return f"/metadata/{where}/{key.replace('~', '~0').replace('/', '~1')}"


def _changes(where: str, values: Mapping[str, str | None]) -> list[dict[str, str]]:
    changes = []
    for key, value in values.items():
        changes.append({"op": "add", "path": _pointer(where, key), "value": value or ""})
        if value is None:  # added first: what is not there cannot be removed
            changes.append({"op": "remove", "path": _pointer(where, key)})
    return changes


def _carries(found: PodObject, labels: Mapping[str, str | None], notes: Mapping[str, str | None]) -> bool:
    """Whether the pod is as the patch would have left it."""
    have = ((found.metadata.labels or {}, labels), (found.metadata.annotations or {}, notes))
    return all(there.get(key) == value for there, wanted in have for key, value in wanted.items())


def _decoded(data: bytes) -> PodObject:
    try:
        return msgspec.json.decode(data, type=PodObject)
    except msgspec.DecodeError as why:
        raise TargetUnavailable("the cluster's API server answered with something that is no pod") from why
