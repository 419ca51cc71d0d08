"""Cases of *Terminals*, against a running executor."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from executor.wire import CLOSE_DONE, CLOSE_STALLED, CLOSE_TAKEN_OVER, PROTOCOL
from tests.support.executor_pod import ExecutorProcess, Pod, connected, until
from tests.support.sockets import LONG_SEC, Socket, socket_at

FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]


async def open_terminal(pod: Pod, command: str | list[str] | None = None, **fields: Any) -> str:
    reply = await pod.call("POST", "/v1/terminals", {"command": command, **fields})
    assert reply.status == 201, reply.body
    return str(reply.json["id"])


def at(pod: Pod, id: str, query: str = "", *, answers: bool = True) -> AbstractAsyncContextManager[Socket]:
    headers = {"Authorization": f"Bearer {pod.token}"}
    return socket_at(pod.session, f"{pod.url}/v1/terminals/{id}{query}", headers, answers=answers)


async def state(pod: Pod, id: str) -> dict[str, Any]:
    reply = await pod.call("GET", f"/v1/terminals/{id}")
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    return found


async def whole(pod: Pod, command: str | list[str], **fields: Any) -> Socket:
    """A terminal's process from its start to its end."""
    async with at(pod, await open_terminal(pod, command, **fields)) as socket:
        await socket.to_end()
    assert (socket.exit is not None, socket.close_code) == (True, CLOSE_DONE)
    return socket


async def end(pod: Pod, id: str) -> None:
    assert (await pod.call("DELETE", f"/v1/terminals/{id}")).status == 204


async def test_a_process_finds_a_whole_terminal(any_tier: Pod) -> None:
    socket = await whole(any_tier, 'tty; test -t 0 && test -t 1 && test -t 2 && echo all; echo "$TERM"; exit 7')
    lines = socket.stdout.decode().split("\r\n")
    assert re.fullmatch(r"/dev/pts/\d+", lines[0])
    assert lines[1:3] == ["all", "xterm-256color"]
    assert socket.exit is not None
    assert (socket.exit.exit_code, socket.exit.reason) == (7, "exited")


async def test_the_terminal_belongs_to_the_command_user(any_tier: Pod) -> None:
    socket = await whole(any_tier, 'stat -c "%u %a" "$(tty)"; echo open > /dev/tty')
    lines = socket.stdout.decode().split()
    assert lines == [str(any_tier.user.pw_uid), "620", "open"]


async def test_a_line_longer_than_the_terminals_buffer_is_cut_as_every_terminal_cuts_it(any_tier: Pod) -> None:
    """PT01: documented for terminals; a command's stdin, over the same kind of connection, has no such limit."""
    id = await open_terminal(any_tier, "stty -echo; echo ready; head -n1 | wc -c")
    async with at(any_tier, id) as socket:
        await socket.until_text(b"ready")
        await socket.type(b"x" * 6000 + b"\n")
        await socket.to_end()
    assert socket.stdout.split()[-1] == b"4096"  # 4,095 characters and the newline (termios(3), canonical mode)
    headers = {"Authorization": f"Bearer {any_tier.token}"}
    async with socket_at(any_tier.session, any_tier.url + "/v1/exec", headers) as plain:
        await plain.start("head -n1 | wc -c")
        await plain.type(b"x" * 10_000 + b"\n")
        await plain.end_input()
        await plain.to_end()
    assert plain.stdout.split() == [b"10001"]
    long = await any_tier.exec("echo " + "y" * 10_000)
    assert long["stdout"] == "y" * 10_000 + "\n"


async def test_a_raw_terminal_takes_long_input_whole(executor: Pod) -> None:
    """PT01"""
    id = await open_terminal(executor, "stty raw -echo; echo ready; head -c 200000 | sha256sum | head -c 8; stty sane")
    async with at(executor, id) as socket:
        await socket.until_text(b"ready")
        await socket.type(b"x" * 200_000)
        await socket.to_end()
    known = (await executor.exec("head -c 200000 /dev/zero | tr '\\0' x | sha256sum | head -c 8"))["stdout"]
    assert known.encode() in socket.stdout


