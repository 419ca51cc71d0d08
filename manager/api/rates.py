"""Requests of one key by the second, so that what floods waits for itself.

A token bucket for each key and project, kept as one time: when it would be full again (the generic cell rate algorithm,
ITU-T I.371). One look and one write a request, whatever the rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from manager.errors import RateLimited
from manager.model import Principal

BURST_SEC: Final = 2.0  # so many seconds' worth may come at once
_FORGET_AT: Final = 10_000  # buckets, when those that are full are forgotten


class Rates:
    """Of this manager: each replica counts for itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: dict[tuple[str, str, str], float] = {}
        self._forget_at = _FORGET_AT

    def take(self, principal: Principal, per_sec: int) -> None:
        """Raises RateLimited, with the time after which the next request would be taken."""
        now = self._clock()
        key = (principal.key_id, principal.owner.tenant, principal.owner.project)
        full_at = max(self._full_at.get(key, now), now) + 1 / per_sec
        over_sec = full_at - now - BURST_SEC
        if over_sec > 1e-9:  # what floats lose is nobody's request
            raise RateLimited(f"over {per_sec} requests a second came with this key", retry_after_sec=over_sec)
        self._full_at[key] = full_at
        if len(self._full_at) > self._forget_at:
            self._full_at = {one: at for one, at in self._full_at.items() if at > now}
            # Where all of them are asking, not every request looks at all of them again.
            self._forget_at = max(_FORGET_AT, 2 * len(self._full_at))
