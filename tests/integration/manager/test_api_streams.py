"""Commands as streams over HTTP: what comes, in which shape, and what happens where either side breaks off."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from executor import wire
from manager.api.wire import API_KEY_HEADER
from manager.errors import OutcomeUnknown, QuotaExceeded
from manager.executor_client import ForwardedResponse
from manager.services.tasks import Previous, SandboxFacts, TaskForward, TaskStream
from tests.support.api import Api, api
from tests.support.streams import connection

FACTS = SandboxFacts(
    sandbox_id="s1", pod_id="p1", provisioned="warm", workspace="fresh", previous=Previous(reason="expired", at="then")
)
STARTED = wire.Started(id="c1", pid=7)
EXIT = wire.Exit(
    id="c1", pid=7, exit_code=3, signal=None, reason="exited", timed_out=False, stdout_bytes=3, stderr_bytes=0,
    truncated=False, descendants_left=False, started_at="2026-01-01T00:00:00.000Z", duration_ms=1.0,
    usage=wire.ResourceUse(user_ms=0, system_ms=0, max_rss_bytes=0),
)  # fmt: skip
NDJSON = {"Accept": wire.NDJSON_TYPE}
FRAMES = {"Accept": wire.FRAMES_TYPE}


class Streaming:
    """Stands in for the task service: a stream whose events the test makes."""

    def __init__(self, events: Callable[[], AsyncIterator[wire.FrameEvent]]) -> None:
        self._events = events
        self.closed = asyncio.Event()
        self.requests: list[wire.ExecRequest] = []

    @asynccontextmanager
    async def stream(
        self, principal: Any, task_id: str, request: wire.ExecRequest, **terms: Any
    ) -> AsyncIterator[TaskStream]:
        self.requests.append(request)
        try:
            yield TaskStream(FACTS, "c1", self._events())
        finally:
            self.closed.set()


@pytest.fixture
async def surface() -> AsyncIterator[Api]:
    async with api() as made:
        yield made


def streams(surface: Api, events: Callable[[], AsyncIterator[wire.FrameEvent]]) -> Streaming:
    made = Streaming(events)
    surface.services.tasks = made  # type: ignore[assignment]
    return made


async def given(*events: wire.FrameEvent) -> AsyncIterator[wire.FrameEvent]:
    for event in events:
        yield event


async def exec_lines(surface: Api, **fields: Any) -> list[dict[str, Any]]:
    reply = await surface.call("POST", "/sandbox/task/t/exec", headers=NDJSON, body={"command": "x", **fields})
    assert reply.headers["Content-Type"] == wire.NDJSON_TYPE
    return [json.loads(line) for line in reply.body.splitlines()]


async def test_json_lines_begin_with_where_it_runs_and_end_with_one_exit(surface: Api) -> None:
    await surface.call("POST", "/sandbox/task/t/exec", body={"command": "true"})
    lines = await exec_lines(surface, command=["echo", "hello"])
    assert [line["type"] for line in lines] == ["started", "stdout", "exit"]
    assert lines[0]["pod_id"] == (await surface.world.binding("t")).pod
    assert (lines[0]["provisioned"], lines[0]["workspace"]) == ("bound", "kept")
    assert lines[1] == {"type": "stdout", "offset": 0, "end_offset": 5, "text": "hello"}
    assert (lines[2]["exit_code"], lines[2]["reason"]) == (0, "exited")


async def test_the_first_event_tells_how_the_last_pod_ended(surface: Api) -> None:
    streams(surface, lambda: given(STARTED, EXIT))
    started = (await exec_lines(surface))[0]
    assert started["previous"] == {"reason": "expired", "at": "then"}
    assert (started["id"], started["sandbox_id"], started["provisioned"]) == ("c1", "s1", "warm")


async def test_no_character_is_split_over_two_events_on_either_stream(surface: Api) -> None:
    halves = [
        wire.OutputFrame(stream, at, data)
        for at, data in ((0, b"\xe2"), (1, b"\x80\x94"))
        for stream in ("stdout", "stderr")
    ]
    streams(surface, lambda: given(STARTED, *halves, EXIT))
    lines = await exec_lines(surface)
    assert [(line["type"], line["text"]) for line in lines[1:-1]] == [("stdout", "—"), ("stderr", "—")]


async def test_gaps_and_heartbeats_are_passed_on(surface: Api) -> None:
    gap, beat = wire.Gap(stream="stdout", offset=0, bytes=9), wire.Heartbeat(at="now")
    streams(surface, lambda: given(STARTED, beat, gap, EXIT))
    assert [line["type"] for line in await exec_lines(surface)] == ["started", "heartbeat", "gap", "exit"]


async def test_frames_carry_the_same_with_exact_bytes(surface: Api) -> None:
    streams(surface, lambda: given(STARTED, wire.OutputFrame("stderr", 5, b"\xff\x00"), EXIT))
    reply = await surface.call("POST", "/sandbox/task/t/exec", headers=FRAMES, body={"command": "x"})
    frames = wire.FrameReader().feed(reply.body)
    assert [kind for kind, _ in frames] == [wire.FRAME_STARTED, wire.FRAME_STDERR, wire.FRAME_EXIT]
    started = json.loads(frames[0][1])
    assert (started["pod_id"], started["previous"]["reason"]) == ("p1", "expired")
    assert wire.decode_frame(*frames[1]) == wire.OutputFrame("stderr", 5, b"\xff\x00")


async def test_what_goes_wrong_before_the_first_event_is_an_answer_of_its_own(surface: Api) -> None:
    class Full(Streaming):
        @asynccontextmanager
        async def stream(self, *_: Any, **__: Any) -> AsyncIterator[TaskStream]:
            raise QuotaExceeded("all slots are taken", held=2, limit=2)
            yield  # pragma: no cover

    surface.services.tasks = Full(given)  # type: ignore[assignment]
    reply = await surface.call("POST", "/sandbox/task/t/exec", headers=NDJSON, body={"command": "x"})
    assert (reply.status, reply.code) == (429, "quota_exceeded")


@pytest.mark.parametrize(
    ("error", "code"),
    [(OutcomeUnknown("the pod broke off", id="c1"), "outcome_unknown"), (RuntimeError("inside"), "internal")],
)
@pytest.mark.parametrize("headers", [NDJSON, FRAMES], ids=["ndjson", "frames"])
async def test_what_goes_wrong_later_is_the_streams_last_event(
    surface: Api, error: Exception, code: str, headers: dict[str, str]
) -> None:
    async def breaking() -> AsyncIterator[wire.FrameEvent]:
        yield STARTED
        raise error

    streams(surface, breaking)
    reply = await surface.call("POST", "/sandbox/task/t/exec", headers=headers, body={"command": "x"})
    assert reply.status == 200
    if headers is NDJSON:
        last = json.loads(reply.body.splitlines()[-1])
    else:
        kind, payload = wire.FrameReader().feed(reply.body)[-1]
        assert kind == wire.FRAME_ERROR
        last = json.loads(payload)
    assert last["error"]["code"] == code
    assert "inside" not in last["error"]["message"]


async def test_a_stream_without_an_end_is_an_unknown_outcome_never_a_success(surface: Api) -> None:
    streams(surface, lambda: given(STARTED))
    last = (await exec_lines(surface))[-1]
    assert last["type"] == "error"
    assert (last["error"]["code"], last["error"]["details"]) == ("outcome_unknown", {"id": "c1"})


async def test_a_caller_that_hangs_up_closes_the_executors_stream(surface: Api) -> None:
    async def quiet() -> AsyncIterator[wire.FrameEvent]:
        yield STARTED
        await asyncio.Event().wait()

    made = streams(surface, quiet)
    async with surface.session.post(
        f"{surface.address}/sandbox/task/t/exec",
        headers=surface.as_role("member") | NDJSON,
        json={"command": "x", "on_disconnect": "kill"},
    ) as response:
        assert b"started" in await response.content.readline()
        assert not made.closed.is_set()
        response.close()
    async with asyncio.timeout(20):
        await made.closed.wait()
    assert made.requests[0].on_disconnect == "kill"


async def test_a_caller_that_does_not_read_holds_the_pod_back_and_bounds_the_memory(surface: Api) -> None:
    taken = 0

    async def endless() -> AsyncIterator[wire.FrameEvent]:
        nonlocal taken
        yield STARTED
        for at in range(0, 1 << 30, 65_536):
            taken = at
            yield wire.OutputFrame("stdout", at, b"y" * 65_536)
        yield EXIT

    made = streams(surface, endless)
    body = b'{"command": "yes"}'
    head = f"POST /sandbox/task/t/exec HTTP/1.1\r\nHost: x\r\nX-Api-Key: {surface.keys['member']}\r\n"
    opening = asyncio.open_connection("127.0.0.1", surface.port, limit=65_536)
    async with connection(opening) as (reader, writer):
        writer.write(f"{head}Accept: {wire.FRAMES_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readline()
        before = -1
        async with asyncio.timeout(60):
            while before != taken:  # until it stands still: half a second without a piece asked for
                before = taken
                await asyncio.sleep(0.5)
        assert 0 < taken < 64 << 20
        assert (await surface.call("GET", "/healthz", role=None)).status == 200
    async with asyncio.timeout(60):
        await made.closed.wait()


async def test_many_streams_at_once_each_get_their_own(surface: Api) -> None:
    async def one(number: int) -> str:
        async with surface.session.post(
            f"{surface.address}/sandbox/task/t{number % 3}/exec",
            headers=surface.as_role("member") | NDJSON,
            json={"command": ["echo", f"n{number}"]},
            timeout=aiohttp.ClientTimeout(total=60),
        ) as response:
            lines = [json.loads(line) async for line in response.content]
        return "".join(line["text"] for line in lines if line["type"] == "stdout")

    assert await asyncio.gather(*map(one, range(60))) == [f"n{number}" for number in range(60)]


# ── a key that is revoked meanwhile ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def short(surface: Api) -> tuple[dict[str, str], str]:
    """A key that will not last: its header, and its id."""
    made = await surface.call("POST", "/api/v1/keys", role="admin", body={"name": "short"})
    return {API_KEY_HEADER: made.json["key"]}, made.json["key_id"]


async def revoke(surface: Api, key_id: str) -> float:
    assert (await surface.call("DELETE", f"/api/v1/keys/{key_id}", role="admin")).status == 204
    return time.monotonic()


async def without_end() -> AsyncIterator[wire.FrameEvent]:
    yield STARTED
    await asyncio.Event().wait()


async def flood() -> AsyncIterator[wire.FrameEvent]:
    yield STARTED
    for offset in range(0, 1 << 40, 1 << 20):
        yield wire.OutputFrame("stdout", offset, bytes(1 << 20))


async def test_a_revoked_key_ends_its_open_streams_and_they_say_why(
    surface: Api, short: tuple[dict[str, str], str]
) -> None:
    """S22"""
    made = streams(surface, without_end)
    url = f"{surface.address}/sandbox/task/t/exec"
    async with surface.session.post(url, json={"command": "x"}, headers=short[0] | NDJSON) as response:
        assert json.loads(await response.content.readline())["type"] == "started"
        revoked_at = await revoke(surface, short[1])
        last = json.loads((await response.content.read()).splitlines()[-1])
    assert (last["type"], last["error"]["code"]) == ("error", "unauthenticated")
    assert made.closed.is_set()
    assert time.monotonic() - revoked_at < 15


async def test_a_revoked_key_cannot_hold_its_stream_open_by_reading_nothing(
    surface: Api, short: tuple[dict[str, str], str]
) -> None:
    made = streams(surface, flood)
    url = f"{surface.address}/sandbox/task/t/exec"
    async with surface.session.post(url, json={"command": "x"}, headers=short[0] | FRAMES):
        await revoke(surface, short[1])
        async with asyncio.timeout(20):
            await made.closed.wait()


async def test_a_revoked_key_ends_what_is_followed(surface: Api, short: tuple[dict[str, str], str]) -> None:
    """S22"""

    @asynccontextmanager
    async def followed(*_given: Any, **_terms: Any) -> AsyncIterator[TaskForward]:
        async def body() -> AsyncIterator[bytes]:
            yield b"first"
            await asyncio.Event().wait()

        yield TaskForward(FACTS, ForwardedResponse(200, {}, body()))

    made = streams(surface, without_end)
    made.forward = followed  # type: ignore[attr-defined]
    url = f"{surface.address}/sandbox/task/t/processes/p/output?follow=true"
    async with surface.session.get(url, headers=short[0]) as response:
        assert await response.content.readany() == b"first"
        revoked_at = await revoke(surface, short[1])
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    assert time.monotonic() - revoked_at < 15
