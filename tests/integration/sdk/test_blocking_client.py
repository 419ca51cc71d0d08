"""The blocking client: threads, running loops, Ctrl-C and a clean end."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web

import sojourn
from sojourn import Client, CommandFailed, Exit, Output, Started
from sojourn.errors import ConnectionFailed, Forbidden
from tests.support.fake_manager import STDOUT, FakeManager, error, exited, frames, output, started

EXEC = "POST /sandbox/task/t/exec"


async def says_hello(request: web.Request) -> web.StreamResponse:
    return await frames(request, started("p1"), output(STDOUT, 0, b"hello"), exited("p1", 1))


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


@pytest.mark.parametrize(
    ("blocking", "original"),
    [
        (sojourn.Client, sojourn.AsyncClient),
        (sojourn.Task, sojourn.AsyncTask),
        (sojourn.Process, sojourn.AsyncProcess),
        (sojourn.Session, sojourn.AsyncSession),
        (sojourn.Files, sojourn.AsyncFiles),
        (sojourn.Keys, sojourn.AsyncKeys),
    ],
)
def test_every_asynchronous_method_has_a_blocking_one_with_its_signature(blocking: type, original: type) -> None:
    asynchronous_only = {"feed_stdin", "close", "terminal", "terminal_by_id"}
    for name, method in inspect.getmembers(original, inspect.isfunction):
        if name.startswith("_") or name in asynchronous_only:
            continue
        twin = inspect.getattr_static(blocking, name)
        assert inspect.signature(twin) == inspect.signature(method), name
        assert twin.__doc__ == method.__doc__, name


async def test_commands_run_while_another_loop_runs(fake: FakeManager) -> None:
    fake.on(EXEC, says_hello)

    def work() -> tuple[str, int]:
        async def inside_a_loop() -> tuple[str, int]:
            with Client(fake.address, "key") as client:
                result = client.task("t").exec("x")  # blocks this loop, not the client's
                return result.stdout, result.exit_code

        return asyncio.run(inside_a_loop())

    assert await in_thread(work) == ("hello", 1)


async def test_a_stream_is_iterated_event_by_event(fake: FakeManager) -> None:
    fake.on(EXEC, says_hello)

    def work() -> list[type]:
        with Client(fake.address, "key") as client, client.task("t").stream("x") as events:
            kinds = [type(event) for event in events]
            assert events.exit is not None
            return kinds

    assert await in_thread(work) == [Started, Output, Exit]


async def test_a_stream_left_early_is_closed(fake: FakeManager) -> None:
    fake.on(EXEC, says_hello)

    def work() -> int:
        with Client(fake.address, "key") as client:
            for _event in client.task("t").stream("x"):
                break
            with client.task("t").stream("x") as events:
                next(events)
            return len(list(events))

    assert await in_thread(work) == 0


async def test_errors_are_raised_as_they_are(fake: FakeManager) -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        return error("forbidden", 403)

    fake.on(EXEC, says_hello)
    fake.on("GET /api/v1/keys", refuses)

    def work() -> None:
        with Client(fake.address, "key") as client:
            with pytest.raises(CommandFailed):
                client.task("t").exec("x", check=True)
            with pytest.raises(Forbidden):
                client.keys.list()

    await in_thread(work)


async def test_many_threads_share_one_client(fake: FakeManager) -> None:
    fake.on(EXEC, says_hello)

    def work() -> set[str]:
        with Client(fake.address, "key") as client, ThreadPoolExecutor(8) as pool:
            return set(pool.map(lambda _: client.task("t").exec("x").stdout, range(40)))

    assert await in_thread(work) == {"hello"}


async def test_closing_ends_the_thread_and_can_be_repeated(fake: FakeManager) -> None:
    fake.on(EXEC, says_hello)

    def work() -> None:
        before = set(threading.enumerate())
        client = Client(fake.address, "key")
        client.task("t").exec("x")
        assert len(set(threading.enumerate()) - before) >= 1
        client.close()
        client.close()
        assert not set(threading.enumerate()) - before
        with pytest.raises(RuntimeError, match="closed"):
            client.health()

    await in_thread(work)


INTERRUPTED = """
import sys
from sojourn import Client
with Client(sys.argv[1], "key") as client:
    try:
        for event in client.task("t").stream("x"):
            print(type(event).__name__, flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print("closed", flush=True)
"""


async def test_ctrl_c_interrupts_a_call_and_leaves_a_usable_client(fake: FakeManager) -> None:
    gone = asyncio.Event()

    async def hangs(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(started("p1"))
        try:
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.02)
        finally:
            gone.set()
        return response

    fake.on(EXEC, hangs)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", INTERRUPTED, fake.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"Started\n"
        child.send_signal(signal.SIGINT)
        rest, errors = await child.communicate()
        assert rest == b"interrupted\nclosed\n"
        assert errors == b""
        assert child.returncode == 0
        await asyncio.wait_for(gone.wait(), 60)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def test_a_server_that_is_not_there_is_an_error_not_a_hang() -> None:
    with Client("http://127.0.0.1:1", "key", retry_sec=0.1) as client, pytest.raises(ConnectionFailed):
        client.health()
