"""The other half of `executor/wire.py`: calls to the executors in pods.

One small pool of kept-alive connections for each pod, closed when the pod ends. The pod is a hostile server (see
`executor_answers`): nothing of it is unpacked, followed or kept, every read has a bound and every wait a deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec
from aiohttp.client_exceptions import UnixClientConnectorError
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from executor.layerwire import LAYER_BASE_HEADER, LAYER_STATE_HEADER, LAYER_TYPE, LayerApplied
from executor.wire import (
    CHUNK_BYTES,
    FRAMES_TYPE,
    HEARTBEAT_SEC,
    LEASE_HEADER,
    MAX_TIMEOUT_SEC,
    OFFSET_HEADER,
    POD_HEADER,
    PORT_HEADER,
    PORT_IDLE_SEC,
    PORT_MESSAGE_BYTES,
    PROTOCOL,
    BindRequest,
    ExecRequest,
    ExecResult,
    Exit,
    FrameEvent,
    FrameReader,
    Health,
    LeaseInfo,
    LeaseRequest,
    MalformedFrame,
    StreamError,
    decode_frame,
)
from manager.errors import ExecutorUnreachable, OutcomeUnknown, RateLimited
from manager.executor_answers import (
    ERROR_BYTES,
    JSON_BYTES,
    BadAnswer,
    ExecutorNotReached,
    answer_limit,
    check_event,
    check_lease,
    check_result,
    clean,
    decoded,
    refusal,
)
from manager.pod_http import CONNECT_SEC, Interrupted, PodConnections, dial_unix
from manager.pod_layers import APPLIED_BYTES, SILENT_SEC, PodLayer, bounded
from manager.pod_socket import MESSAGE_BYTES, PodSocket, refused_port, refused_upgrade

MARGIN_SEC: Final = 30.0  # beyond a command's own timeout, for an executor that is busy
STREAM_IDLE_SEC: Final = 3 * HEARTBEAT_SEC  # without a frame: three heartbeats missed
CALL_SEC: Final = 15.0  # a call that runs nothing
FRAME_BYTES: Final = 8 * CHUNK_BYTES  # an honest frame has one chunk and an offset, or a small JSON text
_PORT_MARGIN_SEC: Final = 10.0  # beyond what the executor waits for a server: its own words are the better ones
_TAIL_SEC: Final = 1.0  # from the exit frame to the end of the body, for the connection to be used again

_REQUEST_HEADERS: Final = frozenset(
    {"accept", "content-length", "content-type", "if-match", "if-none-match", "if-range", "range"}
)
_ANSWER_HEADERS: Final = (
    "Accept-Ranges", "Content-Length", "Content-Range", "Content-Type", "ETag", "Last-Modified", OFFSET_HEADER,
    LAYER_BASE_HEADER, LAYER_STATE_HEADER,
)  # fmt: skip
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]{0,256}\Z")
_TARGET: Final = re.compile(r"/v1/[\x21-\x7e]*\Z")
_QUERY: Final = re.compile(r"[\x21-\x7e]*\Z")
_FORWARDED: Final = frozenset({200, 201, 202, 204, 206, 304})


def pod_token(secret: bytes, pod: str) -> str:
    """The bearer token of the pod with that name: HMAC-SHA-256 in hex. The pod holds only the token's SHA-256."""
    return hmac.new(secret, b"sojourn-pod\0" + pod.encode(), hashlib.sha256).hexdigest()


class PodRef(msgspec.Struct, frozen=True):
    """Where a pod's executor is, and how long the pod may be quiet."""

    name: str
    address: str  # "unix:/path" or "http://host:port"
    lease_sec: int | None = None  # None for a pool pod, whose deadline is pushed on by itself


