"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import asyncio
import inspect
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from manager.store import keys
from manager.store.base import Store
from manager.store.embedded import embedded_valkey
from manager.store.redis import RedisStore
from tests.support.s3_server import S3Server, s3_server

# A shell that runs the tests in the background has them ignore SIGINT, and all that they start: what a person at a
# terminal starts does not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


CLOSING_SEC: Final = 60.0


@pytest.fixture(autouse=True)
def _no_connection_outlives_its_test(request: pytest.FixtureRequest) -> None:
    """For tests on an event loop. Set up first, so that it looks last: after the other fixtures and before the loop."""
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("every_connection_is_closed")


@pytest.fixture
async def every_connection_is_closed() -> AsyncIterator[None]:
    """Waits for what is closing, which may have bytes left to write; fails for what nobody has closed.

    A loop that ends before its connections leaves them to the garbage collector, whose warning fails whichever test
    runs by then."""
    yield
    give_up = time.monotonic() + CLOSING_SEC
    while (held := _open_connections()) and time.monotonic() < give_up and any(one.is_closing() for one in held):
        await asyncio.sleep(0.005)
    assert not held, f"the test leaves connections: {held}"


def _open_connections() -> list[asyncio.Transport]:
    """Of this loop, those that are closing among them."""
    known: Mapping[int, asyncio.Transport] = getattr(asyncio.get_running_loop(), "_transports")  # no public way  # noqa: B009
    return [one for one in known.values() if one.get_extra_info("socket").fileno() != -1]


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
    redis_store = RedisStore.at(valkey_url, call_sec=30.0)
    yield redis_store
    await redis_store.close()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server of the test run's own."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
