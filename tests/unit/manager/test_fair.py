"""Room for so many at once goes round between those who wait."""

from __future__ import annotations

import asyncio

from manager.services.fair import FairRoom


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_crowd_of_one_project_holds_nobody_else_up() -> None:
    room, order, go = FairRoom[str](2), list[str](), asyncio.Event()

    async def visit(who: str) -> None:
        async with room.of(who):
            order.append(who)
            await go.wait()

    visits = [asyncio.create_task(visit("crowd")) for _ in range(10)]
    await settled()
    visits += [asyncio.create_task(visit(who)) for who in ("other", "third", "other")]
    await settled()
    assert order == ["crowd", "crowd"]
    go.set()
    await asyncio.gather(*visits)
    assert len(order) == 13
    assert order[2:6].count("crowd") == 2
    assert {"other", "third"} < set(order[2:6])


async def test_who_stops_waiting_takes_no_place_and_loses_none() -> None:
    room = FairRoom[int](1)
    held = asyncio.Event()

    async def visit(who: int) -> None:
        async with room.of(who):
            await held.wait()

    visits = [asyncio.create_task(visit(number % 3)) for number in range(12)]
    await settled()
    for each in visits[1:8]:
        each.cancel()
    visits[0].cancel()  # leaves as the next is let in
    await settled()
    held.set()
    results = await asyncio.gather(*visits, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 8
    async with asyncio.timeout(20), room.of(99):
        pass


async def test_a_place_given_to_one_that_leaves_goes_on_to_the_next() -> None:
    for _ in range(50):
        room, inside = FairRoom[str](1), asyncio.Event()

        async def visit(room: FairRoom[str], inside: asyncio.Event) -> None:
            async with room.of("a"):
                inside.set()

        async with room.of("first"):
            leaving, staying = (asyncio.create_task(visit(room, inside)) for _ in range(2))
            await settled()
        leaving.cancel()  # in the same turn as it was let in
        async with asyncio.timeout(20):
            await staying
        await asyncio.gather(leaving, return_exceptions=True)


async def test_one_that_is_called_comes_in_beside_the_places_and_leaves_none() -> None:
    room, go, came = FairRoom[str](1), asyncio.Event(), list[tuple[str, bool]]()

    async def visit(who: str, kind: str) -> None:
        async with room.of(who, kind) as placed:
            came.append((who, placed))
            await go.wait()

    visits = [asyncio.create_task(visit(who, kind)) for who, kind in (("a", "x"), ("a", "x"), ("b", "y"), ("b", "x"))]
    await settled()
    assert (came, room.waiting("x"), room.waiting("y")) == ([("a", True)], 2, 1)
    assert room.call("y")
    assert not room.call("z")
    assert room.call("x")
    assert not room.call("y")
    await settled()
    assert came == [("a", True), ("b", False), ("a", False)]
    go.set()
    await asyncio.gather(*visits)
    assert came[-1] == ("b", True)
    assert room.waiting("x") == 0
    async with room.of("c") as placed:  # there is still one place, and no more
        assert placed
        late = asyncio.create_task(visit("d", "x"))
        await settled()
        assert ("d", True) not in came
    async with asyncio.timeout(20):
        await late


async def test_a_call_to_one_that_leaves_goes_on_to_the_next_and_one_that_comes_again_is_first() -> None:
    room, came = FairRoom[str](1), list[str]()

    async def visit(who: str, *, again: bool = False) -> None:
        async with room.of(who, "x", again=again):
            came.append(who)

    async with room.of("holder"):
        leaving, staying = asyncio.create_task(visit("leaving")), asyncio.create_task(visit("staying"))
        await settled()
        room.call("x")
        leaving.cancel()  # in the same turn as it was called
        async with asyncio.timeout(20):
            await staying
        last = asyncio.create_task(visit("last"))
        await settled()
        first = asyncio.create_task(visit("first", again=True))
        await settled()
    await asyncio.gather(leaving, first, last, return_exceptions=True)
    assert came == ["staying", "first", "last"]
