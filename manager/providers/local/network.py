"""How pods reach the outside: which way this machine gives, what of it a pod has, what is set up before its start.

`routed` (as root): a network namespace and a veth pair for each pod, packet filter and masquerading on the machine's
side. `proxy` (also without root): no network but loopback, and an HTTP proxy outside, reached over a Unix socket. Both
reach public addresses only, and bound a pod's connections and bytes a second.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from typing import Final, Literal, Self

import msgspec

from manager.config import ManagerConfig
from manager.egress.addresses import Network

DEFAULT_RANGE: Final = IPv4Network("10.213.0.0/16")
Way = Literal["routed", "proxy"]

NETNS_DIR: Final = "/run/netns"  # ip-netns(8)'s
PROXY_DIR: Final = "/run/sojourn-outbound"  # in a pod: the proxy's socket, and what carries connections to it
PROXY_SOCKET: Final = "proxy.sock"
PROXY_PORT: Final = 3128  # of 127.0.0.1 in a pod
FORWARDER: Final = "forwarder.py"


@dataclass(frozen=True, kw_only=True)
class OutboundSettings:
    """What the operator has said about `network = "outbound"`."""

    way: Literal["auto", "routed", "proxy"] = "auto"  # auto: routed where the machine can
    range: IPv4Network = DEFAULT_RANGE  # four addresses of it for each routed pod
    resolvers: tuple[str, ...] = ("1.1.1.1", "8.8.8.8")  # whom routed pods ask for names
    refused: tuple[Network, ...] = ()  # public networks that pods must not reach all the same
    ports: tuple[int, ...] = (80, 443)  # that the proxy dials

    @classmethod
    def of(cls, config: ManagerConfig) -> Self:
        return cls(
            way=config.outbound, range=IPv4Network(config.outbound_range), resolvers=config.outbound_resolvers,
            refused=tuple(ip_network(text) for text in config.outbound_refused), ports=config.outbound_ports,
        )  # fmt: skip


class NetworkWay(msgspec.Struct, frozen=True, kw_only=True):
    """What `network = "outbound"` comes to on this machine."""

    way: Way | None
    why_not: str = ""  # where there is none, or where it is the proxy only: why not routed
    advice: str = ""
    doubt: str = ""  # what may keep packets of routed pods back, though nothing refuses them


class PodNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A pod's, as its record keeps it: enough to find and remove everything."""

    way: Way
    bytes_per_sec: int  # each way
    connections: int
    netns: str = ""  # routed: in NETNS_DIR
    link: str = ""  # routed: the machine's end of the veth pair

    @property
    def netns_path(self) -> str:
        """Of the network namespace that the pod is to join; "" where it gets an empty one of its own."""
        return f"{NETNS_DIR}/{self.netns}" if self.netns else ""


def network_for(way: Way, key: str, *, bytes_per_sec: int, connections: int) -> PodNetwork:
    """`key` tells the pod from every other of the machine; all names come from it."""
    if way == "proxy":
        return PodNetwork(way=way, bytes_per_sec=bytes_per_sec, connections=connections)
    short = base64.b32encode(hashlib.sha256(key.encode()).digest()).decode().lower()[:12]
    return PodNetwork(
        way=way, bytes_per_sec=bytes_per_sec, connections=connections, netns=f"sojourn-{key}", link=f"sj-{short}"
    )


def proxy_environment() -> dict[str, str]:
    """What commands of a pod find in their environment where its way out is the proxy."""
    url, own = f"http://127.0.0.1:{PROXY_PORT}", "localhost,127.0.0.1,::1"
    env = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": own}
    return env | {name.lower(): value for name, value in env.items()}
