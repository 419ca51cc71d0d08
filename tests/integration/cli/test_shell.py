"""`sojourn shell` on a real terminal, against a whole stack."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from tests.support.local_tty import LocalTty
from tests.support.streams import connection, gone
from tests.support.user_stack import Stack

Sojourn = Callable[..., "subprocess.CompletedProcess[bytes]"]


def shell(stack: Stack, task: str, *words: str, env: dict[str, str] | None = None, cols: int = 80) -> LocalTty:
    return LocalTty([sys.executable, "-m", "sojourn", "shell", task, *words], stack.env | (env or {}), cols=cols)


def test_it_is_a_shell_with_our_size_and_its_exit_code_is_ours(stack: Stack, task: str) -> None:
    """PT03, PT07"""
    with shell(stack, task, "--env", "FOO=bar", cols=97) as tty:
        tty.read_until("$ ")
        assert tty.settings != tty.before
        tty.type("stty size; echo $FOO-$TERM; pwd; tty\r")
        shown = tty.read_until("/dev/pts/")
        assert b"24 97" in shown
        assert b"bar-xterm-256color" in shown
        assert b"/workspace" in shown
        tty.type("exit 7\r")
        assert tty.wait() == 7
        assert tty.settings == tty.before
    assert b"job control" not in tty.shown


def test_it_follows_our_size(stack: Stack, task: str) -> None:
    with shell(stack, task) as tty:
        tty.read_until("$ ")
        tty.resize(132, 43)
        for _ in range(100):  # the signal, the frame and the far side's own signal take their time
            since = len(tty.shown)
            tty.type("stty size\r")
            if b"43 132" in tty.read_until("$ ", since):
                break
            time.sleep(0.05)
        assert b"43 132" in tty.shown
        tty.type("exit\r")  # not the end of input: that is lost while a command still has the terminal
        assert tty.wait() == 0


def test_keys_go_to_the_far_side(stack: Stack, task: str) -> None:
    """PT07"""
    with shell(stack, task) as tty:
        tty.read_until("$ ")
        job = "sh -c 'echo \"job\"-runs; exec sleep 100'\r"  # said by the job itself: it has the terminal by then
        tty.type(job)
        tty.read_until("job-runs\r\n")
        tty.type("\x1a")
        tty.read_until("Stopped")
        since = len(tty.shown)
        tty.type(job)
        tty.read_until("job-runs\r\n", since)
        tty.type("\x03")
        tty.read_until("^C", since)
        tty.type("echo co''de=$?\r")
        tty.read_until("code=130\r\n")
        tty.type("exec sh -c 'exit 3'\r")
        assert tty.wait() == 3
        assert tty.settings == tty.before


def test_a_command_of_our_own_on_the_terminal(stack: Stack, task: str) -> None:
    with shell(stack, task, "--", "sh", "-c", "test -t 1 && echo is a tty; exit 3") as tty:
        assert tty.wait() == 3
        assert b"is a tty\r\n" in tty.shown


def left_id(tty: LocalTty) -> str:
    match = re.search(rb"--attach (\S+)", tty.shown)
    assert match is not None, tty.shown
    return match.group(1).decode()


def test_leaving_keeps_the_terminal_and_coming_back_shows_it(stack: Stack, task: str) -> None:
    """PT09"""
    with shell(stack, task) as tty:
        tty.read_until("$ ")
        tty.type("X=kept; echo on''e\r")
        tty.read_until("one\r\n")
        tty.type("\r~.")
        assert tty.wait() == 0
        assert tty.settings == tty.before
        id = left_id(tty)
    with shell(stack, task, "--attach", id) as again:
        again.read_until("one\r\n")
        again.type("echo $X-tw''o\r")
        again.read_until("kept-two\r\n")
        again.type("exit 5\r")
        assert again.wait() == 5


def test_a_second_one_takes_over_and_the_first_says_so(stack: Stack, task: str) -> None:
    """PT13"""
    with shell(stack, task) as first:
        first.read_until("$ ")
        with stack.client() as client:
            path = f"/sandbox/task/{task}/terminals"
            id = _terminals(stack, path)[0]["id"]
            assert client.task(task).exec("true").exit_code == 0
        with shell(stack, task, "--attach", id) as second:
            assert first.wait() == 125
            assert b"took this terminal over" in first.shown
            assert first.settings == first.before
            second.type("echo st''ill\r")
            second.read_until("still\r\n")
            with shell(stack, task, "--attach", id, "--view") as viewer:
                viewer.read_until("still\r\n")
                viewer.type("echo no''t\r")
                second.type("exit 4\r")
                assert second.wait() == 4
                assert viewer.wait() == 4
        assert b"not\r\n" not in second.shown


def _terminals(stack: Stack, path: str) -> list[dict[str, str]]:
    request = urllib.request.Request(stack.address + path, headers={"X-Api-Key": stack.api_key})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: list[dict[str, str]] = json.load(answer)["terminals"]
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_our_terminal(stack: Stack, task: str, number: signal.Signals) -> None:
    with shell(stack, task) as tty:
        tty.read_until("$ ")
        tty.process.send_signal(number)
        assert tty.wait() == 128 + number
        assert tty.settings == tty.before


def test_a_task_that_is_retired_meanwhile_ends_it_and_restores_our_terminal(stack: Stack, task: str) -> None:
    with shell(stack, task) as tty:
        tty.read_until("$ ")
        with stack.client() as client:
            client.task(task).delete()
        assert tty.wait() == 125
        assert b"sandbox_gone" in tty.shown
        assert tty.settings == tty.before


def test_without_a_terminal_of_ours_input_and_output_are_pipes(stack: Stack, task: str, sojourn: Sojourn) -> None:
    done = sojourn("shell", task, "--", "sh", input=b"echo $((6*7)); exit 9\n")
    assert done.returncode == 9, done
    assert b"42\r\n" in done.stdout
    ended = sojourn("shell", task, "--", "cat", input=b"line\n")
    assert (ended.returncode, b"line\r\n" in ended.stdout) == (0, True)


@pytest.mark.parametrize("command", [("--", "cat"), ()], ids=["cat", "shell"])
def test_input_that_is_over_from_the_start_ends_what_reads_it(
    task: str, sojourn: Sojourn, command: tuple[str, ...]
) -> None:
    done = sojourn("shell", task, *command)  # its stdin is /dev/null
    assert done.returncode == 0, done.stderr
    assert b"left" not in done.stderr


@pytest.mark.parametrize("words", [
    ("--view",), ("--attach", "x", "--", "ls"), ("--attach", "x", "--cwd", "/"),
])  # fmt: skip
def test_wrong_use_is_our_own_failure(task: str, sojourn: Sojourn, words: tuple[str, ...]) -> None:
    done = sojourn("shell", task, *words)
    assert done.returncode == 125
    assert b"Usage" in done.stderr


def test_a_terminal_that_is_not_there_is_said(task: str, sojourn: Sojourn) -> None:
    sojourn("exec", task, "--", "true")
    done = sojourn("shell", task, "--attach", "nosuch")
    assert done.returncode == 125
    assert b"not_found" in done.stderr


class Cutter:
    """A proxy in front of the stack whose connections can be cut, and which can refuse new ones."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="cutter")
        self._thread.start()
        assert self._ready.wait(60)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        await self._cut()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer), name="carry")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with connection(asyncio.open_connection("127.0.0.1", self._target)) as (there, back):
                await asyncio.gather(_pass(reader, back), _pass(there, writer))
        finally:
            await gone(writer)

    async def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every connection that there is."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    sink.close()


