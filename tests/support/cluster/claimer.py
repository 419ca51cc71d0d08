"""A manager as a process of its own that can be killed at any moment.

`python -m tests.support.cluster.claimer KUBECONFIG NAMESPACE REDIS_URL HOLDER [hasty]`. A hasty one takes what may be
dead for dead sooner than managers do. It has a manager's services and loops over a real API server and a real store.
Its pods have no executors: what would be said to them is taken for said. Each line that it is given, `ensure TASK` or
`retire TASK`, it answers with the line and, for the first, the name of the pod that the task has.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final, NoReturn

import msgspec

from manager.errors import ExecutorUnreachable, ManagerError
from manager.executor_client import pod_token
from manager.providers.kubernetes.client import ClusterClient
from manager.providers.kubernetes.provider import KubernetesProvider
from manager.services import recovery
from manager.services.core import Services
from manager.store.redis import RedisStore
from tests.support.cluster.provider import SMALL
from tests.support.world import ACME, SECRET, running, services_over

POOL = 20
HASTY: Final = "hasty"
_HASTY_CLAIM_SEC: Final = 8.0
_AGAIN_SEC = 0.2


async def main(kubeconfig: str, namespace: str, redis_url: str, holder: str, haste: str = "") -> None:
    client = await ClusterClient.connect(kubeconfig)
    provider = KubernetesProvider("here", client, namespace, lambda pod: pod_token(SECRET, pod))
    store = RedisStore.at(redis_url, call_sec=30.0)
    profile = msgspec.structs.replace(SMALL, pool_min=POOL)
    services = services_over(store, provider, holder, profiles=(profile,), start_limit_sec=_HASTY_CLAIM_SEC / 2)
    if haste == HASTY:
        services.sandboxes.claim_sec = _HASTY_CLAIM_SEC
        recovery.EVERY_SEC, recovery._LEAD_SEC = 2.0, 4.0  # type: ignore[misc]
    for call, answer in (("bind", _agrees), ("push_lease", _agrees), ("lease", _unreachable)):
        setattr(services.client, call, answer)
    try:
        async with running(services), asyncio.TaskGroup() as work:
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            _say("ready")
            while line := await reader.readline():
                work.create_task(_answer(services, line.decode().strip()))
    finally:
        await provider.close()
        await store.close()


async def _answer(services: Services, line: str) -> None:
    verb, _, task = line.partition(" ")
    while True:
        try:
            if verb == "retire":
                await services.sandboxes.retire(ACME, task)
                _say(line)
            else:
                bound = await services.sandboxes.ensure(ACME, task)
                _say(f"{line} {bound.binding.pod}")
            return
        except ManagerError:  # as a caller would try again
            await asyncio.sleep(_AGAIN_SEC)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _agrees(*_arguments: object) -> None:
    return None


async def _unreachable(*_arguments: object) -> NoReturn:
    raise ExecutorUnreachable("there are no executors here")


if __name__ == "__main__":
    os.umask(0o077)
    asyncio.run(main(*sys.argv[1:]))
