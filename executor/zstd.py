"""zstd by the `zstd` program of the pod's image, run as the user whom the files are for, with bounds of its own.

Python has none before 3.14, and a decoder in C that reads a stranger's bytes is better off in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from executor.errors import ExecutorError, InvalidRequest, NotSupported
from executor.isolation import CommandUser
from executor.pipereader import PipeReader, new_pipes
from executor.pipes import StdinWriter
from executor.spawn import Spawner

log = logging.getLogger("executor.zstd")

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WINDOW_MIB: Final = 128  # what `zstd --ultra -22` uses; --long=28 and more are refused
_ADDRESS_KIB: Final = (WINDOW_MIB + 256) * 1024
_CPU_SEC: Final = 3600
_WORDS_BYTES: Final = 1000  # of stderr, for the message
_SETTLE_SEC: Final = 20.0  # from the end of its output to its own end


class Zstd:
    """One run: bytes in, bytes out. As a Job it hears of its process from the spawner."""

    def __init__(self, spawner: Spawner, stdin: int, stdout: int, stderr: int) -> None:
        self.seq = spawner.next_seq()
        self.pid = 0
        self._loop = spawner.loop
        self._stdin = StdinWriter(self._loop, stdin)
        self._stdout = PipeReader(self._loop, stdout)
        self._stderr = PipeReader(self._loop, stderr)
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._closed = False

    # ── the Job ─────────────────────────────────────────────────────────────────────────────────────────────────

    def spawned(self, pid: int) -> None:
        self.pid = pid
        if self._closed:
            self._kill()

    def failed(self, error: int, stage: int) -> None:
        self._settle(-1)

    def exited(self, status: int, user_sec: float, system_sec: float, max_rss_kib: int, left: bool) -> None:
        self.pid = 0
        self._settle(status)

    def lost(self) -> None:
        self.pid = 0
        self._settle(-1)

    def _settle(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)

    # ── its streams ─────────────────────────────────────────────────────────────────────────────────────────────

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more, or when it takes no more."""
        await self._stdin.write(data)

    def end(self) -> None:
        self._stdin.end()

    async def read(self) -> bytes:
        """What is there, once something is; b"" at the end."""
        return await self._stdout.read()

    async def check_end(self) -> None:
        """After the end of its output. Raises InvalidRequest where it took its input for no zstd stream."""
        try:
            async with asyncio.timeout(_SETTLE_SEC):
                status = await asyncio.shield(self._status)
        except TimeoutError:
            raise ExecutorError("zstd closed its output and does not end") from None
        if status != 0:
            words = self._stderr.read_nowait(_WORDS_BYTES).decode("utf-8", "replace")
            said = " ".join(words.replace("/*stdin*\\", "").split()).strip(": ")
            raise InvalidRequest(
                f"body: no zstd stream that can be unpacked here: {said or f'zstd ended with {status}'}"
            )

    def close(self) -> None:
        """Ends it, wherever it is. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._stdin.close()
        self._stdout.close()
        self._stderr.close()
        self._kill()

    def _kill(self) -> None:
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@asynccontextmanager
async def running_zstd(spawner: Spawner, user: CommandUser, *, unpack: bool) -> AsyncIterator[Zstd]:
    """Raises NotSupported where the image has no `zstd`."""
    program = shutil.which("zstd", path=PATH)
    shell = shutil.which("sh", path=PATH)
    if program is None or shell is None:
        raise NotSupported(
            "this pod's image has no `zstd` program: install the package zstd in it, or use gzip or plain tar"
        )
    options = ["-dcq", f"--memory={WINDOW_MIB}MiB"] if unpack else ["-cq", "-3", "-T1"]
    limits = f'ulimit -v {_ADDRESS_KIB}; ulimit -t {_CPU_SEC}; exec "$0" "$@"'
    argv = [os.fsencode(word) for word in (shell, "-c", limits, program, *options)]
    (theirs_in, stdin), (stdout, theirs_out), (stderr, theirs_err) = new_pipes(3)
    run = Zstd(spawner, stdin, stdout, stderr)
    try:
        spawner.spawn(run, user, argv, [f"PATH={PATH}".encode()], b"/", theirs_in, theirs_out, theirs_err, None)
        yield run
    finally:
        run.close()
