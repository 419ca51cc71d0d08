"""Networks of pods that are routed: a namespace, a veth pair, filter, limits. Needs root. All calls block.

Whatever of it is left of a pod is found by the names in its record, so that a removal may come at any moment and again.
What belongs to the machine and not to a pod (the table, forwarding) is made for the first pod and goes with the last,
under a lock among all managers; its file also remembers what has to be put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from typing import Final

import msgspec

from manager.errors import CapacityExhausted, IsolationUnavailable
from manager.providers.local import ruleset
from manager.providers.local.network import NETNS_DIR, NetworkWay, OutboundSettings, PodNetwork

TOOL_SEC: Final = 10.0
LOCK_SEC: Final = 30.0
_TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux"}
_SYSCTL: Final = Path("/proc/sys/net/ipv4/conf")
_ALL_FORWARDING: Final = Path("/proc/sys/net/ipv4/ip_forward")
_MISSING: Final = ("No such file or directory", "No such device", "Cannot find device")  # as ip and nft say it
_LINK_SETTINGS: Final = {
    "rp_filter": "1", "arp_ignore": "1", "accept_redirects": "0", "send_redirects": "0", "accept_source_route": "0",
    "route_localnet": "0", "proxy_arp": "0", "forwarding": "1",
}  # fmt: skip
_LEAST_BURST_BYTES: Final = 32_768
_QUEUE: Final = "100ms"  # of packets over the limit, before they are dropped


class _State(msgspec.Struct):
    """What managers tell each other in the lock's file."""

    # Where the search for a free address starts: one that was just left, whose connections the kernel may still know,
    # comes last.
    next: int = msgspec.field(default_factory=lambda: secrets.randbelow(1 << 20))
    guarded: list[str] = []  # interfaces whose forwarding we have switched on


@dataclass(frozen=True)
class _Route:
    network: IPv4Network
    link: str


def probe(settings: OutboundSettings) -> NetworkWay:
    """Tries all of it, in a namespace of its own. The machine's own network is only looked at."""
    if os.geteuid() != 0:
        return NetworkWay(way=None, why_not="not root", advice="run the manager as root")
    missing = sorted({package for tool, package in _TOOLS.items() if _which(tool) is None})
    if missing:
        names = ", ".join(tool for tool in _TOOLS if _which(tool) is None)
        return NetworkWay(way=None, why_not=f"{names} not found", advice=f"install {' and '.join(missing)}")
    if not os.access(_SYSCTL / "all/forwarding", os.W_OK):
        return NetworkWay(
            way=None, why_not="/proc/sys/net cannot be written",
            advice="this looks like a container: run the manager outside of it",
        )  # fmt: skip
    if (other := _collision(settings.range, _routes())) is not None:
        return NetworkWay(
            way=None, why_not=f"{other.network} behind {other.link} is within pods' range {settings.range}",
            advice="set SOJOURN_OUTBOUND_RANGE to a private range that this machine has no route to",
        )  # fmt: skip
    name = f"sojourn-probe-{secrets.token_hex(4)}"
    link = f"{ruleset.LINK_PREFIX}probe"
    try:
        _run(["ip", "netns", "add", name])
        try:
            enter = ["nsenter", f"--net={NETNS_DIR}/{name}", "--"]
            _run([*enter, "nft", "-f", "-"], ruleset.table(["probe0"]) + ruleset.pod(link, 8, ["192.0.2.0/24"]))
            _run(["ip", "-n", name, "link", "add", link, "type", "veth", "peer", "name", "eth0"])
            _run(["tc", "-n", name, "-batch", "-"], _shaper(link, 1 << 20))
        finally:
            _run(["ip", "netns", "del", name])
    except (OSError, IsolationUnavailable) as why:
        return NetworkWay(way=None, why_not=str(why), advice="use a kernel with nf_tables, veth and sch_tbf")
    return NetworkWay(way="routed", doubt=_doubt())


def make(network: PodNetwork, settings: OutboundSettings) -> None:
    """Everything of the pod's network, before anything runs in it. Raises IsolationUnavailable, CapacityExhausted."""
    with _locked() as state:
        routes = _routes()
        _apply(state, routes, ruleset.pod(network.link, network.connections, _v4(settings)))
        host, pod = _free_addresses(state, settings.range, routes)
        _run(["ip", "-batch", "-"], (
            f"netns add {network.netns}\n"
            f"link add {network.link} type veth peer name eth0 netns {network.netns}\n"
            f"{_no_ipv6(network.link)}addr add {host} dev {network.link}\n"
            f"link set {network.link} up\n"
        ))  # fmt: skip
        for name, value in _LINK_SETTINGS.items():
            (_SYSCTL / network.link / name).write_text(value, encoding="ascii")
    _run(["ip", "-n", network.netns, "-batch", "-"], (
        f"link set lo up\n{_no_ipv6('eth0')}addr add {pod} dev eth0\n"
        f"link set eth0 up\nroute add default via {host.ip}\n"
    ))  # fmt: skip
    _run(["tc", "-n", network.netns, "-batch", "-"], _shaper("eth0", network.bytes_per_sec))
    _run(["tc", "-batch", "-"], _shaper(network.link, network.bytes_per_sec))


