"""Long work on the event loop in short steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

_ITEMS: Final = 100  # of what takes some tens of microseconds each

_T = TypeVar("_T")


async def in_steps(items: Iterable[_T]) -> AsyncIterator[_T]:
    """The items; after every few of them everybody else has a turn of the loop."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _ITEMS == 0:
            await asyncio.sleep(0)
