"""Pods with a network of their own: what they reach and what they never do (S12, S17), on a machine and an internet
that are namespaces of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Network, ip_address, ip_network
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from manager.errors import IsolationUnavailable
from manager.model import Pod, Profile
from manager.providers.local import routed, ruleset
from manager.providers.local.making import cgroup_suffix
from manager.providers.local.network import OutboundSettings, PodNetwork, network_for
from manager.providers.local.provider import LocalProvider
from manager.providers.local.state import PodStore
from tests.support import netlab
from tests.support.local_pods import run, token_for, until
from tests.support.netlab import BRIDGE, FORBIDDEN, MACHINE, OTHER, PUBLIC, RESOLVER, Lab, inside, ip
from tests.support.stack import Stack

pytestmark = pytest.mark.root

OUT: Final = Profile(name="out", cpu=None, memory_bytes=None, pids=None, network="outbound")
MIB: Final = 1 << 20

# Says for each "host port" on stdin how connecting went.
CONNECT: Final = """
import json, socket, sys
said = {}
for line in sys.stdin:
    host, port = line.split()
    try:
        with socket.create_connection((host, int(port)), timeout=20):
            said[host] = "connected"
    except OSError as why:
        said[host] = type(why).__name__ if why.errno is None else __import__("errno").errorcode[why.errno]
print(json.dumps(said))
"""

Make = Callable[..., LocalProvider]

both_walls = pytest.mark.parametrize("isolation", ["namespaces", "gvisor"])


@pytest.fixture
def lab() -> Iterator[Lab]:
    with netlab.lab() as made:
        yield made


@pytest.fixture
async def make(lab: Lab, tmp_path: Path) -> AsyncIterator[Make]:
    """Opens providers over one data directory, on the lab's machine; everything is ended afterwards."""
    opened: list[LocalProvider] = []

    def open_one(data_dir: Path = tmp_path, **settings: Any) -> LocalProvider:
        outbound = OutboundSettings(**{"way": "routed", "resolvers": (RESOLVER,), **settings})
        provider = LocalProvider("here", data_dir, token_for, outbound=outbound)
        opened.append(provider)
        return provider

    yield open_one
    for provider in opened:
        if not provider.closed:
            for pod in await provider.list():
                await provider.delete(pod.name)
            await provider.close()


async def start(provider: LocalProvider, name: str = "p1", profile: Profile = OUT) -> Pod:
    found = await provider.capabilities()
    if found.tier is None:
        pytest.skip(f"no isolation on this machine: {found.why_not}")
    try:
        return await provider.create(profile, name, {}, {})
    except IsolationUnavailable as why:
        pytest.skip(f"no routed networks here: {why}")


def under(isolation: str, profile: Profile = OUT) -> Profile:
    return msgspec.structs.replace(profile, isolation=isolation)


async def python(pod: Pod, script: str, stdin: str = "", **fields: Any) -> str:
    answer = await run(pod, [sys.executable, "-I", "-c", script], stdin=stdin, timeout_sec=60, **fields)
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"])


async def connect(pod: Pod, *hosts: str, port: int = 80) -> dict[str, str]:
    said: dict[str, str] = json.loads(await python(pod, CONNECT, "".join(f"{host} {port}\n" for host in hosts)))
    return said


