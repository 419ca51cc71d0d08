"""Connects to a host that a tenant names: to public addresses only, judged by the address that is really dialled."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Final

from manager.egress.addresses import Address, Network, is_public, unmapped

RESOLVE_SEC: Final = 8.0
CONNECT_SEC: Final = 10.0
LOOKUPS_AT_ONCE: Final = 128  # of all tenants
MAX_ADDRESSES: Final = 8  # of one name
_NAME: Final = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?\Z")


class DialRefused(Exception):
    """By rule: the port, or an address that is not public. Nothing was sent anywhere."""


class DialFailed(Exception):
    """The name has no public address, or none of its addresses took the connection."""


@dataclass(frozen=True)
class DialRules:
    """`ports`: those that may be dialled; empty: every one. `refused`: networks beside those that are never public."""

    ports: frozenset[int] = frozenset({80, 443})
    refused: tuple[Network, ...] = ()


@dataclass
class Dialler:
    """One tenant's: `lookups_at_once` keeps its names, whose servers it may own, from holding up others' lookups."""

    rules: DialRules
    threads: ThreadPoolExecutor
    lookups_at_once: int = 4
    look_up: Callable[[str], list[Address]] | None = None  # blocking; for tests. None: the system's resolver
    _looking: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._looking = asyncio.Semaphore(self.lookups_at_once)

    async def dial(self, host: str, port: int) -> socket.socket:
        """A connected, non-blocking socket. `host` is a name or an address in any spelling.

        Raises DialRefused, DialFailed."""
        return await _connected(await self.addresses(host, port), port)

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Where the host may be dialled, in order of preference. Raises DialRefused, DialFailed.

        That a name has addresses which are not public is told like that it has none: internal names are not for tenants
        to find out."""
        if not 0 < port < 65_536 or (self.rules.ports and port not in self.rules.ports):
            raise DialRefused(f"port {port} is not among those that may be reached")
        literal = _literal(host)
        if literal is None:
            found = [address for address in await self._resolve(host) if self.allowed(address, port)]
            if not found:
                raise DialFailed(f"{host} has no public address")
        elif self.allowed(literal, port):
            found = [literal]
        else:
            raise DialRefused(f"{host} is not a public address")
        return found[:MAX_ADDRESSES]

    def allowed(self, address: Address, port: int) -> bool:
        """The rule, of the very address that is dialled."""
        if self.rules.ports and port not in self.rules.ports:
            return False
        return is_public(address, self.rules.refused) and not is_own(address)

    async def _resolve(self, host: str) -> list[Address]:
        if not _NAME.match(host):
            raise DialRefused("the host is neither a name nor an address")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_SEC):
                await self._looking.acquire()
                looking = loop.run_in_executor(self.threads, self.look_up or _look_up, host)
                looking.add_done_callback(self._looked)
                return await asyncio.shield(looking)
        except (OSError, UnicodeError, TimeoutError):
            raise DialFailed(f"{host} has no public address") from None

    def _looked(self, looking: asyncio.Future[list[Address]]) -> None:
        # When the lookup ends, not when nobody waits for it any more: its thread is busy until then.
        self._looking.release()
        if not looking.cancelled():
            looking.exception()


def is_own(address: Address) -> bool:
    """Whether this machine has the address itself, public or not: what listens there may trust local clients.

    Asks the kernel's routes, which takes no packet: the way to an own address starts at that very address."""
    for one in {address, unmapped(address)}:
        family = socket.AF_INET6 if isinstance(one, IPv6Address) else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((str(one), 9))
                if ip_address(probe.getsockname()[0]) == one:
                    return True
        except OSError:
            continue  # no way there at all
    return False


def _look_up(host: str) -> list[Address]:
    # As bytes, which are taken as they are: a str goes through IDNA, which turns other characters into digits and dots.
    found = socket.getaddrinfo(host.encode("ascii"), None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(where[0]) for *_, where in found if isinstance(where[0], str)))


def _literal(host: str) -> Address | None:
    """The address that `host` spells, also as inet_aton(3) would (`0x7f.1`, `2130706433`); None where it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        pass
    try:
        return ip_address(socket.inet_aton(host)) if host and not host[-1].isspace() else None
    except (OSError, UnicodeError):
        return None


async def _connected(addresses: list[Address], port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    why: Exception = TimeoutError()
    try:
        async with asyncio.timeout(CONNECT_SEC):
            for address in addresses:
                mapped = isinstance(address, IPv6Address) and address.ipv4_mapped is not None
                dialled = unmapped(address) if mapped else address
                family = socket.AF_INET6 if isinstance(dialled, IPv6Address) else socket.AF_INET
                try:
                    connection = socket.socket(family, socket.SOCK_STREAM)
                except OSError as failure:  # a machine without IPv6
                    why = failure
                    continue
                connection.setblocking(False)
                try:
                    async with asyncio.timeout(CONNECT_SEC / min(len(addresses), 3)):
                        await loop.sock_connect(connection, (str(dialled), port))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return connection
                except (OSError, TimeoutError) as failure:
                    connection.close()
                    why = failure
                except BaseException:
                    connection.close()
                    raise
    except TimeoutError as failure:
        why = failure
    reason = "no answer" if isinstance(why, TimeoutError) else getattr(why, "strerror", None) or str(why)
    raise DialFailed(f"no connection: {reason}")
