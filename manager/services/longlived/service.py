"""Long-lived sandboxes: made by somebody, stopped and started again, ended by somebody or by their time.

The record in object storage says what a sandbox is, and each of its moves is one compare-and-set there; the slot, the
lease and the pod are those that a task's sandbox has, under the sandbox's own name. Every step can be taken up again by
another manager: the order is always claim, record, pod on the way up and workspace, record, pod on the way down.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from executor.wire import LeaseRequest
from manager.errors import (
    IdempotencyMismatch,
    IllegalMove,
    InvalidRequest,
    ManagerError,
    NotFound,
    NotSupported,
    SandboxStarting,
    SandboxStopped,
)
from manager.executor_client import ExecutorClient
from manager.model import (
    Binding,
    BindingState,
    LeaseTerms,
    Owner,
    Principal,
    Profile,
    SandboxRecord,
    SandboxState,
    new_id,
    own_name,
)
from manager.services.audit import AuditLog, NoAudit
from manager.services.longlived.asked import NAME_MAX_BYTES, Asked, Changes, check, id_of
from manager.services.longlived.ending import Ending
from manager.services.longlived.kept import (
    COMING,
    UNDER_WAY,
    By,
    Kept,
    Progress,
    refuse_destroyed,
    refuse_expired,
    under_way,
    within,
)
from manager.services.longlived.making import Making
from manager.services.longlived.workspaces import SourceService
from manager.services.manifests import Snapshot
from manager.services.sandboxes import KEEP_SEC, Sandboxes
from manager.services.sources import Source
from manager.services.tasks import TaskSessions, TaskView
from manager.store.base import Store
from manager.store.records import Records

_S: Final = SandboxState


class LongLived:
    def __init__(
        self,
        records: Records[SandboxRecord],
        store: Store,
        sandboxes: Sandboxes,
        tasks: TaskSessions,
        client: ExecutorClient,
        profiles: Sequence[Profile],
        terms: LeaseTerms,
        *,
        audit: AuditLog | None = None,
    ) -> None:
        self._store = store
        self._sandboxes = sandboxes
        self._tasks = tasks
        self._client = client
        self._active_sec = terms.active_sec
        self._audit = audit or NoAudit()
        self.sources: SourceService | None = None
        self._creations: dict[str, _Creation] = {}
        self.kept = Kept(records)
        self.making = Making(self.kept, sandboxes, self._audit, terms.active_sec, self._new_terms)
        by_name = {profile.name: profile for profile in profiles}
        self.ending = Ending(self.kept, store, sandboxes, client, by_name, self._audit)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, owner: Owner, sandbox_id: str) -> SandboxRecord:
        """Raises NotFound: not there, or not the owner's."""
        found = await self.kept.records.get(owner, sandbox_id)
        if found is None:
            raise NotFound("there is no such sandbox")
        return found.value

    async def page(self, owner: Owner, *, after: str = "", limit: int = 100) -> list[SandboxRecord]:
        """By id, destroyed ones too."""
        return [found.value for found in await self.kept.records.page(owner, after=after, limit=limit)]

    def progress(self, sandbox_id: str) -> Progress | None:
        """Of what this manager keeps or restores."""
        return self.kept.progress(sandbox_id)

    async def binding(self, record: SandboxRecord) -> Binding | None:
        """The sandbox's pod, where it has one."""
        found = await self._store.get_binding(record.owner, own_name(record.sandbox_id))
        return found if found is not None and found.state is not BindingState.ENDED else None

    async def pod_view(self, record: SandboxRecord) -> TaskView | None:
        """Its pod and lease, where it has one."""
        binding = await self.binding(record)
        return None if binding is None else await self._tasks.view(binding, ask=False)

    # ── making and changing ───────────────────────────────────────────────────────────────────────────────────────

    async def create(
        self,
        by: Principal,
        asked: Asked,
        *,
        key: str | None,
        wait_sec: float,
        source: Source | None = None,
        first: Callable[[str], Awaitable[None]] | None = None,
    ) -> SandboxRecord:
        """A new sandbox: running, or still being made where that takes longer than `wait_sec`. `first`: fills the
        workspace of that id, once the slot is taken; `source` is what it is filled with then.

        The same key again is the same sandbox. What cannot be made leaves nothing behind, if its caller is still
        there. Raises InvalidRequest, UnknownProfile, QuotaExceeded, IdempotencyMismatch, and what the provider and
        `first` raise."""
        owner = by.owner
        check(asked)
        recipe = self._sandboxes.recipe(owner, asked.profile, None)
        if source is not None:
            first = self._from_source(owner, source, recipe.disk_bytes)
        print_ = hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()
        sandbox_id = new_id("s") if key is None else id_of(owner, key)
        if key is not None and (found := await self.kept.records.get(owner, sandbox_id, fresh=True)) is not None:
            return await self.kept.awaited(_of_key(found.value, print_), wait_sec)
        record = SandboxRecord(
            owner=owner, sandbox_id=sandbox_id, profile=recipe.name, target=recipe.target,
            autostop_sec=asked.autostop_sec, ttl_sec=asked.ttl_sec, created_at=time.time(), autostart=asked.autostart,
            name=asked.name, env=dict(asked.env), metadata=dict(asked.metadata), reason="asked", since=time.time(),
            member=by.member, fingerprint=print_,
        )  # fmt: skip
        creation = self._creations.get(sandbox_id)  # of the same key, here and now
        if creation is None:
            creation = self._begin_creation(record, recipe, by, first)
        record = _of_key(creation.record, print_)
        either: list[asyncio.Future[Any]] = [creation.making, creation.taken]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            done = await within(creation.making, wait_sec)
        except ManagerError:
            if creation.taken.done():
                await self.making.forget(owner, sandbox_id)
            raise
        return record if done is None else _of_key(done, print_)

    def _begin_creation(
        self, record: SandboxRecord, recipe: Profile, by: Principal, first: Callable[[str], Awaitable[None]] | None
    ) -> _Creation:
        sandbox_id, taken = record.sandbox_id, asyncio.get_running_loop().create_future()
        making = self.kept.begin(sandbox_id, "start", lambda: self.making.make(record, recipe, by, first, taken))
        creation = self._creations[sandbox_id] = _Creation(record, making, taken)
        making.add_done_callback(lambda _: self._creations.pop(sandbox_id, None))
        return creation

    def _from_source(self, owner: Owner, source: Source, disk_bytes: int | None) -> Callable[[str], Awaitable[None]]:
        """Raises what is wrong with the source, as far as that can be said before a slot is taken."""
        sources = self.sources
        if sources is None:
            raise NotSupported("this manager has no object storage, so that nothing can be put into a sandbox at first")
        sources.check(owner, source)

        async def first(workspace: str) -> None:
            await sources.prepare(owner, workspace, source, disk_bytes=disk_bytes)

        return first

    async def change(self, by: Principal, sandbox_id: str, changes: Changes) -> SandboxRecord:
        """Raises NotFound, InvalidRequest, SandboxGone."""
        owner, now = by.owner, time.time()

        def changed(record: SandboxRecord) -> SandboxRecord:
            refuse_destroyed(record)
            after = changes.of(record)
            if after.expires_at <= now:
                raise InvalidRequest(
                    f"ttl_sec is from its creation, {now - record.created_at:.0f} s ago", field="ttl_sec"
                )
            return after

        found = await self.kept.records.update(owner, sandbox_id, changed)
        if found is None:
            raise NotFound("there is no such sandbox")
        record = found.value
        await self._audit.record("sandbox.changed", sandbox_id, owner=owner, by=by, fields=changes.named)
        if changes.autostop_sec is not None or changes.ttl_sec is not None:
            await self._new_terms(record)
        return record

    async def _new_terms(self, record: SandboxRecord) -> None:
        """The lease and the pod's own deadlines follow the record, where it has a pod."""
        binding = await self.binding(record)
        if binding is None or binding.state is BindingState.CLAIMING:
            return  # what is being made or started looks at the record again once it runs
        terms = self.terms(record, binding)
        if await self._store.set_terms(binding, terms):
            self._sandboxes.new_terms(binding, terms)
            renewed = msgspec.structs.replace(binding, terms=terms)
            left_sec = max(1.0, record.expires_at - time.time())
            await self._client.push_lease(
                self._sandboxes.bound_of(renewed).pod, LeaseRequest(hard_end_sec=left_sec + KEEP_SEC)
            )

    def terms(self, record: SandboxRecord, binding: Binding) -> LeaseTerms:
        """A lease's longest is counted from its pod's claim."""
        left = record.expires_at - binding.created_at
        return LeaseTerms(self._active_sec, float(record.autostop_sec), max(1.0, left))

    # ── stopping, starting, ending ────────────────────────────────────────────────────────────────────────────────

    async def stop(self, by: By, owner: Owner, sandbox_id: str, *, reason: str, wait_sec: float) -> SandboxRecord:
        """Keeps the workspace, then gives pod and slot back. Stopped already: no error.

        Raises NotFound, SandboxGone, SandboxStarting, IllegalMove (it failed), and what keeping the workspace raises:
        then the sandbox runs on."""
        record = await self.kept.after_others(owner, sandbox_id, "stop", wait_sec)
        refuse_destroyed(record)
        if record.state is _S.STOPPED:
            return record
        if record.state is _S.FAILED:
            raise IllegalMove(sandbox_id, record.state, _S.STOPPED)
        if record.state in COMING:
            raise SandboxStarting("the sandbox is being made or started; stop it once it runs", state=str(record.state))
        self.kept.needed()
        if record.state is _S.STOPPING and not self.kept.moving(sandbox_id):  # another manager is at it
            return await self.kept.awaited(record, wait_sec, _S.STOPPING)
        moving = self.kept.begin(sandbox_id, "stop", lambda: self.ending.stop(record, by, reason))
        return await within(moving, wait_sec) or await self.kept.fresh(owner, sandbox_id)

    async def start(self, by: By, owner: Owner, sandbox_id: str, *, wait_sec: float) -> SandboxRecord:
        """A slot, a pod, and the workspace as it was last kept. Running already: no error.

        Raises NotFound, SandboxGone, SandboxStopped (while it is being stopped), QuotaExceeded, and what the provider
        and restoring raise: then it stays as it was."""
        record = await self.kept.after_others(owner, sandbox_id, "start", wait_sec)
        refuse_destroyed(record)
        if record.state is _S.RUNNING:
            return record
        if record.state in COMING:
            return await self.kept.awaited(record, wait_sec)
        if record.state is _S.STOPPING:
            raise SandboxStopped("the sandbox is being stopped; start it then", state=str(record.state))
        refuse_expired(record)
        self.kept.needed()
        moving = self.kept.begin(sandbox_id, "start", lambda: self.making.start(record, by))
        return await within(moving, wait_sec) or await self.kept.fresh(owner, sandbox_id)

    async def destroy(
        self, by: By, owner: Owner, sandbox_id: str, *, purge: bool, force: bool, wait_sec: float
    ) -> SandboxRecord:
        """Ends it for good, with a last checkpoint that is kept as a snapshot. Destroyed already: no error.

        `purge`: without one. `force`: also where there can be none. Raises NotFound, and what keeping the workspace
        raises: then it runs on."""
        give_up = time.monotonic() + wait_sec
        record = await self.kept.fresh(owner, sandbox_id)
        while (moving := self.kept.move_of(sandbox_id)) is not None and record.state is not _S.DESTROYED:
            left = give_up - time.monotonic()
            if record.state in COMING:
                moving.cancel()
                await asyncio.wait([moving])
            elif left > 0:
                await asyncio.wait([moving], timeout=left)
            elif moving.get_name() == "sandbox-destroy":
                return record
            else:
                raise under_way(record)
            record = await self.kept.fresh(owner, sandbox_id)
        if record.state is _S.DESTROYED:
            return record
        reason = "destroyed"
        moving = self.kept.begin(
            sandbox_id, "destroy", lambda: self.ending.destroy(record, by, reason, purge=purge, force=force)
        )
        return await within(moving, give_up - time.monotonic()) or await self.kept.fresh(owner, sandbox_id)

    # ── snapshots and forks ───────────────────────────────────────────────────────────────────────────────────────

    async def snapshot(self, by: Principal, sandbox_id: str, name: str) -> Snapshot:
        """What is in the workspace now, for good. A running sandbox runs on. Raises NotFound, SandboxGone."""
        if len(name.encode()) > NAME_MAX_BYTES or not name.isprintable():
            raise InvalidRequest(f"a name has at most {NAME_MAX_BYTES} bytes of printable text", field="name")
        await self._keep_now(by.owner, sandbox_id)
        taken = await self.kept.needed().snapshot(by.owner, sandbox_id, name=name)
        await self._audit.record("snapshot.created", taken.snapshot_id, owner=by.owner, by=by, sandbox=sandbox_id)
        return taken

    async def snapshots(self, owner: Owner, *, after: str = "", limit: int = 100) -> list[Snapshot]:
        """By id."""
        return await self.kept.needed().list_snapshots(owner, after=after, limit=limit)

    async def get_snapshot(self, owner: Owner, snapshot_id: str) -> Snapshot:
        """Raises NotFound: not there, or not the owner's."""
        found = await self.kept.needed().get_snapshot(owner, snapshot_id)
        if found is None:
            raise NotFound("there is no such snapshot")
        return found

    async def delete_snapshot(self, by: Principal, snapshot_id: str) -> None:
        """What other snapshots and sandboxes share with it stays. Raises NotFound."""
        if not await self.kept.needed().delete_snapshot(by.owner, snapshot_id):
            raise NotFound("there is no such snapshot")
        await self._audit.record("snapshot.deleted", snapshot_id, owner=by.owner, by=by)

    async def fork(
        self, by: Principal, sandbox_id: str, asked: Asked, *, key: str | None, wait_sec: float
    ) -> SandboxRecord:
        """A new sandbox with what is in this one's workspace now. This one runs on. As `create`."""
        source = await self.get(by.owner, sandbox_id)
        refuse_destroyed(source)
        asked = msgspec.structs.replace(asked, profile=source.profile)

        async def first(new_id_: str) -> None:
            await self._keep_now(by.owner, sandbox_id)
            await self.kept.needed().fork(by.owner, sandbox_id, new_id_)

        self.kept.needed()
        forked = await self.create(by, asked, key=key, wait_sec=wait_sec, first=first)
        await self._audit.record("sandbox.forked", forked.sandbox_id, owner=by.owner, by=by, sandbox=sandbox_id)
        return forked

    async def _keep_now(self, owner: Owner, sandbox_id: str) -> None:
        """A checkpoint of a sandbox that runs. Raises NotFound where there is nothing to keep."""
        record = await self.kept.fresh(owner, sandbox_id)
        refuse_destroyed(record)
        if record.state in UNDER_WAY:  # on its way down too: what was kept before is not what is in it now
            record = await self.kept.awaited(record, self._sandboxes.start_limit_sec, *UNDER_WAY)
            refuse_destroyed(record)
        if record.state in UNDER_WAY:
            raise under_way(record)
        if record.state is _S.RUNNING:
            binding = await self._sandboxes.find(owner, own_name(sandbox_id))
            if binding is None or binding.state is not BindingState.BOUND:
                raise SandboxStopped("the sandbox is being stopped; try again then", state=str(record.state))
            bound = await self._sandboxes.ensure(owner, own_name(sandbox_id))
            with self._sandboxes.operation(bound), self.kept.progressing(sandbox_id) as progress:
                await self.ending.save(record, bound.binding, progress)
        elif await self.kept.needed().head(owner, sandbox_id) is None:
            raise NotFound("nothing of the sandbox's workspace was ever kept")

    async def close(self) -> None:
        """Breaks off what is under way; each goes back to where it was."""
        await self.kept.close()


class _Creation(NamedTuple):
    """Of a sandbox that this manager is making: whoever comes with the same key waits for it too."""

    record: SandboxRecord
    making: asyncio.Task[SandboxRecord]
    taken: asyncio.Future[float]  # done once the record is there


def _of_key(record: SandboxRecord, fingerprint: str) -> SandboxRecord:
    """Raises IdempotencyMismatch unless it was made of what is asked for now."""
    if record.fingerprint != fingerprint:
        raise IdempotencyMismatch("this idempotency key made another sandbox; give a new one a new key")
    return record
