"""Callers that hang up in the middle: fault F29. Nothing half done is seen, and nothing of theirs is kept."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from executor.wire import FRAMES_TYPE, NDJSON_TYPE
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected, running_executor, until
from tests.support.raw_http import raw, request

pytestmark = [pytest.mark.timeout(120)]
SOON_SEC = 20.0  # a second, with slack for a machine that does other work
ROUNDS = 20


@pytest.fixture(scope="module")
def own_process() -> Iterator[ExecutorProcess]:
    """One that nobody else has connections to: its descriptors are counted."""
    with running_executor() as process:
        yield process


@pytest.fixture
async def pod(own_process: ExecutorProcess) -> AsyncIterator[Pod]:
    async with connected(own_process) as one:
        (one.workspace / "large").write_bytes(b"x" * (64 << 20))
        await one.call("GET", "/v1/files/stat?path=large")
        yield one


async def metric(pod: Pod, name: str) -> float:
    text = (await pod.call("GET", "/metrics")).body.decode()
    return float(text.split(f"\n{name} ")[1].split("\n")[0])


def descriptors(pod: Pod) -> int:
    return len(os.listdir(f"/proc/{pod.pid}/fd"))


async def hang_up(pod: Pod, *sent: bytes, read: int = 0) -> None:
    async with raw(pod) as connection:
        for piece in sent:
            connection.send(piece)
            await connection.writer.drain()
        async with asyncio.timeout(30):
            if read:
                await connection.reader.readexactly(read)
            else:
                await asyncio.sleep(0.02)


async def baseline(pod: Pod, before: int) -> None:
    """Operations, connections and descriptors are what they were, soon after the last has hung up."""
    began = time.monotonic()
    while await metric(pod, "sojourn_operations") or await metric(pod, "sojourn_connections") > 1:
        assert time.monotonic() - began < SOON_SEC, "a call goes on though its caller has gone"
        await asyncio.sleep(0.05)
    if IS_ROOT:
        await until(lambda: descriptors(pod) <= before, "descriptors are back", SOON_SEC)


def start_of(pod: Pod) -> int:
    return descriptors(pod) if IS_ROOT else 0


async def test_an_upload_that_breaks_off_leaves_what_was_there_and_no_part(pod: Pod) -> None:
    """F29"""
    (pod.workspace / "kept").write_bytes(b"as it was")
    before = start_of(pod)
    put = request(pod, "PUT /v1/files?path=kept", length=1 << 20)
    chunked = request(pod, "PUT /v1/files?path=new", None, "Transfer-Encoding: chunked")
    archive = request(pod, "PUT /v1/archive?path=unpacked", length=1 << 20)
    for _ in range(ROUNDS):
        await hang_up(pod, put, b"z" * 500_000)
        await hang_up(pod, chunked, b"10000\r\n" + b"z" * 65_536 + b"\r\n")
        await hang_up(pod, archive, b"\0" * 500_000)
    await baseline(pod, before)
    assert (pod.workspace / "kept").read_bytes() == b"as it was"
    await until(
        lambda: sorted(path.name for path in pod.workspace.iterdir()) == ["kept", "large"],
        "no part of a file is left",
        SOON_SEC,
    )


@pytest.mark.parametrize("path", ["/v1/files?path=large", "/v1/archive?path=."])
async def test_a_download_that_is_not_wanted_any_more_ends(pod: Pod, path: str) -> None:
    """F29"""
    before = start_of(pod)
    for _ in range(ROUNDS):
        await hang_up(pod, request(pod, f"GET {path}"), read=100_000)
    await baseline(pod, before)


@pytest.mark.parametrize("accept", [FRAMES_TYPE, NDJSON_TYPE, "text/event-stream"])
async def test_a_stream_that_nobody_follows_any_more_ends_and_its_command_as_it_was_asked(
    pod: Pod, accept: str
) -> None:
    """F29: by `on_disconnect`"""
    before = start_of(pod)
    ids = []
    for number in range(ROUNDS):
        policy = "kill" if number % 2 else "continue"
        ids.append(f"{policy}-{number}-{accept[-3:]}")
        body = {"command": "echo here; sleep 2; exit 7", "id": ids[-1], "on_disconnect": policy}
        await hang_up(pod, request(pod, "POST /v1/exec", json.dumps(body).encode(), f"Accept: {accept}"), read=200)
    for id in ids:
        ended = await pod.ended(id)
        assert (ended["exit_code"] == 7) is id.startswith("continue"), ended
        assert ended["reason"] == ("exited" if id.startswith("continue") else "cancelled")
    await baseline(pod, before)


@pytest.mark.parametrize(
    "line",
    ["GET /v1/usage/stream?interval_sec=1", "GET /v1/files/watch", "GET /v1/processes/slow?wait_sec=600",
     "GET /v1/processes/slow/output?follow=true"],
)  # fmt: skip
async def test_whoever_waits_for_news_and_leaves_is_waited_for_no_more(pod: Pod, line: str) -> None:
    """F29"""
    await pod.start(["sleep", "600"], id="slow")
    try:
        before = start_of(pod)
        for _ in range(ROUNDS):
            await hang_up(pod, request(pod, line))
        await baseline(pod, before)
    finally:
        await pod.call("DELETE", "/v1/processes/slow")


async def test_nothing_of_all_that_is_in_the_log_as_a_failure(pod: Pod) -> None:
    assert "Traceback" not in pod.process.log_text(0)
    assert '"error"' not in Path(pod.log).read_text()


async def test_a_session_that_nobody_waited_for_and_that_has_no_name_is_ended(pod: Pod) -> None:
    """F29"""
    first = await pod.call("POST", "/v1/sessions", {})
    assert (await pod.call("DELETE", f"/v1/sessions/{first.json['id']}")).status == 204
    before = start_of(pod)
    for _ in range(ROUNDS):
        async with raw(pod) as connection:
            connection.send(request(pod, "POST /v1/sessions", b"{}"))
            await connection.writer.drain()
    none_seen = 0
    async with asyncio.timeout(60):
        while none_seen < 5:  # in a row: a shell that is being started may be there at the next look
            await asyncio.sleep(0.1)
            connections = await metric(pod, "sojourn_connections")
            sessions = (await pod.call("GET", "/v1/sessions")).json["sessions"]
            none_seen = none_seen + 1 if connections <= 1 and not sessions else 0
    if IS_ROOT:  # a session holds some five
        await until(lambda: descriptors(pod) < before + ROUNDS, "descriptors are back", SOON_SEC)
