"""Commands of tasks, by a manager's services on the tests' cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from executor.wire import ExecRequest
from manager.errors import ManagerError
from manager.model import Binding, BindingState
from manager.providers.base import PodEvent
from manager.services.core import Services
from manager.services.tasks import TaskExecAnswer
from tests.support.world import ACME, principal

WAIT_SEC: Final = 60.0


async def running_in(services: Services, running: asyncio.Task[TaskExecAnswer]) -> Binding:
    """The sandbox of the task `t` once its executor says that a command runs."""
    async with asyncio.timeout(WAIT_SEC):
        while True:
            assert not running.done(), running.result()
            found = await services.sandboxes.find(ACME, "t")
            if found is not None and found.state is BindingState.BOUND:
                with contextlib.suppress(ManagerError):
                    if (await services.client.lease(services.sandboxes.bound_of(found).pod)).running:
                        return found
            await asyncio.sleep(0.05)


async def run(services: Services, task_id: str, command: str) -> TaskExecAnswer:
    return await services.tasks.exec(principal(ACME), task_id, ExecRequest(command=command))


async def ended(services: Services) -> Binding:
    """The sandbox of the task `t` once its end is on record: the node's word may come after the container's end."""
    async with asyncio.timeout(WAIT_SEC):
        while (found := await services.sandboxes.find(ACME, "t")) is None or found.state is not BindingState.ENDED:
            await asyncio.sleep(0.05)
    return found


def ends_told(services: Services) -> dict[str, float]:
    """When (monotonic) the watch tells of the end of which pod, from now on."""
    told: dict[str, float] = {}

    def noted(event: PodEvent) -> None:
        if event.gone:
            told.setdefault(event.pod.name, time.monotonic())

    services.watches["here"].listen(noted)
    return told
