"""A cluster to measure claims on: a real control plane, real executors as its pods, and `manager serve` before them.

The control plane is that of the tests (`make test-cluster` builds it once). There is no kubelet: a small agent starts
each pod's executor as a process of this machine and says that it is ready.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from manager.config import ManagerConfig
from manager.model import NOTE_TOKEN, Binding, BindingState, Owner, Profile, new_id
from manager.providers.kubernetes.pod import CONTAINER, Identity, manifest, pod_spec
from manager.providers.kubernetes.provider import KubernetesProvider
from manager.providers.kubernetes.watch import list_pods
from manager.services.claims import marks_of
from manager.services.pool import idle_labels
from manager.store.embedded import embedded_valkey
from manager.store.redis import RedisStore
from tests.support.cluster import control_plane, tools
from tests.support.cluster.accounts import Account, account
from tests.support.cluster.api import KubeApi, connected
from tests.support.cluster.audit import AuditLog
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.node_agent import NodeAgent, node_agent
from tests.support.cluster.pod_process import Launch, Placed, executor
from tests.support.cluster.provider import opened
from tests.support.cluster.waiting import until_async
from tests.support.executor_pod import PATHS
from tests.support.server_process import Stack, started

NAMESPACE: Final = "sandbox-jobs"
OWNER: Final = Owner("bench", "claims")
CLAIMED: Final = "sandboxes-default"  # the profile whose pods are claimed
BALLAST_OWNER: Final = Owner("bench", "ballast")
SECRET: Final = "benchmark-" * 4
IMAGE: Final = "test.invalid/sojourn/python@sha256:" + "ab" * 32  # nobody pulls it
READY_SEC: Final = 300.0
LOAD_AFTER_SEC: Final = 60.0
CONTROL_PLANE_MEMORY: Final = "4GiB"  # with less, six thousand pods keep the API server at collecting garbage
_AT_ONCE: Final = 16

_CONFIG: Final = """
[[targets]]
name = "main"
provider = "kubernetes"
namespace = "{namespace}"
kubeconfig = "{kubeconfig}"
[[profiles]]
name = "sandboxes-default"
image = "{image}"
cpu = 0.01
memory = "64Mi"
keep_workspace = false
pool = {{ size = 0 }}
[[profiles]]
name = "ballast"
image = "{image}"
cpu = 0.01
memory = "64Mi"
keep_workspace = false
pool = {{ size = 0 }}
"""


class NoControlPlane(Exception):
    """There is none to measure on; the message says how to get one."""


@dataclass
class World:
    plane: ControlPlane
    admin: KubeApi
    account: Account
    provider: KubernetesProvider  # makes pods as the manager's pool does; the manager itself is another process
    store: RedisStore
    profiles: dict[str, Profile]
    directory: Path
    env: dict[str, str]
    simulated: NodeAgent  # says of its pods that they run, without any process
    node: str = ""
    manager: Stack | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{NAMESPACE}/pods"

    async def warm(self, count: int) -> None:
        """So many pool pods with real executors, ready."""
        profile = self.profiles[CLAIMED]
        room = asyncio.Semaphore(_AT_ONCE)

        async def one() -> None:
            async with room:
                await self.provider.create(profile, new_id("p"), idle_labels(profile), {NOTE_TOKEN: ""}, wait=False)

        await asyncio.gather(*(one() for _ in range(count)))
        await self._until_ready(CLAIMED, count)

    async def known_to_manager(self, count: int) -> None:
        """Returns once the manager counts so many ready pods of the profile that is claimed."""
        assert self.manager is not None
        async with asyncio.timeout(READY_SEC):
            while True:
                pools = await self.manager.call("GET", "/api/v1/pools", None, self.headers)
                ready = {pool["profile"]: pool["ready"] for pool in pools["pools"]}
                if ready.get(CLAIMED, 0) >= count:
                    return
                await asyncio.sleep(0.2)

    async def ballast(self, warm: int, sandboxes: int) -> None:
        """Warm pods that nobody claims, and sandboxes that are bound, without processes behind them."""
        profile = self.profiles["ballast"]
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(number: int) -> None:
            name = new_id("p")
            labels, notes = idle_labels(profile), {NOTE_TOKEN: ""}
            bound: Binding | None = None
            if number >= warm:
                bound = Binding(
                    owner=BALLAST_OWNER, task_id=f"ballast-{number}", sandbox_id=new_id(), state=BindingState.BOUND,
                    token=new_id(), profile=profile.name, target="main", generation=1, pod=name,
                    address="http://127.0.0.1:1",
                )  # fmt: skip
                marks, notes = marks_of(bound)
                labels |= marks
            spec = pod_spec(
                profile,
                Identity(
                    name=name, namespace=NAMESPACE, target="main", labels=labels, annotations=notes,
                    token_sha256="0" * 64, unclaimed_sec=600.0,
                ),
            )  # fmt: skip
            body = manifest(spec)
            body["spec"]["nodeName"] = self.node  # no scheduling: six thousand pods take long enough
            async with room:
                await self.admin.create(self._pods, body)
                if bound is not None:
                    await self.store.adopt_binding(bound, self.config_terms())

        await asyncio.gather(*(one(number) for number in range(warm + sandboxes)))
        await self._until_ready("ballast", warm + sandboxes)
        # What plays the nodes shares this machine's processors: a look through six thousand pods takes half a second.
        gc.collect()
        gc.freeze()

    def config_terms(self) -> Any:
        return msgspec.structs.replace(ManagerConfig.load(self.env).terms, idle_sec=7200.0)

    async def clear(self) -> None:
        """Ends all pods that can be claimed or were."""
        query = {"labelSelector": f"sojourn/profile={CLAIMED}", "gracePeriodSeconds": "0"}
        await self.admin.call("DELETE", self._pods, query=query)
        await until_async(self._cleared, "all pods of the last round have gone")

    async def _cleared(self) -> bool:
        return not await self.admin.list(self._pods, labelSelector=f"sojourn/profile={CLAIMED}", limit="1")

    async def relist_sec(self) -> float:
        """How long the manager's own code takes to list the namespace's pods and read them."""
        began = asyncio.get_running_loop().time()
        await list_pods(self.provider._client, self._pods, self.provider._labels)
        return asyncio.get_running_loop().time() - began

    async def _until_ready(self, profile: str, count: int) -> None:
        async with asyncio.timeout(READY_SEC):
            while True:
                pods = await self.admin.list(self._pods, labelSelector=f"sojourn/profile={profile}")
                if sum(_is_ready(pod) for pod in pods) >= count:
                    return
                await asyncio.sleep(0.5)


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _executor(placed: Placed) -> Launch:
    """As it always is, but that it loads what is for other calls than commands only after the round: in a cluster a
    hundred pods have nodes enough for that, here they would share this machine's processors with the manager."""
    launch = executor(placed)
    wait = f"import sys; sys.path[:0] = {PATHS!r}; import executor.mount; executor.mount.CALM_SEC = {LOAD_AFTER_SEC}; "
    return replace(launch, argv=[*launch.argv[:-1], wait + launch.argv[-1]])


