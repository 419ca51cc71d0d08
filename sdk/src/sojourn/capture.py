"""Keeping a command's output within a bound: the head and the tail of each stream."""

from __future__ import annotations

from typing import Final

from sojourn.types import Captured, Event, ExecResult, Exit, Gap, Output, StreamName, Where

_SLACK_BYTES: Final = 64 << 10  # the tail is cut when it is this much over twice its size, not at every piece


class Capture:
    """Collects a command's events into its result, at most `limit` bytes of each stream."""

    def __init__(self, limit: int) -> None:
        self._kept: dict[StreamName, HeadAndTail] = {"stdout": HeadAndTail(limit), "stderr": HeadAndTail(limit)}

    def add(self, event: Event) -> None:
        if isinstance(event, Output):
            self._kept[event.stream].add(event.data)
        elif isinstance(event, Gap):
            self._kept[event.stream].skip(event.bytes)

    def result(self, exit: Exit, where: Where) -> ExecResult:
        captured = {name: kept.captured() for name, kept in self._kept.items()}
        return ExecResult(exit=exit, where=where, captured=captured)


class HeadAndTail:
    """The first and the last bytes of a stream, of each half of `limit`."""

    def __init__(self, limit: int) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._head_room = limit - limit // 2
        self._tail_bytes = limit // 2
        self._dropped = 0

    def add(self, data: bytes) -> None:
        if self._head_room and not self._dropped:
            self._head += data[: self._head_room]
            taken = min(len(data), self._head_room)
            self._head_room -= taken
            data = data[taken:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_bytes + _SLACK_BYTES:
            self._cut()

    def skip(self, count: int) -> None:
        """`count` bytes never came: what is kept before them and after them does not meet."""
        self._dropped += count + len(self._tail)
        self._tail.clear()

    def captured(self) -> Captured:
        self._cut()
        return Captured(bytes(self._head), bytes(self._tail), self._dropped)

    def _cut(self) -> None:
        over = len(self._tail) - self._tail_bytes
        if over > 0:
            del self._tail[:over]
            self._dropped += over
