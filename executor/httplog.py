"""What is logged of requests that are no HTTP: a line each, and not more of them than a log can take."""

from __future__ import annotations

import logging
import time
from typing import Final

log = logging.getLogger("executor.http")

LINES: Final = 10  # in EACH_SEC; a caller without a token must not fill the node's disk
EACH_SEC: Final = 60.0


class Complaints:
    def __init__(self) -> None:
        self._since = -EACH_SEC
        self._lines = 0
        self._untold = 0

    def tell(self, why: str) -> None:
        """`why` is short, and may hold what the caller sent."""
        now = time.monotonic()
        if now - self._since >= EACH_SEC:
            self._since, self._lines = now, 0
        if self._lines >= LINES:
            self._untold += 1
            return
        self._lines += 1
        untold, self._untold = self._untold, 0
        log.info(
            "request_unreadable", extra={"why": " ".join(why.split())[:200]} | ({"untold": untold} if untold else {})
        )
