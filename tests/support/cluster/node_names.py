"""Plays a cluster's DNS for a real node: NOT CoreDNS. It answers with the addresses of Services."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import struct
from collections.abc import AsyncIterator
from typing import Final

from tests.support.cluster.api import KubeApi

DOMAIN: Final = "cluster.local"
_PORT: Final = 53
_ADDRESS, _ANY_CLASS = 1, 1
_TTL_SEC: Final = 5
_NO_SUCH_NAME: Final = 0x8183
_FOUND: Final = 0x8180


def asked_of(query: bytes) -> tuple[str, int, bytes]:
    """The name, the kind of record and the question itself. Raises IndexError, UnicodeDecodeError, struct.error."""
    at, labels = 12, []
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode("ascii"))
        at += size + 1
    (kind,) = struct.unpack_from("!H", query, at + 1)
    return ".".join(labels).lower(), kind, query[12 : at + 5]


def answer_to(query: bytes, address: str | None) -> bytes:
    """One A record; no record where another kind is asked for; no such name where the address is None."""
    _, kind, question = asked_of(query)
    record = b""
    if address is not None and kind == _ADDRESS:
        packed = ipaddress.IPv4Address(address).packed
        record = b"\xc0\x0c" + struct.pack("!HHIH", _ADDRESS, _ANY_CLASS, _TTL_SEC, 4) + packed
    flags = _NO_SUCH_NAME if address is None else _FOUND
    return query[:2] + struct.pack("!HHHHH", flags, 1, 1 if record else 0, 0, 0) + question + record


class _Names(asyncio.DatagramProtocol):
    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        task = asyncio.create_task(self._answer(data, addr), name="cluster-name")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, query: bytes, whom: tuple[str, int]) -> None:
        with contextlib.suppress(IndexError, UnicodeDecodeError, struct.error):
            name, _, _ = asked_of(query)
            self._transport.sendto(answer_to(query, await self._address_of(name)), whom)

    async def _address_of(self, name: str) -> str | None:
        service, _, rest = name.partition(".")
        namespace, _, domain = rest.partition(".")
        if domain != f"svc.{DOMAIN}":
            return None
        found = await self._api.find(f"/api/v1/namespaces/{namespace}/services/{service}")
        address = found["spec"].get("clusterIP", "None") if found is not None else "None"
        return None if address == "None" else str(address)


@contextlib.asynccontextmanager
async def cluster_names(host: str, api: KubeApi) -> AsyncIterator[None]:
    """A name server at the address, which pods ask by udp, for as long as the loop runs."""
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(lambda: _Names(api), local_addr=(host, _PORT))
    try:
        yield
    finally:
        transport.close()
        for task in list(names.tasks):
            task.cancel()
        await asyncio.gather(*names.tasks, return_exceptions=True)
