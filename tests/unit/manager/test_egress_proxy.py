"""The proxy that dials for pods (S12): what it refuses to dial, what it passes on, what it bounds.

Names are looked up in a table of the test, and a connection to a public address ends at a server on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Final

import psutil
import pytest

from manager.egress import dial, proxy
from manager.egress.addresses import Address
from manager.egress.dial import DialRules, is_own
from manager.egress.meter import Meter
from manager.egress.proxy import PodProxy
from tests.support.streams import Ends, connection
from tests.unit.manager.test_egress_addresses import SPELLINGS

NAMES: Final = {
    "public.test": ["11.1.1.1"],
    "loopback.test": ["127.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "mapped.test": ["::ffff:10.0.0.1"],
    "nat64.test": ["64:ff9b::a9fe:a9fe"],
    "six.test": ["fd00:ec2::254"],
    "mixed.test": ["127.0.0.1", "11.1.1.2", "10.0.0.1", "::1"],
    "localhost": ["127.0.0.1", "::1"],
    "localhost.": ["127.0.0.1"],
}

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class World:
    """A proxy on a Unix socket, and what it has dialled."""

    def __init__(self, directory: Path) -> None:
        self.socket = str(directory / "proxy.sock")
        self.dialled: list[tuple[str, int]] = []
        self.handler: Handler = greet
        self.server_port = 0

    async def ask(self, request: bytes) -> bytes:
        opening = asyncio.open_unix_connection(self.socket)
        async with connection(opening) as (reader, writer), asyncio.timeout(60):
            writer.write(request)
            return await reader.read()

    @asynccontextmanager
    async def tunnel(self, host: str, port: int = 443) -> AsyncIterator[Ends]:
        async with connection(asyncio.open_unix_connection(self.socket)) as (reader, writer):
            writer.write(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            yield reader, writer


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\n" + head)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65_536):
        writer.write(piece)
        await writer.drain()


@pytest.fixture
async def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    world = World(tmp_path)
    threads = ThreadPoolExecutor(8)
    proxies: list[PodProxy] = []

    def look_up(host: str) -> list[Address]:
        if host not in NAMES:
            raise socket.gaierror("no such name")
        return [ip_address(text) for text in NAMES[host]]

    async def connected(addresses: list[Address], port: int) -> socket.socket:
        world.dialled.append((str(addresses[0]), port))
        connection = socket.create_connection(("127.0.0.1", world.server_port), timeout=10)
        connection.setblocking(False)
        return connection

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await world.handler(reader, writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    monkeypatch.setattr(dial, "_look_up", look_up)
    monkeypatch.setattr(dial, "_connected", connected)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    world.server_port = server.sockets[0].getsockname()[1]

    async def open_one(
        rules: DialRules | None = None, *, bytes_per_sec: int = 1 << 30, connections: int = 16, idle_sec: float = 60.0
    ) -> World:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(world.socket)
        one = PodProxy(
            listener, rules or DialRules(), threads, bytes_per_sec=bytes_per_sec, connections=connections,
            idle_sec=idle_sec,
        )  # fmt: skip
        one.start()
        proxies.append(one)
        return world

    yield open_one
    for one in proxies:
        await one.close()
    server.close()
    await server.wait_closed()
    threads.shutdown()
    while any(not task.done() for task in asyncio.all_tasks() - {asyncio.current_task()}):
        await asyncio.sleep(0.01)


Open = Callable[..., Awaitable[World]]


async def test_a_request_reaches_a_public_server_as_one_of_its_own(opened: Open) -> None:
    world = await opened()
    said = await world.ask(
        b"GET http://public.test/a?b HTTP/1.1\r\nHost: lie\r\nProxy-Authorization: Basic x\r\nX: 1\r\n\r\n"
    )
    head, _, body = said.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\nConnection: close"
    assert body == b"GET /a?b HTTP/1.1\r\nHost: public.test\r\nX: 1\r\nConnection: close\r\n\r\n"
    assert world.dialled == [("11.1.1.1", 80)]


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_no_spelling_of_a_private_address_is_dialled(opened: Open, spelling: str) -> None:
    world = await opened()
    host = f"[{spelling}]" if ":" in spelling else spelling
    for request in (f"GET http://{host}/ HTTP/1.1\r\n\r\n", f"CONNECT {host}:443 HTTP/1.1\r\n\r\n"):
        assert (await world.ask(request.encode())).startswith(b"HTTP/1.1 403 "), request
    assert world.dialled == []


async def test_a_name_with_private_addresses_only_is_like_one_without_any(opened: Open) -> None:
    world = await opened()
    said = set()
    for name in (*NAMES, "nowhere.test"):
        if name not in ("public.test", "mixed.test"):
            said.add((await world.ask(f"CONNECT {name}:443 HTTP/1.1\r\n\r\n".encode())).replace(name.encode(), b"N"))
    assert len({answer.split(b"\r\n\r\n")[1] for answer in said}) == 1
    assert all(answer.startswith(b"HTTP/1.1 502 ") for answer in said)
    assert world.dialled == []


async def test_of_a_names_addresses_only_the_public_one_is_dialled(opened: Open) -> None:
    world = await opened()
    await world.ask(b"GET http://mixed.test/ HTTP/1.1\r\n\r\n")
    assert world.dialled == [("11.1.1.2", 80)]


async def test_what_was_looked_at_is_what_is_dialled(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that says something else each time (rebinding) is asked once."""
    world = await opened()
    answers = iter([[ip_address("11.1.1.1")], [ip_address("127.0.0.1")]])
    monkeypatch.setattr(dial, "_look_up", lambda _: next(answers))
    await world.ask(b"GET http://rebinding.test/ HTTP/1.1\r\n\r\n")
    assert world.dialled == [("11.1.1.1", 80)]
    assert len(list(answers)) == 1


