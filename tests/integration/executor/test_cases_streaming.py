"""Cases of *Streaming output*, against a running executor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from executor.wire import NDJSON_TYPE, Exit, OutputFrame
from tests.support.executor_pod import PYTHON, ExecutorProcess, Pod, Streamed, connected, frames_of, until

FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]
MiB = 1 << 20


async def ndjson_of(pod: Pod, command: str | list[str], **fields: Any) -> list[dict[str, Any]]:
    async with pod.open_stream(command, accept=NDJSON_TYPE, **fields) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith(NDJSON_TYPE)
        text = await answer.read()
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("round", range(3))
async def test_output_arrives_whole_over_a_slow_link(executor: Pod, round: int) -> None:
    """ST01, with the link slow for the first megabyte only"""
    size = 14_888_896
    async with executor.open_stream("seq 1 2000000") as answer:
        got = Streamed()
        slow_bytes = 0

        async for event in frames_of(answer):
            got.add(event)
            if isinstance(event, OutputFrame) and slow_bytes < MiB:
                slow_bytes += len(event.data)
                await asyncio.sleep(len(event.data) / MiB)
    assert got.exit is not None
    assert (got.exit.exit_code, got.exit.truncated, got.exit.stdout_bytes) == (0, False, size)
    assert len(got.stdout) == size
    assert got.stdout.endswith(b"\n1999999\n2000000\n")


async def test_many_tiny_writes_all_arrive(executor: Pod) -> None:
    """ST03"""
    for _ in range(4):
        got = await executor.stream("dd if=/dev/zero bs=1 count=500000 2>/dev/null")
        assert got.exit is not None
        assert (len(got.stdout), got.exit.stdout_bytes, got.exit.exit_code) == (500_000, 500_000, 0)


async def test_an_exit_event_comes_only_after_the_process_is_gone(executor: Pod) -> None:
    """ST05, with a second of lines instead of five minutes"""

    async def watch(number: int) -> None:
        command = f"for i in $(seq 40); do echo '{{\"n\": {number}}}'; sleep 0.025; done; exit {number}"
        async with executor.open_stream(command) as answer:
            got = Streamed()
            async for event in frames_of(answer):
                got.add(event)
                if isinstance(event, Exit):
                    assert event.pid is not None
                    assert not Path(f"/proc/{event.pid}").exists(), "an exit event for a living process"
        assert got.exit is not None
        assert got.exit.exit_code == number
        assert [json.loads(line) for line in got.stdout.splitlines()] == [{"n": number}] * 40

    await asyncio.gather(*(watch(number) for number in range(20)))


async def test_a_stream_that_breaks_off_has_no_exit_event(fresh_executor: FreshExecutor) -> None:
    """ST07: an executor that is killed, in the middle of a stream"""
    with fresh_executor() as process:
        async with connected(process) as pod, pod.open_stream("echo first; sleep 300.0701") as answer:
            got = Streamed()

            async def read() -> None:
                async for event in frames_of(answer):
                    got.add(event)
                    if got.stdout:
                        os.kill(process.pid, signal.SIGKILL)

            with pytest.raises(aiohttp.ClientError):
                await read()
            assert got.stdout == b"first\n"
            assert got.exit is None
        left = process.descendants
        process.process.wait(20)
        await until(lambda: not left(), "the helpers and the command end with their executor")


async def test_ndjson_has_exactly_one_terminal_event_and_says_all(executor: Pod) -> None:
    """ST07"""
    events = await ndjson_of(executor, "echo out; sleep 0.05; echo err >&2; exit 4")
    kinds = [event["type"] for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "exit"
    assert kinds.count("exit") == 1
    end = events[-1]
    assert (end["exit_code"], end["reason"], end["stdout_bytes"], end["stderr_bytes"]) == (4, "exited", 4, 4)
    assert end["id"] == events[0]["id"]
    out = [event for event in events if event["type"] == "stdout"]
    assert [(one["offset"], one["end_offset"], one["text"]) for one in out] == [(0, 4, "out\n")]


async def test_after_a_dropped_stream_the_outcome_and_output_wait_under_the_id(executor: Pod) -> None:
    """ST07"""
    async with executor.open_stream("echo first; sleep 0.3; echo second; exit 6", id="st07") as answer:
        async for event in frames_of(answer):
            if isinstance(event, OutputFrame):
                answer.close()
                break
    info = await executor.ended("st07")
    assert (info["exit_code"], info["reason"]) == (6, "exited")
    assert (await executor.output("st07")).body == b"first\nsecond\n"
    assert (await executor.output("st07", offset=6)).body == b"second\n"


async def test_an_offset_beyond_the_end_gets_nothing_and_the_current_offset(executor: Pod) -> None:
    """ST09"""
    id = await executor.start("echo hello; sleep 300.0901")
    await until_size(executor, id, 6)
    for offset in (6, 7, 10**9, 1 << 60):
        reply = await executor.output(id, offset=offset)
        assert (reply.status, reply.body, reply.headers["Sandbox-Output-Offset"]) == (200, b"", "6")
    for text in ("-1", "x", "1e3", str(1 << 63)):
        assert (await executor.call("GET", f"/v1/processes/{id}/output?offset={text}")).status == 400
    await executor.call("DELETE", f"/v1/processes/{id}")


async def test_output_rotated_out_is_a_gap_and_nothing_comes_twice(executor: Pod) -> None:
    """ST09"""
    size = 100 * MiB
    id = await executor.start([PYTHON, "-c", NUMBERED, str(size)])
    info = await executor.ended(id)
    assert (info["exit_code"], info["stdout_bytes"], info["truncated"]) == (0, size, True)
    reply = await executor.output(id, offset=0)
    first = int(reply.headers["Sandbox-Output-Offset"])
    assert 0 < first <= size - 64 * MiB
    got = bytearray(reply.body)
    while True:
        reply = await executor.output(id, offset=first + len(got))
        assert int(reply.headers["Sandbox-Output-Offset"]) == first + len(got)
        if not reply.body:
            break
        got += reply.body
    assert first + len(got) == size
    aligned = -first % 16
    numbers = [int(got[at : at + 15]) for at in range(aligned, len(got) - 15, 16 * 4096)]
    assert numbers == [(first + at) // 16 for at in range(aligned, len(got) - 15, 16 * 4096)]
    follow = await executor.output(id, offset=size - 32, follow="true")
    assert follow.body == got[-32:]
    await executor.call("DELETE", f"/v1/processes/{id}")


NUMBERED = """
import sys
size = int(sys.argv[1]) // 16
for at in range(0, size, 65536):
    sys.stdout.write("".join(f"{n:015d}\\n" for n in range(at, min(size, at + 65536))))
