"""`/v1/changes` and `/v1/layers`: the workspace's changes as a layer, and layers laid over the workspace.

Tree, tar and index are worked on in one thread of their own, at the other end of a `zstd` program's pipe, so that the
event loop sees only packed bytes. Of two states at most the indexes are kept: the base, which the caller last named or
made by applying layers, and the newest, which becomes the base when the caller names it. Until then a caller that lost
its own record of it may name the base again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import select
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from executor.config import ExecutorConfig
from executor.errors import Conflict, ExecutorError, InvalidPath, InvalidRequest, TooLarge
from executor.files import FileService
from executor.fileuser import FileUser
from executor.isolation import CommandUser
from executor.layerapply import Applier
from executor.layerpack import LayerPacker, index_tree
from executor.layerread import LayerReader, layer_limits
from executor.layerwire import LayerApplied, LayerReport, layer_end
from executor.mapped import mapped_inodes
from executor.safepath import Place, directory_at, file_error
from executor.spawn import Spawner
from executor.tarpack import PackLimit
from executor.tarread import TarRefused
from executor.threads import started_pool
from executor.treeindex import RACY_NS, TreeIndex
from executor.treewalk import DIRECTORY, TreeWalk, mounts_below, open_own
from executor.wire import BindRequest
from executor.zstd import Zstd, running_zstd

_SWITCH_SEC: Final = 0.0005  # the loop waits no longer than this for the thread, most of the time
_LOOK_MS: Final = 500  # a thread that waits for the program's pipe looks so often whether it is to go on
_TAIL_BYTES: Final = 1 << 20  # of zeros after a tar's end
_MARKS: Final = 2  # members of every layer beside its entries: the emptied mark and the root

_T = TypeVar("_T")


class Stopped(Exception):
    """The call is over; its thread is to end."""


@dataclass(frozen=True)
class State:
    name: str
    index: TreeIndex


@dataclass(frozen=True)
class Layer:
    """A layer under way: `chunks` ends with its end mark. It raises where the layer cannot be made to its end."""

    base: str | None
    state: str
    chunks: AsyncIterator[bytes]


class LayerService:
    def __init__(
        self, config: ExecutorConfig, files: FileService, spawner: Spawner, bound: Callable[[], BindRequest | None]
    ) -> None:
        """Raises RuntimeError where no thread can be started."""
        self._files = files
        self._spawner = spawner
        self._bound = bound
        self._umask = config.umask
        self._state_dir = config.state_dir
        self.place = files.roots.place(config.workspace)
        self._user = files.threads.user
        self._root = CommandUser("root", 0, self._user.gid, self._user.groups, "/", "/bin/sh")
        self._executor = (os.geteuid(), os.getegid())
        self._identity = FileUser()
        self._pool = started_pool(1, "layers")
        self._base: State | None = None
        self._newest: State | None = None
        self._is_ruined = False
        self._under_way = ""

    def close(self) -> None:
        """Waits for the thread, which a call that has ended has told to end."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._forget(newest=True, base=True)

    # ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def changes(self, since: str | None) -> AsyncIterator[Layer]:
        """All that differs from the state `since`; of a state that is not known here, and of none: all there is.

        Raises Conflict, NotSupported, NoSpace; from `chunks` ExecutorError and OSError."""
        with self._turn("changes"):
            base = self._base_of(since)
            index = self._new_index()
            departure = _Departure(
                self.place, self.alone(), base.index if base is not None else None, index, self._mapped,
                self._files.written.state,
            )  # fmt: skip
            try:
                await self._run(departure.begin)
                async with running_zstd(self._spawner, self._user, unpack=False, threads="stdin") as run:
                    packing = self._start(departure.run, run.thread_end)
                    packing.add_done_callback(lambda _: run.end())
                    try:
                        state = State(secrets.token_hex(16), index)
                        async with aclosing(self._packed(run, departure, packing, state, base)) as chunks:
                            yield Layer(base.name if base is not None else None, state.name, chunks)
                    finally:
                        departure.stop()
                        run.stop()
                        await end_of(packing)
            finally:
                departure.close()
                if self._newest is None or self._newest.index is not index:
                    index.close()

    async def _packed(
        self, run: Zstd, departure: _Departure, packing: asyncio.Future[LayerPacker], state: State, base: State | None
    ) -> AsyncGenerator[bytes, None]:
        digest = hashlib.sha256()
        while piece := await run.read():
            digest.update(piece)
            yield piece
        packer = await packing  # first: what it raises is why the program had no more input
        await run.check_end()
        self._newest = state
        yield layer_end(departure.report(packer, state.name, base.name if base is not None else None, digest))

    def _base_of(self, since: str | None) -> State | None:
        """The state that the layer is to be laid over; what can be named no longer is let go of."""
        if since is not None and self._newest is not None and self._newest.name == since:
            self._forget(base=True)
            self._base, self._newest = self._newest, None
        self._forget(newest=True)
        return self._base if self._base is not None and self._base.name == since else None

    def _forget(self, *, newest: bool = False, base: bool = False) -> None:
        if newest and self._newest is not None:
            self._newest.index.close()
            self._newest = None
        if base and self._base is not None:
            self._base.index.close()
            self._base = None

    # ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def apply(
        self,
        pieces: AsyncIterator[bytes],
        sha256: str,
        *,
        is_last: bool,
        max_bytes: int,
        max_entries: int,
        as_command_user: bool = False,
    ) -> LayerApplied:
        """Lays the layer over the workspace. With `is_last` the answer names the state that the workspace is then in.
        `as_command_user`: all in it is to be the command user's, whoever that is here.

        Raises InvalidRequest, InvalidPath, TooLarge, NoSpace and others; with `partial` in the details the workspace is
        neither what it was nor what it should be, and this service refuses everything from then on."""
        with self._turn("layers"):
            limits = layer_limits(max_bytes, max_entries + _MARKS)
            owner = (self._user.uid, self._user.gid) if as_command_user else None
            arrival = _Arrival(self.place, self.alone(), LayerReader(limits, owner), self._umask, self._executor)
            try:
                await self._run(arrival.begin)
                async with running_zstd(self._spawner, self._user, unpack=True, threads="stdout") as run:
                    await self._unpack(run, arrival, pieces, sha256)
                state = await self._new_base() if is_last else None
                return arrival.answer(state)
            except BaseException as why:
                if arrival.is_touched:
                    self._is_ruined = True
                    if isinstance(why, ExecutorError):
                        why.details["partial"] = True
                raise
            finally:
                arrival.close()

    async def _unpack(self, run: Zstd, arrival: _Arrival, pieces: AsyncIterator[bytes], sha256: str) -> None:
        digest = hashlib.sha256()

        async def pump() -> None:
            async for piece in pieces:
                digest.update(piece)
                await run.write(piece)
            run.end()

        pumping = asyncio.get_running_loop().create_task(pump(), name="layer-input")
        applying = self._start(arrival.run, run.thread_end)
        try:
            await asyncio.wait({pumping, applying}, return_when=asyncio.FIRST_COMPLETED)
            if pumping.done():
                pumping.result()
            try:
                await asyncio.shield(applying)
            except (InvalidRequest, TooLarge):
                if arrival.saw_end:  # what the program says of its input is then the reason
                    await run.check_end()
                raise
            await run.check_end()
            await pumping
            if digest.hexdigest() != sha256:
                raise InvalidRequest(
                    f"body: its SHA-256 is {digest.hexdigest()}, not the one in the query", field="sha256"
                )
        finally:
            pumping.cancel()
            arrival.stop()
            run.stop()
            await asyncio.wait({pumping})
            await end_of(applying)

    async def _new_base(self) -> str:
        index = self._new_index()
        try:
            await self._run(self._take_index, index)
        except BaseException:
            index.close()
            raise
        self._forget(newest=True, base=True)
        self._base = State(secrets.token_hex(16), index)
        return self._base.name

    def _take_index(self, index: TreeIndex) -> None:
        time.sleep(1.2 * RACY_NS / 1e9)  # else what was just put in place would look as if it could still change unseen
        with directory_at(self.place) as top:
            index_tree(top, TreeWalk(top, mounts=mounts_below(self.place.root), alone=self.alone()), index)

    # ── common ──────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        self.check_whole()
        if self._under_way:
            raise Conflict(f"a call of /v1/{self._under_way} is under way here, and one at a time is all there can be")
        self._under_way = name
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SEC)
        try:
            yield
        finally:
            self._under_way = ""
            sys.setswitchinterval(before)

    def check_whole(self) -> None:
        """Raises Conflict."""
        if self._is_ruined:
            raise Conflict(
                "a layer was laid over this workspace in part only; it must not be used, and its pod be thrown away",
                partial=True,
            )

    def alone(self) -> frozenset[bytes]:
        """Keys of the bound secrets in the workspace."""
        bound = self._bound()
        if bound is None:
            return frozenset()
        places = [self._files.roots.place(file.path) for file in bound.files if file.secret]
        return frozenset(b"\0".join(place.parts) for place in places if place.root == self.place.root and place.parts)

    def _new_index(self) -> TreeIndex:
        try:
            return TreeIndex(self._state_dir)
        except OSError as error:
            raise file_error(error, os.fsencode(self._state_dir or "the temporary directory")) from None

    async def _run(self, function: Callable[..., _T], *args: object) -> _T:
        """To its end, also where the caller is cancelled."""
        running = self._start(function, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await end_of(running)
            raise

    def _start(self, function: Callable[..., _T], *args: object) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, self.as_root, function, *args)

    def _mapped(self) -> frozenset[int]:
        """Asked as the command user: root without CAP_SYS_PTRACE may not look into others' processes."""
        self._identity.assume(self._user)
        try:
            return mapped_inodes()
        finally:
            self._identity.assume(self._root)

    def as_root(self, function: Callable[..., _T], *args: object) -> _T:
        """With the rights of root, where the executor has them: a file that its owner may not read is in a layer too.
        And in the command user's groups: else root without CAP_FSETID loses the set-group-id bit of its files."""
        self._identity.assume(self._root)
        return function(*args)


