"""The chart's NetworkPolicies held on a real node: who reaches whom, with them and without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from images.bundle.build import build
from manager.model import ClusterPod, Profile
from manager.services.pool import idle_labels
from tests.support.cluster import node_images
from tests.support.cluster.accounts import account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.control_plane import SERVER_PORT, ControlPlane
from tests.support.cluster.helm import Helm
from tests.support.cluster.node_network import PUBLIC, RESOLVER
from tests.support.cluster.pods import executor_pod, run
from tests.support.cluster.provider import opened
from tests.support.cluster.real_node import RealNode
from tests.support.cluster.waiting import pod_gone, pod_that, until_async
from tests.support.local_pods import token_for

NAME: Final = "test.invalid/sojourn/executor:1"
KUBELET_PORT: Final = 10250
CLASSES: Final = ("none", "dns", "outbound", "packages")
BY_CLASS: Final = {
    "none": set[str](),
    "dns": {"names by udp", "names by tcp"},
    "outbound": {"names by udp", "names by tcp", "public 80", "public 443"},
    "packages": {"names by udp", "names by tcp", "public 443"},
}
# Runs in a pod: which of the places answers. {name: [tcp or udp, host, port]}
PROBE: Final = """
import json, socket, sys, threading
asked, reached = json.loads(sys.argv[1]), []
def ask(name, kind, host, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as place:
        place.settimeout(2.5)
        try:
            place.connect((host, port))
            if kind == "udp":
                place.send(b"?")
                place.recv(1)
            reached.append(name)
        except OSError:
            pass
threads = [threading.Thread(target=ask, args=(name, *place)) for name, place in asked.items()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(sorted(reached)))
"""
Place = tuple[str, str, int]
pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]


def named(part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "sojourn", "app.kubernetes.io/instance": "s", "app.kubernetes.io/component": part,
    }  # fmt: skip


class Neighbours:
    """Pods whose addresses are known, and what each of them reaches."""

    def __init__(self, admin: KubeApi, image: str) -> None:
        self._admin, self._image = admin, image
        self.addresses: dict[str, str] = {}
        self._runs: dict[str, Callable[[str], Awaitable[dict[str, Any]]]] = {}

    async def start(self, name: str, namespace: str, labels: Mapping[str, str], port: str, number: int) -> None:
        """A pod with an executor, which listens on the port `number`, called `port`."""
        pod = executor_pod(name, terminationGracePeriodSeconds=1)
        pod["metadata"]["labels"] = dict(labels)
        container = pod["spec"]["containers"][0]
        container["image"] = self._image
        container["env"].append({"name": "SOJOURN_EXECUTOR_PORT", "value": str(number)})
        container["ports"] = [{"name": port, "containerPort": number}]
        container["readinessProbe"]["httpGet"]["port"] = port
        await self._admin.create(f"/api/v1/namespaces/{namespace}/pods", pod)
        made = await pod_that(self._admin, namespace, name, "is ready")
        self.add(name, made["status"]["podIP"], lambda command: run(made, command, port=number))

    def add(self, name: str, address: str, runs: Callable[[str], Awaitable[dict[str, Any]]]) -> None:
        self.addresses[name], self._runs[name] = address, runs

    async def run(self, name: str, command: str) -> dict[str, Any]:
        return await self._runs[name](command)

    async def reached(self, name: str, places: Mapping[str, Place]) -> set[str]:
        """Those of the places that answer the pod."""
        asked = shlex.quote(json.dumps(places))
        told = await self.run(name, f"/opt/sojourn/bin/python3 -I -S -c {shlex.quote(PROBE)} {asked}")
        assert told["exit_code"] == 0, told
        return set(json.loads(told["stdout"]))


@pytest.fixture
async def neighbours(
    node: RealNode, plane: ControlPlane, admin: KubeApi, new_namespace: Callable[[], Awaitable[str]], tmp_path: Path
) -> AsyncIterator[tuple[Neighbours, str, str]]:
    """A pod of the provider for each class of networks, one of none's beside it, and pods that play the others; the
    release's namespace and that of its sandboxes."""
    image = node.load(node_images.executor(tmp_path / "executor.tar", NAME, build(tmp_path)), NAME)
    release, jobs, elsewhere = [await new_namespace() for _ in range(3)]
    found = Neighbours(admin, image)
    async with opened(await account(plane, admin, jobs)) as provider:
        started: list[str] = []

        async def sandbox(name: str, network: str) -> None:
            profile = Profile(
                name=name, image=image, cpu=0.1, memory_bytes=128 << 20, network=network,
                cluster=ClusterPod(resolvers=(RESOLVER,)),
            )  # fmt: skip
            started.append(name)
            pod = await provider.create(profile, name, idle_labels(profile), {})
            host = pod.address.removeprefix("http://").removesuffix(":8080")
            found.add(name, host, lambda command: run_in(pod.name, host, command))

        try:
            await asyncio.gather(
                *(sandbox(name, name) for name in CLASSES),
                sandbox("other", "none"),
                found.start("manager", release, named("manager"), "http", 8080),
                found.start("redis", release, named("redis"), "redis", 6379),
                found.start("stranger", release, {"app": "stranger"}, "http", 8080),
                found.start("pretender", elsewhere, named("manager"), "http", 8080),
            )
            yield found, release, jobs
        finally:
            for name in started:
                await provider.delete(name)
            for name in started:
                await pod_gone(admin, jobs, name)


async def run_in(name: str, host: str, command: str) -> dict[str, Any]:
    return await run({"metadata": {"name": name}, "status": {"podIP": host}}, command, token=token_for(name))


async def test_only_a_manager_reaches_a_sandbox_which_reaches_what_its_class_allows(
    neighbours: tuple[Neighbours, str, str], node: RealNode, admin: KubeApi, helm: Helm
) -> None:
    """S15, S17"""
    pods, release, jobs = neighbours
    told = await pods.run("none", "env; ls /var/run/secrets")
    assert "KUBERNETES" not in told["stdout"], told
    assert "No such file" in told["stderr"] + told["stdout"], told  # no account's token
    network = node.network
    sandbox: dict[str, Place] = {"sandbox": ("tcp", pods.addresses["other"], 8080)}
    inside: dict[str, Place] = {
        **sandbox,
        "manager": ("tcp", pods.addresses["manager"], 8080),
        "redis": ("tcp", pods.addresses["redis"], 6379),
        "API server": ("tcp", network.outside, SERVER_PORT),
        "kubelet": ("tcp", network.address, KUBELET_PORT),
    }
    public: dict[str, Place] = {
        "names by udp": ("udp", RESOLVER, 53), "names by tcp": ("tcp", RESOLVER, 53),
        "public 80": ("tcp", PUBLIC, 80), "public 443": ("tcp", PUBLIC, 443),
    }  # fmt: skip
    asked: dict[str, dict[str, Place]] = {
        **{name: {**inside, **public} for name in CLASSES},
        "manager": {**sandbox, "redis": inside["redis"], "API server": inside["API server"]},
        "stranger": {**sandbox, "redis": inside["redis"], "manager": inside["manager"]},
        "pretender": {**sandbox, "redis": inside["redis"]},
        "redis": {**sandbox, "public 80": public["public 80"]},
    }
    everything = {name: set(places) for name, places in asked.items()}
    held = {
        **BY_CLASS, "manager": {"sandbox", "redis", "API server"}, "stranger": {"manager"}, "pretender": set[str](),
        "redis": set[str](),
    }  # fmt: skip

    last: dict[str, set[str]] = {}

    async def reached() -> dict[str, set[str]]:
        answers = await asyncio.gather(*(pods.reached(name, places) for name, places in asked.items()))
        last.update(zip(asked, answers, strict=True))
        return dict(last)

    async def is_reached(wanted: dict[str, set[str]], what: str) -> None:
        async def holds() -> bool:
            return await reached() == wanted

        try:
            await until_async(holds, what)
        except AssertionError as why:
            raise AssertionError(f"{why}; reached: {last}") from why

    policies = [found for found in helm.render(
        {
            "jobs": {"namespace": jobs},
            "settings": {"outbound_resolvers": [RESOLVER]},
            "network": {"classes": {"packages": [{"cidr": f"{PUBLIC}/32", "ports": [443]}]}},
        },
        namespace=release,
    ) if found["kind"] == "NetworkPolicy"]  # fmt: skip
    await is_reached(everything, "without policies everybody reaches everything")
    async with contextlib.AsyncExitStack() as stack:
        for policy in policies:
            base = f"/apis/networking.k8s.io/v1/namespaces/{policy['metadata']['namespace']}/networkpolicies"
            await admin.create(base, policy)
            stack.push_async_callback(admin.delete, f"{base}/{policy['metadata']['name']}")
        await is_reached(held, "with the chart's policies only what they allow is reached")
        assert await reached() == held
    await is_reached(everything, "with the policies removed everybody reaches everything again")
