"""`GET /v1/changes?written=`: what file calls have changed, as a layer, without a look at the rest of the workspace.

It goes on beside a layer of everything, in a thread of its own, and knows nothing of its states.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from executor.errors import Conflict, TooLarge
from executor.files import FileService
from executor.layers import Layer, LayerService, ThreadWork, end_of
from executor.layerwire import RAW_BEGIN, RAW_END, LayerReport, layer_end, raw_blocks
from executor.layerwritten import WrittenPacker
from executor.pipereader import PipeReader, new_pipes
from executor.safepath import Place, file_error
from executor.tarpack import PackLimit
from executor.threads import started_pool
from executor.treewalk import mounts_below
from executor.written import Changed, Forgotten

_T = TypeVar("_T")


class WrittenLayers:
    def __init__(self, files: FileService, layers: LayerService) -> None:
        """Raises RuntimeError where no thread can be started."""
        self._files = files
        self._layers = layers
        self._pool = started_pool(1, "written")

    def close(self) -> None:
        """Waits for the thread, which calls that have ended have told to end."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @asynccontextmanager
    async def changes(self, since: str) -> AsyncIterator[Layer]:
        """What was changed since that state, as it is now; of one that is not known here, all that file calls changed.

        Raises Conflict where more was changed than is remembered; from `chunks` ExecutorError and OSError."""
        self._layers.check_whole()
        try:
            paths, base, state = self._files.written.since(since)
        except Forgotten:
            raise Conflict("file calls have changed more since then than is remembered; ask for all changes") from None
        departure = _Departure(self._layers.place, self._layers.alone(), paths)
        [(reading, writing)] = new_pipes(1)
        pipe = PipeReader(asyncio.get_running_loop(), reading)
        os.set_blocking(writing, False)
        packing = self._start(departure.run, writing)
        try:
            async with aclosing(_chunks(pipe, departure, packing, state, base)) as chunks:
                yield Layer(base, state, chunks)
        finally:
            departure.stop()
            pipe.close()
            await end_of(packing)
            if packing.cancelled():  # the service was closed before its turn came
                os.close(writing)
            departure.close()

    def _start(self, function: Callable[..., _T], *args: object) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, self._layers.as_root, function, *args)


async def _chunks(
    pipe: PipeReader, departure: _Departure, packing: asyncio.Future[WrittenPacker], state: str, base: str | None
) -> AsyncGenerator[bytes, None]:
    digest = hashlib.sha256(RAW_BEGIN)
    yield RAW_BEGIN
    while piece := await pipe.read():
        blocks = raw_blocks(piece)
        digest.update(blocks)
        yield blocks
    packer = await asyncio.shield(packing)
    digest.update(RAW_END)
    yield RAW_END
    yield layer_end(
        LayerReport(
            state=state, base=base, sha256=digest.hexdigest(), entries=packer.entries, removed=packer.removed,
            bytes=packer.bytes, tar_bytes=packer.tar_bytes, changed=packer.changed, unreadable=packer.left.unreadable,
            links_split=packer.links_split, attributes_lost=packer.attributes_lost, written=state,
        )
    )  # fmt: skip


class _Departure(ThreadWork):
    def __init__(self, place: Place, alone: frozenset[bytes], paths: Sequence[Changed]) -> None:
        super().__init__(place, alone)
        self._paths = paths

    def run(self, pipe: int) -> WrittenPacker:
        """Writes the tar into the pipe and closes it. Raises ExecutorError, Stopped."""
        try:
            self.begin()
            packer = WrittenPacker(
                self._top, lambda data: self._send(pipe, data), check=self._check,
                mounts=mounts_below(self._place.root), alone=self._alone,
            )  # fmt: skip
            try:
                packer.pack(self._paths)
            except PackLimit as why:
                raise TooLarge(f"what was changed has {why}") from None
            except OSError as error:
                raise file_error(error, self._place.path) from None
            return packer
        finally:
            os.close(pipe)
