"""How pods end on a real node, or do not begin, and what whoever waits for them is told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from images.bundle.build import build
from manager.errors import ImagePullFailed, SandboxGone
from manager.model import ClusterPod, Profile
from manager.services.pool import idle_labels
from manager.services.tasks import TaskExecAnswer
from tests.support.cluster import node_images
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import KubeApi
from tests.support.cluster.commands import WAIT_SEC, ended, ends_told, run, running_in
from tests.support.cluster.provider import manager, opened
from tests.support.cluster.real_node import RealNode
from tests.support.cluster.waiting import pod_gone
from tests.support.memory_store import MemoryStore

NAME = "test.invalid/sojourn/executor:1"
SOON_SEC = 10.0  # in which a caller is told
PYTHON = "/opt/sojourn/bin/python3 -I -c"
TOO_MUCH_MEMORY = f"{PYTHON} 'import time; time.sleep(3); taken = b\"x\" * (1 << 30); time.sleep(300)'"
TOO_MUCH_DISK = f'{PYTHON} \'open("big", "wb").write(b"x" * (64 << 20))\'; sleep 300'
pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]


@pytest.mark.parametrize("isolation", ["namespaces", "gvisor"])
async def test_a_command_whose_pod_the_node_ends_is_told_why_within_ten_seconds_and_the_next_gets_a_new_pod(
    isolation: str, node: RealNode, admin: KubeApi, manager_account: Account, gvisor: str, tmp_path: Path
) -> None:
    """F21"""
    image = node.load(node_images.executor(tmp_path / "executor.tar", NAME, build(tmp_path)), NAME)
    in_gvisor = isolation == "gvisor"
    profile = Profile(
        name="real", image=image, isolation=isolation, cpu=0.5, memory_bytes=256 << 20, disk_bytes=32 << 20,
        cluster=ClusterPod(runtime_class=gvisor if in_gvisor else None),
    )  # fmt: skip
    pods = f"/api/v1/namespaces/{manager_account.namespace}/pods"

    async def deleted(pod: str) -> None:
        await admin.delete(f"{pods}/{pod}")

    async def drained(pod: str) -> None:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        await admin.create(f"{pods}/{pod}/eviction", eviction)

    async def by_itself(pod: str) -> None:
        pass

    ends = [
        ("sleep 300", drained, "evicted"),
        (TOO_MUCH_DISK, by_itself, "evicted"),
        ("sleep 300", deleted, "destroyed"),
    ]
    if in_gvisor:  # its kernel is what has the memory, and is killed
        ends.append((TOO_MUCH_MEMORY, by_itself, "oom"))
    async with manager(manager_account, MemoryStore(), "m1", profile=profile, silent=False) as (services, _):
        told_at = ends_told(services)
        if not in_gvisor:  # the kernel takes the command that has the memory, and nothing else
            answer = await run(services, "t", TOO_MUCH_MEMORY)
            assert answer.result.reason == "oom_killed", answer
            assert (await run(services, "t", "echo on")).facts.provisioned == "bound"
        for command, end, wanted in ends:
            running = asyncio.create_task(run(services, "t", command))
            pod = await running_in(services, running)
            await end(pod.pod)
            async with asyncio.timeout(2 * WAIT_SEC):  # the kubelet looks at disks now and then
                told = (await asyncio.gather(running, return_exceptions=True))[0]
            assert time.monotonic() - told_at.get(pod.pod, time.monotonic()) < SOON_SEC
            if isinstance(told, SandboxGone):
                assert told.details["reason"] == wanted, command
            else:
                assert isinstance(told, TaskExecAnswer), told
                assert told.result.reason == "cancelled", told  # its executor had the time to say so
            await ended(services)
            again = await run(services, "t", "echo on")
            assert (again.result.stdout, again.facts.provisioned) == ("on\n", "cold"), again
            assert again.facts.previous is not None
            assert again.facts.previous.reason == wanted


async def test_an_image_that_the_node_cannot_pull_is_told_in_its_words_and_leaves_no_pod(
    node: RealNode, admin: KubeApi, manager_account: Account
) -> None:
    image = "test.invalid/sojourn/nowhere@sha256:" + "ab" * 32
    profile = Profile(name="real", image=image, cpu=0.1, memory_bytes=64 << 20, cluster=ClusterPod())
    async with opened(manager_account) as provider:
        with pytest.raises(ImagePullFailed, match=r"ErrImagePull.*test\.invalid/sojourn/nowhere"):
            await provider.create(profile, "p1", idle_labels(profile), {})
        await pod_gone(admin, manager_account.namespace, "p1")
