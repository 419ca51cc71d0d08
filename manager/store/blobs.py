"""Bodies of any size in object storage: a row of bounded chunks, each named and checked by its SHA-256.

A chunk is checked before a byte of it is given on, so that nothing of a damaged body is ever served. Memory is a few
chunks, whatever the size.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Final

import msgspec

from manager.errors import StoreUnavailable, TooLarge
from manager.store.objects import Object, Objects, ObjectTooLarge

CHUNK_BYTES: Final = 8 << 20
_UNDER_WAY: Final = 2  # chunks being put or fetched beside the one at hand
_UNDO_SEC: Final = 5.0  # for the chunks under way, where a body cannot be stored whole
_BLOCK: Final = 1 << 20  # hashed at once on the loop: a millisecond

Progress = Callable[[int, int | None], None]  # bytes so far, in all where that is known


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """Where a body lies; the chunks' keys are `<prefix><number>-<sha256>`."""

    prefix: str  # ends in "/"
    size: int  # bytes
    sha256: str  # of the whole body
    chunk_bytes: int  # of each chunk but the last
    chunks: tuple[str, ...]  # each one's SHA-256

    def object_keys(self) -> list[str]:
        return [_key(self.prefix, number, digest) for number, digest in enumerate(self.chunks)]


class ObjectDamaged(StoreUnavailable):
    """What object storage gave back is not what was stored. Nothing of that chunk was given on."""

    retryable = False


async def write_blob(
    objects: Objects,
    prefix: str,
    body: AsyncIterable[bytes],
    *,
    limit: int,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
    unsure: Callable[[], None] = lambda: None,
) -> Blob:
    """Stores `body` under `prefix`, which must be used for nothing else. Raises TooLarge over `limit` bytes.

    On every failure, a cancellation too, what was put is deleted as far as storage answers. `unsure` is called where a
    chunk may come to be under the prefix even after that: of a put that had no answer."""
    writer = _Writer(objects, prefix)
    whole, kept, size = hashlib.sha256(), bytearray(), 0
    try:
        async for piece in body:
            size += len(piece)
            if size > limit:
                raise TooLarge(f"a body of more than {limit} bytes is not stored", limit=limit)
            for at in range(0, len(piece), _BLOCK):
                whole.update(piece[at : at + _BLOCK])
            kept += piece
            while len(kept) >= chunk_bytes:
                await writer.put(bytes(memoryview(kept)[:chunk_bytes]))
                del kept[:chunk_bytes]
            if progress is not None:
                progress(size, None)
        if kept:
            await writer.put(bytes(kept))
        await writer.settle()
    except BaseException:
        await writer.undo(unsure)
        raise
    return Blob(
        prefix=prefix, size=size, sha256=whole.hexdigest(), chunk_bytes=chunk_bytes, chunks=tuple(writer.digests)
    )


async def read_blob(objects: Objects, blob: Blob) -> AsyncGenerator[bytes, None]:
    """The body, a chunk at a time. Raises ObjectDamaged before the first byte that is not what was stored."""
    if not _plausible(blob):
        raise ObjectDamaged(f"object storage: {blob.prefix} does not add up")
    wanted = deque(enumerate(blob.chunks))
    fetched: deque[asyncio.Task[bytes]] = deque()
    try:
        while wanted or fetched:
            while wanted and len(fetched) <= _UNDER_WAY:
                number, digest = wanted.popleft()
                fetched.append(asyncio.create_task(_fetch(objects, blob, number, digest), name="fetch-chunk"))
            yield await fetched.popleft()
    finally:
        await _cancelled(fetched)


async def delete_blob(objects: Objects, blob: Blob) -> None:
    for key in blob.object_keys():
        await objects.delete(key)


class _Writer:
    """Puts chunks, a few at a time, and takes them back."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        self.digests: list[str] = []
        self._objects, self._prefix = objects, prefix
        self._under_way: deque[asyncio.Task[str]] = deque()

    async def put(self, chunk: bytes) -> None:
        """Returns when another chunk may come. Raises what an earlier one failed of."""
        digest = await asyncio.to_thread(_digest, chunk)
        key = _key(self._prefix, len(self.digests), digest)
        self.digests.append(digest)
        self._under_way.append(asyncio.create_task(self._objects.put(key, chunk), name="put-chunk"))
        while len(self._under_way) > _UNDER_WAY:
            await self._under_way[0]
            self._under_way.popleft()

    async def settle(self) -> None:
        while self._under_way:
            await self._under_way[0]
            self._under_way.popleft()

    async def undo(self, unsure: Callable[[], None]) -> None:
        is_sure = not self._under_way
        try:
            if self._under_way:  # a put that is given up may still be carried out, and then after the deletion
                await asyncio.wait(self._under_way, timeout=_UNDO_SEC)
                is_sure = all(task.done() and not task.cancelled() and not task.exception() for task in self._under_way)
        finally:
            if not is_sure:
                unsure()
            await _cancelled(self._under_way)
        for number, digest in enumerate(self.digests):
            try:
                await self._objects.delete(_key(self._prefix, number, digest))
            except StoreUnavailable:
                return  # swept later


def _plausible(blob: Blob) -> bool:
    if blob.chunk_bytes <= 0 or blob.size < 0:
        return False
    return len(blob.chunks) == -(-blob.size // blob.chunk_bytes)


async def _fetch(objects: Objects, blob: Blob, number: int, digest: str) -> bytes:
    key = _key(blob.prefix, number, digest)
    try:
        found: Object | None = await objects.get(key, limit=blob.chunk_bytes)
    except ObjectTooLarge as why:
        raise ObjectDamaged(f"object storage: {key} is not what was stored") from why
    if found is None:
        raise ObjectDamaged(f"object storage: {key} is missing")
    size = blob.chunk_bytes if number < len(blob.chunks) - 1 else blob.size - number * blob.chunk_bytes
    if len(found.data) != size or await asyncio.to_thread(_digest, found.data) != digest:
        raise ObjectDamaged(f"object storage: {key} is not what was stored")
    return found.data


async def _cancelled(tasks: deque[asyncio.Task[bytes]] | deque[asyncio.Task[str]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
    tasks.clear()


def _digest(chunk: bytes) -> str:
    return hashlib.sha256(chunk).hexdigest()


def _key(prefix: str, number: int, digest: str) -> str:
    return f"{prefix}{number:06d}-{digest}"
