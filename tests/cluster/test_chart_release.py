"""The Helm chart installed: the seed's flow through its Service, an upgrade under commands, restarts under load.

Nodes and Services are played by the tests; control plane, helm, manager, executor and Valkey are the real ones.
SOJOURN_RESTARTS_SEC=300 restarts the managers for as long as F31 asks; without it they are restarted once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sojourn import AsyncClient
from tests.support.cluster.agents import Agents
from tests.support.cluster.api import KubeApi
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.node_agent import OpenAgent
from tests.support.cluster.release import Release, prepared
from tests.support.cluster.waiting import until_async

WAIT = ("--wait", "--timeout", "240s")
RESTARTS_SEC = float(os.environ.get("SOJOURN_RESTARTS_SEC", "1"))
pytestmark = pytest.mark.timeout(1200 + 2 * RESTARTS_SEC)


@pytest.fixture
async def release(
    own_plane: ControlPlane,
    admin: KubeApi,
    open_agent: OpenAgent,
    new_namespace: Callable[[], Awaitable[str]],
    tmp_path: Path,
) -> AsyncIterator[Release]:
    async with prepared(own_plane, admin, open_agent, tmp_path, new_namespace) as made:
        yield made


async def key_of(release: Release) -> str:
    """As `kubectl exec deploy/sandbox-gateway -- sojourn-server keys create` makes it: with a manager's settings."""
    pod = next(iter(await release.pods("manager")))
    manager = release.agent.running(pod["metadata"]["name"])
    assert manager.process is not None
    environ = Path(f"/proc/{manager.process.pid}/environ").read_bytes().decode()
    env = dict(line.split("=", 1) for line in environ.split("\0") if line)
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-m", "manager", "keys", "create", "--tenant", "acme", "--project", "web",
        env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    said, errors = await made.communicate()
    assert made.returncode == 0, errors.decode()
    return said.decode().split()[-1]


class Caller:
    """Somebody's program that has the Service's address and a key."""

    def __init__(self, release: Release, key: str, session: aiohttp.ClientSession) -> None:
        self._url = f"http://{release.gateway.address}/sandbox/task"
        self._session, self._headers = session, {"X-Api-Key": key}

    async def exec(self, task: str, command: str) -> Any:
        async with self._session.post(
            f"{self._url}/{task}/exec", json={"command": command}, headers=self._headers
        ) as answer:
            body = await answer.json()
            assert answer.status == 200, body
            return body

    async def retire(self, task: str) -> int:
        async with self._session.delete(f"{self._url}/{task}", headers=self._headers) as answer:
            return answer.status


