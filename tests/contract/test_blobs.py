"""What bodies of any size in object storage promise."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from manager.errors import StoreUnavailable, TooLarge
from manager.store.blobs import Blob, ObjectDamaged, delete_blob, read_blob, write_blob
from manager.store.objects import Objects
from manager.store.opening import open_objects
from tests.support.memory_objects import memory_objects
from tests.support.s3_server import CREDENTIALS, S3Server

CHUNK = 64 << 10


@pytest.fixture(params=["directory", "memory", "s3"])
async def objects(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> AsyncIterator[Objects]:
    if request.param == "memory":
        found: Objects = memory_objects()
    else:
        url = s3.url(secrets.token_hex(8)) if request.param == "s3" else None
        found = open_objects(url, tmp_path, CREDENTIALS)
    yield found
    await found.close()


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def written(objects: Objects, data: bytes, *, limit: int = 1 << 30, piece: int = 50_000) -> Blob:
    return await write_blob(objects, "b/", pieces(data, piece), limit=limit, chunk_bytes=CHUNK)


async def read(objects: Objects, blob: Blob) -> bytes:
    return b"".join([piece async for piece in read_blob(objects, blob)])


async def count(objects: Objects) -> int:
    return sum([len(page) async for page in objects.list("")])


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7])
async def test_a_body_of_unknown_size_comes_back_byte_for_byte(objects: Objects, size: int) -> None:
    data = os.urandom(size)
    blob = await written(objects, data)
    assert (blob.size, blob.sha256) == (size, hashlib.sha256(data).hexdigest())
    assert await read(objects, blob) == data
    assert await count(objects) == -(-size // CHUNK)
    await delete_blob(objects, blob)
    assert await count(objects) == 0


async def test_a_body_over_its_limit_is_refused_and_leaves_nothing(objects: Objects) -> None:
    with pytest.raises(TooLarge):
        await written(objects, bytes(5 * CHUNK), limit=5 * CHUNK - 1)
    assert await count(objects) == 0


async def test_a_body_that_breaks_off_leaves_nothing(objects: Objects) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(3 * CHUNK)
        raise ConnectionError("the pod is gone")

    with pytest.raises(ConnectionError):
        await write_blob(objects, "b/", broken(), limit=1 << 30, chunk_bytes=CHUNK)
    assert await count(objects) == 0


async def test_a_cancelled_write_leaves_nothing(objects: Objects) -> None:
    stuck = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield bytes(3 * CHUNK)
        stuck.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(write_blob(objects, "b/", endless(), limit=1 << 30, chunk_bytes=CHUNK))
    await stuck.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await count(objects) == 0


async def test_a_chunk_that_lands_late_is_deleted_with_the_others(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a thread, or on a server: what nobody waits for any more is carried out all the same."""
    put, landed = objects.put, list[asyncio.Task[str]]()

    async def late(key: str, data: bytes) -> str:
        await asyncio.sleep(0.2)
        return await put(key, data)

    async def lasting(key: str, data: bytes) -> str:
        landed.append(asyncio.create_task(late(key, data)))
        return await asyncio.shield(landed[-1])

    monkeypatch.setattr(objects, "put", lasting)
    left: list[None] = []
    with pytest.raises(TooLarge):
        await write_blob(
            objects, "b/", pieces(bytes(2 * CHUNK + 1), CHUNK), limit=2 * CHUNK, chunk_bytes=CHUNK,
            unsure=lambda: left.append(None),
        )  # fmt: skip
    await asyncio.gather(*landed)
    assert landed
    assert await count(objects) == 0
    assert not left


async def test_a_chunk_of_which_nobody_knows_is_told_of(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unanswered(key: str, data: bytes) -> str:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(objects, "put", unanswered)
    left: list[None] = []
    with pytest.raises(StoreUnavailable):
        await write_blob(
            objects, "b/", pieces(bytes(CHUNK), CHUNK), limit=CHUNK, chunk_bytes=CHUNK, unsure=lambda: left.append(None)
        )
    assert left


async def test_nothing_of_a_damaged_chunk_is_given_on(objects: Objects) -> None:
    """F24: a flipped bit, a cut, a missing and an exchanged chunk."""
    data = os.urandom(3 * CHUNK)
    blob = await written(objects, data)
    key = blob.object_keys()[1]
    whole = await objects.get(key, limit=CHUNK)
    assert whole is not None
    flipped = bytearray(whole.data)
    flipped[7] ^= 1
    for damaged in (bytes(flipped), whole.data[:-1], whole.data + b"x", None):
        await objects.delete(key)
        if damaged is not None:
            await objects.put(key, damaged)
        served = bytearray()

        async def serve(served: bytearray = served) -> None:
            async for piece in read_blob(objects, blob):
                served += piece

        with pytest.raises(ObjectDamaged):
            await serve()
        assert bytes(served) == data[:CHUNK]


@pytest.mark.parametrize("change", [{"size": 1}, {"size": -1}, {"chunk_bytes": 0}, {"chunks": ()}])
async def test_a_description_that_does_not_add_up_is_refused(change: dict[str, object]) -> None:
    objects = memory_objects()
    blob = await written(objects, os.urandom(3 * CHUNK))
    with pytest.raises(ObjectDamaged):
        await read(objects, msgspec.structs.replace(blob, **change))


async def test_progress_is_told_as_bytes_arrive() -> None:
    told: list[tuple[int, int | None]] = []
    await write_blob(
        memory_objects(), "b/", pieces(bytes(10), 3), limit=10, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(3, None), (6, None), (9, None), (10, None)]
