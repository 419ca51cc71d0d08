"""A server on a Unix socket that answers with whatever bytes a test gives it: a pod whose executor was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.streams import gone

Answer = Callable[["Caller"], Awaitable[None]]


class Caller:
    """One connection; `requests` counts those that came on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.head = b""
        self.body = b""

    async def request(self) -> bool:
        """Reads the next request whole; False where the caller has gone."""
        try:
            self.head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        length = 0
        for line in self.head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        self.body = await self.reader.readexactly(length)
        return True

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


def answer(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*chunks: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks)


@asynccontextmanager
async def hostile_pod(socket: Path, behave: Answer | bytes) -> AsyncIterator[list[Caller]]:
    """`behave`: what to do with each request; bytes: what to answer. Gives the connections that were made."""
    callers: list[Caller] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        caller = Caller(reader, writer)
        callers.append(caller)
        try:
            while await caller.request():
                if isinstance(behave, bytes):
                    await caller.send(behave)
                else:
                    await behave(caller)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(serve, str(socket))
    try:
        yield callers
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks))
        for caller in callers:
            await gone(caller.writer)
