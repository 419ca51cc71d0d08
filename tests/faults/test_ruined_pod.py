"""A command that ruins the pod it runs in (F3): answers stay typed, and nobody else ever gets that pod."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.support.stack import Stack

pytestmark = pytest.mark.timeout(200)
RUIN = (
    "rm -rf --no-preserve-root / 2>/dev/null; "
    "for d in /tmp /var/tmp /dev/shm; do head -c 8G /dev/zero > $d/full 2>/dev/null & done; wait; "
    "(trap '' TERM HUP; exec setsid sleep 300) & kill -9 -1"
)


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack().start()
    yield stack
    stack.remove()


async def test_a_pod_that_a_command_has_ruined_answers_by_name_and_is_never_another_s(stack: Stack) -> None:
    async with stack:
        beside = await stack.exec("beside", "echo mine > f; cat f")
        before = await stack.exec("ruin", "echo kept > f; cat f")
        for _ in range(2):
            status, answer = await stack.call("POST", f"{stack.task('ruin')}/exec", json={"command": RUIN})
            if status == 200:
                assert answer["reason"] in ("exited", "signaled", "oom_killed", "lost", "pids_exhausted"), answer
            else:
                assert answer["error"]["code"] in ("outcome_unknown", "executor_unreachable", "sandbox_gone"), answer
        status, answer = await stack.call("POST", f"{stack.task('ruin')}/exec", json={"command": "echo on; ls -A"})
        assert status == 200 or "code" in answer["error"], answer
        if status == 200:
            assert answer["stdout"].startswith("on\n")
        assert (await stack.exec("beside", "cat f"))["pod_id"] == beside["pod_id"]
        status, _ = await stack.call("DELETE", stack.task("ruin"))
        assert status == 204
        give_up = time.monotonic() + 60
        while before["pod_id"] in stack.pods():
            assert time.monotonic() < give_up
            await asyncio.sleep(0.05)
        for task in ("ruin", "another"):
            fresh = await stack.exec(task, "ls -A; ls -A /tmp /var/tmp /dev/shm | grep -c full; pgrep -c sleep; true")
            assert fresh["pod_id"] != before["pod_id"]
            assert fresh["stdout"].split()[-2:] == ["0", "0"], fresh
