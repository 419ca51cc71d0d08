"""A manager to break, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sojourn import AsyncClient
from tests.support.fake_manager import FakeManager, fake_manager


@pytest.fixture
async def fake() -> AsyncIterator[FakeManager]:
    async with fake_manager() as manager:
        yield manager


@pytest.fixture
async def client(fake: FakeManager) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(fake.address, "key") as open_client:
        yield open_client