def refused(said: dict[str, str]) -> bool:
    return set(said.values()) <= {"ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "EACCES", "EINVAL"}


def network_of(pod: Pod, tmp_path: Path) -> PodNetwork:
    record = PodStore(tmp_path / "pods").read(pod.name)
    assert record is not None
    assert record.network is not None
    return record.network


def namespaces(suffix: str) -> list[str]:
    """Those of one data directory's pods: other tests may be running, and namespaces' names are the machine's."""
    return [name for name in os.listdir("/run/netns") if name.endswith(suffix)]


def netns_of(pod: Pod, tmp_path: Path) -> str:
    return network_of(pod, tmp_path).netns


def address_of(pod: Pod, tmp_path: Path) -> str:
    """Told by the machine's end: gVisor takes the pod's end over."""
    shown = json.loads(ip("-j", "addr", "show", "dev", network_of(pod, tmp_path).link))
    return str(ip_address(shown[0]["addr_info"][0]["local"]) + 1)


@contextlib.contextmanager
def listening(*families: socket.AddressFamily, port: int) -> Iterator[list[socket.socket]]:
    """Sockets of the machine on every address of it."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("", port), family=family)) for family in families]


@both_walls
async def test_a_pod_reaches_public_addresses_and_no_other(lab: Lab, make: Make, isolation: str) -> None:
    pod = await start(make(), profile=under(isolation))
    assert await connect(pod, PUBLIC, OTHER) == {PUBLIC: "connected", OTHER: "connected"}
    said = await connect(pod, *FORBIDDEN)
    assert len(said) == len(FORBIDDEN)
    assert refused(said), said
    assert not set(FORBIDDEN) & lab.internet.targets, "not a packet came through"
    # Not as a datagram either, nor to many at once.
    script = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
for host in sys.stdin.read().split():
    try:
        s.sendto(b"x", (host, 5000))
    except OSError:
        pass
s.settimeout(8)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(20)
s.connect((PUBLIC, 5000))
s.send(b"hello")
print(s.recv(9).decode())
""".replace("PUBLIC", repr(PUBLIC))
    many = ["255.255.255.255", "224.0.0.1", "239.255.255.250", "11.0.0.255"]
    assert (await python(pod, script, " ".join([*FORBIDDEN, *many]))).strip() == "hello"
    assert [entry for entry in lab.internet.reached if entry.startswith("udp")] == [f"udp {MACHINE}"]
    assert lab.internet.targets <= {PUBLIC, OTHER, RESOLVER}
    assert lab.internet.sources == {MACHINE}


@both_walls
async def test_a_pod_reaches_no_address_of_its_machine(lab: Lab, make: Make, tmp_path: Path, isolation: str) -> None:
    """The public one, a bridge's, the pod's own gateway: whatever listens there, the manager and Redis too."""
    pod = await start(make(), profile=under(isolation))
    own = address_of(pod, tmp_path)
    gateway = str(IPv4Network(f"{own}/30", strict=False)[1])
    with listening(socket.AF_INET, port=8780) as servers:
        for host in (MACHINE, BRIDGE, gateway):
            socket.create_connection((host, 8780), timeout=10).close()
            servers[0].accept()[0].close()
        said = await connect(pod, MACHINE, BRIDGE, gateway, port=8780)
        assert refused(said), said
        own_side = await connect(pod, "127.0.0.1", "0.0.0.0", own, port=8780)
        assert set(own_side.values()) == {"ECONNREFUSED"}, "these are the pod's"
        servers[0].settimeout(0)
        with pytest.raises(BlockingIOError):
            servers[0].accept()
        # Nor the other way round: the machine's programs have no way to a pod but the executor's socket.
        await run(pod, f"nohup {sys.executable} -m http.server 8000 >/dev/null 2>&1 &")
        assert (await connect(pod, own, port=8000)) in ({own: "connected"}, {own: "ECONNREFUSED"})
        with pytest.raises(OSError, match=r"unreachable|timed out|route"):
            socket.create_connection((own, 8000), timeout=2)


@both_walls
async def test_pods_do_not_reach_each_other(lab: Lab, make: Make, tmp_path: Path, isolation: str) -> None:
    provider, profile = make(), under(isolation)
    one, two = await asyncio.gather(start(provider, "p1", profile), start(provider, "p2", profile))
    there = address_of(two, tmp_path)
    assert there != address_of(one, tmp_path)
    await run(two, f"nohup {sys.executable} -m http.server 8000 >/dev/null 2>&1 &")
    while (await connect(two, there, port=8000))[there] != "connected":
        await asyncio.sleep(0.05)
    said = await connect(one, there, port=8000)
    assert refused(said), said
    # Side by side on one cable they are not: each has a link of its own, with one neighbour.
    for pod in (one, two):
        neighbours = ip("-n", netns_of(pod, tmp_path), "neigh", "show")
        assert len(neighbours.splitlines()) <= 1, neighbours


async def test_names_are_those_of_the_public_resolvers(lab: Lab, make: Make) -> None:
    pod = await start(make())
    answer = await run(pod, "cat /etc/resolv.conf; getent ahostsv4 server.test | head -1; getent ahostsv4 nowhere.test")
    assert answer["stdout"].split()[:3] == ["nameserver", RESOLVER, PUBLIC]
    assert answer["exit_code"] == 2
    # A name may well stand for an internal address; that leads nowhere.
    said = await connect(pod, "server.test", "inside.test")
    assert said == {"server.test": "connected", "inside.test": "ECONNREFUSED"}


async def test_there_is_no_ipv6_but_on_the_pods_own_loopback(lab: Lab, make: Make, tmp_path: Path) -> None:
    pod = await start(make())
    script = """
import socket
with socket.create_server(("::1", 8000), family=socket.AF_INET6):
    socket.create_connection(("::1", 8000), timeout=20).close()
print(sorted(line.split()[5] for line in open("/proc/net/if_inet6")))
for host in ("2606:4700:4700::1111", "fe80::1", "ff02::1", "::ffff:10.50.0.1"):
    try:
        socket.create_connection((host, 80), timeout=8)
    except OSError as why:
        print(why.errno is not None)
"""
    assert (await python(pod, script)).split() == ["['lo']", "True", "True", "True", "True"]
    # What has a network of its own below sockets (gVisor) may send what it likes: the machine takes no IPv6 from it.
    netns = netns_of(pod, tmp_path)
    ip("-n", netns, "link", "set", "eth0", "addrgenmode", "eui64")
    ip("-n", netns, "addr", "add", "fd00:1::2/64", "dev", "eth0", "nodad")
    link = next(name for name in lab.links() if name.startswith("sj-"))
    ip("addr", "add", "fd00:1::1/64", "dev", link, "nodad")
    with listening(socket.AF_INET6, port=8781), inside(netns), pytest.raises(TimeoutError):
        socket.create_connection(("fd00:1::1", 8781), timeout=2)


async def test_a_pod_has_no_raw_sockets(lab: Lab, make: Make) -> None:
    pod = await start(make())
    script = """
import socket
for family, kind, protocol in (
    (socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET, socket.SOCK_RAW, 255),
    (socket.AF_INET6, socket.SOCK_RAW, 58),
    (socket.AF_PACKET, socket.SOCK_RAW, 3), (socket.AF_PACKET, socket.SOCK_DGRAM, 3),
):
    try:
        socket.socket(family, kind, protocol)
        print("opened", family)
    except OSError:
        print("refused")
"""
    assert (await python(pod, script)).split() == ["refused"] * 5
    answer = await run(
        pod, "ip link set eth0 mtu 900 || ip addr add 10.0.0.9/8 dev eth0 || ip route add 10.0.0.0/8 dev eth0"
    )
    assert answer["exit_code"] != 0


async def test_a_false_source_address_does_not_pass(lab: Lab, make: Make, tmp_path: Path) -> None:
    """Sent from the pod's namespace with rights that nothing in a pod has: it is the machine that refuses."""
    provider = make()
    one, two = await asyncio.gather(start(provider, "p1"), start(provider, "p2"))
    own, others = address_of(one, tmp_path), address_of(two, tmp_path)
    gateway = str(IPv4Network(f"{own}/30", strict=False)[1])

    def datagram(source: str, port: int) -> bytes:
        udp = struct.pack("!HHHH", port, 5000, 12, 0) + b"mark"
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0)
        return head + socket.inet_aton(source) + socket.inet_aton(OTHER) + udp

    reverse_path = Path(f"/proc/sys/net/ipv4/conf/{network_of(one, tmp_path).link}/rp_filter")
    assert reverse_path.read_text().strip() == "1"
    reverse_path.write_text("0")  # the second wall; here the first one stands alone
    with inside(netns_of(one, tmp_path)), socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        for source in (others, gateway, MACHINE, PUBLIC, BRIDGE, "8.8.8.8", "127.0.0.1", "10.213.255.1"):
            raw.sendto(datagram(source, 4000), (OTHER, 0))
        raw.sendto(datagram(own, 4001), (OTHER, 0))
    await until(lambda: f"udp {MACHINE}" in lab.internet.reached, "the true one comes through")
    assert [entry for entry in lab.internet.reached if entry.startswith("udp")] == [f"udp {MACHINE}"]
    assert lab.internet.sources == {MACHINE}