@asynccontextmanager
async def world(directory: Path, warm_ballast: int, *, load_now: bool = False) -> AsyncIterator[World]:
    """All but the manager. `load_now`: executors load the rest of themselves when they always do, a quarter of a second
    after their claim. Raises NoControlPlane."""
    programs = tools.find()
    if programs is None:
        raise NoControlPlane(f"no control plane to measure on: {tools.HOW_TO_GET}")
    async with AsyncExitStack() as stack:
        plane = stack.enter_context(control_plane.running(programs, CONTROL_PLANE_MEMORY))
        admin = await stack.enter_async_context(connected(plane.admin_kubeconfig))
        await admin.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        default = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        await until_async(lambda: admin.find(default), "the control plane has made the account that pods need")
        rights = await account(plane, admin, NAMESPACE)
        nodes = plane.certificate_kubeconfig("test-node-agent", ["system:masters"])
        version = tools.versions()[1]
        agents = []
        for processes in (True, False):
            api = await stack.enter_async_context(connected(nodes))
            programs_of = {} if load_now else {CONTAINER: _executor}
            agent = node_agent(api, version, processes=processes, programs=programs_of)
            agents.append(await stack.enter_async_context(agent))
        await agents[0].add_node()
        config = directory / "sojourn.toml"
        config.write_text(_CONFIG.format(namespace=NAMESPACE, kubeconfig=rights.kubeconfig, image=IMAGE))
        redis_url = await stack.enter_async_context(embedded_valkey(directory / "store"))
        env = {
            "SOJOURN_CONFIG": str(config), "SOJOURN_REDIS_URL": redis_url, "SOJOURN_MANAGER_SECRET": SECRET,
            "SOJOURN_KEY_PEPPER": SECRET, "SOJOURN_OBJECTS": f"file://{directory / 'objects'}",
            "SOJOURN_HOST": "127.0.0.1", "SOJOURN_METRICS_PORT": "0",
        }  # fmt: skip
        store = RedisStore.at(redis_url, call_sec=60.0)
        stack.push_async_callback(store.close)
        await store.settle()
        provider = await stack.enter_async_context(opened(rights, "main", secret=SECRET.encode(), unclaimed_sec=600.0))
        # Whoever leads makes and removes pool pods: here it is nobody who does either.
        await provider.lead("pool", "benchmark", 86_400.0)
        profiles = {profile.name: profile for profile in ManagerConfig.load(env).profiles}
        made = World(plane, admin, rights, provider, store, profiles, directory, env, agents[1])
        if warm_ballast:
            # Its pods are put there by name; nobody else's may be.
            made.node = await agents[1].add_node()
            await admin.patch(f"/api/v1/nodes/{made.node}", {"spec": {"unschedulable": True}})
        yield made


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[Stack]:
    """`manager serve` as a process of its own, before the world's pods."""
    async with served(world.directory, world.env, OWNER) as (stack, key):
        world.headers = {"X-Api-Key": key}
        world.manager = stack
        try:
            yield stack
        finally:
            world.manager = None


