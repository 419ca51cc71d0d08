"""What a text may do to its shell and to others, and what a session's calls refuse, against a running executor."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support.executor_pod import ExecutorProcess, Pod, connected, processes_with, until
from tests.support.sessions import SessionOf, new_session, session_in

KEPT = [  # whatever these do, the shell and what it holds stay
    "exec >/dev/null", "exec >&- 2>&- <&-", "exec 0</etc/passwd", "readonly PS1 PWD IFS PATH HOME", "IFS=0123456789",
    "unset PATH HOME PWD IFS", "set -u; unset PWD", "alias command=false printf=false .=false", "set -o noclobber",
    "printf() { echo forged; }", "trap 'echo x' 52", "trap '' 52", "PROMPT_COMMAND='echo hi; echo e >&2'",
    "PS1='$(echo x)' PS0=x PS2=y", "mkdir d; cd d; rmdir ../d", "break 5", "LC_ALL=C LANG=", "POSIXLY_CORRECT=1",
    "IGNOREEOF=5", "read x", "cat", "kill -INT $$", "kill -TERM $$", "kill -QUIT $$", "umask 777", "wait 99999",
    "export BASH_ENV=/nope ENV=/nope", "exec 3>&1 4>&2", "trap 'echo t' TERM INT HUP EXIT", "return 5", "shift 9",
    "echo $((1/0))", "echo ${nope?bad}", "readonly r=1; r=2", "ulimit -f 0", "cd /nope", "> /", ". /nope",
    "{ echo; } </nope",
]  # fmt: skip
KEPT_BY_BASH = [
    "unset() { :; }; trap() { :; }; kill() { :; }; exit() { :; }", "eval() { :; }; builtin() { :; }", "set -n",
    "set -o posix",    "function .() { echo dot; }", "exec 255>&-", "exec {fd}>/dev/null", "shopt -u expand_aliases",
    "set -m; sleep 0.1 & fg",
    "trap 'echo d' DEBUG", "trap false ERR; set -E", "shopt -s failglob nullglob lastpipe", "set -o history; set -H",
    "logout", "ulimit -S -m 5", "coproc cat", "exec <<< 'echo pwned'", "enable -n printf", "history -c",
    "declare -i B; B=1",
]  # fmt: skip
LOST = [  # these take the shell away, or all that it can report with
    "exit 300", "kill -9 $$", "kill -HUP $$", "exec nosuchprogram", "exec /dev/null", "set -e; (exit 3)",
    "command() { :; }", "ulimit -n 3",
]  # fmt: skip
LOST_BY_BASH = ["set -r", "enable -n printf command", "trap 'exit 9' DEBUG", "shopt -s extdebug; trap false DEBUG"]


async def answers_as_new(session: SessionOf) -> bool:
    """Whether the next answer comes from a fresh shell; fails where it is not what it should be."""
    after = await session.exec("echo ok")
    assert (after["stdout"], after["stderr"], after["exit_code"]) == ("ok\n", "", 0)
    return bool(after["fresh_shell"])


@pytest.mark.parametrize("text", KEPT)
async def test_a_text_does_not_break_its_shell(session: SessionOf, text: str) -> None:
    await session.exec("A=kept")
    assert (await session.exec(text, timeout_sec=60))["ended"] is False
    assert await answers_as_new(session) is False
    assert await session.said("echo $A") == ("kept\n", "", 0)


@pytest.mark.parametrize("text", KEPT_BY_BASH)
async def test_a_text_does_not_break_bash(bash: SessionOf, text: str) -> None:
    await test_a_text_does_not_break_its_shell(bash, text)


@pytest.mark.parametrize("text", LOST)
async def test_a_text_that_takes_its_shell_away_is_answered_and_the_next_has_another(
    session: SessionOf, text: str
) -> None:
    result = await session.exec(text, timeout_sec=60)
    assert (result["ended"], result["timed_out"], result["exit_code"] > 0) == (True, False, True)
    assert await answers_as_new(session) is True
    assert await answers_as_new(session) is False


@pytest.mark.parametrize("text", LOST_BY_BASH)
async def test_a_text_that_takes_bash_away_is_answered(bash: SessionOf, text: str) -> None:
    await test_a_text_that_takes_its_shell_away_is_answered_and_the_next_has_another(bash, text)


async def test_a_trace_shows_the_text_and_nothing_of_ours(session: SessionOf) -> None:
    await session.exec("set -x")
    out, err, _code = await session.said("echo hi")
    assert (out, err.lstrip("+")) == ("hi\n", " echo hi\n")
    assert (await session.said("set +x; echo 1; "))[1].lstrip("+") == " set +x\n"


async def test_no_program_inherits_a_descriptor_of_ours(session: SessionOf) -> None:
    listed = (await session.exec("ls /proc/self/fd"))["stdout"].split()
    assert listed == ["0", "1", "2", "3"]  # 3 is the directory itself
    await session.exec("sleep 300 >/dev/null 2>&1 &")
    listed = (await session.exec("ls /proc/$!/fd; kill $!"))["stdout"].split()
    assert listed == ["0", "1", "2"]


async def test_the_environment_holds_nothing_of_ours(session: SessionOf) -> None:
    names = {line.partition("=")[0] for line in (await session.exec("env"))["stdout"].splitlines()}
    once = {line.partition("=")[0] for line in (await session.pod.exec("env"))["stdout"].splitlines()}
    assert names - once <= {"OLDPWD"}
    assert (await session.exec("echo $#$*"))["stdout"] == "0\n"


async def test_input_is_the_commands_alone(session: SessionOf) -> None:
    data = bytes(range(256)) * 2000
    result = await session.exec("cat", stdin_base64=base64.b64encode(data).decode(), encoding="base64")
    assert base64.b64decode(result["stdout_base64"]) == data
    assert await session.said("cat; read x; echo $?") == ("1\n", "", 0)
    assert await session.said("read a; read b; echo $b$a", stdin="1\n2\n") == ("21\n", "", 0)


async def test_merged_output_comes_in_the_order_it_was_written_in(session: SessionOf) -> None:
    text = "for i in 1 2 3; do echo o$i; echo e$i >&2; done"
    assert await session.said(text, merge_output=True) == ("o1\ne1\no2\ne2\no3\ne3\n", "", 0)
    assert await session.said(text) == ("o1\no2\no3\n", "e1\ne2\ne3\n", 0)


async def test_much_output_is_kept_to_its_limit_and_streamed_whole(session: SessionOf) -> None:
    text = "head -c 3000000 /dev/zero | tr '\\0' x"
    result = await session.exec(text, max_output_bytes=20)
    assert (result["stdout_bytes"], result["truncated"]) == (3_000_000, True)
    assert result["stdout"].startswith("xxxxxxxxxx\n[... 2999980 bytes dropped")
    assert len((await session.stream(text)).stdout) == 3_000_000


async def test_events_come_as_json_lines_too(session: SessionOf) -> None:
    events = await session.lines("echo a; sleep 1; echo b >&2; (exit 4)")
    assert [event["type"] for event in events] == ["started", "stdout", "stderr", "exit"]
    assert [event.get("text") for event in events[1:3]] == ["a\n", "b\n"]
    assert (events[-1]["exit_code"], events[-1]["ended"], events[-1]["fresh_shell"]) == (4, False, False)


async def test_a_streamed_command_that_ends_the_shell_says_so(session: SessionOf) -> None:
    got = await session.stream("echo out; exit 5")
    assert got.stdout == b"out\n"
    assert got.exit is not None
    assert (got.exit.exit_code, got.exit.ended) == (5, True)


async def test_an_id_runs_once_and_its_outcome_waits_under_it(session: SessionOf) -> None:
    id = f"once-{session.id}"
    first, second = await asyncio.gather(
        session.exec("echo x >> times; sleep 0.2; echo done", id=id),
        session.exec("echo x >> times; sleep 0.2; echo done", id=id),
    )
    assert first == second
    times = session.pod.workspace / "times"
    assert times.read_text() == "x\n"
    times.unlink()
    assert (await session.call("echo other", id=id)).code == "idempotency_mismatch"
    assert (
        await session.pod.call("POST", "/v1/exec", {"command": "echo done", "id": id})
    ).code == "idempotency_mismatch"
    assert (await session.pod.info(id))["state"] == "ended"
    assert (await session.pod.output(id)).body == b"done\n"


async def test_deleting_a_running_command_as_a_process_keeps_the_session(session: SessionOf) -> None:
    id = f"del-{session.id}"
    running = asyncio.create_task(session.exec("A=1; sleep 100", id=id, grace_sec=20))
    await _until_running(session, id)
    assert (await session.pod.call("DELETE", f"/v1/processes/{id}")).status == 204
    result = await running
    assert (result["reason"], result["ended"]) == ("cancelled", False)
    assert await session.said("echo $A") == ("1\n", "", 0)


async def test_a_caller_that_hangs_up_ends_its_command_where_it_asked_to(session: SessionOf) -> None:
    mark = f"300.51{session.pod.pid}"
    await session.exec("A=1")
    task = asyncio.create_task(session.exec(f"sleep {mark}", on_disconnect="kill"))
    await until(lambda: len(processes_with(f"sleep\0{mark}")) == 1, "it runs")
    task.cancel()
    await until(lambda: not processes_with(f"sleep\0{mark}"), "it was ended")
    assert await session.said("echo $A") == ("1\n", "", 0)


async def test_a_caller_that_hangs_up_leaves_its_command_running_otherwise(session: SessionOf) -> None:
    id = f"left-{session.id}"
    task = asyncio.create_task(session.exec("until [ -e go ]; do sleep 0.02; done; echo went", id=id))
    await _until_running(session, id)
    task.cancel()
    (session.pod.workspace / "go").touch()
    assert (await session.pod.ended(id))["exit_code"] == 0
    assert (await session.pod.output(id)).body == b"went\n"
    (session.pod.workspace / "go").unlink()


async def test_a_waiting_command_can_be_taken_back(session: SessionOf) -> None:
    first = asyncio.create_task(session.exec("until [ -e go2 ]; do sleep 0.02; done"))
    await _until_busy(session)
    id = f"wait-{session.id}"
    second = asyncio.create_task(session.exec("echo ran > ran2", id=id))
    await _until_waiting(session, 1)
    assert (await session.pod.call("DELETE", f"/v1/processes/{id}")).status == 204
    result = await second
    assert (result["reason"], result["ended"], "never began" in result["message"]) == ("cancelled", False, True)
    (session.pod.workspace / "go2").touch()
    assert (await first)["exit_code"] == 0
    assert not (session.pod.workspace / "ran2").exists()
    (session.pod.workspace / "go2").unlink()


async def test_as_many_may_wait_as_may_and_no_more(executor: Pod) -> None:
    async with session_in(executor) as session:
        running = [asyncio.create_task(session.call("sleep 300")) for _ in range(65)]
        await _until_waiting(session, 64)
        assert (await session.call("echo one more")).code == "rate_limited"
        assert (await session.info())["busy"] is True
        assert (await session.delete("?kill_descendants=true")).status == 204
        replies = await asyncio.gather(*running)
        assert {reply.json["reason"] for reply in replies} == {"cancelled"}
        assert (await session.call("echo gone")).code == "not_found"


async def test_a_timeout_counts_from_the_commands_own_beginning(session: SessionOf) -> None:
    first = asyncio.create_task(session.exec("sleep 4.5"))
    await _until_busy(session)
    second = await session.exec("echo ran", timeout_sec=4)
    assert (second["stdout"], second["timed_out"]) == ("ran\n", False)
    await first


@pytest.mark.parametrize(("body", "field"), [
    ({}, "command"), ({"command": ""}, "command"), ({"command": "  "}, "command"), ({"command": ["ls"]}, "command"),
    ({"command": "a\0b"}, "command"), ({"command": None}, "command"), ({"command": "ls", "cwd": "/"}, "cwd"),
    ({"command": "ls", "user": "root"}, "user"), ({"command": "ls", "env": {"A": "x\0"}}, "env"),
    ({"command": "ls", "timeout_sec": 0}, "timeout_sec"), ({"command": "ls", "grace_sec": -1}, "grace_sec"),
    ({"command": "ls", "stdin_base64": "?"}, "stdin_base64"), ({"command": "ls", "nope": 1}, "nope"),
    ({"command": "ls", "id": "../x"}, "id"), ({"command": "ls", "stdin": "a", "stdin_base64": "YQ=="}, "stdin_base64"),
])  # fmt: skip
async def test_what_makes_no_sense_is_refused_before_anything_runs(
    executor: Pod, body: dict[str, object], field: str
) -> None:
    """SS27"""
    async with session_in(executor) as session:
        before = (await session.info())["commands"]
        reply = await executor.call("POST", session.path + "/exec", body)
        assert (reply.status, reply.code) == (400, "invalid_request")
        assert field in reply.json["error"]["message"]
        assert (await session.info())["commands"] == before


@pytest.mark.parametrize(("body", "code"), [
    ({"cwd": "/nope"}, "invalid_cwd"), ({"cwd": ""}, "invalid_request"), ({"user": "root"}, "user_not_allowed"),
    ({"user": "no-such"}, "user_not_allowed"), ({"id": "a/b"}, "invalid_request"),
    ({"env": {"": "x"}}, "invalid_request"),
    ({"shell": "zsh"}, "invalid_request"), ({"env": {"X": "y" * 140_000}}, "too_large"),
])  # fmt: skip
async def test_a_session_that_cannot_be_is_refused_and_leaves_nothing(
    executor: Pod, body: dict[str, object], code: str
) -> None:
    files = set(os.listdir("/dev/shm"))
    assert (await executor.call("POST", "/v1/sessions", body)).code == code
    assert (await executor.call("GET", "/v1/sessions")).json == {"sessions": []}
    await until(lambda: set(os.listdir("/dev/shm")) <= files, "no file is left")


async def test_an_id_makes_one_session(executor: Pod) -> None:
    first = await executor.call("POST", "/v1/sessions", {"id": "mine", "env": {"A": "1"}})
    again = await executor.call("POST", "/v1/sessions", {"id": "mine", "env": {"A": "1"}})
    assert (first.status, again.status, again.json["pid"]) == (201, 200, first.json["pid"])
    assert (await executor.call("POST", "/v1/sessions", {"id": "mine"})).code == "idempotency_mismatch"
    assert (await executor.call("DELETE", "/v1/sessions/mine")).status == 204
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/exec"), ("POST", "/interrupt")):
        reply = await executor.call(method, "/v1/sessions/mine" + path, {"command": "ls"} if path == "/exec" else None)
        assert (reply.status, reply.code) == (404, "not_found")


async def test_sessions_are_bounded(fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]]) -> None:
    with fresh_executor(env={"SOJOURN_MAX_SESSIONS": "2"}) as process:
        async with connected(process) as pod:
            first, _second = await new_session(pod), await new_session(pod)
            assert (await pod.call("POST", "/v1/sessions")).code == "rate_limited"
            assert (await first.delete()).status == 204
            assert (await pod.call("POST", "/v1/sessions")).status == 201


async def test_an_idle_session_is_no_work_and_its_commands_are(executor: Pod) -> None:
    async with session_in(executor) as session:
        assert (await executor.call("GET", "/v1/lease")).json["running"] == 0
        running = asyncio.create_task(session.exec("sleep 300"))
        await _until_busy(session)
        assert (await executor.call("GET", "/v1/lease")).json["running"] == 1
        await session.interrupt()
        await running
        assert (await executor.call("GET", "/v1/lease")).json["running"] == 0


async def test_a_shell_whose_files_were_removed_is_replaced(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    """Only where commands run as the executor's own user can they take them away."""
    with fresh_executor("single") as process:
        async with connected(process) as pod, session_in(pod) as session:
            where = os.path.dirname((await session.exec("readlink /proc/self/fd/1"))["stdout"])
            lost = await session.exec(f"rm -rf {where}; echo gone", timeout_sec=60)
            assert (lost["stdout"], lost["ended"]) == ("gone\n", True)
            assert await answers_as_new(session) is True
            where = os.path.dirname((await session.exec("readlink /proc/self/fd/1"))["stdout"])
            await pod.exec(["rm", "-rf", where])
            assert (await session.call("echo ok")).code == "conflict"
            assert await answers_as_new(session) is True
            where = os.path.dirname((await session.exec("readlink /proc/self/fd/1"))["stdout"])
            await pod.exec(f"rm {where}/stdout; ln -s /etc/passwd {where}/stdout")
            assert (await session.call("echo ok")).status in (409, 429)