async def test_the_size_is_there_before_the_first_byte(any_tier: Pod) -> None:
    """PT03"""
    for _ in range(20):
        socket = await whole(any_tier, ["stty", "size"], cols=120, rows=40)
        assert socket.stdout == b"40 120\r\n"


@pytest.mark.parametrize("size", [
    (0, 24), (-1, 24), (70_000, 24), (1, 24), (80, 0), (80, -5), (80, 65_536), ("80", 24), (80.5, 24), (None, 24),
])  # fmt: skip
async def test_a_size_that_is_none_is_refused_and_changes_nothing(executor: Pod, size: tuple[Any, Any]) -> None:
    """PT05"""
    refused = await executor.call("POST", "/v1/terminals", {"command": ["true"], "cols": size[0], "rows": size[1]})
    assert (refused.status, refused.code) == (400, "invalid_request")
    id = await open_terminal(executor, "read x; stty size", cols=90, rows=30)
    async with at(executor, id) as socket:
        await socket.resize(*size)
        await socket.until(lambda: len(socket.errors) == 1, "the error")
        assert socket.errors[0].error.code == "invalid_request"
        await socket.type(b"\n")
        await socket.to_end()
    assert b"30 90\r\n" in socket.stdout
    assert ((await state(executor, id))["cols"], (await state(executor, id))["rows"]) == (90, 30)


async def test_a_resize_reaches_the_program(any_tier: Pod) -> None:
    id = await open_terminal(any_tier, "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done")
    async with at(any_tier, id) as socket:
        await socket.until_text(b"ready")
        await socket.resize(132, 43)
        await socket.until_text(b"43 132")
        assert (await state(any_tier, id))["cols"] == 132
    await end(any_tier, id)


async def test_job_control_works(any_tier: Pod) -> None:
    """PT07"""
    id = await open_terminal(any_tier, env={"PS1": "$ "})
    async with at(any_tier, id) as socket:
        await socket.until_text(b"$ ")
        await socket.type(b"sleep 50 & jobs\n")
        await socket.until(lambda: b"Running" in socket.stdout, "a job")
        await socket.type(b"fg\n")
        await socket.until(lambda: socket.stdout.count(b"sleep 50") >= 3, "fg's echo of the job")
        await _until_foreground(any_tier, b"sleep")
        await socket.type(b"\x1a")
        await socket.until(lambda: b"Stopped" in socket.stdout, "the stopped job")
        # `wait` returns at once for a job that still counts as stopped, and with one of those bash does not exit
        await socket.type(b"kill -9 %1; while [ -n \"$(jobs -s)\" ]; do sleep 0.1; done; echo do''ne\n")
        await socket.until_text(b"done")
        await socket.type(b"exit 4\n")
        await socket.to_end()
    assert b"job control" not in socket.stdout
    assert socket.exit is not None
    assert socket.exit.exit_code == 4


async def _until_foreground(pod: Pod, name: bytes) -> None:
    """Until a process of that name is in the foreground of its terminal."""

    def there() -> bool:
        for pid in pod.process.descendants():
            try:
                fields = Path(f"/proc/{pid}/stat").read_bytes()
            except OSError:
                continue
            rest = fields[fields.rindex(b")") + 2 :].split()
            if b"(" + name + b")" in fields and rest[2] == rest[5]:  # pgrp, tpgid
                return True
        return False

    await until(there, f"{name!r} in the foreground")


