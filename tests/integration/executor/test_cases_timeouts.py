"""Cases of *Timeouts*, against a running executor."""

from __future__ import annotations

import asyncio
import time

from tests.support.executor_pod import Pod


async def test_output_from_before_the_timeout_is_kept(any_tier: Pod) -> None:
    """TM01"""
    command, limit_sec = "echo before; echo warned >&2; sleep 60", 3
    id = await any_tier.start(command, timeout_sec=limit_sec)
    result, got = await asyncio.gather(
        any_tier.exec(command, timeout_sec=limit_sec), any_tier.stream(command, timeout_sec=limit_sec)
    )
    assert (result["stdout"], result["stderr"], result["timed_out"]) == ("before\n", "warned\n", True)
    assert got.exit is not None
    assert (got.stdout, got.exit.timed_out, got.exit.reason) == (b"before\n", True, "timeout")
    assert (await any_tier.ended(id))["timed_out"] is True
    assert (await any_tier.output(id)).body == b"before\n"


async def test_a_timeout_is_a_result_that_comes_soon_after_its_time(executor: Pod) -> None:
    """TM03, the executor's part"""
    began = time.monotonic()
    result = await executor.exec(["sleep", "100"], timeout_sec=1)
    assert 1 <= time.monotonic() - began < 60
    assert (result["timed_out"], result["reason"], result["exit_code"]) == (True, "timeout", 143)


async def test_waiting_for_a_process_ends_the_wait_and_not_the_process(executor: Pod) -> None:
    """TM05"""
    id = await executor.start(["sleep", "60"])
    reply = await executor.call("GET", f"/v1/processes/{id}?wait_sec=1")
    assert (reply.status, reply.json["state"], reply.json["exit_code"]) == (200, "running", None)
    await executor.call("DELETE", f"/v1/processes/{id}")
    killed = await executor.exec(["sleep", "60"], timeout_sec=0.5)
    assert killed["timed_out"] is True


async def test_a_wait_for_a_process_that_ends_is_over_with_it(executor: Pod) -> None:
    """TM05"""
    began = time.monotonic()
    id = await executor.start("sleep 0.3; exit 8")
    assert (await executor.ended(id, 60))["exit_code"] == 8
    assert time.monotonic() - began < 50


async def test_a_limit_acts_and_names_itself(executor: Pod) -> None:
    """TM07"""
    result = await executor.exec("sleep 1; echo ok", timeout_sec=60)
    assert (result["stdout"], result["timed_out"], result["message"]) == ("ok\n", False, None)
    result = await executor.exec("sleep 60; echo ok", timeout_sec=1)
    assert (result["stdout"], result["timed_out"]) == ("", True)
    assert "timed out after 1 s" in result["message"]


async def test_silence_has_a_limit_of_its_own(any_tier: Pod) -> None:
    """TM09"""
    began = time.monotonic()
    result = await any_tier.exec("echo a; sleep 100", no_output_timeout_sec=1, timeout_sec=60)
    assert 1 <= time.monotonic() - began < 50
    assert (result["stdout"], result["reason"]) == ("a\n", "no_output_timeout")
    assert "output" in result["message"]


async def test_a_command_that_keeps_talking_is_not_silent(executor: Pod) -> None:
    """TM09"""
    commands = [f"for i in $(seq 24); do echo $i{stream}; sleep 0.25; done" for stream in ("", " >&2")]
    for result in await asyncio.gather(
        *(executor.exec(command, no_output_timeout_sec=5, timeout_sec=90) for command in commands)
    ):
        assert (result["exit_code"], result["reason"], result["timed_out"]) == (0, "exited", False)


async def test_silence_is_limited_on_streams_and_in_the_background_too(executor: Pod) -> None:
    """TM09"""
    got = await executor.stream("echo a; sleep 100", no_output_timeout_sec=0.7)
    assert got.exit is not None
    assert got.exit.reason == "no_output_timeout"
    info = await executor.ended(await executor.start("echo a; sleep 100", no_output_timeout_sec=0.7))
    assert info["reason"] == "no_output_timeout"


async def test_a_timeout_is_told_by_its_own_field_and_not_by_an_exit_code(executor: Pod) -> None:
    """TM11"""
    late = await executor.exec(["sleep", "60"], timeout_sec=0.5)
    high = await executor.exec("exit 255")
    like_timeout = await executor.exec("exit 124")
    assert [one["timed_out"] for one in (late, high, like_timeout)] == [True, False, False]
    assert [one["exit_code"] for one in (high, like_timeout)] == [255, 124]
    assert [one["reason"] for one in (late, high, like_timeout)] == ["timeout", "exited", "exited"]


async def test_a_program_that_handles_term_and_exits_0_has_timed_out_all_the_same(executor: Pod) -> None:
    """TM11"""
    result = await executor.exec("trap 'exit 0' TERM; while :; do sleep 0.05; done", timeout_sec=0.7, grace_sec=30)
    assert (result["exit_code"], result["timed_out"], result["reason"]) == (0, True, "timeout")
