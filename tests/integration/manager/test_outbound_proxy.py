"""Pods whose way out is the proxy: the child that dials, what carries connections to it in a pod, and the whole of it
as an unprivileged user has it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from manager.model import Profile
from manager.providers.local import pod_forwarder, proxies
from manager.providers.local.network import FORWARDER, PROXY_SOCKET, OutboundSettings, PodNetwork
from manager.providers.local.proxies import Proxies
from tests.support import netlab
from tests.support.local_pods import lives
from tests.support.netlab import FORBIDDEN, MACHINE, OTHER, PUBLIC, RESOLVER, Lab
from tests.support.streams import Ends, connection

ROOT: Final = Path(__file__).resolve().parents[3]
NETWORK: Final = PodNetwork(way="proxy", bytes_per_sec=64 << 20, connections=4)
NOBODY: Final = 65_534


@pytest.fixture
async def ways_out(tmp_path: Path) -> AsyncIterator[Proxies]:
    opened = Proxies(OutboundSettings())
    yield opened
    await opened.aclose()


def home_of(tmp_path: Path, pod: str = "p1") -> Path:
    home = tmp_path / pod
    home.mkdir()
    proxies.prepare(home)
    return home


async def ask(path: Path, request: bytes = b"CONNECT 127.0.0.1:443 HTTP/1.1\r\n\r\n") -> bytes:
    """The answer's first line."""
    directory = os.open(path, os.O_PATH)
    try:
        opening = asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{PROXY_SOCKET}")
        async with connection(opening) as (reader, writer), asyncio.timeout(60):
            writer.write(request)
            return (await reader.read()).partition(b"\r\n")[0]
    finally:
        os.close(directory)


async def test_every_pod_has_a_way_out_of_its_own(ways_out: Proxies, tmp_path: Path) -> None:
    homes = [home_of(tmp_path, name) for name in ("p1", "p2")]
    for home in homes:
        ways_out.open(home.name, home, NETWORK)
        ways_out.open(home.name, home, NETWORK)
    for home in homes:
        assert await ask(home / "outbound") == b"HTTP/1.1 403 Forbidden"
    ways_out.close("p1")
    with pytest.raises(ConnectionError):  # refused, or reset where it came before the child had heard
        await ask(homes[0] / "outbound")
    assert await ask(homes[1] / "outbound") == b"HTTP/1.1 403 Forbidden"


