"""What file calls change is durable before they answer.

After such a call the pod is asked for a layer of just the paths that file calls have changed since those already kept,
and the workspace's manifest is replaced by one that has it too: one conditional put for small files, which lie in the
manifest itself. Calls that come meanwhile share the next one. Now and then a checkpoint takes the place of all of them.

A pod may only add to what it holds itself: the manifest says whose it is, and says another as soon as another pod has
got its content. So a manager that stood still cannot add an old pod's files to a new one's workspace.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, Final

import msgspec

from manager.errors import ExecutorRefused, ExecutorUnreachable, ManagerError, SandboxGone, StoreUnavailable
from manager.executor_client import PodRef
from manager.model import Binding, Owner, Profile, owned_by_name, task_label
from manager.services.checkpoints import Checkpoints, LayerStream, NotSaved, PodLayers, Saving, layer_limit, layer_of
from manager.services.manifests import STATE, Manifest, Written
from manager.services.sandboxes import Bound
from manager.store.blobs import Blob
from manager.store.records import RecordChanged, Versioned

log = logging.getLogger(__name__)

PACKED_BYTES: Final = 16 << 10  # of a layer, deflated, that lies in the manifest itself
PACKED_IN_ALL: Final = 512 << 10  # of all that do
FOLD_ROWS: Final = 32  # so many written layers are folded into a checkpoint, beside the calls,
MOST_ROWS: Final = 128  # and with so many the calls wait for it
_PLAIN_BYTES: Final = 256 << 10  # a larger layer is not tried to be packed
_FIRST: Final = "0" * 32  # no pod's state: all that its file calls changed is asked for
_TRIES: Final = 20
_LINES: Final = 256
_NO_ANSWER: Final = ("conflict", "invalid_request")  # more than is remembered; an executor of before there were any


class WriteThrough:
    """One manager's."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        pods: PodLayers,
        profiles: Sequence[Profile],
        current: Callable[[Binding], Awaitable[bool]],
    ) -> None:
        """`current`: whether the binding's pod is still the one of its sandbox, by the store."""
        self._checkpoints, self._pods, self._current = checkpoints, pods, current
        self._profiles: Mapping[str, Profile] = {profile.name: profile for profile in profiles}
        self._lines: OrderedDict[tuple[Owner, str, str], _Line] = OrderedDict()  # by owner, workspace and pod
        self._folding: dict[tuple[Owner, str], asyncio.Task[Manifest]] = {}
        self.writes = 0
        self.folds = 0

    def wanted(self, binding: Binding) -> bool:
        """By the policy of its profile. A task's workspace that is never kept is not written through either."""
        profile = self._profiles.get(binding.profile)
        if profile is None or not profile.write_through:
            return False
        return profile.keep_workspace or owned_by_name(binding.task_id) is not None

    async def changed(self, bound: Bound) -> None:
        """A file call has changed something in this pod: durable when this returns.

        Raises StoreUnavailable, SandboxGone where the pod is its sandbox's no more, and what its executor refuses."""
        binding = bound.binding
        own_id = owned_by_name(binding.task_id)
        workspace = own_id if own_id is not None else task_label(binding.owner, binding.task_id)
        key = (binding.owner, workspace, bound.pod.name)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(binding, workspace, bound.pod)
        line.binding = binding
        self._lines.move_to_end(key)
        for idle in [each for each in self._lines if len(self._lines) > _LINES and self._lines[each].is_idle]:
            if len(self._lines) <= _LINES:
                break
            del self._lines[idle]
        await line.joined(lambda: self._kept(line))

    async def close(self) -> None:
        """Breaks off what is under way."""
        under_way: list[asyncio.Task[None] | asyncio.Task[Manifest]] = list(self._folding.values())
        for line in self._lines.values():
            under_way += [flight for flight in (line.flight, line.following) if flight is not None]
        for each in under_way:
            each.cancel()
        if under_way:
            await asyncio.wait(under_way)

    # ── one flight ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _kept(self, line: _Line) -> None:
        heads = self._checkpoints.heads
        if line.head is None:
            line.head = await heads.get(line.owner, line.workspace, fresh=True)
        for _ in range(_TRIES):
            manifest = line.manifest
            if not _may_add(manifest, line.pod):
                await self._checkpointed(line)
                return
            if len(manifest.written) >= MOST_ROWS:
                await asyncio.shield(self._fold(line))
                line.head = await heads.get(line.owner, line.workspace, fresh=True)
                continue
            try:
                async with self._pods.written(line.pod, manifest.calls or _FIRST) as stream:
                    done = await self._added(line, stream, manifest.calls)
            except ExecutorRefused as why:
                if why.code not in _NO_ANSWER:
                    raise
                await self._checkpointed(line)
                return
            if done:
                made = line.manifest
                packed = sum(len(each.layer.packed or b"") for each in made.written)
                if len(made.written) >= FOLD_ROWS or packed > PACKED_IN_ALL // 2:
                    self._fold(line)
                self.writes += 1
                return
        raise NotSaved("the workspace changes all the time; try again")

    async def _added(self, line: _Line, stream: LayerStream, since: str) -> bool:
        """False: the head is gone or another pod's by now; all is to be looked at again."""
        if not STATE.match(stream.state) or stream.base not in (None, since):
            raise ExecutorUnreachable("the pod sent a layer of something else than what was asked for")
        limit = layer_limit(self._disk_bytes(line.binding))
        async with AsyncExitStack() as stack:
            chunks = await stack.enter_async_context(aclosing(self._checkpoints.unstalled(stream.chunks())))
            data = b""
            async for chunk in chunks:
                data += chunk
                if len(data) > _PLAIN_BYTES:
                    break
            else:
                report = stream.report
                if report.entries + report.removed == 0:
                    return True
                packed = await asyncio.to_thread(zlib.compress, data, 1)
                if len(packed) <= PACKED_BYTES and line.manifest.packed_bytes + len(packed) <= PACKED_IN_ALL:
                    blob = Blob(
                        prefix="", size=len(data), sha256=hashlib.sha256(data).hexdigest(), chunk_bytes=1, chunks=()
                    )
                    layer = layer_of(blob, False, report.bytes, report.entries + report.removed, limit)
                    layer = msgspec.structs.replace(layer, packed=packed)
                    return await self._committed(line, Written(layer=layer, state=stream.state), None)
            async with self._checkpoints.turn(line.owner), self._checkpoints.saving(line.manifest) as saving:
                blob = await self._checkpoints.stored(saving, _both(data, chunks), limit, None)
                report = stream.report
                layer = layer_of(blob, False, report.bytes, report.entries + report.removed, limit)
                return await self._committed(line, Written(layer=layer, state=stream.state), saving)

    async def _committed(self, line: _Line, written: Written, saving: Saving | None) -> bool:
        async with self._checkpoints.commits.of(line.owner, line.workspace):
            return await self._commit(line, written, saving)

    async def _commit(self, line: _Line, written: Written, saving: Saving | None) -> bool:
        if saving is not None:
            saving.unsure = True  # from here on only the head says whether its chunks are anybody's
        began = line.manifest
        for _ in range(_TRIES):
            now = line.manifest
            if not _may_add(now, line.pod) or (not now.rows and began.rows):
                break  # what this was laid over is gone
            if now.pod == line.pod.name and now.calls >= written.state:
                if saving is not None:
                    await self._checkpoints.drop(saving)
                return True  # another manager, or a checkpoint, was quicker and has it all
            made = msgspec.structs.replace(
                now, number=now.number + 1, saved_at=time.time(), pod=line.pod.name, written=(*now.written, written),
                state=now.state if now.pod == line.pod.name else None,
            )  # fmt: skip
            try:
                if line.head is not None:
                    line.head = await self._checkpoints.heads.replace(line.head, made)
                else:
                    await self._check_current(line)
                    line.head = await self._checkpoints.heads.create(line.owner, line.workspace, made)
                    await self._check_not_ended(line)
            except RecordChanged:
                line.head = await self._checkpoints.heads.get(line.owner, line.workspace, fresh=True)
                if saving is not None and not await saving.renewed():
                    break
                continue
            except BaseException:
                line.head = None  # it may or may not be written
                raise
            if saving is not None:
                saving.unsure = False
            return True
        if saving is not None:
            await self._checkpoints.drop(saving)
        return False

    # ── beside it ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _checkpointed(self, line: _Line) -> None:
        """Everything, where single paths cannot be told, or have nothing of this pod's to be laid over."""
        line.head = None
        await self._save(line)

    def _fold(self, line: _Line) -> asyncio.Task[Manifest]:
        """A checkpoint, which takes the place of written layers. Goes on beside the calls."""
        key = (line.owner, line.workspace)
        folding = self._folding.get(key)
        if folding is None:
            folding = asyncio.create_task(self._save(line), name=f"fold-{line.workspace}")
            self._folding[key] = folding
            folding.add_done_callback(lambda done: self._folded(key, done))
        return folding

    def _folded(self, key: tuple[Owner, str], done: asyncio.Task[Manifest]) -> None:
        del self._folding[key]
        if done.cancelled():
            return
        why = done.exception()
        if why is None:
            self.folds += 1
        elif isinstance(why, ManagerError):  # the next call tries again
            log.warning("written_files_not_folded", extra={"workspace": key[1], "why": why.message})
        else:
            log.error("written_files_not_folded", extra={"workspace": key[1]}, exc_info=why)

    async def _save(self, line: _Line) -> Manifest:
        return await self._checkpoints.save(
            line.owner, line.workspace, line.pod, disk_bytes=self._disk_bytes(line.binding),
            check=lambda: self._check_current(line),
        )  # fmt: skip

    async def _check_current(self, line: _Line) -> None:
        if not await self._current(line.binding):
            raise SandboxGone("the sandbox's pod was replaced meanwhile; nothing of it is kept any more", reason="lost")

    async def _check_not_ended(self, line: _Line) -> None:
        """Of a manifest just made: a sandbox that was ended for good meanwhile leaves none."""
        try:
            await self._check_current(line)
        except SandboxGone:
            line.head = None
            with suppress(StoreUnavailable):
                await self._checkpoints.delete_workspace(line.owner, line.workspace)
            raise

    def _disk_bytes(self, binding: Binding) -> int | None:
        profile = self._profiles.get(binding.profile)
        return None if profile is None else profile.disk_bytes


