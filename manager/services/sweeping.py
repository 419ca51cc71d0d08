"""Takes away what nobody needs in object storage: half checkpoints of dead managers, and layers that no manifest names.

References are never counted, so no crash can make a count wrong: each look marks what the manifests of heads and
snapshots name and takes what is left. Two looks a while apart have to agree, since a copy of a manifest may be made
while one of them reads; a copy is verified after it was written, so it cannot hide from both.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec

from manager.errors import ManagerError, StoreUnavailable
from manager.model import Owner, new_id
from manager.services.checkpoints import Checkpoints, SaveMark
from manager.services.manifests import LAYERS, Manifest, save_prefix
from manager.store.objects import Objects, delete_under, owner_prefix
from manager.store.records import RecordChanged, Versioned

log = logging.getLogger(__name__)

LOOK_SEC: Final = 5.0
DEAD_SEC: Final = 20.0  # without a renewal: three are missing
GRACE_SEC: Final = 15.0  # between the two looks that have to agree
COLLECT_SEC: Final = 3600.0  # everybody's layers are looked at so often
_CLOCK: Final = "clock"  # an object whose time of writing is the storage's own
_TRIES: Final = 10


class Sweeper:
    """One manager's. It looks for half checkpoints and at everybody's layers only while `leads` says so; several
    that look at once do no harm."""

    def __init__(
        self,
        objects: Objects,
        checkpoints: Checkpoints,
        leads: Callable[[], Awaitable[bool]],
        *,
        look_sec: float = LOOK_SEC,
        dead_sec: float = DEAD_SEC,
        grace_sec: float = GRACE_SEC,
        collect_sec: float = COLLECT_SEC,
    ) -> None:
        self._objects, self._checkpoints, self._leads = objects, checkpoints, leads
        self._look_sec, self._dead_sec = look_sec, dead_sec
        self._grace_sec, self._collect_sec = grace_sec, collect_sec
        self._unnamed: dict[str, float] = {}  # save prefix -> when a look first found nobody naming it; monotonic
        self._due: dict[str, float] = {}  # owner prefix -> when to look at it; monotonic
        self._marks: dict[str, set[str]] = {}  # owner prefix -> ids of the marks that go once it was looked at
        self._everybody_at = time.monotonic() + grace_sec
        self.swept = 0  # half checkpoints
        self.collected = 0  # layers

    async def sweep_forever(self) -> None:
        """An outage of object storage only pauses it."""
        while True:
            await asyncio.sleep(self._look_sec * random.uniform(0.8, 1.2))
            try:
                if await self._leads():
                    await self.sweep_saves()
                    if time.monotonic() >= self._everybody_at:
                        await self.collect_everybody()
                        self._everybody_at = time.monotonic() + self._collect_sec
                await self.collect_due()
            except ManagerError as why:
                log.warning("sweeper_paused", extra={"why": why.message})

    # ── half checkpoints ────────────────────────────────────────────────────────────────────────────────────────

    async def sweep_saves(self) -> None:
        """Takes away what checkpoints have left whose mark was not renewed. Raises StoreUnavailable."""
        for mark in await self._checkpoints.marks.unwritten_since(None, await self._now() - self._dead_sec):
            await self._take(mark)

    async def _take(self, mark: Versioned[SaveMark]) -> None:
        marks, value = self._checkpoints.marks, mark.value
        if not value.dead:
            try:
                mark = await marks.replace(mark, msgspec.structs.replace(value, dead=True))
            except RecordChanged:
                return  # it lives
        head = await self._fenced(value)
        if head is not None and head.number == value.number:
            # No checkpoint was committed since this one began, and from now on this one cannot be: nobody names it.
            await delete_under(self._objects, save_prefix(value.owner, value.workspace, mark.id))
            self.swept += 1
            log.info("half_checkpoint_swept", extra={"workspace": value.workspace})
            await marks.delete(None, mark.id)
        else:  # what was committed stays, and what it has superseded goes: the mark with it
            self._look_at(value.owner, {mark.id})

    def _look_at(self, owner: Owner, marks: set[str]) -> None:
        known = self._marks.setdefault(under := owner_prefix(owner), set())
        if not marks <= known:
            known |= marks
            self._due[under] = time.monotonic()

    async def _fenced(self, mark: SaveMark) -> Manifest | None:
        """The workspace's head, written anew: a checkpoint that read it before cannot replace it any more."""
        heads = self._checkpoints.heads
        for _ in range(_TRIES):
            found = await heads.get(mark.owner, mark.workspace, fresh=True)
            if found is None or found.value.number != mark.number:
                return None if found is None else found.value
            with suppress(RecordChanged):
                return (await heads.replace(found, found.value)).value
        raise StoreUnavailable("a workspace changes all the time; its half checkpoint is swept later")

    async def _now(self) -> float:
        await self._objects.put(_CLOCK, new_id().encode())
        found = await self._objects.head(_CLOCK)
        if found is None:
            raise StoreUnavailable("object storage lost what was just written")
        return found.modified_at

    # ── layers that nobody names ────────────────────────────────────────────────────────────────────────────────

    async def collect_due(self) -> None:
        """Looks at the owners of whom something was deleted or replaced here. Raises StoreUnavailable."""
        now = time.monotonic()
        while self._checkpoints.dirty:
            self._look_at(*self._checkpoints.dirty.popitem())
        for under in [under for under, at in self._due.items() if at <= now]:
            await self._collect(under)

    async def collect_everybody(self) -> None:
        """Ends snapshots whose time has come, and looks at every owner who has layers. Raises StoreUnavailable."""
        async for found in self._checkpoints.snapshots.every():
            if found.owner is not None and found.value.keep_until is not None and found.value.keep_until < time.time():
                await self._checkpoints.delete_snapshot(found.owner, found.id)
        after = LAYERS
        while (under := await self._next_owner(after)) is not None:
            await self._collect(under)
            after = f"{LAYERS}{under[:-1]}0"  # "0" comes right after "/"

    async def _next_owner(self, after: str) -> str | None:
        """The `owner_prefix` of the first layer after that key."""
        async for page in self._objects.list(LAYERS, after):
            for info in page:
                tenant, project, *_ = info.key.removeprefix(LAYERS).split("/")
                return f"{tenant}/{project}/"
        return None

    async def _collect(self, under: str) -> None:
        """One look at one owner. The order matters: whatever is being made is listed before who may name it is read."""
        present: set[str] = set()
        async for page in self._objects.list(LAYERS + under):
            present |= {info.key.rpartition("/")[0] + "/" for info in page}
        named = {
            save_prefix(mark.value.owner, mark.value.workspace, mark.id)
            async for mark in self._checkpoints.marks.every()
            if not mark.value.dead
        }
        async for head in self._checkpoints.heads.every(under):
            named |= head.value.prefixes
        async for snapshot in self._checkpoints.snapshots.every(under):
            named |= snapshot.value.manifest.prefixes
        now = time.monotonic()
        for prefix in [prefix for prefix in self._unnamed if prefix.startswith(LAYERS + under)]:
            if prefix not in present or prefix in named:
                del self._unnamed[prefix]
        again = False
        for prefix in present - named:
            if now - self._unnamed.setdefault(prefix, now) >= self._grace_sec:
                await delete_under(self._objects, prefix)
                del self._unnamed[prefix]
                self.collected += 1
            else:
                again = True
        if again:
            self._due[under] = now + self._grace_sec
        else:
            self._due.pop(under, None)
            for mark_id in list(self._marks.get(under, ())):
                await self._checkpoints.marks.delete(None, mark_id)
                self._marks[under].discard(mark_id)
            self._marks.pop(under, None)
