"""A machine and an internet of a test's own, as network namespaces: no packet reaches a real network.

The "internet" holds public addresses (11.0.0.0/8, which are nobody's here) and, behind the same cable, addresses that
no pod may reach. The test's own thread moves into the machine, and what it starts from then on lives there too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

PUBLIC: Final = "11.0.0.1"  # a server of the internet
OTHER: Final = "11.9.9.9"  # another
RESOLVER: Final = "11.0.0.53"
MACHINE: Final = "11.0.0.2"  # the machine's own public address
BRIDGE: Final = "172.30.0.1"  # and a bridge of it, such as Docker's
FORBIDDEN: Final = (
    "10.50.0.1", "192.168.7.7", "172.20.0.9", "169.254.169.254", "100.64.0.1", "100.100.100.200", "168.63.129.16",
    "192.0.2.5", "198.18.0.9", "203.0.113.7", "198.51.100.3", "192.0.0.192", "240.0.0.5",
)  # fmt: skip
PORT: Final = 80
_TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
_ETH_P_IP: Final = 0x0800
_PACKET_OUTGOING: Final = 4
_CLONE_NEWNET: Final = 0x4000_0000
_libc = ctypes.CDLL(None, use_errno=True)


def need_tools() -> None:
    """Skips, saying why, where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    for tool, package in _TOOLS.items():
        if shutil.which(tool, path=path) is None:
            pytest.skip(f"no {tool} here (Debian: apt-get install {package})")


def ip(*words: str) -> str:
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run(["ip", *words], env=env, capture_output=True, text=True, timeout=20, check=True).stdout