class PortDeclined(Exception):
    """The server behind a port answered an upgrade to WebSocket with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"declined with {status}")
        self.status = status


class ForwardedResponse(msgspec.Struct, frozen=True):
    """An answer to pass on: only headers that an executor has reason to send, the body as it comes."""

    status: int
    headers: dict[str, str]
    body: AsyncIterator[bytes]


class PortAnswer(msgspec.Struct, frozen=True):
    """What a server behind a port answered: its headers as they came, the body as it comes."""

    status: int
    headers: list[tuple[str, str]]
    body: AsyncIterator[bytes]


class _UnixConnector(aiohttp.UnixConnector):
    """Waits where the pod's backlog is full; aiohttp's own takes that for a refusal, or for a connection."""

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        try:
            sock = await dial_unix(self.path)
            try:
                made: Callable[[], ResponseHandler] = self._factory
                _, handler = await self._loop.create_unix_connection(made, sock=sock)
            except BaseException:
                sock.close()
                raise
        except OSError as why:
            raise UnixClientConnectorError(self.path, req.connection_key, why) from why
        return handler


class _Channel:
    """The connections to one pod, with the headers that never change: thin ones for small calls, aiohttp's for
    streams and files."""

    def __init__(self, pod: PodRef, token: str, connections: int) -> None:
        self._pod = pod
        self._most = connections
        self._session: aiohttp.ClientSession | None = None
        self.in_use = 0
        self.base = URL("http://pod" if pod.address.startswith("unix:") else pod.address)
        self.http = PodConnections(pod.address, connections)
        self._headers = {"Authorization": f"Bearer {token}", POD_HEADER: pod.name, "Accept-Encoding": "identity"}
        if pod.lease_sec is not None:
            self._headers[LEASE_HEADER] = str(pod.lease_sec)
        lines = {"Host": self.base.authority, **self._headers, "Content-Type": "application/json"}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._exec_head = self._head("POST", "/v1/exec")

    def __enter__(self) -> Self:
        self.in_use += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, tb: TracebackType | None) -> None:
        self.in_use -= 1

    async def exec(self, body: bytes, limit: int, total_sec: float) -> tuple[int, bytes]:
        return await self.http.call(b"%b%d\r\n\r\n" % (self._exec_head, len(body)), body, limit, total_sec)

    async def call(self, method: str, path: str, body: bytes, limit: int, total_sec: float) -> tuple[int, bytes]:
        return await self.http.call(b"%b%d\r\n\r\n" % (self._head(method, path), len(body)), body, limit, total_sec)

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                headers=self._headers,
                skip_auto_headers=("User-Agent",),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                read_bufsize=1 << 18,
                max_line_size=8192,  # what an executor lets pass from a server behind a port, and a little of its own
                max_field_size=8192,
                max_headers=80,
            )
        return self._session

    async def close(self) -> None:
        self.http.close()
        if self._session is not None:
            await self._session.close()

    def _connector(self) -> aiohttp.BaseConnector:
        if self._pod.address.startswith("unix:"):
            return _UnixConnector(self._pod.address[5:], limit=self._most, keepalive_timeout=60)
        return aiohttp.TCPConnector(limit=self._most, keepalive_timeout=60, ttl_dns_cache=60)

    def _head(self, method: str, path: str) -> bytes:
        return f"{method} {path} HTTP/1.1\r\n{self._lines}Content-Length: ".encode()


_FRAMES_POST: Final = {"Content-Type": "application/json", "Accept": FRAMES_TYPE}


class ExecutorClient:
    """Calls to executors. One per manager; every method raises ExecutorNotReached where nothing was sent,
    ExecutorRefused with the executor's own words, and ExecutorUnreachable or OutcomeUnknown for the rest."""

    def __init__(self, secret: bytes, *, max_pods: int = 4096, connections_per_pod: int = 1024) -> None:
        self._secret = secret
        self._max_pods = max_pods
        self._connections = connections_per_pod
        self._channels: OrderedDict[PodRef, _Channel] = OrderedDict()  # least recently used first
        self._closing: set[asyncio.Task[None]] = set()
        self._encode = msgspec.json.Encoder().encode
        self._result = msgspec.json.Decoder(ExecResult)
        self._lease = msgspec.json.Decoder(LeaseInfo)
        self._health = msgspec.json.Decoder(Health)
        self._applied = msgspec.json.Decoder(LayerApplied)

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────

    async def exec(self, pod: PodRef, request: ExecRequest) -> ExecResult:
        """Runs the command and waits for its end; the answer's output is as the executor kept it.

        A connection that breaks after the request was sent is tried once more where the request has an `id`: the
        executor joins what runs under it. Raises OutcomeUnknown (details: id) where that fails too."""
        body = self._encode(request)
        limit, total_sec = answer_limit(request), _total_sec(request)
        for last in (False, True):
            channel = self._channel(pod)
            try:
                with channel:
                    status, data = await channel.exec(body, limit, total_sec)
            except ExecutorNotReached as why:
                if last:
                    raise _unknown(request, "the connection broke and the pod is not there any more") from why
                raise
            except Interrupted as why:
                # Closed here: the pod has ended. On a lost node it may take another connection, and never answer.
                if last or request.id is None or channel.http.closed:
                    raise _unknown(request, f"the connection broke: {why}") from why
                continue
            except (BadAnswer, TimeoutError) as why:
                raise _unknown(request, _words(why)) from why
            if status != 200:
                raise refusal(status, data)
            try:
                result = decoded(self._result, data)
                check_result(result, request.id)
            except BadAnswer as why:
                raise _unknown(request, f"the pod's answer is none: {why}") from None
            return result
        raise AssertionError("the second try returned or raised")

    @asynccontextmanager
    async def stream(self, pod: PodRef, request: ExecRequest) -> AsyncIterator[AsyncIterator[FrameEvent]]:
        """The command's events as they come, ending with Exit; nothing is read before it is asked for.

        The iterator raises OutcomeUnknown (details: id) where the stream ends without Exit. Leaving early closes the
        connection: what then happens to the command is its `on_disconnect`."""
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SEC)
        with self._channel(pod) as channel:
            try:
                with _as_ours():
                    async with asyncio.timeout(STREAM_IDLE_SEC):
                        response = await channel.session.post(
                            channel.base.with_path("/v1/exec"),
                            data=self._encode(request),
                            headers=_FRAMES_POST,
                            timeout=timeout,
                            allow_redirects=False,
                        )
                        if response.status != 200:
                            async with response:
                                raise refusal(response.status, await _read(response, ERROR_BYTES))
            except (Interrupted, BadAnswer, TimeoutError) as why:
                raise _unknown(request, _words(why)) from why
            frames = _Frames(response, request)
            events = frames.events()
            try:
                yield events
            finally:
                try:
                    await events.aclose()
                finally:
                    _let_go(response, whole=frames.complete)

    # ── the pod ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def bind(self, pod: PodRef, request: BindRequest) -> None:
        """Gives the pod its identity. Safe to repeat with the same one; another: ExecutorRefused `conflict`."""
        await self._json(pod, "POST", "/v1/bind", self._encode(request))

    async def lease(self, pod: PodRef) -> LeaseInfo:
        """What runs in the pod, and its deadlines. Renews nothing."""
        return self._lease_info(await self._json(pod, "GET", "/v1/lease", b""))

    async def push_lease(self, pod: PodRef, request: LeaseRequest) -> None:
        await self._json(pod, "POST", "/v1/lease", self._encode(request))

    async def health(self, pod: PodRef) -> Health:
        data = await self._json(pod, "GET", "/healthz", b"")
        try:
            return decoded(self._health, data)
        except BadAnswer as why:
            raise ExecutorUnreachable(f"the pod's health is unreadable: {why}") from None

    # ── the workspace as layers ─────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def changes(self, pod: PodRef, since: str | None) -> AsyncIterator[PodLayer]:
        """What has changed in the workspace since the state `since`, or all of it where that is None or not known."""
        async with self._layer(pod, f"since={since}" if since is not None else "", since) as layer:
            yield layer

    @asynccontextmanager
    async def written(self, pod: PodRef, since: str) -> AsyncIterator[PodLayer]:
        """What file calls have changed since that state of theirs. Raises ExecutorRefused `conflict` where that is more
        than the executor remembers."""
        async with self._layer(pod, f"written={since}", since) as layer:
            yield layer

    @asynccontextmanager
    async def _layer(self, pod: PodRef, query: str, since: str | None) -> AsyncIterator[PodLayer]:
        async with self.forward(pod, "GET", "/v1/changes", query, {}, None, idle_sec=SILENT_SEC) as answer:
            if answer.status != 200:
                raise ExecutorUnreachable(f"the pod answered {answer.status} instead of a layer")
            base, state = (answer.headers.get(name, "") for name in (LAYER_BASE_HEADER, LAYER_STATE_HEADER))
            layer = PodLayer(base, state, answer.body)
            if layer.base not in (None, since):
                raise ExecutorUnreachable("the pod sent a layer of something else than what was asked for")
            yield layer

    async def apply_layer(
        self,
        pod: PodRef,
        chunks: AsyncIterator[bytes],
        *,
        sha256: str,
        last: bool,
        max_bytes: int,
        max_entries: int,
        as_command_user: bool = False,
    ) -> LayerApplied:
        """Lays a layer over the workspace of a pod that nobody uses yet. After an error the pod has a part of it and is
        to be thrown away. Raises what `chunks` raises as well."""
        query = f"sha256={sha256}&last={'true' if last else 'false'}&max_bytes={max_bytes}&max_entries={max_entries}"
        query += "&as_command_user=true" if as_command_user else ""
        headers = {"Content-Type": LAYER_TYPE}
        async with self.forward(pod, "PUT", "/v1/layers", query, headers, chunks, idle_sec=SILENT_SEC) as answer:
            if answer.status != 200:
                raise ExecutorUnreachable(f"the pod answered {answer.status} to a layer")
            try:
                return decoded(self._applied, await bounded(answer.body, APPLIED_BYTES))
            except BadAnswer as why:
                raise ExecutorUnreachable(f"what the pod says of a layer is unreadable: {why}") from None

    # ── everything that is passed on as it is ───────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def forward(
        self,
        pod: PodRef,
        method: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        body: AsyncIterator[bytes] | bytes | None,
        *,
        idle_sec: float | None = STREAM_IDLE_SEC,
    ) -> AsyncIterator[ForwardedResponse]:
        """One call to the executor, its body streamed both ways.

        `path` and `query` as they go over the wire, already percent-encoded. `headers`: those that an executor knows
        are passed on. `idle_sec`: without a byte from the pod for so long, once the request is out; None for an
        output that is followed. Errors of the executor are raised; an answer to HEAD keeps its status."""
        if not _TARGET.match(path) or not _QUERY.match(query) or "/../" in f"{path}/" or "/./" in f"{path}/":
            raise ValueError(f"no path of an executor: {path!r}")
        timeout = aiohttp.ClientTimeout(total=MAX_TIMEOUT_SEC + MARGIN_SEC, connect=CONNECT_SEC, sock_read=idle_sec)
        sent = {name: value for name, value in headers.items() if name.lower() in _REQUEST_HEADERS}
        upload = _Upload(body) if body is not None and not isinstance(body, bytes) else None
        with self._channel(pod) as channel:
            url = channel.base.with_path(path, encoded=True)
            if query:
                url = URL(f"{url}?{query}", encoded=True)
            try:
                with _as_ours():
                    response = await channel.session.request(
                        method,
                        url,
                        data=upload.chunks() if upload is not None else body,
                        headers=sent,
                        timeout=timeout,
                        allow_redirects=False,
                    )
                    if response.status not in _FORWARDED and method != "HEAD":
                        async with response:
                            raise refusal(response.status, await _read(response, ERROR_BYTES))
            except (Interrupted, BadAnswer, TimeoutError) as why:
                if upload is not None and upload.failure is not None:
                    raise upload.failure from None  # it was the caller's body that broke, not the pod
                raise ExecutorUnreachable(f"the pod broke off: {_words(why)}") from why
            chunks = _chunks(response)
            try:
                if response.status not in _FORWARDED and response.status not in _ERROR_STATUSES:
                    raise ExecutorUnreachable(f"the pod answered {response.status}")
                yield ForwardedResponse(response.status, _answer_headers(response), chunks)
            finally:
                await chunks.aclose()
                _let_go(response, whole=response.content.at_eof())

    @asynccontextmanager
    async def socket(
        self, pod: PodRef, path: str, query: str, *, asked_id: str | None = None
    ) -> AsyncIterator[PodSocket]:
        """A WebSocket to the executor, at a path and query that are checked as in `forward`; leaving closes it.

        Raises ExecutorRefused where the executor will not have it, as far as its status says why."""
        if not _TARGET.match(path) or not _QUERY.match(query) or "/../" in f"{path}/" or "/./" in f"{path}/":
            raise ValueError(f"no path of an executor: {path!r}")
        with self._channel(pod) as channel:
            url = channel.base.with_path(path, encoded=True)
            if query:
                url = URL(f"{url}?{query}", encoded=True)
            try:
                with _as_ours():
                    async with asyncio.timeout(CALL_SEC):
                        try:
                            ws = await channel.session.ws_connect(
                                url, protocols=(PROTOCOL,), max_msg_size=MESSAGE_BYTES, compress=0,
                                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                            )  # fmt: skip
                        except aiohttp.WSServerHandshakeError as why:
                            raise refused_upgrade(why) from why
            except (Interrupted, BadAnswer, TimeoutError) as why:
                raise ExecutorUnreachable(f"the pod did not take a WebSocket: {_words(why)}") from why
            socket = PodSocket(ws, asked_id)
            try:
                yield socket
            finally:
                await socket.close()

    # ── servers behind ports ────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def port(
        self,
        pod: PodRef,
        method: str,
        port: int,
        target: str,
        headers: list[tuple[str, str]],
        body: AsyncIterator[bytes] | None,
    ) -> AsyncIterator[PortAnswer]:
        """One call to a server in the pod, streamed both ways. `target` as `wire.port_target` gives it, `headers` as
        `wire.headers_to_port`, with the body's Content-Length where it has one.

        Raises what the executor itself refuses; the server's own errors are answers."""
        upload = _Upload(body) if body is not None else None
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SEC, sock_read=PORT_IDLE_SEC + _PORT_MARGIN_SEC)
        with self._channel(pod) as channel:
            try:
                with _as_ours():
                    response = await channel.session.request(
                        method,
                        _port_url(channel, port, target),
                        data=upload.chunks() if upload is not None else None,
                        headers=headers,
                        skip_auto_headers=("Accept", "Content-Type"),
                        timeout=timeout,
                        allow_redirects=False,
                    )
                    if PORT_HEADER not in response.headers:
                        async with response:
                            if method == "HEAD":
                                raise refused_port(response.status)
                            raise refusal(response.status, await _read(response, ERROR_BYTES))
            except (Interrupted, BadAnswer, TimeoutError) as why:
                if upload is not None and upload.failure is not None:
                    raise upload.failure from None  # it was the caller's body that broke, not the pod
                raise ExecutorUnreachable(f"the pod broke off: {_words(why)}") from why
            chunks = _chunks(response)
            try:
                if response.status < 200:
                    raise ExecutorUnreachable(f"the pod answered {response.status}")
                yield PortAnswer(response.status, list(response.headers.items()), chunks)
            finally:
                await chunks.aclose()
                _let_go(response, whole=response.content.at_eof())

    @asynccontextmanager
    async def port_socket(
        self, pod: PodRef, port: int, target: str, headers: list[tuple[str, str]], protocols: list[str]
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket to a server in the pod, its messages as they are; leaving closes it.

        Raises PortDeclined where the server will not have it, and what the executor refuses."""
        with self._channel(pod) as channel:
            try:
                with _as_ours():
                    async with asyncio.timeout(PORT_IDLE_SEC + _PORT_MARGIN_SEC):
                        try:
                            ws = await channel.session.ws_connect(
                                _port_url(channel, port, target), headers=headers, protocols=protocols,
                                max_msg_size=PORT_MESSAGE_BYTES, compress=0, autoclose=False, autoping=False,
                                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                            )  # fmt: skip
                        except aiohttp.WSServerHandshakeError as why:
                            if why.headers is not None and PORT_HEADER in why.headers and 300 <= why.status < 600:
                                raise PortDeclined(why.status) from None
                            raise refused_port(why.status) from why
            except (Interrupted, BadAnswer, TimeoutError) as why:
                raise ExecutorUnreachable(f"the pod did not take a WebSocket: {_words(why)}") from why
            try:
                yield ws
            finally:
                await ws.close()

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, pod: str) -> None:
        """Closes the connections to a pod that has ended; calls under way to it fail at once."""
        for ref in [ref for ref in self._channels if ref.name == pod]:
            self._close_soon(self._channels.pop(ref))

    async def close(self) -> None:
        while self._channels:
            self._close_soon(self._channels.popitem()[1])
        if self._closing:
            await asyncio.wait(set(self._closing))

    def _channel(self, pod: PodRef) -> _Channel:
        channel = self._channels.get(pod)
        if channel is None:
            if len(self._channels) >= self._max_pods:
                self._evict()
            channel = self._channels[pod] = _Channel(pod, pod_token(self._secret, pod.name), self._connections)
        else:
            self._channels.move_to_end(pod)
        return channel

    def _evict(self) -> None:
        for ref, channel in self._channels.items():
            if not channel.in_use:
                del self._channels[ref]
                self._close_soon(channel)
                return
        raise RateLimited(f"this manager has calls under way to {self._max_pods} pods, as many as it may")

    def _close_soon(self, channel: _Channel) -> None:
        closing = asyncio.get_running_loop().create_task(channel.close(), name="close-pod-connections")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _lease_info(self, data: bytes) -> LeaseInfo:
        try:
            info = decoded(self._lease, data)
            check_lease(info)
        except BadAnswer as why:
            raise ExecutorUnreachable(f"the pod's lease is unreadable: {why}") from None
        return info

    async def _json(self, pod: PodRef, method: str, path: str, body: bytes) -> bytes:
        """The body of a 200 or 204. For calls that are safe to repeat: one broken connection is tried again."""
        for last in (False, True):
            try:
                with self._channel(pod) as channel:
                    status, data = await channel.call(method, path, body, JSON_BYTES, CALL_SEC)
            except (Interrupted, BadAnswer, TimeoutError) as why:
                if last or not isinstance(why, Interrupted):
                    raise ExecutorUnreachable(f"the pod did not answer {path}: {_words(why)}") from why
                continue
            if status not in (200, 204):
                raise refusal(status, data)
            return data
        raise AssertionError("the second try returned or raised")


_ERROR_STATUSES: Final = frozenset({400, 403, 404, 409, 412, 413, 416, 429, 501, 503, 507})


class _Frames:
    """Reads one answer as events, asking the connection only when it is asked itself."""

    def __init__(self, response: aiohttp.ClientResponse, request: ExecRequest) -> None:
        self._response = response
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._left = _total_sec(request) if request.timeout_sec is not None else float("inf")  # of waiting, in all
        self._quiet = 0.0  # waited since the last frame; bytes that complete no frame do not count
        self.complete = False  # read to its end: the connection can be used again

    async def events(self) -> AsyncGenerator[FrameEvent, None]:
        reader = FrameReader(FRAME_BYTES)
        try:
            while data := await self._more():
                for kind, payload in reader.feed(data):
                    self._quiet = 0.0
                    event = decode_frame(kind, payload)
                    if event is None:
                        continue
                    check_event(event, self._request.id)
                    if isinstance(event, StreamError):
                        raise BadAnswer(f"{clean(event.error.code, 64)}: {clean(event.error.message, 200)}")
                    yield event
                    if isinstance(event, Exit):
                        await self._finish()
                        return
        except (Interrupted, BadAnswer, MalformedFrame, TimeoutError) as why:
            raise _unknown(self._request, f"the stream broke off: {_words(why)}") from why
        raise _unknown(self._request, "the stream ended before the command did")

    async def _more(self) -> bytes:
        """The bytes that are there, or the next ones; b"" at the end. Only real waiting counts against deadlines."""
        content = self._response.content
        with _as_ours():
            if data := content.read_nowait():
                return data
            began = self._loop.time()
            try:
                async with asyncio.timeout(min(STREAM_IDLE_SEC - self._quiet, self._left)):
                    return await content.readany()
            finally:
                waited = self._loop.time() - began
                self._quiet += waited
                self._left -= waited

    async def _finish(self) -> None:
        try:
            async with asyncio.timeout(_TAIL_SEC):
                self.complete = not await self._response.content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # the command's end is known: only the connection is lost


class _Upload:
    """A caller's body on its way to a pod; `failure` says that it was the caller's side that broke."""

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self.failure: Exception | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._body:
                yield chunk
        except Exception as why:
            self.failure = why
            raise


@contextmanager
def _as_ours() -> Iterator[None]:
    """Turns what aiohttp raises into ExecutorNotReached, Interrupted or BadAnswer; timeouts stay TimeoutError."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as why:
        raise ExecutorNotReached(f"the pod's executor cannot be reached: {_words(why)}") from why
    except aiohttp.ServerTimeoutError as why:
        raise TimeoutError("nothing came in time") from why
    except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as why:
        raise Interrupted(_words(why)) if _cut(why) else BadAnswer(_words(why)) from why
    except (aiohttp.ClientError, OSError) as why:
        if isinstance(why, TimeoutError):
            raise
        raise Interrupted(_words(why)) from why
    except RuntimeError as why:
        raise Interrupted(_words(why)) from why  # aiohttp's "Connection closed." and "Session is closed"
    except ValueError as why:
        raise BadAnswer(_words(why)) from why


def _port_url(channel: _Channel, port: int, target: str) -> URL:
    return URL(f"{channel.base.origin()}/v1/ports/{port}{target}", encoded=True)


def _let_go(response: aiohttp.ClientResponse, *, whole: bool) -> None:
    """Gives the connection back where the answer was read to its end, else closes it."""
    if whole:
        response.release()
    else:
        response.close()


def _cut(why: Exception) -> bool:
    """Whether an answer was cut off rather than wrong."""
    return isinstance(why, aiohttp.ClientPayloadError)


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body. Raises BadAnswer beyond `limit` bytes, having read no more than a buffer over it."""
    length = response.content_length
    if length is not None and "Transfer-Encoding" not in response.headers:
        if length > limit:
            response.close()
            raise BadAnswer(f"an answer of {length} bytes is over the bound of {limit}")
        return await response.read()
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit:
            response.close()
            raise BadAnswer(f"an answer is over the bound of {limit} bytes")
        parts.append(part)
    return b"".join(parts)


async def _chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    content = response.content
    while True:
        try:
            with _as_ours():
                chunk = await content.readany()
        except (Interrupted, BadAnswer, TimeoutError) as why:
            raise ExecutorUnreachable(f"the pod broke off: {_words(why)}") from why
        if not chunk:
            return
        yield chunk


def _answer_headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    found = ((name, response.headers.get(name)) for name in _ANSWER_HEADERS)
    return {name: value for name, value in found if value is not None and _HEADER_VALUE.match(value)}


def _total_sec(request: ExecRequest) -> float:
    return (request.timeout_sec or MAX_TIMEOUT_SEC) + request.grace_sec + MARGIN_SEC


def _unknown(request: ExecRequest, why: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the command was sent, but its outcome did not come back ({clean(why, 300)}); ask for the process by its id",
        id=request.id,
    )


def _words(why: BaseException) -> str:
    return clean(str(why) or type(why).__name__, 300)
