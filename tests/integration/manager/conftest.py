"""Providers of local pods over a data directory of the test."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from manager.providers.local.provider import LocalProvider
from tests.support.creator import kill_hard
from tests.support.local_pods import Open, skip_without_isolation, token_for


@pytest.fixture
async def open_provider(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens providers over one data directory; everything is ended afterwards."""
    opened: list[LocalProvider] = []

    def open_one(data_dir: Path = tmp_path, **options: Any) -> LocalProvider:
        provider = LocalProvider("here", data_dir, token_for, **options)
        opened.append(provider)
        return provider

    yield open_one
    for provider in opened:
        if not provider.closed:
            for pod in await provider.list():
                await provider.delete(pod.name)
        await provider.close()


@pytest.fixture
async def provider(open_provider: Open) -> LocalProvider:
    opened = open_provider()
    await skip_without_isolation(opened)
    return opened


@pytest.fixture
def creators() -> Iterator[list[subprocess.Popen[str]]]:
    """Makers of pods that are killed at the end, if a test has not done so before."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for creator in started:
        kill_hard(creator)
