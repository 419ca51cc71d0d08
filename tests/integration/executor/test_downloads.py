"""Large files leave by sendfile: every byte, in order, however the other side reads, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.executor_pod import Pod, until
from tests.support.streams import connection

SIZE = 24 << 20


@pytest.fixture
def content(executor: Pod) -> tuple[str, bytes]:
    data = random.Random(7).randbytes(SIZE)
    path = Path(executor.process.workspace) / "large"
    path.write_bytes(data)
    os.chmod(path, 0o644)
    return "large", data


@asynccontextmanager
async def asked(pod: Pod, name: str, *headers: str) -> AsyncIterator[asyncio.StreamReader]:
    """The answer to a download, its head not yet read."""
    lines = [f"GET /v1/files?path={name} HTTP/1.1", "Host: x", f"Authorization: Bearer {pod.process.token}", *headers]
    async with connection(asyncio.open_unix_connection(pod.process.socket, limit=1 << 16)) as (reader, writer):
        writer.write("\r\n".join([*lines, "", ""]).encode())
        yield reader


async def test_a_large_file_and_any_part_of_it_come_whole(executor: Pod, content: tuple[str, bytes]) -> None:
    name, data = content
    for start, end in ((0, SIZE - 1), (1, SIZE - 2), (12_345_678, 20_000_000), (SIZE - 300_000, SIZE - 1)):
        got = await executor.call("GET", "/v1/files", params={"path": name}, headers={"Range": f"bytes={start}-{end}"})
        assert got.status == 206
        assert hashlib.sha256(got.body).digest() == hashlib.sha256(data[start : end + 1]).digest()
    whole = await executor.call("GET", "/v1/files", params={"path": name})
    assert whole.status == 200
    assert whole.body == data


async def test_a_reader_that_rests_gets_every_byte_and_others_are_served_meanwhile(
    executor: Pod, content: tuple[str, bytes]
) -> None:
    name, data = content
    got = bytearray()
    async with asyncio.timeout(60), asked(executor, name) as reader, asked(executor, name) as idle:
        await reader.readuntil(b"\r\n\r\n")
        await idle.readuntil(b"\r\n\r\n")  # reads no more at all
        while len(got) < len(data):
            got += await reader.read(1 << 20)
            if len(got) % 7 == 0:
                await asyncio.sleep(0.05)
                assert (await executor.call("GET", "/v1/files/stat", params={"path": name})).status == 200
    assert bytes(got) == data


async def test_further_calls_of_the_connection_are_answered(executor: Pod, content: tuple[str, bytes]) -> None:
    name, data = content
    opening = asyncio.open_unix_connection(executor.process.socket)
    async with asyncio.timeout(60), connection(opening) as (reader, writer):
        head = (
            f"GET /v1/files?path={name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {executor.process.token}\r\n\r\n"
        )
        writer.write(head.encode() * 3)
        for _ in range(3):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(SIZE) == data


async def test_callers_that_hang_up_leave_no_descriptor(executor: Pod, content: tuple[str, bytes]) -> None:
    name, _ = content
    await executor.call("GET", "/v1/files/stat", params={"path": name})
    before = executor.process.open_files()
    for _ in range(10):
        async with asked(executor, name) as reader:
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(100_000)
    await until(lambda: executor.process.open_files() <= before, "descriptors of abandoned downloads are closed")


async def test_a_large_file_that_is_cut_breaks_the_answer_off(executor: Pod, content: tuple[str, bytes]) -> None:
    name, _ = content
    async with asyncio.timeout(60), asked(executor, name) as reader:
        await reader.readuntil(b"\r\n\r\n")
        os.truncate(Path(executor.process.workspace) / name, 1 << 20)
        got = 0
        while piece := await reader.read(1 << 20):
            got += len(piece)
    assert got < SIZE
