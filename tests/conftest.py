"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from manager.store import keys
from manager.store.base import Store
from manager.store.embedded import embedded_valkey
from manager.store.redis import RedisStore

# A shell that runs the tests in the background has them ignore SIGINT, and all that they start: what a person at a
# terminal starts does not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A real Valkey server of the test run's own."""
    data_dir: Path = tmp_path_factory.mktemp("valkey")
    async with embedded_valkey(data_dir) as url:
        yield url


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Store]:
    """An empty store over `valkey_url`."""
    async with Redis.from_url(valkey_url) as client:
        async for key in client.scan_iter(match=f"{keys.PREFIX}*", count=1000):
            await client.delete(key)
    redis_store = RedisStore.at(valkey_url)
    yield redis_store
    await redis_store.close()
