"""A command's stream whatever its connections do: broken ones are taken up, and no end is made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from sojourn import AsyncClient, Exit, Gap, Output, Started, streams
from sojourn.errors import (
    APIError,
    CommandFailed,
    ExecutorUnreachable,
    InvalidCwd,
    OutcomeUnknown,
    SojournError,
    UnexpectedAnswer,
)
from tests.support.fake_manager import (
    ERROR,
    GAP,
    STDERR,
    STDOUT,
    FakeManager,
    Handler,
    drop,
    error,
    exited,
    frame,
    frames,
    outcome,
    output,
    started,
)

EXEC = "POST /sandbox/task/t/exec"
PROCESS = "GET /sandbox/task/t/processes/p1"
OUTPUT = "GET /sandbox/task/t/processes/p1/output"


def answers(*parts: bytes, cut: bool = False) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await frames(request, *parts, cut=cut)

    return handler


def says(value: object, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(value, status=status)

    return handler


def log_of(stdout: bytes, stderr: bytes = b"", first_kept: int = 0) -> Handler:
    """A process's output by offset; stdout's bytes before `first_kept` are no longer there."""

    async def handler(request: web.Request) -> web.StreamResponse:
        offset = int(request.query["offset"])
        log = stdout if request.query["stream"] == "stdout" else stderr
        if request.query["stream"] == "stdout":
            offset = max(offset, first_kept)
        return web.Response(body=log[offset:], headers={"Sandbox-Output-Offset": str(offset)})

    return handler


async def test_an_unbroken_stream_gives_start_output_and_exit(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), output(STDOUT, 0, b"a\xff"), output(STDERR, 0, b"e"), exited("p1", 3)))
    events = [event async for event in client.task("t").stream(["x"], id="p1")]
    assert [type(event) for event in events] == [Started, Output, Output, Exit]
    assert events[1] == Output("stdout", 0, b"a\xff")
    assert events[2] == Output("stderr", 0, b"e")


async def test_a_result_says_where_the_command_ran(fake: FakeManager, client: AsyncClient) -> None:
    where = {"sandbox_id": "s1", "pod_id": "pod1", "provisioned": "warm", "workspace": "fresh", "new_field": 1}
    gone = {"reason": "expired", "at": "2026-01-01T00:00:00Z"}
    fake.on(EXEC, answers(started("p1", **where, previous=gone), exited("p1")))
    result = await client.task("t").exec("x", id="p1")
    assert (result.where.sandbox_id, result.where.provisioned, result.where.workspace) == ("s1", "warm", "fresh")
    assert result.where.previous is not None
    assert result.where.previous.reason == "expired"


async def test_a_broken_stream_is_taken_up_where_it_broke(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), output(STDOUT, 0, b"one "), output(STDERR, 0, b"err "), cut=True))
    fake.on(PROCESS, says({"state": "ended", **outcome("p1", 5, stdout_bytes=8, stderr_bytes=8)}))
    fake.on(OUTPUT, log_of(b"one two ", b"err two "))
    result = await client.task("t").exec("x", id="p1")
    assert (result.stdout, result.stderr, result.exit_code) == ("one two ", "err two ", 5)
    assert {request.query["offset"] for request in fake.seen(OUTPUT)} == {"4"}
    assert len(fake.seen(EXEC)) == 1


async def test_a_stream_that_ends_without_its_exit_event_is_no_end(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), output(STDOUT, 0, b"partial")))
    fake.on(PROCESS, says({"state": "ended", **outcome("p1", 9, stdout_bytes=12)}))
    fake.on(OUTPUT, log_of(b"partial text"))
    result = await client.task("t").exec("x", id="p1")
    assert (result.stdout, result.exit_code) == ("partial text", 9)


async def test_a_command_whose_end_nobody_knows_is_an_error(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), output(STDOUT, 0, b"partial"), cut=True))
    with pytest.raises(OutcomeUnknown) as caught:
        await client.task("t").exec("x", id="p1")
    assert caught.value.details["id"] == "p1"
    assert caught.value.code == "outcome_unknown"


async def test_a_frame_cut_in_the_middle_is_taken_up_too(fake: FakeManager, client: AsyncClient) -> None:
    whole = output(STDOUT, 0, b"0123456789")
    fake.on(EXEC, answers(started("p1"), whole[:-4], cut=True))
    fake.on(PROCESS, says({"state": "ended", **outcome("p1", stdout_bytes=10)}))
    fake.on(OUTPUT, log_of(b"0123456789"))
    assert (await client.task("t").exec("x", id="p1")).stdout == "0123456789"


async def test_bytes_that_are_gone_after_a_break_come_as_a_gap(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), output(STDOUT, 0, b"ab"), cut=True))
    fake.on(PROCESS, says({"state": "ended", **outcome("p1", stdout_bytes=10)}))
    fake.on(OUTPUT, log_of(b"abcdefghij", first_kept=7))
    events = [event async for event in client.task("t").stream("x", id="p1")]
    assert Gap("stdout", 2, 5) in events
    assert Output("stdout", 7, b"hij") in events


async def test_a_gap_shows_in_the_text_and_as_truncated(fake: FakeManager, client: AsyncClient) -> None:
    gap = frame(GAP, {"type": "gap", "stream": "stdout", "offset": 2, "bytes": 5})
    fake.on(EXEC, answers(started("p1"), output(STDOUT, 0, b"ab"), gap, output(STDOUT, 7, b"hij"), exited("p1")))
    result = await client.task("t").exec("x", id="p1")
    assert result.truncated
    assert result.stdout == "ab\n[... 5 bytes dropped ...]\nhij"


async def test_a_request_that_broke_before_the_start_is_sent_again_under_the_same_id(
    fake: FakeManager, client: AsyncClient
) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        await drop(request)
        return web.Response()

    async def joins(request: web.Request) -> web.StreamResponse:
        return await frames(request, started(request.headers["Idempotency-Key"]), exited("any"))

    fake.on(EXEC, breaks, joins)
    await client.task("t").exec("x")
    keys = [request.headers["Idempotency-Key"] for request in fake.seen(EXEC)]
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert fake.bodies[0] == fake.bodies[1]


async def test_two_commands_have_two_ids(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("any"), exited("any")))
    await client.task("t").exec("x")
    await client.task("t").exec("x")
    first, second = fake.seen(EXEC)
    assert first.headers["Idempotency-Key"] != second.headers["Idempotency-Key"]


async def test_the_next_command_uses_the_same_connection(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("any"), output(STDOUT, 0, b"x"), exited("any")))
    for _ in range(3):
        await client.task("t").exec("x")
    assert list(fake.connections.values()) == [3]


async def test_a_provisioning_sandbox_is_waited_for(fake: FakeManager, client: AsyncClient) -> None:
    async def later(request: web.Request) -> web.StreamResponse:
        return error("provisioning", 503, retryable=True, headers={"Retry-After": "0"})

    fake.on(EXEC, later, later, answers(started("any"), exited("any")))
    assert (await client.task("t").exec("x")).ok
    assert len({request.headers["Idempotency-Key"] for request in fake.seen(EXEC)}) == 1


async def test_a_refusal_has_its_own_class_and_is_not_repeated(fake: FakeManager, client: AsyncClient) -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        return error("invalid_cwd", 400)

    fake.on(EXEC, refuses)
    with pytest.raises(InvalidCwd) as caught:
        await client.task("t").exec("x")
    assert (caught.value.status, caught.value.retryable, caught.value.details) == (400, False, {"id": "x"})
    assert len(fake.seen(EXEC)) == 1


async def test_an_error_in_the_stream_is_raised_as_its_class(fake: FakeManager, client: AsyncClient) -> None:
    lost = frame(ERROR, {"type": "error", "error": {"code": "outcome_unknown", "message": "m", "retryable": False}})
    fake.on(EXEC, answers(started("p1"), lost))
    with pytest.raises(OutcomeUnknown):
        await client.task("t").exec("x", id="p1")


async def test_a_retryable_error_in_the_stream_is_taken_up(fake: FakeManager, client: AsyncClient) -> None:
    body = {"code": "executor_unreachable", "message": "m", "retryable": True}
    fake.on(EXEC, answers(started("p1"), frame(ERROR, {"type": "error", "error": body})))
    fake.on(PROCESS, says({"state": "ended", **outcome("p1", 4)}))
    fake.on(OUTPUT, log_of(b""))
    assert (await client.task("t").exec("x", id="p1")).exit_code == 4


async def test_an_error_that_does_not_pass_is_raised_when_patience_ends(fake: FakeManager) -> None:
    async def fails(request: web.Request) -> web.StreamResponse:
        return error("executor_unreachable", 502, retryable=True)

    fake.on(EXEC, fails)
    async with AsyncClient(fake.address, "key", retry_sec=0.5) as impatient:
        with pytest.raises(ExecutorUnreachable):
            await impatient.task("t").exec("x")
    assert len(fake.seen(EXEC)) > 1


@pytest.mark.parametrize(
    "junk",
    [
        frame(STDOUT, b"short"),
        frame(1, b"{not json"),
        b"\x02\xff\xff\xff\xff",
        frame(6, {"type": "exit"}),
    ],
    ids=["output without an offset", "broken json", "a frame of 4 GiB", "an exit without a code"],
)
async def test_what_is_no_frame_is_said_so(fake: FakeManager, client: AsyncClient, junk: bytes) -> None:
    fake.on(EXEC, answers(started("p1"), junk, exited("p1")))
    with pytest.raises(UnexpectedAnswer):
        await client.task("t").exec("x", id="p1")


async def test_frames_of_a_later_version_are_passed_over(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), frame(0x7F, b"?"), frame(4, {"at": "now"}), exited("p1")))
    assert (await client.task("t").exec("x", id="p1")).ok


async def test_a_silent_connection_is_given_up_and_taken_up(
    fake: FakeManager, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SILENCE_SEC", 0.2)
    let_go = asyncio.Event()

    async def hangs(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(started("p1") + output(STDOUT, 0, b"one "))
        await let_go.wait()
        return response

    fake.on(EXEC, hangs)
    fake.on(PROCESS, says({"state": "ended", **outcome("p1", stdout_bytes=8)}))
    fake.on(OUTPUT, log_of(b"one two "))
    try:
        assert (await client.task("t").exec("x", id="p1")).stdout == "one two "
    finally:
        let_go.set()


async def test_output_over_the_bound_keeps_head_and_tail(fake: FakeManager, client: AsyncClient) -> None:
    pieces = [output(STDOUT, at * 1000, bytes([65 + at]) * 1000) for at in range(26)]
    fake.on(EXEC, answers(started("p1"), *pieces, exited("p1")))
    result = await client.task("t").exec("x", id="p1", max_output_bytes=3000)
    assert result.truncated
    assert result.stdout_raw == b"A" * 1000 + b"B" * 500 + b"Y" * 500 + b"Z" * 1000
    assert "[... 23000 bytes dropped ...]" in result.stdout


async def test_check_raises_with_the_whole_result(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), output(STDERR, 0, b"what went wrong"), exited("p1", 2)))
    with pytest.raises(CommandFailed, match="what went wrong") as caught:
        await client.task("t").exec("x", id="p1", check=True)
    assert caught.value.result.exit_code == 2


async def test_input_too_large_for_one_request_is_fed_in_pieces(fake: FakeManager, client: AsyncClient) -> None:
    closed = asyncio.Event()
    received = bytearray()

    async def runs(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(started("p1"))
        await closed.wait()
        await response.write(exited("p1"))
        await response.write_eof()
        return response

    async def takes(request: web.Request) -> web.StreamResponse:
        received.extend(await request.read())
        return web.Response(status=204)

    async def closes(request: web.Request) -> web.StreamResponse:
        closed.set()
        return web.Response(status=204)

    fake.on(EXEC, runs)
    fake.on("POST /sandbox/task/t/processes/p1/stdin", takes)
    fake.on("POST /sandbox/task/t/processes/p1/stdin/close", closes)
    data = bytes(range(256)) * (20 << 10)
    assert (await client.task("t").exec("x", id="p1", stdin=data)).ok
    assert bytes(received) == data


async def test_a_command_whose_input_breaks_off_is_killed_and_the_reason_raised(
    fake: FakeManager, client: AsyncClient
) -> None:
    killed = asyncio.Event()

    async def runs(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(started("p1"))
        await killed.wait()
        await response.write(exited("p1", 137))
        await response.write_eof()
        return response

    async def kills(request: web.Request) -> web.StreamResponse:
        killed.set()
        return web.Response(status=204)

    async def source() -> AsyncIterator[bytes]:
        raise OSError("the disk is gone")
        yield b""

    fake.on(EXEC, runs)
    fake.on("POST /sandbox/task/t/processes/p1/signal", kills)
    with pytest.raises(OSError, match="the disk is gone"):
        await client.task("t").exec("x", id="p1", stdin=source())


async def test_leaving_a_stream_early_leaves_no_task_behind(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), output(STDOUT, 0, b"x"), exited("p1")))
    before = len(asyncio.all_tasks())
    async with client.task("t").stream("x", id="p1") as events:
        assert isinstance(await anext(events), Started)
    assert len(asyncio.all_tasks()) <= before + 2  # the fake's own connection
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_events_can_be_read_once_only(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(EXEC, answers(started("p1"), exited("p1")))
    stream = client.task("t").stream("x", id="p1")
    await stream.aclose()
    with pytest.raises(SojournError):
        await stream.collect(10)


async def test_a_code_of_a_later_version_is_a_plain_api_error(fake: FakeManager, client: AsyncClient) -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        return error("from_the_future", 418)

    fake.on(EXEC, refuses)
    with pytest.raises(APIError) as caught:
        await client.task("t").exec("x")
    assert type(caught.value) is APIError
    assert caught.value.code == "from_the_future"
