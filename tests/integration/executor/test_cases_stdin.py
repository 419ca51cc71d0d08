"""Cases of *Standard input*, against a running executor."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator

import pytest

from tests.support.executor_pod import PYTHON, Pod

MiB = 1 << 20


@pytest.mark.parametrize(("command", "code"), [
    (["cat"], 0), ("cat", 0), (["grep", "x"], 1), ([PYTHON, "-"], 0), (["sed", "s/a/b/"], 0), ("read line", 1),
])  # fmt: skip
async def test_a_command_without_input_finds_its_end(any_tier: Pod, command: str | list[str], code: int) -> None:
    """IN01"""
    result = await any_tier.exec(command, timeout_sec=60)
    assert (result["exit_code"], result["timed_out"], result["stdout"]) == (code, False, "")


async def test_a_streamed_command_without_input_finds_its_end_at_once(executor: Pod) -> None:
    """IN01"""
    got = await executor.stream(["cat"], timeout_sec=60)
    assert got.exit is not None
    assert (got.exit.exit_code, got.exit.timed_out) == (0, False)


async def test_a_command_that_ends_is_answered_though_its_input_stays_open(executor: Pod) -> None:
    """IN03"""
    began = time.monotonic()
    result = await executor.exec("echo hi", stdin_open=True, timeout_sec=60)
    assert (result["stdout"], result["exit_code"], result["timed_out"]) == ("hi\n", 0, False)
    assert time.monotonic() - began < 30


async def test_a_timeout_is_armed_while_input_stays_open(executor: Pod) -> None:
    """IN03"""
    result = await executor.exec(["cat"], stdin_open=True, timeout_sec=0.5)
    assert (result["timed_out"], result["reason"]) == (True, "timeout")


async def test_a_body_that_never_ends_holds_up_nobody_else(executor: Pod) -> None:
    """IN03: the body itself is what never ends"""
    ended = asyncio.Event()

    async def endless() -> object:
        yield b'{"command": ["echo", "hi"], '
        await ended.wait()

    call = asyncio.create_task(
        executor.session.post(
            executor.url + "/v1/exec", data=endless(), headers={"Authorization": f"Bearer {executor.token}"}
        ),
        name="endless",
    )
    try:
        results = await asyncio.gather(*(executor.exec(["echo", "ok"]) for _ in range(10)))
        assert {one["stdout"] for one in results} == {"ok\n"}
        assert not call.done()
    finally:
        call.cancel()
        ended.set()
        await asyncio.gather(call, return_exceptions=True)


async def test_input_reaches_the_command_and_ends(any_tier: Pod) -> None:
    """IN05"""
    result = await any_tier.exec(["cat"], stdin="hello\n", timeout_sec=60)
    assert (result["stdout"], result["exit_code"]) == ("hello\n", 0)
    raw = bytes(range(256)) * 3
    result = await any_tier.exec(["cat"], stdin_base64=base64.b64encode(raw).decode(), encoding="base64")
    assert base64.b64decode(result["stdout_base64"]) == raw


async def test_empty_input_is_an_end_of_input(executor: Pod) -> None:
    """IN05"""
    assert (await executor.exec("cat; echo end", stdin=""))["stdout"] == "end\n"


@pytest.mark.parametrize("lines", [*range(8188, 8195), 500_000])
async def test_large_input_arrives_whole(executor: Pod, lines: int) -> None:
    """IN07"""
    result = await executor.exec(["wc", "-l"], stdin="x\n" * lines, timeout_sec=90)
    assert result["stdout"].split() == [str(lines)]


async def test_large_input_comes_back_byte_for_byte_while_the_command_also_writes(executor: Pod) -> None:
    """IN07"""
    text = "".join(f"{n:07d}\n" for n in range(400_000))
    result = await executor.exec(["cat"], stdin=text, max_output_bytes=8 * MiB, timeout_sec=90)
    assert result["stdout"] == text


async def test_input_in_many_pieces_to_a_background_process_arrives_whole(executor: Pod) -> None:
    """IN07"""
    id = await executor.start(["sh", "-c", "sleep 0.2; exec wc -c"])
    for _ in range(40):
        assert (await executor.call("POST", f"/v1/processes/{id}/stdin", b"y" * 65_537)).status == 204
    assert (await executor.call("POST", f"/v1/processes/{id}/stdin/close")).status == 204
    assert (await executor.ended(id))["exit_code"] == 0
    assert (await executor.output(id)).body.split() == [str(40 * 65_537).encode()]


async def test_a_command_that_leaves_without_reading_is_no_error(executor: Pod) -> None:
    """IN09"""
    big, before = "z" * (10 * MiB), len(executor.log.read_bytes())
    for _ in range(10):
        result = await executor.exec(["true"], stdin=big)
        assert (result["exit_code"], result["reason"]) == (0, "exited")
    assert '"trace"' not in executor.process.log_text(before)


async def test_a_background_process_that_leaves_without_reading_is_no_error(executor: Pod) -> None:
    """IN09"""
    before = len(executor.log.read_bytes())
    for number in range(10):
        id = await executor.start(["sh", "-c", "sleep 0.05; exit 0"], id=f"in09-{number}")
        reply = await executor.call("POST", f"/v1/processes/{id}/stdin", b"z" * (4 * MiB))
        assert reply.status in (204, 409), reply.body
        info = await executor.ended(id)
        assert (info["exit_code"], info["reason"]) == (0, "exited")
    assert '"trace"' not in executor.process.log_text(before)


@pytest.mark.parametrize(
    ("script", "pause_sec"), [("sleep 100", 0.0), ("sleep 100", 600.0), ("exec <&-; sleep 100", 0.0)]
)
async def test_a_call_with_input_without_end_is_over_when_nobody_can_take_it_any_more(
    executor: Pod, script: str, pause_sec: float
) -> None:
    """IN03"""

    async def input_without_end() -> AsyncIterator[bytes]:
        while True:
            yield b"y" * 65_536
            await asyncio.sleep(pause_sec)

    id = await executor.start(["sh", "-c", script])
    sending = asyncio.create_task(
        executor.call("POST", f"/v1/processes/{id}/stdin", data=input_without_end()), name="sending"
    )
    if script == "sleep 100":
        await asyncio.wait([sending], timeout=0.3)
        assert (await executor.call("DELETE", f"/v1/processes/{id}")).status == 204
    async with asyncio.timeout(60):
        reply = await sending
    assert (reply.status, reply.code) == (409, "conflict")
    await executor.call("DELETE", f"/v1/processes/{id}")


async def test_input_can_be_ended_and_is_closed_then(any_tier: Pod) -> None:
    """IN11"""
    id = await any_tier.start(["sort"])
    for line in (b"pear\n", b"apple\n"):
        assert (await any_tier.call("POST", f"/v1/processes/{id}/stdin", line)).status == 204
    assert (await any_tier.call("POST", f"/v1/processes/{id}/stdin/close")).status == 204
    late = await any_tier.call("POST", f"/v1/processes/{id}/stdin", b"late\n")
    assert (late.status, late.code) == (409, "conflict")
    assert (await any_tier.ended(id))["exit_code"] == 0
    assert (await any_tier.output(id)).body == b"apple\npear\n"
    assert (await any_tier.call("POST", f"/v1/processes/{id}/stdin", b"x")).code == "conflict"
    assert (await any_tier.call("POST", f"/v1/processes/{id}/stdin/close")).status == 204
    assert (await any_tier.call("POST", "/v1/processes/nobody/stdin", b"x")).code == "not_found"
