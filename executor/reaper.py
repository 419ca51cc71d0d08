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
from executor.spawn_helper import mark_of

log = logging.getLogger("executor.reaper")

UNCLAIMED_MAX = 1024

Ended = Callable[[int, float, float, int], None]  # wait status, user s, system s, max RSS KiB


class Reaper:
    def __init__(self) -> None:
        self._known: dict[int, Ended] = {}
        self._kept_running: set[int] = set()
        self._unclaimed: dict[int, tuple[int, float, float, int]] = {}
        self._marked: dict[int, int] = {}  # a command's seq -> the latest of its processes among the unclaimed
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

    def expect(self, pid: int, ended: Ended, *, keep_running: bool = False) -> None:
        """Calls `ended` once when `pid`, a child now or soon to be left to us, has ended.

        With `keep_running` it is continued whenever somebody has stopped it."""
        early = self._unclaimed.pop(pid, None)
        if early is not None:
            ended(*early)
            return
        self._known[pid] = ended
        if keep_running:
            self._kept_running.add(pid)

    def adopt(self, pid: int, ended: Ended) -> bool:
        """Like `expect`, for a process whose parent has died; False where it is not our child and never will be."""
        if pid not in self._unclaimed:
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
        self.expect(pid, ended)
        return True

    def collected(self, seq: int) -> int:
        """The pid of an ended, unclaimed process of command `seq`; 0 where there is none."""
        pid = self._marked.pop(seq, 0)
        return pid if pid in self._unclaimed else 0

    def _continue_stopped(self) -> None:
        while True:
            try:
                stopped = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOHANG)
            except ChildProcessError:
                return
            if stopped is None:
                return
            if stopped.si_pid in self._kept_running:
                try:
                    os.kill(stopped.si_pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass

    def _collect(self) -> None:
        self._continue_stopped()
        while True:
            try:
                waiting = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if waiting is None:
                return
            pid = waiting.si_pid
            ended = self._known.pop(pid, None)
            self._kept_running.discard(pid)
            mark = mark_of(pid) if ended is None else 0  # gone as soon as it is collected
            _pid, status, use = os.wait4(pid, 0)
            outcome = (status, use.ru_utime, use.ru_stime, use.ru_maxrss)
            if ended is not None:
                ended(*outcome)
            elif mark:  # a dead helper's command may be collected before its helper's end is seen
                self._unclaimed[pid] = outcome
                self._marked[mark] = pid
                if len(self._unclaimed) > UNCLAIMED_MAX:
                    self._unclaimed.pop(next(iter(self._unclaimed)))
                    self._marked.pop(next(iter(self._marked)))
