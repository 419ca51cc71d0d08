"""Which command the kernel ended for want of memory, and which was refused processes.

The kernel's counters name nobody: they only rise. So it is known of each rise between which two readings it came, and
a command is credited with one that came while it ran. Read every second or two while commands run; again as a command
starts, where the last reading is old; and as one ends in a way that a rise could explain."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

LOOK_SEC: Final = 1.0
LAZY_LOOK_SEC: Final = 2.0  # where commands run for long
RECENT_SEC: Final = 3.0  # from a kill to the time that its helper tells of it, on a machine without memory
MAX_RISES: Final = 64


class Counters(Protocol):
    """What the kernel counts; `executor.cgroup` and `executor.leaves` have one each."""

    @property
    def exist(self) -> bool: ...
    def oom_kills(self) -> int: ...
    def pids_denied(self) -> int: ...


class Own(Protocol):
    """What it counts for one command alone, where it does."""

    since: float
    oom: Counter | None
    pids: Counter | None


class _Rise:
    __slots__ = ("by", "left")

    def __init__(self, by: float, left: int) -> None:
        self.by = by  # the time of the reading that showed it
        self.left = left  # counts that no command was credited with yet


class Counter:
    """A counter of the kernel's, and when it rose. Times are the monotonic clock's."""

    __slots__ = ("_read", "_rises", "_value")

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._value = read()
        self._rises: deque[_Rise] = deque(maxlen=MAX_RISES)

    def look(self, now: float) -> None:
        value = self._read()
        if value > self._value:
            self._rises.append(_Rise(now, value - self._value))
        self._value = value  # a fall: what counted for it is gone

    def rose(self, since: float) -> bool:
        """Whether it was seen to have risen after `since`."""
        return any(rise.by > since for rise in self._rises)

    def take(self, since: float) -> bool:
        """The same, once for each count."""
        for rise in reversed(self._rises):
            if rise.by > since and rise.left:
                rise.left -= 1
                return True
        return False


class Pressure:
    """The pod's counters, read as rarely as they can be. The event loop's."""

    def __init__(self, counters: Counters, looked: Callable[[float], bool], *, always: bool = False) -> None:
        """`looked` is called after each reading but a command's; it says whether any command runs. Where there are no
        counters nothing is read, and `looked` is only called with `always`."""
        self._oom = Counter(counters.oom_kills)
        self._pids = Counter(counters.pids_denied)
        self._looked = looked
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._wait_sec = LOOK_SEC
        self._has_counters = counters.exist
        self.is_old = self._has_counters or always  # to be read as the next command starts: `begin`

    def begin(self) -> None:
        """A command starts, and the last reading is not of the latest second."""
        self.is_old = False
        self._look(time.monotonic())
        if self._timer is not None:
            self._timer.cancel()
        self._wait_sec = LOOK_SEC
        self._timer = self._loop.call_later(LOOK_SEC, self._tick)

    def was_oom(self, began: float, own: Own | None) -> bool:
        """Whether a command that began then and was KILLed just now was so for want of memory."""
        now = time.monotonic()
        self._look(now)
        if own is not None and own.oom is not None:
            own.oom.look(now)
            if own.oom.take(max(own.since, now - RECENT_SEC)):
                return True
            if own.since < now - RECENT_SEC:
                return False
            # It was being moved: it may have been killed where it came from.
        return self._oom.take(max(began, now - RECENT_SEC))

    def was_pids(self, began: float, own: Own | None) -> bool:
        """Whether there was no process left for somebody while a command ran that began then and just failed."""
        now = time.monotonic()
        self._look(now)
        if own is not None and own.pids is not None:
            own.pids.look(now)
            if own.pids.rose(own.since):
                return True
        return self._pids.rose(began)

    def _look(self, now: float) -> None:
        if not self._has_counters:
            return
        self._oom.look(now)
        self._pids.look(now)

    def _tick(self) -> None:
        self._timer = None
        self.is_old = True
        now = time.monotonic()
        self._look(now)
        if self._looked(now):
            self._wait_sec = min(2 * self._wait_sec, LAZY_LOOK_SEC)
            self._timer = self._loop.call_later(self._wait_sec, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
