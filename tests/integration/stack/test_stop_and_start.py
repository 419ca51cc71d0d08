"""Stopping, starting, snapshots and forks of long-lived sandboxes, with real pods and layers: S8, S9 of the threats."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.long_lived import ALL, made, run
from tests.support.stack import Stack

CONFIG = """
[projects."dev/default"]
profiles = ["sandboxes-default"]
concurrency = 3
"""
ROUNDS = int(os.environ.get("SOJOURN_TEST_STOP_ROUNDS", "2"))
MIB = int(os.environ.get("SOJOURN_TEST_STOP_MIB", "8"))


@pytest.fixture(scope="module")
def small() -> Iterator[Stack]:
    """A stack whose project may have three sandboxes."""
    stack = Stack(config=CONFIG).start()
    yield stack
    stack.remove()


@pytest.fixture
async def stack(small: Stack) -> AsyncIterator[Stack]:
    async with small:
        yield small
        for one in (await small.call("GET", ALL))[1]["sandboxes"]:
            await small.call("DELETE", f"{ALL}/{one['sandbox_id']}?purge=true&force=true")


async def command(stack: Stack, sandbox_id: str, text: str) -> Any:
    status, answer = await stack.call("POST", f"{ALL}/{sandbox_id}/exec", json={"command": text})
    assert status == 200, answer
    return answer


async def moved(stack: Stack, sandbox_id: str, what: str, to: str) -> Any:
    status, answer = await stack.call("POST", f"{ALL}/{sandbox_id}/{what}?wait_sec=110")
    assert (status, answer.get("state")) == (200, to), answer
    return answer


async def held(stack: Stack) -> int:
    slots: int = (await stack.call("GET", "/api/v1/quotas"))[1]["quotas"][0]["slots_held"]
    return slots


async def test_every_file_comes_back_as_it_was_round_after_round(stack: Stack) -> None:
    sandbox_id = await made(stack)
    await command(
        stack, sandbox_id,
        "mkdir -p tree/empty && chmod 700 tree/empty && echo hi > tree/a && chmod 640 tree/a && ln -s a tree/link"
        " && ln tree/a tree/hard && touch -d @1000000000 tree/old && truncate -s 5M tree/sparse"
        " && echo s > /tmp/not-kept",
    )  # fmt: skip
    sums: dict[str, str] = {}
    for round_ in range(ROUNDS):
        content = os.urandom(MIB << 20)
        name = f"random-{round_}"
        sums[name] = hashlib.sha256(content).hexdigest()
        assert (await stack.call("PUT", f"{ALL}/{sandbox_id}/files?path={name}", data=io.BytesIO(content)))[0] == 201
        pod = (await command(stack, sandbox_id, "true"))["pod_id"]
        await moved(stack, sandbox_id, "stop", "stopped")
        assert pod not in stack.pods()
        await moved(stack, sandbox_id, "start", "running")
        for known, digest in sums.items():
            assert (await command(stack, sandbox_id, f"sha256sum {known}"))["stdout"].split()[0] == digest
    shown = await command(
        stack, sandbox_id,
        "stat -c '%a %F' tree/empty; stat -c '%a %h' tree/a; readlink tree/link; stat -c %Y tree/old;"
        " stat -c '%s %b' tree/sparse; ls /tmp/not-kept 2>&1; stat -c %U tree/a",
    )  # fmt: skip
    lines = shown["stdout"].splitlines()
    assert lines[:4] == ["700 directory", "640 2", "a", "1000000000"]
    assert lines[4].startswith(f"{5 << 20} ")
    assert int(lines[4].split()[1]) < 1000
    assert "No such file" in lines[5]


async def test_a_stopped_sandbox_holds_no_slot_and_answers_that_it_is_stopped(stack: Stack) -> None:
    before = await held(stack)
    sandbox_id = await made(stack)
    await moved(stack, sandbox_id, "stop", "stopped")
    assert await held(stack) == before
    for method, rest in (("POST", "exec"), ("GET", "files?path=x"), ("GET", "processes"), ("POST", "sessions")):
        body = {"command": "true"} if rest == "exec" else None
        status, answer = await stack.call(method, f"{ALL}/{sandbox_id}/{rest}", json=body)
        assert (status, answer["error"]["code"]) == (409, "sandbox_stopped"), rest
    others = [await made(stack) for _ in range(3 - before)]
    status, answer = await stack.call("POST", f"{ALL}/{sandbox_id}/start")
    assert (status, answer["error"]["code"]) == (429, "quota_exceeded")
    assert (await stack.call("GET", f"{ALL}/{sandbox_id}"))[1]["state"] == "stopped"
    await stack.call("DELETE", f"{ALL}/{others[0]}?purge=true")
    await moved(stack, sandbox_id, "start", "running")


async def test_a_call_starts_it_where_it_shall(stack: Stack) -> None:
    sandbox_id = await made(stack, autostart=True)
    await command(stack, sandbox_id, "echo kept > a")
    await moved(stack, sandbox_id, "stop", "stopped")
    assert (await stack.call("GET", f"{ALL}/{sandbox_id}/files?path=a"))[1] == b"kept\n"
    assert (await stack.call("GET", f"{ALL}/{sandbox_id}"))[1]["state"] == "running"


async def test_snapshots_and_forks_are_of_their_moment(stack: Stack) -> None:
    sandbox_id = await made(stack)
    pod = (await command(stack, sandbox_id, "echo one > a"))["pod_id"]
    status, snapshot = await stack.call("POST", f"{ALL}/{sandbox_id}/snapshots", json={"name": "first"})
    assert status == 201, snapshot
    await command(stack, sandbox_id, "echo two > a")
    status, forked = await stack.call("POST", f"{ALL}/{sandbox_id}/fork", json={"name": "the fork"})
    assert status == 201, forked
    assert (await command(stack, forked["sandbox_id"], "cat a; echo fork > a"))["stdout"] == "two\n"
    again = await command(stack, sandbox_id, "cat a")
    assert (again["stdout"], again["pod_id"]) == ("two\n", pod)
    from_snapshot = await made(stack, source={"snapshot_id": snapshot["snapshot_id"]})
    assert (await command(stack, from_snapshot, "cat a"))["stdout"] == "one\n"
    listed = (await stack.call("GET", "/sandbox/snapshots/v1"))[1]["snapshots"]
    assert snapshot["snapshot_id"] in [one["snapshot_id"] for one in listed]
    one = f"/sandbox/snapshots/v1/{snapshot['snapshot_id']}"
    assert (await stack.call("GET", one))[1]["name"] == "first"
    assert (await stack.call("DELETE", one))[0] == 204
    assert (await stack.call("GET", one))[0] == 404
    await stack.call("DELETE", f"{ALL}/{from_snapshot}?purge=true")  # the last slot
    status, answer = await stack.call("POST", ALL, json={"source": {"snapshot_id": snapshot["snapshot_id"]}})
    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_the_last_files_of_an_ended_sandbox_can_be_had_for_a_week(stack: Stack) -> None:
    sandbox_id = await made(stack, name="ended")
    await command(stack, sandbox_id, "echo last > a")
    assert (await stack.call("DELETE", f"{ALL}/{sandbox_id}"))[0] == 204
    snapshots = (await stack.call("GET", "/sandbox/snapshots/v1"))[1]["snapshots"]
    last = next(one for one in snapshots if one["sandbox_id"] == sandbox_id)
    assert last["keep_until"] is not None
    again = await made(stack, source={"snapshot_id": last["snapshot_id"]})
    assert (await command(stack, again, "cat a"))["stdout"] == "last\n"


async def test_the_command_line_stops_starts_forks_and_keeps(stack: Stack) -> None:
    script = """
    id=$(sojourn sandbox create)
    sojourn sandbox exec $id -- 'echo kept > a'
    sojourn sandbox stop $id | grep state
    sojourn sandbox start $id | grep state
    sojourn sandbox exec $id -- cat a
    fork=$(sojourn sandbox fork $id --name forked)
    sojourn sandbox exec $fork -- cat a
    snapshot=$(sojourn sandbox snapshot $id --name v1)
    sojourn sandbox snapshots | grep -c $snapshot
    third=$(sojourn sandbox create --snapshot $snapshot)
    sojourn sandbox exec $third -- cat a
    sojourn sandbox rm-snapshot $snapshot
    sojourn sandbox rm --purge $id $fork $third
    """
    said = (await asyncio.to_thread(run, stack, script)).splitlines()
    assert said[0].startswith("state     stopped (asked)")
    assert said[1].startswith("state     running (started)")
    assert said[2:] == ["kept", "kept", "1", "kept"]


async def test_a_quiet_sandbox_is_stopped_and_one_whose_time_is_over_is_ended(stack: Stack) -> None:
    quiet, works = await made(stack), await made(stack)
    begun = time.monotonic()
    await command(stack, quiet, "echo kept > a")
    status, process = await stack.call("POST", f"{ALL}/{works}/processes", json={"command": "sleep 600"})
    assert status == 201
    for sandbox_id in (quiet, works):
        assert (await stack.call("PATCH", f"{ALL}/{sandbox_id}", json={"autostop_sec": 1}))[0] == 200
    await reached(stack, quiet, "stopped", "idle")
    assert (await stack.call("GET", f"{ALL}/{works}"))[1]["state"] == "running"  # it works: S9
    assert (await stack.call("GET", f"{ALL}/{works}/processes/{process['id']}"))[1]["state"] == "running"
    await stack.call("PATCH", f"{ALL}/{quiet}", json={"autostop_sec": 3600})
    await moved(stack, quiet, "start", "running")
    assert (await command(stack, quiet, "cat a"))["stdout"] == "kept\n"
    ttl_sec = round(time.monotonic() - begun) + 30
    assert (await stack.call("PATCH", f"{ALL}/{works}", json={"ttl_sec": ttl_sec}))[0] == 200
    await reached(stack, works, "destroyed", "expired")
    snapshots = (await stack.call("GET", "/sandbox/snapshots/v1"))[1]["snapshots"]
    assert works in [one["sandbox_id"] for one in snapshots]


async def reached(stack: Stack, sandbox_id: str, state: str, reason: str) -> None:
    async with asyncio.timeout(90):
        while True:
            shown = (await stack.call("GET", f"{ALL}/{sandbox_id}"))[1]
            if (shown["state"], shown["reason"]) == (state, reason):
                return
            await asyncio.sleep(0.1)


async def test_ctrl_c_of_the_whole_stack_keeps_what_is_in_them() -> None:
    stack = Stack().start()
    try:
        async with stack:
            sandbox_id = await made(stack)
            await command(stack, sandbox_id, "echo kept > a")
        stack.end(2)
        assert stack.pods() == set()
        stack.start()
        async with stack:
            assert (await stack.call("GET", f"{ALL}/{sandbox_id}"))[1]["state"] == "stopped"
            await moved(stack, sandbox_id, "start", "running")
            assert (await command(stack, sandbox_id, "cat a"))["stdout"] == "kept\n"
    finally:
        stack.remove()
