"""Output of all running commands together is bounded, in memory and on disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executor.budget import LEAST_BYTES, DiskBudget, MemoryBudget
from executor.output import OutputLog, Spill


class Holder:
    def __init__(self, held_bytes: int, least: int = 0) -> None:
        self.held_bytes, self.least = held_bytes, least

    def cut_output(self, keep_bytes: int) -> None:
        self.held_bytes = min(self.held_bytes, max(keep_bytes, self.least))


def test_over_the_budget_the_largest_cut_output_and_the_small_ones_keep_all() -> None:
    budget = MemoryBudget(1 << 20)
    large, small = [Holder(400_000) for _ in range(3)], Holder(LEAST_BYTES)
    for holder in (small, *large):
        budget.hold(holder, holder.held_bytes)
    assert budget.used == sum(holder.held_bytes for holder in (small, *large)) < 1 << 20
    assert budget.is_short
    assert small.held_bytes == LEAST_BYTES
    for holder in (small, *large):
        budget.drop(holder)
    assert (budget.used, budget.is_short) == (0, False)


def test_what_cannot_be_cut_output_of_is_not_asked_for_at_each_byte() -> None:
    budget = MemoryBudget(1 << 20)
    asked: list[int] = []

    class Stubborn(Holder):
        def cut_output(self, keep_bytes: int) -> None:
            asked.append(keep_bytes)

    holder = Stubborn(0)
    for held in range(0, 3 << 20, 4096):
        holder.held_bytes = held
        budget.hold(holder, held)
    assert 1 < len(asked) < 40


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


async def written(log: OutputLog, data: bytes) -> None:
    assert log.spill is not None
    log.append(data)
    while log.spill._queue:
        await asyncio.sleep(0.001)


async def kept(log: OutputLog) -> tuple[bytes, int]:
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


async def test_the_disk_s_budget_holds_while_spilling_and_what_goes_is_a_gap(
    tmp_path: Path, workers: ThreadPoolExecutor
) -> None:
    disk = DiskBudget(300_000)
    whole = random.Random(5).randbytes(1_000_000)
    logs = [OutputLog(0, 20_000) for _ in range(3)]
    for log in logs:
        log.spill = Spill(str(tmp_path), 0, workers, disk=disk)
    for at in range(0, len(whole), 20_000):
        for log in logs:
            await written(log, whole[at : at + 20_000])
        on_disk = sum(log.spill.disk_bytes for log in logs if log.spill is not None)
        assert on_disk <= 300_000
    for log in logs:
        data, gaps = await kept(log)
        assert data == whole[gaps:]
        assert gaps == log.dropped > 0
        log.close()
    assert disk.take(300_000), "all of it was given back"


async def test_without_any_budget_left_memory_alone_is_kept(tmp_path: Path, workers: ThreadPoolExecutor) -> None:
    disk = DiskBudget(10_000)
    log = OutputLog(0, 20_000)
    log.spill = Spill(str(tmp_path), 0, workers, disk=disk)
    whole = random.Random(6).randbytes(200_000)
    for at in range(0, len(whole), 20_000):
        await written(log, whole[at : at + 20_000])
    assert await kept(log) == (whole[-20_000:], 180_000)
    log.close()
    assert disk.take(10_000)


async def test_a_full_disk_is_freed_and_used_again(
    tmp_path: Path, workers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F25."""
    disk = DiskBudget(1_000_000)
    log = OutputLog(0, 20_000)
    log.spill = Spill(str(tmp_path), 0, workers, disk=disk)
    await written(log, b"a" * 20_000)
    await written(log, b"b" * 20_000)

    def full(_fd: int, _data: bytes, _at: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("executor.output.os.pwrite", full)
        await written(log, b"c" * 20_000)
    await written(log, b"d" * 20_000)
    await written(log, b"e" * 20_000)
    data, gaps = await kept(log)
    assert data == b"c" * 20_000 + b"d" * 20_000 + b"e" * 20_000 or (data, gaps) == (
        b"d" * 20_000 + b"e" * 20_000,
        60_000,
    )
    log.close()
    assert disk.take(1_000_000)


def test_a_short_disk_asks_for_what_ended_to_be_let_go_of_first() -> None:
    asked: list[int] = []

    def on_short(size: int) -> None:
        asked.append(size)
        disk.give(size)

    disk = DiskBudget(100, on_short)
    assert disk.take(80)
    assert not asked
    assert disk.take(50)
    assert asked == [30]
