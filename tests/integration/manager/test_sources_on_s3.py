"""S14, with a real S3 server: what lies under a prefix of a bucket, as the composed manager loads it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import obstore
import pytest
from obstore.store import S3Store

from manager.app import sources_of
from manager.config import ManagerConfig
from manager.errors import InvalidRequest
from manager.services.checkpoints import Checkpoints
from manager.services.manifests import Manifest
from manager.services.sources import Source, Sources
from manager.store.blobs import read_blob
from manager.store.cloud import open_cloud
from tests.support.memory_objects import MemoryCache
from tests.support.s3_raw import put_raw
from tests.support.s3_server import BUCKET, CREDENTIALS, S3Server
from tests.support.world import ACME

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="layers are looked into with the program zstd")


class Buckets:
    """Workspaces and what they may begin with, in one real bucket; `put` is somebody else's program."""

    def __init__(self, s3: S3Server, sources: Sources, checkpoints: Checkpoints, place: str) -> None:
        self.server, self.sources, self.checkpoints, self.place = s3, sources, checkpoints, place
        client: Any = {"allow_http": True}
        self.raw = S3Store(BUCKET, endpoint=s3.endpoint, region="us-east-1", client_options=client, **CREDENTIALS)
        self.kept = checkpoints._objects

    @property
    def prefix(self) -> str:
        return f"s3://{BUCKET}/{self.place}/acme"

    async def put(self, key: str, data: bytes) -> None:
        await obstore.put_async(self.raw, f"{self.place}/{key}", data)

    async def prepare(self, path: str, workspace: str = "w") -> Manifest:
        return await self.sources.prepare(ACME, workspace, Source(prefix=f"{self.prefix}/{path}"))

    async def files(self, manifest: Manifest) -> dict[str, bytes]:
        packed = b"".join([piece async for piece in read_blob(self.kept, manifest.layers[0].blob)])
        tar = subprocess.run(["zstd", "-dcq"], input=packed, capture_output=True, check=True, timeout=60).stdout
        found: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            for member in archive:
                if (content := archive.extractfile(member)) is not None:
                    found[member.name] = content.read()
        return found

    async def left(self) -> list[str]:
        return [info.key async for page in self.kept.list("") for info in page]


@pytest.fixture
async def buckets(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Buckets]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS["access_key_id"])  # as operators give them
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS["secret_access_key"])
    place = f"sources-{secrets.token_hex(4)}"
    settings = {
        "SOJOURN_SOURCE_PREFIXES": s3.url(place), "SOJOURN_OBJECTS": s3.url(f"{place}-kept"),
        "SOJOURN_DATA_DIR": str(tmp_path),
    }  # fmt: skip
    config = ManagerConfig.load(settings, {}, {}, None)
    async with AsyncExitStack() as stack:
        kept = open_cloud(cast(str, config.objects))
        stack.push_async_callback(kept.close)
        checkpoints = Checkpoints(kept, MemoryCache(), cast(Any, None))
        yield Buckets(s3, sources_of(config, checkpoints, stack), checkpoints, place)


async def test_what_lies_under_a_prefix_of_a_real_bucket_is_the_workspace(buckets: Buckets) -> None:
    """What can be packed is packed, and nothing of the neighbours' is there."""
    big, words = os.urandom(5 << 20), b"the same words again and again\n" * 100_000
    await buckets.put("acme/run/data/big", big)
    await buckets.put("acme/run/words", words)
    await buckets.put("acme/run/empty", b"")
    for name in ("acme/run2/x", "acme/running", "acme2/run/x", "other/run/x"):
        await buckets.put(name, b"a neighbour's")
    await asyncio.gather(*(buckets.put(f"acme/run/many/{n:02}", b"%d" % n) for n in range(40)))
    manifest = await buckets.prepare("run/")
    files = await buckets.files(manifest)
    assert hashlib.sha256(files.pop("data/big")).digest() == hashlib.sha256(big).digest()
    assert (files.pop("words"), files.pop("empty")) == (words, b"")
    assert files == {f"many/{n:02}": b"%d" % n for n in range(40)}
    assert len(big) < manifest.layers[0].blob.size < len(big) + len(words) // 4
    assert (manifest.layers[0].content_bytes, manifest.layers[0].full) == (
        len(big) + len(words) + sum(len(b"%d" % n) for n in range(40)), True,
    )  # fmt: skip
    assert await buckets.files(await buckets.prepare("run/data", "w2")) == {"big": big}  # with the slash and without


async def test_odd_names_in_a_bucket_are_taken_for_what_they_are_and_lead_nowhere(buckets: Buckets) -> None:
    """Whatever others put there."""
    for name in ("fine", "a//b", "sp ace #?%2e%2e", "\u00fc", "directory/"):
        await asyncio.to_thread(put_raw, buckets.server, f"{buckets.place}/acme/odd/{name}", name.encode())
    files = await buckets.files(await buckets.prepare("odd/"))
    assert {"fine", "sp ace #?%2e%2e", "\u00fc"} < set(files)
    assert all(not {"..", ".", ""} & set(name.split("/")) for name in files)


@pytest.mark.parametrize("names", [("fine", "a\nb"), ("f", "f/below")], ids=["no path", "a file with files in it"])
async def test_objects_that_are_no_tree_of_files_are_refused_and_leave_nothing(
    buckets: Buckets, names: tuple[str, ...]
) -> None:
    before = await buckets.left()
    for name in names:
        await asyncio.to_thread(put_raw, buckets.server, f"{buckets.place}/acme/odd/{name}", name.encode())
    with pytest.raises(InvalidRequest) as refused:
        await buckets.prepare("odd/")
    assert refused.value.details["field"] == "source.prefix"
    assert await buckets.left() == before


async def test_a_prefix_with_nothing_under_it_is_refused_and_leaves_nothing(buckets: Buckets) -> None:
    before = await buckets.left()
    await buckets.put("acme/run-of-another-name/x", b"x")
    with pytest.raises(InvalidRequest, match="nothing at this prefix"):
        await buckets.prepare("run")
    assert await buckets.left() == before
