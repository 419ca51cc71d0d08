"""What a pod was given as a secret is in no layer, whatever is done to it: S32, through the manager's client."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor.wire import BindRequest, FileBody, LeaseTermsBody
from manager.executor_client import ExecutorClient, PodRef, pod_token
from manager.model import Binding, BindingState, LeaseTerms, Owner, Profile, own_name
from manager.services.checkpoints import Checkpoints
from manager.services.manifests import LAYERS, Manifest
from manager.services.sandboxes import Bound
from manager.services.writethrough import WriteThrough
from manager.store.blobs import read_blob
from manager.store.objects import Objects
from manager.store.opening import open_objects
from tests.support.executor_pod import ExecutorProcess, running_executor
from tests.support.memory_objects import MemoryCache
from tests.support.s3_server import CREDENTIALS, S3Server
from tests.support.trees import unpacked

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="layers need the program zstd")
ACME = Owner("acme", "web")
SECRET = b"s" * 32
CANARY = "canary-" + secrets.token_hex(16)


@dataclass
class Bench:
    objects: Objects
    client: ExecutorClient
    checkpoints: Checkpoints
    through: WriteThrough
    process: ExecutorProcess
    bound: Bound

    async def call(self, method: str, path: str, query: str, body: bytes | None = None) -> None:
        """A file call as the manager passes it on, and what it changed made durable."""
        async with self.client.forward(self.bound.pod, method, path, query, {}, body) as answer:
            assert answer.status < 300
            async for _ in answer.body:
                pass
        await self.through.changed(self.bound)

    async def contents(self, manifest: Manifest) -> bytes:
        """All layers, unpacked."""
        found = b""
        for layer in manifest.rows:
            if layer.packed is not None:
                found += unpacked(zlib.decompress(layer.packed))
            else:
                found += unpacked(b"".join([piece async for piece in read_blob(self.objects, layer.blob)]))
        return found


@pytest.fixture(params=["directory", "s3"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        objects = open_objects(server.url(secrets.token_hex(8)), tmp_path, CREDENTIALS)
    else:
        objects = open_objects(None, tmp_path)
    client = ExecutorClient(SECRET)
    name = f"p{secrets.token_hex(4)}"

    async def current(_binding: Binding) -> bool:
        return True

    with contextlib.ExitStack() as running:
        process = await asyncio.to_thread(
            running.enter_context, running_executor(env={"SOJOURN_POD_NAME": name}, token=pod_token(SECRET, name))
        )
        checkpoints = Checkpoints(objects, MemoryCache(), client)
        binding = Binding(
            owner=ACME, task_id=own_name("w"), sandbox_id="w", state=BindingState.BOUND, token="x", profile="p",
            target="here", generation=1, pod=name, address=f"unix:{process.socket}",
        )  # fmt: skip
        bound = Bound(binding, LeaseTerms(600.0, 600.0, 600.0), PodRef(name, binding.address, 600))
        through = WriteThrough(checkpoints, client, [Profile(name="p")], current)
        yield Bench(objects, client, checkpoints, through, process, bound)
        await through.close()
        await client.close()
        await asyncio.to_thread(running.close)
    await objects.close()


async def test_a_secret_of_a_bind_is_in_no_layer_of_checkpoints_and_written_files(bench: Bench) -> None:
    """S32: an environment's secrets and secret files, overwritten and with their modes changed by calls."""
    await bench.client.bind(
        bench.bound.pod,
        BindRequest(
            sandbox_id="w",
            env={"PLAIN": "plain"},
            secrets={"TOKEN": CANARY},
            files=[
                FileBody(path="conf/key", content=CANARY, secret=True),
                FileBody(path="conf/shown", content="of-a-bind"),
            ],
            lease=LeaseTermsBody(quiet_sec=600.0, hard_end_sec=600.0),
        ),
    )
    await bench.call("PUT", "/v1/files", "path=conf/other", b"written")
    await bench.call("PUT", "/v1/files", "path=conf/key", CANARY.encode() * 2)
    await bench.call("POST", "/v1/files/chmod", "", b'{"path": "conf", "mode": 493, "recursive": true}')
    written = await bench.checkpoints.head(ACME, "w")
    assert written is not None
    assert len(written.written) > 0
    text = await bench.contents(written)
    assert b"written" in text
    assert CANARY.encode() not in text
    saved = await bench.checkpoints.save(ACME, "w", bench.bound.pod)
    text = await bench.contents(saved)
    assert b"of-a-bind" in text
    assert CANARY.encode() not in text
    assert b"conf/key" not in text
    kept = [info.key async for page in bench.objects.list("") for info in page if not info.key.startswith(LAYERS)]
    for key in kept:
        found = await bench.objects.get(key, limit=8 << 20)
        assert found is not None
        assert CANARY.encode() not in found.data
