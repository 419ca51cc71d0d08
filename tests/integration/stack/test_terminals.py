"""Terminals through the whole product: their traffic is work, their connections are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from executor.wire import FRAME_PONG
from tests.support.sockets import socket_at
from tests.support.stack import Stack

IDLE_SEC = 5


@pytest.fixture(scope="module")
def short_stack() -> Iterator[Stack]:
    """Its sandboxes are taken back after a short while without work."""
    stack = Stack(SANDBOX_TASK_IDLE_TTL=str(IDLE_SEC)).start()
    yield stack
    stack.remove()


@pytest.fixture
async def short(short_stack: Stack) -> AsyncIterator[Stack]:
    async with short_stack:
        yield short_stack


async def stage(stack: Stack, task: str) -> str:
    async with stack.http.get(f"{stack.url}/sandbox/task/{task}") as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["stage"])


async def opened(stack: Stack, task: str, command: str) -> str:
    """The address of a new terminal."""
    url = f"{stack.url}/sandbox/task/{task}/terminals"
    async with stack.http.post(url, json={"command": command}) as answer:
        assert answer.status == 201, await answer.text()
        return f"{url}/{(await answer.json())['id']}"


async def until_reclaimed(stack: Stack, task: str) -> None:
    give_up = time.monotonic() + 60
    while await stage(stack, task) != "reclaimed":
        assert time.monotonic() < give_up, "an idle terminal keeps its sandbox"
        await asyncio.sleep(0.2)


async def test_a_dead_clients_terminal_is_taken_back_after_its_last_real_frame(short: Stack) -> None:
    """RE09: the client says and reads nothing more, its connection stays open"""
    async with socket_at(short.http, await opened(short, "dead", "cat"), {}) as socket:
        await socket.type(b"x\n")
        await socket.until_text(b"x\r\nx\r\n")
        await until_reclaimed(short, "dead")


async def test_a_client_that_only_answers_heartbeats_renews_nothing(short: Stack) -> None:
    """RE09"""
    async with socket_at(short.http, await opened(short, "quiet", "cat"), {}) as socket:
        await socket.type(b"x\n")
        await socket.until_text(b"x\r\nx\r\n")
        reclaimed = asyncio.create_task(until_reclaimed(short, "quiet"), name="reclaimed")
        while not reclaimed.done():
            try:
                await socket.send(FRAME_PONG)
            except ConnectionError:
                break
            await asyncio.sleep(0.2)
        await reclaimed
        await socket.to_end()
        assert [one.error.code for one in socket.errors] == ["sandbox_gone"]
        assert socket.close_code == 4410


async def test_input_and_output_keep_a_sandbox(short: Stack) -> None:
    """RE07"""
    shows = "i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo tick-$i; sleep 0.2; done; read x"
    async with socket_at(short.http, await opened(short, "busy", shows), {}) as socket:
        await socket.until_text(b"tick-40")  # well over the idle length after the start
        assert await stage(short, "busy") in ("active", "idle")
        for _ in range(30):  # and by what is typed
            await socket.type(b"y")
            await asyncio.sleep(0.25)
        assert await stage(short, "busy") in ("active", "idle")
        await socket.type(b"\n")
        await socket.to_end()
    assert socket.exit is not None
    assert socket.exit.exit_code == 0


async def test_what_a_terminal_shows_to_nobody_keeps_its_sandbox_too(short: Stack) -> None:
    """RE07"""
    address = await opened(short, "alone", "i=0; while [ $i -lt 70 ]; do i=$((i+1)); echo tick-$i; sleep 0.2; done")
    await asyncio.sleep(2.5 * IDLE_SEC)  # the case's own time: more than twice what an idle sandbox has
    async with socket_at(short.http, address, {}) as socket:
        await socket.to_end()
    assert socket.exit is not None
    assert b"tick-1\r\n" in socket.stdout
    assert b"tick-70\r\n" in socket.stdout
    await until_reclaimed(short, "alone")
