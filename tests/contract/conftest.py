"""Each Protocol's suite runs on each implementation that this machine can reach."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from manager.store import keys


@pytest.fixture(params=["embedded", "SOJOURN_TEST_REDIS_URL"])
async def redis_url(request: pytest.FixtureRequest, valkey_url: str) -> str:
    """A real server, emptied of our keys: our own, and the one that the variable names (a Redis for tests only)."""
    url = valkey_url if request.param == "embedded" else os.environ.get("SOJOURN_TEST_REDIS_URL", "")
    if not url:
        pytest.skip("SOJOURN_TEST_REDIS_URL is not set")
    async with Redis.from_url(url) as client:
        async for key in client.scan_iter(match=f"{keys.PREFIX}*", count=1000):
            await client.delete(key)
    return url


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    """A client past the store, to put the world into a state that a test needs."""
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
