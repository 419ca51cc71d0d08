"""zstd by the `zstd` program of the pod's image, run as the user whom the files are for, with bounds of its own.

Python has none before 3.14, and a decoder in C that reads a stranger's bytes is better off in a process of its own."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from executor import kernel
from executor.errors import Conflict, ExecutorError, InvalidRequest, NotSupported
from executor.isolation import CommandUser
from executor.pipereader import PipeReader, new_pipes
from executor.pipes import StdinWriter
from executor.spawn import Spawner

log = logging.getLogger("executor.zstd")

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
End = Literal["stdin", "stdout"]

WINDOW_MIB: Final = 128  # what `zstd --ultra -22` uses; --long=28 and more are refused
_PIPE_BYTES: Final = 256 * 1024  # fewer wake-ups than with the usual one, and still in the processor's cache
_ADDRESS_KIB: Final = (WINDOW_MIB + 256) * 1024
_CPU_SEC: Final = 3600
_WORDS_BYTES: Final = 1000  # of stderr, for the message
_SETTLE_SEC: Final = 20.0  # from the end of its output to its own end


class Zstd:
    """One run: bytes in, bytes out. As a Job it hears of its process from the spawner."""

    def __init__(self, spawner: Spawner, stdin: int, stdout: int, stderr: int, threads: End | None = None) -> None:
        """`threads`: the end that a thread works at, by itself and through `thread_end`."""
        self.seq = spawner.next_seq()
        self.pid = 0
        self._loop = spawner.loop
        self._stdin = StdinWriter(self._loop, stdin) if threads != "stdin" else None
        self._stdout = PipeReader(self._loop, stdout) if threads != "stdout" else None
        self._stderr = PipeReader(self._loop, stderr)
        self.thread_end = {"stdin": stdin, "stdout": stdout}.get(threads or "", -1)  # a descriptor that never waits
        if self.thread_end >= 0:
            os.set_blocking(self.thread_end, False)
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._stopped = False

    # ── the Job ─────────────────────────────────────────────────────────────────────────────────────────────────

    def spawned(self, pid: int) -> None:
        self.pid = pid
        if self._stopped:
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
        assert self._stdin is not None
        await self._stdin.write(data)

    def end(self) -> None:
        """Of its input."""
        if self._stdin is not None:
            self._stdin.end()
        else:
            self.close_thread_end()

    async def read(self) -> bytes:
        """What is there, once something is; b"" at the end."""
        assert self._stdout is not None
        return await self._stdout.read()

    def close_thread_end(self) -> None:
        """While no thread works at it. Safe to repeat."""
        if self.thread_end >= 0:
            os.close(self.thread_end)
            self.thread_end = -1

    async def check_end(self) -> None:
        """After the end of its output. Raises InvalidRequest where it took its input for no zstd stream, Conflict where
        something in the pod, which it shares with its user's commands, ended it."""
        try:
            async with asyncio.timeout(_SETTLE_SEC):
                status = await asyncio.shield(self._status)
        except TimeoutError:
            raise ExecutorError("zstd closed its output and does not end") from None
        if status > 0 and os.WIFSIGNALED(status):
            raise Conflict(f"the zstd program of this call was ended by {kernel.signal_name(os.WTERMSIG(status))}")
        if status != 0:
            words = self._stderr.read_nowait(_WORDS_BYTES).decode("utf-8", "replace")
            said = " ".join(words.replace("/*stdin*\\", "").split()).strip(": ")
            raise InvalidRequest(
                f"body: no zstd stream that can be unpacked here: {said or f'zstd ended with {status}'}"
            )

    def stop(self) -> None:
        """Ends it, wherever it is: its pipes then have an end for whoever works at them. Safe to repeat."""
        self._stopped = True
        self._kill()

    def close(self) -> None:
        """Safe to repeat."""
        self.stop()
        if self._stdin is not None:
            self._stdin.close()
        if self._stdout is not None:
            self._stdout.close()
        self.close_thread_end()
        self._stderr.close()

    def _kill(self) -> None:
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@asynccontextmanager
async def running_zstd(
    spawner: Spawner, user: CommandUser, *, unpack: bool, threads: End | None = None
) -> AsyncIterator[Zstd]:
    """`threads`: the end that a thread works at; it must be done with it at the exit. Raises NotSupported where the
    image has no `zstd`."""
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
    for pipe in (stdin, stdout):
        _enlarge(pipe)
    run = Zstd(spawner, stdin, stdout, stderr, threads)
    try:
        spawner.spawn(run, user, argv, [f"PATH={PATH}".encode()], b"/", theirs_in, theirs_out, theirs_err, None)
        yield run
    finally:
        run.close()


def _enlarge(pipe: int) -> None:
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:  # the user's pipe pages are used up (pipe(7)): the small one works too
        pass
