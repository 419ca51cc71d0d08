"""One stream's bounded log, by absolute offset: what is kept of it in memory and on disk.

An OutputLog keeps the first `head_bytes` and the last `tail_bytes` of what was appended. Every reader reads at its own
pace from any offset; what is no longer kept is reported as a gap, never skipped in silence. With a Spill, what leaves
the tail goes to a ring on disk instead of being dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

import msgspec

MiB: Final = 1 << 20
STREAM_TAIL_BYTES: Final = 8 * MiB
SPILL_BYTES: Final = 64 * MiB
SPILL_QUEUE_BYTES: Final = 8 * MiB  # beyond it the pipe is not read until the disk has caught up
JOIN_BELOW: Final = 16_384  # pieces under this are joined, so that a byte at a time does not cost an object each
PIECE_BYTES: Final = 65_536

_NOTHING: Final[deque[tuple[int, bytes | bytearray]]] = deque(maxlen=0)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What a reader at some offset gets next: `gap` bytes are gone, then `data` starts at `offset`."""

    offset: int
    data: bytes
    gap: int = 0


class OutputLog:
    """Not thread-safe: the event loop's."""

    __slots__ = ("_head", "_head_bytes", "_tail", "_tail_bytes", "_tail_size", "end", "spill", "tail_start")

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head = bytearray()
        self._head_bytes = head_bytes
        self._tail: deque[tuple[int, bytes | bytearray]] = deque()  # (offset, piece)
        self._tail_bytes = tail_bytes
        self._tail_size = 0
        self.tail_start = 0  # offset of the first byte that is in memory behind the head
        self.end = 0  # bytes appended in total
        self.spill: Spill | None = None

    @property
    def memory_bytes(self) -> int:
        return len(self._head) + self._tail_size

    @property
    def dropped(self) -> int:
        """Bytes that no reader can get any more."""
        kept_from = self.tail_start if self.spill is None else min(self.spill.first, self.tail_start)
        return max(0, kept_from - len(self._head))

    def append(self, data: bytes) -> None:
        room = self._head_bytes - len(self._head)
        if room > 0 and self.end == len(self._head):
            self._head += data[:room]
            self.end += min(room, len(data))
            self.tail_start = self.end
            data = data[room:]
            if not data:
                return
        if self._tail and len(data) < JOIN_BELOW:
            last = self._tail[-1][1]
            if isinstance(last, bytearray) and len(last) + len(data) <= PIECE_BYTES:
                last += data
                self.end += len(data)
                self._tail_size += len(data)
                self._evict()
                return
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
            else:  # a large piece is cut, so that as much as was promised is kept
                self._tail[0] = (start + over, piece[over:])
                gone = over
            self._tail_size -= gone
            self.tail_start = start + gone

    def read(self, offset: int, limit: int = PIECE_BYTES) -> Piece | None:
        """What is kept in memory from `offset` on, at most `limit` bytes; None at the end of the log.

        Where the next bytes are on disk, the Piece has no data, no gap and the asked offset: await `read_spill`."""
        if offset >= self.end:
            return None
        head = len(self._head)
        if offset < head:
            return Piece(offset, bytes(self._head[offset : min(offset + limit, head)]))
        gap = 0
        if offset < self.tail_start:
            if self.spill is not None and self.spill.first < self.tail_start:
                first = max(offset, self.spill.first)
                if first > offset:
                    return Piece(first, b"", first - offset)
                return Piece(offset, b"")
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
        if self.spill is not None and self.spill.first <= offset < self.tail_start:
            piece = await self.spill.get(offset, limit)
            if piece is not None:
                return piece
        return self.read(offset, limit)

    def collect(self) -> tuple[bytes, bytes, int]:
        """(head, tail, bytes dropped between them) of what is in memory; nothing dropped: all in head."""
        tail = b"".join(piece for _start, piece in self._tail)
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
                self._tail.appendleft((start + cut, piece[cut:]))
            self._tail_size -= cut
            self.tail_start = start + cut
        if len(self._head) > keep_bytes:
            del self._head[keep_bytes:]
            self._head_bytes = keep_bytes

    def seal(self) -> None:
        """Nothing comes any more, and what holds nothing need not be held as long as the log is kept."""
        if not self._tail:
            self._tail = _NOTHING
        if self.spill is not None and self.spill.empty:
            self.spill.close()
            self.spill = None

    def close(self) -> None:
        self._head = bytearray()
        self._tail = _NOTHING
        self._tail_size = 0
        self.tail_start = self.end  # for whoever still reads, all of it is a gap
        if self.spill is not None:
            self.spill.close()
            self.spill = None


class Spill:
    """A ring of `limit` bytes in an unlinked file, written by a worker thread and addressed by the log's offsets.

    A failing disk drops what is in it: readers then see a gap."""

    def __init__(self, directory: str, start: int, workers: Executor, limit: int = SPILL_BYTES) -> None:
        self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._workers = workers
        self._limit = limit
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued = 0
        self._writing = False
        self._closed = False
        self.first = start  # offset of the oldest byte that can be read here
        self._written = start  # and of the byte after the newest on disk
        self.on_room: Callable[[], None] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def full(self) -> bool:
        """The disk is behind: read no more of the pipe until `on_room`."""
        return self._queued > SPILL_QUEUE_BYTES

    @property
    def disk_bytes(self) -> int:
        return self._written - self.first

    @property
    def empty(self) -> bool:
        return not self._queue and not self.disk_bytes

    def put(self, offset: int, data: bytes) -> None:
        self._queue.append((offset, data))
        self._queued += len(data)
        if not self._writing:
            self._write_next()

    def _write_next(self) -> None:
        batch = list(self._queue)
        end = batch[-1][0] + len(batch[-1][1])
        # what the ring is about to overwrite must be out of readers' sight first
        self.first = max(self.first, min(end - self._limit, batch[0][0]))
        self._writing = True
        future = asyncio.get_running_loop().run_in_executor(self._workers, self._write, batch)
        future.add_done_callback(lambda done: self._wrote(done, batch, end))

    def _write(self, batch: list[tuple[int, bytes]]) -> None:
        for offset, data in batch:
            view = memoryview(data)
            while view:
                at = offset % self._limit
                count = os.pwrite(self._fd, view[: self._limit - at], at)
                view = view[count:]
                offset += count

    def _wrote(self, done: asyncio.Future[None], batch: list[tuple[int, bytes]], end: int) -> None:
        self._writing = False
        if done.cancelled() or done.exception() is not None:
            self.first = end
        for _ in batch:
            self._queued -= len(self._queue.popleft()[1])
        self._written = end
        if self._closed:
            os.close(self._fd)
            return
        if self._queue:
            self._write_next()
        if self.on_room is not None and not self.full:
            self.on_room()

    async def get(self, offset: int, limit: int) -> Piece | None:
        """At most `limit` bytes from `offset`; None where they are not here any more."""
        for start, data in self._queue:
            if start <= offset < start + len(data):
                return Piece(offset, data[offset - start : offset - start + limit])
        if not self.first <= offset < self._written or self._closed:
            return None
        at = offset % self._limit
        count = min(limit, self._written - offset, self._limit - at)
        fd = os.dup(self._fd)  # a close meanwhile must not let the number mean another file
        try:
            data = await asyncio.get_running_loop().run_in_executor(self._workers, os.pread, fd, count, at)
        except OSError:
            self.first = max(self.first, offset + count)
            return None
        finally:
            os.close(fd)
        return Piece(offset, data) if data and offset >= self.first else None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._writing:
                os.close(self._fd)
