"""One stream's bounded log, by absolute offset: what is kept of it in memory and on disk.

An OutputLog keeps the first `head_bytes` and the last `tail_bytes` of what was appended. Every reader reads at its own
pace from any offset; what is no longer kept is reported as a gap, never skipped in silence. With a Spill, what leaves
the tail goes to a ring on disk instead of being dropped; where memory is short, the head goes there too.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

import msgspec

from executor.budget import DiskBudget, MemoryBudget

MiB: Final = 1 << 20
STREAM_TAIL_BYTES: Final = 8 * MiB
SPILL_BYTES: Final = 64 * MiB
SPILL_QUEUE_BYTES: Final = 8 * MiB  # beyond it the pipe is not read until the disk has caught up
SHORT_QUEUE_BYTES: Final = MiB // 16  # the same where memory for output is short
JOIN_BELOW: Final = 16_384  # pieces under this are joined, so that a byte at a time does not cost an object each
PIECE_BYTES: Final = 65_536

_NOTHING: Final[deque[tuple[int, bytes | bytearray | memoryview]]] = deque(maxlen=0)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What a reader at some offset gets next: `gap` bytes are gone, then `data` starts at `offset`."""

    offset: int
    data: bytes
    gap: int = 0


class OutputLog:
    """Not thread-safe: the event loop's."""

    __slots__ = (
        "_asked_bytes", "_head", "_head_bytes", "_latest", "_tail", "_tail_bytes", "_tail_size", "end", "spill",
        "tail_start",
    )  # fmt: skip

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head: bytes | bytearray = b""
        self._head_bytes = head_bytes
        self._tail = _NOTHING  # (offset, piece); both are made when something comes
        self._latest = b""  # as it was appended, for readers that keep up
        self._tail_bytes = tail_bytes
        self._asked_bytes = 0  # of the tail, in memory and on disk together; 0 for all that there is
        self._tail_size = 0
        self.tail_start = 0  # offset of the first byte that is in memory behind the head
        self.end = 0  # bytes appended in total
        self.spill: Spill | None = None

    @property
    def memory_bytes(self) -> int:
        """What is on its way to the disk included."""
        return len(self._head) + self._tail_size + (self.spill.queued if self.spill is not None else 0)

    @property
    def dropped(self) -> int:
        """Bytes that no reader can get any more."""
        kept_from = self.tail_start if self.spill is None else min(self.spill.first, self.tail_start)
        return max(0, kept_from - self.head_end)

    @property
    def head_end(self) -> int:
        """Offset of the byte behind what is kept of the head."""
        return len(self._head) if self.spill is None else max(len(self._head), self.spill.head_end)

    def append(self, data: bytes) -> None:
        room = self._head_bytes - len(self._head)
        if room > 0 and self.end == len(self._head):
            if not self._head:
                self._head = bytearray()
            self._head += data[:room]
            self.end += min(room, len(data))
            self.tail_start = self.end
            data = data[room:]
            if not data:
                return
        self._latest = data
        if self._tail and len(data) < JOIN_BELOW:
            last = self._tail[-1][1]
            if isinstance(last, bytearray) and len(last) + len(data) <= PIECE_BYTES:
                last += data
                self.end += len(data)
                self._tail_size += len(data)
                self._evict()
                return
        if self._tail is _NOTHING:
            self._tail = deque()
        self._tail.append((self.end, data if len(data) >= JOIN_BELOW else bytearray(data)))
        self.end += len(data)
        self._tail_size += len(data)
        self._evict()

    def _evict(self) -> None:
        while self._tail_size > self._tail_bytes:
            start, piece = self._tail[0]
            over = self._tail_size - self._tail_bytes
            if self.spill is not None:
                self._tail.popleft()
                self.spill.put(start, bytes(piece))
                gone = len(piece)
            elif len(piece) <= over or (len(piece) <= JOIN_BELOW and len(self._tail) > 1):
                self._tail.popleft()
                gone = len(piece)
            else:  # a large piece is cut, so that as much as was promised is kept; copying it each time would cost more
                self._tail[0] = (start + over, memoryview(piece)[over:])
                gone = over
            self._tail_size -= gone
            self.tail_start = start + gone

    def read(self, offset: int, limit: int = PIECE_BYTES) -> Piece | None:
        """What is kept in memory from `offset` on, at most `limit` bytes; None at the end of the log.

        Where the next bytes are on disk, the Piece has no data, no gap and the asked offset: await `read_spill`."""
        if offset >= self.end:
            return None
        latest = self._latest
        if offset == self.end - len(latest) and len(latest) <= limit and offset >= self.tail_start:
            return Piece(offset, latest)
        head = len(self._head)
        if offset < head:
            return Piece(offset, bytes(self._head[offset : min(offset + limit, head)]))
        gap = 0
        if offset < self.tail_start:
            if self.spill is not None:
                first = self.spill.kept_from(offset)
                if first < self.tail_start:
                    return Piece(first, b"", first - offset)
            gap = self.tail_start - offset
            offset = self.tail_start
        for start, piece in reversed(self._tail):
            if start <= offset:
                if start == offset and len(piece) <= limit and isinstance(piece, bytes):
                    return Piece(offset, piece, gap)
                return Piece(offset, bytes(memoryview(piece)[offset - start : offset - start + limit]), gap)
        return Piece(self.end, b"", gap) if gap else None

    async def read_spill(self, offset: int, limit: int = PIECE_BYTES) -> Piece | None:
        """Like `read`, for an offset that is on disk."""
        if self.spill is not None and offset < self.tail_start and self.spill.kept_from(offset) == offset:
            piece = await self.spill.get(offset, limit)
            if piece is not None:
                return piece
        return self.read(offset, limit)

    @property
    def room_bytes(self) -> tuple[int, int]:
        """(of the head, of the tail): what a Spill needs that is to take over all of it."""
        head_bytes = self._head_bytes if self.end == len(self._head) else len(self._head)
        return head_bytes, self._tail_bytes

    def move_to_disk(self, spill: Spill) -> None:
        """From now on memory has the latest output alone. `spill` is new and has `room_bytes`."""
        self.spill = spill
        if self._head:
            spill.put(0, self._head)
        spill.first = max(spill.first, self.tail_start)
        self._asked_bytes = self._tail_bytes
        self._head, self._head_bytes = b"", 0

    def collect(self) -> tuple[bytes, bytes, int]:
        """(head, tail, bytes dropped between them) of what is in memory; nothing dropped: all in head."""
        tail = b"".join([piece for _start, piece in self._tail])
        between = self.tail_start - len(self._head)
        return (bytes(self._head) + tail, b"", 0) if between <= 0 else (bytes(self._head), tail, between)

    def shrink_all(self, keep_bytes: int) -> None:
        """Keeps at most so much of the head and of the tail in memory from now on; the rest is on disk where there
        is a spill, else a gap for readers."""
        self._tail_bytes = keep_bytes
        if self.spill is not None:
            self._evict()
        while self._tail_size > keep_bytes and self._tail:
            start, piece = self._tail.popleft()
            cut = min(len(piece), self._tail_size - keep_bytes)
            if cut < len(piece):
                self._tail.appendleft((start + cut, bytes(memoryview(piece)[cut:])))
            self._tail_size -= cut
            self.tail_start = start + cut
        if len(self._head) > keep_bytes:
            self._head = self._head[:keep_bytes]
            self._head_bytes = keep_bytes

    def make_room(self, keep_bytes: int) -> None:
        """Keeps at least so much of the tail from now on."""
        self._tail_bytes = max(self._tail_bytes, keep_bytes)

    def seal(self) -> None:
        """Nothing comes any more, and what holds nothing need not be held as long as the log is kept."""
        self._latest = b""
        if not self._tail:
            self._tail = _NOTHING
        if self.spill is not None and self._asked_bytes:
            self.spill.first = max(self.spill.first, min(self.end - self._asked_bytes, self.tail_start))
        if self.spill is not None and self.spill.empty:
            self.spill.close()
            self.spill = None

    def leave_disk(self) -> int:
        """What is there is a gap from now on. Returns how many bytes of the budget that gave back."""
        if self.spill is None:
            return 0
        freed = self.spill.budget_bytes
        self.spill.close()
        self.spill = None
        return freed

    def close(self) -> None:
        self._head = b""
        self._tail = _NOTHING
        self._latest = b""
        self._tail_size = 0
        self.tail_start = self.end  # for whoever still reads, all of it is a gap
        if self.spill is not None:
            self.spill.close()
            self.spill = None


