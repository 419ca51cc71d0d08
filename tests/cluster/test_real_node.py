"""The provider's pods on a real node: kubelet, containerd, runc and gVisor, and an image of ours on Debian."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from images.bundle.build import build
from manager.model import ClusterPod, Pod, Profile
from manager.providers.kubernetes.pod import SPLIT_CAPABILITIES
from manager.services.pool import idle_labels
from tests.support.cluster import debian, node_images
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.provider import opened
from tests.support.cluster.real_node import RealNode
from tests.support.cluster.waiting import pod_gone
from tests.support.local_pods import token_for

NAME = "test.invalid/sojourn/base:12"
BARE = "test.invalid/sojourn/bare:1"
EXECUTOR = "test.invalid/sojourn/executor:1"
# Of linux/capability.h.
NUMBERS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7}


async def run(pod: Pod, command: str, **fields: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token_for(pod.name)}", "Sandbox-Pod": pod.name}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{pod.address}/v1/exec", json={"command": command, **fields}) as answer,
    ):
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        return body


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image that images/base/Containerfile makes, on a Debian that debootstrap makes."""
    if lacking := debian.missing():
        pytest.fail(lacking, pytrace=False)
    return debian.base_image(tmp_path_factory.mktemp("image"), NAME)


@pytest.mark.root
@pytest.mark.parametrize("isolation", ["namespaces", "user namespace", "gvisor"])
@pytest.mark.parametrize("tier", ["split", "single"])
async def test_a_pod_of_the_provider_runs_commands_without_any_right_on_a_real_node(
    tier: Literal["split", "single"],
    isolation: str,
    node: RealNode,
    admin: KubeApi,
    namespace: str,
    manager_account: Account,
    gvisor: str,
    request: pytest.FixtureRequest,
) -> None:
    archive: Path = request.getfixturevalue("archive")  # made only where there is a node for it
    image = node.load(archive, NAME)
    in_gvisor, nobody = isolation == "gvisor", isolation == "user namespace"
    cluster = ClusterPod(tier=tier, runtime_class=gvisor if in_gvisor else None, user_namespace=nobody)
    profile = Profile(
        name="real", image=image, isolation="gvisor" if in_gvisor else "namespaces", cpu=1.0, memory_bytes=256 << 20,
        cluster=cluster,
    )  # fmt: skip
    async with opened(manager_account) as provider:
        pod = await provider.create(profile, "p1", idle_labels(profile), {})
        try:
            told = await run(pod, "id -u; cat /proc/self/status; ls /var/run/secrets 2>&1; echo kept >note && cat note")
            command = dict(line.split(":\t") for line in told["stdout"].splitlines() if ":\t" in line)
            assert told["stdout"].startswith("1000\n")
            assert told["stdout"].endswith("No such file or directory\nkept\n"), told  # no token of the cluster
            rights = {field: int(command[field], 16) for field in ("CapEff", "CapPrm", "CapInh", "CapAmb")}
            assert set(rights.values()) == {0}, rights
            assert command["Seccomp"] == "2"
            assert command.get("NoNewPrivs", "1") == "1"  # gVisor does not say
            executor = (await run(pod, "cat /proc/1/status"))["stdout"]
            held = int(next(line for line in executor.splitlines() if line.startswith("CapEff")).split()[1], 16)
            split = sum(1 << NUMBERS[name] for name in SPLIT_CAPABILITIES)
            assert held == (split if tier == "split" else 0)
            of_image = await run(pod, "git init -q made && ls -A made; . /etc/os-release; echo $ID; echo $HOME")
            assert of_image["stdout"] == ".git\ndebian\n/home/sandbox\n", of_image
            kernel = (await run(pod, "cat /proc/version"))["stdout"]
            assert ("gvisor" in kernel, kernel == Path("/proc/version").read_text()) == (in_gvisor, not in_gvisor)
            on_node = (await run(pod, "cat /proc/self/uid_map"))["stdout"].split()[1]
            assert (on_node != "0") == nobody, on_node  # whom the pod's root is outside
            ended = await run(pod, "sleep 1000 & (setsid sleep 1000 &); sleep 1000", timeout_sec=1)
            assert ended["timed_out"], ended
            left = await run(pod, "cat note; ps; head -c 5000000 /dev/zero | tr '\\0' x", max_output_bytes=1 << 20)
            assert left["stdout"].startswith("kept\n")
            assert "sleep 1000" not in left["stdout"]
            assert left["stdout_bytes"] > 5_000_000
        finally:
            await provider.delete("p1")
        await pod_gone(admin, namespace, "p1")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The executor as one directory, as `make bundle` makes it."""
    return build(tmp_path_factory.mktemp("bundle"))


@pytest.mark.root
@pytest.mark.parametrize("isolation", ["namespaces", "gvisor"])
@pytest.mark.parametrize("tier", ["split", "single"])
async def test_an_image_without_the_executor_has_it_copied_in_and_cannot_change_it(
    tier: Literal["split", "single"],
    isolation: str,
    node: RealNode,
    admin: KubeApi,
    namespace: str,
    manager_account: Account,
    gvisor: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    bundled: Path = request.getfixturevalue("bundle")
    image = node.load(node_images.bare(tmp_path / "bare.tar", BARE), BARE)
    executor = node.load(node_images.executor(tmp_path / "executor.tar", EXECUTOR, bundled), EXECUTOR)
    runtime_class = gvisor if isolation == "gvisor" else None
    cluster = ClusterPod(tier=tier, runtime_class=runtime_class, executor_image=executor)
    profile = Profile(
        name="bare", image=image, isolation=isolation, cpu=1.0, memory_bytes=256 << 20, cluster=cluster
    )  # fmt: skip
    async with opened(manager_account) as provider:
        pod = await provider.create(profile, "p1", idle_labels(profile), {})
        try:
            told = await run(pod, "id -u; echo kept >note && cat note; echo x >>/opt/sojourn/sojourn-executor")
            assert told["stdout"] == "1000\nkept\n", told
            assert "Read-only file system" in told["stderr"], told
            first = await run(pod, "ls /copy /opt/sojourn/sojourn-executor")
            assert first["stdout"] == "/opt/sojourn/sojourn-executor\n", first
        finally:
            await provider.delete("p1")
        await pod_gone(admin, namespace, "p1")