async def test_a_path_that_is_too_long_for_a_socket_does_not_matter(ways_out: Proxies, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    home = home_of(deep)
    ways_out.open("p1", home, NETWORK)
    assert await ask(home / "outbound") == b"HTTP/1.1 403 Forbidden"


async def test_where_the_child_dies_the_next_one_serves_the_same_pods(ways_out: Proxies, tmp_path: Path) -> None:
    homes = [home_of(tmp_path, f"p{number}") for number in range(40)]
    for home in homes:
        ways_out.open(home.name, home, NETWORK)
    assert await ask(homes[-1] / "outbound") == b"HTTP/1.1 403 Forbidden"
    assert ways_out._child is not None
    first = ways_out._child.pid
    os.kill(first, signal.SIGKILL)
    answers = await asyncio.gather(*(ask(home / "outbound") for home in homes), return_exceptions=True)
    # A connection that was with the dead one is lost; those that come later wait for the next.
    assert answers.count(b"HTTP/1.1 403 Forbidden") >= len(homes) - 4
    assert ways_out._child is not None
    assert ways_out._child.pid != first
    assert not lives(first)


async def test_the_child_ends_with_its_manager(tmp_path: Path) -> None:
    opened = Proxies(OutboundSettings())
    home = home_of(tmp_path)
    opened.open("p1", home, NETWORK)
    assert await ask(home / "outbound") == b"HTTP/1.1 403 Forbidden"
    assert opened._child is not None
    child = opened._child
    if os.geteuid() == 0:
        status = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        assert next(line for line in status if line.startswith("Uid:")).split()[1:] == [str(NOBODY)] * 4
        assert next(line for line in status if line.startswith("CapEff:")).split()[1] == "0" * 16
    assert b"SECRET" not in Path(f"/proc/{child.pid}/environ").read_bytes() if os.geteuid() == 0 else True
    await opened.aclose()
    assert child.returncode == 0, "it was not killed: it went when nobody held the other end"
    assert not lives(child.pid)


async def test_of_two_managers_one_serves_a_pod_and_the_other_takes_over(ways_out: Proxies, tmp_path: Path) -> None:
    home = home_of(tmp_path)
    second = Proxies(OutboundSettings())
    try:
        ways_out.open("p1", home, NETWORK)
        second.open("p1", home, NETWORK)
        assert second._child is None
        assert await ask(home / "outbound") == b"HTTP/1.1 403 Forbidden"
        ways_out.close("p1")
        second.open("p1", home, NETWORK)
        assert await ask(home / "outbound") == b"HTTP/1.1 403 Forbidden"
    finally:
        await second.aclose()


# ── in the pod ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def forwarder(socket_path: Path) -> Iterator[int]:
    """The pod's program, and the port where it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    argv = [sys.executable, "-I", "-S", pod_forwarder.__file__, str(socket_path), str(port)]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        yield port
        assert process.poll() is None, "it lives through all of it"
    finally:
        process.kill()
        process.wait()


async def connected(port: int) -> Ends:
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Where every user may connect to a socket."""
    path = Path(tempfile.mkdtemp(prefix="sj-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


async def test_connections_are_carried_whole_both_ways_and_side_by_side(short_dir: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(echo, short_dir / "s")
    (short_dir / "s").chmod(0o666)

    async def through(seed: int) -> None:
        data = bytes([seed]) * (2 << 20)
        async with connection(connected(port)) as (reader, writer):

            async def send() -> None:
                writer.write(data)
                await writer.drain()
                writer.write_eof()

            sending = asyncio.create_task(send())
            assert await reader.read() == data
            await sending

    with forwarder(short_dir / "s") as port:
        async with asyncio.timeout(60):
            await asyncio.gather(*(through(seed) for seed in range(12)))
    server.close()


async def test_what_breaks_one_connection_leaves_the_others(short_dir: Path) -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        word = await reader.readline()
        if word == b"reset\n":
            writer.transport.abort()
            return
        writer.write(word)
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(odd, short_dir / "s")
    (short_dir / "s").chmod(0o666)
    with forwarder(short_dir / "s") as port:
        async with connection(connected(port)) as (kept_reader, kept), asyncio.timeout(100):
            kept.write(b"one\n")
            assert await kept_reader.readline() == b"one\n"
            for _ in range(20):
                async with connection(connected(port)) as (reader, writer):
                    writer.write(b"reset\n")
                    assert await reader.read() == b""
                async with connection(connected(port)) as (_, writer):
                    writer.write(b"x\n")
            kept.write_eof()
            assert await kept_reader.read() == b""
        server.close()
        # Nobody there: a client is told so.
        os.unlink(short_dir / "s")
        async with connection(connected(port)) as (reader, _), asyncio.timeout(60):
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")


# ── all of it, without root ─────────────────────────────────────────────────────────────────────────────────────

SCRIPT: Final = textwrap.dedent(
    """
    import asyncio, json, os, sys
    from pathlib import Path
    from manager.model import Profile
    from manager.providers.local.network import OutboundSettings
    from manager.providers.local.provider import LocalProvider
    from tests.support.local_pods import run, token_for

    OUT = Profile(name="out", cpu=None, memory_bytes=None, pids=None, network="outbound")

    def curl(*words):
        return ["curl", "-sS", "-m", "20", "-o", "/dev/null", "-w", "%{http_code} %{http_connect}", *words]

    async def main():
        assert os.geteuid() != 0
        asked = json.loads(sys.argv[2])
        provider = LocalProvider("here", Path(sys.argv[1]), token_for)
        found = await provider.capabilities()
        said = {"tier": found.tier, "why_not": found.why_not, "seen": []}
        if found.tier is not None:
            pod = await provider.create(OUT, "p1", {}, {})
            said["way"] = (await provider.capabilities()).network.way
            for words in asked["curl"]:
                said["seen"].append((await run(pod, curl(*words), timeout_sec=30))["stdout"])
            said["shell"] = (await run(pod, asked["shell"], timeout_sec=30))["stdout"]
            await provider.close()  # as after a crash: the pod lives on
            second = LocalProvider("here", Path(sys.argv[1]), token_for)
            (pod,) = await second.list()
            said["again"] = (await run(pod, curl(*asked["curl"][0]), timeout_sec=30))["stdout"]
            await second.delete("p1")
            await second.close()
            said["left"] = [entry.name for entry in Path(sys.argv[1], "pods").iterdir()]
        else:
            await provider.close()
        print(json.dumps(said))

    asyncio.run(main())
    """
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with netlab.lab() as made:
        yield made


@pytest.mark.root  # to make the test's own internet; what is tested runs as nobody
async def test_without_root_a_pod_reaches_public_servers_through_the_proxy_and_no_other(
    lab: Lab, unprivileged_python: tuple[str, int]
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    python, uid = unprivileged_python
    curl = [
        [f"http://{PUBLIC}/"], ["http://server.test/"], ["-p", "http://server.test/"],
        *([f"http://{host}/"] for host in (*FORBIDDEN, MACHINE, "10.213.0.1", "0xa9fea9fe", "2852039166", "[fd00::1]")),
        *(["-p", f"http://{host}/"] for host in (FORBIDDEN[0], MACHINE)),
        ["http://inside.test/"], ["http://nowhere.test/"], [f"http://{OTHER}:5000/"],
    ]  # fmt: skip
    shell = "env | grep -ci _proxy; ls /sys/class/net 2>/dev/null; grep -c : /proc/net/dev; cat /etc/resolv.conf"
    home = Path(tempfile.mkdtemp(prefix="sojourn-home-"))
    os.chown(home, uid, uid)
    (home / "resolv.conf").write_text(f"nameserver {RESOLVER}\noptions timeout:2 attempts:2\n")
    enter = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"', f"{home}/resolv.conf"]
    drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    argv = [*enter, *drop, python, "-c", SCRIPT, str(home / "data"), json.dumps({"curl": curl, "shell": shell})]
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    try:
        done = await asyncio.to_thread(
            subprocess.run, argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
            env={"HOME": str(home), "PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    if said["tier"] is None:
        pytest.skip(f"no user namespaces here: {said['why_not']}")
    assert said["way"] == "proxy"
    plain = ["200 000", "200 000", "200 200"]
    refused = ["403 000"] * (len(FORBIDDEN) + 5)
    assert said["seen"] == [*plain, *refused, "000 403", "000 403", "502 000", "502 000", "403 000"]
    assert set(lab.internet.reached) == {PUBLIC}
    assert lab.internet.targets == {PUBLIC, RESOLVER}, "to no other address went so much as a packet"
    assert said["shell"].split()[:2] == ["8", "1"], "the variables, and no link but loopback"
    assert "nameserver" not in said["shell"]
    assert said["again"] == plain[0]
    assert said["left"] == []


def test_profiles_and_programs_are_where_a_pod_looks_for_them(tmp_path: Path) -> None:
    directory = proxies.prepare(tmp_path)
    assert (directory / FORWARDER).read_bytes() == Path(pod_forwarder.__file__).read_bytes()
    assert (directory.stat().st_mode & 0o777, (directory / FORWARDER).stat().st_mode & 0o777) == (0o755, 0o644)
    assert Profile(name="x").network == "none"
