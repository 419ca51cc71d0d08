"""A Provider in memory, whose pods are small executors of the test's own process, each on its Unix socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from manager.executor_client import pod_token
from manager.model import LABEL_STATE, Pod, PodState, Profile
from manager.providers.base import ClaimLost, PodEvent, PodGone
from tests.support.fake_executor import FakeExecutor


class MemoryProvider:
    """manager.providers.base.Provider. `hook` is awaited with each call's name before it has any effect, `after` once
    it has had it."""

    def __init__(self, directory: Path, secret: bytes, name: str = "here") -> None:
        self.name = name
        self._directory = directory
        self._secret = secret
        self._pods: dict[str, Pod] = {}
        self.executors: dict[str, FakeExecutor] = {}  # also of pods that have ended
        self.hook: Callable[[str], Awaitable[None]] | None = None
        self.after: Callable[[str], Awaitable[None]] | None = None
        self._watchers: set[asyncio.Queue[PodEvent]] = set()
        self._version = 0
        self.current = True

    @property
    def pods(self) -> list[Pod]:
        return list(self._pods.values())

    @property
    def claimed(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.labels.get(LABEL_STATE) == PodState.CLAIMED]

    async def create(
        self,
        profile: Profile,
        name: str,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        *,
        wait: bool = True,
    ) -> Pod:
        await self._enter("create")
        if (present := self._pods.get(name)) is not None:
            return present
        executor = FakeExecutor(name, pod_token(self._secret, name), self._directory / f"{name}.sock")
        starting = asyncio.create_task(executor.start(), name=f"start-{name}")
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # half a server cannot be closed
            await starting
            await executor.stop()
            raise
        self.executors[name] = executor
        pod = Pod(
            name=name,
            version=self._next(),
            target=self.name,
            labels=dict(labels),
            annotations=dict(annotations),
            address=executor.address,
            ready=True,
            created_at=time.time(),
        )
        self._pods[name] = pod
        self._tell(PodEvent(pod))
        try:
            await self._leave("create")
        except BaseException:
            await self._end(name, "destroyed")
            raise
        return pod

    async def get(self, name: str) -> Pod | None:
        await self._enter("get")
        return self._pods.get(name)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[Pod]:
        await self._enter("list")
        wanted = (labels or {}).items()
        return [pod for pod in self.pods if all(pod.labels.get(label) == value for label, value in wanted)]

    async def patch(
        self, name: str, version: str, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> Pod:
        await self._enter("patch")
        pod = self._pods.get(name)
        if pod is None:
            raise PodGone(name)
        if pod.version != version or pod.deleting:
            raise ClaimLost(name)
        changed = msgspec.structs.replace(
            pod,
            version=self._next(),
            labels=_merged(pod.labels, labels),
            annotations=_merged(pod.annotations, annotations),
        )
        self._pods[name] = changed
        self._tell(PodEvent(changed))
        await self._leave("patch")
        return changed

    async def delete(self, name: str) -> None:
        await self._enter("delete")
        await self._end(name, "destroyed")
        await self._leave("delete")

    async def watch(self) -> AsyncIterator[PodEvent]:
        queue: asyncio.Queue[PodEvent] = asyncio.Queue()
        for pod in self.pods:
            queue.put_nowait(PodEvent(pod))
        self._watchers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    async def close(self) -> None:
        for executor in self.executors.values():
            await executor.stop()

    async def lose(self, name: str, reason: str = "oom") -> None:
        """The pod ends by itself; the watch tells of it."""
        await self._end(name, reason)

    async def lose_silently(self, name: str) -> None:
        """The pod ends, and the watch has not told of it yet."""
        self._pods.pop(name, None)
        await self.executors[name].stop()

    async def _end(self, name: str, reason: str) -> None:
        pod = self._pods.pop(name, None)
        if name in self.executors:
            await self.executors[name].stop()
        if pod is not None:
            self._tell(PodEvent(pod, gone=True, reason=reason))

    def _next(self) -> str:
        self._version += 1
        return str(self._version)

    def _tell(self, event: PodEvent) -> None:
        for queue in self._watchers:
            queue.put_nowait(event)

    async def _enter(self, call: str) -> None:
        await asyncio.sleep(0)
        if self.hook is not None:
            await self.hook(call)

    async def _leave(self, call: str) -> None:
        if self.after is not None:
            await self.after(call)


def _merged(old: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**old, **changes}
    return {key: value for key, value in merged.items() if value is not None}
