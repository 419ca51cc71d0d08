"""Work that must not be done twice carries a short lease of its own, so that its manager's death is seen soon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from manager.errors import StoreUnavailable
from manager.model import Binding
from manager.store.base import Store

log = logging.getLogger(__name__)

CLAIM_SEC: Final = 15.0  # without a renewal, after which whoever makes or closes a sandbox counts as dead
_RENEWALS: Final = 5  # in each
_RETRY_SEC: Final = 1.0  # after one that had no answer


class Renewing:
    """Keeps a claim, or the closing of `closer`, from going stale while it is entered."""

    def __init__(self, store: Store, binding: Binding, claim_sec: float, closer: str = "") -> None:
        self.lost = False  # another has taken it over, or ended it
        self._store, self._binding, self._claim_sec, self._closer = store, binding, claim_sec, closer
        self._worker: asyncio.Task[object] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._renewing = asyncio.create_task(self._renew(), name=f"renewing-{self._binding.sandbox_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, why: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._renewing is not None
        self._renewing.cancel()

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """What runs in it ends with StoreUnavailable as soon as it is another's to do."""
        worker = asyncio.current_task()
        assert worker is not None
        if self.lost:
            raise _taken_over()
        self._worker = worker
        try:
            yield
        except asyncio.CancelledError:
            if self.lost and worker.uncancel() == 0:
                raise _taken_over() from None
            raise
        finally:
            self._worker = None

    async def confirm(self) -> None:
        """Raises StoreUnavailable where it is another's by now, or cannot be said."""
        if not await self._store.renew_claim(self._binding, self._claim_sec, self._closer):
            self.lost = True
            raise _taken_over()

    async def _renew(self) -> None:
        pause = self._claim_sec / _RENEWALS
        while True:
            await asyncio.sleep(pause)
            try:
                if await self._store.renew_claim(self._binding, self._claim_sec, self._closer):
                    pause = self._claim_sec / _RENEWALS
                    continue
            except StoreUnavailable as why:
                log.warning("claim_not_renewed", extra={"sandbox": self._binding.sandbox_id, "why": why.message})
                pause = min(_RETRY_SEC, self._claim_sec / _RENEWALS)
                continue
            self.lost = True
            if self._worker is not None:
                self._worker.cancel()
            return


def _taken_over() -> StoreUnavailable:
    return StoreUnavailable("this manager was silent for too long, and another goes on with the sandbox; try again")
