"""What the executor holds after work."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from executor.output import JOIN_BELOW
from executor.wire import FRAMES_TYPE
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Streamed, connected, frames_of, until
from tests.support.raw_http import raw, request

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="nobody but root may look at the memory of an executor")
FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]


def pss_kib(process: ExecutorProcess) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


async def test_thousands_of_short_commands_leave_little_behind(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await asyncio.gather(*(pod.exec(["true"]) for _ in range(100)))
            before = pss_kib(process)
            for _ in range(20):
                await asyncio.gather(*(pod.exec(["true"]) for _ in range(100)))
            await until(lambda: pss_kib(process) - before < 9_000, "under 4.5 KiB for each outcome")


async def test_memory_that_large_outputs_took_is_given_back(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.exec(["true"])
            before = pss_kib(process)
            ids = [await pod.start("head -c 8000000 /dev/zero") for _ in range(12)]
            for id in ids:
                await pod.ended(id)
                await pod.call("DELETE", f"/v1/processes/{id}")
            await pod.exec(["true"])
            await until(lambda: pss_kib(process) - before < 25_000, "most of it given back")


async def test_many_noisy_commands_at_once_take_little_memory_and_their_answers_are_whole(
    fresh_executor: FreshExecutor,
) -> None:
    """S6, LM03: head and tail up to the cap, however short memory is."""
    cap = 4 << 20
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.call("GET", "/v1/lease")
            before = process.status_kib("VmRSS")
            flood = "printf 'the start'; head -c 20000000 /dev/zero | tr '\\0' x; sleep 0.5; echo the end"
            most, left = 0, 12

            async def watch() -> None:
                nonlocal most
                while left:
                    most = max(most, process.status_kib("VmRSS") - before)
                    await asyncio.sleep(0.02)

            async def run(encoding: str) -> None:
                nonlocal left
                answer = await pod.exec(flood, encoding=encoding, max_output_bytes=cap)
                left -= 1
                assert (answer["exit_code"], answer["truncated"]) == (0, True)
                assert answer["stdout_bytes"] == 20_000_017
                dropped = answer["stdout_dropped"]["bytes"]
                assert 0 <= dropped - (20_000_017 - cap) <= JOIN_BELOW, "small pieces are dropped whole"
                assert answer["stdout_dropped"]["offset"] == cap // 2
                if encoding == "base64":
                    text = base64.b64decode(answer["stdout_base64"]).decode()
                else:
                    head, mark, tail = answer["stdout"].partition(f"\n[... {dropped} bytes dropped ...]\n")
                    assert mark
                    assert len(head) == cap // 2
                    text = head + tail
                assert len(text) == 20_000_017 - dropped
                assert text.startswith("the startxx")
                assert text.endswith("xxthe end\n")

            await asyncio.gather(watch(), *(run(encoding) for encoding in ("text", "base64") for _ in range(6)))
            assert most < 80_000, "8 MiB while they run, and what is under way to the callers"


@pytest.mark.parametrize("way", ["short", "application"])
async def test_an_answer_of_any_size_asked_for_arrives_whole_in_constant_memory(
    fresh_executor: FreshExecutor, way: str
) -> None:
    """LM03: both streams, and characters of several bytes at every border"""
    script = "seq 1 3000000; yes '\u00e4\u20ac\U0001f600' | head -c 15000000 >&2"
    body = json.dumps({"command": script, "max_output_bytes": 64 << 20}).encode()
    extra = [] if way == "short" else ["X-Other: 1"]
    with fresh_executor() as process:
        async with connected(process) as pod, raw(pod) as connection:
            await pod.call("GET", "/v1/lease")
            before = process.status_kib("VmRSS")
            for _ in range(2):
                connection.send(request(pod, "POST /v1/exec", body, *extra))
                answer = (await connection.answer()).json
                assert (answer["exit_code"], answer["truncated"]) == (0, False)
                assert answer["stdout"] == "".join(f"{number}\n" for number in range(1, 3_000_001))
                lines = answer["stderr"].split("\n")
                assert answer["stderr_bytes"] == 15_000_000
                assert set(lines[:-1]) == {"\u00e4\u20ac\U0001f600"}
            assert process.status_kib("VmHWM") - before < 60_000


async def test_a_caller_that_leaves_in_the_middle_of_a_large_answer_costs_nothing(
    fresh_executor: FreshExecutor,
) -> None:
    """F30"""
    body = json.dumps({"command": "seq 1 3000000", "max_output_bytes": 64 << 20, "id": "numbers"}).encode()
    with fresh_executor() as process:
        async with connected(process) as pod:
            async with raw(pod) as connection:
                connection.send(request(pod, "POST /v1/exec", body))
                await connection.reader.readexactly(100_000)
            connection_line = "\nsojourn_connections 1.0\n"  # our own
            metrics = ""
            async with asyncio.timeout(60):
                while connection_line not in metrics:
                    metrics = (await pod.call("GET", "/metrics")).body.decode()
                    await asyncio.sleep(0.1)
            async with raw(pod) as again:
                again.send(request(pod, "POST /v1/exec", body))
                again.send(request(pod, "GET /healthz"))
                joined = await again.answer()
                assert (await again.answer()).json["status"] == "ok"
            assert joined.json["stdout"].endswith("\n3000000\n")
            files = process.open_files()
            await pod.call("DELETE", "/v1/processes/numbers")
            await until(lambda: process.open_files() < files, "its file is closed", 60)


async def test_who_joins_a_stream_that_went_on_to_disk_gets_no_more_than_memory_keeps(
    fresh_executor: FreshExecutor,
) -> None:
    body = json.dumps({"command": "seq 1 4000000", "id": "numbers"}).encode()
    with fresh_executor() as process:
        async with connected(process) as pod:
            async with raw(pod) as connection:
                connection.send(request(pod, "POST /v1/exec", body, f"Accept: {FRAMES_TYPE}"))
                await connection.reader.readexactly(1000)
            await pod.ended("numbers")
            async with raw(pod) as again:
                again.send(request(pod, "POST /v1/exec", body))
                answer = (await again.answer()).json
            assert answer["truncated"]
            assert answer["stdout"].endswith("\n4000000\n")
            assert len(answer["stdout"]) < 10 << 20


async def test_slow_callers_hold_their_commands_back_and_take_no_memory(fresh_executor: FreshExecutor) -> None:
    """F30, LM05: nothing of a caller's own stream is dropped, however many read slowly."""
    with fresh_executor() as process:
        async with connected(process) as pod, contextlib.AsyncExitStack() as stack:
            await pod.call("GET", "/v1/lease")
            before = process.status_kib("VmRSS")
            command = "head -c 12000000 /dev/zero"
            answers = [await stack.enter_async_context(pod.open_stream(command)) for _ in range(40)]
            most = 0
            for _ in range(40):
                await asyncio.sleep(0.05)
                most = max(most, process.status_kib("VmRSS") - before)
            assert most < 40_000, "8 MiB, and what is under way to the callers"
            assert (await pod.exec("echo quick"))["stdout"] == "quick\n"
            for answer in answers:
                got = Streamed()
                async for event in frames_of(answer):
                    got.add(event)
                assert got.exit is not None
                assert got.exit.exit_code == 0, (got.exit, got.stderr)
                assert (len(got.stdout), got.exit.truncated) == (12_000_000, False)
                most = max(most, process.status_kib("VmRSS") - before)
            assert most < 170_000, "and 64 MiB of ended ones"


async def test_background_commands_that_flood_keep_their_latest_output_within_the_budgets(
    fresh_executor: FreshExecutor,
) -> None:
    """S6: `yes`, for ever, several times over; a byte count that is exact."""
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.call("GET", "/v1/lease")
            before, most = process.status_kib("VmRSS"), 0
            ids = [await pod.start(["yes", f"{number}" * 50]) for number in range(9)]
            for _ in range(100):
                await asyncio.sleep(0.05)
                most = max(most, process.status_kib("VmRSS") - before)
            assert (await pod.exec("echo quick"))["stdout"] == "quick\n"
            for id in ids:
                await pod.call("POST", f"/v1/processes/{id}/signal", {"signal": "KILL"})
                ended = await pod.ended(id)
                assert ended["stdout_bytes"] > 1_000_000
                last = await pod.output(id, offset=ended["stdout_bytes"] - 1000)
                assert len(last.body) == 1000
            assert most < 60_000
