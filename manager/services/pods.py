"""What is known of a target's pods without asking: its watch, kept as a dictionary."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from manager.errors import ManagerError
from manager.model import LABEL_TASK, Pod, PodEnded
from manager.providers.base import PodEvent, Provider

log = logging.getLogger(__name__)

_ENDED_KEPT: Final = 10_000

Lead = Callable[[str, str, float], Awaitable[bool]]  # name, holder, seconds: as the store's `lead`


class EndedPods:
    """How pods ended, the last so many: what a late answer or a lookup is compared with."""

    def __init__(self, keep: int = _ENDED_KEPT) -> None:
        self._keep = keep
        self._ended: OrderedDict[str, PodEnded] = OrderedDict()
        self._added = asyncio.Event()

    def add(self, pod: str, ended: PodEnded) -> None:
        """The first word on a pod stands: later ones only see that it is not there."""
        self._ended.setdefault(pod, ended)
        if len(self._ended) > self._keep:
            self._ended.popitem(last=False)
        self._added.set()
        self._added = asyncio.Event()

    def get(self, pod: str) -> PodEnded | None:
        return self._ended.get(pod)

    async def told(self, pod: str, within_sec: float) -> PodEnded | None:
        """The same, of a pod that is gone and of which the watch is about to tell how it ended."""
        try:
            async with asyncio.timeout(within_sec):
                while (ended := self._ended.get(pod)) is None:
                    await self._added.wait()
                return ended
        except TimeoutError:
            return None


class PodWatch:
    """A target's living pods, as far as the watch has told. `synced` is False while it may be behind."""

    def __init__(self, provider: Provider, ended: EndedPods) -> None:
        self.provider = provider
        self.ended = ended
        self.pods: dict[str, Pod] = {}
        self.known = False  # since it was first synced
        self._followed = False
        self.restarts = 0
        self._of_task: dict[str, set[str]] = {}  # by task label
        self._listeners: list[Callable[[PodEvent], None]] = []

    @property
    def synced(self) -> bool:
        return self._followed and self.provider.current

    def listen(self, listener: Callable[[PodEvent], None]) -> None:
        """`listener` is called for every change, on the event loop; it must not block."""
        self._listeners.append(listener)

    def of_task(self, label: str) -> list[Pod]:
        return [self.pods[name] for name in self._of_task.get(label, ())]

    def put(self, pod: Pod) -> None:
        """Takes in a pod that the provider has just answered with, before the watch tells of it."""
        self._apply(PodEvent(pod))

    def drop(self, pod: Pod, reason: str) -> None:
        self._apply(PodEvent(pod, gone=True, reason=reason))

    async def sync(self) -> None:
        """Lists once: what is no longer there has gone."""
        before = list(self.pods.values())  # what came while it was listed may be too new to be on the list
        there = await self.provider.list()
        names = {pod.name for pod in there}
        for pod in before:
            if pod.name not in names and pod.name in self.pods:
                self.drop(pod, "lost")
        for pod in there:
            self.put(pod)
        self.known = self._followed = True

    async def watch_forever(self) -> None:
        """Follows the provider's watch; lists anew and goes on where it ends or breaks."""
        failures = 0
        while True:
            try:
                await self.sync()
                async for event in self.provider.watch():
                    failures = 0
                    self._apply(event)
                why = "ended"
            except (ManagerError, OSError) as error:
                why = str(error)
            self._followed = False
            self.restarts += 1
            failures += 1
            log.warning("pod_watch_restarted", extra={"target": self.provider.name, "why": why})
            await asyncio.sleep(min(10.0, 0.1 * 2 ** min(failures, 7)) * random.uniform(0.5, 1.5))

    def _apply(self, event: PodEvent) -> None:
        name = event.pod.name
        before = self.pods.get(name)
        if before is not None and not event.gone and event.pod.serial < before.serial:
            return  # told late: what we have done ourselves since is known already
        self.pods.pop(name, None)
        if before is not None and (label := before.labels.get(LABEL_TASK)):
            self._of_task[label].discard(name)
            if not self._of_task[label]:
                del self._of_task[label]
        if event.gone:
            self.ended.add(name, PodEnded(reason=event.reason or "lost", at=time.time()))
        elif self.ended.get(name) is not None:
            return  # an event from before its end, told late
        else:
            self.pods[name] = event.pod
            if label := event.pod.labels.get(LABEL_TASK):
                self._of_task.setdefault(label, set()).add(name)
        for listener in self._listeners:
            listener(event)
