"""Object storage and a cache that end with the test, with outages that it makes."""

from __future__ import annotations

from collections.abc import Sequence

from manager.errors import StoreUnavailable
from manager.store.cloud import CloudObjects
from manager.store.cloud import memory_objects as memory_objects


class MemoryCache:
    """manager.store.base.Cache without a clock: nothing runs out before `wipe`."""

    def __init__(self) -> None:
        self.down = False
        self.texts: dict[str, str] = {}

    async def cache_get(self, keys: Sequence[str]) -> Sequence[str | None]:
        self._up()
        return [self.texts.get(key) for key in keys]

    async def cache_put(self, key: str, text: str, ttl_sec: float, *, only_absent: bool = False) -> None:
        self._up()
        if not (only_absent and key in self.texts):
            self.texts[key] = text

    async def cache_drop(self, key: str) -> None:
        self._up()
        self.texts.pop(key, None)

    def wipe(self) -> None:
        self.texts.clear()

    def _up(self) -> None:
        if self.down:
            raise StoreUnavailable("Redis is down, for a test")


__all__ = ["CloudObjects", "MemoryCache", "memory_objects"]
