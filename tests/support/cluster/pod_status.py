"""What the tests' node agent says of pods and nodes: pure functions, shaped as a kubelet's reports."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Object = dict[str, Any]

RUNTIME: Final = "test-node-agent://1"  # of a container's id and a node's runtime: nobody takes it for a real one
SIMULATED: Final = "simulated-by-tests"  # label of such nodes


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True)
class Ended:
    """How a container ended. `evicted`: its pod with it, never to be restarted."""

    code: int
    reason: str  # Completed, Error, OOMKilled, ...
    message: str = ""
    evicted: bool = False

    @staticmethod
    def with_code(code: int) -> Ended:
        """`code` as the shell has it, 128 + signal where a signal ended the process."""
        return Ended(code, "Error" if code else "Completed")


def condition(kind: str, holds: bool | None, reason: str = "", message: str = "") -> Object:
    status = {True: "True", False: "False", None: "Unknown"}[holds]
    found: Object = {"type": kind, "status": status, "lastTransitionTime": now()}
    return {**found, "reason": reason or None, "message": message or None}  # None takes away what was said before


def waiting(pod: Object, reason: str, message: str = "") -> Object:
    """No container has started yet."""
    state: Object = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {
        "phase": "Pending", "startTime": now(),
        "conditions": [
            condition("Initialized", True), condition("Ready", False, "ContainersNotReady", "not started"),
            condition("ContainersReady", False, "ContainersNotReady", "not started"),
        ],
        "containerStatuses": [_container(spec, state, ready=False) for spec in pod["spec"]["containers"]],
    }  # fmt: skip


def running(pod: Object, ip: str, *, ready: bool, restarts: int = 0, before: Ended | None = None) -> Object:
    """Every container runs. `before`: how the first one ended the last time."""
    started = {"running": {"startedAt": now()}}
    why = ("", "") if ready else ("ContainersNotReady", "the readiness probe fails")
    statuses = [_container(spec, started, ready=ready) for spec in pod["spec"]["containers"]]
    statuses[0] |= {"restartCount": restarts, "lastState": {"terminated": _terminated(before)} if before else {}}
    return {
        "phase": "Running", "startTime": now(), "podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "127.0.0.1",
        "hostIPs": [{"ip": "127.0.0.1"}],
        "conditions": [
            condition("PodReadyToStartContainers", True), condition("Initialized", True),
            condition("Ready", ready, *why), condition("ContainersReady", ready, *why),
        ],
        "containerStatuses": statuses,
        "initContainerStatuses": [
            _container(spec, {"terminated": _terminated(Ended(0, "Completed"))}, ready=True)
            for spec in pod["spec"].get("initContainers", [])
        ],
    }  # fmt: skip


def unheard() -> Object:
    """What the control plane makes of a pod whose node is not heard from."""
    return {"conditions": [condition("Ready", False)]}


def over(pod: Object, ended: Ended) -> Object:
    """The pod has reached its last phase."""
    state = {"terminated": _terminated(ended)}
    gone = ("PodFailed" if ended.code or ended.evicted else "PodCompleted", "")
    status: Object = {
        "phase": "Failed" if ended.code or ended.evicted else "Succeeded",
        "conditions": [condition("Ready", False, *gone), condition("ContainersReady", False, *gone)],
        "containerStatuses": [_container(spec, state, ready=False) for spec in pod["spec"]["containers"]],
    }
    if ended.evicted:
        status |= {"reason": ended.reason, "message": ended.message}
        status["conditions"].append(condition("DisruptionTarget", True, "TerminationByKubelet", ended.message))
    return status


def _terminated(ended: Ended) -> Object:
    return {
        "exitCode": ended.code, "reason": "Error" if ended.evicted else ended.reason, "startedAt": now(),
        "finishedAt": now(), "containerID": f"{RUNTIME.split(':')[0]}://0",
    }  # fmt: skip


def _container(spec: Object, state: Object, *, ready: bool) -> Object:
    return {
        "name": spec["name"], "image": spec["image"], "imageID": spec["image"], "state": state, "ready": ready,
        "started": "running" in state, "restartCount": 0,
    }  # fmt: skip


def node(name: str, labels: Mapping[str, str]) -> Object:
    own = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        SIMULATED: "true",
    }
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {**own, **labels}}}


def node_status(capacity: Mapping[str, str], version: str, ready: bool | None = True) -> Object:
    """`ready` None: nothing is known of the node, as the control plane says of one that is not heard from."""
    why = {True: "KubeletReady", False: "KubeletNotReady", None: "NodeStatusUnknown"}[ready]
    fine = [condition(kind, False, "Fine", "") for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")]
    return {
        "capacity": dict(capacity), "allocatable": dict(capacity),
        "conditions": [{**entry, "lastHeartbeatTime": now()} for entry in (*fine, condition("Ready", ready, why, why))],
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "nodeInfo": {
            "kubeletVersion": version, "containerRuntimeVersion": RUNTIME, "osImage": "simulated by the tests",
            "kernelVersion": "", "machineID": "", "systemUUID": "", "bootID": "", "kubeProxyVersion": "",
            "operatingSystem": "linux", "architecture": "amd64",
        },
    }  # fmt: skip