@asynccontextmanager
async def served(directory: Path, env: Mapping[str, str], owner: Owner) -> AsyncIterator[tuple[Stack, str]]:
    """`manager serve` and a key of the owner's. Raises NoControlPlane."""
    make = ("keys", "create", "--tenant", owner.tenant, "--project", owner.project, "--role", "admin")
    async with started(directory / "keys", *make, **env) as keys:
        if await keys.ended() != 0:
            raise NoControlPlane("no key could be made:\n" + "\n".join(keys.lines))
    async with started(directory / "manager", "serve", **env) as stack:
        stack.address = json.loads(await stack.said('"serving"'))["address"]
        reading = asyncio.create_task(_read_on(stack), name="manager-output")
        try:
            yield stack, keys.lines[-1]
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def _read_on(stack: Stack) -> None:
    """Nobody's log may fill its pipe."""
    assert stack.process.stdout is not None
    while raw := await stack.process.stdout.readline():
        stack.lines.append(raw.decode(errors="replace").rstrip("\n"))


def memory_bytes(pid: int) -> int:
    """What is resident of a process."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def processor_sec(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


async def patches_sec(world: World, mark: int) -> Sequence[float]:
    """How long the API server itself took for each of the manager's patches since the mark in its audit log."""
    assert world.plane.audit_log is not None
    await AuditLog(world.plane.audit_log, world.admin).settled()
    with world.plane.audit_log.open("rb") as file:
        file.seek(mark)
        lines = file.read().split(b"\n")[:-1]
    found = []
    for line in lines:
        entry = json.loads(line)
        if entry["verb"] == "patch" and entry["user"].get("username") == world.account.user:
            began, ended = (datetime.fromisoformat(entry[key]) for key in _TIMES)
            found.append((ended - began).total_seconds())
    return found


_TIMES: Final = ("requestReceivedTimestamp", "stageTimestamp")
