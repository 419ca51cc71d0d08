"""A stub of Google Cloud Storage's XML interface, in memory: what `obstore` needs of it, written from its description.

Not an emulator: those that install from a registry speak the JSON interface, which obstore's store does not use. It
shows that conditions by generation are sent and understood, not that Google's servers take them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from xml.sax.saxutils import escape

from aiohttp import web
from obstore.store import GCSStore

from manager.store.cloud import CloudObjects

PAGE = 100  # smaller than the real one's, so that listings have pages


@dataclass
class _Object:
    data: bytes
    generation: int
    at: float

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": f'"e{self.generation}"',
            "x-goog-generation": str(self.generation),
            "Last-Modified": formatdate(self.at, usegmt=True),
        }


class GcsStub:
    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._generation = 1_000
        self.url = ""

    def store(self, prefix: str) -> CloudObjects:
        account = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        store = GCSStore(
            "bucket", prefix=prefix, service_account_key=json.dumps({**account, "private_key_id": ""}),
            client_options={"allow_http": True},
        )  # fmt: skip
        return CloudObjects(store, "the stub of Google Cloud Storage")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        _, bucket, *rest = request.path.split("/", 2)
        key = rest[0] if rest else ""
        if bucket != "bucket":
            return web.Response(status=404, text="<Error><Code>NoSuchBucket</Code></Error>")
        if not key:
            return self._list(request)
        found = self._objects.get(key)
        wanted = request.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (found.generation if found else 0):
            return web.Response(status=412, text="<Error><Code>PreconditionFailed</Code></Error>")
        if request.method == "PUT":
            data = await request.read()
            self._generation += 1
            made = self._objects[key] = _Object(data, self._generation, time.time())
            return web.Response(headers=made.headers)
        if found is None:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")
        if request.method == "DELETE":
            del self._objects[key]
            return web.Response(status=204)
        part = request.http_range
        if part.start is None and part.stop is None:
            return web.Response(body=found.data, headers=found.headers)
        start, stop, _ = part.indices(len(found.data))
        where = {"Content-Range": f"bytes {start}-{stop - 1}/{len(found.data)}"}
        return web.Response(status=206, body=found.data[start:stop], headers={**found.headers, **where})

    def _list(self, request: web.Request) -> web.Response:
        query = request.query
        after = query.get("continuation-token") or query.get("start-after") or ""
        names = sorted(name for name in self._objects if name.startswith(query.get("prefix", "")) and name > after)
        lines = ["<ListBucketResult>"]
        for name in names[:PAGE]:
            found = self._objects[name]
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(found.at))
            lines.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{at}.000Z</LastModified>"
                f'<ETag>"e{found.generation}"</ETag><Size>{len(found.data)}</Size></Contents>'
            )
        if len(names) > PAGE:
            lines.append(f"<NextContinuationToken>{escape(names[PAGE - 1])}</NextContinuationToken>")
        lines.append("</ListBucketResult>")
        return web.Response(text="".join(lines), content_type="application/xml")


@contextmanager
def gcs_stub() -> Iterator[GcsStub]:
    """A running one, on a thread with a loop of its own: every test has another loop."""
    stub, loop, ready = GcsStub(), asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", stub.handle)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="gcs-stub", daemon=True)
    thread.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the stub of Google Cloud Storage did not start")
        yield stub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
