"""Where API keys are kept: object storage, which is the truth; Redis, which every lookup asks first.

Redis holds a copy without an end, so that no request waits for object storage and an outage there stops nobody. What
keeps a revoked key from living on in it: a revocation writes a mark over the copy before it is acknowledged, a copy is
never written over a mark, and each manager compares what it uses with the truth from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from manager.errors import StoreUnavailable
from manager.model import Owner
from manager.store.base import KeyRecord, Store
from manager.store.objects import Objects
from manager.store.records import Records

log = logging.getLogger(__name__)

COMPARE_SEC: Final = 60.0  # between two comparisons of one key's copy with the truth, by one manager
_COMPARED_MAX: Final = 10_000
_AT_ONCE: Final = 16  # lookups in object storage for keys that Redis does not know: made-up ones, mostly
_PAGE: Final = 200


class _NoCache:
    """manager.store.base.Cache: keys have a copy of their own."""

    async def cache_get(self, keys: Sequence[str]) -> Sequence[str | None]:
        return [None] * len(keys)

    async def cache_put(self, key: str, text: str, ttl_sec: float, *, only_absent: bool = False) -> None:
        return

    async def cache_drop(self, key: str) -> None:
        return


class KeyRing:
    def __init__(self, store: Store, objects: Objects, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        # Each key lies there twice: under its id, for lookups, and under its owner, for lists.
        self._records = Records(objects, _NoCache(), "keys", KeyRecord)
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._compared: OrderedDict[str, float] = OrderedDict()
        self._comparing: set[asyncio.Task[None]] = set()

    async def add(self, record: KeyRecord) -> None:
        """Durable when this returns. Raises StoreUnavailable: then it may be there, and nobody has its text."""
        await self._records.create(_owner(record), record.key_id, record)
        await self._records.create(None, record.key_id, record)
        await self._store.cache_key(record)
        self._note(record.key_id)

    async def get(self, key_id: str) -> KeyRecord | None:
        """The key as it is valid now; at most a moment behind. Raises StoreUnavailable."""
        copy = await self._store.cached_key(key_id)
        if copy == "revoked":
            return None
        if copy is None:
            return await self._from_truth(key_id)
        if self._monotonic() - self._compared.get(key_id, -COMPARE_SEC) >= COMPARE_SEC:
            self._note(key_id)
            comparing = asyncio.create_task(self._compare(key_id), name="api-key-compare")
            self._comparing.add(comparing)
            comparing.add_done_callback(self._comparing.discard)
        return copy

    async def remove(
        self, owner: Owner, key_id: str, may: Callable[[KeyRecord], bool] = lambda record: True
    ) -> KeyRecord | None:
        """The key as it was; None where the owner has none that `may` be removed. Refused everywhere when this returns.

        What another owner has is looked for no more than what nobody has. Raises StoreUnavailable: then it is to be
        repeated."""
        found = await self._records.get(owner, key_id)
        if found is None or not may(found.value):
            return None
        await self._records.delete(None, key_id)
        await self._store.mark_key_revoked(key_id)
        await self._records.delete(owner, key_id)
        return found.value

    async def of(self, owner: Owner) -> list[KeyRecord]:
        """The owner's, oldest first."""
        found: list[KeyRecord] = []
        after = ""
        while page := await self._records.page(owner, after=after, limit=_PAGE):
            found += [record.value for record in page]
            after = page[-1].id
            if len(page) < _PAGE:
                break
        return sorted(found, key=lambda record: (record.created_at, record.key_id))

    async def every(self) -> list[KeyRecord]:
        """Everybody's, oldest first."""
        found = [record.value async for record in self._records.every() if record.owner is None]
        return sorted(found, key=lambda record: (record.created_at, record.key_id))

    async def find(self, key_id: str) -> KeyRecord | None:
        """The truth about the key, whosever it is."""
        found = await self._records.get(None, key_id)
        return None if found is None else found.value

    async def close(self) -> None:
        for comparing in list(self._comparing):
            comparing.cancel()
        if self._comparing:
            await asyncio.wait(self._comparing)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _from_truth(self, key_id: str) -> KeyRecord | None:
        async with self._at_once:
            found = await self.find(key_id)
            if found is None:
                return None
            await self._store.cache_key(found)
            # Whoever revoked it between the look and the copy wrote the mark before the copy or took the truth away
            # before this second look.
            if await self.find(key_id) is None:
                await self._store.mark_key_revoked(key_id)
                return None
        self._note(key_id)
        return found

    async def _compare(self, key_id: str) -> None:
        """A revocation that Redis lost, with its last second or with who revoked, takes effect now."""
        try:
            if await self.find(key_id) is None:
                log.warning("revoked_key_was_still_there", extra={"key": key_id})
                await self._store.mark_key_revoked(key_id)
        except StoreUnavailable:
            self._compared.pop(key_id, None)

    def _note(self, key_id: str) -> None:
        self._compared[key_id] = self._monotonic()
        self._compared.move_to_end(key_id)
        while len(self._compared) > _COMPARED_MAX:
            self._compared.popitem(last=False)


def _owner(record: KeyRecord) -> Owner:
    return Owner(record.tenant, record.project)
