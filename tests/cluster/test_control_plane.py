"""The tests' own cluster is what the other tests here take it for."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.support.children import run_directory
from tests.support.cluster import tools
from tests.support.cluster.accounts import Account
from tests.support.cluster.api import JSON_PATCH, ApiError, KubeApi, connected
from tests.support.cluster.audit import AuditLog
from tests.support.cluster.control_plane import READY_SEC, ControlPlane
from tests.support.cluster.node_agent import NodeAgent
from tests.support.cluster.pods import executor_pod, run
from tests.support.cluster.waiting import pod_gone, pod_that, until
from tests.support.executor_pod import descendants_of
from tests.support.local_pods import lives

ROOT = Path(__file__).resolve().parents[2]


async def test_the_control_plane_is_of_the_version_that_is_asked_for(own_plane: ControlPlane, admin: KubeApi) -> None:
    assert (await admin.get("/version"))["gitVersion"] == tools.versions()[1]


async def test_a_managers_account_may_use_pods_of_its_namespace_and_nothing_else(
    manager_account: Account, namespace: str
) -> None:
    async with connected(manager_account.kubeconfig) as api:
        assert await api.list(f"/api/v1/namespaces/{namespace}/pods") == []
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        with pytest.raises(ApiError) as missing:  # it may ask for the one that it knows by its name
            await api.get(f"{leases}/none")
        assert missing.value.status == 404
        for path in (
            leases,
            "/api/v1/pods",
            "/api/v1/nodes",
            "/api/v1/namespaces/kube-system/pods",
            f"/api/v1/namespaces/{namespace}/secrets",
            f"/api/v1/namespaces/{namespace}/configmaps",
        ):
            with pytest.raises(ApiError) as refused:
                await api.get(path)
            assert refused.value.status == 403, path


async def test_the_audit_log_counts_each_write_of_a_user(
    manager_account: Account, namespace: str, audit: AuditLog
) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    async with connected(manager_account.kubeconfig) as api:
        mark = audit.mark()
        made = await api.create(pods, executor_pod("counted", schedulingGates=[{"name": "tests/never"}]))
        version = made["metadata"]["resourceVersion"]
        claim = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            {"op": "replace", "path": "/metadata/labels/sojourn~1state", "value": "claimed"},
        ]
        await api.patch(f"{pods}/counted", claim, JSON_PATCH)
        with pytest.raises(ApiError):  # somebody else was quicker
            await api.patch(f"{pods}/counted", claim, JSON_PATCH)
        await api.list(pods)
        assert await audit.writes_of(manager_account.user, mark) == {("create", "pods"): 1, ("patch", "pods"): 2}
        assert [entry.status for entry in await audit.calls_of(manager_account.user, mark, ["patch"])] == [200, 422]
        assert await audit.writes_of("system:serviceaccount:nobody:nobody", mark) == {}


async def test_a_pod_is_scheduled_to_the_tests_node_and_its_real_executor_runs_commands(
    admin: KubeApi, agent: NodeAgent, namespace: str
) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    await admin.create(pods, executor_pod("real"))
    pod = await pod_that(admin, namespace, "real", "is ready")
    assert pod["spec"]["nodeName"] in agent.nodes
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{pod['status']['podIP']}:8080/healthz") as answer,
    ):
        assert answer.status == 200
    assert (await run(pod, "echo $((6 * 7))"))["stdout"] == "42\n"
    await admin.delete(f"{pods}/real")
    await pod_gone(admin, namespace, "real")
    await until(lambda: not agent.pods, "the pod's process has ended")


async def test_a_run_that_is_killed_leaves_no_process_and_the_next_removes_its_data(own_plane: ControlPlane) -> None:
    command = [sys.executable, "-m", "tests.support.cluster", "--nodes", "1"]
    run_by_hand = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        assert run_by_hand.stdout is not None
        async with asyncio.timeout(READY_SEC * 2):
            while not (line := (await run_by_hand.stdout.readline()).decode()).startswith("KUBECONFIG="):
                assert line, "it ended before it was ready"
        directory = Path(line.removeprefix("KUBECONFIG=").strip()).parent
        children = descendants_of(run_by_hand.pid)
        assert len(children) >= 4
    finally:
        run_by_hand.kill()
        await run_by_hand.wait()
    await until(lambda: not any(lives(pid) for pid in children), "all that it started has ended")
    with run_directory("sojourn-plane", directory.parent):
        assert not directory.exists()
