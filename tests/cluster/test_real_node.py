"""The provider's pods on a real node: kubelet, containerd, runc, and the executor's bundle in an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from images.bundle.build import build
from manager.model import ClusterPod, Pod, Profile
from manager.providers.kubernetes.pod import SPLIT_CAPABILITIES
from manager.services.pool import idle_labels
from tests.support.cluster import node_images
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.provider import opened
from tests.support.cluster.real_node import RealNode
from tests.support.cluster.waiting import pod_gone
from tests.support.local_pods import token_for

NAME = "test.invalid/sojourn/executor:1"
# Of linux/capability.h.
NUMBERS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7}


async def run(pod: Pod, command: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token_for(pod.name)}", "Sandbox-Pod": pod.name}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{pod.address}/v1/exec", json={"command": command}) as answer,
    ):
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        return body


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with the executor."""
    directory = tmp_path_factory.mktemp("image")
    return node_images.executor(directory / "executor.tar", NAME, build(directory))


@pytest.mark.root
@pytest.mark.parametrize("tier", ["split", "single"])
async def test_a_pod_of_the_provider_runs_commands_without_any_right_on_a_real_node(
    tier: Literal["split", "single"],
    node: RealNode,
    admin: KubeApi,
    namespace: str,
    manager_account: Account,
    request: pytest.FixtureRequest,
) -> None:
    archive: Path = request.getfixturevalue("archive")  # made only where there is a node for it
    image = node.load(archive, NAME)
    profile = Profile(name="real", image=image, cpu=1.0, memory_bytes=256 << 20, cluster=ClusterPod(tier=tier))
    async with opened(manager_account) as provider:
        pod = await provider.create(profile, "p1", idle_labels(profile), {})
        try:
            told = await run(pod, "id -u; cat /proc/self/status; ls /var/run/secrets 2>&1; echo kept >note && cat note")
            command = dict(line.split(":\t") for line in told["stdout"].splitlines() if ":\t" in line)
            assert told["stdout"].startswith("1000\n")
            assert told["stdout"].endswith("No such file or directory\nkept\n"), told  # no token of the cluster
            rights = {field: int(command[field], 16) for field in ("CapEff", "CapPrm", "CapInh", "CapAmb")}
            assert set(rights.values()) == {0}, rights
            assert (command["NoNewPrivs"], command["Seccomp"]) == ("1", "2")
            executor = (await run(pod, "cat /proc/1/status"))["stdout"]
            held = int(next(line for line in executor.splitlines() if line.startswith("CapEff")).split()[1], 16)
            split = sum(1 << NUMBERS[name] for name in SPLIT_CAPABILITIES)
            assert held == (split if tier == "split" else 0)
        finally:
            await provider.delete("p1")
        await pod_gone(admin, namespace, "p1")
