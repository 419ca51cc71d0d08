"""How much output the commands that run keep together, in memory and on disk. Both are the event loop's.

Over the budget of memory, what readers have seen is let go of, commands' streams are read less far ahead of their
callers, and what an answer at the end is to carry goes to disk. A caller's own stream is held back, never cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

MiB: Final = 1 << 20
MEMORY_BYTES: Final = 8 * MiB
DISK_BYTES: Final = 1024 * MiB
LEAST_BYTES: Final = 64 << 10  # that any command keeps; what holds no more is not counted


class Holder(Protocol):
    """A running command."""

    @property
    def held_bytes(self) -> int: ...
    def cut_output(self, keep_bytes: int) -> None:
        """Keeps no more than that of each stream, where it may."""


class MemoryBudget:
    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self._limit = self._next = limit_bytes
        self._holders: dict[Holder, int] = {}
        self.used = 0
        self.is_short = False  # nobody is to read far ahead

    def hold(self, holder: Holder, held_bytes: int) -> None:
        self.used += held_bytes - self._holders.get(holder, 0)
        self._holders[holder] = held_bytes
        if self.used > self._next:
            self._relieve()

    def drop(self, holder: Holder) -> None:
        """It runs no more."""
        self.used -= self._holders.pop(holder, 0)
        if self.is_short and self.used < self._limit // 2:
            self.is_short = False
            self._next = self._limit

    def _relieve(self) -> None:
        self._count()
        if self.used > self._limit:
            self.is_short = True
            share = max(LEAST_BYTES, self._limit // 2 // len(self._holders))
            for holder in sorted(self._holders, key=self._holders.__getitem__, reverse=True):
                if self._holders[holder] <= share:
                    break
                holder.cut_output(share)
            self._count()
        # What cannot be let go of yet must not be counted anew at each byte.
        self._next = max(self._limit, self.used + self._limit // 8)

    def _count(self) -> None:
        for holder in self._holders:
            self._holders[holder] = holder.held_bytes
        self.used = sum(self._holders.values())


class DiskBudget:
    def __init__(self, limit_bytes: int = DISK_BYTES, on_short: Callable[[int], None] | None = None) -> None:
        """`on_short` is asked to have so many bytes given back, where it can."""
        self._left = limit_bytes
        self._on_short = on_short

    def take(self, size: int) -> bool:
        if size > self._left and self._on_short is not None:
            self._on_short(size - self._left)
        if size > self._left:
            return False
        self._left -= size
        return True

    def give(self, size: int) -> None:
        self._left += size