@contextlib.contextmanager
def inside(netns: str) -> Iterator[None]:
    """This thread in that namespace; sockets that are made there stay there."""
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{netns}") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@dataclass
class Internet:
    """Its servers, in one thread: TCP on PORT of any address answers one line and counts; names on RESOLVER.

    Beside what is served, every packet that arrives is looked at."""

    netns: str
    reached: list[str] = field(default_factory=list)  # addresses to which a connection was made, or a datagram sent
    targets: set[str] = field(default_factory=set)  # addresses to which any IPv4 packet came
    sources: set[str] = field(default_factory=set)  # and from which
    names: dict[str, str] = field(default_factory=lambda: {"server.test": PUBLIC, "inside.test": "10.50.0.1"})
    _stop: threading.Event = field(default_factory=threading.Event)
    _held: list[socket.socket] = field(default_factory=list)

    def serve(self, started: threading.Event) -> None:
        selector = selectors.DefaultSelector()
        with inside(self.netns), contextlib.ExitStack() as stack:
            web = stack.enter_context(socket.create_server(("0.0.0.0", PORT), backlog=1024))
            sink = stack.enter_context(socket.create_server(("0.0.0.0", 9), backlog=64))
            source = stack.enter_context(socket.create_server(("0.0.0.0", 19), backlog=64))
            hold = stack.enter_context(socket.create_server(("0.0.0.0", 443), backlog=1024))
            udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            names = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            udp.bind(("0.0.0.0", 5000))
            names.bind((RESOLVER, 53))
            cable = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_IP)))
            for one in (web, sink, source, hold, udp, names, cable):
                one.setblocking(False)
                selector.register(one, selectors.EVENT_READ, None)
            started.set()
            while not self._stop.is_set():
                for key, _ in selector.select(0.1):
                    self._look(cable)  # what reached a server had passed the cable before
                    if key.fileobj is not cable:
                        self._turn(selector, key, web, sink, source, hold, udp, names)
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    key.data.close()
            for held in self._held:
                held.close()

    def _look(self, cable: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                head, where = cable.recvfrom(64)
                if where[2] != _PACKET_OUTGOING and len(head) >= 20:
                    self.sources.add(socket.inet_ntoa(head[12:16]))
                    self.targets.add(socket.inet_ntoa(head[16:20]))

    def _turn(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, web: socket.socket, sink: socket.socket,
        source: socket.socket, hold: socket.socket, udp: socket.socket, names: socket.socket,
    ) -> None:  # fmt: skip
        one = key.fileobj
        assert isinstance(one, socket.socket)
        with contextlib.suppress(OSError):
            if one is udp:
                data, peer = udp.recvfrom(2048)
                self.reached.append(f"udp {peer[0]}")
                udp.sendto(data, peer)
            elif one is names:
                query, peer = names.recvfrom(2048)
                names.sendto(self._answer(query), peer)
            elif one in (web, sink, source, hold):
                connection, peer = one.accept()
                self.reached.append(connection.getsockname()[0])
                connection.setblocking(False)
                if one is hold:
                    self._held.append(connection)
                    return
                events = selectors.EVENT_WRITE if one is source else selectors.EVENT_READ
                selector.register(connection, events, connection)
            elif key.events & selectors.EVENT_WRITE:
                try:
                    one.send(bytes(65_536))
                except BlockingIOError:
                    return
                except OSError:
                    selector.unregister(one)
                    one.close()
            else:
                self._read(selector, one)

    def _read(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        try:
            data = one.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if one.getsockname()[1] == 9 and data:
            return
        if data:
            # Says whom it sees, and what it got.
            body = f"hello {one.getpeername()[0]}\n".encode() + data
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nKeep-Alive: yes\r\n\r\n".encode()
            one.setblocking(True)
            one.sendall(head + body)
        selector.unregister(one)
        one.close()

    def _answer(self, query: bytes) -> bytes:
        """One A record, or none."""
        at, labels = 12, []
        while size := query[at]:
            labels.append(query[at + 1 : at + 1 + size].decode("ascii"))
            at += size + 1
        question = query[12 : at + 5]
        (kind,) = struct.unpack_from("!H", query, at + 1)
        name = ".".join(labels).lower()
        address = self.names.get(name)
        answers = b""
        if address is not None and kind == 1:
            answers = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(address)
        flags = 0x8180 if address is not None else 0x8183
        return query[:2] + struct.pack("!HHHHH", flags, 1, 1 if answers else 0, 0, 0) + question + answers

    def stop(self) -> None:
        self._stop.set()


@dataclass
class Lab:
    machine: str  # names of network namespaces
    internet: Internet

    def rules(self) -> str:
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return subprocess.run(
            ["nft", "list", "ruleset"], env=env, capture_output=True, text=True, timeout=20, check=True
        ).stdout

    def links(self) -> list[str]:
        return [name for _, name in socket.if_nameindex()]

    def forwards(self) -> dict[str, str]:
        """Of each link but loopback's, and of the machine as a whole, whether it forwards."""
        root = Path("/proc/sys/net/ipv4")
        found = {name: (root / "conf" / name / "forwarding").read_text().strip() for name in self.links()}
        return found | {"all": (root / "ip_forward").read_text().strip()}


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    need_tools()
    tag = secrets.token_hex(3)
    machine, internet = f"sjtest-{tag}-m", f"sjtest-{tag}-i"
    server = Internet(internet)
    with contextlib.ExitStack() as stack:
        for name in (machine, internet):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", machine, "link", "add", "up0", "type", "veth", "peer", "name", "eth0", "netns", internet)
        ip("-n", machine, "addr", "add", f"{MACHINE}/24", "dev", "up0")
        ip("-n", machine, "link", "set", "up0", "up")
        ip("-n", machine, "link", "add", "br0", "type", "bridge")
        ip("-n", machine, "addr", "add", f"{BRIDGE}/24", "dev", "br0")
        ip("-n", machine, "link", "set", "br0", "up")
        ip("-n", internet, "link", "set", "eth0", "up")
        for address in (f"{PUBLIC}/24", f"{RESOLVER}/32", f"{OTHER}/32", *(f"{one}/32" for one in FORBIDDEN)):
            ip("-n", internet, "addr", "add", address, "dev", "eth0")
        ip("-n", machine, "route", "add", "default", "via", PUBLIC)
        started = threading.Event()
        thread = threading.Thread(target=server.serve, args=(started,), name="lab-internet")
        thread.start()
        stack.callback(thread.join, 20)
        stack.callback(server.stop)
        assert started.wait(20)
        with inside(machine):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("0")  # a new namespace has what its maker's has
            yield Lab(machine, server)