async def test_ctrl_c_interrupts_what_runs_and_not_the_shell(executor: Pod) -> None:
    id = await open_terminal(executor, env={"PS1": "$ "})
    async with at(executor, id) as socket:
        await socket.until_text(b"$ ")
        await socket.type(b"sleep 100\n")
        await _until_foreground(executor, b"sleep")
        await socket.type(b"\x03")
        await socket.type(b"echo co''de=$?\n")
        await socket.until_text(b"code=130")
        # Only there does the shell take the terminal for its own again; before that it would see no end of input.
        await socket.until(lambda: socket.stdout.rpartition(b"code=130")[2].endswith(b"$ "), "the next prompt")
        await socket.end_input()
        await socket.to_end()
    assert socket.exit is not None


async def test_who_comes_back_sees_the_screen_and_then_what_follows(any_tier: Pod) -> None:
    """PT09"""
    id = await open_terminal(any_tier, "seq 1 100; read x; seq 101 150; read x")
    expected = b"".join(b"%d\r\n" % number for number in range(1, 101))
    async with at(any_tier, id) as first:
        await first.until_text(b"100\r\n")
    async with at(any_tier, id) as second:
        await second.until(lambda: second.stdout == expected, "the replay")
        assert second.first["stdout"] == 0
        await second.type(b"\n")
        await second.until_text(b"150\r\n")
        await second.type(b"\n")
        await second.to_end()
    live = b"".join(b"%d\r\n" % number for number in range(101, 151))
    assert second.stdout == expected + b"\r\n" + live + b"\r\n"  # the newlines are the terminal's own echo
    async with at(any_tier, id) as late:  # after the end, too
        await late.to_end()
    assert (late.stdout, late.close_code) == (second.stdout, CLOSE_DONE)


async def test_an_offset_replays_exactly_what_is_missing(executor: Pod) -> None:
    """PT09, ST09"""
    id = await open_terminal(executor, "seq 1 1000; read x; seq 1001 2000; read x")
    async with at(executor, id) as first:
        await first.until_text(b"1000\r\n")
        first.ws._response.close()
    seen = len(first.stdout)
    async with at(executor, id, f"?offset={seen}") as second:
        await second.type(b"\n")
        await second.until_text(b"2000\r\n")
    whole_output = first.stdout + second.stdout
    numbers = [line for line in whole_output.split(b"\r\n") if line]
    assert numbers == [b"%d" % number for number in range(1, 2001)]
    async with at(executor, id, "?offset=99999999") as beyond:
        await beyond.type(b"\n")
        await beyond.to_end()
    assert (beyond.gaps, len(beyond.stdout)) == ([], 2)


async def test_replay_is_bounded_and_what_is_gone_is_told(executor: Pod) -> None:
    """PT09, PT11"""
    id = await open_terminal(executor, "seq 1 500000; echo en''d")
    while (await state(executor, id))["state"] != "ended":
        await asyncio.sleep(0.05)
    async with at(executor, id) as recent:
        await recent.to_end()
    assert 200_000 < len(recent.stdout) <= 256 << 10
    assert recent.gaps == []
    assert recent.stdout.endswith(b"500000\r\nend\r\n")
    async with at(executor, id, "?offset=0") as all_of_it:
        await all_of_it.to_end()
    assert all_of_it.gaps[0].offset == 0
    total = all_of_it.gaps[0].bytes + len(all_of_it.stdout)
    assert all_of_it.exit is not None
    assert total == all_of_it.exit.stdout_bytes == (await state(executor, id))["output_bytes"]
    assert all_of_it.exit.truncated
    assert len(all_of_it.stdout) <= 1 << 20


async def test_a_controller_that_pauses_holds_the_program_and_misses_nothing(executor: Pod) -> None:
    """PT11"""
    id = await open_terminal(executor, "read x; seq 1 400000; echo en''d")
    async with at(executor, id) as socket:
        await socket.type(b"\n")
        await socket.until(lambda: len(socket.stdout) > 1000, "the first output")
        await asyncio.sleep(2)  # the pause of the case
        before, still = -1, 0
        async with asyncio.timeout(LONG_SEC):
            while still < 5:
                await asyncio.sleep(0.1)
                now = (await state(executor, id))["output_bytes"]
                before, still = now, still + 1 if now == before else 0
        assert before < 3_000_000, "nothing holds the program back"
        await socket.to_end()
    assert socket.gaps == []
    numbers = socket.stdout.split(b"\r\n")[1:-2]
    assert numbers == [b"%d" % number for number in range(1, 400_001)]