async def test_a_release_serves_the_flow_and_is_upgraded_under_running_commands(
    release: Release, admin: KubeApi
) -> None:
    """F31"""
    await asyncio.to_thread(release, "install", *WAIT)
    await release.gateway.some(2)
    key = await key_of(release)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        caller = Caller(release, key, session)

        # The seed's flow: a task's commands land in one place, whichever manager has them, until its end.
        first = await caller.exec("job", "echo kept > note.txt; echo $((6 * 7))")
        assert (first["stdout"], first["exit_code"]) == ("42\n", 0), first
        pod = await admin.get(f"/api/v1/namespaces/{release.jobs}/pods/{first['pod_id']}")
        assert pod["spec"]["runtimeClassName"] == release.values["cluster"]["gvisor_class"]
        assert any("ephemeral" in volume for volume in pod["spec"]["volumes"])
        for _ in range(4):
            async with aiohttp.ClientSession() as other:
                again = await Caller(release, key, other).exec("job", "cat note.txt")
            assert (again["stdout"], again["pod_id"]) == ("kept\n", first["pod_id"])
        assert (await caller.exec("other", "ls"))["stdout"] == ""
        assert await caller.retire("other") == 204

        # An upgrade that replaces both managers, while commands run and new ones come all the time.
        before = {found["metadata"]["name"] for found in await release.pods("manager")}
        secret = f"/api/v1/namespaces/{release.namespace}/secrets/sandbox-runtime"
        held = await admin.get(secret)
        until_told = "touch begun-{}; while [ ! -e stop ]; do sleep 0.1; done; echo whole"
        over, answers = asyncio.Event(), list[str]()

        async def calling(fresh: bool) -> None:
            """Over one connection for as long as it is let, or with a new one each time."""
            while not over.is_set():
                async with aiohttp.ClientSession() as own:
                    answers.append((await Caller(release, key, own).exec("job", "cat note.txt"))["stdout"])
                    while not fresh and not over.is_set():
                        answers.append((await Caller(release, key, own).exec("job", "cat note.txt"))["stdout"])
                        await asyncio.sleep(0.05)
                await asyncio.sleep(0.05)

        changed = {"settings": {"idle_ttl_sec": 1234}}
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(caller.exec("job", until_told.format(number))) for number in range(4)]
            await until_async(lambda: begun(caller), "the commands run")
            for fresh in (True, False, False, False, False):
                group.create_task(calling(fresh))
            await asyncio.to_thread(release, "upgrade", *WAIT, values=changed)
            await until_async(lambda: all_asked_to_end(release, before), "the managers of before are asked to end")
            await caller.exec("job", "touch stop")
            assert [(await command)["stdout"] for command in running] == ["whole\n"] * 4
            await until_async(lambda: only_new(release, before), "the managers of before are gone")
            over.set()
        assert set(answers) == {"kept\n"}
        assert len(answers) > 10

        after = await caller.exec("job", "cat note.txt")
        assert (after["stdout"], after["pod_id"]) == ("kept\n", first["pod_id"])
        assert (await admin.get(secret))["data"] == held["data"]
        assert (await admin.get(secret))["metadata"]["uid"] == held["metadata"]["uid"]
    await asyncio.to_thread(release, "test", "--timeout", "240s")
    await asyncio.to_thread(release, "uninstall", *WAIT)
    assert (await admin.get(secret))["data"] == held["data"]
    assert await admin.find(f"/api/v1/namespaces/{release.jobs}/pods/{first['pod_id']}") is not None


async def begun(caller: Caller) -> bool:
    return str((await caller.exec("job", "ls"))["stdout"]).count("begun") == 4


async def all_asked_to_end(release: Release, before: set[str]) -> bool:
    found = {pod["metadata"]["name"]: pod["metadata"] for pod in await release.pods("manager")}
    return all("deletionTimestamp" in found[name] for name in before & found.keys())


async def only_new(release: Release, before: set[str]) -> bool:
    return not before & {found["metadata"]["name"] for found in await release.pods("manager")}


async def restart(release: Release, admin: KubeApi) -> None:
    """As `kubectl rollout restart deployment/sandbox-gateway`; returns once the managers of before are gone."""
    before = {found["metadata"]["name"] for found in await release.pods("manager")}
    path = f"/apis/apps/v1/namespaces/{release.namespace}/deployments/sandbox-gateway"
    stamp = {"kubectl.kubernetes.io/restartedAt": secrets.token_hex(8)}
    await admin.patch(path, {"spec": {"template": {"metadata": {"annotations": stamp}}}})

    async def rolled_out() -> bool:
        found = await admin.get(path)
        status, wanted = found["status"], found["spec"]["replicas"]
        seen = status.get("observedGeneration") == found["metadata"]["generation"]
        counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
        return seen and counts == [wanted] * 3 and await only_new(release, before)

    await until_async(rolled_out, "the managers of before are gone, and as many others serve", 240)


async def test_managers_that_are_restarted_under_load_fail_no_call_and_run_no_command_twice(
    release: Release, admin: KubeApi
) -> None:
    """F31"""
    quick = {"settings": {"drain_sec": 5}}  # shorter than the streams: those are taken up elsewhere
    await asyncio.to_thread(release, "install", *WAIT, values=quick)
    await release.gateway.some(2)
    restarts, now = 0, asyncio.get_running_loop().time
    async with AsyncClient(f"http://{release.gateway.address}", await key_of(release)) as client:
        agents = Agents(client)
        async with asyncio.TaskGroup() as group:
            work = group.create_task(agents.run(("a", "a", "a", "b", "b"), ("a", "c")))
            await until_async(agents.under_way, "every kind of call has been answered")
            until = now() + RESTARTS_SEC
            while now() < until:
                await restart(release, admin)
                restarts += 1
            agents.over.set()
    sys.stdout.write(f"{restarts} restarts: {work.result()}, no failed call\n")
    await asyncio.to_thread(release, "uninstall", *WAIT)
