"""The tests' node agent reports what a kubelet would, and its faults reach pods as a cluster's do."""

from __future__ import annotations

from tests.support.cluster.api import KubeApi
from tests.support.cluster.node_agent import NodeAgent, OpenAgent
from tests.support.cluster.pods import IMAGE, executor_pod, run
from tests.support.cluster.waiting import condition_of, is_ready, pod_gone, pod_that


async def test_a_container_killed_for_its_memory_is_reported_so(
    admin: KubeApi, agent: NodeAgent, namespace: str
) -> None:
    await admin.create(f"/api/v1/namespaces/{namespace}/pods", executor_pod("fat"))
    await pod_that(admin, namespace, "fat", "is ready")
    agent.oom("fat")
    pod = await pod_that(admin, namespace, "fat", "has failed", lambda pod: pod["status"]["phase"] == "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    assert not is_ready(pod)


async def test_an_evicted_pod_stays_as_a_failed_object_that_says_why(
    admin: KubeApi, agent: NodeAgent, namespace: str
) -> None:
    await admin.create(f"/api/v1/namespaces/{namespace}/pods", executor_pod("unlucky"))
    await pod_that(admin, namespace, "unlucky", "is ready")
    agent.evict("unlucky")
    pod = await pod_that(admin, namespace, "unlucky", "has failed", lambda pod: pod["status"]["phase"] == "Failed")
    assert pod["status"]["reason"] == "Evicted"
    assert condition_of(pod, "DisruptionTarget") == "True"
    await admin.delete(f"/api/v1/namespaces/{namespace}/pods/unlucky")
    await pod_gone(admin, namespace, "unlucky")


async def test_pods_of_a_lost_node_are_unready_and_stay_until_it_is_back(
    admin: KubeApi, agent: NodeAgent, namespace: str
) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    soon = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 1,
    }
    node = await agent.add_node()  # not the only one: where all are lost, the control plane waits for better times
    here = {"kubernetes.io/hostname": node}
    await admin.create(pods, executor_pod("away", nodeSelector=here))
    await admin.create(pods, executor_pod("evacuated", nodeSelector=here, tolerations=[soon]))
    await pod_that(admin, namespace, "away", "is ready")
    await pod_that(admin, namespace, "evacuated", "is ready")
    await agent.lose(node)
    await pod_that(admin, namespace, "away", "is unready", lambda pod: not is_ready(pod))
    # The control plane itself taints the node and ends what does not tolerate that for long; nobody confirms it.
    await pod_that(admin, namespace, "evacuated", "is to end", lambda pod: "deletionTimestamp" in pod["metadata"])
    await agent.recover(node)
    pod = await pod_that(admin, namespace, "away", "is ready again")
    assert (await run(pod, "echo back"))["stdout"] == "back\n"
    await pod_gone(admin, namespace, "evacuated")


async def test_an_image_that_cannot_be_pulled_holds_its_pod_until_it_can(
    admin: KubeApi, agent: NodeAgent, namespace: str
) -> None:
    await agent.pull_error(IMAGE, "manifest unknown")
    await admin.create(f"/api/v1/namespaces/{namespace}/pods", executor_pod("imageless"))

    def backs_off(pod: dict[str, object]) -> bool:
        return "ImagePullBackOff" in str(pod["status"]) and "manifest unknown" in str(pod["status"])

    await pod_that(admin, namespace, "imageless", "backs off", backs_off)
    await agent.pull_error(IMAGE, None)
    await pod_that(admin, namespace, "imageless", "is ready")


async def test_a_pod_beyond_the_nodes_capacity_is_unschedulable_in_the_schedulers_words(
    admin: KubeApi, open_agent: OpenAgent, namespace: str
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node(capacity={"pods": "1"})
    pods = f"/api/v1/namespaces/{namespace}/pods"
    await admin.create(pods, executor_pod("first"))
    await pod_that(admin, namespace, "first", "is ready")
    await admin.create(pods, executor_pod("second"))
    pod = await pod_that(admin, namespace, "second", "waits", lambda pod: condition_of(pod, "PodScheduled") == "False")
    words = next(entry for entry in pod["status"]["conditions"] if entry["type"] == "PodScheduled")
    assert words["reason"] == "Unschedulable"
    assert "Too many pods" in words["message"]
    await admin.delete(f"{pods}/first")
    await pod_that(admin, namespace, "second", "is ready")


async def test_a_container_that_ends_is_started_again_where_its_policy_says_so(
    admin: KubeApi, open_agent: OpenAgent, namespace: str
) -> None:
    agent = await open_agent(processes=False)
    await agent.add_node()
    await admin.create(f"/api/v1/namespaces/{namespace}/pods", executor_pod("steady", restartPolicy="Always"))
    await pod_that(admin, namespace, "steady", "is ready")
    agent.exit("steady", 3)
    pod = await pod_that(
        admin, namespace, "steady", "is ready again",
        lambda pod: is_ready(pod) and pod["status"]["containerStatuses"][0]["restartCount"] == 1,
    )  # fmt: skip
    assert pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 3


async def test_a_claimed_volume_keeps_the_workspace_of_a_pod_for_the_next(
    admin: KubeApi, agent: NodeAgent, namespace: str
) -> None:
    await agent.storage_class()
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    pods = f"/api/v1/namespaces/{namespace}/pods"
    spec = {
        "storageClassName": agent.STORAGE_CLASS, "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Mi"}},
    }  # fmt: skip
    await admin.create(claims, {"metadata": {"name": "kept"}, "spec": spec})
    for name, command, output in (("one", "echo kept > note", ""), ("two", "cat note", "kept\n")):
        pod = executor_pod(name, volumes=[{"name": "workspace", "persistentVolumeClaim": {"claimName": "kept"}}])
        pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "workspace", "mountPath": "/workspace"}]
        await admin.create(pods, pod)
        result = await run(await pod_that(admin, namespace, name, "is ready"), command)
        assert result["stdout"] == output, result
        await admin.delete(f"{pods}/{name}")
        await pod_gone(admin, namespace, name)
