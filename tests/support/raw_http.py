"""HTTP by hand over an executor's socket: for what no client library would send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from tests.support.executor_pod import Pod
from tests.support.streams import connection

DEADLINE_SEC: Final = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # by lower-case names
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error in our shape; fails for everything else."""
        assert self.headers["content-type"].startswith("application/json"), self
        return str(self.json["error"]["code"])


class Raw:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, limit_sec: float = DEADLINE_SEC) -> Answer:
        """The next one with a Content-Length. Raises IncompleteReadError where the connection ends first."""
        async with asyncio.timeout(limit_sec):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status, *lines = head.decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(status.split()[1]), headers, body)

    async def ended(self, limit_sec: float = DEADLINE_SEC) -> bytes:
        """What still comes until the executor ends the connection; fails where it does not."""
        got = b""
        async with asyncio.timeout(limit_sec):
            try:
                while piece := await self.reader.read(65_536):
                    got += piece
            except ConnectionError:
                pass
        return got


@asynccontextmanager
async def raw(pod: Pod) -> AsyncIterator[Raw]:
    async with connection(asyncio.open_unix_connection(pod.process.socket, limit=1 << 24)) as ends:
        yield Raw(*ends)


def request(
    pod: Pod, line: str, body: bytes | None = None, *headers: str, token: str | None = None, length: int | None = None
) -> bytes:
    """`line` is method and target. With a body its length is announced, or another `length`."""
    lines = [f"{line} HTTP/1.1", "Host: pod", f"Authorization: Bearer {token or pod.token}", *headers]
    if body is not None or length is not None:
        lines.append(f"Content-Length: {len(body or b'') if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
