"""What aiohttp logs of requests that are no HTTP: a line each, and not more of them than a log can take."""

from __future__ import annotations

import logging
import time
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError

LINES: Final = 10  # in EACH_SEC; a caller without a token must not fill the node's disk
EACH_SEC: Final = 60.0


class BrokenRequests(logging.Filter):
    """For a handler. Takes the traceback, which says nothing of the executor, out of such records."""

    def __init__(self) -> None:
        super().__init__()
        self._since = -EACH_SEC
        self._lines = 0
        self._untold = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if record.name != "aiohttp.server" or not isinstance(error, HttpProcessingError):
            return True
        now = time.monotonic()
        if now - self._since >= EACH_SEC:
            self._since, self._lines = now, 0
        if self._lines >= LINES:
            self._untold += 1
            return False
        self._lines += 1
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args, record.exc_info, record.exc_text = "request_unreadable", (), None, None
        record.why = " ".join(str(error.message).split())[:200]
        if self._untold:
            record.untold, self._untold = self._untold, 0
        return True
