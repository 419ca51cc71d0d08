"""Gets what a stranger's https URL names, and never anything of the networks that this machine is in.

The rule is held at the socket: whatever a URL spells, a name resolves to or a redirect says, a connection is made to an
address that was judged in that very moment, or none is made. Nothing of the manager's own goes along: no cookies, no
credentials, no proxies of the environment.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from manager.egress.dial import DialFailed, Dialler, DialRefused

MAX_URL: Final = 4096
MAX_HOPS: Final = 5
PIECE_BYTES: Final = 256 * 1024
HEAD_SEC: Final = 30.0  # from the request to the head of the answer
STALL_SEC: Final = 20.0  # without a byte
MIN_BYTES_SEC: Final = 16 * 1024  # on average, once RATE_AFTER_SEC have passed
RATE_AFTER_SEC: Final = 30.0
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_TEXT: Final = re.compile(r"[\x21-\x7e]+\Z")
_NETLOC: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?\Z")


class FetchRefused(Exception):
    """The URL, or one that it leads to, is not one that is fetched. Nothing was sent to where it points."""


class FetchFailed(Exception):
    """The server did not give what was asked for."""


class FetchTooLarge(Exception):
    def __init__(self, limit: int) -> None:
        super().__init__(f"it has more than {limit} bytes")
        self.limit = limit


@dataclass(frozen=True)
class FetchLimits:
    total_bytes: int = 4 << 30
    total_sec: float = 900.0


class Fetcher:
    """`dialler` says where connections may go, and makes no difference between first URLs and redirects."""

    def __init__(
        self, dialler: Dialler, limits: FetchLimits | None = None, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls`: another context than the system's, for tests."""
        self._dialler = dialler
        self._limits = limits or FetchLimits()
        self._tls = tls or ssl.create_default_context()

    @asynccontextmanager
    async def get(self, url: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The content as it comes, encoded as it lies there. Raises FetchRefused, FetchFailed, FetchTooLarge, here
        and while it is read."""
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self._dialler),
            use_dns_cache=False,
            socket_factory=self._socket,
            ssl=self._tls,
            force_close=True,
            limit=1,
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_read=STALL_SEC)
        headers = {"User-Agent": "sojourn", "Accept": "*/*", "Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False,
            headers=headers, timeout=timeout,
        ) as session:  # fmt: skip
            try:
                async with asyncio.timeout(self._limits.total_sec):
                    answer = await self._followed(session, url)
                    async with answer:
                        yield self._pieces(answer)
            except TimeoutError:
                raise FetchFailed(f"the server had not sent all within {self._limits.total_sec:.0f} s") from None

    async def _followed(self, session: aiohttp.ClientSession, url: str) -> aiohttp.ClientResponse:
        """The answer behind the redirects, each judged like the first URL."""
        for hop in range(MAX_HOPS + 1):
            target = check_url(url)
            answer = await self._asked(session, target)
            try:
                if answer.status == 200:
                    return answer
                location = answer.headers.get("Location")
                if answer.status not in _REDIRECTS or location is None:
                    raise FetchFailed(f"the server answered {answer.status}, not 200")
                if not _TEXT.match(location):
                    raise FetchRefused("the server's redirect is no URL of plain characters")
                url = _joined(url, location)
            except BaseException:
                answer.close()
                raise
            answer.close()
            if hop == MAX_HOPS:
                break
        raise FetchFailed(f"the server redirects more than {MAX_HOPS} times")

    async def _asked(self, session: aiohttp.ClientSession, target: URL) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(HEAD_SEC):
                return await session.get(target, allow_redirects=False)
        except TimeoutError:
            raise FetchFailed("the server did not answer in time") from None
        except DialRefused as why:
            raise FetchRefused(str(why)) from None
        except DialFailed as why:
            raise FetchFailed(str(why)) from None
        except aiohttp.ClientConnectorError as why:
            if isinstance(why.os_error, _NotPublic):
                raise FetchRefused(f"{target.host} is not a public address") from None
            raise FetchFailed(f"no connection to {target.host}: {_plain(why.os_error)}") from None
        except aiohttp.ClientError as why:
            raise FetchFailed(f"{target.host} speaks no proper HTTP: {_plain(why)}") from None

    async def _pieces(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        limit = self._limits.total_bytes
        if answer.content_length is not None and answer.content_length > limit:
            raise FetchTooLarge(limit)
        got, began = 0, time.monotonic()
        try:
            async for piece in answer.content.iter_chunked(PIECE_BYTES):
                got += len(piece)
                if got > limit:
                    raise FetchTooLarge(limit)
                took = time.monotonic() - began
                if took > RATE_AFTER_SEC and got < took * MIN_BYTES_SEC:
                    raise FetchFailed(f"the server sends less than {MIN_BYTES_SEC >> 10} KiB a second")
                yield piece
        except aiohttp.ServerTimeoutError:
            raise FetchFailed(f"the server sent nothing for {STALL_SEC:.0f} s") from None
        except aiohttp.ClientError as why:
            raise FetchFailed(f"the answer was cut off after {got} bytes: {_plain(why)}") from None

    def _socket(self, info: tuple[Any, ...]) -> socket.socket:
        """For the address that is about to be dialled, however it was come by."""
        family, kind, protocol, _, where = info
        if not self._dialler.allowed(ip_address(where[0]), where[1]):
            raise _NotPublic("not a public address")
        return socket.socket(family, kind, protocol)


class _NotPublic(OSError):
    pass


class _Resolver(AbstractResolver):
    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await self._dialler.addresses(host, port)
        ]

    async def close(self) -> None:
        return


def check_url(text: str) -> URL:
    """The URL as it is dialled, without its fragment. Raises FetchRefused."""
    if len(text) > MAX_URL:
        raise FetchRefused(f"a URL has at most {MAX_URL} characters")
    if not _TEXT.match(text) or "\\" in text:
        raise FetchRefused(
            "a URL is of plain ASCII characters without spaces; percent-encode others, and xn-- in hosts"
        )
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise FetchRefused("this is no URL") from None
    if parts.scheme.lower() != "https":
        raise FetchRefused("only https URLs are fetched")
    if "@" in parts.netloc:
        raise FetchRefused("a URL with a user or password in it is not fetched")
    if _NETLOC.match(parts.netloc) is None or not parts.hostname:
        raise FetchRefused("the URL's host is neither a name nor an address")
    query = f"?{parts.query}" if parts.query else ""
    try:
        url = URL(f"https://{parts.netloc.lower()}{parts.path or '/'}{query}", encoded=True)
    except ValueError:
        raise FetchRefused("this is no URL") from None
    if (url.raw_host, url.port) != (parts.hostname, port or 443):
        raise FetchRefused("this is no URL")  # two readers differ about its host: whom to believe is not ours to guess
    return url


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise FetchRefused("the server's redirect is no URL") from None


def _plain(why: BaseException | None) -> str:
    """A server's words are a stranger's: printable, and not many."""
    text = getattr(why, "strerror", None) or str(why) or type(why).__name__
    return "".join(char if char.isprintable() else " " for char in text)[:200]
