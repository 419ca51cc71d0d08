"""Checkpoints: a pod's workspace made durable, and back; snapshots and forks, which copy manifests and no bytes.

What is saved becomes visible in one step, the conditional put of the workspace's manifest, after everything it names is
there. A checkpoint under way has a mark that it renews; `manager.services.sweeping` takes away what one without a
renewed mark has left. Everything that a pod says is checked: no key comes from it, and no size is unbounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Final, Protocol

import msgspec

from manager.errors import ExecutorRefused, ExecutorUnreachable, ManagerError, NotFound, StoreUnavailable, TooLarge
from manager.executor_client import PodRef
from manager.model import Owner, new_id
from manager.services.manifests import STATE, Layer, Manifest, Snapshot, Written, save_prefix
from manager.store.base import Cache
from manager.store.blobs import CHUNK_BYTES, Blob, ObjectDamaged, Progress, read_blob, write_blob
from manager.store.objects import Objects, delete_under
from manager.store.records import RecordChanged, Records, Versioned

log = logging.getLogger(__name__)

MAX_LAYER_BYTES: Final = 1 << 40  # where a profile bounds no disk
MAX_ENTRIES: Final = 10_000_000
RENEW_SEC: Final = 5.0  # a checkpoint under way renews its mark so often
STALL_SEC: Final = 120.0  # a pod that sends nothing of a layer for so long is given up
MANIFEST_BYTES: Final = 8 << 20
_SPARE_BYTES: Final = 64 << 20  # a packed layer may be larger than its files: headers, and what cannot be packed
_AT_ONCE: Final = 8  # layers under way over all sandboxes; some 32 MB of memory each at full speed
_OF_ONE_OWNER: Final = 4
_COMMIT_TRIES: Final = 20
_BUSY_SEC: Final = 60.0  # for a pod that is giving a layer to another manager
_BUSY_LOOK_SEC: Final = 0.25


class LayerReport(Protocol):
    """What the pod says of the layer that it has sent: claims of an attacker."""

    @property
    def entries(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def written(self) -> str | None:
        """The state of file calls from before the tree was looked at; None: this executor keeps none."""
        ...


class LayerStream(Protocol):
    """A layer on its way out of a pod."""

    @property
    def base(self) -> str | None:
        """The state that it changes; None: it stands alone."""
        ...

    @property
    def state(self) -> str: ...

    @property
    def report(self) -> LayerReport:
        """After the last chunk."""
        ...

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Its bytes. Raises ManagerError where it does not come whole."""
        ...


class LayerApplied(Protocol):
    @property
    def state(self) -> str | None: ...


class PodLayers(Protocol):
    """Of `manager.executor_client.ExecutorClient`: layers out of a pod and into it."""

    def changes(self, pod: PodRef, since: str | None) -> AbstractAsyncContextManager[LayerStream]: ...

    def written(self, pod: PodRef, since: str) -> AbstractAsyncContextManager[LayerStream]:
        """What file calls have changed since that state of theirs. Raises ExecutorRefused `conflict` where that is more
        than the executor remembers."""
        ...

    async def apply_layer(
        self,
        pod: PodRef,
        chunks: AsyncIterator[bytes],
        *,
        sha256: str,
        last: bool,
        max_bytes: int,
        max_entries: int,
        as_command_user: bool,
    ) -> LayerApplied:
        """Raises ManagerError; the pod is then to be thrown away."""
        ...


