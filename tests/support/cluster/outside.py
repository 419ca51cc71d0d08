"""What stands beside a real node's network: `python -m tests.support.cluster.outside WHAT ARGUMENTS`.

`forward HOST PORT TO_HOST TO_PORT` passes connections on. `public HOST...` plays an internet's servers: it answers on
those addresses, as a name server (udp and tcp 53) and as any other (tcp 80, 443), with what it was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Final

PUBLIC_TCP: Final = (53, 80, 443)
_CHUNK_BYTES: Final = 1 << 16


async def _pumped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def forward(host: str, port: int, to_host: str, to_port: int) -> None:
    under_way: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection(to_host, to_port)
            with contextlib.closing(to_writer):
                await asyncio.gather(_pumped(reader, to_writer), _pumped(to_reader, writer))

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(passed_on(reader, writer))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    await (await asyncio.start_server(connected, host, port)).serve_forever()


class _Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._transport.sendto(data, addr)


async def public(hosts: Sequence[str]) -> None:
    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            await _pumped(reader, writer)

    for host in hosts:
        await asyncio.get_running_loop().create_datagram_endpoint(_Echo, local_addr=(host, 53))
        for port in PUBLIC_TCP:
            await asyncio.start_server(answered, host, port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "forward":
        host, port, to_host, to_port = arguments
        asyncio.run(forward(host, int(port), to_host, int(to_port)))
    else:
        asyncio.run(public(arguments))
