"""`/v1/usage`, once or as a stream, and `/metrics`: what the pod uses against what it may."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web

from executor.errors import ExecutorError, RateLimited
from executor.guard import error_body
from executor.routes.reply import json_reply, read_query, whole_of
from executor.usage import UsageService
from executor.wire import HEARTBEAT_SEC, NDJSON_TYPE, Heartbeat, StreamError, UsageReport, UsageSample
from executor.writers import now_rfc3339

MAX_STREAMS: Final = 64  # each costs a reading of /proc at every interval
STALL_SEC: Final = 60.0  # a reader that takes nothing for so long is cut off
_ENCODER: Final = msgspec.json.Encoder()


def usage_routes(usage: UsageService) -> list[web.RouteDef]:
    streams = 0

    async def report(request: web.Request) -> web.Response:
        read_query(request)
        return json_reply(await usage.report())

    async def stream(request: web.Request) -> web.StreamResponse:
        nonlocal streams
        interval_sec = whole_of(read_query(request, "interval_sec"), "interval_sec", 2, 1, 60)
        if streams >= MAX_STREAMS:
            raise RateLimited(f"{MAX_STREAMS} streams of this pod's usage are open, as many as there may be")
        streams += 1
        try:
            return await _stream(request, usage, interval_sec)
        finally:
            streams -= 1

    async def metrics(request: web.Request) -> web.Response:
        read_query(request)
        text = await usage.metrics()
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    return [
        web.get("/v1/usage", report, allow_head=False),
        web.get("/v1/usage/stream", stream, allow_head=False),
        web.get("/metrics", metrics, allow_head=False),
    ]


async def _stream(request: web.Request, usage: UsageService, interval_sec: int) -> web.StreamResponse:
    """One line at once and then one every interval, until the caller hangs up; heartbeats where that is long."""
    reader = Reader()
    first = reader.sample(await usage.report(), asyncio.get_running_loop().time())
    response = web.StreamResponse(headers={"Content-Type": NDJSON_TYPE, "Cache-Control": "no-store"})
    await response.prepare(request)
    try:
        await _write(response, first)
        while True:
            left = float(interval_sec)
            while left > 0:
                wait_sec = min(left, HEARTBEAT_SEC)
                await asyncio.sleep(wait_sec)
                left -= wait_sec
                if left > 0:
                    await _write(response, Heartbeat(at=now_rfc3339()))
            try:
                report = await usage.report()
            except ExecutorError as error:
                await _write(response, StreamError(error=error_body(error)))
                break
            await _write(response, reader.sample(report, asyncio.get_running_loop().time()))
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, event: UsageSample | Heartbeat | StreamError) -> None:
    async with asyncio.timeout(STALL_SEC):
        await response.write(_ENCODER.encode(event) + b"\n")


class Reader:
    """What one reader of the stream was told last: two readers never take each other's differences away."""

    def __init__(self) -> None:
        self._last: tuple[float, UsageReport] | None = None

    def sample(self, report: UsageReport, now: float) -> UsageSample:
        """`now` in seconds of any clock that only goes forward."""
        last, self._last = self._last, (now, report)
        if last is None or now <= last[0]:
            return UsageSample(elapsed_sec=None, cpu_ms=None, cpu_cores=None, throttled_ms=None, usage=report)
        elapsed_sec, before = now - last[0], last[1].cpu
        # A sum over processes shrinks when one ends; time that was used is never negative.
        cpu_ms = max(0.0, report.cpu.usage_ms - before.usage_ms)
        return UsageSample(
            elapsed_sec=round(elapsed_sec, 3),
            cpu_ms=round(cpu_ms, 3),
            cpu_cores=round(cpu_ms / 1000 / elapsed_sec, 3),
            throttled_ms=round(max(0.0, report.cpu.throttled_ms - before.throttled_ms), 3),
            usage=report,
        )
