"""What a target that is a cluster takes in the file, and what of it reaches its profiles."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from manager.model import ClusterPod

_DIGEST: Final = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]{0,400}@sha256:[0-9a-f]{64}\Z")
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_DNS_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z")
_SELECTOR_KEY: Final = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")
_SELECTOR_VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?\Z")
NAMESPACE: Final = "sandbox-jobs"


class ClusterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[targets.cluster]`: where the cluster is, and what all its pods have."""

    kubeconfig: str | None = None  # a file; None: the manager's own service account, in the cluster
    context: str | None = None
    namespace: str = NAMESPACE  # for sandboxes and nothing else
    tier: Literal["split", "single"] = "split"
    user_namespaces: bool = False
    runtime_class: str | None = None
    gvisor_class: str = "gvisor"  # the RuntimeClass of profiles with isolation gvisor
    executor_image: str | None = None
    pull_secrets: tuple[str, ...] = ()
    priority_class: str | None = None
    node_selector: dict[str, str] = {}


def check_cluster(table: ClusterTable) -> None:
    """Raises ValueError, naming the field."""
    names: dict[str, str | None] = {
        "runtime_class": table.runtime_class, "gvisor_class": table.gvisor_class,
        "priority_class": table.priority_class, **{f"pull_secrets: {name}": name for name in table.pull_secrets},
    }  # fmt: skip
    if not _DNS_LABEL.match(table.namespace):
        raise ValueError(f"namespace must be lower-case letters, digits and -, at most 63, not {table.namespace!r}")
    for field, name in names.items():
        if name is not None and not _DNS_NAME.match(name):
            raise ValueError(f"{field} must be the name of an object in the cluster, not {name!r}")
    if table.context is not None and table.kubeconfig is None:
        raise ValueError("context names one of a kubeconfig's, and there is no kubeconfig")
    if table.executor_image is not None:
        check_digest("executor_image", table.executor_image)
    for key, value in table.node_selector.items():
        if not _SELECTOR_KEY.match(key) or not _SELECTOR_VALUE.match(value):
            raise ValueError(f"node_selector: {key} = {value!r} is no label")


def check_digest(field: str, image: str) -> None:
    """Raises ValueError where what is pulled could be another image tomorrow."""
    if not _DIGEST.match(image):
        raise ValueError(
            f'{field} must name an image by its digest, "registry/name@sha256:<64 hex digits>", not {image!r}'
        )


def cluster_pod(
    table: ClusterTable,
    *,
    isolation: str,
    tier: Literal["split", "single"] | None,
    workspace: Literal["scratch", "volume"] | None,
    storage_class: str | None,
    resolvers: tuple[str, ...],
) -> ClusterPod:
    """A profile's share of it. Raises ValueError."""
    if isolation == "none":
        raise ValueError('isolation must be "namespaces" or "gvisor": a cluster\'s pods are never without')
    if storage_class is not None and workspace != "volume":
        raise ValueError('storage_class is a volume\'s, and there is none: workspace = "volume"?')
    if storage_class is not None and not _DNS_NAME.match(storage_class):
        raise ValueError(f"storage_class must be the name of one in the cluster, not {storage_class!r}")
    return ClusterPod(
        tier=tier or table.tier,
        user_namespace=table.user_namespaces,
        runtime_class=table.gvisor_class if isolation == "gvisor" else table.runtime_class,
        executor_image=table.executor_image,
        workspace=workspace or "scratch",
        storage_class=storage_class,
        pull_secrets=table.pull_secrets,
        priority_class=table.priority_class,
        node_selector=tuple(sorted(table.node_selector.items())),
        resolvers=resolvers,
    )