async def end_of(future: asyncio.Future[_T]) -> None:
    """Waits for it whatever it comes to, and however often the caller is cancelled meanwhile: it was told to end."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as why:
            cancelled = why
    if not future.cancelled():
        future.exception()  # seen
    if cancelled is not None:
        raise cancelled


class ThreadWork:
    """What a thread does for one call. `stop` may come from any thread; all else is the worker's."""

    def __init__(self, place: Place, alone: frozenset[bytes]) -> None:
        self._place = place
        self._alone = alone
        self._stopped = threading.Event()
        self._top = -1

    def begin(self) -> None:
        with directory_at(self._place) as fd:  # a mere handle, which has no times and attributes to give
            try:
                self._top = open_own(fd, b".", DIRECTORY)
            except OSError as error:
                raise file_error(error, self._place.path) from None

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        """When nothing runs any more."""
        if self._top >= 0:
            os.close(self._top)
            self._top = -1

    def _send(self, pipe: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._check()
            try:
                view = view[os.write(pipe, view) :]
            except BlockingIOError:
                self._wait(pipe, select.POLLOUT)

    def _wait(self, pipe: int, event: int) -> None:
        ready = select.poll()
        ready.register(pipe, event)
        while not ready.poll(_LOOK_MS):
            self._check()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise Stopped


class _Departure(ThreadWork):
    def __init__(
        self, place: Place, alone: frozenset[bytes], base: TreeIndex | None, new: TreeIndex,
        mapped: Callable[[], frozenset[int]], written: str,
    ) -> None:  # fmt: skip
        """`written`: the state of what file calls change, from before the tree is looked at."""
        super().__init__(place, alone)
        self._mapped = mapped
        self._written = written
        self._base = base
        self._new = new
        self._walk: TreeWalk | None = None

    def run(self, pipe: int) -> LayerPacker:
        """Writes the tar into the pipe. Raises ExecutorError, Stopped."""
        self._walk = TreeWalk(self._top, mounts=mounts_below(self._place.root), alone=self._alone)
        packer = LayerPacker(
            self._top, self._walk, self._base, self._new, lambda data: self._send(pipe, data), check=self._check,
            mapped=self._mapped,
        )  # fmt: skip
        try:
            packer.run()
        except PackLimit as why:
            raise TooLarge(f"the workspace has {why}") from None
        except OSError as error:
            raise file_error(error, self._place.path) from None
        return packer

    def report(self, packer: LayerPacker, state: str, base: str | None, digest: hashlib._Hash) -> LayerReport:
        assert self._walk is not None
        left = self._walk.left
        return LayerReport(
            state=state, base=base, sha256=digest.hexdigest(), entries=packer.entries, removed=packer.removed,
            bytes=packer.bytes, tar_bytes=packer.tar_bytes, changed=packer.changed, unreadable=left.unreadable,
            sockets=left.sockets, devices=left.devices, mounts=left.mounts, too_deep=left.too_deep,
            links_split=packer.links_split, attributes_lost=packer.attributes_lost, written=self._written,
        )  # fmt: skip


class _Arrival(ThreadWork):
    def __init__(
        self, place: Place, alone: frozenset[bytes], reader: LayerReader, umask: int, executor: tuple[int, int]
    ) -> None:
        super().__init__(place, alone)
        self._reader = reader
        self._umask = umask
        self._executor = executor
        self._applier: Applier | None = None
        self.saw_end = False

    @property
    def is_touched(self) -> bool:
        return self._applier is not None and self._applier.is_touched

    def run(self, pipe: int) -> None:
        """Reads the tar out of the pipe. Raises ExecutorError, Stopped."""
        alone = self._alone | mounts_below(self._place.root)
        self._applier = applier = Applier(self._top, umask=self._umask, executor=self._executor, alone=alone)
        tail = 0
        try:
            while count := self._read(pipe):
                tail += count if self._reader.is_over else 0
                if tail > _TAIL_BYTES:
                    raise TarRefused(f"more than {_TAIL_BYTES} zeros follow the layer's end", fault="limit")
                applier.take(self._reader.read(count))
            self.saw_end = True
            self._reader.finish()
            applier.finish()
        except TarRefused as why:
            raise refusal(why) from None
        except OSError as error:
            raise file_error(error, self._place.path + b"/" + applier.member) from None
        finally:
            applier.close()

    def answer(self, state: str | None) -> LayerApplied:
        applier = self._applier
        assert applier is not None
        return LayerApplied(
            entries=applier.entries, files=applier.files, removed=applier.removed, bytes=self._reader.total_bytes,
            owners_lost=applier.owners_lost, set_id_dropped=applier.set_id_dropped, left_alone=applier.left_alone,
            attributes_lost=applier.attributes_lost, state=state,
        )  # fmt: skip

    def _read(self, pipe: int) -> int:
        """How many bytes were there; 0 at the end."""
        while True:
            self._check()
            try:
                return os.readv(pipe, [self._reader.room()])
            except BlockingIOError:
                self._wait(pipe, select.POLLIN)


def refusal(why: TarRefused) -> ExecutorError:
    message = f"layer: {why}"
    member = {"member": why.shown} if why.member else {}
    if why.fault == "limit":
        return TooLarge(message, **member, **({"limit": why.limit} if why.limit is not None else {}))
    return (InvalidPath if why.fault == "path" else InvalidRequest)(message, **member)