async def test_a_viewer_that_pauses_holds_nobody_and_is_told_of_the_gap(executor: Pod) -> None:
    """PT11"""
    id = await open_terminal(executor, "read x; seq 1 1000000; echo en''d")
    async with at(executor, id) as controller, at(executor, id, "?mode=view") as viewer:
        await viewer.until(lambda: viewer.started is not None, "the viewer's start")
        await controller.type(b"\n")
        await controller.to_end()
        assert controller.gaps == []
        await viewer.to_end()
    assert viewer.close_code == CLOSE_DONE
    assert viewer.exit is not None
    assert sum(gap.bytes for gap in viewer.gaps) + len(viewer.stdout) == viewer.exit.stdout_bytes
    assert viewer.gaps
    assert viewer.exit.truncated


async def test_a_second_controller_takes_over_and_the_process_runs_on(any_tier: Pod) -> None:
    """PT13"""
    id = await open_terminal(any_tier, ["cat"])
    async with at(any_tier, id) as first:
        await first.type(b"one\n")
        await first.until(lambda: first.stdout.count(b"one") == 2, "the echo")
        async with at(any_tier, id) as second:
            await second.until(lambda: second.stdout.count(b"one") == 2, "the replay")
            await first.to_end()
            assert first.close_code == CLOSE_TAKEN_OVER
            assert first.exit is None
            assert (await state(any_tier, id))["state"] == "running"
            await second.type(b"two\n")
            await second.until(lambda: second.stdout.count(b"two") == 2, "the echo")
            await second.end_input()
            await second.to_end()
            assert second.close_code == CLOSE_DONE
            assert second.exit is not None
            assert second.exit.exit_code == 0


async def test_a_controller_that_does_not_read_is_taken_over_all_the_same(executor: Pod) -> None:
    """PT13, PT11"""
    id = await open_terminal(executor, "yes | head -n 3000000; echo en''d")
    async with at(executor, id) as stuck:
        await stuck.until(lambda: stuck.started is not None, "the start")
        await asyncio.sleep(0.3)
        async with at(executor, id, "?offset=0") as second:
            await second.to_end()
        assert second.stdout.endswith(b"end\r\n")
        assert second.exit is not None
        assert second.exit.stdout_bytes == 9_000_005


async def test_viewers_see_everything_and_type_nothing(executor: Pod) -> None:
    id = await open_terminal(executor, ["cat"])
    async with at(executor, id) as typist, at(executor, id, "?mode=view") as one, at(executor, id, "?mode=view") as two:
        await typist.type(b"hello\n")
        for viewer in (one, two):
            await viewer.until_text(b"hello\r\nhello\r\n")
        await one.type(b"intruder\n")
        await one.resize(100, 50)
        await one.signal("KILL")
        await one.until(lambda: len(one.errors) == 3, "three refusals")
        assert {each.error.code for each in one.errors} == {"conflict"}
        found = await state(executor, id)
        assert (found["connections"], found["controlled"], found["cols"]) == (3, True, 80)
        await typist.end_input()
        for socket in (typist, one, two):
            await socket.to_end()
            assert socket.exit is not None
            assert socket.close_code == CLOSE_DONE
        assert b"intruder" not in typist.stdout


async def test_leaving_a_terminal_leaves_its_process(any_tier: Pod) -> None:
    id = await open_terminal(any_tier, ["cat"])
    for cut in (False, True):
        async with at(any_tier, id) as socket:
            await socket.until(lambda: socket.started is not None, "the start")
            if cut:
                socket.ws._response.close()
    give_up = time.monotonic() + LONG_SEC
    while (await state(any_tier, id))["connections"] and time.monotonic() < give_up:
        await asyncio.sleep(0.02)
    found = await state(any_tier, id)
    assert (found["state"], found["controlled"]) == ("running", False)
    await end(any_tier, id)