@pytest.fixture
def cutter(stack: Stack) -> Iterator[Cutter]:
    made = Cutter(int(stack.address.rpartition(":")[2]))
    yield made
    made.close()


def test_a_broken_connection_is_taken_up_without_gap_or_duplicate(stack: Stack, task: str, cutter: Cutter) -> None:
    """PT09, RE09"""
    env = {"SANDBOX_GATEWAY_URL": f"http://127.0.0.1:{cutter.port}", "SANDBOX_API_KEY": stack.api_key}
    script = "for i in $(seq 1 60); do echo line-$i; sleep 0.05; done; read x; echo got-$x"
    with shell(stack, task, "--", "bash", "-c", script, env=env) as tty:
        tty.read_until("line-5\r\n")
        cutter.cut()
        tty.read_until("trying again")
        tty.read_until("line-30\r\n")
        cutter.cut()
        tty.read_until("line-60\r\n")
        tty.type("typed\r")
        tty.read_until("got-typed")
        assert tty.wait() == 0
        assert tty.settings == tty.before
    numbers = [int(found) for found in re.findall(rb"line-(\d+)\r\n", tty.shown)]
    assert numbers == list(range(1, 61))
    assert tty.shown.count(b"trying again") >= 2


def test_leaving_works_while_nothing_is_reachable(stack: Stack, task: str) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        with stack.client() as client:
            assert client.task(task).exec("true").exit_code == 0
        env = {"SANDBOX_GATEWAY_URL": f"http://127.0.0.1:{deaf.getsockname()[1]}", "SANDBOX_API_KEY": stack.api_key}
        with shell(stack, task, "--attach", "some", env=env) as tty:
            deadline = time.monotonic() + 30
            while tty.settings == tty.before and time.monotonic() < deadline:
                time.sleep(0.05)
            tty.type("hello\r~.")
            assert tty.wait() == 0
            assert tty.settings == tty.before