@pytest.mark.parametrize("port", [1, 22, 25, 8080, 8780, 6379, 65535])
async def test_other_ports_are_refused(opened: Open, port: int) -> None:
    world = await opened()
    assert (await world.ask(f"CONNECT public.test:{port} HTTP/1.1\r\n\r\n".encode())).startswith(b"HTTP/1.1 403 ")
    assert world.dialled == []


async def test_an_operator_says_which_ports_and_which_networks_not(opened: Open) -> None:
    world = await opened(DialRules(frozenset({8443}), (ip_network("11.2.0.0/16"),)))
    assert (await world.ask(b"CONNECT public.test:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403 ")
    assert (await world.ask(b"CONNECT 11.2.3.4:8443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403 ")
    async with world.tunnel("public.test", 8443):
        pass
    assert world.dialled == [("11.1.1.1", 8443)]


async def test_an_address_of_this_machine_is_refused_public_or_not(opened: Open) -> None:
    own = [
        ip_address(entry.address.partition("%")[0])
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    ]
    assert own
    for address in own:
        assert is_own(address)
    assert is_own(ip_address("::ffff:127.0.0.1"))
    assert not is_own(ip_address("11.1.1.1"))


@pytest.mark.parametrize(
    "request_", [b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: public.test\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
async def test_what_is_no_request_gets_400(opened: Open, request_: bytes) -> None:
    world = await opened()
    assert (await world.ask(request_)).startswith(b"HTTP/1.1 400 ")
    assert world.dialled == []


async def test_a_head_without_end_is_cut_off_by_size_and_by_time(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await opened()
    assert (await world.ask(b"GET http://public.test/ HTTP/1.1\r\n" + b"X: y\r\n" * 20_000)).startswith(
        b"HTTP/1.1 431 "
    )
    monkeypatch.setattr(proxy, "HEAD_SEC", 0.2)
    assert await world.ask(b"GET http://public.test/ HTTP/1.1\r\n") == b""
    assert world.dialled == []


async def test_a_tunnel_carries_every_byte_both_ways_and_ends_by_halves(opened: Open) -> None:
    world = await opened()
    world.handler = echo
    data = random.Random(1).randbytes(6 << 20)
    async with world.tunnel("public.test") as (reader, writer), asyncio.timeout(60):

        async def send() -> None:
            writer.write(data)
            await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        back = await reader.read()
        await sending
    assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()


async def test_an_answer_comes_whole_though_its_server_closes_at_once(opened: Open) -> None:
    world = await opened()
    body = random.Random(2).randbytes(3 << 20)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Expect" in head
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(5) == b"12345"
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        await writer.drain()

    world.handler = answer
    head = b"POST http://public.test/ HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    said = await world.ask(head + b"12345")
    assert said.startswith(b"HTTP/1.1 100 Continue\r\n")
    assert said.endswith(body)


async def test_an_answer_before_the_end_of_the_request_comes_through(opened: Open) -> None:
    world = await opened()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nno\n")
        await writer.drain()
        writer.write_eof()
        while await reader.read(65_536):
            pass

    world.handler = refuse
    said = await world.ask(b"PUT http://public.test/ HTTP/1.1\r\nContent-Length: 9\r\n\r\n123456789")
    assert said.startswith(b"HTTP/1.1 413 ")
    assert said.endswith(b"no\n")


@pytest.mark.parametrize("nonsense", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000])
async def test_a_server_that_answers_nonsense_gets_502(opened: Open, nonsense: bytes) -> None:
    world = await opened()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(nonsense)

    world.handler = answer
    assert (await world.ask(b"GET http://public.test/ HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 502 ")


async def test_connections_over_the_bound_are_told_so_and_room_comes_back(opened: Open) -> None:
    world = await opened(connections=3)
    world.handler = echo
    async with world.tunnel("public.test"), world.tunnel("public.test"):
        async with world.tunnel("public.test"):
            assert (await world.ask(b"CONNECT public.test:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
            assert len(world.dialled) == 3
        async with asyncio.timeout(60):
            while not (await world.ask(b"CONNECT public.test:1 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403 "):
                await asyncio.sleep(0.01)


async def test_bytes_a_second_are_bounded_for_all_connections_together(opened: Open) -> None:
    world = await opened(bytes_per_sec=1 << 20)
    world.handler = echo

    async def through() -> None:
        async with world.tunnel("public.test") as (reader, writer):
            writer.write(bytes(1 << 20))
            writer.write_eof()
            while await reader.read(65_536):
                pass

    began = time.monotonic()
    await asyncio.gather(*(through() for _ in range(3)))
    assert time.monotonic() - began > 2.5


async def test_a_meter_lets_a_burst_pass_and_then_holds_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter = Meter(1000)
    await meter.take(100)
    assert slept == []
    await meter.take(1000)
    assert slept == [pytest.approx(1.0)]
    await meter.take(500)
    assert slept[1:] == [pytest.approx(1.5)]
    now = 2000.0
    await meter.take(100)
    assert len(slept) == 2


async def test_a_silent_connection_ends_and_one_that_is_busy_one_way_does_not(opened: Open) -> None:
    world = await opened(idle_sec=2.0)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(12):  # for longer than it may be silent
            writer.write(b".")
            await writer.drain()
            await asyncio.sleep(0.2)
        await reader.read()

    world.handler = drip
    async with world.tunnel("public.test") as (reader, _), asyncio.timeout(60):
        assert await reader.read() == b"." * 12


async def test_lookups_of_one_pod_do_not_take_every_thread(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await opened()
    monkeypatch.setattr(dial, "RESOLVE_SEC", 0.2)
    looking: list[str] = []
    answered = threading.Event()

    def slow(host: str) -> list[Address]:
        looking.append(host)
        answered.wait(60)
        return []

    monkeypatch.setattr(dial, "_look_up", slow)
    asked = [asyncio.create_task(world.ask(f"CONNECT n{n}.test:443 HTTP/1.1\r\n\r\n".encode())) for n in range(8)]
    try:
        answers = await asyncio.gather(*asked)
    finally:
        answered.set()
    assert all(answer.startswith(b"HTTP/1.1 502 ") for answer in answers)
    assert len(looking) == 4, "the other four waited for the threads, not only for the answers"
