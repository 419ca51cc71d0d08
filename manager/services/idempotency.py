"""Commands that are asked for twice and run once.

An idempotency key becomes the process id, so the executor itself joins the second call to the first. The store's mark
adds what an executor cannot know: that the key was used in a pod that has ended, or so long ago that the outcome is
kept no longer.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from typing import Final

import msgspec

from executor.wire import ExecRequest
from manager.errors import IdempotencyMismatch, InvalidRequest, OutcomeUnknown
from manager.model import Owner, new_id
from manager.services.sandboxes import Bound
from manager.store.base import IdempotencyMark, Store

KEEP_SEC: Final = 86_400.0
OUTCOME_KEPT_SEC: Final = 3000.0  # an executor keeps outcomes an hour; ten minutes for slow clocks
MAX_KEY: Final = 255
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


class Once:
    """One call under an idempotency key, or without one (then every step is free).

    `prepare` before the command is sent, `settle` before its answer is given: where the pod is the task's first and
    young, the mark is made while the command runs."""

    def __init__(
        self, store: Store, owner: Owner, task_id: str, key: str | None, kind: str, request: ExecRequest
    ) -> None:
        self._store = store
        self._owner = owner
        self._task_id = task_id
        self._key_id = process_id(owner, task_id, key) if key is not None else None
        self._fingerprint = fingerprint(kind, request) if key is not None else ""
        self._marking: asyncio.Task[IdempotencyMark] | None = None
        self._never_ran = False  # the mark is this call's own, and names a pod that never got the command
        if request.id is None:
            request = msgspec.structs.replace(request, id=self._key_id or new_id())
        self.request = request

    async def prepare(self, bound: Bound) -> None:
        """Raises OutcomeUnknown where the key's command is, or was, in another pod, and IdempotencyMismatch."""
        if self._key_id is None or self._never_ran:
            return
        # A task of its own: a caller that hangs up does not keep the mark from being made.
        self._marking = asyncio.get_running_loop().create_task(self._mark(bound), name="idempotency-mark")
        self._marking.add_done_callback(_looked_at)
        age_sec = time.time() - bound.binding.created_at
        if bound.binding.generation != 1 or not -60 < age_sec < OUTCOME_KEPT_SEC:
            await self.settle(bound)

    async def settle(self, bound: Bound) -> None:
        """Raises OutcomeUnknown, IdempotencyMismatch, and StoreUnavailable where the mark could not be made: the
        outcome then waits under its id, and the same call again joins it."""
        if self._marking is None or self._never_ran:
            return
        mark = await asyncio.shield(self._marking)
        if mark.fingerprint != self._fingerprint:
            raise IdempotencyMismatch("this idempotency key was used with another request; give a new one a new key")
        pod, _, at = mark.pod.partition(" ")
        if pod != bound.binding.pod:
            raise self._unknown("ran in a pod that has ended")
        if not mark.fresh and time.time() - float(at or 0) > OUTCOME_KEPT_SEC:
            raise self._unknown("ran so long ago that its outcome is kept no longer")

    async def not_sent(self) -> None:
        """The pod ended before it got the command: another may run it, if no other call of the key came before."""
        if self._marking is not None and (await asyncio.shield(self._marking)).fresh:
            self._never_ran = True

    def _unknown(self, what: str) -> OutcomeUnknown:
        return OutcomeUnknown(f"the command of this idempotency key {what}; it is not run again", id=self.request.id)

    async def _mark(self, bound: Bound) -> IdempotencyMark:
        used = f"{bound.binding.pod} {time.time():.0f}"
        return await self._store.mark(self._owner, self._task_id, self._key_id or "", self._fingerprint, used, KEEP_SEC)


def _looked_at(marking: asyncio.Task[IdempotencyMark]) -> None:
    if not marking.cancelled():
        marking.exception()
