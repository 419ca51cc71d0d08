"""What commands need: opened at the start, in order, and closed in reverse. All other services are the application's
(`executor.app`), which is opened when it is first called for (`executor.mount`)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from executor import isolation, kernel
from executor.cgroup import CgroupCounters
from executor.config import ExecutorConfig
from executor.isolation import Users
from executor.leaves import open_leaves
from executor.reaper import Reaper
from executor.spawn import Spawner
from executor.threads import started_pool

if TYPE_CHECKING:
    from executor.connections import Connections
    from executor.guard import Guard
    from executor.lease import Lease
    from executor.processes import Processes

log = logging.getLogger("executor")

THREADS: Final = 4


class Core:
    """What lives from the executor's start to its end."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        self.users: Users
        self.spawner: Spawner
        self.processes: Processes
        self.lease: Lease
        self.guard: Guard
        self.connections: Connections


def open_core(stack: AsyncExitStack, config: ExecutorConfig, env: dict[str, str], ended: Callable[[str], None]) -> Core:
    """`ended` is told why the pod must end itself. Commands can run once `spawner.ready()` has returned. Raises
    BadConfig, OSError."""
    core = Core(config)
    core.users = users = Users(config)
    nofile = kernel.raise_open_files()
    workers = started_pool(THREADS, "worker")
    stack.callback(workers.shutdown, wait=False, cancel_futures=True)
    asyncio.get_running_loop().set_default_executor(workers)
    _prepare_workspace(config, users)
    for lacking in isolation.protect_executor():
        log.warning("protection_missing", extra={"what": lacking})
    reaper = Reaper()
    reaper.start()
    stack.callback(reaper.close)
    leaves = open_leaves() if users.tier == "split" else None
    core.spawner = spawner = Spawner(
        reaper, users.default, helpers=config.helpers, umask=config.umask, nofile=nofile,
        cgroup_files=leaves.helper_files() if leaves is not None else (),
    )  # fmt: skip
    stack.push_async_callback(spawner.close)
    spawner.begin(lambda: workers.submit(leaves.enter) if leaves is not None else None)
    # Imported while the helper starts, on another core
    from executor.connections import Connections
    from executor.guard import Guard
    from executor.lease import Lease
    from executor.processes import Processes

    core.lease = lease = Lease(config, lambda: core.processes.running, ended)
    stack.callback(lease.close)
    counters = CgroupCounters()
    core.processes = processes = Processes(
        config, users, spawner, leaves.counters(counters) if leaves is not None else counters, env,
        changed=lease.worked, leaves=leaves,
    )  # fmt: skip
    stack.callback(processes.close)
    core.guard = Guard(config, core.lease)
    core.connections = Connections(
        processes.loop, most=config.max_connections, most_of_one=config.max_connections_of_one,
        reader_sec=config.reader_sec,        last_descriptor=spawner.last_descriptor,
    )  # fmt: skip
    return core


def _prepare_workspace(config: ExecutorConfig, users: Users) -> None:
    path = config.workspace
    try:
        os.makedirs(path, exist_ok=True)
        if os.geteuid() == 0 and os.stat(path).st_uid != users.default.uid:
            os.chown(path, users.default.uid, users.default.gid)
    except OSError as why:  # a command then says so, with 400 invalid_cwd; the rest of the pod is of use
        log.error("workspace_unusable", extra={"path": path, "errno": why.errno})
