"""Pipes that are waited for in an epoll of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from executor.readers import READY_AT_ONCE, Readers


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    """More than are looked at in one turn."""
    made = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(READY_AT_ONCE + 6)]
    yield made
    for ends in made:
        for fd in ends:
            os.close(fd)


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    made = Readers(asyncio.get_running_loop())
    yield made
    made.close()


async def until_equal(left: list[int], right: list[int]) -> None:
    async with asyncio.timeout(60):
        while sorted(left) != right:
            await asyncio.sleep(0.01)


async def test_every_pipe_with_something_to_read_is_told_of_also_where_many_are_ready_at_once(
    readers: Readers, pipes: list[tuple[int, int]]
) -> None:
    read: list[int] = []

    def take(number: int) -> None:
        assert os.read(pipes[number][0], 16) == b"x"
        read.append(number)

    for number, (fd, other) in enumerate(pipes):
        readers.add(fd, lambda number=number: take(number))  # type: ignore[misc]
        os.write(other, b"x")
    await until_equal(read, list(range(len(pipes))))
    os.write(pipes[3][1], b"x")  # again, without being added again
    await until_equal(read, sorted([*range(len(pipes)), 3]))
    for fd, _other in pipes:
        readers.remove(fd)


async def test_one_that_another_has_removed_in_the_same_turn_is_not_told_any_more(
    readers: Readers, pipes: list[tuple[int, int]]
) -> None:
    told: list[int] = []

    def first_come(own: int, others: int) -> None:
        told.append(own)
        readers.remove(pipes[others][0])
        readers.remove(pipes[own][0])

    readers.add(pipes[0][0], lambda: first_come(0, 1))
    readers.add(pipes[1][0], lambda: first_come(1, 0))
    os.write(pipes[0][1], b"x")
    os.write(pipes[1][1], b"x")
    async with asyncio.timeout(60):
        while not told:
            await asyncio.sleep(0.01)
    readers.add(pipes[2][0], lambda: first_come(2, 2))
    os.write(pipes[2][1], b"x")
    async with asyncio.timeout(60):
        while 2 not in told:
            await asyncio.sleep(0.01)
    assert len(told) == 2


async def test_the_end_of_a_pipe_is_told_of_too(readers: Readers) -> None:
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    ended = asyncio.Event()

    def over() -> None:
        assert os.read(read_end, 16) == b""
        readers.remove(read_end)
        ended.set()

    readers.add(read_end, over)
    os.close(write_end)
    async with asyncio.timeout(60):
        await ended.wait()
    os.close(read_end)


async def test_once_closed_nothing_is_waited_for_and_nobody_is_told_off(pipes: list[tuple[int, int]]) -> None:
    readers = Readers(asyncio.get_running_loop())
    readers.add(pipes[0][0], lambda: None)
    readers.close()
    readers.close()
    readers.add(pipes[1][0], lambda: None)
    readers.remove(pipes[0][0])
