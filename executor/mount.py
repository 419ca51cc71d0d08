"""The application for all calls but the plain ones, loaded when the first of them comes or the pod is claimed.

Most of what an executor would import and hold is for calls that many pods never see: aiohttp alone is half of its start
and of its memory. A pod that waits in a pool, or only runs commands, does without. A pod that a manager has claimed
gets it soon after, in the background, so that its first file call does not wait."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from typing import TYPE_CHECKING, Final

from executor.core import Core
from executor.errors import ExecutorError, RateLimited

if TYPE_CHECKING:
    from executor.app import Application

log = logging.getLogger("executor.mount")

CALM_SEC: Final = 0.25  # from the claim: the call that came with it has the processor first
SWITCH_SEC: Final = 0.0005  # the loop waits no longer than this for the importing thread, most of the time


class Mount:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self.application: Application | None = None
        self._loading: asyncio.Task[Application] | None = None
        self._soon: asyncio.TimerHandle | None = None
        core.lease.on_claim = self._load_soon

    def load(self) -> asyncio.Task[Application]:
        """The loading that is under way, or a new one. Many may wait for it; who leaves must not cancel it.

        It fails with RateLimited where the pod has no memory, threads or descriptors left; the next call tries anew."""
        if self._loading is None:
            self._loading = self._loop.create_task(self._load(), name="mount")
            self._loading.add_done_callback(self._loaded)
        return self._loading

    async def _load(self) -> Application:
        try:
            opened = await self._loop.run_in_executor(None, _import_application)
            application: Application = await opened.open_application(self._core)
            self.application = application
        except (ImportError, MemoryError, OSError, RuntimeError) as why:
            log.exception("mount_failed")
            raise RateLimited(
                f"the pod has no memory, threads or descriptors left for this call ({type(why).__name__}); "
                "commands and health checks go on"
            ) from why
        except Exception as why:
            log.exception("mount_failed")
            raise ExecutorError("the executor failed; its log has the details") from why
        return application

    def _loaded(self, done: asyncio.Task[Application]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._loading = None

    def _load_soon(self) -> None:
        if self._loading is None and self._soon is None:
            self._soon = self._loop.call_later(CALM_SEC, self.load)

    async def drain(self, seconds: float) -> None:
        if self.application is not None:
            await self.application.drain(seconds)

    async def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
        loading = self._loading
        if loading is not None and not loading.done():
            await asyncio.wait([loading])  # a thread that imports cannot be stopped, and needs less than a second
        if self.application is not None:
            await self.application.close()


def _import_application():  # type: ignore[no-untyped-def]  # a module
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SEC)
    gc.disable()  # a full look for garbage holds the loop up, and would find none
    try:
        from executor import app
    finally:
        gc.enable()
        gc.freeze()
        sys.setswitchinterval(before)
    return app
