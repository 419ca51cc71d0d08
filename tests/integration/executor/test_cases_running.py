"""Cases of *Running a command*, against a running executor."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from executor.config import ExecutorConfig
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected, processes_with, until

FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]


async def test_a_child_left_in_the_background_does_not_delay_the_answer(any_tier: Pod) -> None:
    """EX01"""
    began = time.monotonic()
    result = await any_tier.exec(["bash", "-c", "sleep 300.0101 & echo done"], timeout_sec=60, id="ex01")
    assert time.monotonic() - began < 50
    assert (result["stdout"], result["exit_code"], result["timed_out"]) == ("done\n", 0, False)
    assert result["descendants_left"] is True
    assert processes_with("300.0101"), "what a command leaves behind lives on"
    reply = await any_tier.call("DELETE", "/v1/processes/ex01")
    assert reply.status == 204
    assert not processes_with("300.0101"), "deleting the process kills what it left behind"


async def test_a_child_that_does_not_hold_the_pipes_is_told_of_too(executor: Pod) -> None:
    """EX01"""
    command = "setsid sleep 300.0102 </dev/null >/dev/null 2>&1 & while ! pgrep -f '^sleep 300.010[2]'; do :; done"
    result = await executor.exec(command, id="ex01b", timeout_sec=60)
    assert (result["exit_code"], result["descendants_left"]) == (0, True)
    await executor.call("DELETE", "/v1/processes/ex01b")
    assert not processes_with("300.0102")


async def test_a_command_that_leaves_nothing_behind_says_so(executor: Pod) -> None:
    """EX01"""
    result = await executor.exec("sleep 0.01 & wait; echo done")
    assert (result["stdout"], result["descendants_left"]) == ("done\n", False)


async def test_the_last_bytes_of_fast_commands_are_never_lost(any_tier: Pod) -> None:
    """EX03"""
    gate = asyncio.Semaphore(8)

    async def run(command: list[str]) -> dict[str, Any]:
        async with gate:
            return await any_tier.exec(command)

    short = await asyncio.gather(*(run(["printf", "x"]) for _ in range(300)))
    assert [one["stdout"] for one in short] == ["x"] * 300
    long = await asyncio.gather(*(run(["head", "-c", "200000", "/dev/zero"]) for _ in range(50)))
    assert [(len(one["stdout"]), one["stdout_bytes"]) for one in long] == [(200_000, 200_000)] * 50


@pytest.mark.parametrize("command", ["no_such_cmd_x --flag", ["no_such_cmd_x", "--flag"], ["/no/such/cmd"]])
async def test_an_unknown_command_is_127_with_the_shells_words(executor: Pod, command: str | list[str]) -> None:
    """EX05"""
    result = await executor.exec(command)
    assert result["exit_code"] == 127
    assert "not found" in result["stderr"] or "No such file" in result["stderr"]
    assert result["signal"] is None


@pytest.mark.parametrize("program", ["/etc/passwd", "/tmp"])
async def test_what_cannot_be_executed_is_126(executor: Pod, program: str) -> None:
    """EX05"""
    for command in ([program], program):
        result = await executor.exec(command)
        assert result["exit_code"] == 126
        assert result["stderr"]


async def test_a_command_not_found_is_told_on_a_stream_and_in_the_background_too(executor: Pod) -> None:
    """EX05"""
    got = await executor.stream(["no_such_cmd_x"])
    assert got.exit is not None
    assert got.exit.exit_code == 127
    assert b"not found" in got.stderr
    info = await executor.ended(await executor.start(["no_such_cmd_x"]))
    assert info["exit_code"] == 127


@pytest.mark.parametrize("kind", ["missing", "file", "closed"])
async def test_a_working_directory_that_cannot_be_entered_is_named_and_nothing_runs(executor: Pod, kind: str) -> None:
    """EX07"""
    cwd = {"missing": "/nope", "file": "/etc/passwd", "closed": str(executor.workspace / "closed")}[kind]
    if kind == "closed":
        Path(cwd).mkdir(mode=0o000, exist_ok=True)
    marker = executor.workspace / f"ran-{kind}"
    for path in ("/v1/exec", "/v1/processes"):
        reply = await executor.call("POST", path, {"command": ["touch", str(marker)], "cwd": cwd})
        if kind == "closed" and not IS_ROOT and reply.status == 200:
            pytest.skip("this user enters every directory")
        assert (reply.status, reply.code) == (400, "invalid_cwd")
        assert cwd in reply.json["error"]["message"]
    assert not marker.exists()
    streamed = await executor.call(
        "POST", "/v1/exec", {"command": ["true"], "cwd": cwd}, headers={"Accept": "application/x-ndjson"}
    )
    assert (streamed.status, streamed.code) == (400, "invalid_cwd")


async def test_a_relative_working_directory_starts_at_the_workspace(executor: Pod) -> None:
    """EX07"""
    (executor.workspace / "sub").mkdir(exist_ok=True)
    assert (await executor.exec("pwd", cwd="sub"))["stdout"] == f"{executor.workspace}/sub\n"
    assert (await executor.exec("pwd"))["stdout"] == f"{executor.workspace}\n"


async def test_commands_work_again_once_a_removed_workspace_is_back(fresh_executor: FreshExecutor) -> None:
    """EX09"""
    with fresh_executor() as process:
        async with connected(process) as pod:
            workspace = pod.workspace
            assert (await pod.exec('echo x > f; rm -rf "$PWD"'))["exit_code"] == 0
            assert not workspace.exists()
            reply = await pod.call("POST", "/v1/exec", {"command": "echo ok"})
            assert (reply.status, reply.code) == (400, "invalid_cwd")
            assert str(workspace) in reply.json["error"]["message"]
            assert (await pod.exec("echo elsewhere", cwd="/"))["stdout"] == "elsewhere\n"

            elsewhere = workspace.with_name("elsewhere")
            await pod.exec(["mkdir", str(elsewhere)], cwd="/")
            await pod.exec(["ln", "-s", str(elsewhere), str(workspace)], cwd="/")
            assert (await pod.exec("echo ok; touch here"))["stdout"] == "ok\n"
            assert (elsewhere / "here").exists()

            await pod.exec(["rm", str(workspace)], cwd="/")
            await pod.exec(["mkdir", str(workspace)], cwd="/")
            assert (await pod.exec("echo again"))["stdout"] == "again\n"


async def test_a_command_that_ends_in_a_heredoc_runs_as_it_is(executor: Pod) -> None:
    """EX11"""
    result = await executor.exec("cat <<'EOF'\nhi\nEOF")
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("hi\n", "", 0)


@pytest.mark.parametrize("tail", [" # a comment", "\n\n", " ;", " &", "\n# end"])
async def test_nothing_is_appended_to_the_last_line_of_a_command(executor: Pod, tail: str) -> None:
    """EX11"""
    result = await executor.exec(f"echo one{tail}")
    assert (result["stdout"].strip(), result["stderr"], result["exit_code"]) == ("one", "", 0)


async def test_a_script_longer_than_one_argument_may_be_runs_whole(executor: Pod) -> None:
    """EX11, LM01"""
    script = "x=1\n" + "# filler\n" * 30_000 + "echo $((x + 1)) $#"
    assert (await executor.exec(script))["stdout"] == "2 0\n"
    for size in (130_000, 131_071, 131_072, 1_000_000):
        begin, end = "x=1 # ", "\necho $((x + 1)) $#"
        script = begin + "f" * (size - len(begin) - len(end)) + end
        assert (await executor.exec(script))["stdout"] == "2 0\n", size


RECORDED: list[dict[str, Any]] = [
    {"command": "true"},
    {"command": ["true"]},
    {"command": ["true"], "cwd": "/", "env": {"A": "b"}, "stdin": "", "timeout_sec": 60},
    {"command": ["true"], "timeout_sec": 0.5e2, "no_output_timeout_sec": 60.5, "grace_sec": 0},
    {"command": ["true"], "stdin_base64": "aGk=", "max_output_bytes": 0, "merge_output": True, "encoding": "base64"},
    {"command": ["true"], "cwd": None, "stdin": None, "user": None, "timeout_sec": None, "id": None},
    {"command": ["true"], "on_disconnect": "kill", "encoding": "text", "env": {}},
]


@pytest.mark.parametrize("body", RECORDED)
async def test_bodies_of_every_documented_shape_are_taken(executor: Pod, body: dict[str, Any]) -> None:
    """EX13"""
    reply = await executor.call("POST", "/v1/exec", body)
    assert reply.status == 200, reply.body
    assert reply.json["exit_code"] == 0


@pytest.mark.parametrize("path", ["/v1/exec", "/v1/processes"])
@pytest.mark.parametrize("field", ["shell", "timeout", "Command", "profile"])
async def test_an_unknown_field_is_refused_by_its_name(executor: Pod, path: str, field: str) -> None:
    """EX13"""
    reply = await executor.call("POST", path, {"command": ["true"], field: 1})
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert reply.json["error"]["details"]["field"] == field


@pytest.mark.parametrize("field", [
    {"timeout_sec": -1}, {"timeout_sec": 0}, {"timeout_sec": 1e12}, {"timeout_sec": "5"}, {"timeout_sec": True},
    {"no_output_timeout_sec": 0}, {"grace_sec": -1}, {"grace_sec": 1e9}, {"max_output_bytes": -1},
    {"max_output_bytes": 1 << 40}, {"max_output_bytes": 1.5}, {"env": []}, {"env": {"A": 1}}, {"env": {"": "x"}},
    {"env": {"A=B": "x"}}, {"cwd": ""}, {"cwd": 5}, {"stdin": 5}, {"stdin_base64": "%"}, {"encoding": "latin1"},
    {"stdin": "a", "stdin_base64": "YQ=="}, {"id": "a/b"}, {"id": ""}, {"id": "x" * 129}, {"on_disconnect": "wait"},
    {"command": []}, {"command": ""}, {"command": [""]}, {"command": [1]}, {"command": None}, {"command": {}},
])  # fmt: skip
async def test_a_value_that_makes_no_sense_is_refused_and_its_field_named(executor: Pod, field: dict[str, Any]) -> None:
    """EX13"""
    reply = await executor.call("POST", "/v1/exec", {"command": ["true"], **field})
    assert (reply.status, reply.code) == (400, "invalid_request"), reply.body
    assert any(name in reply.json["error"]["details"]["field"] for name in field)


@pytest.mark.parametrize("body", [
    b"", b"null", b"[]", b"{", b'{"command": ["true"]', b"\xff\xfe", b'{"command": "\xff"}', b'{"command": "\\ud800"}',
    b"[" * 100_000, b'{"command": ["true"]} trailing', b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"command": ["true"], "timeout_sec": NaN}', b'{"command": ["true"], "timeout_sec": 1e999}',
    b'{"command": ["true"], "grace_sec": -0.0001}', b'{"command": ["true"], "max_output_bytes": ' + b"9" * 5000 + b"}",
])  # fmt: skip
async def test_a_body_that_is_no_command_gets_a_typed_400(executor: Pod, body: bytes) -> None:
    """EX13"""
    reply = await executor.call("POST", "/v1/exec", body)
    assert (reply.status, reply.code) == (400, "invalid_request"), reply.body
    assert (await executor.exec(["echo", "ok"]))["stdout"] == "ok\n"


async def test_arguments_over_the_kernels_limits_are_refused_as_too_large(executor: Pod) -> None:
    """EX13, LM01: 413 names the limit"""
    bodies: list[dict[str, Any]] = [
        {"command": ["echo", "x" * 200_000]},
        {"command": ["true"], "env": {"BIG": "x" * 200_000}},
        {"command": ["echo", *["x" * 100_000] * 60]},
    ]
    for body in bodies:
        reply = await executor.call("POST", "/v1/exec", body)
        assert (reply.status, reply.code) == (413, "too_large"), reply.body[:300]
        assert reply.json["error"]["details"]["limit"] == 131_071


async def test_output_over_its_bound_is_kept_at_both_ends_and_the_exit_code_stays(executor: Pod) -> None:
    """LM03"""
    answer = await executor.exec("seq 1 3000000", max_output_bytes=1_000_000)
    assert (answer["exit_code"], answer["truncated"], answer["stdout_bytes"]) == (0, True, 22_888_896)
    assert answer["stdout"].startswith("1\n2\n3\n")
    assert answer["stdout"].endswith("\n2999999\n3000000\n")
    dropped = answer["stdout_dropped"]
    assert f"[... {dropped['bytes']} bytes dropped ...]" in answer["stdout"]
    assert dropped["bytes"] == 22_888_896 - 1_000_000


async def test_a_shell_that_cannot_run_any_more_is_told_apart_from_exit_codes(
    fresh_executor: FreshExecutor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """EX15"""
    with fresh_executor() as process:
        tools = process.workspace.parent / "bin"
        tools.mkdir()
        shell = tools / "bash"
        found = shutil.which("bash")
        assert found is not None
        shutil.copy(found, shell)
        if IS_ROOT:
            os.chown(tools, process.user.pw_uid, process.user.pw_gid)
            os.chown(shell, process.user.pw_uid, process.user.pw_gid)
        path = f"{tools}:/usr/bin:/bin"
        with fresh_executor(env={"PATH": path}) as wrecked:
            async with connected(wrecked) as pod:
                assert (await pod.exec("echo $BASH"))["stdout"] == f"{shell}\n"
                await pod.exec(f"chmod 000 {shell}")
                for _ in range(3):
                    result = await pod.exec("true")
                    assert result["reason"] == "spawn_failed"
                    assert "broken" in result["message"]
                health = await pod.call("GET", "/healthz", token="")
                assert (health.status, health.json["status"]) == (200, "degraded")
                plain = await pod.exec(["/bin/false"])
                assert (plain["reason"], plain["exit_code"]) == ("exited", 1)
                await pod.exec(["chmod", "755", str(shell)])
                assert (await pod.exec("exit 5"))["exit_code"] == 5
                assert (await pod.call("GET", "/healthz")).json["status"] == "ok"


async def test_home_is_that_of_the_user_whom_the_command_runs_as(any_tier: Pod) -> None:
    """EX17: the executor under test has no HOME of its own"""
    home = any_tier.user.pw_dir
    assert (await any_tier.exec("echo $HOME"))["stdout"] == f"{home}\n"
    assert (await any_tier.exec("echo $HOME $USER", user=any_tier.user.pw_name))["stdout"] == (
        f"{home} {any_tier.user.pw_name}\n"
    )
    assert (await any_tier.exec("echo $HOME", env={"HOME": "/elsewhere"}))["stdout"] == "/elsewhere\n"


@pytest.mark.root
@pytest.mark.skipif(not IS_ROOT, reason="another user can only be taken on by root")
async def test_a_user_that_the_profile_allows_is_taken_on_whole(fresh_executor: FreshExecutor) -> None:
    """EX17"""
    other = pwd.getpwnam("daemon")
    with fresh_executor(env={"SOJOURN_USERS": "daemon"}) as process:
        async with connected(process) as pod:
            said = await pod.exec("echo $(id -u):$(id -g):$HOME:$USER", user="daemon")
            assert said["stdout"] == f"{other.pw_uid}:{other.pw_gid}:{other.pw_dir}:daemon\n"
            said = await pod.exec("echo $(id -u):$HOME", user=str(other.pw_uid))
            assert said["stdout"] == f"{other.pw_uid}:{other.pw_dir}\n"
            for user in ("root", "0", "bin", "no-such-user"):
                reply = await pod.call("POST", "/v1/exec", {"command": ["id"], "user": user})
                assert (reply.status, reply.code) == (403, "user_not_allowed")


async def test_files_planted_in_the_home_directory_do_not_run_first(executor: Pod) -> None:
    """EX19"""
    home = executor.workspace / "home"
    home.mkdir(exist_ok=True)
    for name in (".bash_profile", ".bashrc", ".profile", ".bash_login", ".kshrc"):
        (home / name).write_text("echo PWN\n")
    env = {"HOME": str(home)}
    for given in ({}, {"stdin": "x"}, {"stdin_open": True}):  # bash takes a socket as its input for a remote login
        assert (await executor.exec("echo ok", env=env, **given))["stdout"] == "ok\n"
        assert (await executor.exec(["sh", "-c", "echo ok"], env=env, **given))["stdout"] == "ok\n"


async def test_a_restrictive_umask_of_the_launcher_reaches_neither_commands_nor_files(
    fresh_executor: FreshExecutor,
) -> None:
    """EX21"""
    with fresh_executor(umask=0o077) as process:
        async with connected(process) as pod:
            assert (await pod.exec("umask; touch f; mkdir d"))["stdout"] == "0022\n"
            reply = await pod.call("PUT", "/v1/files?path=sub/g", b"content")
            assert reply.status in (200, 201, 204)
            modes = {name: stat.S_IMODE((pod.workspace / name).stat().st_mode) for name in ("f", "d", "sub", "sub/g")}
            assert modes == {"f": 0o644, "d": 0o755, "sub": 0o755, "sub/g": 0o644}


async def test_an_answer_tells_all_that_is_promised(any_tier: Pod) -> None:
    result = await any_tier.exec(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (result["exit_code"], result["signal"], result["reason"]) == (7, None, "exited")
    assert (result["stdout"], result["stderr"]) == ("out\n", "err\n")
    assert (result["stdout_bytes"], result["stderr_bytes"], result["truncated"]) == (4, 4, False)
    assert result["pid"] > 1
    assert result["id"]
    assert result["started_at"].endswith("Z")
    assert result["duration_ms"] > 0
    assert set(result["usage"]) == {"user_ms", "system_ms", "max_rss_bytes"}
    assert (await any_tier.info(result["id"]))["exit_code"] == 7


async def test_commands_run_as_the_command_user_without_privileges(any_tier: Pod) -> None:
    said = await any_tier.exec(
        "id -u; grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs)' /proc/self/status; ls /proc/self/fd"
    )
    lines = said["stdout"].split()
    assert lines[0] == str(any_tier.user.pw_uid)
    facts = dict(zip(lines[1:9:2], lines[2:9:2], strict=True))
    assert facts["NoNewPrivs:"] == "1"
    if any_tier.process.tier == "split" or IS_ROOT:
        assert int(facts["CapEff:"], 16) == int(facts["CapPrm:"], 16) == 0
    assert lines[9:] == ["0", "1", "2", "3"], "no descriptor of the executor is inherited (3 is of ls)"


async def test_a_background_process_has_its_state_output_and_end(any_tier: Pod) -> None:
    id = await any_tier.start("echo begin; read line; echo got $line; exit 3")
    await until_output(any_tier, id, b"begin\n")
    assert (await any_tier.info(id))["state"] == "running"
    assert (await any_tier.info(id))["exit_code"] is None
    assert (await any_tier.call("POST", f"/v1/processes/{id}/stdin", b"word\n")).status == 204
    assert (await any_tier.ended(id))["exit_code"] == 3
    assert (await any_tier.output(id)).body == b"begin\ngot word\n"
    listed = (await any_tier.call("GET", "/v1/processes")).json["processes"]
    assert id in [one["id"] for one in listed]
    assert (await any_tier.call("DELETE", f"/v1/processes/{id}")).status == 204
    assert (await any_tier.call("GET", f"/v1/processes/{id}")).code == "not_found"


async def until_output(pod: Pod, id: str, expected: bytes) -> None:
    got = b""
    for _ in range(1000):
        got = (await pod.output(id)).body
        if got == expected:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{got!r} instead of {expected!r}")


async def test_a_pod_that_was_left_alone_keeps_no_processes(executor: Pod) -> None:
    """EX01: whatever ran before in this process, its spawn helpers are all that is left once it is killed"""
    for one in (await executor.call("GET", "/v1/processes")).json["processes"]:
        if one["descendants_left"] or one["state"] != "ended":
            await executor.call("DELETE", f"/v1/processes/{one['id']}")
    await until(lambda: len(executor.process.descendants()) <= ExecutorConfig.helpers, "only spawn helpers are left")


async def test_a_command_finds_no_locale_that_only_the_interpreter_added(any_tier: Pod) -> None:
    environment = (await any_tier.exec(["env"]))["stdout"].splitlines()
    assert [entry for entry in environment if entry.startswith(("LC_", "LANG"))] == ["LANG=C.UTF-8"]


async def test_a_locale_of_the_image_reaches_commands(fresh_executor: FreshExecutor) -> None:
    with fresh_executor(env={"LC_CTYPE": "C.UTF-8", "LANG": "C"}) as process:
        async with connected(process) as pod:
            environment = (await pod.exec(["env"]))["stdout"].splitlines()
    assert {"LC_CTYPE=C.UTF-8", "LANG=C"} <= set(environment)
