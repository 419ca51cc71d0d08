"""Checkpoints when a process is killed in the middle: the manager's, and the object storage's."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from manager.errors import StoreUnavailable
from manager.services.checkpoints import Checkpoints
from manager.services.manifests import LAYERS
from manager.services.sweeping import Sweeper
from manager.store.blobs import Progress
from manager.store.objects import Objects
from tests.support.checkpoint_process import OWNER, POD, MadeUpPod, content_sha256, opened
from tests.support.memory_objects import MemoryCache
from tests.support.s3_server import S3Server, s3_server

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
SIZE = 12 << 20
BIG_BYTES = int(os.environ.get("SOJOURN_TEST_BIG_BYTES", str(256 << 20)))  # 10 GB: SOJOURN_TEST_BIG_BYTES=10737418240


async def leading() -> bool:
    return True


async def started(*arguments: object) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.checkpoint_process", *map(str, arguments),
        cwd=ROOT, stdin=DEVNULL, stdout=PIPE,
    )  # fmt: skip


async def restored(objects: Objects) -> tuple[int, str]:
    """The number and content of the last checkpoint."""
    pods = MadeUpPod()
    made = await Checkpoints(objects, MemoryCache(), pods).restore(OWNER, "w", POD)
    assert made is not None
    (content,) = pods.got
    return made.number, content


async def swept(objects: Objects) -> None:
    """What the background loop of a manager does in time, at once: nothing renews anything any more."""
    checkpoints = Checkpoints(objects, MemoryCache(), MadeUpPod())
    sweeper = Sweeper(objects, checkpoints, leading, dead_sec=-2.0, grace_sec=0.0)
    await sweeper.sweep_saves()
    for _ in range(2):
        await sweeper.collect_everybody()


async def left_of(objects: Objects) -> tuple[set[str], list[str]]:
    """Layers that the last checkpoint does not name, and marks."""
    head = await Checkpoints(objects, MemoryCache(), MadeUpPod()).head(OWNER, "w")
    named = {key for layer in head.layers for key in layer.blob.object_keys()} if head else set()
    there = {info.key async for page in objects.list(LAYERS) for info in page}
    assert named <= there
    return there - named, [info.key async for page in objects.list("records/saves/") for info in page]


@asynccontextmanager
async def storage(kind: str, tmp_path: Path, s3: S3Server) -> AsyncIterator[tuple[str, Objects]]:
    url = f"file://{tmp_path}/objects" if kind == "directory" else s3.url(secrets.token_hex(8))
    objects = opened(url)
    yield url, objects
    await objects.close()


@pytest.mark.parametrize("kind", ["directory", "s3"])
async def test_a_manager_killed_in_the_middle_of_a_checkpoint_leaves_the_last_one_whole(
    kind: str, tmp_path: Path, s3: S3Server
) -> None:
    """F24: SIGKILL at any moment of its upload, also after the last byte; the sweep after a restart leaves nothing."""
    async with storage(kind, tmp_path, s3) as (url, objects):
        first = Checkpoints(objects, MemoryCache(), MadeUpPod(1, SIZE), chunk_bytes=1 << 20)
        await first.save(OWNER, "w", POD)
        for _ in range(2):
            manager = await started("save", url, 2, SIZE, random.randrange(SIZE + 1))
            assert manager.stdout is not None
            assert await manager.stdout.readline() == b"stopped\n"
            manager.kill()
            await manager.communicate()
            assert await restored(objects) == (1, await content_sha256(1, SIZE))
            await swept(objects)
            assert await left_of(objects) == (set(), [])
            assert await restored(objects) == (1, await content_sha256(1, SIZE))
        manager = await started("save", url, 3, SIZE, SIZE + 1)
        said, _ = await manager.communicate()
        assert json.loads(said.splitlines()[-1]) == {"number": 2}
        assert await restored(objects) == (2, await content_sha256(3, SIZE))
        if kind == "directory":
            opened(url)
            assert list((tmp_path / "objects/.beside").iterdir()) == []


async def test_object_storage_killed_in_the_middle_of_a_checkpoint_and_of_a_restore_loses_no_last_checkpoint(
    tmp_path: Path,
) -> None:
    """F24: the call says `store_unavailable` in time; once storage is back everything goes on."""
    with s3_server(tmp_path) as server:
        objects = opened(server.url("x"))

        def of(seed: int) -> Checkpoints:
            return Checkpoints(objects, MemoryCache(), MadeUpPod(seed, SIZE), chunk_bytes=1 << 20)

        def kill_at(limit: int) -> Progress:
            def progress(done: int, _total: int | None) -> None:
                if done >= limit:
                    server.kill()

            return progress

        await of(1).save(OWNER, "w", POD)
        with pytest.raises(StoreUnavailable):
            await of(2).save(OWNER, "w", POD, progress=kill_at(SIZE // 2))
        server.start()
        assert await restored(objects) == (1, await content_sha256(1, SIZE))
        with pytest.raises(StoreUnavailable):
            await of(2).restore(OWNER, "w", POD, progress=kill_at(SIZE // 4))
        server.start()
        await swept(objects)
        assert await left_of(objects) == (set(), [])
        assert await restored(objects) == (1, await content_sha256(1, SIZE))
        assert (await of(2).save(OWNER, "w", POD)).number == 2
        assert await restored(objects) == (2, await content_sha256(2, SIZE))
        await objects.close()


async def test_memory_does_not_grow_with_the_size_of_a_workspace(tmp_path: Path) -> None:
    """Saved and restored in constant memory, whatever SOJOURN_TEST_BIG_BYTES says."""
    process = await started("measure", f"file://{tmp_path}/objects", BIG_BYTES)
    said, _ = await process.communicate()
    assert process.returncode == 0
    figures = json.loads(said)
    assert figures["grown"] < 100 << 20, figures
    assert figures["peak"] < 300 << 20, figures
