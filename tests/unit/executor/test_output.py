"""The bounded log of one output stream: exact offsets, gaps that are told, a spill that loses nothing it promised."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.output import JOIN_BELOW, OutputLog, Piece, Spill


def read_all(log: OutputLog, offset: int = 0, limit: int = 65_536) -> list[Piece]:
    pieces = []
    while (piece := log.read(offset, limit)) is not None:
        pieces.append(piece)
        offset = piece.offset + len(piece.data)
    return pieces


def test_a_reader_at_the_end_gets_nothing() -> None:
    log = OutputLog(0, 100)
    assert log.read(0) is None
    log.append(b"abc")
    assert log.read(3) is None
    assert log.read(10) is None


def test_what_was_dropped_before_the_tail_is_a_gap_of_exactly_that_size() -> None:
    log = OutputLog(0, 10)
    log.append(b"x" * 40_000)
    log.append(b"0123456789")
    assert log.read(0) == Piece(40_000, b"0123456789", 40_000)
    assert log.dropped == 40_000


def test_head_and_tail_are_kept_and_the_middle_is_counted() -> None:
    log = OutputLog(5, 5)
    log.append(b"abcdefghijklmnopqrstuvwxyz")
    assert log.collect() == (b"abcde", b"vwxyz", 16)
    assert read_all(log) == [Piece(0, b"abcde"), Piece(21, b"vwxyz", 16)]


def test_a_cap_of_nothing_still_counts() -> None:
    log = OutputLog(0, 0)
    log.append(b"abc")
    assert log.collect() == (b"", b"", 3)
    assert log.end == 3
    assert log.read(0) == Piece(3, b"", 3)


@settings(deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=50_000), max_size=12),
    head=st.integers(0, 60_000),
    tail=st.integers(0, 60_000),
    limit=st.integers(1, 70_000),
)
def test_what_a_reader_sees_is_the_output_with_its_gaps_marked(
    pieces: list[bytes], head: int, tail: int, limit: int
) -> None:
    log = OutputLog(head, tail)
    for part in pieces:
        if part:
            log.append(part)
    whole = b"".join(pieces)
    at = 0
    for piece in read_all(log, limit=limit):
        assert piece.offset == at + piece.gap
        assert piece.data == whole[piece.offset : piece.offset + len(piece.data)]
        assert len(piece.data) <= limit
        at = piece.offset + len(piece.data)
    assert at == log.end == len(whole)
    assert log.memory_bytes <= head + max(tail, 16_384)
    first, last, dropped = log.collect()
    assert len(first) + len(last) + dropped == len(whole)
    if len(whole) <= head + tail:
        assert (first, dropped) == (whole, 0)
    else:
        assert whole.startswith(first)
        assert whole.endswith(last)


def test_many_tiny_writes_cost_no_object_each() -> None:
    log = OutputLog(0, 1 << 20)
    for _ in range(100_000):
        log.append(b"x")
    assert len(log._tail) < 100


def test_shrinking_keeps_both_ends_and_turns_the_rest_into_a_gap() -> None:
    log = OutputLog(1000, 50_000)
    whole = random.Random(1).randbytes(40_000)
    for at in range(0, len(whole), 700):
        log.append(whole[at : at + 700])
    log.shrink_all(300)
    head, tail, dropped = log.collect()
    assert (head, tail) == (whole[:300], whole[-300:])
    assert dropped == len(whole) - 600
    assert log.memory_bytes == 600


@pytest.fixture
async def workers() -> AsyncIterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def whole_log(log: OutputLog) -> tuple[bytes, int]:
    """(everything a reader gets, bytes of gaps)."""
    data, gaps, offset = bytearray(), 0, 0
    while offset < log.end:
        piece = log.read(offset, 10_000)
        if piece is not None and not piece.data and not piece.gap:
            piece = await log.read_spill(offset, 10_000)
        assert piece is not None
        gaps += piece.gap
        data += piece.data
        offset = piece.offset + len(piece.data)
    return bytes(data), gaps


async def test_what_leaves_memory_is_read_back_from_disk(tmp_path: Path, workers: ThreadPoolExecutor) -> None:
    log = OutputLog(0, 50_000)
    log.spill = Spill(str(tmp_path), 0, workers, limit=1 << 20)
    whole = random.Random(2).randbytes(600_000)
    for at in range(0, len(whole), 30_000):
        log.append(whole[at : at + 30_000])
    assert await whole_log(log) == (whole, 0)
    assert list(tmp_path.iterdir()) == []
    log.close()


async def test_the_ring_on_disk_drops_the_oldest_and_says_how_much(tmp_path: Path, workers: ThreadPoolExecutor) -> None:
    log = OutputLog(0, 20_000)
    log.spill = Spill(str(tmp_path), 0, workers, limit=100_000)
    whole = random.Random(3).randbytes(500_000)
    for at in range(0, len(whole), 20_000):
        log.append(whole[at : at + 20_000])
        while log.spill._queue:
            await asyncio.sleep(0.001)
    data, gaps = await whole_log(log)
    assert data == whole[gaps:]
    assert 0 < gaps <= len(whole) - 100_000
    log.close()


async def test_a_failing_disk_becomes_a_gap_and_no_error(
    tmp_path: Path, workers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = OutputLog(0, 20_000)
    log.spill = Spill(str(tmp_path), 0, workers)
    monkeypatch.setattr("executor.output.os.pwrite", _no_space)
    for _ in range(10):
        log.append(b"y" * 20_000)
    while log.spill._queue:
        await asyncio.sleep(0.001)
    data, gaps = await whole_log(log)
    assert (len(data), gaps) == (20_000, 180_000)
    log.close()


def _no_space(_fd: int, _data: bytes, _at: int) -> int:
    raise OSError(28, "No space left on device")


async def test_a_reader_of_a_log_that_is_closed_under_it_is_told_that_the_rest_is_gone() -> None:
    log = OutputLog(0, 1000)
    log.append(b"x" * 300)
    log.close()
    for offset in (0, 100):
        piece = log.read(offset)
        assert piece is not None
        assert (piece.offset, piece.data, piece.gap) == (300, b"", 300 - offset)
    assert log.read(300) is None


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(st.binary(max_size=20_000), min_size=1, max_size=12),
    head=st.integers(0, 30_000),
    tail=st.integers(1, 30_000),
    moved_at=st.integers(0, 12),
    keep=st.integers(0, 30_000),
)
def test_what_moves_to_disk_is_the_same_head_and_tail(
    pieces: list[bytes], head: int, tail: int, moved_at: int, keep: int
) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as workers, tempfile.TemporaryDirectory() as directory:
            log = OutputLog(head, tail)
            for number, data in enumerate(pieces):
                if number == moved_at:
                    head_bytes, tail_bytes = log.room_bytes
                    spill = Spill(directory, 0, workers, head_bytes + tail_bytes, head_bytes)
                    log.move_to_disk(spill)
                    log.shrink_all(min(keep, tail))
                log.append(data)
            log.seal()
            whole = b"".join(pieces)
            got, gaps, offset = bytearray(), [], 0
            while offset < log.end:
                piece = log.read(offset, 7000)
                if piece is not None and not piece.data and not piece.gap:
                    piece = await log.read_spill(offset, 7000)
                assert piece is not None
                if piece.gap:
                    gaps.append(piece.gap)
                assert piece.data == whole[piece.offset : piece.offset + len(piece.data)]
                got += piece.data
                offset = piece.offset + len(piece.data)
            assert sum(gaps) == log.dropped
            assert len(got) + log.dropped == len(whole)
            assert bytes(got[: min(head, len(whole))]) == whole[:head]
            least = max(0, len(whole) - head - tail)
            assert least <= log.dropped <= least + JOIN_BELOW, "small pieces are dropped whole"
            assert len(gaps) <= 1
            log.close()

    asyncio.run(run())