@both_walls
async def test_bandwidth_is_bounded_each_way(lab: Lab, make: Make, isolation: str) -> None:
    slow = Profile(name="slow", cpu=None, memory_bytes=None, pids=None, network="outbound", bandwidth_bytes_sec=2 * MIB)
    pod = await start(make(), profile=under(isolation, slow))
    script = """
import socket, sys, time
host, port, total, up = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "up"
with socket.create_connection((host, port), timeout=50) as s:
    began, count = time.monotonic(), 0
    while count < total:
        count += s.send(bytes(65536)) if up else len(s.recv(65536))
    if up:
        s.shutdown(socket.SHUT_WR)
    print(time.monotonic() - began)
"""
    for port, way in ((19, "down"), (9, "up")):
        arguments = [sys.executable, "-I", "-c", script, PUBLIC, str(port), str(8 * MIB), way]
        answer = await run(pod, arguments, timeout_sec=60)
        assert answer["exit_code"] == 0, answer
        # A burst, and what lies in buffers on the way up, comes on top of two a second.
        assert float(answer["stdout"]) > 2.2, way
        assert float(answer["stdout"]) < 30, way


@both_walls
async def test_connections_are_bounded_and_room_comes_back(lab: Lab, make: Make, isolation: str) -> None:
    few = Profile(name="few", cpu=None, memory_bytes=None, pids=None, network="outbound", connections=6)
    provider, few = make(), under(isolation, few)
    pod, neighbour = await asyncio.gather(start(provider, "p1", few), start(provider, "p2", few))
    script = """
import socket, sys, time
def several(count):
    made = []
    for _ in range(count):
        try:
            made.append(socket.create_connection((sys.argv[1], 443), timeout=8))
        except OSError:
            pass
    return made
made = several(12)
print(len(made))
for one in made:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    one.close()
deadline = time.monotonic() + 40
while not several(1) and time.monotonic() < deadline:
    time.sleep(0.2)
print("again")
"""
    answer = await run(pod, [sys.executable, "-I", "-c", script, PUBLIC], timeout_sec=60)
    assert answer["stdout"].split() == ["6", "again"], answer
    assert await connect(neighbour, PUBLIC) == {PUBLIC: "connected"}


