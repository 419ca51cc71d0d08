"""S33: whose request begins next."""

from __future__ import annotations

import asyncio

from manager.api.turns import Turns
from manager.model import Owner

FLOOD, OTHER, THIRD = Owner("acme", "web"), Owner("acme", "shop"), Owner("globex", "web")


async def begun(turns: Turns, owner: Owner, order: list[Owner]) -> None:
    young = await turns.begin(owner)
    order.append(owner)
    turns.end(young)


async def test_a_request_that_comes_alone_waits_for_nothing() -> None:
    turns = Turns()
    for _ in range(3):
        first = turns.begin(FLOOD)
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
    turns, order = Turns(begin=2), list[Owner]()
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


async def rounds(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_while_others_are_at_work_a_project_has_only_so_many_young_requests() -> None:
    turns = Turns(young=2, young_sec=3600)
    turns.end(await turns.begin(OTHER))
    flood = [asyncio.create_task(turns.begin(FLOOD)) for _ in range(5)]
    await rounds()
    begun_ones = [task for task in flood if task.done()]
    assert len(begun_ones) == 2
    turns.end(await asyncio.wait_for(turns.begin(OTHER), 5))  # nobody else is held up
    turns.end(begun_ones[0].result())
    turns.end(begun_ones[0].result())
    await rounds()
    assert len([task for task in flood if task.done()]) == 3
    for task in flood:
        turns.end(await asyncio.wait_for(task, 5))
    assert not turns._young
    assert not turns._waiting


async def test_a_request_that_lasts_is_young_no_more_and_keeps_no_place() -> None:
    turns = Turns(young=1, young_sec=0.01)
    turns.end(await turns.begin(OTHER))
    lasting = [await asyncio.wait_for(turns.begin(FLOOD), 5) for _ in range(5)]
    for young in lasting:
        turns.end(young)
    assert not turns._young


async def test_a_project_that_is_alone_at_work_has_any_number_of_them() -> None:
    turns = Turns(young=1, young_sec=3600)
    for _ in range(20):
        await asyncio.wait_for(turns.begin(FLOOD), 5)
