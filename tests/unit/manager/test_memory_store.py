"""The Store in memory keeps the promises that the suite asks of the real one: that is why it may stand in for it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

import pytest

from manager.store.base import Store
from tests.contract import test_store as suite
from tests.support.memory_store import MemoryStore

PROMISES = [
    promise
    for name, promise in vars(suite).items()
    if name.startswith("test_") and list(inspect.signature(promise).parameters) == ["store"]
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_the_store_in_memory_keeps_every_promise(promise: Callable[[Store], Awaitable[None]]) -> None:
    store = MemoryStore()
    await store.settle()
    await promise(store)
