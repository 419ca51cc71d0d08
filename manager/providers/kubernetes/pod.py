"""A profile and a name -> the pod, as typed objects: the only place where a pod's manifest is made.

Nothing here asks anybody anything: the same arguments give the same pod. No caller's text reaches it but as the value
of a label or an annotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from kubernetes.aio.client import (
    V1Capabilities,
    V1Container,
    V1ContainerPort,
    V1EmptyDirVolumeSource,
    V1EnvVar,
    V1EphemeralVolumeSource,
    V1HTTPGetAction,
    V1LocalObjectReference,
    V1ObjectMeta,
    V1PersistentVolumeClaimSpec,
    V1PersistentVolumeClaimTemplate,
    V1Pod,
    V1PodDNSConfig,
    V1PodSecurityContext,
    V1PodSpec,
    V1Probe,
    V1ResourceRequirements,
    V1SeccompProfile,
    V1SecurityContext,
    V1Toleration,
    V1Volume,
    V1VolumeMount,
    V1VolumeResourceRequirements,
)

from manager.model import LABEL_STATE, ClusterPod, PodState, Profile

PORT: Final = 8080
USER: Final = 1000  # the command user's uid and gid, which images/prepare.sh makes
SPLIT_CAPABILITIES: Final = ("SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER")
LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_MANAGED: Final = "app.kubernetes.io/managed-by"
LABEL_TARGET: Final = "sojourn/target"
LABEL_NETWORK: Final = "sojourn/network"  # what network policies select by
NOTE_EVICTABLE: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
POD_NAME: Final = "sojourn-sandbox"
CONTAINER: Final = "sandbox"
EXECUTOR_DIR: Final = "/opt/sojourn"
GRACE_SEC: Final = 5  # over the executor's drain
UNUSED_GRACE_SEC: Final = 1  # of a pod that never was anybody's
DRAIN_SEC: Final = 3
NODE_LOST_SEC: Final = 5  # after its node was found lost, a pod is given up
DISK_BYTES: Final = 2 << 30  # where the profile names no bound: a pod without one could fill its node
VOLUME_POD_DISK_BYTES: Final = 1 << 30  # of the rest of a pod whose workspace is on a volume
EXECUTOR_BYTES: Final = 256 << 20
_COPY_MEMORY_BYTES: Final = 128 << 20
_NOBODY: Final = "127.0.0.1"  # as a name server

# Set by the provider, or by those who run the cluster, and nothing that a manager has to do with.
OWN_LABELS: Final = frozenset({LABEL_NAME, LABEL_MANAGED, LABEL_TARGET, LABEL_NETWORK})


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose the pod is, and the only secret's hash that it holds."""

    name: str
    namespace: str
    target: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    token_sha256: str
    unclaimed_sec: float | None = None


def selector(target: str) -> dict[str, str]:
    """The labels that all pods of a target have, and no others."""
    return {LABEL_NAME: POD_NAME, LABEL_TARGET: target}


def eviction_note(state: str | None) -> str:
    """What an autoscaler may do with the pod: nobody misses one that is nobody's."""
    return "true" if state == PodState.IDLE else "false"


def pod_spec(profile: Profile, identity: Identity) -> V1Pod:
    cluster = profile.cluster or ClusterPod()
    outbound = profile.network != "none"
    labels = {
        **identity.labels,
        **selector(identity.target),
        LABEL_MANAGED: "sojourn",
        LABEL_NETWORK: profile.network,
    }
    notes = {
        **identity.annotations,
        "kubectl.kubernetes.io/default-container": CONTAINER,
        NOTE_EVICTABLE: eviction_note(identity.labels.get(LABEL_STATE)),
    }
    if outbound:
        bits = str(profile.bandwidth_bytes_sec * 8)
        notes |= {"kubernetes.io/ingress-bandwidth": bits, "kubernetes.io/egress-bandwidth": bits}
    copied = cluster.executor_image is not None
    return V1Pod(
        api_version="v1",
        kind="Pod",
        metadata=V1ObjectMeta(name=identity.name, namespace=identity.namespace, labels=labels, annotations=notes),
        spec=V1PodSpec(
            containers=[_sandbox(profile, cluster, identity)],
            init_containers=[_copier(cluster.executor_image)] if cluster.executor_image is not None else None,
            volumes=[_workspace(profile, cluster), *([_executor_volume()] if copied else [])],
            automount_service_account_token=False,
            enable_service_links=False,
            host_network=False,
            host_pid=False,
            host_ipc=False,
            host_users=False if cluster.user_namespace else None,
            share_process_namespace=False,
            runtime_class_name=cluster.runtime_class,
            restart_policy="Never",
            termination_grace_period_seconds=GRACE_SEC,
            dns_policy="None",
            # Where there is no network nobody answers; the cluster's names are no pod's business in either case.
            dns_config=V1PodDNSConfig(nameservers=list(cluster.resolvers if outbound else ()) or [_NOBODY]),
            security_context=V1PodSecurityContext(
                run_as_user=0 if cluster.tier == "split" else USER,
                run_as_group=0 if cluster.tier == "split" else USER,
                run_as_non_root=cluster.tier == "single",
                fs_group=USER,
                fs_group_change_policy="OnRootMismatch",
                seccomp_profile=_seccomp(),
            ),
            image_pull_secrets=[V1LocalObjectReference(name=name) for name in cluster.pull_secrets] or None,
            priority_class_name=cluster.priority_class,
            node_selector=dict(cluster.node_selector) or None,
            tolerations=[
                V1Toleration(
                    key=f"node.kubernetes.io/{trouble}",
                    operator="Exists",
                    effect="NoExecute",
                    toleration_seconds=NODE_LOST_SEC,
                )
                for trouble in ("not-ready", "unreachable")
            ],
        ),
    )


