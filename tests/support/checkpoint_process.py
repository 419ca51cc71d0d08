"""A manager's checkpoints in a process of their own, to be killed or measured: `python -m ... {save,measure} URL ...`.

Its pod makes a layer of so many bytes up as it goes, from a seed, and tells the SHA-256 of one that it is given.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from manager.executor_client import PodRef
from manager.model import Owner
from manager.services.checkpoints import Checkpoints
from manager.store.objects import Objects
from manager.store.opening import open_objects
from tests.support.memory_objects import MemoryCache
from tests.support.own_memory import peak_bytes
from tests.support.s3_server import CREDENTIALS

OWNER = Owner("acme", "web")
POD = PodRef("p", "unix:/nowhere")
PIECE = 256 << 10


def pieces(seed: int, size: int) -> AsyncGenerator[bytes, None]:
    """`size` bytes that do not repeat, the same for the same seed."""

    async def made() -> AsyncGenerator[bytes, None]:
        block = hashlib.shake_256(str(seed).encode()).digest(PIECE)
        for number, at in enumerate(range(0, size, PIECE)):
            head = number.to_bytes(8, "big")
            yield (head + block[8:])[: size - at]

    return made()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass
class _Report:
    entries: int
    removed: int
    bytes: int
    written: str | None = None


@dataclass
class _Layer:
    seed: int
    size: int
    stop_at: int | None
    base: str | None = None
    state: str = "ab" * 16

    @property
    def report(self) -> _Report:
        return _Report(1, 0, self.size)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        sent = 0
        async for piece in pieces(self.seed, self.size):
            await self._stop(sent)
            yield piece
            sent += len(piece)
        await self._stop(sent)  # every byte is sent, and that it was the last is not told

    async def _stop(self, sent: int) -> None:
        if self.stop_at is not None and sent >= self.stop_at:
            say("stopped")
            await asyncio.Event().wait()


@dataclass
class _Applied:
    state: str | None


@dataclass
class MadeUpPod:
    """manager.services.checkpoints.PodLayers. Always sends the whole workspace; `got` is what it was given: SHA-256s.

    `stop_at`: it says `stopped` after so many bytes, all of them at most, and sends no more and no end."""

    seed: int = 0
    size: int = 0
    stop_at: int | None = None
    got: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def changes(self, pod: PodRef, since: str | None) -> AsyncIterator[_Layer]:
        yield _Layer(self.seed, self.size, self.stop_at)

    def written(self, pod: PodRef, since: str) -> AbstractAsyncContextManager[_Layer]:
        raise AssertionError("its executor keeps no account of file calls")

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
    ) -> _Applied:
        digest = hashlib.sha256()
        async for chunk in chunks:
            digest.update(chunk)
        self.got.append(digest.hexdigest())
        return _Applied("cd" * 16 if last else None)


async def content_sha256(seed: int, size: int) -> str:
    digest = hashlib.sha256()
    async for piece in pieces(seed, size):
        digest.update(piece)
    return digest.hexdigest()


def opened(url: str) -> Objects:
    return open_objects(url, Path("/nowhere"), CREDENTIALS if url.startswith("s3:") else None)


async def _save(url: str, seed: int, size: int, stop_at: int) -> None:
    """Prints the number of what was made; a `stop_at` over `size` is none."""
    objects = opened(url)
    checkpoints = Checkpoints(objects, MemoryCache(), MadeUpPod(seed, size, stop_at), chunk_bytes=1 << 20)
    made = await checkpoints.save(OWNER, "w", POD)
    say(json.dumps({"number": made.number}))
    await objects.close()


async def _measure(url: str, size: int) -> None:
    """Saves and restores twice, the first time a little; prints by how many bytes the peak of memory grew."""
    objects = opened(url)
    peaks = []
    for some in (64 << 20, size):
        pods = MadeUpPod(1, some)
        checkpoints = Checkpoints(objects, MemoryCache(), pods)
        made = await checkpoints.save(OWNER, "w", POD, whole=True)
        await checkpoints.restore(OWNER, "w", POD)
        assert pods.got == [made.layers[0].blob.sha256] == [await content_sha256(1, some)]
        await checkpoints.delete_workspace(OWNER, "w")
        peaks.append(peak_bytes())
    say(json.dumps({"peak": peaks[1], "grown": peaks[1] - peaks[0]}))
    await objects.close()


if __name__ == "__main__":
    what, where, *numbers = sys.argv[1:]
    asyncio.run((_save if what == "save" else _measure)(where, *map(int, numbers)))