def remove(network: PodNetwork) -> None:
    """Whatever there is of the pod's network. Raises IsolationUnavailable where something would not go."""
    if any(_which(tool) is None for tool in ("ip", "nft")):
        return  # then nothing was made
    if network.link in _links():
        _run(["ip", "link", "del", network.link], missing_ok=True)
    if os.path.exists(network.netns_path):
        _run(["ip", "netns", "del", network.netns], missing_ok=True)
    _run(["nft", "-f", "-"], ruleset.without_pod(network.link), missing_ok=True)
    if not _pod_links(_links()):
        with _locked() as state:
            if not _pod_links(_links()):
                _put_back(state)


def restore(networks: Iterable[PodNetwork], settings: OutboundSettings) -> bool:
    """Puts filter and forwarding right for these pods, as the settings are now; whether the filter was missing."""
    with _locked() as state:
        missing = not _run(["nft", "list", "chain", "inet", ruleset.TABLE, "from_pods"], missing_ok=True)
        pods = [ruleset.pod(network.link, network.connections, _v4(settings)) for network in networks]
        _apply(state, _routes(), "".join(pods), anew=True)
        return missing


def leftovers(suffix: str, known: Iterable[str]) -> list[str]:
    """Namespaces of pods whose keys end with `suffix` and that nobody knows any more, by their keys."""
    try:
        names = os.listdir(NETNS_DIR)
    except FileNotFoundError:
        return []
    keys = (name.removeprefix("sojourn-") for name in names if name.startswith("sojourn-") and name.endswith(suffix))
    return [key for key in keys if key not in set(known)]


# ── the machine's part ──────────────────────────────────────────────────────────────────────────────────────────


def _apply(state: _State, routes: list[_Route], rules: str, *, anew: bool = False) -> None:
    """Puts the table, where it is missing or `anew`, and forwarding in place, with `rules` of pods."""
    guarded = [] if _forwards_all() else list(state.guarded)
    fresh = []
    if not _forwards_all():
        outward = sorted({route.link for route in routes if route.network.prefixlen == 0} - set(guarded))
        fresh = [link for link in outward if _value(_SYSCTL / link / "forwarding") == "0"]
    changed = guarded + fresh != state.guarded
    state.guarded = guarded + fresh
    # Rules before the switch: at no moment does the machine forward what it did not.
    if anew or changed or not _run(["nft", "-f", "-"], rules, missing_ok=True):
        _run(["nft", "-f", "-"], ruleset.table(state.guarded) + rules)
    for link in fresh:
        (_SYSCTL / link / "forwarding").write_text("1", encoding="ascii")


def _put_back(state: _State) -> None:
    if not _forwards_all():
        for link in state.guarded:
            with contextlib.suppress(OSError):  # it may be gone
                (_SYSCTL / link / "forwarding").write_text("0", encoding="ascii")
    state.guarded = []
    _run(["nft", "delete", "table", "inet", ruleset.TABLE], missing_ok=True)


def _forwards_all() -> bool:
    return _value(_ALL_FORWARDING) == "1"


def _value(setting: Path) -> str:
    return setting.read_text(encoding="ascii").strip()


def _free_addresses(state: _State, range_: IPv4Network, routes: list[_Route]) -> tuple[IPv4Interface, IPv4Interface]:
    """The machine's and the pod's, of a /30 that nothing here has a route to. Raises CapacityExhausted."""
    taken = [route.network for route in routes if route.network.prefixlen and route.network.overlaps(range_)]
    count = range_.num_addresses // 4
    exact = {network.network_address for network in taken if network.prefixlen == 30}
    wide = [network for network in taken if network.prefixlen != 30]
    for step in range(count):
        index = (state.next + step) % count
        block = IPv4Network((int(range_.network_address) + 4 * index, 30))
        if block.network_address not in exact and not any(network.overlaps(block) for network in wide):
            state.next = (index + 1) % count
            return IPv4Interface((int(block[1]), 30)), IPv4Interface((int(block[2]), 30))
    raise CapacityExhausted(f"every address of pods' range {range_} is in use")


