"""Object storage that answers late, half, wrongly or not at all: a real S3 server behind a proxy with faults."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import pytest
from aiohttp import web

from manager.errors import StoreUnavailable
from manager.store import cloud
from manager.store.blobs import read_blob, write_blob
from manager.store.cloud import CloudObjects, open_cloud
from manager.store.objects import ObjectChanged
from tests.support.s3_server import BUCKET, CREDENTIALS, S3Server

Fault = Literal["slow_down", "failed", "cut", "lost_answer", "silent", "no_s3"]


@dataclass
class Proxy:
    """Passes requests on to `upstream`, signatures and all; the next ones meet `faults`, one each."""

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    requests: int = 0
    url: str = ""
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        fault = self.faults.pop(0) if self.faults else None
        if fault in ("slow_down", "failed"):
            code = "SlowDown" if fault == "slow_down" else "InternalError"
            return web.Response(status=503 if fault == "slow_down" else 500, text=f"<Error><Code>{code}</Code></Error>")
        if fault == "no_s3":
            return web.Response(text="<html>a proxy's own page</html>", content_type="text/html")
        if fault == "silent":
            await self.ending.wait()
        body = await request.read()
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, self.upstream + request.raw_path, data=body, headers=request.headers,
                            skip_auto_headers=("Content-Type", "Accept")) as answer,
        ):  # fmt: skip
            content = await answer.read()
            headers = {
                name: value for name, value in answer.headers.items() if name.lower() not in ("transfer-encoding",)
            }
        if fault == "lost_answer":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault == "cut":
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(status=answer.status, headers=headers, body=None if request.method == "HEAD" else content)


@pytest.fixture
async def proxy(s3: S3Server) -> AsyncIterator[Proxy]:
    made = Proxy(s3.endpoint)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    made.ending.set()
    await runner.cleanup()


@pytest.fixture
def objects(proxy: Proxy) -> CloudObjects:
    return open_cloud(f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint={proxy.url}&region=us-east-1", CREDENTIALS)


@pytest.mark.parametrize("fault", ["slow_down", "failed"])
async def test_a_server_that_is_busy_for_a_moment_is_asked_again(
    proxy: Proxy, objects: CloudObjects, fault: Fault
) -> None:
    """F24: 503 SlowDown."""
    proxy.faults = [fault, fault]
    await objects.put("a", b"1")
    proxy.faults = [fault]
    found = await objects.get("a", limit=10)
    assert found is not None
    assert found.data == b"1"
    assert proxy.requests == 5


async def test_a_server_that_stays_busy_is_an_outage(proxy: Proxy, objects: CloudObjects) -> None:
    proxy.faults = ["slow_down"] * 50
    with pytest.raises(StoreUnavailable):
        await objects.put("a", b"1")
    assert proxy.requests <= 10


async def test_a_conditional_put_whose_answer_was_lost_has_succeeded(proxy: Proxy, objects: CloudObjects) -> None:
    """The request is sent again, meets its own object, and is recognised by its bytes."""
    proxy.faults = ["lost_answer"]
    first = await objects.put("a", b"mine", if_absent=True)
    proxy.faults = ["lost_answer"]
    second = await objects.put("a", b"mine too", if_match=first)
    assert proxy.requests > 2
    with pytest.raises(ObjectChanged):
        await objects.put("a", b"another's", if_match=first)
    assert second != first


async def test_half_an_answer_is_never_taken_for_an_object(proxy: Proxy, objects: CloudObjects) -> None:
    """F24: a truncated read."""
    content = secrets.token_bytes(300_000)
    await objects.put("a", content)
    proxy.faults = ["cut"] * 20
    got = None
    try:
        found = await objects.get("a", limit=1 << 20)
        got = None if found is None else found.data
    except StoreUnavailable:
        pass
    assert got in (None, content)
    proxy.faults = []
    found = await objects.get("a", limit=1 << 20)
    assert found is not None
    assert found.data == content


async def test_nothing_wrong_is_read_from_a_body_under_faults(proxy: Proxy, objects: CloudObjects) -> None:
    content = secrets.token_bytes(500_000)

    async def body() -> AsyncIterator[bytes]:
        yield content

    proxy.faults = ["slow_down", "lost_answer", "failed"]
    blob = await write_blob(objects, "b/", body(), limit=1 << 20, chunk_bytes=100_000)
    proxy.faults = ["cut", "slow_down", "cut"]
    got = b""
    try:
        async for chunk in read_blob(objects, blob):
            got += chunk
    except StoreUnavailable:
        pass
    assert content.startswith(got)
    assert len(got) % 100_000 == 0


async def test_a_server_that_never_answers_is_given_up_in_time(
    proxy: Proxy, objects: CloudObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "CALL_SEC", 1.0)
    monkeypatch.setattr(cloud, "MOVE_SEC", 1.0)
    proxy.faults = ["silent"] * 50
    for calling in (objects.head("a"), objects.put("a", b"1"), objects.get("a", limit=1), objects.delete("a")):
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            await calling
    with pytest.raises(StoreUnavailable):
        async for _ in objects.list("a/"):
            pass


async def test_what_is_no_object_storage_takes_nothing_and_lists_nothing(proxy: Proxy, objects: CloudObjects) -> None:
    """A page of status 200 in its place is an outage, never an empty listing: what is not listed may be deleted."""
    proxy.faults = ["no_s3"] * 50
    with pytest.raises(StoreUnavailable):
        await objects.put("a", b"1")
    with pytest.raises(StoreUnavailable):
        async for _ in objects.list("a/"):
            pass