async def test_delete_ends_the_whole_tree_and_tells_who_is_connected(any_tier: Pod) -> None:
    id = await open_terminal(any_tier, env={"PS1": "$ "})
    async with at(any_tier, id) as socket:
        await socket.until_text(b"$ ")
        await socket.type(b"(trap '' HUP TERM; sleep 300) & setsid sleep 300 & nohup sleep 300 >/dev/null &\n")
        await socket.type(b"sleep 300\n")
        await until(lambda: len(_named(any_tier, "sleep")) == 4, "four sleeps")
        mine = _named(any_tier, "sleep")
        deleting = asyncio.create_task(end(any_tier, id), name="delete")
        await socket.to_end()
        await deleting
    assert socket.exit is not None
    assert (socket.exit.reason, socket.close_code) == ("cancelled", CLOSE_DONE)
    assert not set(_named(any_tier, "sleep")) & set(mine)
    assert (await any_tier.call("GET", f"/v1/terminals/{id}")).code == "not_found"
    assert (await any_tier.call("DELETE", f"/v1/terminals/{id}")).code == "not_found"


def _named(pod: Pod, name: str) -> list[int]:
    found = []
    for pid, letter in pod.process.descendants().items():
        try:
            if letter not in "ZX" and Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
        except OSError:
            pass
    return found


async def test_the_same_id_joins_and_another_body_is_refused(executor: Pod) -> None:
    body = {"command": ["cat"], "id": "term-join"}
    first = await executor.call("POST", "/v1/terminals", body)
    again = await executor.call("POST", "/v1/terminals", body)
    other = await executor.call("POST", "/v1/terminals", body | {"cols": 100})
    assert (first.status, again.status, other.status) == (201, 200, 422)
    assert first.json["pid"] == again.json["pid"]
    listed = (await executor.call("GET", "/v1/terminals")).json["terminals"]
    assert "term-join" in [one["id"] for one in listed]
    await end(executor, "term-join")


@pytest.mark.parametrize(("body", "status", "code"), [
    ({"cwd": "/nope"}, 400, "invalid_cwd"), ({"user": "root"}, 403, "user_not_allowed"),
    ({"command": ""}, 400, "invalid_request"), ({"command": []}, 400, "invalid_request"),
    ({"env": {"A=B": "x"}}, 400, "invalid_request"), ({"nosuch": 1}, 400, "invalid_request"),
    ({"id": "../x"}, 400, "invalid_request"), ({"command": ["x" * 200_000]}, 413, "too_large"),
])  # fmt: skip
async def test_what_cannot_be_opened_is_refused_and_leaves_nothing(
    executor: Pod, body: dict[str, Any], status: int, code: str
) -> None:
    before = len((await executor.call("GET", "/v1/terminals")).json["terminals"])
    files = executor.process.open_files()
    reply = await executor.call("POST", "/v1/terminals", body)
    assert (reply.status, reply.code) == (status, code), reply.body
    assert len((await executor.call("GET", "/v1/terminals")).json["terminals"]) == before
    await until(lambda: executor.process.open_files() <= files + 1, "its descriptors are closed")


async def test_a_missing_program_says_so_on_the_terminal(executor: Pod) -> None:
    socket = await whole(executor, ["no-such-program-x"])
    assert b"not found" in socket.stdout
    assert socket.exit is not None
    assert socket.exit.exit_code == 127


async def test_the_upgrade_needs_token_terminal_and_a_known_mode(executor: Pod) -> None:
    """AU01"""
    id = await open_terminal(executor, ["cat"])
    bearer = {"Authorization": f"Bearer {executor.token}"}
    for path, headers, status in (
        (f"/v1/terminals/{id}", {}, 401), ("/v1/terminals/nosuch", bearer, 404),
        (f"/v1/terminals/{id}?mode=other", bearer, 400), (f"/v1/terminals/{id}?offset=-1", bearer, 400),
        (f"/v1/terminals/{id}?nosuch=1", bearer, 400),
    ):  # fmt: skip
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await executor.session.ws_connect(executor.url + path, headers=headers, protocols=(PROTOCOL,))
        assert refused.value.status == status
    await end(executor, id)