class Spill:
    """The log's first `head_bytes` and a ring of the latest, together `limit` bytes in an unlinked file, written by a
    worker thread and addressed by the log's offsets.

    A disk that fails or is full, or a budget that is used up, drops what is in it: readers then see a gap. The ring
    then starts anew, with as much of the budget as it had."""

    def __init__(
        self, directory: str, start: int, workers: Executor, limit: int = SPILL_BYTES, head_bytes: int = 0,
        disk: DiskBudget | None = None, memory: MemoryBudget | None = None,
    ) -> None:  # fmt: skip
        self._disk = disk if disk is not None else DiskBudget()
        self._memory = memory if memory is not None else MemoryBudget()
        self.budget_bytes = 0  # of the disk's
        self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._workers = workers
        self._limit = limit
        self._head_bytes = head_bytes
        self._ring_bytes = limit - head_bytes
        self.head_end = 0  # offset of the byte behind the head, as far as it is here
        self._queue: deque[tuple[int, bytes | bytearray]] = deque()
        self.queued = 0  # bytes
        self._writing = False
        self._closed = False
        self.first = max(start, head_bytes)  # offset of the oldest byte behind the head that can be read here
        self._written = start  # and of the byte after the newest on disk
        self.on_room: Callable[[], None] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def full(self) -> bool:
        """The disk is behind: read no more of the pipe until `on_room`."""
        return self.queued > (SHORT_QUEUE_BYTES if self._memory.is_short else SPILL_QUEUE_BYTES)

    @property
    def disk_bytes(self) -> int:
        return max(0, self._written - self.first) + self.head_end

    @property
    def empty(self) -> bool:
        return not self._queue and not self.disk_bytes

    def kept_from(self, offset: int) -> int:
        """The first offset, this or a later one, whose byte is here; or one that is in memory."""
        return offset if offset < self.head_end else max(offset, self.first)

    def put(self, offset: int, data: bytes | bytearray) -> None:
        """`data` is what follows what was put last, or follows a gap, and is given away."""
        self._queue.append((offset, data))
        self.queued += len(data)
        if offset == self.head_end:
            self.head_end = min(offset + len(data), self._head_bytes)
        if not self._writing:
            self._write_next()

    def _write_next(self) -> None:
        batch = list(self._queue)
        start, end = batch[0][0], batch[-1][0] + len(batch[-1][1])
        anew = not self._may_grow(end - start)
        if anew:
            self.head_end = 0
            self.first = start
        # what the ring is about to overwrite must be out of readers' sight first
        self.first = max(self.first, min(end - self._ring_bytes, start))
        self._writing = True
        future = asyncio.get_running_loop().run_in_executor(self._workers, self._write, batch, anew)
        future.add_done_callback(lambda done: self._wrote(done, batch, end))

    def _may_grow(self, size: int) -> bool:
        """Whether the budget has room for so much more in the file; else what is in there has to go."""
        more = min(size, self._limit - self.budget_bytes)
        if more <= 0 or self._disk.take(more):
            self.budget_bytes += max(0, more)
            return True
        self._disk.give(self.budget_bytes)
        self.budget_bytes = min(size, self._limit)
        if not self._disk.take(self.budget_bytes):
            self.budget_bytes = 0
        return False

    def _place(self, offset: int) -> tuple[int, int]:
        """(where in the file that byte is, how many of those after it follow it there)."""
        if offset < self._head_bytes:
            return offset, self._head_bytes - offset
        at = (offset - self._head_bytes) % self._ring_bytes
        return self._head_bytes + at, self._ring_bytes - at

    def _write(self, batch: list[tuple[int, bytes | bytearray]], anew: bool) -> None:
        """Raises OSError, and then there is nothing in the file."""
        if anew:
            os.ftruncate(self._fd, 0)
            if not self.budget_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            for offset, data in batch:
                view = memoryview(data)
                while view:
                    at, room = self._place(offset)
                    count = os.pwrite(self._fd, view[:room], at)
                    view = view[count:]
                    offset += count
        except OSError:
            os.ftruncate(self._fd, 0)
            raise

    def _wrote(self, done: asyncio.Future[None], batch: list[tuple[int, bytes | bytearray]], end: int) -> None:
        self._writing = False
        if done.cancelled() or done.exception() is not None:
            self.head_end = 0
            self.first = max(self.first, end)
            self._give_back()
        for _ in batch:
            self.queued -= len(self._queue.popleft()[1])
        self._written = end
        if self._closed:
            self._end()
            return
        if self._queue:
            self._write_next()
        if self.on_room is not None and not self.full:
            self.on_room()

    async def get(self, offset: int, limit: int) -> Piece | None:
        """At most `limit` bytes from `offset`; None where they are not here any more."""
        if self.kept_from(offset) != offset:
            return None
        if offset < self.head_end < self.first:  # what was put as one piece can reach over the gap
            limit = min(limit, self.head_end - offset)
        for start, data in self._queue:
            if start <= offset < start + len(data):
                return Piece(offset, bytes(memoryview(data)[offset - start : offset - start + limit]))
        if self._closed or offset >= self._written:
            return None
        at, room = self._place(offset)
        count = min(limit, self._written - offset, room)
        fd = os.dup(self._fd)  # a close meanwhile must not let the number mean another file
        try:
            data = await asyncio.get_running_loop().run_in_executor(self._workers, os.pread, fd, count, at)
        except OSError:
            self.head_end = min(self.head_end, offset)
            self.first = max(self.first, offset + count)
            return None
        finally:
            os.close(fd)
        return Piece(offset, data) if data and self.kept_from(offset) == offset else None

    def _give_back(self) -> None:
        self._disk.give(self.budget_bytes)
        self.budget_bytes = 0

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._writing:
                self._end()

    def _end(self) -> None:
        self._give_back()
        os.close(self._fd)