async def test_hundreds_of_sessions_leave_nothing_behind(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await _a_round(pod, 40)
            files, kib, shared = process.open_files(), process.status_kib("VmRSS"), set(os.listdir("/dev/shm"))
            children = len(process.descendants())
            for _ in range(5):
                await _a_round(pod, 40)
            await until(lambda: len(process.descendants()) <= children, "all shells are gone")
            await until(lambda: process.open_files() <= files, "their descriptors are closed")
            await until(lambda: set(os.listdir("/dev/shm")) <= shared, "their files are gone")
            assert process.status_kib("VmRSS") - kib < 20_480


async def _a_round(pod: Pod, count: int) -> None:
    sessions = await asyncio.gather(*(new_session(pod) for _ in range(count)))
    for session in sessions:
        assert await session.said("echo hi; sleep 300 >/dev/null &") == ("hi\n", "", 0)
    replies = await asyncio.gather(*(session.delete("?kill_descendants=true") for session in sessions))
    assert {reply.status for reply in replies} == {204}


async def test_an_ending_executor_takes_its_sessions_and_files_with_it(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    files = set(os.listdir("/dev/shm"))
    with fresh_executor() as process:
        async with connected(process) as pod:
            mark = f"300.61{pod.pid}"
            session = await new_session(pod)
            await session.exec(f"nohup setsid sleep {mark} >/dev/null 2>&1 &")
            await until(lambda: len(processes_with(f"sleep\0{mark}")) == 1, "the daemon runs")
            process.process.terminate()
            await until(lambda: process.process.poll() is not None, "the executor has ended")
            await until(lambda: not processes_with(f"sleep\0{mark}"), "and what it ran")
    await until(lambda: set(os.listdir("/dev/shm")) <= files, "no file is left")


async def _until_busy(session: SessionOf) -> None:
    give_up = time.monotonic() + 60
    while not (await session.info())["busy"]:
        assert time.monotonic() < give_up, "the session never began with a command"
        await asyncio.sleep(0.02)


async def _until_waiting(session: SessionOf, count: int) -> None:
    give_up = time.monotonic() + 60
    while (await session.info())["waiting"] < count:
        assert time.monotonic() < give_up, f"never did {count} commands wait"
        await asyncio.sleep(0.02)


async def _until_running(session: SessionOf, id: str) -> None:
    give_up = time.monotonic() + 60
    while True:
        reply = await session.pod.call("GET", f"/v1/processes/{id}")
        if reply.status == 200 and reply.json["state"] == "running":
            return
        assert time.monotonic() < give_up, f"{id} never ran"
        await asyncio.sleep(0.02)
