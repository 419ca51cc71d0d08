"""Many claims through managers that are killed, with answers of the API server lost on the way.

SOJOURN_MANY_CLAIMS=10000 makes it as long as it is meant to be (a quarter of an hour on two cores), with managers that
wait for what may be dead as long as they always do."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from manager.model import LABEL_TASK, task_label
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.claimer import HASTY
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.fault_proxy import fault_proxy
from tests.support.cluster.node_agent import OpenAgent
from tests.support.cluster.waiting import until_async
from tests.support.world import ACME

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = int(os.environ.get("SOJOURN_MANY_CLAIMS", "50"))
HASTE = [HASTY] if CLAIMS < 1000 else []
KILL_EVERY = max(20, CLAIMS // 100)  # claims
MANAGERS = 2
AT_ONCE = 16
LIVE = 30  # tasks that are kept before the oldest is retired
ORPHAN_SEC = 60.0
LOOK_SEC = 1.0
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


@contextmanager
def at_work(busy: Counter[str], task: str) -> Iterator[None]:
    busy[task] += 1
    try:
        yield
    finally:
        busy[task] -= 1


@asynccontextmanager
async def claimer(kubeconfig: Path, namespace: str, redis_url: str) -> AsyncIterator[Claimer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.cluster.claimer", str(kubeconfig), namespace, redis_url,
        f"m{secrets.token_hex(4)}", *HASTE, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
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


class Orphans:
    """Claimed pods that are no task's: each is given a minute to go."""

    def __init__(self, api: KubeApi, pods: str) -> None:
        self._api, self._pods = api, pods
        self.pod_of: dict[str, str] = {}  # of each task that has one
        self.busy: Counter[str] = Counter()  # tasks that are being claimed or retired just now
        self._since: dict[str, float] = {}  # by pod
        self.worst_sec = 0.0

    async def look_forever(self) -> None:
        """Raises AssertionError at the first that stays."""
        while True:
            await asyncio.sleep(LOOK_SEC)
            await self.look()

    async def look(self) -> int:
        """How many there are."""
        found = await self._api.list(self._pods, labelSelector="sojourn/state=claimed")
        now = asyncio.get_running_loop().time()
        whose = {task_label(ACME, task): pod for task, pod in self.pod_of.items()}
        busy = {task_label(ACME, task) for task in +self.busy}
        nobodys = {
            meta["name"]
            for meta in (pod["metadata"] for pod in found)
            if "deletionTimestamp" not in meta
            and meta["labels"][LABEL_TASK] not in busy
            and whose.get(meta["labels"][LABEL_TASK]) != meta["name"]
        }
        self._since = {name: self._since.get(name, now) for name in nobodys}
        ages = {name: now - since for name, since in self._since.items()}
        self.worst_sec = max(self.worst_sec, *ages.values(), 0.0)
        assert not {name for name, age in ages.items() if age > ORPHAN_SEC}, ages
        return len(nobodys)


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
    orphans = Orphans(admin, pods)
    pod_of, busy = orphans.pod_of, orphans.busy
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
                with at_work(busy, task):
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
                    with at_work(busy, oldest):
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

        async with asyncio.TaskGroup() as beside:
            killing = beside.create_task(kill_now_and_then(), name="kills")
            looking = beside.create_task(orphans.look_forever(), name="orphans")
            async with asyncio.TaskGroup() as work:
                for number in range(CLAIMS):
                    work.create_task(claim(number), name=f"claim-{number}")
            killing.cancel()
            looking.cancel()
        lost.stop()
        assert kills >= 1

        async def settled() -> bool:
            found = await admin.list(pods, labelSelector="sojourn/state=claimed")
            carried = [pod["metadata"]["labels"][LABEL_TASK] for pod in found]
            return not await orphans.look() and sorted(carried) == sorted(task_label(ACME, task) for task in pod_of)

        await until_async(settled, "each task has one pod, and no pod is nobody's", 2 * ORPHAN_SEC)
        sys.stdout.write(f"{CLAIMS} claims, {kills} kills, a pod was nobody's for {orphans.worst_sec:.0f} s at most\n")
        for task, pod in pod_of.items():
            assert await ask(f"ensure {task}") == pod
            labels = (await admin.get(f"{pods}/{pod}"))["metadata"]["labels"]
            assert labels[LABEL_TASK] == task_label(ACME, task)
        await asyncio.gather(*(ask(f"retire {task}") for task in pod_of))
