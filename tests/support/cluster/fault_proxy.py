"""A proxy in front of the API server that makes its faults: refusals, silence, lost answers, late and broken watches.

It ends TLS with a certificate of the test cluster's authority and passes callers' tokens on (client certificates it
cannot). What no fault matches goes through unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
from aiohttp import web
from yarl import URL

from tests.support.cluster.accounts import Account
from tests.support.cluster.control_plane import ControlPlane

_HOP: Final = frozenset({"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
_COLLECTIONS: Final = frozenset({"leases", "namespaces", "nodes", "persistentvolumeclaims", "pods"})
_KEPT_CALLS: Final = 100_000
_LATE_EVENTS: Final = 100_000  # of one watch, waiting for their time
_CALL_SEC: Final = 90.0
_BODY_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class Call:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    at: float  # the loop's clock

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch", "").lower() in ("1", "true")

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and not self.is_watch and self.path.rpartition("/")[2] in _COLLECTIONS


Kind = Literal["refuse", "hang", "hang_up", "lose_answer", "late"]


@dataclass
class Fault:
    """What happens to calls that it matches. `hits` counts them."""

    kind: Kind
    matches: Callable[[Call], bool]
    left: int | None  # how often still; None: without end
    chance: float
    status: int = 500
    retry_after_sec: int | None = None
    delay_sec: float = 0.0
    hits: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Calls that hang go on to hang until their caller gives up; later ones are not touched."""
        self.left = 0
        self.over.set()

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Watch:
    """One watch that passes through."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.last_words: bytes = b""  # what is sent before the end
        self.abrupt = False


class FaultProxy:
    """Open one with `fault_proxy`."""

    def __init__(self, plane: ControlPlane, upstream: aiohttp.ClientSession, seed: int) -> None:
        self.server = ""
        self.calls: deque[Call] = deque(maxlen=_KEPT_CALLS)
        self.watch_delay_sec = 0.0  # each event of a watch arrives so much later
        self.dropped: Callable[[dict[str, Any]], bool] = lambda event: False  # events of watches that never arrive
        self._plane = plane
        self._upstream = upstream
        self._faults: list[Fault] = []
        self._watches: set[_Watch] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._random = random.Random(seed)

    def kubeconfig(self, account: Account) -> Path:
        """The account's access through this proxy."""
        assert self._plane.authority is not None
        ca = self._plane.authority.pair.certificate
        return self._plane.token_kubeconfig(
            f"proxied-{account.namespace}", account.token, account.namespace, self.server, ca
        )

    # Faults of calls. `matches` None: every call but watches; `times` None: without end.

    def refuse(
        self, status: int, matches: Callable[[Call], bool] | None = None, *, times: int | None = None,
        chance: float = 1.0, retry_after_sec: int | None = None,
    ) -> Fault:  # fmt: skip
        """Answers with a Status of that code instead of passing the call on."""
        return self._add("refuse", matches, times, chance, status=status, retry_after_sec=retry_after_sec)

    def hang(
        self, matches: Callable[[Call], bool] | None = None, *, times: int | None = None, chance: float = 1.0
    ) -> Fault:
        """Never answers, and does not pass the call on."""
        return self._add("hang", matches, times, chance)

    def hang_up(
        self, matches: Callable[[Call], bool] | None = None, *, times: int | None = None, chance: float = 1.0
    ) -> Fault:
        """Cuts the connection before anything happens."""
        return self._add("hang_up", matches, times, chance)

    def lose_answer(
        self, matches: Callable[[Call], bool] | None = None, *, times: int | None = None, chance: float = 1.0
    ) -> Fault:
        """Passes the call on, so that it is done, and cuts the connection instead of answering."""
        return self._add("lose_answer", matches, times, chance)

    def late(
        self, delay_sec: float, matches: Callable[[Call], bool] | None = None, *, times: int | None = None,
        chance: float = 1.0,
    ) -> Fault:  # fmt: skip
        """Passes the call on at once and answers later."""
        return self._add("late", matches, times, chance, delay_sec=delay_sec)

    def _add(
        self, kind: Kind, matches: Callable[[Call], bool] | None, times: int | None, chance: float, **more: Any
    ) -> Fault:
        fault = Fault(kind, matches or (lambda call: not call.is_watch), times, chance, **more)
        self._faults.append(fault)
        return fault

    # Faults of watches that are open.

    @contextlib.contextmanager
    def frozen_watches(self) -> Iterator[None]:
        """Open and new watches stay silent; what they missed comes afterwards."""
        self._thawed.clear()
        try:
            yield
        finally:
            self._thawed.set()

    @property
    def watches(self) -> int:
        """How many are open."""
        return len(self._watches)

    def close_watches(self) -> int:
        """Ends every open watch as the server does when its time is over. How many."""
        return self._end_watches(b"", abrupt=False)

    def cut_watches(self) -> int:
        """Cuts every open watch's connection. How many."""
        return self._end_watches(b"", abrupt=True)

    def expire_watches(self) -> int:
        """Sends every open watch an ERROR that its resourceVersion is too old (410), then closes it. How many."""
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
                  "message": "too old resource version: 1 (2)", "metadata": {}}  # fmt: skip
        return self._end_watches(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n", abrupt=False)

    def _end_watches(self, last_words: bytes, *, abrupt: bool) -> int:
        ended = list(self._watches)
        for watch in ended:
            watch.last_words, watch.abrupt = last_words, abrupt
            watch.over.set()
        return len(ended)

    # The way through

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = Call(request.method, request.path, dict(request.query), asyncio.get_running_loop().time())
        self.calls.append(call)
        body = await request.content.read(_BODY_BYTES)
        while not request.content.at_eof():
            body += await request.content.read(_BODY_BYTES)
        fault = self._fault_of(call)
        kind = fault.kind if fault is not None else None
        if fault is not None and kind == "refuse":
            return _refusal(fault)
        if kind == "hang":
            await asyncio.Event().wait()  # until the caller hangs up or the proxy closes
        if kind == "hang_up":
            return _cut(request)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = self._plane.server + request.raw_path
        timeout = aiohttp.ClientTimeout(total=None if call.is_watch else _CALL_SEC)
        async with self._upstream.request(
            request.method, URL(url, encoded=True), headers=headers, data=body or None, timeout=timeout
        ) as answer:
            if call.is_watch and answer.status == 200:
                return await self._pass_watch(request, answer)
            data = await answer.read()
            if kind == "lose_answer":
                return _cut(request)
            if fault is not None and kind == "late":
                await asyncio.sleep(fault.delay_sec)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            kept.pop("Content-Length", None)
            return web.Response(status=answer.status, body=data, headers=kept)

    def _fault_of(self, call: Call) -> Fault | None:
        for fault in self._faults:
            if fault.left == 0 or not fault.matches(call) or self._random.random() >= fault.chance:
                continue
            fault.hits += 1
            if fault.left is not None:
                fault.left -= 1
            return fault
        return None

    async def _pass_watch(self, request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "application/json")})
        await response.prepare(request)
        watch = _Watch()
        self._watches.add(watch)
        lines: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue(_LATE_EVENTS)
        works = [
            asyncio.create_task(self._read_lines(answer, lines), name="fault-proxy-read"),
            asyncio.create_task(self._write_lines(response, lines), name="fault-proxy-write"),
            asyncio.create_task(watch.over.wait(), name="fault-proxy-over"),
        ]
        try:
            await asyncio.wait(works[1:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._watches.discard(watch)
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
        if watch.abrupt:
            return _cut(request)
        with contextlib.suppress(ConnectionError):
            if watch.last_words:
                await response.write(watch.last_words)
            await response.write_eof()
        return response

    async def _read_lines(
        self, answer: aiohttp.ClientResponse, lines: asyncio.Queue[tuple[float, bytes] | None]
    ) -> None:
        """Takes no more while watches are frozen, as a network that is stuck does not."""
        left = b""
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(aiohttp.ClientError):
            async for data in answer.content.iter_any():
                *whole, left = (left + data).split(b"\n")
                for line in whole:
                    if not self.dropped(json.loads(line)):
                        await lines.put((clock() + self.watch_delay_sec, line + b"\n"))
                await self._thawed.wait()
        await lines.put(None)

    async def _write_lines(
        self, response: web.StreamResponse, lines: asyncio.Queue[tuple[float, bytes] | None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        while (entry := await lines.get()) is not None:
            await asyncio.sleep(max(0.0, entry[0] - clock()))
            await self._thawed.wait()
            await response.write(entry[1])


def _refusal(fault: Fault) -> web.Response:
    reasons = {410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": fault.status,
              "reason": reasons.get(fault.status, "Unknown"), "message": "a fault that the tests make"}  # fmt: skip
    headers = {} if fault.retry_after_sec is None else {"Retry-After": str(fault.retry_after_sec)}
    return web.json_response(status, status=fault.status, headers=headers)


def _cut(request: web.BaseRequest) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


@contextlib.asynccontextmanager
async def fault_proxy(plane: ControlPlane, *, seed: int = 0) -> AsyncIterator[FaultProxy]:
    """A proxy without a fault, on a loopback address of the control plane's own. `seed`: of faults' chances."""
    assert plane.authority is not None, "only in front of a control plane of our own"
    ca = ssl.create_default_context(cafile=str(plane.authority.pair.certificate))
    pair = plane.authority.sign("fault-proxy", hosts=[plane.address])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.certificate, pair.key)
    connector = aiohttp.TCPConnector(ssl=ca, limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=1 << 20) as upstream:
        proxy = FaultProxy(plane, upstream, seed)
        runner = web.ServerRunner(web.Server(proxy.handle, access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, plane.address, 0, ssl_context=tls)
            await site.start()
            proxy.server = f"https://{plane.address}:{runner.addresses[0][1]}"
            yield proxy
        finally:
            proxy._thawed.set()
            proxy.close_watches()
            await runner.cleanup()
