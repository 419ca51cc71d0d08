"""One cluster's API server, spoken to through one `request()`: a deadline over all tries, and errors with names.

Address, TLS and credentials are the official client's business (`kubernetes.aio`), the requests are made here: through
it each costs the manager three times as much. Answers come back as bytes, of which `objects` reads what is needed.
Every request that is made here may be made twice: pods have names of their own, patches test what they change.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, Self
from urllib.parse import urlencode
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config
from yarl import URL

from manager.errors import TargetUnavailable
from manager.providers.kubernetes.objects import ApiStatus, clean

log = logging.getLogger(__name__)

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]

DEADLINE_SEC: Final = 10.0  # over all tries of a request
TRY_SEC: Final = 6.0
CONNECT_SEC: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 << 20
MAX_LINE_BYTES: Final = 8 << 20  # of one event of a watch
MAX_CONNECTIONS: Final = 64
KEEP_SEC: Final = 50.0  # an unused connection: a handshake costs more than a claim; API servers hang up after 90
FIRST_PAUSE_SEC: Final = 0.1
LAST_PAUSE_SEC: Final = 2.0
MAX_RETRY_AFTER_SEC: Final = 60.0
RELOAD_SEC: Final = 10.0  # between two readings of credentials that were refused
JSON_PATCH: Final = "application/json-patch+json"
_AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})
_NO_CONNECTION: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class NoCluster(Exception):
    """The cluster's address or credentials cannot be had; the message says what is missing."""


class ApiRefused(TargetUnavailable):
    """The API server answered with an error that no second try changes.

    `doubtful`: an earlier try of the same request had no answer, so this one may be about what that try did."""

    def __init__(self, status: int, said: ApiStatus, *, doubtful: bool = False) -> None:
        super().__init__(f"the cluster's API server refused: {said.reason or status}")
        self.api_status = status
        self.reason = said.reason
        self.words = clean(said.message)
        self.doubtful = doubtful


