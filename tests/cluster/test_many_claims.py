"""Many claims through managers that are killed, with answers of the API server lost on the way.

SOJOURN_MANY_CLAIMS=10000 makes it as long as it is meant to be (most of an hour on two cores)."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from manager.model import LABEL_TASK, task_label
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.claimer import CLAIM_SEC
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.fault_proxy import fault_proxy
from tests.support.cluster.node_agent import OpenAgent
from tests.support.cluster.waiting import until_async
from tests.support.world import ACME

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = int(os.environ.get("SOJOURN_MANY_CLAIMS", "50"))
KILL_EVERY = max(20, CLAIMS // 100)  # claims
MANAGERS = 2
AT_ONCE = 16
LIVE = 30  # tasks that are kept before the oldest is retired
ORPHAN_SEC = 120.0  # sixty, and as much for a machine that is busy
STUCK_SEC = 120.0


class Claimer:
    """One manager process, and what it was asked and has not answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.asked: dict[str, list[asyncio.Future[str]]] = defaultdict(list)
        self.reading = asyncio.create_task(self._read(), name="claimer-answers")

    async def ask(self, line: str) -> str:
        """What is answered after the line. Raises ConnectionError where the process ends before."""
        if self.process.returncode is not None or self.reading.done():
            raise ConnectionError
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.asked[line].append(answer)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        return await answer

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while raw := await self.process.stdout.readline():
            words = raw.decode().split()
            for answer in self.asked.pop(" ".join(words[:2]), []):
                if not answer.done():
                    answer.set_result(" ".join(words[2:]))
        for waiting in self.asked.values():
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(ConnectionError())

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self.reading


@asynccontextmanager
async def claimer(kubeconfig: Path, namespace: str, redis_url: str) -> AsyncIterator[Claimer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.cluster.claimer", str(kubeconfig), namespace, redis_url,
        f"m{secrets.token_hex(4)}", cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    made: Claimer | None = None
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        made = Claimer(process)
        yield made
    finally:
        if made is not None:
            await made.kill()
        elif process.returncode is None:
            process.kill()
            await process.wait()
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.timeout(600 + CLAIMS)
async def test_managers_that_are_killed_and_answers_that_are_lost_leave_nothing_shared_and_nothing_behind(
    open_agent: OpenAgent, own_plane: ControlPlane, manager_account: Account, admin: KubeApi, valkey_url: str
) -> None:
    """F5, F18, F28: no pod ever serves two tasks, no task has two pods, and what a dead manager began is cleared up."""
    agent = await open_agent(processes=False)
    await agent.add_node()
    chance = random.Random(11)
    run = secrets.token_hex(4)  # the store is shared with other tests
    pods = f"/api/v1/namespaces/{manager_account.namespace}/pods"
    pod_of: dict[str, str] = {}
    task_of: dict[str, str] = {}
    live: list[str] = []
    claimed = 0
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(fault_proxy(own_plane, seed=11))
        kubeconfig = proxy.kubeconfig(manager_account)
        lost = proxy.lose_answer(lambda call: call.method != "GET" and not call.is_watch, times=None, chance=0.01)

        async def start() -> Claimer:
            return await stack.enter_async_context(claimer(kubeconfig, manager_account.namespace, valkey_url))

        managers = [await start() for _ in range(MANAGERS)]
        room = asyncio.Semaphore(AT_ONCE)

        async def ask(line: str) -> str:
            """By any manager; by another where that one is killed over it."""
            while True:
                try:
                    async with asyncio.timeout(STUCK_SEC):
                        return await chance.choice(managers).ask(line)
                except ConnectionError:
                    await asyncio.sleep(0.1)

        async def claim(number: int) -> None:
            nonlocal claimed
            task = f"{run}-{number}"
            async with room:
                answers = await asyncio.gather(*(ask(f"ensure {task}") for _ in range(chance.choice((1, 1, 2)))))
                assert len(set(answers)) == 1, "a task was given two pods"
                (pod,) = set(answers)
                assert task_of.setdefault(pod, task) == task, "a pod was given to two tasks"
                pod_of[task] = pod
                live.append(task)
                claimed += 1
                if len(live) > LIVE:
                    oldest = live.pop(0)
                    assert await ask(f"ensure {oldest}") == pod_of[oldest], "a task has another pod than it had"
                    await ask(f"retire {oldest}")
                    del pod_of[oldest]

        kills = 0

        async def kill_now_and_then() -> None:
            nonlocal kills
            at = KILL_EVERY
            while True:
                while claimed < at:
                    await asyncio.sleep(0.02)
                at += KILL_EVERY
                victim = chance.randrange(MANAGERS)
                await managers[victim].kill()
                kills += 1
                managers[victim] = await start()

        killing = asyncio.create_task(kill_now_and_then(), name="kills")
        try:
            async with asyncio.TaskGroup() as work:
                for number in range(CLAIMS):
                    work.create_task(claim(number), name=f"claim-{number}")
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        lost.stop()
        assert kills >= 1

        async def settled() -> bool:
            found = await admin.list(pods, labelSelector="sojourn/state=claimed")
            carried = [pod["metadata"]["labels"][LABEL_TASK] for pod in found]
            return sorted(carried) == sorted(task_label(ACME, task) for task in pod_of)

        await until_async(settled, "each task has one pod, and no pod is nobody's", CLAIM_SEC + ORPHAN_SEC)
        for task, pod in pod_of.items():
            assert await ask(f"ensure {task}") == pod
            labels = (await admin.get(f"{pods}/{pod}"))["metadata"]["labels"]
            assert labels[LABEL_TASK] == task_label(ACME, task)
        await asyncio.gather(*(ask(f"retire {task}") for task in pod_of))
