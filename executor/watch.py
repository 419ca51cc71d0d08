"""Changes below a directory as they happen, to any number of bounded streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Final

from executor.errors import RateLimited
from executor.files import FileService
from executor.isolation import CommandUser
from executor.watchtree import WatchedTree
from executor.wire import HEARTBEAT_SEC, Heartbeat, WatchEnded, WatchEvent, WatchStarted

_MAX_AT_ONCE: Final = 32
_GATHER_SEC: Final = 0.02  # after the first event: a program that writes makes many of the same
_HALF_SEC: Final = 0.1  # for the other half of a move, which the kernel queues with the first


class WatchService:
    def __init__(self, files: FileService) -> None:
        self._files = files
        self._under_way = 0

    async def watch(
        self, path: str, recursive: bool, user: str | None = None
    ) -> AsyncGenerator[list[WatchEvent], None]:
        """Events in their order, the first being WatchStarted; ends with the directory. Closing it ends the watch.

        A reader that is slow loses events, and hears of it: the kernel keeps some 16,000 and then says so. Raises
        FileMissing, NotADirectory, PermissionDenied, RateLimited, NotSupported."""
        place = self._files.roots.place(path)
        threads = self._files.threads
        who = threads.named(user)
        if self._under_way >= _MAX_AT_ONCE:
            raise RateLimited(f"{_MAX_AT_ONCE} watches are open here, as many as may", limit=_MAX_AT_ONCE)
        self._under_way += 1
        tree = WatchedTree(place, recursive)
        try:
            await threads.run(who, tree.open)
            yield [WatchStarted(path=place.shown, directories=tree.directories, truncated=tree.truncated)]
            async for events in self._events(tree, who):
                yield events
        finally:
            self._under_way -= 1
            await threads.finish(who, tree.close)

    async def _events(self, tree: WatchedTree, who: CommandUser) -> AsyncGenerator[list[WatchEvent], None]:
        run = self._files.threads.run
        while True:
            waits = tree.waits_for_half
            if await _readable(tree.fd, _HALF_SEC if waits else HEARTBEAT_SEC):
                await asyncio.sleep(_GATHER_SEC)
                told: list[WatchEvent] = [*await run(who, tree.take)]
            elif waits:
                told = [*await run(who, tree.settle)]
            else:
                told = [Heartbeat(at=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"))]
            if told:
                yield told
            if told and isinstance(told[-1], WatchEnded):
                return


async def _readable(fd: int, limit_sec: float) -> bool:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        async with asyncio.timeout(limit_sec):
            await ready
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True