class SaveMark(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint under way, or layers that may have become nobody's; nobody's record, under the checkpoint's id."""

    owner: Owner
    workspace: str
    number: int  # of the last checkpoint when this one began; -1: nothing is being saved
    renewals: int = 0
    dead: bool = False  # it was not renewed in time and is being taken away: it may not commit any more


class NotSaved(StoreUnavailable):
    """The workspace was not saved: others changed it, or this checkpoint was taken for dead. The last one stands."""


class Checkpoints:
    """One manager's. `dirty`: owners of whom layers may have become nobody's, for the sweeper, each with the ids of the
    marks that tell another manager's sweeper so where this one dies."""

    def __init__(
        self,
        objects: Objects,
        cache: Cache,
        pods: PodLayers,
        *,
        renew_sec: float = RENEW_SEC,
        stall_sec: float = STALL_SEC,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.heads = Records(objects, cache, "workspaces", Manifest, max_bytes=MANIFEST_BYTES)
        self.snapshots = Records(objects, cache, "snapshots", Snapshot, max_bytes=MANIFEST_BYTES)
        self.marks = Records(objects, cache, "saves", SaveMark)
        self.dirty: dict[Owner, set[str]] = {}
        self._objects, self._pods = objects, pods
        self._saves = _Locks()  # a pod gives one layer at a time
        self.commits = _Locks()  # so that those of one manager do not keep each other from theirs
        self._renew_sec, self._stall_sec, self._chunk_bytes = renew_sec, stall_sec, chunk_bytes
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._owners: dict[Owner, tuple[asyncio.Semaphore, int]] = {}

    async def head(self, owner: Owner, workspace: str) -> Manifest | None:
        """The workspace as last saved; None where nothing of it was."""
        found = await self.heads.get(owner, workspace, fresh=True)
        return None if found is None or not found.value.rows else found.value

    # ── out of a pod ────────────────────────────────────────────────────────────────────────────────────────────

    async def save(
        self,
        owner: Owner,
        workspace: str,
        pod: PodRef,
        *,
        disk_bytes: int | None = None,
        whole: bool = False,
        progress: Progress | None = None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> Manifest:
        """The workspace as the pod has it now, durable when this returns: what changed since the pod's last one.

        `check` is asked whether the pod is still its sandbox's, and raises where not; who gets the workspace after that
        changes its manifest, and so nothing of this pod's is committed any more.
        `disk_bytes`: what its profile lets a workspace hold. `whole`: everything anew, in place of all layers so far;
        it happens by itself where these have become many. On every failure the last checkpoint stands.
        Raises TooLarge, NotSaved, StoreUnavailable, and what the pod's executor refuses with."""
        limit = layer_limit(disk_bytes)
        async with self._saves.of(owner, workspace), self.turn(owner):
            head = await self._head_to_write(owner, workspace)
            before = head.value
            if check is not None:
                await check()
            since = before.state if before.pod == pod.name and not (whole or before.wants_whole) else None
            async with self.saving(before) as saving:
                async with self._changes(pod, since) as stream:
                    if stream.base not in (None, since) or not STATE.match(stream.state):
                        raise ExecutorUnreachable("the pod sent a layer of something else than what was asked for")
                    async with aclosing(self.unstalled(stream.chunks())) as chunks:
                        blob = await self.stored(saving, chunks, limit, progress)
                    report, base = stream.report, stream.base
                if base is not None and report.entries + report.removed == 0 and not before.written:
                    await self.drop(saving)
                    return before
                layer = layer_of(blob, base is None, report.bytes, report.entries + report.removed, limit)
                # What file calls changed while the tree was looked at may have been missed, or been seen half-way.
                later = None if report.written is None else await self._later(saving, pod, report.written, limit)

                def change(now: Manifest) -> Manifest:
                    return _with(now, layer, pod=pod.name, state=stream.state, covered=report.written, later=later)

                return await self._commit(saving, head, change)

    async def _later(self, saving: Saving, pod: PodRef, since: str, limit: int) -> Written | None:
        """What file calls have changed since that state; None: nothing."""
        try:
            async with (
                self._pods.written(pod, since) as stream,
                aclosing(self.unstalled(stream.chunks())) as chunks,
            ):
                if not STATE.match(stream.state) or stream.base not in (None, since):
                    raise ExecutorUnreachable("the pod sent a layer of something else than what was asked for")
                if stream.state == since:
                    async for _ in chunks:
                        pass  # to its end, so that the connection is used again
                    return None
                blob = await self.stored(saving, chunks, limit, None)
                report = stream.report
        except ExecutorRefused as why:
            if why.code != "conflict":
                raise
            raise NotSaved("more files were changed by calls than a checkpoint can follow; try again") from why
        layer = layer_of(blob, False, report.bytes, report.entries + report.removed, limit)
        return Written(layer=layer, state=stream.state)

    @asynccontextmanager
    async def _changes(self, pod: PodRef, since: str | None) -> AsyncIterator[LayerStream]:
        """The pod's layer, waited for where another manager is just being given one."""
        async with AsyncExitStack() as stack:
            yield await self._entered(stack, pod, since)

    async def _entered(self, stack: AsyncExitStack, pod: PodRef, since: str | None) -> LayerStream:
        give_up = time.monotonic() + _BUSY_SEC
        while True:
            try:
                return await stack.enter_async_context(self._pods.changes(pod, since))
            except ExecutorRefused as why:
                if why.code != "conflict" or "partial" in why.details or time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(_BUSY_LOOK_SEC)

    async def add_layer(
        self,
        owner: Owner,
        workspace: str,
        body: AsyncIterable[bytes],
        facts: Callable[[], tuple[int, int]],
        *,
        limit: int,
        progress: Progress | None = None,
    ) -> Manifest:
        """Makes `body`, a layer of the manager's own making that stands alone, all that is in the workspace.

        `facts` is asked after the last byte: bytes of the files in it, and its entries. Raises TooLarge, NotSaved,
        StoreUnavailable, and what `body` raises."""
        async with self.turn(owner):
            head = await self._head_to_write(owner, workspace)
            async with self.saving(head.value) as saving:
                blob = await self.stored(saving, body, limit, progress)
                content_bytes, entries = facts()
                layer = layer_of(blob, True, content_bytes, entries, MAX_LAYER_BYTES)
                layer = msgspec.structs.replace(layer, of_command_user=True)
                return await self._commit(saving, head, lambda now: _with(now, layer, pod="", state=None))

    # ── into a pod ──────────────────────────────────────────────────────────────────────────────────────────────

    async def restore(
        self, owner: Owner, workspace: str, pod: PodRef, *, progress: Progress | None = None
    ) -> Manifest | None:
        """The workspace as last saved, into a pod that nobody has used yet; None where nothing was saved.

        After an error the pod is to be thrown away: it may have got a part. Raises ObjectDamaged, StoreUnavailable
        and what the pod's executor refuses with."""
        async with self.turn(owner):
            head = await self.heads.get(owner, workspace, fresh=True)
            if head is None or not head.value.rows:
                return None
            rows = head.value.rows
            done, total, state = 0, sum(layer.blob.size for layer in rows), None
            for number, layer in enumerate(rows):
                state = await self._apply(pod, layer, number == len(rows) - 1, progress, done, total)
                done += layer.blob.size
            if state is None or not STATE.match(state):
                raise ExecutorUnreachable("the pod did not say what it made of the workspace")
            return await self._taken_over(head, pod, state)

    async def _taken_over(self, head: Versioned[Manifest], pod: PodRef, state: str) -> Manifest:
        """The head says from now on whose it is: nothing that an earlier pod has to say is taken any more.

        Raises NotSaved where that pod had a last word meanwhile, which this one did not get."""
        first = head.value
        for _ in range(_COMMIT_TRIES):
            # What file calls had changed is now as much a part of the state as everything else.
            mine = msgspec.structs.replace(
                head.value, pod=pod.name, state=state, layers=head.value.rows, written=(), covered=""
            )
            try:
                return (await self.heads.replace(head, mine)).value
            except RecordChanged:
                found = await self.heads.get(first.owner, first.workspace, fresh=True)
            if found is None or found.value != first:
                break
            head = found  # written anew by a sweep
        raise NotSaved("the workspace was changed while it was being restored; try again")

    async def _apply(
        self, pod: PodRef, layer: Layer, last: bool, progress: Progress | None, done: int, total: int
    ) -> str | None:
        failed: list[ManagerError] = []

        async def chunks() -> AsyncGenerator[bytes, None]:
            try:
                source = read_blob(self._objects, layer.blob) if layer.packed is None else _unpacked(layer)
                async with aclosing(source) as pieces:
                    async for piece in _told(pieces, progress, done, total):
                        yield piece
            except ManagerError as why:
                failed.append(why)
                raise

        try:
            async with aclosing(chunks()) as body:
                applied = await self._pods.apply_layer(
                    pod, body, sha256=layer.blob.sha256, last=last,
                    max_bytes=max(1, layer.content_bytes), max_entries=max(1, layer.entries),
                    as_command_user=layer.of_command_user,
                )  # fmt: skip
        except Exception as why:
            if failed:  # the pod only says that its layer broke off
                raise failed[0] from why
            raise
        return applied.state

    # ── copies of manifests ─────────────────────────────────────────────────────────────────────────────────────

    async def snapshot(
        self,
        owner: Owner,
        workspace: str,
        *,
        name: str = "",
        snapshot_id: str | None = None,
        keep_until: float | None = None,
    ) -> Snapshot:
        """The workspace as last saved, under an id of its own; the same again under the same one.

        `keep_until`: seconds since the epoch. Raises NotFound where nothing was saved."""

        def source() -> Awaitable[Manifest | None]:
            return self.head(owner, workspace)

        manifest = _unbound(_saved(await source(), "the sandbox has no checkpoint yet"))
        made = Snapshot(
            snapshot_id=snapshot_id or new_id("n"), name=name, created_at=time.time(), manifest=manifest,
            keep_until=keep_until,
        )  # fmt: skip
        try:
            await self.snapshots.create(owner, made.snapshot_id, made)
        except RecordChanged as why:
            there = await self.get_snapshot(owner, made.snapshot_id)
            if there is not None and there.manifest == manifest:
                return there
            raise NotSaved("there is another snapshot of that id") from why
        if not await _still_has(source, manifest):
            await self.snapshots.delete(owner, made.snapshot_id)
            raise NotSaved("the workspace was changed while its snapshot was made; try again")
        return made

    async def fork(self, owner: Owner, workspace: str, new_workspace: str) -> Manifest:
        """Makes `new_workspace` what `workspace` was when last saved. Raises NotFound where nothing was."""
        otherwise = "nothing of the sandbox's workspace was ever kept"
        return await self._copy(owner, lambda: self.head(owner, workspace), new_workspace, otherwise)

    async def from_snapshot(self, owner: Owner, snapshot_id: str, new_workspace: str) -> Manifest:
        """Makes `new_workspace` what the snapshot is. Raises NotFound."""

        async def source() -> Manifest | None:
            found = await self.snapshots.get(owner, snapshot_id, fresh=True)
            return None if found is None else found.value.manifest

        return await self._copy(owner, source, new_workspace, "there is no such snapshot")

    async def get_snapshot(self, owner: Owner, snapshot_id: str) -> Snapshot | None:
        found = await self.snapshots.get(owner, snapshot_id)
        return None if found is None else found.value

    async def list_snapshots(self, owner: Owner, *, after: str = "", limit: int = 100) -> list[Snapshot]:
        return [found.value for found in await self.snapshots.page(owner, after=after, limit=limit)]

    async def delete_snapshot(self, owner: Owner, snapshot_id: str) -> bool:
        """Whether there was one. What no other manifest names is taken away later."""
        found = await self.snapshots.get(owner, snapshot_id, fresh=True)
        if found is not None:
            await self._unnaming(owner, found.value.manifest.workspace)
        return await self.snapshots.delete(owner, snapshot_id)

    async def delete_workspace(self, owner: Owner, workspace: str) -> bool:
        """Whether there was one. What no other manifest names is taken away later."""
        if await self.head(owner, workspace) is not None:
            await self._unnaming(owner, workspace)
        return await self.heads.delete(owner, workspace)

    async def _unnaming(self, owner: Owner, workspace: str) -> None:
        """A manifest is about to go: what it alone names is to be looked for, also where this manager dies."""
        mark_id = new_id("c")
        await self.marks.create(None, mark_id, SaveMark(owner=owner, workspace=workspace, number=-1, dead=True))
        self.dirty.setdefault(owner, set()).add(mark_id)

    async def _copy(
        self, owner: Owner, source: Callable[[], Awaitable[Manifest | None]], workspace: str, otherwise: str
    ) -> Manifest:
        found = _saved(await source(), otherwise)
        copy = msgspec.structs.replace(_unbound(found), workspace=workspace)
        try:
            await self.heads.create(owner, workspace, copy)
        except RecordChanged as why:
            raise NotSaved("the workspace exists already") from why
        if not await _still_has(source, found):
            await self.heads.delete(owner, workspace)
            raise NotSaved("what was to be copied was changed meanwhile; try again")
        return copy

    # ── a checkpoint under way ──────────────────────────────────────────────────────────────────────────────────

    async def _head_to_write(self, owner: Owner, workspace: str) -> Versioned[Manifest]:
        """The head, made where there is none: every commit replaces one, so that the sweeper can refuse it."""
        found = await self.heads.get(owner, workspace, fresh=True)
        if found is None:
            with suppress(RecordChanged):
                return await self.heads.create(owner, workspace, Manifest(owner=owner, workspace=workspace))
            found = await self.heads.get(owner, workspace, fresh=True)
        if found is None:
            raise NotSaved("the workspace was deleted while it was being saved")
        return found

    @asynccontextmanager
    async def saving(self, before: Manifest) -> AsyncIterator[Saving]:
        """A mark that is renewed until the block ends, and then taken away unless the sweeper has to look."""
        save_id, owner, workspace = new_id("c"), before.owner, before.workspace
        first = SaveMark(owner=owner, workspace=workspace, number=before.number)
        mark = await self.marks.create(None, save_id, first)
        saving = Saving(self.marks, mark, save_prefix(owner, workspace, save_id), self._renew_sec)
        saver = asyncio.current_task()
        assert saver is not None
        renewing = asyncio.create_task(saving.renew_forever(saver), name="renew-save-mark")
        try:
            yield saving
        except BaseException as why:
            if not saving.unsure:
                await self.drop(saving)
            if saving.lost is not None and isinstance(why, asyncio.CancelledError) and saver.uncancel() == 0:
                raise saving.lost from None
            raise
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            if saving.superseded:
                self.dirty.setdefault(owner, set()).add(save_id)
            elif not saving.unsure:
                with suppress(StoreUnavailable):
                    await self.marks.delete(None, save_id)

    async def drop(self, saving: Saving) -> None:
        """Deletes what was stored; what storage does not let go of is left to the sweeper."""
        try:
            await delete_under(self._objects, saving.prefix)
        except StoreUnavailable:
            saving.unsure = True

    async def stored(self, saving: Saving, body: AsyncIterable[bytes], limit: int, progress: Progress | None) -> Blob:
        def unsure() -> None:
            saving.unsure = True

        return await write_blob(
            self._objects, saving.prefix, body, limit=limit, chunk_bytes=self._chunk_bytes, progress=progress,
            unsure=unsure,
        )  # fmt: skip

    async def _commit(
        self, saving: Saving, head: Versioned[Manifest], change: Callable[[Manifest], Manifest]
    ) -> Manifest:
        """Replaces the head. Raises NotSaved where that is refused."""
        async with self.commits.of(head.value.owner, head.value.workspace):
            return await self._committed(saving, head, change)

    async def _committed(
        self, saving: Saving, head: Versioned[Manifest], change: Callable[[Manifest], Manifest]
    ) -> Manifest:
        saving.unsure = True  # from here on only the head says whether the blob is anybody's
        first = head.value
        for _ in range(_COMMIT_TRIES):
            made = change(head.value)
            try:
                await self.heads.replace(head, made)
            except RecordChanged:
                # Only a sweep of another checkpoint's remains writes a head without changing it. Its like for this
                # one comes after its mark was taken over, so a renewal after reading the head shows that it is not.
                found = await self.heads.get(first.owner, first.workspace, fresh=True)
                if found is not None and _same_but_written(found.value, first, made) and await saving.renewed():
                    head = found
                    continue
                break
            saving.unsure = False
            saving.superseded = bool(head.value.prefixes - made.prefixes)
            return made
        saving.unsure = False
        raise NotSaved("the workspace was changed by others while it was being saved; the last checkpoint stands")

    @asynccontextmanager
    async def turn(self, owner: Owner) -> AsyncIterator[None]:
        """Waits until few enough layers are under way, of all and of this owner."""
        own, users = self._owners.get(owner, (asyncio.Semaphore(_OF_ONE_OWNER), 0))
        self._owners[owner] = own, users + 1
        try:
            async with own, self._turns:
                yield
        finally:
            own, users = self._owners.pop(owner)
            if users > 1:
                self._owners[owner] = own, users - 1

    async def unstalled(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(chunks):
            while True:
                try:
                    async with asyncio.timeout(self._stall_sec):
                        chunk = await anext(chunks, None)
                except TimeoutError as why:
                    raise ExecutorUnreachable(
                        f"the pod sent nothing of its workspace for {self._stall_sec:.0f} s"
                    ) from why
                if chunk is None:
                    return
                yield chunk


class _Locks:
    """One for each workspace, as long as somebody has use of it."""

    def __init__(self) -> None:
        self._locks: dict[tuple[Owner, str], tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, owner: Owner, workspace: str) -> AsyncIterator[None]:
        key = (owner, workspace)
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(key)
            if users > 1:
                self._locks[key] = lock, users - 1


class Saving:
    """One checkpoint's mark."""

    def __init__(self, marks: Records[SaveMark], mark: Versioned[SaveMark], prefix: str, renew_sec: float) -> None:
        self.prefix = prefix
        self.unsure = False  # whether it was committed, or what is left of it: then the mark stays for the sweeper
        self.superseded = False  # it was committed in place of layers: then the mark stays until these are gone
        self.lost: NotSaved | None = None
        self._marks, self._mark, self._renew_sec = marks, mark, renew_sec
        self._one = asyncio.Lock()

    async def renewed(self) -> bool:
        """False: somebody has taken it for dead."""
        async with self._one:
            mark = self._mark.value
            try:
                changed = msgspec.structs.replace(mark, renewals=mark.renewals + 1)
                self._mark = await self._marks.replace(self._mark, changed)
            except RecordChanged:
                return False
            return True

    async def renew_forever(self, saver: asyncio.Task[object]) -> None:
        """Cancels `saver` when the mark is lost."""
        while True:
            await asyncio.sleep(self._renew_sec)
            try:
                if await self.renewed():
                    continue
            except StoreUnavailable as why:
                log.warning("save_mark_not_renewed", extra={"why": why.message})
                continue
            self.lost = NotSaved("this checkpoint took too long to tell of itself and was given up; try again")
            if not self.unsure:
                saver.cancel()
            return


def _with(
    now: Manifest,
    layer: Layer,
    *,
    pod: str,
    state: str | None,
    covered: str | None = None,
    later: Written | None = None,
) -> Manifest:
    """`later`: what file calls have changed since `covered`, packed after the layer: it takes the place of what was
    written until then."""
    until = later.state if later is not None else covered or ""
    newer = [each for each in now.written if now.pod == pod and each.state > until]
    return msgspec.structs.replace(
        now, number=now.number + 1, saved_at=time.time(), pod=pod, state=state, covered=covered or "",
        layers=(layer,) if layer.full else (*now.layers, layer),
        written=(*([later] if later is not None else []), *newer),
    )  # fmt: skip


def _same_but_written(now: Manifest, before: Manifest, made: Manifest) -> bool:
    """Whether nothing but file calls of the pod that `made` is of came between."""
    apart = msgspec.structs.replace(
        now, written=before.written, number=before.number, saved_at=before.saved_at, pod=before.pod
    )
    return apart == before and (now.pod == before.pod or (not before.pod and now.pod == made.pod))


async def _unpacked(layer: Layer) -> AsyncGenerator[bytes, None]:
    """Of a layer that lies in its manifest. Raises ObjectDamaged."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(layer.packed or b"", layer.blob.size + 1)
    except zlib.error:
        data = b""
    if hashlib.sha256(data).hexdigest() != layer.blob.sha256:
        raise ObjectDamaged("object storage: a small layer in a manifest is not what was stored")
    yield data


def layer_limit(disk_bytes: int | None) -> int:
    """Of one layer of a workspace that its profile bounds so."""
    return MAX_LAYER_BYTES if disk_bytes is None else disk_bytes + _SPARE_BYTES


def layer_of(blob: Blob, full: bool, content_bytes: int, entries: int, limit: int) -> Layer:
    """Raises TooLarge where the pod claims more than may be."""
    if not 0 <= content_bytes <= limit:
        raise TooLarge(f"a workspace of more than {limit} bytes is not saved", limit=limit)
    if not 0 <= entries <= MAX_ENTRIES:
        raise TooLarge(f"a workspace of more than {MAX_ENTRIES} files is not saved", limit=MAX_ENTRIES)
    return Layer(blob=blob, full=full, content_bytes=content_bytes, entries=entries)


def _unbound(manifest: Manifest) -> Manifest:
    """For a copy: the pod's states are its workspace's alone."""
    return msgspec.structs.replace(manifest, pod="", state=None, layers=manifest.rows, written=(), covered="")


def _saved(manifest: Manifest | None, otherwise: str) -> Manifest:
    if manifest is None or not manifest.rows:
        raise NotFound(otherwise)
    return manifest


async def _still_has(source: Callable[[], Awaitable[Manifest | None]], copied: Manifest) -> bool:
    """Whether the source names all that was copied from it, after the copy is there.

    Then no sweep that looks later can miss both of them (`manager.services.sweeping`)."""
    now = await source()
    return now is not None and copied.prefixes <= now.prefixes


async def _told(
    body: AsyncIterable[bytes], progress: Progress | None, done: int, total: int | None
) -> AsyncGenerator[bytes, None]:
    async for piece in body:
        yield piece
        done += len(piece)
        if progress is not None:
            progress(done, total)
