"""The Helm chart installed on a real node, under the names that the seed gives: the flow through its Service.

Pods, gVisor, volumes, policies, kube-proxy and the managers' image are real. The cluster's DNS is played.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

import sojourn
from images.bundle.build import build
from tests.support.cluster import agents, debian, node_images, tools
from tests.support.cluster.api import KubeApi
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.helm import CHART, Helm, Refused
from tests.support.cluster.pods import executor_pod, put_archive, run
from tests.support.cluster.real_node import RealNode
from tests.support.cluster.waiting import pod_that, until_async

NAMESPACE: Final = "sandbox"
JOBS: Final = "sandbox-jobs"
GATEWAY: Final = "http://sandbox-gateway.sandbox:8780"
EXECUTOR: Final = "test.invalid/sojourn/executor:1"
MANAGER: Final = "test.invalid/sojourn/manager:1"
VALKEY: Final = "test.invalid/sojourn/valkey:1"
STORAGE: Final = "of-the-node"
DYNAMIC: Final = "made-on-the-node"
WAIT: Final = ("--wait", "--timeout", "240s")
# Runs in a pod: one call of a task. Arguments: method, path, key, body.
CALL: Final = """
import json, sys, urllib.error, urllib.request
url, method, key, body = sys.argv[1:]
headers = {"X-Api-Key": key, "Content-Type": "application/json"}
request = urllib.request.Request(url, body.encode() or None, headers, method=method)
try:
    with urllib.request.urlopen(request, timeout=120) as answer:
        print(json.dumps([answer.status, json.loads(answer.read() or b"{}")]))
except urllib.error.HTTPError as refused:
    print(json.dumps([refused.code, refused.read().decode()]))
"""
SDK: Final = "sdk"  # where a caller has it
PYTHON: Final = "/opt/sojourn/bin/python3"
# Runs in a sandbox: for so many seconds, a hundred connections at once to each place. [how many were tried, accepted]
STORM: Final = """
import json, select, socket, sys, time
places, until = json.loads(sys.argv[1]), time.monotonic() + float(sys.argv[2])
tried = accepted = 0
while time.monotonic() < until:
    poll, calls = select.poll(), {}
    for place in places:
        for _ in range(100):
            call = socket.socket()
            call.setblocking(False)
            call.connect_ex(tuple(place))
            calls[call.fileno()] = call
            poll.register(call, select.POLLOUT)
    tried += len(calls)
    time.sleep(0.1)
    for number, event in poll.poll(0):
        accepted += event & select.POLLOUT and calls[number].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    for call in calls.values():
        call.close()
print(json.dumps([tried, accepted]))
"""
STORM_SEC: Final = 20
# Runs in a pod, with the SDK: how long commands take.
TIMES: Final = """
import asyncio, json, sys, time
from sojourn import AsyncClient
async def main(url, key, task_id):
    took = []
    async with AsyncClient(url, key) as client:
        for _ in range(100):
            began = time.monotonic()
            await client.task(task_id).exec(["true"], check=True)
            took.append(time.monotonic() - began)
    took.sort()
    print(json.dumps([took[50], took[-1]]))
asyncio.run(main(*sys.argv[1:]))
"""
AGENTS: Final = Path(agents.__file__).read_text("utf-8")
MANAGERS: Final = "app.kubernetes.io/component=manager"
pytestmark = [pytest.mark.root, pytest.mark.timeout(1200)]


class Caller:
    """A program in a pod of the cluster, which knows the gateway's name."""

    def __init__(self, pod: dict[str, Any], key: str = "") -> None:
        self.pod, self.key = pod, key

    async def python(self, program: str, *arguments: str) -> str:
        """What a program with the SDK says."""
        command = f"PYTHONPATH={SDK} {PYTHON} -c {shlex.quote(program)} {shlex.join(arguments)}"
        told = await run(self.pod, command)
        assert told["exit_code"] == 0, told
        return str(told["stdout"])

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        arguments = [f"{GATEWAY}{path}", method, self.key, "" if body is None else json.dumps(body)]
        status, answer = json.loads(await self.python(CALL, *arguments))
        return status, answer

    async def exec(self, task: str, command: str) -> Any:
        status, body = await self.call("POST", f"/sandbox/task/{task}/exec", {"command": command})
        assert status == 200, body
        return body