"""


async def until_size(pod: Pod, id: str, size: int) -> None:
    for _ in range(1500):
        if (await pod.info(id))["stdout_bytes"] >= size:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"process {id} never wrote {size} bytes")


async def test_a_follower_gets_output_as_it_comes_until_the_end(executor: Pod) -> None:
    """ST09"""
    id = await executor.start("echo one; read x; echo two")
    await until_size(executor, id, 4)
    follow = asyncio.create_task(executor.output(id, offset=2, follow="true"), name="follow")
    twin = asyncio.create_task(executor.output(id, follow="true"), name="follow-twin")
    await executor.call("POST", f"/v1/processes/{id}/stdin", b"\n")
    assert (await follow).body == b"e\ntwo\n"
    assert (await twin).body == b"one\ntwo\n"


async def test_a_large_answer_is_whole_and_in_order(executor: Pod) -> None:
    """ST11"""
    size = sum(map(len, map(str, range(1, 1_500_001)))) + 1_500_000
    result = await executor.exec("seq 1 1500000; exit 9", max_output_bytes=16 * MiB)
    assert (result["exit_code"], result["truncated"], result["stdout_bytes"]) == (9, False, size)
    assert result["stdout"].split() == [str(n) for n in range(1, 1_500_001)]


async def test_an_answer_over_its_bound_keeps_head_and_tail_and_says_so(executor: Pod) -> None:
    """ST11"""
    size = sum(map(len, map(str, range(1, 1_500_001)))) + 1_500_000
    result = await executor.exec("seq 1 1500000", max_output_bytes=1000)
    assert (result["exit_code"], result["truncated"], result["stdout_bytes"]) == (0, True, size)
    assert result["stdout"].startswith("1\n2\n3\n")
    assert result["stdout"].endswith("1499999\n1500000\n")
    assert len(result["stdout"]) < 1200
    exact = await executor.exec("seq 1 1500000", max_output_bytes=1000, encoding="base64")
    assert len(exact["stdout_base64"]) <= 1340
    nothing = await executor.exec("echo hi", max_output_bytes=0)
    assert (nothing["stdout_bytes"], nothing["truncated"]) == (3, True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_caller_that_hangs_up_has_one_documented_outcome_each_time(executor: Pod, streamed: bool) -> None:
    """ST13: `continue` goes on to its end, `kill` ends the command, each of twenty times"""
    kind = "stream" if streamed else "wait"

    async def drop(number: int, on_disconnect: str) -> str:
        id = f"st13-{kind}-{on_disconnect}-{number}"
        command = f"trap '' HUP; echo up > up-{id}; sleep 1; touch d-{id}"
        body = {"command": command, "id": id, "on_disconnect": on_disconnect}
        headers = {"Accept": "application/vnd.sojourn.frames"} if streamed else {}
        call = asyncio.create_task(executor.call("POST", "/v1/exec", body, headers=headers), name=id)
        await until((executor.workspace / f"up-{id}").exists, f"{id} runs")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return id

    going_on = await asyncio.gather(*(drop(number, "continue") for number in range(20)))
    for id in going_on:
        info = await executor.ended(id)
        assert (info["exit_code"], info["reason"], info["descendants_left"]) == (0, "exited", False)
        assert (executor.workspace / f"d-{id}").exists()
    killed = await asyncio.gather(*(drop(number, "kill") for number in range(20)))
    for id in killed:
        info = await executor.ended(id)
        assert info["reason"] == "cancelled"
        assert not (executor.workspace / f"d-{id}").exists()
    lease = (await executor.call("GET", "/v1/lease")).json
    assert lease["running"] == 0


async def test_a_reader_that_stops_reading_holds_the_command_back_and_nothing_else(executor: Pod) -> None:
    """ST15"""
    before_kib = executor.process.status_kib("VmRSS")
    async with executor.open_stream(["yes"], id="st15") as answer:
        assert answer.status == 200
        seen, still = -1, 0
        for _ in range(400):  # until it stands still for more than a second: the command is held back
            now = (await executor.info("st15"))["stdout_bytes"]
            still = still + 1 if now == seen > 0 else 0
            if still == 5:
                break
            seen = now
            await asyncio.sleep(0.3)
        assert seen > 0
        results = await asyncio.gather(*(executor.exec(["echo", str(n)]) for n in range(20)))
        assert [one["stdout"] for one in results] == [f"{n}\n" for n in range(20)]
        assert (await executor.info("st15"))["stdout_bytes"] == seen, "the command went on although nobody reads"
        assert executor.process.status_kib("VmRSS") - before_kib < 64 * 1024
        taken = 0
        async for event in frames_of(answer):  # and it goes on, without a gap, once its caller reads on
            if isinstance(event, OutputFrame):
                assert event.offset == taken
                taken += len(event.data)
            if taken > seen + 4 * MiB:
                break
        answer.close()
    await executor.call("DELETE", "/v1/processes/st15")


async def test_a_background_process_is_never_held_back_and_its_memory_is_bounded(executor: Pod) -> None:
    """ST15"""
    before_kib = executor.process.status_kib("VmRSS")
    id = await executor.start(["head", "-c", str(300 * MiB), "/dev/zero"])
    info = await executor.ended(id)
    assert (info["stdout_bytes"], info["exit_code"]) == (300 * MiB, 0)
    assert executor.process.status_kib("VmRSS") - before_kib < 64 * 1024
    await executor.call("DELETE", f"/v1/processes/{id}")


async def test_a_gigabyte_streams_whole_in_bounded_memory(executor: Pod) -> None:
    """ST15, ST01"""
    size = 1 << 30
    before_kib = executor.process.status_kib("VmRSS")
    worst_kib = total = 0
    end: Exit | None = None
    async with executor.open_stream(["head", "-c", str(size), "/dev/zero"]) as answer:
        async for event in frames_of(answer):
            if isinstance(event, OutputFrame):
                assert event.offset == total
                total += len(event.data)
                if total % (64 * MiB) < len(event.data):
                    worst_kib = max(worst_kib, executor.process.status_kib("VmRSS"))
            elif isinstance(event, Exit):
                end = event
    assert end is not None
    assert (total, end.stdout_bytes, end.truncated, end.exit_code) == (size, size, False, 0)
    assert worst_kib - before_kib < 64 * 1024


async def test_merged_output_keeps_the_order_it_was_written_in(executor: Pod) -> None:
    """ST17"""
    command = "for i in 1 2 3; do echo o$i; echo e$i >&2; done"
    results = await asyncio.gather(*(executor.exec(command, merge_output=True) for _ in range(50)))
    assert {(one["stdout"], one["stderr"]) for one in results} == {("o1\ne1\no2\ne2\no3\ne3\n", "")}
    got = await executor.stream(command, merge_output=True)
    assert (got.stdout, got.stderr) == (b"o1\ne1\no2\ne2\no3\ne3\n", b"")
