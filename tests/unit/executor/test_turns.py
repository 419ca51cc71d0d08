"""Reads of what nobody waits for: so many in a moment, and everybody has a turn."""

from __future__ import annotations

import asyncio

from executor.turns import READS, TICK_SEC, Turns


class Pipe:
    def __init__(self) -> None:
        self.held = 0
        self.released = 0

    def hold(self) -> None:
        self.held += 1

    def go_on(self) -> None:
        self.released += 1


async def test_what_is_too_much_for_a_moment_waits_for_its_turn_and_everybody_has_one() -> None:
    turns = Turns(asyncio.get_running_loop())
    pipes = [Pipe() for _ in range(5 * READS)]
    for pipe in pipes:
        turns.has_read(pipe)
    assert [pipe.held for pipe in pipes[:READS]] == [0] * READS
    assert [pipe.held for pipe in pipes[READS:]] == [1] * (4 * READS)
    async with asyncio.timeout(30):
        while sum(pipe.released for pipe in pipes) < 4 * READS:
            await asyncio.sleep(TICK_SEC)
    assert [pipe.released for pipe in pipes] == [pipe.held for pipe in pipes]
    turns.close()