@contextlib.asynccontextmanager
async def volumes(admin: KubeApi, at: Path) -> AsyncIterator[None]:
    """What the node's disk has for the claims of the chart."""
    base = "/api/v1/persistentvolumes"
    for name in ("objects", "redis"):
        place = at / name
        place.mkdir()
        place.chmod(0o777)
        spec = {
            "capacity": {"storage": "64Mi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": STORAGE,
            "hostPath": {"path": str(place)}, "persistentVolumeReclaimPolicy": "Retain",
        }  # fmt: skip
        await admin.create(base, {"metadata": {"name": f"{STORAGE}-{name}"}, "spec": spec})
    try:
        yield
    finally:
        for name in ("objects", "redis"):
            await admin.delete(f"{base}/{STORAGE}-{name}")


@pytest.fixture
async def release(
    node: RealNode, plane: ControlPlane, admin: KubeApi, tmp_path: Path
) -> AsyncIterator[tuple[Helm, dict[str, Any]]]:
    """helm for this cluster, and the values to install the chart with: what the node has for it."""
    executor = node.load(node_images.executor(tmp_path / "executor.tar", EXECUTOR, build(tmp_path)), EXECUTOR)
    if lacking := debian.missing():
        pytest.fail(lacking, pytrace=False)
    manager = node.load(await asyncio.to_thread(debian.manager_image, tmp_path, MANAGER), MANAGER)
    valkey = node.load(node_images.valkey(tmp_path / "valkey.tar", VALKEY), VALKEY)
    programs = tools.find()
    assert programs is not None
    small = {"cpu": 0.1, "memory": "128Mi", "disk": "64Mi", "isolation": "gvisor", "pool": {"min": 1, "max": 2}}
    values = {
        "manager": {"image": manager, "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}},
        "redis": {"image": valkey, "storageClass": STORAGE, "size": "64Mi"},
        "objects": {"volume": {"storageClass": STORAGE, "size": "64Mi"}},
        "sandboxImage": executor,
        "settings": {"leaving_sec": 1, "drain_sec": 10},
        "profiles": [
            {"name": "sandboxes-default", "workspace": "volume", "storage_class": DYNAMIC, **small},
            {"name": "sandboxes-pool", **small},
        ],
    }
    await admin.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    helm = Helm(programs / "helm", tmp_path, plane.admin_kubeconfig)
    classes = "/apis/storage.k8s.io/v1/storageclasses"
    await admin.create(classes, {"metadata": {"name": DYNAMIC}, "provisioner": "kubernetes.io/host-path"})
    async with volumes(admin, node.directory):
        try:
            yield helm, values
        finally:
            with contextlib.suppress(Refused):
                await asyncio.to_thread(helm, "uninstall", "s", "--namespace", NAMESPACE)
            for namespace in (NAMESPACE, JOBS):
                await admin.call("DELETE", f"/api/v1/namespaces/{namespace}/pods", {"gracePeriodSeconds": 0})
                await admin.delete(f"/api/v1/namespaces/{namespace}")
            for namespace in (NAMESPACE, JOBS):

                async def gone(namespace: str = namespace) -> bool:
                    return await admin.find(f"/api/v1/namespaces/{namespace}") is None

                await until_async(gone, f"{namespace} is gone", 120)

            async def given_back() -> bool:
                found = await admin.list("/api/v1/persistentvolumes")
                return not [volume for volume in found if volume["spec"].get("storageClassName") == DYNAMIC]

            await until_async(given_back, "the node has its volumes' room again", 120)
            await admin.delete(f"{classes}/{DYNAMIC}")


async def said(admin: KubeApi) -> str:
    """What the release's pods have come to, and the ends of what they said."""
    told = ""
    for namespace in (NAMESPACE, JOBS):
        for pod in await admin.list(f"/api/v1/namespaces/{namespace}/pods"):
            name = pod["metadata"]["name"]
            told += f"\n--- {name}: {pod['status'].get('containerStatuses')} {pod['status'].get('conditions')}"
        for event in (await admin.list(f"/api/v1/namespaces/{namespace}/events"))[-30:]:
            told += f"\n{event['involvedObject'].get('name')}: {event.get('reason')} {event.get('message')}"
    return told


async def caller_in(admin: KubeApi, namespace: str, image: str) -> Caller:
    pod = executor_pod("caller", terminationGracePeriodSeconds=1)
    pod["spec"]["containers"][0]["image"] = image
    await admin.create(f"/api/v1/namespaces/{namespace}/pods", pod)
    made = await pod_that(admin, namespace, "caller", "is ready")
    await put_archive(made, SDK, Path(sojourn.__file__).parent)
    return Caller(made)


async def times_of(caller: Caller, task: str) -> tuple[float, float]:
    """Seconds that a task's commands take by the SDK, one after the other: the middle one and the slowest."""
    told = await caller.python(TIMES, GATEWAY, caller.key, task)
    middle, slowest = json.loads(told)
    return middle, slowest


async def test_a_release_on_a_real_node_keeps_a_tasks_commands_in_one_pod_until_its_end(
    release: tuple[Helm, dict[str, Any]], node: RealNode, admin: KubeApi, namespace: str
) -> None:
    """F31, S17"""
    helm, values = release
    try:
        await asyncio.to_thread(helm, "install", "s", str(CHART), "--namespace", NAMESPACE, *WAIT, values=values)
    except Refused as why:
        raise AssertionError(f"{why}{await said(admin)}{node.logs()}") from why
    assert await admin.find(f"/api/v1/namespaces/{NAMESPACE}/secrets/sandbox-runtime") is not None
    caller = await caller_in(admin, namespace, values["sandboxImage"])
    status, _ = await caller.call("POST", "/sandbox/task/job/exec", {"command": "true"})
    assert status == 401
    managers = await admin.list(f"/api/v1/namespaces/{NAMESPACE}/pods", labelSelector=MANAGERS)
    assert len(managers) == 2
    keys = ("sojourn-server", "keys", "create", "--tenant", "acme", "--project", "web")
    caller.key = (await asyncio.to_thread(node.run, managers[0], *keys)).split()[-1]

    # A task's commands land in one place, whichever manager has them, until its end.
    first = await caller.exec("job", "echo kept > note.txt; echo $((6 * 7))")
    assert (first["stdout"], first["exit_code"]) == ("42\n", 0), first
    pod = await admin.get(f"/api/v1/namespaces/{JOBS}/pods/{first['pod_id']}")
    assert pod["spec"]["nodeName"] == node.name
    assert "gvisor" in (await caller.exec("job", "cat /proc/version"))["stdout"]
    assert any("ephemeral" in volume for volume in pod["spec"]["volumes"])  # a claim of the pod's own
    for _ in range(6):
        again = await caller.exec("job", "cat note.txt")
        assert (again["stdout"], again["pod_id"]) == ("kept\n", first["pod_id"])
    other = await caller.exec("other", "ls")
    assert other["stdout"] == ""
    assert other["pod_id"] != first["pod_id"]

    # The policies hold meanwhile: nobody but a manager reaches the sandbox, which reaches no manager.
    place = pod["status"]["podIP"]
    knock = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
    told = await run(caller.pod, f"{PYTHON} -I -c {shlex.quote(knock)} {place} 8080")
    assert "TimeoutError" in told["stderr"], told
    for manager in managers:
        out = await caller.exec("job", f"{PYTHON} -I -c {shlex.quote(knock)} {manager['status']['podIP']} 8780")
        assert "TimeoutError" in out["stderr"], out

    # One sandbox's storm of connections gets nowhere, and its neighbour's commands go on.
    alone = await times_of(caller, "other")
    gateway = await admin.get(f"/api/v1/namespaces/{NAMESPACE}/services/sandbox-gateway")
    neighbour = await admin.get(f"/api/v1/namespaces/{JOBS}/pods/{other['pod_id']}")
    places = [(manager["status"]["podIP"], 8780) for manager in managers]
    places += [(gateway["spec"]["clusterIP"], 8780), (neighbour["status"]["podIP"], 8080)]
    storm = f"{PYTHON} -I -c {shlex.quote(STORM)} {shlex.quote(json.dumps(places))} {STORM_SEC}"
    storming = asyncio.create_task(caller.exec("job", storm))
    beside = await times_of(caller, "other")
    tried, accepted = json.loads((await storming)["stdout"])
    assert tried > 1000
    assert accepted == 0
    assert beside[1] < 2 * alone[1] + 2
    sys.stdout.write(f"commands beside {tried} connections that a sandbox tried: {beside} s, alone: {alone} s\n")

    for task in ("job", "other"):
        assert (await caller.call("DELETE", f"/sandbox/task/{task}"))[0] == 204
    after = await caller.exec("job", "ls")
    assert after["stdout"] == ""
    assert (await caller.call("DELETE", "/sandbox/task/job"))[0] == 204

    # Both managers are replaced while commands run and new tasks come, by way of the Service: no call fails.
    work = asyncio.create_task(caller.python(AGENTS, GATEWAY, caller.key))

    async def under_way() -> bool:
        assert not work.done(), work.result()
        return bool((await run(caller.pod, "ls under-way"))["exit_code"] == 0)

    await until_async(under_way, "every kind of call has been answered", 240)
    changed = {**values, "settings": {**values["settings"], "idle_ttl_sec": 1234}}
    await asyncio.to_thread(helm, "upgrade", "s", str(CHART), "--namespace", NAMESPACE, *WAIT, values=changed)
    before = {manager["metadata"]["name"] for manager in managers}

    async def only_new() -> bool:
        found = await admin.list(f"/api/v1/namespaces/{NAMESPACE}/pods", labelSelector=MANAGERS)
        return not before & {manager["metadata"]["name"] for manager in found}

    await until_async(only_new, "the managers of before are gone")
    await run(caller.pod, "touch over")
    sys.stdout.write(f"an upgrade under calls, none of which failed: {await work}\n")
    await asyncio.to_thread(helm, "test", "s", "--namespace", NAMESPACE, "--timeout", "240s")
