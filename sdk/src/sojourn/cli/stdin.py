"""This process's own stdin as pieces, read only as fast as the command takes them."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from typing import Final

PIECE_BYTES: Final = 64 << 10


def stdin_of_this_process(descriptor: int = 0) -> AsyncGenerator[bytes, None] | None:
    """What is there to be read; None where nothing is: closed, /dev/null, or a terminal that another job has."""
    try:
        kind = os.fstat(descriptor)
    except OSError:
        return None
    if os.isatty(descriptor):
        # A background job that reads from its terminal is stopped by the kernel (SIGTTIN).
        return pieces_of(descriptor) if os.tcgetpgrp(descriptor) == os.getpgrp() else None
    if stat.S_ISCHR(kind.st_mode) and os.major(kind.st_rdev) == 1 and os.minor(kind.st_rdev) == 3:
        return None
    return pieces_of(descriptor)


async def pieces_of(descriptor: int) -> AsyncGenerator[bytes, None]:
    """What `descriptor` gives until its end, one piece ahead.

    The reading thread is a daemon and nobody waits for it: a terminal or a pipe that stays silent must not keep the
    program once the command has ended."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue(1)

    def read() -> None:
        more = True
        while more:
            got: bytes | OSError
            try:
                got = os.read(descriptor, PIECE_BYTES)
            except OSError as why:
                got = why
            more = isinstance(got, bytes) and bool(got)
            put = queue.put(got)
            try:
                asyncio.run_coroutine_threadsafe(put, loop).result()
            except (RuntimeError, CancelledError):  # the loop is closed: the command has ended
                put.close()
                return

    threading.Thread(target=read, name="sojourn-stdin", daemon=True).start()
    while True:
        got = await queue.get()
        if isinstance(got, OSError):
            raise got
        if not got:
            return
        yield got
