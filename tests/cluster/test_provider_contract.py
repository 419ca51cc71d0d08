"""The suite of every Provider on the `kubernetes` one, against the real API server and scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from manager.providers.base import Provider
from tests.contract.test_provider import *  # noqa: F403 - its tests, with the fixture below instead of theirs
from tests.support.cluster.accounts import Account
from tests.support.cluster.node_agent import NodeAgent
from tests.support.cluster.provider import opened


@pytest.fixture  # type: ignore[no-redef]
async def provider(agent: NodeAgent, manager_account: Account) -> AsyncIterator[Provider]:
    async with opened(manager_account) as made:
        yield made
