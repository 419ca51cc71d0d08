"""The reading end of a pipe from a program of ours."""

from __future__ import annotations

import asyncio
import os

from executor.pipes import READ_BYTES


def new_pipes(count: int) -> list[tuple[int, int]]:
    """(reading end, writing end) of each. Raises OSError, and then none is open."""
    made: list[tuple[int, int]] = []
    try:
        made.extend(os.pipe2(os.O_CLOEXEC) for _ in range(count))  # keeps those before the one that failed
    except OSError:
        for ends in made:
            for fd in ends:
                os.close(fd)
        raise
    return made


class PipeReader:
    """Owns the descriptor. One reader at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd

    async def read(self) -> bytes:
        """What is there, once something is; b"" at the end, and after the close."""
        while self._fd >= 0:
            try:
                return os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                await self._readable()
        return b""

    def read_nowait(self, count: int) -> bytes:
        try:
            return os.read(self._fd, count)
        except BlockingIOError:
            return b""

    async def _readable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        fd = self._fd
        self._loop.add_reader(fd, wake)
        try:
            await ready
        finally:
            self._loop.remove_reader(fd)

    def close(self) -> None:
        """While nobody reads. Safe to repeat."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
