"""S33: whose request begins next."""

from __future__ import annotations

import asyncio

from manager.api.turns import Turns
from manager.model import Owner

FLOOD, OTHER, THIRD = Owner("acme", "web"), Owner("acme", "shop"), Owner("globex", "web")


async def begun(turns: Turns, owner: Owner, order: list[Owner]) -> None:
    await turns.of(owner)
    order.append(owner)


async def test_a_request_that_comes_alone_waits_for_nothing() -> None:
    turns = Turns()
    for _ in range(3):
        first = turns.of(FLOOD)
        try:
            first.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it was held")
        await asyncio.sleep(0)


async def test_requests_that_come_behind_another_projects_crowd_begin_in_the_next_rounds() -> None:
    turns, order = Turns(), list[Owner]()
    crowd = [asyncio.create_task(begun(turns, FLOOD, order)) for _ in range(50)]
    later = [asyncio.create_task(begun(turns, owner, order)) for owner in (OTHER, THIRD, OTHER)]
    await asyncio.gather(*crowd, *later)
    assert order.index(OTHER) <= 2
    assert order.index(THIRD) <= 3
    assert [place for place, owner in enumerate(order) if owner == OTHER][1] <= 6
    assert len(order) == 53


async def test_a_round_begins_no_more_than_so_many() -> None:
    turns, order = Turns(2), list[Owner]()
    tasks = [asyncio.create_task(begun(turns, FLOOD, order)) for _ in range(10)]
    seen, rounds = 0, 0
    while len(order) < 10:
        await asyncio.sleep(0)
        assert len(order) - seen <= 2
        seen, rounds = len(order), rounds + 1
        assert rounds < 100
    await asyncio.gather(*tasks)


async def test_who_hung_up_takes_nobodys_turn() -> None:
    turns, order = Turns(), list[Owner]()
    first = asyncio.create_task(begun(turns, FLOOD, order))
    gone = [asyncio.create_task(begun(turns, FLOOD, order)) for _ in range(20)]
    last = asyncio.create_task(begun(turns, FLOOD, order))
    await first
    for task in gone:
        task.cancel()
    await asyncio.wait_for(last, 5)
    await asyncio.gather(*gone, return_exceptions=True)
    assert order == [FLOOD, FLOOD]
    assert not turns._waiting
