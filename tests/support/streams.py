"""Connections made by hand, which are gone when they are let go of, whatever was still to be written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def gone(writer: asyncio.StreamWriter) -> None:
    """Breaks the connection off, and returns when nothing is left of it.

    `StreamWriter.close` alone leaves that to a later turn of the loop, and to a peer that reads all that is written:
    a loop that ends before leaves an open socket to the garbage collector, in the midst of another test."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def connection(connecting: Awaitable[Ends]) -> AsyncIterator[Ends]:
    """What `connecting`, a call of `asyncio.open_connection` or its like, makes."""
    reader, writer = await connecting
    try:
        yield reader, writer
    finally:
        await gone(writer)
