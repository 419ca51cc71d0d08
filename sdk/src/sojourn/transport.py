"""One HTTP call to the server: its deadline, its retries, its error as an exception. All else is built on this."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, Final, Literal, TypeVar

import aiohttp
import msgspec
from yarl import URL

from sojourn.config import Server
from sojourn.errors import APIError, ConnectionFailed, DeadlineExceeded, SojournError, UnexpectedAnswer, api_error
from sojourn.frames import MAX_FRAME_BYTES
from sojourn.types import ErrorBody, ErrorReply

CONNECT_SEC: Final = 10.0
CALL_SEC: Final = 60.0  # a plain call's deadline, its retries included
IDLE_SEC: Final = 60.0  # between two pieces of a file or of followed output
RETRY_SEC: Final = 60.0  # how long a server may be away, or say "later", before a call gives up
FIRST_CONTACT_SEC: Final = 2.0  # the same for a server that has never answered: it is likely not there at all
FIRST_PAUSE_SEC: Final = 0.1
MAX_PAUSE_SEC: Final = 10.0
PIECE_BYTES: Final = 1 << 20  # aiohttp sends bytes over this in one go, which would block the loop
MAX_ANSWER_BYTES: Final = 64 << 20  # of an answer that is read whole
MAX_ERROR_BYTES: Final = 1 << 20
PROTOCOL: Final = "sojourn.v1"  # of WebSockets
WEBSOCKET_CLOSE_SEC: Final = 2.0  # for the server's part of the close

# `safe`: sending twice does no harm (reads, keyed starts, deletes), so every lost connection may be retried.
# `unsent`: only where the request certainly did nothing: the connection was refused, or the server said so.
Retry = Literal["safe", "unsent"]
Body = bytes | AsyncIterable[bytes]

T = TypeVar("T")

_DID_NOTHING: Final = frozenset({429, 503})
_BROKEN: Final = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError)


@dataclass(frozen=True)
class Answer:
    """A whole answer with a status under 300."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Patience:
    """How long failures in a row are borne, with growing pauses between the attempts. Progress makes it new."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.renew()

    def renew(self) -> None:
        self._pause_sec = FIRST_PAUSE_SEC
        self._until: float | None = None

    async def bear(self, error: SojournError, retry: Retry = "safe") -> None:
        """Waits a little. Raises `error` where trying again cannot help, or has been tried for long enough.

        A server's `Retry-After` is waited for, unless that is longer than there is patience."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._transport.retry_for_sec(error)
        asked_sec: float = getattr(error, "retry_after_sec", None) or 0.0
        wait_sec = max(random.uniform(0.25, 1.0) * self._pause_sec, asked_sec)
        self._pause_sec = min(self._pause_sec * 2, MAX_PAUSE_SEC)
        if not may_repeat(error, retry) or now + wait_sec > self._until:
            raise error
        await asyncio.sleep(wait_sec)


