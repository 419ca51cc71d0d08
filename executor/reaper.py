"""The one place where the executor waits for children: its helpers, and what is left to it as PID 1 or subreaper.

Never `waitpid(-1)` beside asyncio's own child watcher: each would lose the other's exit codes. So nothing in the
executor uses asyncio's subprocesses."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from executor import kernel

log = logging.getLogger("executor.reaper")

Ended = Callable[[int, float, float, int], None]  # wait status, user s, system s, max RSS KiB


class Reaper:
    def __init__(self) -> None:
        self._known: dict[int, Ended] = {}
        self._unclaimed: dict[int, tuple[int, float, float, int]] = {}  # bounded: see _collect
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: Any = signal.SIG_DFL

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        kernel.become_subreaper()
        # Not `add_signal_handler`: uvloop keeps SIGCHLD for subprocesses of its own, which nothing here uses.
        self._before = signal.signal(signal.SIGCHLD, self._interrupted)
        self._collect()

    def close(self) -> None:
        if self._loop is not None:
            signal.signal(signal.SIGCHLD, self._before)

    def _interrupted(self, _number: int, _frame: FrameType | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._collect)

    def expect(self, pid: int, ended: Ended) -> None:
        """Calls `ended` once when `pid`, a child now or soon to be left to us, has ended."""
        early = self._unclaimed.pop(pid, None)
        if early is not None:
            ended(*early)
            return
        self._known[pid] = ended

    def adopt(self, pid: int, ended: Ended) -> bool:
        """Like `expect`, for a process whose parent has died; False where it is not our child and never will be."""
        if pid not in self._unclaimed:
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
        self.expect(pid, ended)
        return True

    def forget(self, pid: int) -> None:
        self._known.pop(pid, None)

    def _collect(self) -> None:
        while True:
            try:
                pid, status, use = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            outcome = (status, use.ru_utime, use.ru_stime, use.ru_maxrss)
            ended = self._known.pop(pid, None)
            if ended is not None:
                ended(*outcome)
                continue
            # A dead helper's command may be collected before its helper's end is seen.
            self._unclaimed[pid] = outcome
            while len(self._unclaimed) > 4096:
                self._unclaimed.pop(next(iter(self._unclaimed)))
