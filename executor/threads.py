"""Thread pools whose threads all start at once, at the executor's start.

In a pod that has used up its processes no thread can be started any more, and it is then that commands must be found
and ended, files read and limits reported."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

START_SEC = 10.0


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Raises RuntimeError where the threads cannot be started."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    together = threading.Barrier(threads + 1)
    for _ in range(threads):  # each holds its thread until all are there, so that none is used twice
        pool.submit(together.wait, START_SEC)
    together.wait(START_SEC)
    return pool