class Transport:
    """The connections to one server. Opened by its first call, inside the event loop that uses it."""

    def __init__(self, server: Server, headers: Mapping[str, str], *, max_connections: int, retry_sec: float) -> None:
        self.server = server
        self._retry_sec = retry_sec
        self._reached = False
        self._headers = {"X-Api-Key": server.api_key, "User-Agent": "sojourn-sdk", **headers}
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Ends all connections. Safe to repeat."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def retry_for_sec(self, error: SojournError) -> float:
        """How long to go on trying after a first failure."""
        unseen = isinstance(error, ConnectionFailed) and not self._reached
        return min(self._retry_sec, FIRST_CONTACT_SEC) if unseen else self._retry_sec

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise SojournError("this client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    async def call(
        self,
        method: str,
        path: str,
        *,
        retry: Retry,
        json: object = None,
        data: Body | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_sec: float = CALL_SEC,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Answer:
        """The whole answer, after as many attempts as the deadline and `retry` allow.

        Raises APIError, ConnectionFailed, DeadlineExceeded or UnexpectedAnswer. A body that is an iterator can be sent
        only once, so such a call is never repeated."""
        patience = Patience(self)
        try:
            async with asyncio.timeout(deadline_sec):
                while True:
                    try:
                        async with self.open(
                            method, path, json=json, data=data, params=params, headers=headers, idle_sec=deadline_sec
                        ) as response:
                            return Answer(response.status, response.headers, await _read_whole(response, max_bytes))
                    except SojournError as why:
                        if data is not None and not isinstance(data, bytes):
                            raise
                        await patience.bear(why, retry)
        except TimeoutError:
            raise DeadlineExceeded(f"{method} {path} had no answer within {deadline_sec:g} s") from None

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        data: Body | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        idle_sec: float | None = IDLE_SEC,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One attempt: the answer's head has come, its body is read by the caller. `idle_sec` bounds each wait for it.

        Raises as `call`; a connection that breaks while the body is read raises ConnectionFailed too."""
        sent_headers = dict(headers or {})
        if json is not None:
            data = msgspec.json.encode(json)
            sent_headers["Content-Type"] = "application/json"
        elif data is not None:
            sent_headers.setdefault("Content-Type", "application/octet-stream")
        payload = io.BytesIO(data) if isinstance(data, bytes) and len(data) > PIECE_BYTES else data
        url = URL(self.server.address + path, encoded=True)
        if params:
            url = url.with_query(dict(params))
        session = self._open_session()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SEC, connect=None, sock_read=idle_sec)
        try:
            async with session.request(
                method, url, data=payload, headers=sent_headers, timeout=timeout, allow_redirects=False
            ) as response:
                self._reached = True
                if response.status >= 300:
                    raise await _refusal(response)
                yield response
        except _BROKEN as why:
            sent = not isinstance(why, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            said = str(why) or type(why).__name__
            if not sent:
                raise ConnectionFailed(f"{self.server.address} cannot be reached: {said}", sent=False) from why
            raise ConnectionFailed(f"the connection to {self.server.address} broke: {said}") from why
        except aiohttp.ClientError as why:
            raise UnexpectedAnswer(f"{self.server.address} does not answer as a Sojourn server: {why}") from why

    @asynccontextmanager
    async def websocket(self, path: str, params: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """One attempt at a WebSocket whose frames are the server's. Raises as `call`."""
        url = URL(self.server.address + path, encoded=True).with_query(dict(params))
        timeout = aiohttp.ClientWSTimeout(ws_close=WEBSOCKET_CLOSE_SEC)
        try:
            async with asyncio.timeout(CALL_SEC):
                ws = await self._open_session().ws_connect(
                    url, protocols=(PROTOCOL,), max_msg_size=MAX_FRAME_BYTES, compress=0, timeout=timeout
                )
        except aiohttp.WSServerHandshakeError as why:
            # Its body is lost, and only that says what was wrong: the call that is not upgraded is refused likewise.
            await self.call("GET", path, retry="unsent")
            raise UnexpectedAnswer(
                f"{self.server.address} does not open a WebSocket: status {why.status}", status=why.status
            ) from why
        except _BROKEN as why:
            sent = not isinstance(why, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise ConnectionFailed(f"{self.server.address} cannot be reached: {_said(why)}", sent=sent) from why
        except aiohttp.ClientError as why:
            raise UnexpectedAnswer(f"{self.server.address} does not answer as a Sojourn server: {why}") from why
        self._reached = True
        try:
            yield ws
        except _BROKEN as why:
            raise ConnectionFailed(f"the connection to {self.server.address} broke: {_said(why)}") from why
        finally:
            await ws.close()


def _said(why: BaseException) -> str:
    return str(why) or type(why).__name__


def may_repeat(error: SojournError, retry: Retry) -> bool:
    """Whether the same request may be sent again after `error`, and could then succeed."""
    match error:
        case ConnectionFailed():
            return retry == "safe" or not error.sent
        case DeadlineExceeded():
            return retry == "safe"
        case APIError() | UnexpectedAnswer():
            return error.retryable and (retry == "safe" or error.status in _DID_NOTHING)
    return False


def decode(answer: bytes, kind: type[T]) -> T:
    """The answer as `kind`, unknown fields ignored. Raises UnexpectedAnswer."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        raise UnexpectedAnswer(f"the answer is no {kind.__name__}: {why}") from why


async def _read_whole(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > max_bytes:
            raise UnexpectedAnswer(f"the answer is over {max_bytes} bytes; read it as a stream")
        parts.append(part)
    return b"".join(parts)


async def _refusal(response: aiohttp.ClientResponse) -> SojournError:
    try:
        body = await _read_whole(response, MAX_ERROR_BYTES)
        error = decode(body, ErrorReply).error
    except UnexpectedAnswer:
        hint = f" (it points to {response.headers['Location']})" if "Location" in response.headers else ""
        return UnexpectedAnswer(
            f"status {response.status} without Sojourn's error body{hint}: is this the right address?",
            status=response.status,
        )
    return error_of(error, status=response.status, retry_after_sec=_retry_after(response.headers))


def error_of(error: ErrorBody, *, status: int = 0, retry_after_sec: float | None = None) -> APIError:
    """The exception for an error that the server sent, in an answer or in a stream."""
    return api_error(
        error.code,
        error.message or f"{error.code} (status {status})",
        status=status,
        retryable=error.retryable,
        details=error.details,
        retry_after_sec=retry_after_sec,
    )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, from either form that the header may have; None where there is none."""
    said: Any = headers.get("Retry-After")
    if said is None:
        return None
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time())
    except (ValueError, TypeError):
        return None
