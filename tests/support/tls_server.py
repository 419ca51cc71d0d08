"""Servers that speak TLS on loopback under names of the tests' own, and the dialler that may reach them alone."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest

from manager.egress.addresses import Address
from manager.egress.dial import Dialler, DialRules

PUBLIC: Address = IPv4Address("198.41.0.4")  # one that the rule lets pass; nothing is ever sent there


class Certificates:
    """A key and certificate for the names of the tests, and contexts of both sides."""

    def __init__(self, folder: Path) -> None:
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("the tests' certificate is made by the program openssl, which is not here")
        names = "DNS:archives.test,DNS:*.archives.test,IP:127.0.0.1"
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        subprocess.run(
            [
                openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-keyout", str(key), "-out", str(certificate), "-days", "30", "-subj", "/CN=archives.test",
                "-addext", f"subjectAltName={names}",
            ],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(certificate, key)
        self.client = ssl.create_default_context(cafile=str(certificate))


@dataclass
class TestDialler(Dialler):
    """The real one, but for addresses that a test opens by name, and for names that it makes up.

    `answers`: what each lookup of a name gives, the last one for ever. `looked_up`: the names in their order."""

    __test__ = False
    opened: set[tuple[str, int]] = field(default_factory=set)
    answers: dict[str, list[list[str]]] = field(default_factory=dict)
    looked_up: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.look_up = self._answer

    def allowed(self, address: Address, port: int) -> bool:
        return (str(address), port) in self.opened or super().allowed(address, port)

    def _answer(self, host: str) -> list[Address]:
        self.looked_up.append(host)
        if host not in self.answers:
            raise OSError("no such name")
        answers = self.answers[host]
        return [ip_address(text) for text in (answers.pop(0) if len(answers) > 1 else answers[0])]


def dialler_for(threads: ThreadPoolExecutor, *ports: int) -> TestDialler:
    return TestDialler(DialRules(ports=frozenset({443, *ports})), threads)


@dataclass
class Served:
    """`requests`: the heads that came."""

    port: int
    requests: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://archives.test:{self.port}"


def reply(body: bytes, status: str = "200 OK", headers: Mapping[str, str] | None = None) -> bytes:
    head = {"Content-Length": str(len(body)), "Connection": "close"} | dict(headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


@asynccontextmanager
async def tls_server(
    certificates: Certificates, answer: Callable[[str], bytes | AsyncIterator[bytes]]
) -> AsyncIterator[Served]:
    """Answers each request with what `answer` gives for its path: all at once, or as it comes."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            served.requests.append(head)
            given = answer(head.split(b" ")[1].decode())
            if isinstance(given, bytes):
                writer.write(given)
            else:
                async for piece in given:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # a drain that need not wait lets nobody else say that the client is gone
                    if writer.is_closing():
                        return  # the client had enough
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client had enough
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=certificates.server)
    served = Served(server.sockets[0].getsockname()[1])
    try:
        yield served
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks))
