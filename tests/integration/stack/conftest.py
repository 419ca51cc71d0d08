"""One running stack for all tests of this folder that do not disturb it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.stack import Stack


@pytest.fixture(scope="session")
def running_stack() -> Iterator[Stack]:
    stack = Stack(config='[projects."dev/default"]\nprofiles = ["sandboxes-default"]\nconcurrency = 200\n').start()
    yield stack
    stack.remove()


@pytest.fixture
async def stack(running_stack: Stack) -> AsyncIterator[Stack]:
    async with running_stack:
        yield running_stack
