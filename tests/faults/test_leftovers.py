"""What a sandbox leaves behind reaches nobody: pods of the warm pool are used once (S38)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.support.stack import Stack

ROUNDS = int(os.environ.get("SOJOURN_TEST_LEFTOVERS", "3"))  # fifty of them are a minute more
PLACES = "/workspace /tmp /var/tmp /dev/shm $HOME"


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack().start()
    yield stack
    stack.remove()


def leave(canary: str) -> str:
    """Files in every place that can be written, an environment, processes that outlive their command."""
    return (
        f"for d in {PLACES}; do mkdir -p $d/.hidden && echo {canary} > $d/.hidden/{canary}; done; "
        f"echo 'export LEFT={canary}' >> $HOME/.bashrc; echo 'export LEFT={canary}' >> $HOME/.profile; "
        f"{canary}=1 setsid bash -c 'exec -a {canary} sleep 300' </dev/null >/dev/null 2>&1 & true"
    )


def look(pattern: str) -> str:
    """How often anything by that name is found in files, their names, environments and processes."""
    return (
        f"(grep -rs '{pattern}' {PLACES}; find {PLACES} -name '*{pattern}*'; env; "
        "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n') | "
        f"grep -v 'grep' | grep -c '{pattern}-[0-9a-f]' || true"
    )


async def test_nothing_that_was_left_in_a_warm_pod_is_in_another_and_no_pod_is_used_twice(stack: Stack) -> None:
    """S38"""
    word = f"canary{secrets.token_hex(4)}"
    pods: list[str] = []
    async with stack:
        for number in range(ROUNDS):
            task = f"left-{number}"
            found = await stack.exec(task, look(word))
            assert found["stdout"].strip() == "0", found
            pods.append(found["pod_id"])
            left = await stack.exec(task, leave(f"{word}-{secrets.token_hex(4)}"))
            assert left["exit_code"] == 0, left
            again = await stack.exec(task, look(word))
            assert int(again["stdout"]) > 0, again  # in its own pod it is found: the look is worth something
            status, _ = await stack.call("DELETE", stack.task(task))
            assert status == 204
    assert len(set(pods)) == ROUNDS
