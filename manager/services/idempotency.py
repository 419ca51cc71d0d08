"""Commands that are asked for twice and run once.

An idempotency key becomes the process id, so the executor itself joins the second call to the first. The store's mark
adds what an executor cannot know: that the key was used in a pod that has ended, or so long ago that the outcome is
kept no longer.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import logging
import random
import time
from typing import Final, NamedTuple

import msgspec

from executor.wire import ExecRequest
from manager.errors import IdempotencyMismatch, InvalidRequest, OutcomeUnknown, StoreUnavailable
from manager.model import Owner, new_id
from manager.services.sandboxes import Bound
from manager.store.base import IdempotencyMark, MarkWanted, Store

log = logging.getLogger(__name__)

KEEP_SEC: Final = 86_400.0
OUTCOME_KEPT_SEC: Final = 3000.0  # an executor keeps outcomes an hour; ten minutes for slow clocks
MAX_KEY: Final = 255
FLUSH_SEC: Final = 0.02
MAX_PENDING: Final = 10_000  # marks that wait for a store that is away; beyond it keyed commands wait too
MAX_BATCH: Final = 500
_Place = tuple[Owner, str, str]
_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode


def process_id(owner: Owner, task_id: str, key: str) -> str:
    """The process id that stands for the key in this task: nothing of the key can be read from it.

    Raises InvalidRequest unless the key has 1 to 255 printable characters."""
    if not 1 <= len(key) <= MAX_KEY or not key.isprintable():
        raise InvalidRequest(f"an idempotency key has 1 to {MAX_KEY} printable characters", field="Idempotency-Key")
    digest = hashlib.sha256(b"sojourn-process\0")
    for part in (owner.tenant, owner.project, task_id, key):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return "k" + base64.b32encode(digest.digest()).decode().lower()[:32]


def fingerprint(kind: str, request: ExecRequest) -> str:
    """The same for bodies that ask for the same thing, in whatever order their fields came."""
    return hashlib.sha256(kind.encode() + b"\0" + _ENCODE(msgspec.structs.replace(request, id=None))).hexdigest()


class Pending(NamedTuple):
    made: asyncio.Future[IdempotencyMark]
    first: bool  # no other call here waits for the same mark since earlier: only then is a fresh mark this call's own


class Marks:
    """Makes marks behind the commands' backs, many in one round trip.

    A mark is in the store some 20 ms after its command was sent. What may come between is only that this manager and
    the pod both end in that time: of a manager alone the pod still knows the command, of a pod alone this manager."""

    def __init__(self, store: Store, *, flush_sec: float = FLUSH_SEC, most: int = MAX_PENDING) -> None:
        self._store = store
        self._flush_sec = flush_sec
        self._most = most
        self._pending: dict[_Place, tuple[MarkWanted, asyncio.Future[IdempotencyMark]]] = {}
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def soon(self, wanted: MarkWanted) -> Pending | None:
        """The mark that will be made; None where as many as may wait for the store do so already."""
        place = (wanted.owner, wanted.scope, wanted.key)
        if (known := self._pending.get(place)) is not None:
            same = (known[0].fingerprint, known[0].pod.split()[0]) == (wanted.fingerprint, wanted.pod.split()[0])
            return Pending(known[1], first=False) if same else None
        if len(self._pending) >= self._most:
            return None
        made: asyncio.Future[IdempotencyMark] = asyncio.get_running_loop().create_future()
        self._pending[place] = (wanted, made)
        self._wake.set()
        return Pending(made, first=True)

    async def now(self, wanted: MarkWanted) -> IdempotencyMark:
        """The mark, made before this returns. Raises StoreUnavailable."""
        while (wanted.owner, wanted.scope, wanted.key) in self._pending:
            await self.flush()
        return await self._store.mark(wanted.owner, wanted.scope, wanted.key, wanted.fingerprint, wanted.pod, KEEP_SEC)

    async def flush(self) -> None:
        """Makes the marks that wait. Raises StoreUnavailable, having forgotten none."""
        async with self._writing:
            batch = list(itertools.islice(self._pending.items(), MAX_BATCH))
            if not batch:
                return
            marks = await self._store.mark_many([wanted for _, (wanted, _) in batch], KEEP_SEC)
            for (place, (_, made)), mark in zip(batch, marks, strict=True):
                del self._pending[place]
                if not made.done():
                    made.set_result(mark)

    async def flush_forever(self) -> None:
        failures = 0
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._flush_sec)
            self._wake.clear()
            try:
                while self._pending:
                    await self.flush()
                failures = 0
            except StoreUnavailable as why:
                failures += 1
                self._wake.set()
                log.warning("marks_not_made", extra={"why": why.message, "waiting": len(self._pending)})
                await asyncio.sleep(min(2.0, 0.1 * 2 ** min(failures, 5)) * random.uniform(0.5, 1.5))

    async def close(self) -> None:
        try:
            while self._pending:
                await self.flush()
        except StoreUnavailable as why:
            log.warning("marks_lost", extra={"why": why.message, "lost": len(self._pending)})


class Once:
    """One call under an idempotency key, or without one: then every step is free.

    Where the pod is the task's first, and younger than an executor's memory, no other pod can have run the key's
    command and this one knows whether it did: the command is sent at once and its mark made meanwhile. Everywhere
    else the mark comes first."""

    def __init__(
        self, marks: Marks, owner: Owner, task_id: str, key: str | None, kind: str, request: ExecRequest
    ) -> None:
        self._marks = marks
        self._owner = owner
        self._task_id = task_id
        self._key_id = process_id(owner, task_id, key) if key is not None else None
        self._fingerprint = fingerprint(kind, request) if key is not None else ""
        self._pending: Pending | None = None
        self._fresh = False  # no call of this key came before
        self._never_ran = False  # the mark is this call's own, and names a pod that never got the command
        if request.id is None:
            request = msgspec.structs.replace(request, id=self._key_id or new_id())
        self.request = request

    async def prepare(self, bound: Bound) -> None:
        """Before the command is sent. Raises IdempotencyMismatch, OutcomeUnknown where the key's command is, or was,
        in another pod or too long ago, and StoreUnavailable."""
        if self._key_id is None or self._never_ran:
            return
        used = f"{bound.binding.pod} {time.time():.0f}"
        wanted = MarkWanted(self._owner, self._task_id, self._key_id, self._fingerprint, used)
        age_sec = time.time() - bound.binding.created_at
        if bound.binding.generation == 1 and -60 < age_sec < OUTCOME_KEPT_SEC:
            self._pending = self._marks.soon(wanted)
            if self._pending is not None:
                return
        mark = await self._marks.now(wanted)
        self._fresh = mark.fresh
        if mark.fingerprint != self._fingerprint:
            raise IdempotencyMismatch("this idempotency key was used with another request; give a new one a new key")
        pod, _, at = mark.pod.partition(" ")
        if pod != bound.binding.pod:
            raise self._unknown("ran in a pod that has ended")
        if not mark.fresh and time.time() - float(at or 0) > OUTCOME_KEPT_SEC:
            raise self._unknown("ran so long ago that its outcome is kept no longer")

    async def not_sent(self) -> None:
        """The pod ended before it got the command: another may run it, if no other call of the key came before."""
        if self._key_id is None:
            return
        if self._pending is not None:
            made, first = self._pending
            while not made.done():
                await self._marks.flush()
            self._fresh, self._pending = first and made.result().fresh, None
        self._never_ran = self._fresh

    def _unknown(self, what: str) -> OutcomeUnknown:
        return OutcomeUnknown(f"the command of this idempotency key {what}; it is not run again", id=self.request.id)
