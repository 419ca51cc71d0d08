"""A process of a task by its id: its state, output, input, signals and end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Final

import msgspec

from sojourn.errors import Conflict, DeadlineExceeded
from sojourn.output import process_info, read_both, read_output
from sojourn.paths import piece
from sojourn.transport import Transport
from sojourn.types import Exit, Gap, Output, ProcessInfo, StreamName

POLL_SEC: Final = 20.0  # one question for an outcome stays open this long
STDIN_PIECE_BYTES: Final = 256 << 10
STDIN_PIECE_SEC: Final = 3600.0  # a command that does not read holds its input back; it may for this long


def new_process_id() -> str:
    return "p" + uuid.uuid4().hex


class AsyncProcess:
    """A handle on one command. Holding it costs nothing; the command goes on without it."""

    def __init__(self, transport: Transport, task: str, process_id: str) -> None:
        self._transport = transport
        self._task = task
        self.id = process_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def info(self) -> ProcessInfo:
        """Its state now."""
        return await process_info(self._transport, self._task, self.id)

    async def wait(self, timeout_sec: float | None = None) -> Exit:
        """Its outcome, once it has ended. Raises DeadlineExceeded after `timeout_sec`; the command then goes on."""
        try:
            async with asyncio.timeout(timeout_sec):
                while True:
                    info = await process_info(self._transport, self._task, self.id, wait_sec=POLL_SEC)
                    if info.ended:
                        return info.as_exit()
        except TimeoutError:
            raise DeadlineExceeded(f"command {self.id} has not ended within {timeout_sec:g} s; it goes on") from None

    def output(
        self, stream: StreamName | None = None, *, offset: int = 0, follow: bool = False
    ) -> AsyncGenerator[Output | Gap, None]:
        """What it wrote, from byte `offset` on: of one stream, or of both. With `follow` until it has ended.

        Bytes that nobody read in time come as a Gap."""
        if stream is not None:
            return read_output(self._transport, self._task, self.id, stream, offset, follow=follow)
        offsets: dict[StreamName, int] = {"stdout": offset, "stderr": offset}
        return read_both(self._transport, self._task, self.id, offsets, follow=follow)

    async def write_stdin(self, data: bytes | str) -> None:
        """Gives it input, and returns when all of it is in its pipe. Raises Conflict once its stdin is closed."""
        raw = data.encode() if isinstance(data, str) else data
        for at in range(0, len(raw), STDIN_PIECE_BYTES):
            await self._transport.call(
                "POST",
                self._path("/stdin"),
                retry="unsent",
                data=raw[at : at + STDIN_PIECE_BYTES],
                deadline_sec=STDIN_PIECE_SEC,
            )

    async def close_stdin(self) -> None:
        """The end of its input."""
        await self._transport.call("POST", self._path("/stdin/close"), retry="safe")

    async def feed_stdin(self, source: AsyncIterable[bytes]) -> None:
        """Gives it all of `source`, then the end of input. A command that has stopped reading is no error."""
        try:
            async for data in source:
                await self.write_stdin(data)
            await self.close_stdin()
        except Conflict:
            pass  # it has closed its input or has ended: like a local pipe without a reader

    async def signal(self, signal: str | int = "INT", *, to: str = "tree") -> None:
        """Sends a signal (`"INT"`, `"SIGINT"` or 2) to the command and its descendants, or to the `leader` alone."""
        await self._transport.call("POST", self._path("/signal"), retry="unsent", json={"signal": signal, "to": to})

    async def kill(self) -> None:
        """Ends the command and all of its descendants. Its outcome can still be read."""
        await self.signal("KILL")

    async def delete(self) -> None:
        """Kills the command with its descendants, and forgets its output and outcome."""
        await self._transport.call("DELETE", self._path(""), retry="safe")

    def _path(self, rest: str) -> str:
        return f"{self._task}/processes/{piece(self.id)}{rest}"


class StartedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a start."""

    id: str
    pid: int | None = None
