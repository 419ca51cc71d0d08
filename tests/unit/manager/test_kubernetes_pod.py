"""The manifest of a pod: whole, as it is sent, and the only one there is (S15, S16)."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manager.model import ClusterPod, Owner, Profile, new_id, task_label
from manager.providers.kubernetes.pod import Identity, manifest, pod_spec
from manager.services.pool import idle_labels

ROOT = Path(__file__).parents[3]
IMAGE = "registry.example/python@sha256:" + "ab" * 32
EXECUTOR = "registry.example/sojourn@sha256:" + "cd" * 32
PROFILE = Profile(name="small", image=IMAGE, cpu=1.5, memory_bytes=1 << 30, disk_bytes=4 << 30, cluster=ClusterPod())


def identity(**changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "name": "p" + "a" * 26,
        "namespace": "sandbox-jobs",
        "target": "here",
        "labels": {"sojourn/state": "idle", "sojourn/task": ""},
        "annotations": {"sojourn/claim-token": ""},
        "token_sha256": "0" * 64,
        "unclaimed_sec": 600.0,
    }
    return Identity(**{**fields, **changes})


def made(profile: Profile = PROFILE, **changes: Any) -> dict[str, Any]:
    return manifest(pod_spec(profile, identity(**changes)))


def with_cluster(profile: Profile = PROFILE, **fields: Any) -> Profile:
    return msgspec.structs.replace(profile, cluster=ClusterPod(**fields))


SPLIT: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "p" + "a" * 26,
        "namespace": "sandbox-jobs",
        "labels": {
            "sojourn/state": "idle",
            "sojourn/task": "",
            "app.kubernetes.io/name": "sojourn-sandbox",
            "app.kubernetes.io/managed-by": "sojourn",
            "sojourn/target": "here",
            "sojourn/network": "none",
        },
        "annotations": {
            "sojourn/claim-token": "",
            "kubectl.kubernetes.io/default-container": "sandbox",
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "true",
        },
    },
    "spec": {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostNetwork": False,
        "hostPID": False,
        "hostIPC": False,
        "shareProcessNamespace": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            {
                "key": "node.kubernetes.io/not-ready",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 5,
            },
            {
                "key": "node.kubernetes.io/unreachable",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 5,
            },
        ],
        "volumes": [{"name": "workspace", "emptyDir": {"sizeLimit": "4294967296"}}],
        "containers": [
            {
                "name": "sandbox",
                "image": IMAGE,
                "imagePullPolicy": "IfNotPresent",
                "command": ["/opt/sojourn/sojourn-executor"],
                "workingDir": "/workspace",
                "env": [
                    {"name": "SOJOURN_POD_NAME", "value": "p" + "a" * 26},
                    {"name": "SOJOURN_POD_TOKEN_SHA256", "value": "0" * 64},
                    {"name": "SOJOURN_DRAIN_SEC", "value": "3"},
                    {"name": "SOJOURN_COMMAND_USER", "value": "sandbox"},
                    {"name": "SOJOURN_UNCLAIMED_SEC", "value": "600"},
                ],
                "ports": [{"name": "executor", "containerPort": 8080, "protocol": "TCP"}],
                "volumeMounts": [{"name": "workspace", "mountPath": "/workspace"}],
                "resources": {
                    "limits": {"ephemeral-storage": "4294967296", "memory": "1073741824", "cpu": "1500m"},
                    "requests": {"ephemeral-storage": "4294967296", "memory": "1073741824", "cpu": "1500m"},
                },
                "securityContext": {
                    "runAsUser": 0,
                    "runAsGroup": 0,
                    "runAsNonRoot": False,
                    "privileged": False,
                    "allowPrivilegeEscalation": False,
                    "capabilities": {
                        "drop": ["ALL"],
                        "add": ["SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER"],
                    },
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "readinessProbe": {
                    "httpGet": {"path": "/readyz", "port": 8080, "scheme": "HTTP"},
                    "periodSeconds": 1,
                    "timeoutSeconds": 2,
                    "successThreshold": 1,
                    "failureThreshold": 3,
                },
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "stdin": False,
                "tty": False,
            }
        ],
    },
}


def test_a_pod_of_the_tier_split_is_exactly_this() -> None:
    """S15"""
    assert made() == SPLIT


def test_the_tier_single_differs_in_users_and_capabilities_only_and_meets_pod_security_restricted() -> None:
    wanted = copy.deepcopy(SPLIT)
    pod, container = wanted["spec"]["securityContext"], wanted["spec"]["containers"][0]
    for context in (pod, container["securityContext"]):
        context |= {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True}
    del container["securityContext"]["capabilities"]["add"]
    container["env"] = [one for one in container["env"] if one["name"] != "SOJOURN_COMMAND_USER"]
    assert made(with_cluster(tier="single")) == wanted


def test_an_image_without_an_executor_has_one_copied_in_that_its_commands_cannot_change() -> None:
    spec = made(with_cluster(executor_image=EXECUTOR))["spec"]
    assert spec["volumes"][1] == {"name": "executor", "emptyDir": {"sizeLimit": str(256 << 20)}}
    (copier,) = spec["initContainers"]
    assert (copier["image"], copier["command"]) == (EXECUTOR, ["/bin/cp", "-R", "/opt/sojourn/.", "/copy/"])
    assert copier["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert copier["securityContext"]["runAsNonRoot"] is True
    assert set(copier["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
    (container,) = spec["containers"]
    assert {"name": "executor", "mountPath": "/opt/sojourn", "readOnly": True} in container["volumeMounts"]
    assert container["resources"]["limits"]["ephemeral-storage"] == str((4 << 30) + (256 << 20))


def test_a_workspace_on_a_volume_has_a_claim_that_lives_and_dies_with_its_pod() -> None:
    spec = made(with_cluster(workspace="volume", storage_class="fast"))["spec"]
    claim = spec["volumes"][0]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": str(4 << 30)}},
    }
    assert spec["containers"][0]["resources"]["limits"]["ephemeral-storage"] == str(1 << 30)


def test_a_network_brings_its_label_its_bandwidth_both_ways_and_resolvers_but_never_the_clusters_names() -> None:
    profile = with_cluster(
        msgspec.structs.replace(PROFILE, network="outbound", bandwidth_bytes_sec=1 << 20), resolvers=("192.0.2.1",)
    )
    pod = made(profile)
    assert pod["metadata"]["labels"]["sojourn/network"] == "outbound"
    notes = pod["metadata"]["annotations"]
    assert notes["kubernetes.io/ingress-bandwidth"] == notes["kubernetes.io/egress-bandwidth"] == "8388608"
    assert (pod["spec"]["dnsPolicy"], pod["spec"]["dnsConfig"]) == ("None", {"nameservers": ["192.0.2.1"]})


def test_a_clusters_own_settings_reach_the_pod() -> None:
    fields: dict[str, Any] = {
        "user_namespace": True, "runtime_class": "gvisor", "pull_secrets": ("pull",), "priority_class": "low",
        "node_selector": (("pool", "sandboxes"),),
    }  # fmt: skip
    spec = made(with_cluster(**fields))["spec"]
    assert spec["hostUsers"] is False
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert spec["priorityClassName"] == "low"
    assert spec["nodeSelector"] == {"pool": "sandboxes"}


def test_a_pod_without_a_bound_on_its_disk_gets_one() -> None:
    spec = made(msgspec.structs.replace(PROFILE, disk_bytes=None, cpu=None, memory_bytes=None))["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"ephemeral-storage": str(2 << 30)}
    assert spec["volumes"][0]["emptyDir"] == {"sizeLimit": str(2 << 30)}


def test_a_pool_pod_carries_from_the_start_every_label_that_a_claim_replaces() -> None:
    labels = made(labels=idle_labels(PROFILE))["metadata"]["labels"]
    assert labels["sojourn/state"] == "idle"
    assert labels["sojourn/revision"] == PROFILE.revision
    assert all(labels[f"sojourn/{key}"] == "" for key in ("task", "task-id", "sandbox"))


def test_every_field_of_a_clusters_pod_makes_another_revision() -> None:
    """Pool pods of another revision are replaced, never claimed."""
    changed: dict[str, Any] = {
        "tier": "single", "user_namespace": True, "runtime_class": "x", "executor_image": EXECUTOR,
        "workspace": "volume", "storage_class": "x", "pull_secrets": ("x",), "priority_class": "x",
        "node_selector": (("a", "b"),), "resolvers": ("192.0.2.1",),
    }  # fmt: skip
    assert set(changed) == set(ClusterPod.__struct_fields__)
    revisions = {with_cluster(**{name: value}).revision for name, value in changed.items()}
    assert len(revisions | {PROFILE.revision}) == len(changed) + 1
    assert msgspec.structs.replace(PROFILE, image=IMAGE[:-2] + "00").revision != PROFILE.revision


NASTY = st.one_of(
    st.text(max_size=200),
    st.sampled_from(
        [
            "{{ 7*7 }}",
            "a\nspec:\n  hostNetwork: true",
            "'; privileged: true #",
            '"}], "hostPID": true',
            "${HOME}",
            "- !x",
        ]
    ),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # its first text takes seconds
@given(values=st.dictionaries(st.sampled_from(["sojourn/task-id-raw", "sojourn/tenant", "sojourn/project"]), NASTY))
def test_no_text_of_a_caller_changes_more_of_a_pod_than_the_value_it_is(values: dict[str, str]) -> None:
    """S16"""
    wanted = copy.deepcopy(SPLIT)
    wanted["metadata"]["annotations"] = {**values, **SPLIT["metadata"]["annotations"]}
    del wanted["metadata"]["annotations"]["sojourn/claim-token"]
    assert made(annotations=values) == wanted


@pytest.mark.parametrize(
    "task_id", ["x" * 500, "a/b:c", "🦊🦊", "trailing---", "-", " ", "sojourn/state", "a" * 63, "UPPER", "ü"]
)
def test_every_task_id_has_a_label_of_its_own_that_kubernetes_takes(task_id: str) -> None:
    labels = {task_label(Owner(tenant, "web"), task_id) for tenant in ("acme", "other")}
    assert len(labels) == 2
    assert all(len(label) == 28 and label.startswith("t-") and label[2:].isalnum() for label in labels)
    assert all(label == label.lower() and label.isascii() for label in labels)
    assert len(new_id("p")) <= 63


def test_no_other_path_makes_a_pod() -> None:
    """S15: everything of the manager that touches Kubernetes is in its provider, and one file there makes pods."""
    for path in ROOT.glob("manager/**/*.py"):
        source = path.read_text()
        tree = ast.parse(source)
        inside = path.parent == ROOT / "manager/providers/kubernetes"
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.startswith("kubernetes"):
                    assert inside, f"{path}: {name}"
                    assert path.name in ("pod.py", "client.py"), f"{path}: {name}"
                    assert path.name == "pod.py" or ".V1" not in name, f"{path}: {name}"
            if isinstance(node, ast.Constant) and node.value == "Pod" and inside:
                assert path.name == "pod.py", path
    provider = (ROOT / "manager/providers/kubernetes/provider.py").read_text()
    assert provider.count('"POST"') == 1
    assert provider.count("manifest(pod_spec(profile, identity))") == 1