class ClusterClient:
    """Ways to one API server. `request` shares a pool of connections; each stream has one of its own."""

    def __init__(
        self, configuration: Configuration, *, kubeconfig: str | None = None, context: str | None = None
    ) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._configuration = configuration
        self._reloaded_at = 0.0
        self._api = ApiClient(configuration)  # for its credentials and TLS; asked through it, a call costs three times
        self._proxy = configuration.proxy or _proxy_for(configuration.host)
        self._calls = self._session()
        self._streams = self._session()
        self.deadline_sec = DEADLINE_SEC
        self.requests = 0
        self.retried = 0

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> Self:
        """With a kubeconfig's credentials, else those that a pod in the cluster has. Raises NoCluster."""
        configuration = Configuration()
        try:
            await _load(configuration, kubeconfig, context)
            return cls(configuration, kubeconfig=kubeconfig, context=context)
        except (ConfigException, OSError, ValueError, KeyError, TypeError, AttributeError) as why:
            where = f"the kubeconfig {kubeconfig}" if kubeconfig else "this pod's service account"
            raise NoCluster(f"{where} gives no way to a cluster: {why}") from why

    def _session(self) -> aiohttp.ClientSession:
        # The environment's proxies were looked at once: aiohttp would look again, in a thread, for every call.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, ssl=self._api.rest_client.ssl_context, keepalive_timeout=KEEP_SEC
            ),
            headers={"Accept": "application/json", "User-Agent": "sojourn"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=1 << 21,
        )

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    async def request(
        self,
        method: Method,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        deadline_sec: float | None = None,
        try_sec: float = TRY_SEC,
    ) -> bytes:
        """The answer's body. Tried again after no answer, 429 and 5xx, as Retry-After says, until the deadline: the
        client's own, or one that is sooner or that a long answer needs.

        Raises ApiRefused for every other status, and TargetUnavailable past the deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.deadline_sec if deadline_sec is None else deadline_sec)
        pause, doubtful = FIRST_PAUSE_SEC, False
        while True:
            wait_sec: float | None = None
            cause: BaseException | None = None
            try:
                status, headers, data = await self._once(
                    method, path, query, body, content_type, max(0.05, min(try_sec, deadline - loop.time()))
                )
            except _NO_CONNECTION as why:
                said, cause = f"no connection: {why}", why
            except (aiohttp.ClientError, OSError, TimeoutError) as why:
                # It may have been done all the same, and nobody heard of it.
                said, cause, doubtful = f"no answer: {type(why).__name__} {why}", why, True
            else:
                if status < 300:
                    return data
                refusal = ApiRefused(status, _status_of(data), doubtful=doubtful)
                if status == 401 and await self._reload():
                    continue
                if status not in _AGAIN:
                    raise refusal
                said, cause = f"status {status} {refusal.words}", refusal
                wait_sec = _retry_after(headers)
                doubtful = doubtful or status >= 500
            nap = max(wait_sec or 0.0, pause * random.uniform(0.5, 1.5))
            if loop.time() + nap >= deadline:
                log.warning("cluster_unavailable", extra={"method": method, "path": path, "why": said})
                raise TargetUnavailable(
                    "the cluster's API server does not answer; sandboxes that have their pod go on",
                    retry_after_sec=wait_sec,
                ) from cause
            self.retried += 1
            await asyncio.sleep(nap)
            pause = min(LAST_PAUSE_SEC, pause * 2)

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], *, idle_sec: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of an endless answer, over a connection of its own.

        Raises ApiRefused, aiohttp.ClientError, OSError; TimeoutError after `idle_sec` without a byte."""
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SEC, sock_connect=CONNECT_SEC, sock_read=idle_sec)
        response = await self._send(self._streams, "GET", path, query, None, "application/json", timeout)
        try:
            if response.status >= 300:
                data = await response.content.read(1 << 16)
                if response.status == 401:
                    await self._reload()
                raise ApiRefused(response.status, _status_of(data))
            yield _lines(response)
        finally:
            response.close()

    async def close(self) -> None:
        await self._calls.close()
        await self._streams.close()
        await self._api.close()  # type: ignore[no-untyped-call]

    async def _once(
        self,
        method: Method,
        path: str,
        query: Mapping[str, str] | None,
        body: Any,
        content_type: str,
        seconds: float,
    ) -> tuple[int, Mapping[str, str], bytes]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SEC)
        self.requests += 1
        response = await self._send(self._calls, method, path, query, body, content_type, timeout)
        try:
            parts, size = [], 0
            async for part in response.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise aiohttp.ClientPayloadError(f"an answer of over {MAX_ANSWER_BYTES} bytes")
            return response.status, response.headers, b"".join(parts)
        finally:
            if response.content.is_eof():
                response.release()
            else:
                response.close()

    async def _send(
        self,
        session: aiohttp.ClientSession,
        method: Method,
        path: str,
        query: Mapping[str, str] | None,
        body: Any,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers: dict[str, str] = {}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        if body is not None:
            headers["Content-Type"] = content_type
        text = f"?{urlencode(query)}" if query else ""
        return await session.request(
            method,
            URL(f"{self._configuration.host}{path}{text}", encoded=True),
            headers=headers,
            data=None if body is None else msgspec.json.encode(body),
            timeout=timeout,
            allow_redirects=False,
            proxy=self._proxy,
            proxy_headers=self._configuration.proxy_headers,
            server_hostname=self._configuration.tls_server_name,
        )

    async def _reload(self) -> bool:
        """Reads the kubeconfig's credentials again, as after a token's end; whether that was worth another try."""
        now = asyncio.get_running_loop().time()
        if self._kubeconfig is None or now - self._reloaded_at < RELOAD_SEC:
            return False
        self._reloaded_at = now
        try:
            await _load(self._configuration, self._kubeconfig, self._context)
        except (ConfigException, OSError, ValueError, KeyError, TypeError, AttributeError) as why:
            log.warning("kubeconfig_not_read", extra={"why": str(why)})
            return False
        return True


def _proxy_for(host: str) -> str | None:
    """The environment's proxy for the API server, as other clients of it take it."""
    url = URL(host)
    if url.host is None or proxy_bypass(url.host):
        return None
    return getproxies().get(url.scheme)


async def _load(configuration: Configuration, kubeconfig: str | None, context: str | None) -> None:
    if kubeconfig is None:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, context=context, client_configuration=configuration, persist_config=False
        )


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Raises ValueError for a line over its bound."""
    kept = bytearray()
    async for part in response.content.iter_any():
        kept += part
        if b"\n" in part:
            *whole, rest = bytes(kept).split(b"\n")
            kept = bytearray(rest)
            for line in whole:
                if line:
                    yield line
        if len(kept) > MAX_LINE_BYTES:
            raise ValueError(f"an event of over {MAX_LINE_BYTES} bytes")
    if kept:
        yield bytes(kept)


def _status_of(data: bytes) -> ApiStatus:
    try:
        return msgspec.json.decode(data, type=ApiStatus)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ApiStatus(message=clean(data[:2000].decode("utf-8", "replace")))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After", "")
    return min(MAX_RETRY_AFTER_SEC, float(text)) if text.isascii() and text.isdigit() else None
