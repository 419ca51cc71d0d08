"""The executor's ends of a command's pipes: output is pumped into a log, input is written as the command reads it."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from typing import Final, Protocol

from executor.output import OutputLog
from executor.readers import Readers

READ_BYTES: Final = 262_144
PIPE_BYTES: Final = 65_536  # a new pipe's capacity (pipe(7))
BIG_PIPE_BYTES: Final = 1 << 20  # for commands that fill theirs
DRAIN_BYTES: Final = BIG_PIPE_BYTES + PIPE_BYTES
STDIN_QUEUE_BYTES: Final = 1 << 20


class Pump:
    """Reads one output pipe into a log. Not registered with the loop until `arm`, which short commands never need."""

    __slots__ = ("_armed", "_big", "_fd", "_owner", "_readers", "discarding", "eof", "held", "log", "sips")

    def __init__(self, readers: Readers, fd: int, log: OutputLog, owner: PumpOwner) -> None:
        self._readers = readers
        self._fd = fd
        self.log = log
        self._owner = owner
        self._armed = False
        self._big = False
        self.eof = False  # nothing comes any more
        self.sips = False  # small reads only, for memory is short
        self.held = False  # not read at the moment: the caller's stream is behind
        self.discarding = False  # the command has ended; what descendants still write is read and thrown away

    def arm(self) -> None:
        if not self._armed and not self.eof and not self.held:
            self._armed = True
            self._readers.add(self._fd, self._readable)

    def hold(self) -> None:
        self.held = True
        self._disarm()

    def release(self) -> None:
        self.held = False
        self.arm()

    def go_on(self) -> None:
        """Like `release`, but not while the disk is behind."""
        if self.log.spill is None or not self.log.spill.full:
            self.release()

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            self._readers.remove(self._fd)

    def _readable(self) -> None:
        count = self._read()
        if count < 0:
            self.close()
            self._owner.output_over(self)
        elif count:
            self._owner.output_came(self)

    def _read(self) -> int:
        """Bytes read; 0 where there is nothing now, -1 at the end."""
        try:
            data = os.read(self._fd, READ_BYTES if self._big and not self.sips else PIPE_BYTES)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            data = b""
        if not data:
            self.eof = True
            return -1
        if not self.discarding:
            self.log.append(data)
        if len(data) >= PIPE_BYTES and not self._big:
            self._big = True
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, BIG_PIPE_BYTES)
            except OSError:  # the user's pipe pages are used up (pipe(7)): the small one works too
                pass
        return len(data)

    def drain(self) -> None:
        """Reads what is in the pipe now, also while held. At its end the descriptor is still open: `close` it."""
        got = 0
        while not self.eof and got < DRAIN_BYTES:
            count = self._read()
            if count <= 0:
                return
            got += count

    def close(self) -> None:
        self.eof = True
        if self._fd >= 0:
            if self._armed:
                self._disarm()
            os.close(self._fd)
            self._fd = -1


class PumpOwner(Protocol):
    def output_came(self, pump: Pump) -> None: ...
    def output_over(self, pump: Pump) -> None: ...


class StdinWriter:
    """A command's open stdin. A command that leaves without reading is no error."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._armed = False
        self._ending = False
        self._room: asyncio.Event = asyncio.Event()
        self._room.set()

    @property
    def open(self) -> bool:
        return self._fd >= 0 and not self._ending

    async def write(self, data: bytes) -> None:
        """Returns when the queue has room again: a command that does not read holds its caller back."""
        self.put(data)
        await self._room.wait()

    def put(self, data: bytes) -> None:
        if not self.open or not data:
            return
        self._queue.append(memoryview(data))
        self._queued += len(data)
        self._flush()

    def end(self) -> None:
        """End of input, once all that was written has gone out."""
        self._ending = True
        if not self._queue:
            self.close()

    def _flush(self) -> None:
        while self._queue and self._fd >= 0:
            view = self._queue[0]
            try:
                count = os.write(self._fd, view)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # EPIPE: it does not want more
                self.close()
                return
            self._queued -= count
            if count == len(view):
                self._queue.popleft()
            else:
                self._queue[0] = view[count:]
        if self._queue and not self._armed:
            self._armed = True
            self._loop.add_writer(self._fd, self._flush)
        elif not self._queue:
            self._disarm()
            if self._ending:
                self.close()
        if self._queued > STDIN_QUEUE_BYTES:
            self._room.clear()
        else:
            self._room.set()

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            self._loop.remove_writer(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._disarm()
            os.close(self._fd)
            self._fd = -1
        self._queue.clear()
        self._queued = 0
        self._room.set()


def filled_stdin(data: bytes) -> int:
    """A descriptor to read `data` and then the end from: a pipe where it fits into one, else a file in memory."""
    if len(data) <= PIPE_BYTES:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            os.write(write_end, data)
        finally:
            os.close(write_end)
        return read_end
    return memory_file(data)


def memory_file(data: bytes) -> int:
    fd = os.memfd_create("sojourn-input", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd
