"""Cases of *Stateful sessions*, against a running executor: in bash in both tiers, and in sh."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.executor_pod import (
    ExecutorProcess,
    connected,
    processes_with,
    until,
)
from tests.support.sessions import SessionOf, new_session, session_in

# ── what persists ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_directory_exports_functions_aliases_options_and_umask_persist(session: SessionOf) -> None:
    await session.exec("cd /tmp; export A=1; B=2; f() { echo f-$1; }; alias ll='echo aliased'; umask 027; set -f")
    assert await session.said("pwd; env | grep ^A=; echo $B; f x; ll; umask; echo *") == (
        "/tmp\nA=1\n2\nf-x\naliased\n0027\n*\n", "", 0,
    )  # fmt: skip
    assert (await session.info())["cwd"] == "/tmp"


async def test_the_last_exit_code_is_there_for_the_next_command(session: SessionOf) -> None:
    assert (await session.exec("(exit 42)"))["exit_code"] == 42
    assert await session.said("echo $?") == ("42\n", "", 0)
    assert await session.said("echo $?") == ("0\n", "", 0)


async def test_a_session_starts_where_and_as_it_was_asked_to(executor_process: ExecutorProcess) -> None:
    async with connected(executor_process) as pod:
        async with session_in(pod, cwd="/", env={"X": "a'b\nc"}, id="chosen") as session:
            assert session.id == "chosen"
            assert await session.said('pwd; printf %s "$X"') == ("/\na'b\nc", "", 0)
        async with session_in(pod) as session:
            assert (await session.exec("pwd"))["stdout"] == f"{pod.workspace}\n"
            assert (await session.exec("id -un"))["stdout"] == f"{pod.user.pw_name}\n"


# ── poison ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_set_e_ends_the_shell_at_the_next_failure_and_the_answer_says_so(session: SessionOf) -> None:
    """SS01"""
    assert (await session.exec("set -e"))["ended"] is False
    began = time.monotonic()
    result = await session.exec("false")
    assert time.monotonic() - began < 60
    assert (result["exit_code"], result["reason"], result["ended"]) == (1, "exited", True)
    assert "fresh" in result["message"]
    third = await session.exec("echo ok")
    assert (third["stdout"], third["fresh_shell"], third["ended"]) == ("ok\n", True, False)
    assert (await session.exec("echo ok"))["fresh_shell"] is False


async def test_a_shell_killed_from_outside_is_told_as_an_error(session: SessionOf) -> None:
    """SS03"""
    await session.exec("X=1")
    pid = (await session.info())["pid"]
    assert (await session.exec("echo $$"))["stdout"] == f"{pid}\n"
    await session.pod.exec(["kill", "-9", str(pid)])
    reply = await session.call("echo ok > ran")
    assert (reply.status, reply.code) == (409, "conflict")
    assert reply.json["error"]["details"] == {"ended": True, "exit_code": 137, "signal": "SIGKILL"}
    assert not (session.pod.workspace / "ran").exists()
    listed = (await session.pod.call("GET", "/v1/sessions")).json["sessions"]
    assert [one["state"] for one in listed if one["id"] == session.id] == ["dead"]
    again = await session.exec("echo ok${X-}")
    assert (again["stdout"], again["fresh_shell"]) == ("ok\n", True)
    assert (await session.info())["state"] == "alive"


@pytest.mark.parametrize(
    "text", ["cat > {f} <<'EOF'\nl1\nl2\nEOF\nwc -l < {f}", "cat > {f} <<EOF\nl1\nl2\nEOF\nwc -l<{f}\n"]
)
async def test_a_heredoc_neither_hangs_nor_stays(session: SessionOf, text: str) -> None:
    """SS05"""
    path = session.pod.workspace / "here"
    assert (await session.said(text.format(f=path)))[0].strip() == "2"
    assert path.read_text() == "l1\nl2\n"
    assert await session.said("echo ok") == ("ok\n", "", 0)


async def test_an_unfinished_heredoc_ends_with_its_text(session: SessionOf) -> None:
    """SS05"""
    assert (await session.exec("cat <<'EOF'\nhi"))["stdout"].rstrip() == "hi"
    assert await session.said("cat <<'EOF'\nhi\nEOF") == ("hi\n", "", 0)
    assert await session.said("echo ok") == ("ok\n", "", 0)


@pytest.mark.parametrize(("text", "out"), [
    ("printf 'abc123'; false", "abc123"), ("printf 0; (exit 1)", "0"), ("printf '\\0'; false", "\0"),
    ("printf '0 0 /tmp\\0'; false", "0 0 /tmp\0"),
])  # fmt: skip
async def test_an_exit_code_is_never_read_out_of_the_output(session: SessionOf, text: str, out: str) -> None:
    """SS07"""
    assert await session.said(text) == (out, "", 1)


@pytest.mark.parametrize(
    "text", ["false\n", "false\n# note", "false\n\n", "false\n  \n#\n", "false;", "false &&\ntrue"]
)
async def test_blank_and_comment_lines_at_the_end_do_not_reset_the_code(session: SessionOf, text: str) -> None:
    """SS09"""
    assert await session.said(text) == ("", "", 1)


@pytest.mark.parametrize(
    "text", ['echo "abc', "echo `date", "echo 'x", "if true; then", "echo $(", "( echo", "for", "}", "a ) b"]
)
async def test_a_syntax_error_is_one_for_its_own_command_only(session: SessionOf, text: str) -> None:
    """SS11"""
    out, err, code = await session.said(text)
    assert (out, code) == ("", 2)
    assert err
    again = await session.exec("echo ok")
    assert (again["stdout"], again["stderr"], again["fresh_shell"]) == ("ok\n", "", False)


async def test_all_of_the_shells_syntax_runs(bash: SessionOf) -> None:
    """SS13"""
    out, err, code = await bash.said(
        "case a in a) echo 1;; esac; echo $((1<<2)); coproc cat; for ((i=0;i<2;i++)); do echo $i; done"
    )
    assert (out, err, code) == ("1\n4\n0\n1\n", "", 0)
    assert await bash.said('echo hi >&"${COPROC[1]}"; read -r x <&"${COPROC[0]}"; echo "$x"') == ("hi\n", "", 0)
    assert await bash.said("cat <(echo sub); [[ a == a ]] && echo yes") == (
        "sub\nyes\n", "", 0,
    )  # fmt: skip


async def test_parallel_calls_are_run_one_after_another_and_never_mixed(session: SessionOf) -> None:
    """SS15"""
    results = await asyncio.gather(*(session.said(f"sleep 0.1; echo {n}; echo e{n} >&2") for n in range(10)))
    assert results == [(f"{n}\n", f"e{n}\n", 0) for n in range(10)]
    assert await session.said("echo ok") == ("ok\n", "", 0)


async def test_sessions_run_side_by_side(session: SessionOf) -> None:
    """SS15"""
    async with session_in(session.pod) as other:
        waiting = asyncio.create_task(session.exec("until [ -e met ]; do sleep 0.02; done; echo met"))
        assert (await other.exec(": > met; echo done"))["stdout"] == "done\n"
        assert (await waiting)["stdout"] == "met\n"
    (session.pod.workspace / "met").unlink()


async def test_a_timeout_keeps_the_shell_and_its_state(session: SessionOf) -> None:
    """SS17"""
    await session.exec("cd /tmp; export A=1; f() { echo f; }")
    result = await session.exec("sleep 60; echo never", timeout_sec=0.5)
    assert (result["timed_out"], result["reason"], result["exit_code"]) == (True, "timeout", 130)
    assert (result["stdout"], result["ended"]) == ("", False)
    again = await session.exec("pwd; echo $A; f")
    assert (again["stdout"], again["fresh_shell"]) == ("/tmp\n1\nf\n", False)


async def test_output_before_a_timeout_is_kept(session: SessionOf) -> None:
    """TM01"""
    result = await session.exec("echo before; echo e >&2; sleep 60", timeout_sec=0.5)
    assert (result["stdout"], result["stderr"], result["timed_out"]) == ("before\n", "e\n", True)
    streamed = await session.stream("echo before; sleep 60", timeout_sec=0.5)
    assert streamed.stdout == b"before\n"
    assert streamed.exit is not None
    assert (streamed.exit.timed_out, streamed.exit.ended) == (True, False)


@pytest.mark.parametrize("text", [
    "while :; do :; done; echo never", "f() { g; echo f2; }; g() { sleep 50; echo never; }; f; echo never",
    "x=$(sleep 50; echo z); echo never", "(sleep 50; echo never); echo never", "sleep 50 | cat; echo never",
    "sleep 50 & wait; echo never", "until false; do sleep 0.01; done; echo never", "eval 'sleep 50; echo never'",
    "trap '' INT; sleep 50; echo never", "trap 'echo mine' INT; sleep 50; echo never",
    "sh -c 'trap \"\" INT; sleep 50'; echo never", "kill -STOP $$; echo never",
])  # fmt: skip
async def test_whatever_runs_when_time_is_over_is_given_up_with_the_rest(session: SessionOf, text: str) -> None:
    """SS17"""
    await session.exec("A=kept")
    result = await session.exec(text, timeout_sec=0.4, grace_sec=20)
    assert (result["reason"], result["ended"], result["exit_code"] > 128) == ("timeout", False, True)
    assert "never" not in result["stdout"]
    assert await session.said("echo $A") == ("kept\n", "", 0)


async def test_what_does_not_give_way_ends_with_its_shell_and_the_answer_says_so(session: SessionOf) -> None:
    """SS17"""
    mark = f"300.17{session.pod.pid}"
    text = f"sh -c \"trap '' INT TERM; sleep {mark}; sleep {mark}\"; echo never"
    result = await session.exec(text, timeout_sec=0.5, grace_sec=0.5)
    assert (result["reason"], result["ended"], result["signal"]) == ("timeout", True, "SIGKILL")
    assert "state is lost" in result["message"]
    assert not processes_with(mark)
    assert (await session.exec("echo ok"))["fresh_shell"] is True


async def test_a_timeout_ends_what_its_own_command_left_in_the_background_and_nothing_else(session: SessionOf) -> None:
    """SS17"""
    earlier, own = f"301.17{session.pod.pid}", f"302.17{session.pod.pid}"
    await session.exec(f"sleep {earlier} >/dev/null 2>&1 &")
    await asyncio.sleep(0.05)  # sh tells commands' processes apart by their start, in clock ticks
    result = await session.exec(f"sleep {own} & setsid sleep {own} & sleep {own}", timeout_sec=0.5, grace_sec=5)
    assert (result["timed_out"], result["ended"]) == (True, False)
    assert not processes_with(own)
    assert len(processes_with(f"sleep\0{earlier}")) == 1


async def test_silence_over_its_limit_is_a_timeout_of_its_own(session: SessionOf) -> None:
    result = await session.exec("echo a; sleep 0.2; echo b; sleep 60", no_output_timeout_sec=1)
    assert (result["stdout"], result["reason"], result["ended"]) == ("a\nb\n", "no_output_timeout", False)


async def test_a_command_that_replaces_the_shell_is_seen_to_its_end(session: SessionOf) -> None:
    """SS19"""
    result = await session.exec("exec true")
    assert (result["exit_code"], result["ended"]) == (0, True)
    result = await session.exec("exec sh -c 'sleep 0.5; echo out; exit 7'")
    assert (result["exit_code"], result["stdout"], result["ended"], result["fresh_shell"]) == (7, "out\n", True, True)
    assert (await session.exec("echo ok"))["stdout"] == "ok\n"


async def test_a_replaced_shell_is_ended_by_the_timeout(session: SessionOf) -> None:
    """SS19"""
    result = await session.exec("exec sleep 60", timeout_sec=0.4, grace_sec=0.4)
    assert (result["reason"], result["ended"]) == ("timeout", True)
    assert (await session.exec("echo ok"))["fresh_shell"] is True


async def test_exit_is_the_commands_code_and_the_shells_end(session: SessionOf) -> None:
    """SS19"""
    result = await session.exec("echo hi; exit 3")
    assert (result["stdout"], result["stderr"]) == ("hi\n", "")
    assert (result["exit_code"], result["reason"], result["ended"]) == (3, "exited", True)


async def test_an_exit_trap_speaks_in_the_answer(bash: SessionOf) -> None:
    """SS19"""
    result = await bash.exec("trap 'echo bye' EXIT; echo hi; exit 3")
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("hi\nbye\n", "", 3)


async def test_deleting_a_session_leaves_the_daemons_it_started(session: SessionOf) -> None:
    """SS21"""
    mark = f"300.21{session.pod.pid}"
    other = await new_session(session.pod)
    for start in (f"nohup sleep {mark} >/dev/null 2>&1 &", f"sleep {mark} &", f"setsid sleep {mark} </dev/null &"):
        await other.exec(start)
    await until(lambda: len(processes_with(f"sleep\0{mark}")) == 3, "three daemons run")
    assert (await other.delete()).status == 204
    assert len(processes_with(f"sleep\0{mark}")) == 3
    await session.pod.exec(f"kill {' '.join(map(str, processes_with(f'sleep{chr(0)}{mark}')))}")


async def test_deleting_with_descendants_ends_all_that_it_started(session: SessionOf) -> None:
    """SS21"""
    mark = f"300.22{session.pod.pid}"
    other = await new_session(session.pod)
    await other.exec(f"nohup sleep {mark} >/dev/null 2>&1 &")
    await other.exec(f"(setsid sleep {mark} >/dev/null 2>&1 &)")
    await until(lambda: len(processes_with(f"sleep\0{mark}")) == 2, "both daemons run")
    assert (await other.delete("?kill_descendants=true")).status == 204
    assert not processes_with(f"sleep\0{mark}")


async def test_a_one_shot_command_leaves_its_daemon_alive(session: SessionOf) -> None:
    """SS21"""
    mark = f"300.23{session.pod.pid}"
    result = await session.pod.exec(f"nohup sleep {mark} >/dev/null 2>&1 & echo $!")
    assert result["descendants_left"] is True
    await until(lambda: len(processes_with(f"sleep\0{mark}")) == 1, "the daemon runs")
    await session.pod.exec(f"kill {result['stdout'].strip()}")


async def test_background_jobs_of_earlier_commands_hold_nobody(session: SessionOf) -> None:
    """SS23"""
    began = time.monotonic()
    first = await session.exec("sleep 300 & echo started")
    assert (first["stdout"], first["descendants_left"]) == ("started\n", True)
    assert await session.said("echo hi") == ("hi\n", "", 0)
    assert time.monotonic() - began < 60
    assert (await session.said("kill $!; echo killed"))[0] == "killed\n"


async def test_a_background_job_never_writes_into_a_later_answer(session: SessionOf) -> None:
    """SS23"""
    loop = "while :; do echo JOB; echo JOB >&2; sleep 0.01; done"
    await session.exec(f"({loop}) & echo first")
    for n in range(30):
        assert await session.said(f"sleep 0.02; echo {n}") == (f"{n}\n", "", 0)
    assert (await session.said("kill $!; echo killed"))[0] == "killed\n"


async def test_an_interrupt_ends_the_command_and_keeps_the_shell(session: SessionOf) -> None:
    """SS25"""
    await session.exec("cd /tmp; A=1")
    running = asyncio.create_task(session.exec("echo up; sleep 100; echo never"))
    await _until_busy(session)
    assert (await session.interrupt())["interrupted"] is True
    result = await running
    assert (result["stdout"], result["reason"], result["exit_code"]) == ("up\n", "cancelled", 130)
    assert (result["signal"], result["timed_out"], result["ended"]) == ("SIGINT", False, False)
    assert await session.said("pwd; echo $A") == ("/tmp\n1\n", "", 0)
    assert (await session.interrupt())["interrupted"] is False


async def test_an_interrupt_that_comes_too_late_never_befalls_the_next_command(session: SessionOf) -> None:
    """SS25"""
    await session.exec("A=kept")
    for n in range(40):
        running = asyncio.create_task(session.exec(f"sleep 0.0{n % 4}"))
        await asyncio.sleep(n % 4 / 100)
        interrupted = asyncio.create_task(session.interrupt(escalate=n % 2 == 0))
        following = await session.exec("echo $A")
        assert (following["stdout"], following["exit_code"], following["fresh_shell"]) == ("kept\n", 0, False) or (
            following["reason"] == "cancelled" and (await interrupted)["id"] == following["id"]
        )
        await asyncio.gather(running, interrupted)


async def test_a_code_above_every_signal_is_told_as_it_is(session: SessionOf) -> None:
    """SS17"""
    await session.exec("trap '' INT")
    result = await session.exec(
        "sh -c 'trap \"exit 255\" TERM; while :; do sleep 0.02; done'", timeout_sec=0.5, grace_sec=4
    )
    assert (result["reason"], result["ended"]) == ("timeout", False)
    assert result["exit_code"] > 128


async def test_an_interrupt_without_escalation_lets_a_program_handle_it(session: SessionOf) -> None:
    """SS25"""
    handler = "trap 'echo handled; exit 4' INT; echo up; while :; do sleep 0.02; done"
    running = asyncio.create_task(session.stream(f'sh -c "{handler}"; echo never', id=f"i{session.id}"))
    await _until_output(session, f"i{session.id}", b"up\n")
    await session.interrupt(escalate=False)
    got = await running
    assert got.stdout == b"up\nhandled\n"
    assert got.exit is not None
    assert (got.exit.reason, got.exit.ended) == ("cancelled", False)


async def test_an_interrupt_spares_jobs_in_the_background(session: SessionOf) -> None:
    """SS25"""
    mark = f"300.25{session.pod.pid}"
    running = asyncio.create_task(session.exec(f"sleep {mark} >/dev/null 2>&1 & sleep 100"))
    await until(lambda: len(processes_with(f"sleep\0{mark}")) == 1, "the job runs")
    await _until_busy(session)
    await session.interrupt()
    assert (await running)["reason"] == "cancelled"
    assert len(processes_with(f"sleep\0{mark}")) == 1


@pytest.mark.parametrize(
    "value", ["a'b $HOME\nc", "", "'", "\\", "`id`", "$(id)", "é\u20ac\U0001f600", "x" * 100_000, "-n", "!x"]
)
async def test_a_commands_own_environment_is_exact_and_over_with_it(session: SessionOf, value: str) -> None:
    """SS27"""
    result = await session.exec('printf %s "$P"; env | grep -c ^P=', env={"P": value})
    assert result["stdout"] == value + "1\n"
    assert await session.said("echo ${P-unset}") == ("unset\n", "", 0)


async def test_a_commands_own_environment_hides_the_sessions_and_keeps_it(session: SessionOf) -> None:
    """SS27"""
    await session.exec("P=mine; export P")
    assert await session.said("echo $P; Q=set; cd /tmp", env={"P": "other", "R": "2"}) == ("other\n", "", 0)
    assert await session.said("echo $P $Q ${R-unset}; pwd") == ("mine set unset\n/tmp\n", "", 0)


@pytest.mark.parametrize("name", ["A-B", "1A", "A B", "", "UID", "PPID", "A=B", "é", "BASHOPTS", "x\n"])
async def test_a_name_that_no_shell_variable_can_have_is_refused(bash: SessionOf, name: str) -> None:
    """SS27"""
    reply = await bash.call("touch ran", env={name: "x"})
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert not (bash.pod.workspace / "ran").exists()


# ── bytes, signals, lines ───────────────────────────────────────────────────────────────────────────────────────


async def test_output_is_the_same_bytes(session: SessionOf) -> None:
    """UN07"""
    result = await session.exec("printf 'a\\r\\nb\\033[31mc\\td\\b'")
    assert result["stdout"] == "a\r\nb\x1b[31mc\td\b"
    everything = "".join(f"\\{n:03o}" for n in range(256))
    assert (await session.stream(f"printf '{everything}'")).stdout == bytes(range(256))


@pytest.mark.parametrize(("name", "number", "code"), [("KILL", 9, 137), ("SEGV", 11, 139)])
async def test_death_of_the_shell_by_a_signal_is_never_exit_0(
    session: SessionOf, name: str, number: int, code: int
) -> None:
    """SG09"""
    result = await session.exec(f"kill -{number} $$")
    assert (result["exit_code"], result["signal"], result["reason"]) == (code, f"SIG{name}", "signaled")
    assert result["ended"] is True
    result = await session.exec(f"sh -c 'kill -{number} $$'")
    assert (result["exit_code"], result["ended"]) == (code, False)


async def test_no_ignored_signal_is_inherited(session: SessionOf) -> None:
    """SG11"""
    clean = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"
    assert await session.said("grep -E '^(SigIgn|SigBlk)' /proc/self/status") == (clean, "", 0)


async def test_a_pipeline_ends_with_its_reader_and_in_silence(bash: SessionOf) -> None:
    """SG11"""
    assert await bash.said("yes | head -1; echo ${PIPESTATUS[@]}") == ("y\n141 0\n", "", 0)


@pytest.mark.parametrize("size", [6000, 10_240, 131_072, 1 << 20])
async def test_one_long_line_arrives_whole(session: SessionOf, size: int) -> None:
    """PT01"""
    result = await session.exec(f"x={'y' * size}; echo ${{#x}}")
    assert (result["stdout"], result["exit_code"]) == (f"{size}\n", 0)


async def test_a_long_script_runs_to_its_last_line(session: SessionOf) -> None:
    script = "".join(f": {n} some words to fill the line with\n" for n in range(30_000)) + "echo end $#; false"
    assert len(script) > 1 << 20
    assert await session.said(script) == ("end 0\n", "", 1)
    assert await session.said("echo short") == ("short\n", "", 0)


async def _until_busy(session: SessionOf) -> None:
    """A program of its own runs in the session."""
    pid = (await session.info())["pid"]
    await until(lambda: b"sleep" in b"".join(_child_names(pid)), "the shell has started a program")


def _child_names(pid: int) -> list[bytes]:
    names = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            names.append(Path(f"/proc/{child}/comm").read_bytes())
        except OSError:
            continue
    return names


async def _until_output(session: SessionOf, id: str, expected: bytes) -> None:
    for _ in range(1000):
        reply = await session.pod.output(id)
        if reply.status == 200 and reply.body == expected:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{expected!r} never came")
