"""A command over a WebSocket, against a running executor; and the cases of streams where they apply to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from executor.wire import CLOSE_DONE, CLOSE_STALLED, FRAME_PONG, PROTOCOL
from tests.support.executor_pod import PYTHON, ExecutorProcess, Pod, connected, until
from tests.support.sockets import LONG_SEC, Socket, socket_at

MiB = 1 << 20
FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]


def opened(pod: Pod, query: str = "", *, answers: bool = True) -> AbstractAsyncContextManager[Socket]:
    headers = {"Authorization": f"Bearer {pod.token}"}
    return socket_at(pod.session, pod.url + "/v1/exec" + query, headers, answers=answers)


async def run(pod: Pod, command: str | list[str], **fields: Any) -> Socket:
    """The whole of a command that needs no input; fails where it does not end with exit and 1000."""
    async with opened(pod) as socket:
        await socket.start(command, **{"stdin_open": False} | fields)
        await socket.to_end()
    assert socket.exit is not None
    assert socket.close_code == CLOSE_DONE
    return socket


async def test_output_exit_and_close_come_in_order(any_tier: Pod) -> None:
    socket = await run(any_tier, "echo out; echo err >&2; exit 3")
    assert (socket.stdout, socket.stderr) == (b"out\n", b"err\n")
    assert socket.exit is not None
    assert (socket.exit.exit_code, socket.exit.reason, socket.exit.stdout_bytes) == (3, "exited", 4)
    assert socket.started is not None
    assert socket.started.id == socket.exit.id
    assert type(socket.events[0]).__name__ == "Started"


async def test_input_goes_to_the_command_and_ends(any_tier: Pod) -> None:
    """IN11"""
    async with opened(any_tier) as socket:
        await socket.start(["sort"])
        await socket.type(b"pear\n")
        await socket.type(b"apple\n")
        await socket.end_input()
        await socket.to_end()
    assert socket.stdout == b"apple\npear\n"
    assert socket.close_code == CLOSE_DONE


async def test_input_and_output_alternate_as_in_a_conversation(executor: Pod) -> None:
    async with opened(executor) as socket:
        await socket.start(["cat"])
        said = b""
        for number in range(50):
            said += b"line %d\n" % number
            await socket.type(b"line %d\n" % number)
            await socket.until(lambda so_far=said: socket.stdout == so_far, "the echo")  # type: ignore[misc]
        await socket.end_input()
        await socket.to_end()
    assert socket.exit is not None
    assert socket.exit.exit_code == 0


async def test_a_frame_of_five_mebibytes_is_taken(any_tier: Pod) -> None:
    """LM09"""
    data = os.urandom(5 * MiB)
    async with opened(any_tier) as socket:
        await socket.start(["sha256sum"])
        await socket.type(data)
        await socket.end_input()
        await socket.to_end()
    assert socket.stdout.split()[0] == hashlib.sha256(data).hexdigest().encode()
    assert socket.close_code == CLOSE_DONE


async def test_a_frame_over_the_bound_ends_the_connection_and_the_command_goes_on(executor: Pod) -> None:
    """LM09"""
    async with opened(executor) as socket:
        await socket.start(["sh", "-c", "cat >/dev/null; echo end"], id="ws-lm09")
        await socket.until(lambda: socket.started is not None, "the start")
        with contextlib.suppress(ConnectionError):  # it is refused by its length, long before all of it was sent
            await socket.type(bytes(17 * MiB))
        await socket.to_end()
    assert socket.close_code in (1009, 1006)  # the latter where the reset overtakes the close frame
    assert (await executor.info("ws-lm09"))["state"] == "running"
    assert (await executor.call("POST", "/v1/processes/ws-lm09/stdin/close")).status == 204
    assert (await executor.ended("ws-lm09"))["exit_code"] == 0


async def test_much_input_to_a_slow_reader_arrives_whole_in_bounded_memory(fresh_executor: FreshExecutor) -> None:
    """IN07"""
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.exec("true")
            before = process.status_kib("VmRSS")
            async with opened(pod) as socket:
                slow = "import sys,time,hashlib; time.sleep(1.5); d=sys.stdin.buffer.read(); print(len(d))"
                await socket.start([PYTHON, "-c", slow])
                sending = asyncio.create_task(_type_much(socket, 64), name="input")
                await socket.to_end()
                await sending
            assert socket.stdout == b"%d\n" % (64 * MiB)
            assert process.status_kib("VmHWM") - before < 48 << 10


async def _type_much(socket: Socket, mebibytes: int) -> None:
    for _ in range(mebibytes):
        await socket.type(bytes(MiB))
    await socket.end_input()


async def test_a_command_that_leaves_without_reading_is_no_error(executor: Pod) -> None:
    """IN09"""
    async with opened(executor) as socket:
        await socket.start(["sh", "-c", "exec <&-; echo bye; sleep 0.2"])
        await socket.until_text(b"bye")
        for _ in range(20):
            await socket.type(bytes(65_536))
        await socket.to_end()
    assert socket.exit is not None
    assert (socket.exit.exit_code, socket.errors) == (0, [])


async def test_signals_reach_the_command(executor: Pod) -> None:
    async with opened(executor) as socket:
        await socket.start("trap 'echo caught' USR1; echo ready; while :; do sleep 0.05; done")
        await socket.until_text(b"ready")
        await socket.signal("USR1", "leader")
        await socket.until_text(b"caught")
        await socket.signal("KILL")
        await socket.to_end()
    assert socket.exit is not None
    assert (socket.exit.exit_code, socket.exit.signal) == (137, "SIGKILL")


async def test_frames_that_make_no_sense_are_answered_and_end_nothing(executor: Pod) -> None:
    async with opened(executor) as socket:
        await socket.start(["cat"])
        await socket.send(0x7F, b"x")
        await socket.signal("NOSUCH")
        await socket.send(0x13, b"not json")
        await socket.send(0x14, b'{"cols": 80, "rows": 24}')
        await socket.until(lambda: len(socket.errors) == 4, "four errors")
        assert {one.error.code for one in socket.errors} == {"invalid_request"}
        await socket.type(b"still here\n")
        await socket.end_input()
        await socket.to_end()
    assert (socket.stdout, socket.close_code) == (b"still here\n", CLOSE_DONE)


@pytest.mark.parametrize(("body", "code", "close"), [
    ({"command": "true", "cwd": "/nope"}, "invalid_cwd", 4400), ({"command": ""}, "invalid_request", 4400),
    ({"command": "true", "nosuch": 1}, "invalid_request", 4400), ([], "invalid_request", 4400),
    ({"command": "true", "user": "root"}, "user_not_allowed", 4403),
])  # fmt: skip
async def test_what_cannot_be_started_is_refused_with_its_error_and_close_code(
    executor: Pod, body: Any, code: str, close: int
) -> None:
    async with opened(executor) as socket:
        await socket.send_json(0x10, body)
        await socket.to_end()
    assert [one.error.code for one in socket.errors] == [code]
    assert (socket.started, socket.close_code) == (None, close)


async def test_another_first_frame_or_text_is_refused(executor: Pod) -> None:
    async with opened(executor) as socket:
        await socket.type(b"hello")
        await socket.to_end()
    assert socket.close_code == 4400
    for kind in ("text", "empty"):
        async with opened(executor) as socket:
            await (socket.ws.send_str("hello") if kind == "text" else socket.ws.send_bytes(b""))
            await socket.to_end()
        assert socket.close_code == 1003


async def test_the_upgrade_needs_the_token_and_the_subprotocol(executor: Pod) -> None:
    """AU01"""
    url = executor.url + "/v1/exec"
    for headers, protocols, status in (
        ({}, (PROTOCOL,), 401), ({"Authorization": "Bearer wrong"}, (PROTOCOL,), 401),
        ({"Authorization": f"Bearer {executor.token}"}, (), 400),
        ({"Authorization": f"Bearer {executor.token}"}, ("other.v1",), 400),
        ({"Authorization": f"Bearer {executor.token}", "Sandbox-Pod": "another"}, (PROTOCOL,), 409),
    ):  # fmt: skip
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await executor.session.ws_connect(url, headers=headers, protocols=protocols)
        assert refused.value.status == status
    plain = await executor.call("GET", "/v1/exec")
    assert (plain.status, plain.code) == (400, "invalid_request")


async def test_the_same_id_joins_and_another_body_is_refused(any_tier: Pod) -> None:
    id = f"ws-join-{any_tier.process.tier}"
    command = ["sh", "-c", "echo one; read line; echo got $line"]
    async with opened(any_tier) as first, opened(any_tier) as second:
        await first.start(command, id=id)
        await first.until_text(b"one\n")
        await second.start(command, id=id)
        await second.until_text(b"one\n")
        assert second.started is not None
        assert second.started.joined
        await second.type(b"hello\n")
        await asyncio.gather(first.to_end(), second.to_end())
        assert first.stdout == second.stdout == b"one\ngot hello\n"
        assert first.exit is not None
        assert second.exit is not None
        assert first.exit.pid == second.exit.pid
    joined = await any_tier.call("POST", "/v1/exec", {"command": command, "id": id})
    assert joined.json["stdout"] == "one\ngot hello\n"
    async with opened(any_tier) as other:
        await other.start(["true"], id=id)
        await other.to_end()
    assert ([one.error.code for one in other.errors], other.close_code) == (["idempotency_mismatch"], 4422)


async def test_a_broken_connection_goes_on_from_its_offsets(executor: Pod) -> None:
    """ST07, ST09"""
    command = ["sh", "-c", "seq 1 1000; read line; seq 1001 2000"]
    expected = b"".join(b"%d\n" % number for number in range(1, 2001))
    async with opened(executor) as first:
        await first.start(command, id="ws-resume")
        await first.until_text(b"1000\n")
        first.ws._response.close()  # the connection breaks without a word
    seen = len(first.stdout)
    async with opened(executor, f"?stdout_offset={seen}") as second:
        await second.start(command, id="ws-resume")
        await second.type(b"go\n")
        await second.to_end()
    assert first.stdout + second.stdout == expected
    assert second.first["stdout"] == seen
    async with opened(executor, "?stdout_offset=999999") as late:
        await late.start(command, id="ws-resume")
        await late.to_end()
    assert (late.stdout, late.gaps) == (b"", [])
    assert late.exit is not None


@pytest.mark.parametrize("how", ["close", "cut"])
async def test_leaving_kills_the_command_only_where_it_was_asked_for(executor: Pod, how: str) -> None:
    """ST13"""
    for decision in ("kill", "continue"):
        async with opened(executor) as socket:
            await socket.start(["sleep", "300"], id=f"ws-{how}-{decision}", on_disconnect=decision)
            await socket.until(lambda: socket.started is not None, "the start")
            if how == "cut":
                socket.ws._response.close()
    assert (await executor.ended(f"ws-{how}-kill"))["reason"] == "cancelled"
    assert (await executor.info(f"ws-{how}-continue"))["state"] == "running"
    assert (await executor.call("DELETE", f"/v1/processes/ws-{how}-continue")).status == 204


async def test_large_output_arrives_whole_to_a_slow_reader(executor: Pod) -> None:
    """ST01"""
    async with opened(executor) as socket:
        await socket.start("seq 1 2000000", stdin_open=False)
        while await socket.next() is not None:
            if len(socket.events) % 32 == 0:
                await asyncio.sleep(0.01)
    assert len(socket.stdout) == 14_888_896
    assert (socket.gaps, socket.close_code) == ([], CLOSE_DONE)


async def test_many_tiny_writes_arrive_whole(executor: Pod) -> None:
    """ST03"""
    for _ in range(5):
        socket = await run(executor, "dd if=/dev/zero bs=1 count=100000 2>/dev/null")
        assert len(socket.stdout) == 100_000


async def test_the_exit_comes_when_the_process_is_gone(executor: Pod) -> None:
    """ST05"""
    socket = await run(executor, "echo $$")
    assert not Path("/proc", socket.stdout.decode().strip()).exists()


async def test_merged_output_keeps_its_order(executor: Pod) -> None:
    """ST17"""
    for _ in range(10):
        socket = await run(executor, "for i in 1 2 3; do echo o$i; echo e$i >&2; done", merge_output=True)
        assert socket.stdout == b"o1\ne1\no2\ne2\no3\ne3\n"


async def test_a_client_that_stops_reading_costs_no_memory_and_holds_up_nobody(fresh_executor: FreshExecutor) -> None:
    """ST15"""
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.exec("true")
            before = process.status_kib("VmRSS")
            async with opened(pod) as socket:
                await socket.start("yes", stdin_open=False, id="ws-yes")
                await socket.until(lambda: socket.started is not None, "the start")
                held, still = -1, 0
                async with asyncio.timeout(LONG_SEC):  # until the command is held back
                    while still < 20:
                        assert (await pod.exec(["echo", "ok"]))["stdout"] == "ok\n"
                        await asyncio.sleep(0.05)
                        now = (await pod.info("ws-yes"))["stdout_bytes"]
                        held, still = now, still + 1 if now == held > 0 else 0
                assert process.status_kib("VmRSS") - before < 24 << 10
            await pod.call("DELETE", "/v1/processes/ws-yes")


async def test_a_silent_client_is_dropped_and_one_that_answers_stays(fresh_executor: FreshExecutor) -> None:
    with fresh_executor(env={"SOJOURN_HEARTBEAT_SEC": "1"}) as process:
        async with connected(process) as pod:
            async with opened(pod, answers=False) as silent, opened(pod) as lively:
                await silent.start(["cat"], id="silent")
                await lively.start("while :; do echo x; sleep 0.02; done", id="lively")
                await asyncio.gather(
                    silent.to_end(), lively.until(lambda: lively.heartbeats >= 5, "five heartbeats beside output")
                )
                assert silent.close_code == CLOSE_STALLED
                assert silent.heartbeats >= 2
                await lively.signal("KILL")
                await lively.to_end()
                assert lively.close_code == CLOSE_DONE
            assert (await pod.info("silent"))["state"] == "running"


async def test_a_client_that_only_holds_a_connection_is_dropped(fresh_executor: FreshExecutor) -> None:
    with fresh_executor(env={"SOJOURN_HEARTBEAT_SEC": "1"}) as process:
        async with connected(process) as pod, opened(pod) as socket:
            assert await socket.next() is None
            assert socket.close_code == CLOSE_STALLED


async def test_pongs_alone_are_no_work_and_no_input(executor: Pod) -> None:
    async with opened(executor) as socket:
        await socket.start(["cat"])
        for _ in range(10):
            await socket.send(FRAME_PONG)
        await socket.end_input()
        await socket.to_end()
    assert (socket.stdout, socket.errors) == (b"", [])


async def test_inline_input_is_all_that_the_command_gets(executor: Pod) -> None:
    async with opened(executor) as socket:
        await socket.start(["sh", "-c", "cat; sleep 0.3"], stdin_base64=base64.b64encode(b"inline").decode())
        await socket.type(b"more")
        await socket.to_end()
    assert socket.stdout == b"inline"
    assert [one.error.code for one in socket.errors] == ["conflict"]


async def test_nothing_is_left_of_many_sockets(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await asyncio.gather(*(run(pod, "sleep 0.2") for _ in range(4)))  # so that both spawn helpers are there
            files = process.open_files()
            for number in range(30):
                async with opened(pod) as socket:
                    await socket.start(["cat"], on_disconnect="kill")
                    await socket.until(lambda: socket.started is not None, "the start")
                    if number % 2:
                        socket.ws._response.close()
            await until(lambda: process.open_files() <= files, "descriptors closed", LONG_SEC)
            await until(lambda: not any(state != "Z" for state in _cats(process)), "commands gone")


def _cats(process: ExecutorProcess) -> list[str]:
    found = []
    for pid, state in process.descendants().items():
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == "cat":
                found.append(state)
        except OSError:
            pass
    return found
