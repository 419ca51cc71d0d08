"""A profile with gVisor through the whole product: from the warm pool to a pod that memory has ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from sojourn import AsyncClient
from tests.support.sockets import socket_at
from tests.support.stack import Stack

CONFIG = """
[[profiles]]
name = "sandboxes-default"
isolation = "gvisor"
memory = "512Mi"
disk = "64Mi"
pool = { min = 1, max = 2 }
"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="gVisor needs root here"),
    pytest.mark.skipif(shutil.which("runsc") is None, reason="NOT TESTED: no runsc (Debian: apt-get install runsc)"),
]


@pytest.fixture(scope="module")
def gvisor_stack() -> Iterator[Stack]:
    stack = Stack(config=CONFIG).start()
    yield stack
    stack.remove()


@pytest.fixture
async def gvisor(gvisor_stack: Stack) -> AsyncIterator[Stack]:
    async with gvisor_stack:
        yield gvisor_stack


@pytest.fixture
async def client(gvisor: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gvisor.url, gvisor.key) as open_client:
        yield open_client


async def test_a_task_gets_a_warm_pod_and_keeps_it(gvisor: Stack) -> None:
    deadline = time.monotonic() + 60
    while not gvisor.pods():
        assert time.monotonic() < deadline, gvisor.log.read_text()[-3000:]
        await asyncio.sleep(0.1)
    first = await gvisor.exec("warm", "uname -r; echo kept > file")
    assert first["stdout"].strip() != os.uname().release
    assert first["provisioned"] in ("warm", "cold")
    second = await gvisor.exec("warm", "cat file")
    assert (second["stdout"], second["provisioned"], second["pod_id"]) == ("kept\n", "bound", first["pod_id"])
    deadline = time.monotonic() + 90
    while True:
        another = await gvisor.exec(f"warm-{time.monotonic()}", "true")
        if another["provisioned"] == "warm":
            break
        assert time.monotonic() < deadline, "the pool is never filled"
        await asyncio.sleep(2)


async def test_everything_that_a_task_does_works_in_it(gvisor: Stack, client: AsyncClient) -> None:
    task = client.task("works")
    timed_out = await task.exec("setsid sleep 300 & sleep 300", timeout_sec=1)
    assert timed_out.timed_out
    content = os.urandom(100_000)
    await task.files.write("dir/file", content)
    assert await task.files.read("dir/file") == content
    seen = b""
    async for event in task.stream("for i in 1 2 3; do echo $i; done"):
        seen += getattr(event, "data", b"")
    assert seen == b"1\n2\n3\n"
    async with await task.session() as session:
        await session.exec("cd /tmp; A=kept")
        assert (await session.exec("pwd; echo $A")).stdout == "/tmp\nkept\n"
    process = await task.start("cat; echo over")
    await process.write_stdin(b"in\n")
    await process.close_stdin()
    assert (await process.wait(30)).exit_code == 0
    url = f"{gvisor.url}{gvisor.task('works')}/terminals"
    async with gvisor.http.post(url, json={"command": "tty; exit 4"}) as answer:
        assert answer.status == 201, await answer.text()
        id = (await answer.json())["id"]
    async with socket_at(gvisor.http, f"{url}/{id}", {}) as terminal:
        await terminal.to_end()
    assert terminal.exit is not None
    assert b"/dev/pts/" in terminal.stdout


async def test_a_full_disk_and_memory_that_runs_out_are_told(gvisor: Stack) -> None:
    full = await gvisor.exec("hog", "head -c 100M /dev/zero > big")
    assert "No space left on device" in full["stderr"]
    await gvisor.exec("hog", "rm big")
    body = {"command": ["python3", "-c", "b = bytearray(2 << 30)"]}
    status, _ = await gvisor.call("POST", f"{gvisor.task('hog')}/exec", json=body)
    assert status >= 400, "gVisor dies as a whole"
    after = await gvisor.exec("hog", "echo new")
    assert (after["stdout"], after["workspace"]) == ("new\n", "fresh")
    assert after["previous"]["reason"] == "oom"