def manifest(pod: V1Pod) -> dict[str, Any]:
    """As it is sent."""
    sent: dict[str, Any] = pod.model_dump(by_alias=True, exclude_none=True, mode="json")
    return sent


def _sandbox(profile: Profile, cluster: ClusterPod, identity: Identity) -> V1Container:
    split = cluster.tier == "split"
    mounts = [V1VolumeMount(name="workspace", mount_path="/workspace")]
    if cluster.executor_image is not None:
        mounts.append(V1VolumeMount(name="executor", mount_path=EXECUTOR_DIR, read_only=True))
    return V1Container(
        name=CONTAINER,
        image=profile.image,
        image_pull_policy="IfNotPresent",  # by digest: what is there is what is meant
        command=[f"{EXECUTOR_DIR}/sojourn-executor"],
        working_dir="/workspace",
        env=[V1EnvVar(name=name, value=value) for name, value in _environment(profile, identity, split).items()],
        ports=[V1ContainerPort(name="executor", container_port=PORT, protocol="TCP")],
        volume_mounts=mounts,
        resources=_resources(profile, cluster),
        security_context=_security(SPLIT_CAPABILITIES if split else (), root=split),
        readiness_probe=V1Probe(
            http_get=V1HTTPGetAction(path="/readyz", port=PORT, scheme="HTTP"),
            period_seconds=1,
            timeout_seconds=2,
            success_threshold=1,
            failure_threshold=3,
        ),
        termination_message_policy="FallbackToLogsOnError",
        stdin=False,
        tty=False,
    )


def _environment(profile: Profile, identity: Identity, split: bool) -> dict[str, str]:
    """Nothing in it is worth stealing: of the token there is only the hash."""
    env = {
        "SOJOURN_POD_NAME": identity.name,
        "SOJOURN_POD_TOKEN_SHA256": identity.token_sha256,
        "SOJOURN_DRAIN_SEC": str(DRAIN_SEC),
    }
    if split:
        env["SOJOURN_COMMAND_USER"] = profile.users[0]
        if profile.users[1:]:
            env["SOJOURN_USERS"] = ",".join(profile.users[1:])
    if identity.unclaimed_sec is not None:
        env["SOJOURN_UNCLAIMED_SEC"] = f"{identity.unclaimed_sec:g}"
    return env


def _copier(image: str) -> V1Container:
    """Copies the executor out of an image that has it into one that has not."""
    bounds = {"cpu": "500m", "memory": str(_COPY_MEMORY_BYTES), "ephemeral-storage": str(EXECUTOR_BYTES)}
    return V1Container(
        name="executor",
        image=image,
        image_pull_policy="IfNotPresent",
        command=["/bin/cp", "-R", f"{EXECUTOR_DIR}/.", "/copy/"],
        volume_mounts=[V1VolumeMount(name="executor", mount_path="/copy")],
        resources=V1ResourceRequirements(limits=bounds, requests=bounds),
        security_context=_security((), root=False),
    )


def _executor_volume() -> V1Volume:
    return V1Volume(name="executor", empty_dir=V1EmptyDirVolumeSource(size_limit=str(EXECUTOR_BYTES)))


def _workspace(profile: Profile, cluster: ClusterPod) -> V1Volume:
    size = str(profile.disk_bytes or DISK_BYTES)
    if cluster.workspace == "scratch":
        return V1Volume(name="workspace", empty_dir=V1EmptyDirVolumeSource(size_limit=size))
    # Made and deleted with the pod by the cluster itself: no claim is ever left behind, and none is shared.
    return V1Volume(
        name="workspace",
        ephemeral=V1EphemeralVolumeSource(
            volume_claim_template=V1PersistentVolumeClaimTemplate(
                metadata=V1ObjectMeta(labels={LABEL_NAME: POD_NAME, LABEL_MANAGED: "sojourn"}),
                spec=V1PersistentVolumeClaimSpec(
                    access_modes=["ReadWriteOnce"],
                    storage_class_name=cluster.storage_class,
                    resources=V1VolumeResourceRequirements(requests={"storage": size}),
                ),
            )
        ),
    )


def _resources(profile: Profile, cluster: ClusterPod) -> V1ResourceRequirements:
    disk = (profile.disk_bytes or DISK_BYTES) if cluster.workspace == "scratch" else VOLUME_POD_DISK_BYTES
    if cluster.executor_image is not None:
        disk += EXECUTOR_BYTES
    limits = {"ephemeral-storage": str(disk)}
    if profile.memory_bytes is not None:
        limits["memory"] = str(profile.memory_bytes)
    if profile.cpu is not None:
        limits["cpu"] = f"{max(1, round(profile.cpu * 1000))}m"
    return V1ResourceRequirements(limits=limits, requests=dict(limits))


def _security(capabilities: tuple[str, ...], *, root: bool) -> V1SecurityContext:
    return V1SecurityContext(
        run_as_user=0 if root else USER,
        run_as_group=0 if root else USER,
        run_as_non_root=not root,
        privileged=False,
        allow_privilege_escalation=False,
        capabilities=V1Capabilities(drop=["ALL"], add=list(capabilities) or None),
        seccomp_profile=_seccomp(),
    )


def _seccomp() -> V1SeccompProfile:
    return V1SeccompProfile(type="RuntimeDefault")