class _Line:
    """The calls that change files of one pod: one flight at a time, and who comes meanwhile goes with the next."""

    def __init__(self, binding: Binding, workspace: str, pod: PodRef) -> None:
        self.binding, self.owner, self.workspace, self.pod = binding, binding.owner, workspace, pod
        self.head: Versioned[Manifest] | None = None  # as last seen here; None: not looked at yet, or not there
        self.flight: asyncio.Task[None] | None = None
        self.following: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self.flight is None

    @property
    def manifest(self) -> Manifest:
        return self.head.value if self.head is not None else Manifest(owner=self.owner, workspace=self.workspace)

    async def joined(self, fly: Callable[[], Awaitable[None]]) -> None:
        """A flight that begins from now on. It goes on where its caller hangs up."""
        if self.flight is None:
            flight = self.flight = self._begun(self._fly(fly, None))
        elif self.following is None:
            flight = self.following = self._begun(self._fly(fly, self.flight))
        else:
            flight = self.following
        await asyncio.shield(flight)

    def _begun(self, flight: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        begun = asyncio.create_task(flight, name=f"write-through-{self.workspace}")
        begun.add_done_callback(lambda done: None if done.cancelled() else _seen(done))  # all who waited may be gone
        return begun

    async def _fly(self, fly: Callable[[], Awaitable[None]], before: asyncio.Task[None] | None) -> None:
        me = asyncio.current_task()
        if before is not None:
            await asyncio.wait([before])
            self.flight, self.following = me, None
        try:
            await fly()
        finally:
            if self.following is None:
                self.flight = None


def _seen(done: asyncio.Task[None]) -> None:
    done.exception()


def _may_add(manifest: Manifest, pod: PodRef) -> bool:
    """Whether what the manifest has is in that pod."""
    return manifest.pod == pod.name or not manifest.rows


async def _both(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for chunk in rest:
        yield chunk
