"""Runs the executor: opens its parts, listens, and on the way out ends commands first and listening last."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import stat
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from executor.config import ExecutorConfig
from executor.core import open_core

if TYPE_CHECKING:
    from executor.front import Front

log = logging.getLogger("executor")

BACKLOG: Final = 4096
# What a command leaves is an outcome, kept for an hour, and hardly ever a cycle: Python's usual 700, 10, 10 spend
# a seventh of the work for a command on looking.
LOOK_FOR_GARBAGE: Final = (10_000, 20, 20)
TERMINATED: Final = 128 + signal.SIGTERM


async def serve(config: ExecutorConfig, env: dict[str, str], stop: asyncio.Event) -> int:
    """Until `stop` or until the lease is over. The process's exit code: 0 where the lease was over, TERMINATED where it
    was asked to end: a kubelet that evicts a pod says so only where its container fails. Raises BadConfig, OSError."""
    why: list[str] = []

    def ended(reason: str) -> None:
        why.append(reason)
        stop.set()

    async with AsyncExitStack() as stack:
        core = open_core(stack, config, env, ended)
        from executor.front import Front  # while the core's helper starts, on another core
        from executor.mount import Mount

        mount = Mount(core)
        stack.push_async_callback(mount.close)
        front = Front(core.processes, core.lease, core.guard, mount, core.connections)
        await core.spawner.ready()
        server, where = await _listen(config, front)
        stack.callback(front.close)
        stack.callback(server.close)
        if config.socket is not None:
            stack.callback(_remove_stale, config.socket)

        async def drain() -> None:
            await asyncio.gather(core.processes.drain(config.drain_sec), mount.drain(config.drain_sec))

        # Commands are drained while their streams can still be answered, so before the application is closed.
        stack.push_async_callback(drain)
        gc.freeze()  # what is here now stays to the end, and is no garbage
        gc.set_threshold(*LOOK_FOR_GARBAGE)
        gc.enable()
        log.info("executor_ready", extra={"where": where, "tier": core.users.tier, "pid": os.getpid()})
        await stop.wait()
        log.info("executor_stopping", extra={"why": why[0] if why else "signal"})
    return 0 if why else TERMINATED


async def _listen(config: ExecutorConfig, front: Front) -> tuple[asyncio.Server, str]:
    loop = asyncio.get_running_loop()
    if config.socket is None:
        server = await loop.create_server(front, config.host, config.port, backlog=BACKLOG)
        return server, f"{config.host}:{server.sockets[0].getsockname()[1]}"
    _remove_stale(config.socket)
    before = os.umask(0o177)
    try:
        return await loop.create_unix_server(front, config.socket, backlog=BACKLOG), config.socket
    finally:
        os.umask(before)


def _remove_stale(path: str) -> None:
    with contextlib.suppress(OSError):  # it is not there; under gVisor also one that has been listened on
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