def _routes() -> list[_Route]:
    """The machine's IPv4 routes, those of pods among them."""
    routes = []
    for line in Path("/proc/thread-self/net/route").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        address, mask = (int.from_bytes(bytes.fromhex(fields[column]), "little") for column in (1, 7))
        routes.append(_Route(IPv4Network((address, str(IPv4Address(mask)))), fields[0]))
    return routes


def _collision(range_: IPv4Network, routes: list[_Route]) -> _Route | None:
    for route in routes:
        ours = route.link.startswith(ruleset.LINK_PREFIX)
        if not ours and route.network.prefixlen and route.network.overlaps(range_):
            return route
    return None


def _doubt() -> str:
    """Whether another table refuses what is forwarded by default, as Docker's does."""
    try:
        said = msgspec.json.decode(_run(["nft", "-j", "list", "chains"]) or b"{}")
    except (OSError, IsolationUnavailable, msgspec.DecodeError):
        return ""
    chains = [entry["chain"] for entry in said.get("nftables", ()) if "chain" in entry]
    for chain in chains:
        if (chain.get("hook"), chain.get("policy")) == ("forward", "drop") and chain["table"] != ruleset.TABLE:
            return f"chain {chain['name']} of table {chain['family']} {chain['table']} drops what it does not know"
    return ""


def _links() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _pod_links(links: Iterable[str]) -> list[str]:
    return [name for name in links if name.startswith(ruleset.LINK_PREFIX)]


def _v4(settings: OutboundSettings) -> list[str]:
    return [str(network) for network in settings.refused if network.version == 4]


def _no_ipv6(link: str) -> str:
    """Without a link-local address there is none but on loopback."""
    return f"link set {link} addrgenmode none\n" if os.path.exists("/proc/sys/net/ipv6") else ""


def _shaper(link: str, bytes_per_sec: int) -> str:
    """A token bucket for what leaves through `link`; large packets are cut up by it."""
    burst = max(_LEAST_BURST_BYTES, bytes_per_sec // 50)
    return f"qdisc replace dev {link} root tbf rate {bytes_per_sec}bps burst {burst} latency {_QUEUE}\n"


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────


def program(tool: str) -> str:
    """Where it is, for those who start pods. Raises IsolationUnavailable."""
    found = _which(tool)
    if found is None:
        raise IsolationUnavailable(f"{tool} is not installed (Debian: apt-get install {_TOOLS[tool]})")
    return found


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin")


def _run(argv: list[str], said: str = "", *, missing_ok: bool = False) -> bytes:
    """What it prints, and b"ok" for nothing; b"" where what it is about is `missing_ok` and missing.

    Raises IsolationUnavailable with its words."""
    try:
        done = subprocess.run(
            [program(argv[0]), *argv[1:]], input=said.encode(), capture_output=True, timeout=TOOL_SEC, check=False
        )
    except subprocess.TimeoutExpired:
        raise IsolationUnavailable(f"{' '.join(argv)}: no end within {TOOL_SEC:.0f} s") from None
    if done.returncode == 0:
        return done.stdout or b"ok"
    words = " ".join(done.stderr.decode("utf-8", "replace").split())[:400]
    if missing_ok and any(one in words for one in _MISSING):
        return b""
    raise IsolationUnavailable(f"{' '.join(argv)}: {words or f'exit code {done.returncode}'}")


@contextlib.contextmanager
def _locked() -> Iterator[_State]:
    """Alone among all managers of this network namespace; what is done to the state is kept, unless it is as new."""
    inode = os.stat("/proc/thread-self/ns/net").st_ino
    path = Path(f"/run/sojourn-network-{inode}")
    with contextlib.ExitStack() as stack:
        deadline = time.monotonic() + LOCK_SEC
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _lock(fd, deadline)
                # Whoever held it before us may have removed the file: then this is a lock of nothing.
                if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(fd)):
                    break
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        stack.callback(os.close, fd)
        try:
            state = msgspec.json.decode(os.pread(fd, 65_536, 0) or b"{}", type=_State)
        except msgspec.DecodeError:
            state = _State()
        try:
            yield state
        finally:
            if state.guarded or _pod_links(_links()):
                raw = msgspec.json.encode(state)
                os.pwrite(fd, raw, 0)
                os.ftruncate(fd, len(raw))
            else:
                path.unlink(missing_ok=True)


def _lock(fd: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise IsolationUnavailable(f"no turn at the machine's network within {LOCK_SEC:.0f} s") from None
            time.sleep(0.002)
