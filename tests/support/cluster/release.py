"""The chart's pods as processes of this machine, and a release of it on the tests' control plane.

Each container becomes the program that its image would have, with its own arguments, variables and files: mount paths
are written anew as directories of this machine, and names of Services as addresses where a test plays them.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from manager.store.embedded import server_binary
from tests.support.cluster import tools
from tests.support.cluster.api import KubeApi
from tests.support.cluster.control_plane import SERVER_PORT, ControlPlane
from tests.support.cluster.helm import CHART, NEEDED, Helm, Refused, merged, one
from tests.support.cluster.node_agent import NodeAgent, OpenAgent
from tests.support.cluster.pod_process import Launch, Placed
from tests.support.cluster.service import PlayedService, played

Object = dict[str, Any]
_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
# The manager as in its image, but for where a pod's own account lies.
_MANAGER: Final = """\
import sys
from kubernetes.aio.config import incluster_config as account
account.SERVICE_TOKEN_FILENAME = {at!r} + "/token"
account.SERVICE_CERT_FILENAME = {at!r} + "/ca.crt"
from manager.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


class Images:
    """What runs in place of the images: `programs` for a node agent."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.names: dict[str, str] = {}  # host:port of a Service -> where it is played

    @property
    def programs(self) -> dict[str, Callable[[Placed], Launch]]:
        return {"manager": self.manager, "redis": self.redis, "test": self.python}

    def manager(self, placed: Placed) -> Launch:
        env = self._env(placed) | {
            "KUBERNETES_SERVICE_HOST": self._plane.address, "KUBERNETES_SERVICE_PORT": str(SERVER_PORT),
            "SOJOURN_HOST": placed.ip, "SOJOURN_METRICS_HOST": placed.ip,
        }  # fmt: skip
        code = _MANAGER.format(at=str(placed.mounts[_ACCOUNT]))
        return Launch(argv=[sys.executable, "-I", "-c", code, *_container(placed)["args"]], env=env)

    def redis(self, placed: Placed) -> Launch:
        shell, option, script = (self._local(placed, text) for text in _container(placed)["command"])
        script = script.replace("valkey-server", str(server_binary())).rstrip() + f" --bind {placed.ip}"
        return Launch(argv=[shell, option, script], env=self._env(placed))

    def python(self, placed: Placed) -> Launch:
        program, *arguments = (self._local(placed, text) for text in _container(placed)["command"])
        assert program == "python"
        return Launch(argv=[sys.executable, *arguments], env=self._env(placed))

    def _env(self, placed: Placed) -> dict[str, str]:
        for directory in placed.mounts.values():
            for file in directory.iterdir() if directory.is_relative_to(placed.directory) else ():
                if file.is_file() and (text := file.read_text()) != (here := self._local(placed, text)):
                    file.write_text(here)
        temporary = {"TMPDIR": str(placed.mounts["/tmp"])} if "/tmp" in placed.mounts else {}
        return {"PATH": "/usr/bin:/bin", **temporary} | {
            name: self._local(placed, value) for name, value in placed.env.items()
        }

    def _local(self, placed: Placed, text: str) -> str:
        """In one pass: what has been written anew is not looked at again."""
        here = {path: str(directory) for path, directory in placed.mounts.items()} | self.names
        either = "|".join(re.escape(path) for path in sorted(here, key=len, reverse=True))
        return re.sub(rf"(?<![\w.-])({either})(?![\w.-])", lambda found: here[found[1]], text) if here else text


def _container(placed: Placed) -> Object:
    found: Object = placed.pod["spec"]["containers"][0]
    return found


class Release:
    """An installed chart. `gateway`: its Service."""

    def __init__(
        self, plane: ControlPlane, admin: KubeApi, helm: Helm, values: Mapping[str, Any], namespace: str, jobs: str
    ) -> None:
        self._plane, self._admin = plane, admin
        self.helm, self.values, self.namespace, self.jobs = helm, dict(values), namespace, jobs
        self.gateway: PlayedService
        self.images: Images
        self.agent: NodeAgent

    def __call__(self, action: str, *options: str, values: Mapping[str, Any] | None = None) -> str:
        """helm's `action` on the release, with values over those it was installed with."""
        chart = [str(CHART)] if action in ("install", "upgrade") else []
        given = merged(self.values, values or {}) if chart else None
        try:
            return self.helm(action, "s", *chart, "--namespace", self.namespace, *options, values=given)
        except Refused as why:
            raise Refused(f"{why}{self._said()}") from why

    def _said(self) -> str:
        """What the release's own pods have come to, and the ends of what they said."""
        told = "".join(f"\n--- the node agent: {why!r}" for why in self.agent.errors)
        for run in list(self.agent.pods.values()):
            if run.pod["metadata"]["namespace"] == self.namespace:
                log = run.directory / "log" if run.directory is not None else None
                text = log.read_text(errors="replace")[-2000:] if log is not None and log.exists() else ""
                told += f"\n--- {run.name} at {run.ip}: {run.pod.get('status', {}).get('containerStatuses')}\n{text}"
        return told

    async def pods(self, part: str) -> list[Object]:
        selector = f"app.kubernetes.io/component={part}"
        return await self._admin.list(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=selector)


@contextlib.asynccontextmanager
async def prepared(
    plane: ControlPlane, admin: KubeApi, open_agent: OpenAgent, directory: Path,
    new_namespace: Callable[[], Awaitable[str]],
) -> AsyncIterator[Release]:  # fmt: skip
    """A node that plays the chart's images, its Services, and the values to install it with; not installed yet."""
    programs = tools.find()
    assert programs is not None
    namespace = await new_namespace()
    jobs, cluster_wide = f"{namespace}-jobs", f"gvisor-{secrets.token_hex(4)}"
    images = Images(plane)
    agent = await open_agent(programs=images.programs)
    await agent.add_node()
    await agent.storage_class()
    storage = agent.STORAGE_CLASS
    small = {"cpu": 0.1, "memory": "64Mi", "disk": "64Mi", "isolation": "gvisor"}
    values = merged(NEEDED, {
        "jobs": {"namespace": jobs},
        "cluster": {"gvisor_class": cluster_wide},
        "objects": {"volume": {"storageClass": storage, "size": "64Mi"}},
        "redis": {"storageClass": storage, "size": "64Mi"},
        "settings": {"leaving_sec": 3, "drain_sec": 60},
        "profiles": [
            {"name": "sandboxes-default", "workspace": "volume", "storage_class": storage, "pool": {"min": 1, "max": 4}}
            | small,
            {"name": "sandboxes-pool", "pool": {"min": 1, "max": 4}} | small,
        ],
    })  # fmt: skip
    helm = Helm(programs / "helm", directory, plane.admin_kubeconfig)
    release = Release(plane, admin, helm, values, namespace, jobs)
    release.images, release.agent = images, agent
    rendered = helm.render(values, namespace=namespace)
    async with contextlib.AsyncExitStack() as stack:
        for name in ("sandbox-gateway", "sandbox-redis"):
            service = one(rendered, "Service", name)
            proxy = await stack.enter_async_context(played(admin, service))
            images.names[f"{name}.{namespace}.svc:{service['spec']['ports'][0]['port']}"] = proxy.address
            if name == "sandbox-gateway":
                release.gateway = proxy
        try:
            yield release
        finally:
            with contextlib.suppress(Exception):
                release("uninstall")
            for kept in (namespace, jobs):
                await admin.call("DELETE", f"/api/v1/namespaces/{kept}/pods", {"gracePeriodSeconds": 0})
                await admin.delete(f"/api/v1/namespaces/{kept}")