async def test_terminals_are_bounded(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            for _ in range(64):
                await open_terminal(pod, ["cat"])
            one_more = await pod.call("POST", "/v1/terminals", {"command": ["cat"]})
            assert (one_more.status, one_more.code) == (429, "rate_limited")


async def test_only_input_and_output_count_as_work(fresh_executor: FreshExecutor) -> None:
    """RE09: neither an open connection nor its heartbeats do"""
    with fresh_executor(env={"SOJOURN_HEARTBEAT_SEC": "1"}) as process:
        async with connected(process) as pod:
            id = await open_terminal(pod, ["cat"])
            async with at(pod, id) as socket:
                await socket.until(lambda: socket.heartbeats >= 3, "three heartbeats")
                lease = (await pod.call("GET", "/v1/lease")).json
                assert (lease["running"], lease["operations"], lease["terminals"]) == (0, 0, 1)
                assert lease["quiet_for_sec"] >= 1.2
                await socket.type(b"x\n")
                await socket.until_text(b"x\r\nx\r\n")
                assert (await pod.call("GET", "/v1/lease")).json["quiet_for_sec"] < lease["quiet_for_sec"]


async def test_a_quiet_terminal_does_not_keep_its_pod(fresh_executor: FreshExecutor) -> None:
    """RE09"""
    env = {"SOJOURN_HEARTBEAT_SEC": "0.5", "SOJOURN_QUIET_GRACE_SEC": "1"}
    with fresh_executor(env=env) as process:
        async with connected(process) as pod:
            id = await open_terminal(pod, ["cat"])
            await pod.call("GET", "/v1/lease", headers={"Sandbox-Lease-Sec": "3"})
            async with at(pod, id) as socket:
                await socket.to_end()  # the pod ends though the client answers every heartbeat
            assert socket.heartbeats > 2
        assert await asyncio.to_thread(process.process.wait, 30) == 0


async def test_a_silent_client_is_dropped_and_its_terminal_stays(fresh_executor: FreshExecutor) -> None:
    with fresh_executor(env={"SOJOURN_HEARTBEAT_SEC": "0.3"}) as process:
        async with connected(process) as pod:
            id = await open_terminal(pod, ["cat"])
            async with at(pod, id, answers=False) as silent:
                await silent.to_end()
            assert silent.close_code == CLOSE_STALLED
            assert (await state(pod, id))["state"] == "running"


async def test_the_pods_end_ends_its_terminals(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            id = await open_terminal(pod)
            async with at(pod, id) as socket:
                await socket.until(lambda: socket.started is not None, "the start")
                process.process.terminate()
                await socket.to_end()
            assert socket.exit is not None
            assert socket.exit.reason == "cancelled"
        assert await asyncio.to_thread(process.process.wait, 30) == 128 + signal.SIGTERM


async def test_nothing_is_left_of_many_terminals(fresh_executor: FreshExecutor) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await asyncio.gather(*(pod.exec("sleep 0.2") for _ in range(4)))
            await whole(pod, ["true"])
            files, before = process.open_files(), process.status_kib("VmRSS")
            for number in range(60):
                id = await open_terminal(pod, None if number % 3 else ["true"])
                async with at(pod, id) as socket:
                    await socket.until(lambda: socket.started is not None, "the start")
                await end(pod, id)
            await until(lambda: process.open_files() <= files, "descriptors closed")
            await until(lambda: len(process.descendants()) <= 2, "processes gone")
            assert process.status_kib("VmRSS") - before < 20 << 10
            assert os.path.exists(f"/proc/{process.pid}")
