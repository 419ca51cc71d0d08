"""Unpacks gzip in bounded steps, and tells an archive from a bomb by what comes out of how much."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from executor.tarread import TarRefused

STEP_BYTES: Final = 256 * 1024  # the most that one step unpacks
FREE_BYTES: Final = 10 << 20  # of output, before the ratio counts
MAX_RATIO: Final = 100  # tar files of source code have 4, of logs 20
_FREE_MEMBERS: Final = 1000
_MIN_MEMBER_BYTES: Final = 1024  # on average, beyond the free ones: bgzip and pigz make members of 64 KiB and more


def check_ratio(packed: int, unpacked: int) -> None:
    """Raises TarRefused for what grows as only a bomb does."""
    if unpacked > FREE_BYTES and unpacked > packed * MAX_RATIO:
        raise TarRefused(
            f"the archive unpacks to more than {MAX_RATIO} times its size; send it as plain tar if that is meant",
            fault="limit",
            limit=MAX_RATIO,
        )


class Gunzip:
    """Feed it the stream in any pieces, then `finish`. Members one after the other are one stream, as in gzip(1)."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self._members = 1
        self._is_between = False
        self._tail = False  # the zeros that some tapes and tools put after the last member
        self.packed = 0
        self.unpacked = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """At most STEP_BYTES at a time. Raises TarRefused."""
        self.packed += len(data)
        while data:
            if self._is_between and not self._next_member(data):
                return
            try:
                piece = self._inner.decompress(data, STEP_BYTES)
            except zlib.error as why:
                raise TarRefused(f"no gzip, or a damaged one: {why}") from None
            self.unpacked += len(piece)
            check_ratio(self.packed, self.unpacked)
            if piece:
                yield piece
            data = self._inner.unconsumed_tail
            if self._inner.eof:
                data, self._is_between = self._inner.unused_data, True

    def finish(self) -> None:
        if not self._is_between:
            raise TarRefused("the gzip stream is cut off")

    def _next_member(self, data: bytes) -> bool:
        if self._tail or data[0] == 0:
            if data.strip(b"\0"):
                raise TarRefused("there is data after the gzip stream's end")
            self._tail = True
            return False
        self._members += 1
        if self._members > _FREE_MEMBERS and self.unpacked < self._members * _MIN_MEMBER_BYTES:
            raise TarRefused(
                f"the gzip stream is cut into {self._members} members with next to nothing in them",
                fault="limit",
                limit=_FREE_MEMBERS,
            )
        self._inner, self._is_between = zlib.decompressobj(wbits=31), False
        return True
