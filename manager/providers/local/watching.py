"""Who wants to know that pods have changed. A watcher holds names, not events: it falls behind but never overflows."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

_REASONS: Final = 4096  # ends remembered for watchers that have not asked yet


class Watcher:
    """The names of pods that changed since it last looked: as many as there are pods, however often they change."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._changed = asyncio.Event()

    def touch(self, name: str) -> None:
        self._names[name] = None
        self._changed.set()

    async def take(self, timeout_sec: float) -> list[str]:
        """Waits for a change, `timeout_sec` at most; the changed names in order, [] at the timeout."""
        try:
            async with asyncio.timeout(timeout_sec):
                await self._changed.wait()
        except TimeoutError:
            return []
        names = list(self._names)
        self._names.clear()
        self._changed.clear()
        return names


class Watchers:
    def __init__(self) -> None:
        self._all: set[Watcher] = set()
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def join(self) -> Watcher:
        watcher = Watcher()
        self._all.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._all.discard(watcher)

    def changed(self, name: str) -> None:
        for watcher in self._all:
            watcher.touch(name)

    def ended(self, name: str, reason: str) -> None:
        self._reasons[name] = reason
        while len(self._reasons) > _REASONS:
            self._reasons.popitem(last=False)
        self.changed(name)

    def reason(self, name: str) -> str:
        """Why the pod ended; `lost` where nobody here saw it."""
        return self._reasons.get(name, "lost")
