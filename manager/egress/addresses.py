"""Which addresses are public: the one rule for everything that dials, or lets dial, where a tenant says.

Own tables instead of `ipaddress`'s `is_global`, whose answers differ among the Python versions that we run on, and
because the packet filter of pods is made from the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# IANA's special-purpose registry, and what clouds use of public space for themselves.
REFUSED_V4: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this host: Linux takes 0.0.0.0 for loopback
        "10.0.0.0/8",
        "100.64.0.0/10",  # carriers' NAT, and some clouds' metadata (100.100.100.200)
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's own service, on every virtual machine there
        "169.254.0.0/16",  # link-local: metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments, and Oracle's metadata (192.0.0.192)
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # former 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_GLOBAL_V6: Final = IPv6Network("2000::/3")  # all that is given out so far
_REFUSED_V6: Final = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
_MAPPED: Final = IPv6Network("::ffff:0:0/96")  # what a socket of both families calls an IPv4 address
_NAT64: Final = IPv6Network("64:ff9b::/96")
_6TO4: Final = IPv6Network("2002::/16")


def unmapped(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for (4in6, NAT64, 6to4), or `address` itself."""
    if isinstance(address, IPv6Address):
        number = int(address)
        if address in _MAPPED or address in _NAT64:
            return IPv4Address(number & 0xFFFF_FFFF)
        if address in _6TO4:
            return IPv4Address(number >> 80 & 0xFFFF_FFFF)
    return address


def is_public(address: Address, refused: Iterable[Network] = ()) -> bool:
    """Whether this is an address of the internet at large, and in none of the networks `refused` besides.

    An IPv6 address that stands for an IPv4 one is judged as that one."""
    refused = tuple(refused)
    if _inside(address, refused):
        return False
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return False  # means something on one link only
    real = unmapped(address)
    if real is not address and _inside(real, refused):
        return False
    if isinstance(real, IPv4Address):
        return not _inside(real, REFUSED_V4)
    return real in _GLOBAL_V6 and not _inside(real, _REFUSED_V6)


def _inside(address: Address, networks: Iterable[Network]) -> bool:
    return any(network.version == address.version and address in network for network in networks)