async def test_an_operator_can_refuse_public_networks_too(lab: Lab, make: Make) -> None:
    pod = await start(make(refused=(ip_network("11.9.0.0/16"),)))
    assert await connect(pod, PUBLIC, OTHER) == {PUBLIC: "connected", OTHER: "ECONNREFUSED"}


async def test_a_port_that_the_machine_forwards_inward_is_none_for_pods(lab: Lab, make: Make) -> None:
    """Docker publishes ports by rewriting addresses before anything is routed."""
    rules = f"""
table ip docker {{
    chain pre {{
        type nat hook prerouting priority -100;
        ip daddr {MACHINE} tcp dport 8080 dnat to 10.50.0.1:80
        ip daddr {OTHER} tcp dport 8081 dnat to 10.50.0.1:80
    }}
}}
"""
    subprocess.run(["nft", "-f", "-"], input=rules.encode(), timeout=20, check=True)
    pod = await start(make())
    assert refused(await connect(pod, MACHINE, port=8080))
    assert refused(await connect(pod, OTHER, port=8081))
    assert "10.50.0.1" not in lab.internet.targets


async def test_the_machine_forwards_nothing_but_for_its_pods(lab: Lab, make: Make) -> None:
    lan = f"{lab.machine}-lan"
    ip("netns", "add", lan)
    try:
        ip("link", "add", "lan0", "type", "veth", "peer", "name", "eth0", "netns", lan)
        ip("link", "set", "lan0", "master", "br0", "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", "172.30.0.5/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            ip("-n", lan, *words)
        ip("-n", lan, "route", "add", "default", "via", BRIDGE)
        ip("-n", lab.internet.netns, "route", "add", "172.30.0.0/24", "via", MACHINE)
        before = lab.forwards()
        assert set(before.values()) == {"0"}
        provider = make()
        await start(provider)
        assert lab.forwards()["all"] == "0"
        assert lab.forwards()["up0"] == "1"
        with inside(lan):
            inner = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with inside(lab.internet.netns):
            outer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with inner, outer:
            inner.bind(("172.30.0.5", 5000))
            inner.settimeout(1.5)
            outer.sendto(b"x", ("172.30.0.5", 5000))
            with pytest.raises(TimeoutError):
                inner.recv(9)
            # That nothing else has kept it back:
            subprocess.run(["nft", "flush", "set", "inet", "sojourn", "guarded"], timeout=20, check=True)
            inner.settimeout(20)
            outer.sendto(b"y", ("172.30.0.5", 5000))
            assert inner.recv(9) == b"y"
        await provider.delete("p1")
        assert lab.forwards() == before
    finally:
        ip("netns", "del", lan)


async def test_nothing_is_left_of_a_deleted_pod(lab: Lab, make: Make, tmp_path: Path) -> None:
    rules, links, forwards = lab.rules(), lab.links(), lab.forwards()
    provider = make()
    one, two = await asyncio.gather(start(provider, "p1"), start(provider, "p2"))
    names = [netns_of(pod, tmp_path) for pod in (one, two)]
    await provider.delete("p1")
    assert not Path("/run/netns", names[0]).exists()
    assert lab.rules().count("chain pod_") == 1
    assert await connect(two, PUBLIC) == {PUBLIC: "connected"}
    await provider.delete("p2")
    assert not Path("/run/netns", names[1]).exists()
    assert (lab.rules(), lab.links(), lab.forwards()) == (rules, links, forwards)
    inode = os.stat("/proc/thread-self/ns/net").st_ino
    assert not Path(f"/run/sojourn-network-{inode}").exists()


async def test_another_manager_finds_pods_with_their_network_and_clears_up_after_dead_ones(
    lab: Lab, make: Make, tmp_path: Path
) -> None:
    first = make()
    await asyncio.gather(start(first, "p1"), start(first, "p2"))
    await first.close()  # as a crash leaves them: nobody ends anything
    record = PodStore(tmp_path / "pods").read("p2")
    assert record is not None
    assert record.inner is not None
    os.kill(record.inner.pid, signal.SIGKILL)
    second = make()
    while [pod.name for pod in await second.list()] != ["p1"]:
        await asyncio.sleep(0.05)
    (pod,) = await second.list()
    assert await connect(pod, PUBLIC, FORBIDDEN[0]) == {PUBLIC: "connected", FORBIDDEN[0]: "ECONNREFUSED"}
    await until(lambda: lab.rules().count("chain pod_") == 1, "the dead pod's rules are gone")
    await second.delete("p1")
    assert "sojourn" not in lab.rules()


async def test_a_pod_whose_record_is_lost_is_ended_with_its_network(lab: Lab, make: Make, tmp_path: Path) -> None:
    """As after the machine lost power: the names come from the pod's own."""
    first = make()
    await start(first)
    await first.close()
    (tmp_path / "pods" / "p1" / "pod.json").write_bytes(b"{")
    second = make()
    await second.list()
    await until(lambda: "sojourn" not in lab.rules(), "the rules are gone")
    await until(lambda: PodStore(tmp_path / "pods").names() == [], "the pod is gone")
    assert lab.links() == ["lo", "up0", "br0"]
    assert namespaces(cgroup_suffix(PodStore(tmp_path / "pods"))) == []


async def test_a_maker_that_dies_half_way_leaves_nothing_for_long(lab: Lab, make: Make, tmp_path: Path) -> None:
    """Each step of the making alone, found by the names that a record holds from the start; also without a record."""
    provider = make()
    await start(provider, "p1")
    suffix = netns_of((await provider.list())[0], tmp_path).removeprefix("sojourn-p1")
    for step in ("all", "namespace", "rules", "link"):
        lost = network_for("routed", f"lost-{step}{suffix}", bytes_per_sec=MIB, connections=5)
        if step == "all":
            routed.make(lost, OutboundSettings())
        elif step == "namespace":
            ip("netns", "add", lost.netns)
        elif step == "rules":
            ip("netns", "add", lost.netns)
            rules = ruleset.pod(lost.link, 5, [])
            subprocess.run(["nft", "-f", "-"], input=rules.encode(), timeout=20, check=True)
        else:
            ip("netns", "add", lost.netns)
            ip("link", "add", lost.link, "type", "veth", "peer", "name", "eth0", "netns", lost.netns)
    other = network_for("routed", "p9-01234567", bytes_per_sec=MIB, connections=5)  # of another data directory
    routed.make(other, OutboundSettings())
    second = make()
    await second.list()
    await until(lambda: len(namespaces(suffix)) == 1, "namespaces are gone")
    await until(lambda: lab.rules().count("chain pod_") == 2, "rules are gone")
    assert len([link for link in lab.links() if link.startswith("sj-")]) == 2
    assert Path("/run/netns", other.netns).exists()
    routed.remove(other)
    routed.remove(other)


async def test_a_removed_filter_is_put_back_at_once(lab: Lab, make: Make) -> None:
    """`nft flush ruleset`, as a reload of the machine's own firewall does."""
    pod = await start(make())
    with listening(socket.AF_INET, port=8782) as servers:
        subprocess.run(["nft", "flush", "ruleset"], timeout=20, check=True)
        await until(lambda: "chain pod_" in lab.rules(), "the rules are back")
        assert refused(await connect(pod, MACHINE, BRIDGE, port=8782))
        servers[0].settimeout(0)
        with pytest.raises(BlockingIOError):
            servers[0].accept()
    assert await connect(pod, PUBLIC, FORBIDDEN[0]) == {PUBLIC: "connected", FORBIDDEN[0]: "ECONNREFUSED"}


async def test_a_manager_that_starts_puts_the_filter_right_for_pods_that_it_finds(lab: Lab, make: Make) -> None:
    first = make()
    await start(first)
    await first.close()
    subprocess.run(["nft", "flush", "ruleset"], timeout=20, check=True)
    second = make(refused=(ip_network("11.9.0.0/16"),))
    (pod,) = await second.list()
    await until(lambda: "chain pod_" in lab.rules(), "the rules are back")
    said = await connect(pod, PUBLIC, OTHER, MACHINE, FORBIDDEN[0])
    assert said.pop(PUBLIC) == "connected"
    assert refused(said), "with what the operator has changed since"


async def test_many_names_looked_up_do_not_use_connections_up(lab: Lab, make: Make) -> None:
    few = Profile(name="few", cpu=None, memory_bytes=None, pids=None, network="outbound", connections=8)
    pod = await start(make(), profile=few)
    answer = await run(
        pod, "for i in $(seq 12); do getent ahostsv4 server.test >/dev/null || echo lost; done; echo done"
    )
    assert answer["stdout"] == "done\n"
    assert await connect(pod, PUBLIC) == {PUBLIC: "connected"}
    flood = """
import select, socket, sys
answered, waiting = 0, []  # each has a port of its own, and is a flow of its own
for _ in range(60):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect((sys.argv[1], 5000))
    try:
        s.send(b"x")
    except OSError:
        pass
    waiting.append(s)
while ready := select.select(waiting, [], [], 5)[0]:
    for s in ready:
        try:
            answered += len(s.recv(9))
        except OSError:  # told that it was refused
            pass
    waiting = [s for s in waiting if s not in ready]
print(answered)
"""
    answer = await run(pod, [sys.executable, "-I", "-c", flood, PUBLIC], timeout_sec=60)
    assert 8 < int(answer["stdout"]) <= 32, answer


async def test_what_cannot_be_given_is_refused_and_never_weaker(
    lab: Lab, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    provider = make(range=IPv4Network("172.30.0.0/16"))
    if (await provider.capabilities()).tier is None:
        pytest.skip("no isolation on this machine")
    with pytest.raises(IsolationUnavailable, match=r"172\.30\.0\.0/24 behind br0.*SOJOURN_OUTBOUND_RANGE"):
        await provider.create(OUT, "p1", {}, {})
    found = routed._which
    monkeypatch.setattr(routed, "_which", lambda tool: None if tool == "tc" else found(tool))
    with pytest.raises(IsolationUnavailable, match=r"tc not found.*iproute2"):
        await make().create(OUT, "p1", {}, {})
    assert (PodStore(tmp_path / "pods").names(), lab.links()) == ([], ["lo", "up0", "br0"])
    with pytest.raises(IsolationUnavailable, match="unknown here"):
        await make().create(Profile(name="x", network="everything"), "p1", {}, {})
    # Left to itself, the manager takes the proxy, which gives less and holds the same.
    pod = await make(way="auto").create(OUT, "p1", {}, {})
    assert lab.links() == ["lo", "up0", "br0"]
    assert (await connect(pod, PUBLIC))[PUBLIC] == "ENETUNREACH"


async def test_gvisor_has_the_proxy_too(lab: Lab, make: Make) -> None:
    provider = make(way="proxy")
    found = await provider.capabilities(gvisor=True)
    if found.gvisor is None or found.gvisor.platform is None:
        pytest.skip("NOT TESTED, no gVisor here (Debian: apt-get install runsc)")
    pod = await provider.create(under("gvisor"), "p1", {}, {})
    script = """
import sys, urllib.request, urllib.error
for host in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(f"http://{host}/", timeout=20).status)
    except urllib.error.HTTPError as why:
        print(why.code)
"""
    answer = await run(pod, [sys.executable, "-I", "-c", script, PUBLIC, FORBIDDEN[0], MACHINE], timeout_sec=60)
    assert answer["stdout"].split() == ["200", "403", "403"], answer
    assert lab.internet.targets == {PUBLIC}


async def test_a_pod_cannot_be_made_where_its_network_cannot(
    lab: Lab, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    provider = make()
    await start(provider, "p1")
    true = routed._shaper
    monkeypatch.setattr(routed, "_shaper", lambda link, rate: true(link, rate).replace("tbf", "nosuch"))
    with pytest.raises(IsolationUnavailable, match="qdisc"):
        await provider.create(OUT, "p2", {}, {})
    assert PodStore(tmp_path / "pods").names() == ["p1"]
    assert len([link for link in lab.links() if link.startswith("sj-")]) == 1
    assert lab.rules().count("chain pod_") == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["routed", "proxy"])
def test_ctrl_c_of_the_stack_leaves_no_link_rule_or_namespace(lab: Lab, way: str) -> None:
    """Warm pods have their network before they are claimed."""
    before = (lab.rules(), lab.links(), lab.forwards())
    config = '[[profiles]]\nname = "sandboxes-default"\nnetwork = "outbound"\ncpu = 0.5\npool = { min = 2, max = 2 }\n'
    stack = Stack(config=config, SOJOURN_OUTBOUND_RESOLVERS=RESOLVER, SOJOURN_OUTBOUND=way)
    command = f"exec 3<>/dev/tcp/{PUBLIC}/80 && echo reached"
    if way == "proxy":
        command = f"exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT {PUBLIC}:80 HTTP/1.1\\r\\n\\r\\n' >&3"
        command += "; read -r -t 20 _ code _ <&3; [ $code = 200 ] && echo reached"
    try:
        stack.start()
        assert stack.process is not None
        assert f"outbound, by profile: {way}" in stack.log.read_text()

        async def use() -> dict[str, Any]:
            async with stack:
                answer: dict[str, Any] = await stack.exec("t1", command)
                return answer

        answer = asyncio.run(use())
        assert answer["stdout"] == "reached\n", answer
        deadline = time.monotonic() + 60
        suffix, wanted = cgroup_suffix(PodStore(stack.data / "pods")), 3 if way == "routed" else 0
        while len(namespaces(suffix)) < wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(namespaces(suffix)) == wanted
        stack.end(signal.SIGINT)
        assert (lab.rules(), lab.links(), lab.forwards()) == before
        assert namespaces(cgroup_suffix(PodStore(stack.data / "pods"))) == []
    finally:
        stack.remove()
