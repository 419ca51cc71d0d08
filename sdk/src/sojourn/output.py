"""Following the output of a command that already runs, by offset: what a reconnect and a second viewer do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import aiohttp

from sojourn.errors import ConnectionFailed, SojournError, UnexpectedAnswer
from sojourn.paths import piece
from sojourn.transport import Patience, Transport, decode
from sojourn.types import Gap, Output, ProcessInfo, StreamName

OFFSET_HEADER: Final = "Sandbox-Output-Offset"
STREAMS: Final[tuple[StreamName, ...]] = ("stdout", "stderr")
QUIET_POLL_SEC: Final = 1.0
_WAITING_PIECES: Final = 16  # between the two streams' readers and whoever takes the merged output


async def process_info(
    transport: Transport, task: str, process_id: str, wait_sec: float = 0.0, deadline_sec: float = 30.0
) -> ProcessInfo:
    """The command's state now, or as soon as it has ended within `wait_sec`."""
    answer = await transport.call(
        "GET",
        f"{task}/processes/{piece(process_id)}",
        retry="safe",
        params={"wait_sec": f"{wait_sec:g}"} if wait_sec > 0 else None,
        deadline_sec=wait_sec + deadline_sec,
    )
    return decode(answer.body, ProcessInfo)


async def read_output(
    transport: Transport,
    task: str,
    process_id: str,
    stream: StreamName,
    offset: int = 0,
    *,
    follow: bool,
) -> AsyncGenerator[Output | Gap, None]:
    """One stream from byte `offset` on: with `follow` to the end of the command, else what there is now.

    Survives broken connections; dropped bytes come as a Gap, never silently."""
    path = f"{task}/processes/{piece(process_id)}/output"
    patience = Patience(transport)
    pause_sec = 0.0
    enough: int | None = None  # without `follow`: what had been written when the first answer came
    while True:
        began_at = offset
        try:
            # Asked before the output is read: what a command that has ended wrote is then all there.
            info = await process_info(transport, task, process_id, wait_sec=pause_sec)
            written = info.stdout_bytes if stream == "stdout" else info.stderr_bytes
            enough = written if enough is None and not follow else enough
            params = {"stream": stream, "offset": str(offset), "follow": "true" if follow else "false"}
            async with transport.open("GET", path, params=params) as response:
                first = _first_offset(response)
                if first > offset:
                    yield Gap(stream, offset, first - offset)
                    offset = first
                async for data in response.content.iter_any():
                    yield Output(stream, offset, data)
                    offset += len(data)
        except SojournError as why:
            # Silence is no failure, for a command may be quiet; the question that comes next finds a dead server out.
            silence = isinstance(why, ConnectionFailed) and isinstance(why.__cause__, TimeoutError)
            if offset > began_at or silence:
                patience.renew()
            else:
                await patience.bear(why)
            continue
        patience.renew()
        if (info.ended and offset >= written) or (enough is not None and offset >= enough):
            return
        if offset == began_at and (info.ended or not follow):
            return
        # Nothing, of a command that runs: it has closed the stream, or has ended meanwhile.
        pause_sec = QUIET_POLL_SEC if offset == began_at else 0.0


def _first_offset(response: aiohttp.ClientResponse) -> int:
    try:
        return int(response.headers[OFFSET_HEADER])
    except (KeyError, ValueError):
        raise UnexpectedAnswer(f"output came without a usable {OFFSET_HEADER}", status=response.status) from None


async def merged(readers: list[AsyncGenerator[Output | Gap, None]]) -> AsyncGenerator[Output | Gap, None]:
    """What several readers give, as it comes. The first error ends all of them."""
    queue: asyncio.Queue[Output | Gap | BaseException | None] = asyncio.Queue(_WAITING_PIECES)

    async def pump(reader: AsyncGenerator[Output | Gap, None]) -> None:
        try:
            async for piece_ in reader:
                await queue.put(piece_)
        except Exception as why:
            await queue.put(why)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(reader), name="sojourn-output") for reader in readers]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_both(
    transport: Transport,
    task: str,
    process_id: str,
    offsets: dict[StreamName, int],
    *,
    follow: bool,
) -> AsyncGenerator[Output | Gap, None]:
    """Both streams, each from its offset on. Their order against each other is only roughly as written."""
    readers = [read_output(transport, task, process_id, name, offsets[name], follow=follow) for name in STREAMS]
    async with aclosing(merged(readers)) as pieces:
        async for got in pieces:
            yield got
