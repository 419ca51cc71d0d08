"""The records of long-lived sandboxes, and what this manager changes of them now: one move of a sandbox at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from manager.errors import NotFound, NotSupported, SandboxGone, SandboxStarting, SandboxStopped
from manager.model import Owner, Principal, SandboxRecord, SandboxState, moved
from manager.services.longlived.workspaces import Note, Workspaces
from manager.services.sandboxes import when
from manager.store.records import Records

log = logging.getLogger(__name__)

POLL_SEC: Final = 0.25
By = Principal | str
T = TypeVar("T")
_S: Final = SandboxState
_POD_ENDS: Final = ("destroyed", "expired", "evicted", "oom", "node_lost", "lost")
WITHOUT_POD: Final = (_S.STOPPED, _S.FAILED)
COMING: Final = (_S.CREATING, _S.STARTING)
UNDER_WAY: Final = (*COMING, _S.STOPPING)


class Progress(msgspec.Struct, frozen=True):
    """How far the keeping or restoring of a workspace is."""

    bytes: int
    total_bytes: int | None


class Kept:
    """What all steps of long-lived sandboxes share. `workspaces`: None where this manager has no object storage."""

    def __init__(self, records: Records[SandboxRecord]) -> None:
        self.records = records
        self.workspaces: Workspaces | None = None
        self._moves: dict[str, asyncio.Task[SandboxRecord]] = {}  # what changes a sandbox now, by its id
        self._progress: dict[str, Progress] = {}

    def needed(self) -> Workspaces:
        """Raises NotSupported where there are none."""
        if self.workspaces is None:
            raise NotSupported("this manager has no object storage, so that no workspace can be kept")
        return self.workspaces

    # ── records ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def fresh(self, owner: Owner, sandbox_id: str) -> SandboxRecord:
        """Past the cache. Raises NotFound."""
        found = await self.records.get(owner, sandbox_id, fresh=True)
        if found is None:
            raise NotFound("there is no such sandbox")
        return found.value

    async def move(self, owner: Owner, sandbox_id: str, to: SandboxState, reason: str) -> SandboxRecord:
        """The record as it is then. Raises IllegalMove, NotFound."""

        def change(record: SandboxRecord) -> SandboxRecord | None:
            return None if record.state is to else moved(record, to, reason, time.time())

        found = await self.records.update(owner, sandbox_id, change)
        if found is None:
            raise NotFound("there is no such sandbox")
        log.info("sandbox_state", extra={"sandbox": sandbox_id, "state": str(to), "reason": reason})
        return found.value

    async def awaited(self, record: SandboxRecord, wait_sec: float, *states: SandboxState) -> SandboxRecord:
        """The record once it is in none of the states (being made or started), or as it is after `wait_sec`."""
        owner, sandbox_id = record.owner, record.sandbox_id
        give_up = time.monotonic() + wait_sec
        while record.state in (states or COMING) and (left := give_up - time.monotonic()) > 0:
            moving = self._moves.get(sandbox_id)
            if moving is not None:
                await asyncio.wait([moving], timeout=left)
            else:
                await asyncio.sleep(min(POLL_SEC, left))  # another manager is at it
            found = await self.records.get(owner, sandbox_id, fresh=True)
            if found is None:
                raise NotFound("there is no such sandbox")
            record = found.value
        return record

    # ── what is under way ─────────────────────────────────────────────────────────────────────────────────────────

    def moving(self, sandbox_id: str) -> bool:
        """Whether this manager is changing its state now."""
        return sandbox_id in self._moves

    def move_of(self, sandbox_id: str) -> asyncio.Task[SandboxRecord] | None:
        return self._moves.get(sandbox_id)

    def progress(self, sandbox_id: str) -> Progress | None:
        """Of what this manager keeps or restores."""
        return self._progress.get(sandbox_id)

    def begin(
        self, sandbox_id: str, kind: str, work: Callable[[], Coroutine[Any, Any, SandboxRecord]]
    ) -> asyncio.Task[SandboxRecord]:
        """One change of a sandbox at a time; who comes meanwhile joins it. It outlives the request that began it."""
        moving = self._moves.get(sandbox_id)
        if moving is None:
            moving = asyncio.create_task(work(), name=f"sandbox-{kind}")
            self._moves[sandbox_id] = moving
            moving.add_done_callback(lambda done: self._was_moved(sandbox_id, done))
        return moving

    def _was_moved(self, sandbox_id: str, done: asyncio.Task[SandboxRecord]) -> None:
        del self._moves[sandbox_id]
        if not done.cancelled():
            done.exception()  # seen here, in case that all who waited have hung up

    async def after_others(self, owner: Owner, sandbox_id: str, kind: str, wait_sec: float) -> SandboxRecord:
        """The record once no move of another kind is under way here: it may be done, and its pod still be ending."""
        give_up = time.monotonic() + wait_sec
        while True:
            moving = self._moves.get(sandbox_id)
            record = await self.fresh(owner, sandbox_id)
            if self._moves.get(sandbox_id) is not moving:
                continue  # begun or done meanwhile: the record may be of before
            if moving is None or moving.get_name() == f"sandbox-{kind}" or record.state in UNDER_WAY:
                return record
            if (left := give_up - time.monotonic()) <= 0:
                raise under_way(record)
            await asyncio.wait([moving], timeout=left)

    def progressing(self, sandbox_id: str) -> _Progressing:
        """While it is entered, `progress` tells what it is told."""
        return _Progressing(self._progress, sandbox_id)

    async def close(self) -> None:
        """Breaks off what is under way; each goes back to where it was."""
        for moving in list(self._moves.values()):
            moving.cancel()
        while self._moves:
            await asyncio.wait(list(self._moves.values()))


class _Progressing:
    def __init__(self, kept: dict[str, Progress], sandbox_id: str) -> None:
        self._kept, self._id = kept, sandbox_id

    def __enter__(self) -> Note:
        self._kept[self._id] = Progress(0, None)
        return self._note

    def __exit__(self, *_: object) -> None:
        self._kept.pop(self._id, None)

    def _note(self, done: int, total: int | None) -> None:
        self._kept[self._id] = Progress(done, total)


async def within(moving: asyncio.Task[T], wait_sec: float) -> T | None:
    """The task's result, or None where it takes longer; it goes on then."""
    await asyncio.wait([moving], timeout=max(0.0, wait_sec))
    if not moving.done():
        return None
    if moving.cancelled():
        raise SandboxStopped("that was broken off: the sandbox is being ended, or the manager is", state="stopping")
    return moving.result()


def under_way(record: SandboxRecord) -> SandboxStarting:
    return SandboxStarting("another change of the sandbox is under way; try again shortly", state=str(record.state))


def refuse_destroyed(record: SandboxRecord) -> None:
    if record.state is _S.DESTROYED:
        raise SandboxGone(
            f"the sandbox was ended for good ({record.reason})", reason=record.reason, at=when(record.since)
        )


def refuse_expired(record: SandboxRecord) -> None:
    """Its time is over, and nobody has come to end it yet."""
    if record.expires_at <= time.time():
        raise SandboxGone("the sandbox's time is over", reason="expired", at=when(record.expires_at))


def failed(record: SandboxRecord) -> SandboxGone:
    return SandboxGone(
        f"the sandbox's pod is gone ({record.reason}); start it to go on from what was kept last",
        reason=record.reason if record.reason in _POD_ENDS else "lost",
        at=when(record.since),
    )
