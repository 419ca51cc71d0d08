"""Bounds what passes in a second."""

from __future__ import annotations

import asyncio
import time
from typing import Final

BURST_SEC: Final = 0.1  # what may pass at once after a pause


class Meter:
    """`bytes_per_sec` for all who share it, in the order in which they ask."""

    def __init__(self, bytes_per_sec: int) -> None:
        self._rate = bytes_per_sec
        self._paid_until = 0.0
        # Small enough that many connections take turns, large enough that a fast one is not slowed by its own calls.
        self.piece_bytes = max(1024, min(65_536, bytes_per_sec // 20))

    async def take(self, count: int) -> None:
        """Returns when `count` more bytes may pass."""
        now = time.monotonic()
        self._paid_until = max(self._paid_until, now - BURST_SEC) + count / self._rate
        if (wait := self._paid_until - now) > 0:
            await asyncio.sleep(wait)
