"""Each Protocol's suite runs on each implementation that this machine can reach."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from manager.store import keys

OWN_REDIS_URL = os.environ.get("SOJOURN_TEST_REDIS_URL", "")  # a Redis for tests only: our keys in it are deleted


@pytest.fixture(params=["embedded", "own"] if OWN_REDIS_URL else ["embedded"])
async def redis_url(request: pytest.FixtureRequest, valkey_url: str) -> str:
    """A real server, emptied of our keys and looked through: the embedded one, and the one that the variable names."""
    url = OWN_REDIS_URL if request.param == "own" else valkey_url
    async with Redis.from_url(url) as client:
        async for key in client.scan_iter(match=f"{keys.PREFIX}*", count=1000):
            await client.delete(key)
        await client.set(keys.settled_key(), "1")
    return url


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    """A client past the store, to put the world into a state that a test needs."""
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
