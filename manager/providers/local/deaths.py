"""Notices the end of processes without looking at each of them again and again: one pidfd each in the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from manager.providers.local.processes import ProcessId, open_pidfd

POLL_SEC: Final = 0.5  # only on kernels without pidfds, for all processes together


class Deaths:
    """Calls `ended(name)` in the event loop, once, when the process watched under that name has ended."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._pidfds: dict[str, int] = {}
        self._polled: dict[str, ProcessId] = {}
        self._poller: asyncio.Task[None] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._pidfds or name in self._polled

    def add(self, name: str, process: ProcessId) -> None:
        """Starts to watch; a process that has ended already is told of in the loop's next turn."""
        if name in self:
            return
        loop = asyncio.get_running_loop()
        try:
            fd = open_pidfd(process)
        except OSError:
            self._polled[name] = process
            if self._poller is None or self._poller.done():
                self._poller = asyncio.create_task(self._poll(), name="local-pod-deaths")
            return
        if fd is None:
            loop.call_soon(self._ended, name)
            return
        self._pidfds[name] = fd
        loop.add_reader(fd, self._readable, name)

    def discard(self, name: str) -> None:
        self._polled.pop(name, None)
        fd = self._pidfds.pop(name, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    async def close(self) -> None:
        for name in [*self._pidfds, *self._polled]:
            self.discard(name)
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])

    def _readable(self, name: str) -> None:
        self.discard(name)
        self._ended(name)

    async def _poll(self) -> None:
        while self._polled:
            await asyncio.sleep(POLL_SEC)
            for name, process in list(self._polled.items()):
                if not process.alive():
                    self._readable(name)
