"""`sojourn exec` behaves like a local command: streams, signals and exit code."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.cli.conftest import Sojourn
from tests.support.user_stack import Stack

LONG_SEC = 60.0


@pytest.mark.parametrize("code", [0, 1, 7, 124, 125, 255])
def test_the_exit_code_is_the_commands(sojourn: Sojourn, task: str, code: int) -> None:
    assert sojourn("exec", task, "--", "sh", "-c", f"exit {code}").returncode == code


def test_a_signal_and_a_missing_program_give_the_shells_codes(sojourn: Sojourn, task: str) -> None:
    assert sojourn("exec", task, "--", "kill -9 $$").returncode == 137
    missing = sojourn("exec", task, "--", "no-such-program", "x")
    assert missing.returncode == 127
    assert b"not found" in missing.stderr


def test_stdout_and_stderr_arrive_apart_and_as_bytes(sojourn: Sojourn, task: str) -> None:
    done = sojourn("exec", task, "--", r"printf 'out\0\377'; printf 'err\376' >&2")
    assert done.stdout == b"out\0\xff"
    assert done.stderr == b"err\xfe"


def test_several_words_are_not_seen_by_a_shell(sojourn: Sojourn, task: str) -> None:
    assert sojourn("exec", task, "--", "echo", "$HOME;", "a  b").stdout == b"$HOME; a  b\n"


def test_one_word_with_shell_syntax_is_run_by_a_shell(sojourn: Sojourn, task: str) -> None:
    assert sojourn("exec", task, "--", "echo a b | tr a-z A-Z").stdout == b"A B\n"


def test_stdin_reaches_the_command_whole(sojourn: Sojourn, task: str) -> None:
    data = random.Random(1).randbytes(5_000_000)
    done = sojourn("exec", task, "--", "sha256sum", input=data)
    assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_bytes_go_through_and_come_back(sojourn: Sojourn, task: str) -> None:
    data = bytes(range(256)) * 2000
    assert sojourn("exec", task, "--", "cat", input=data).stdout == data


def test_without_input_the_command_reads_its_end(sojourn: Sojourn, task: str) -> None:
    assert sojourn("exec", task, "--", "cat").returncode == 0
    assert sojourn("exec", "--no-stdin", task, "--", "cat", input=b"not for you").stdout == b""


def test_a_command_that_does_not_read_its_input_still_ends(sojourn: Sojourn, task: str) -> None:
    assert sojourn("exec", task, "--", "true", input=b"x" * 3_000_000).returncode == 0


def test_a_silent_open_stdin_does_not_keep_us(stack: Stack, task: str) -> None:
    command = [sys.executable, "-m", "sojourn", "exec", task, "--", "echo", "done"]
    child = subprocess.Popen(command, env=stack.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.wait(LONG_SEC) == 0  # while its stdin is still open
        assert child.stdout.read() == b"done\n"
    finally:
        _end(child)


def test_options_set_directory_environment_and_limit(
    sojourn: Sojourn, task: str, monkeypatch: pytest.MonkeyPatch, stack: Stack
) -> None:
    monkeypatch.setitem(stack.env, "FROM_HERE", "passed on")
    assert sojourn("exec", task, "--", "mkdir", "-p", "sub").returncode == 0
    done = sojourn("exec", "-e", "A=1=2", "-e", "FROM_HERE", task, "--cwd", "sub", "--", 'pwd; echo "$A $FROM_HERE"')
    assert done.stdout == b"/workspace/sub\n1=2 passed on\n"
    late = sojourn("exec", task, "--timeout", "1", "--", "echo before; sleep 60")
    assert late.returncode == 143
    assert late.stdout == b"before\n"
    assert b"timed out" in late.stderr


def test_json_has_the_outcome_and_the_output(sojourn: Sojourn, task: str) -> None:
    done = sojourn("exec", task, "--json", "--", "echo out; echo err >&2; exit 3")
    said = json.loads(done.stdout)
    assert done.returncode == 3
    assert (said["exit_code"], said["stdout"], said["stderr"]) == (3, "out\n", "err\n")
    assert said["provisioned"] in ("warm", "cold", "bound")


def test_our_own_failures_are_125_with_the_code(sojourn: Sojourn, task: str) -> None:
    nowhere = sojourn("exec", task, "--cwd", "no/such", "--", "true")
    assert nowhere.returncode == 125
    assert b"invalid_cwd" in nowhere.stderr


def test_a_wrong_key_says_where_the_right_one_is(
    sojourn: Sojourn, task: str, monkeypatch: pytest.MonkeyPatch, stack: Stack
) -> None:
    monkeypatch.setitem(stack.env, "SANDBOX_API_KEY", "sk_wrong")
    done = sojourn("exec", task, "--", "true")
    assert done.returncode == 125
    assert b"unauthenticated" in done.stderr
    assert b"SANDBOX_API_KEY" in done.stderr


def test_no_stack_says_how_to_start_one(
    sojourn: Sojourn, task: str, monkeypatch: pytest.MonkeyPatch, stack: Stack
) -> None:
    monkeypatch.setitem(stack.env, "SANDBOX_GATEWAY_URL", "http://127.0.0.1:1")
    done = sojourn("exec", task, "--", "true")
    assert done.returncode == 125
    assert b"sojourn up" in done.stderr


def test_a_reader_that_leaves_ends_the_command(stack: Stack, task: str) -> None:
    command = [sys.executable, "-m", "sojourn", "exec", task, "--", "yes"]
    child = subprocess.Popen(command, env=stack.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"y\n"
        child.stdout.close()
        assert child.wait(LONG_SEC) == 128 + signal.SIGPIPE
    finally:
        _end(child)


# ── signals ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def waiting_command(stack: Stack, task: str, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """`script`, which has said its first line."""
    command = [sys.executable, "-m", "sojourn", "exec", "-n", task, "--", "bash", "-c", script]
    child = subprocess.Popen(command, env=stack.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield child
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def test_ctrl_c_is_the_commands_to_handle(stack: Stack, task: str) -> None:
    script = "trap 'echo cleaned; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    with waiting_command(stack, task, script) as child:
        child.send_signal(signal.SIGINT)
        assert child.wait(LONG_SEC) == 9
        assert child.stdout is not None
        assert child.stdout.read() == b"cleaned\n"


def test_ctrl_c_ends_a_command_that_does_not_handle_it(stack: Stack, task: str) -> None:
    with waiting_command(stack, task, "echo ready; exec sleep 600") as child:
        child.send_signal(signal.SIGINT)
        assert child.wait(LONG_SEC) == 130


def test_a_second_ctrl_c_kills_a_command_that_ignores_the_first(stack: Stack, task: str) -> None:
    script = "trap 'echo no' INT; echo ready; while :; do sleep 0.1; done"
    with waiting_command(stack, task, script) as child:
        assert child.stdout is not None
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == b"no\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(LONG_SEC) == 137
        with stack.client() as client:
            assert not [one for one in client.task(task).processes() if one.state == "running"]


def test_term_is_passed_on(stack: Stack, task: str) -> None:
    with waiting_command(stack, task, "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done") as child:
        child.send_signal(signal.SIGTERM)
        assert child.wait(LONG_SEC) == 5


# ── terminals ───────────────────────────────────────────────────────────────────────────────────────────────────


def _read_until(descriptor: int, wanted: bytes) -> bytes:
    got, deadline = b"", time.monotonic() + LONG_SEC
    while wanted not in got and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.5)[0]:
            try:
                got += os.read(descriptor, 4096)
            except OSError:  # EIO: the other side has closed
                break
    return got


def test_on_a_terminal_nobody_has_to_type(stack: Stack, task: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "sojourn", "exec", task, "--", "echo", "hello"], stack.env)
    try:
        assert b"hello" in _read_until(terminal, b"hello")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)


def test_what_is_typed_on_a_terminal_reaches_the_command_and_ctrl_c_too(stack: Stack, task: str) -> None:
    script = "echo ready; read line; echo got $line; exec sleep 600"
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "sojourn", "exec", task, "--", "bash", "-c", script]
        os.execve(sys.executable, command, stack.env)
    try:
        assert b"ready" in _read_until(terminal, b"ready")
        os.write(terminal, b"words\n")
        assert b"got words" in _read_until(terminal, b"got words")
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        os.close(terminal)
