"""ServiceAccounts with just the rights that a test gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.cluster.api import KubeApi
from tests.support.cluster.control_plane import ControlPlane

Rule = dict[str, Sequence[str]]

# What a manager may do in the namespace of its pods, and nowhere else: as the Helm chart has it.
MANAGER_RULES: Final[Sequence[Rule]] = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "create", "patch", "delete"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
)  # fmt: skip


@dataclass(frozen=True)
class Account:
    """A ServiceAccount's access."""

    user: str  # as the audit log names it
    namespace: str
    token: str
    kubeconfig: Path


async def account(
    plane: ControlPlane, admin: KubeApi, namespace: str, name: str = "manager", rules: Sequence[Rule] = MANAGER_RULES
) -> Account:
    """Makes a ServiceAccount, and a Role with `rules` bound to it, in the namespace."""
    base = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await admin.create(base, {"metadata": {"name": name}})
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    role: dict[str, Any] = {"metadata": {"name": name}, "rules": [dict(rule) for rule in rules]}
    await admin.create(f"{rbac}/roles", role)
    await admin.create(
        f"{rbac}/rolebindings",
        {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    )
    asked = await admin.create(f"{base}/{name}/token", {"spec": {"expirationSeconds": 7200}})
    token = str(asked["status"]["token"])
    user = f"system:serviceaccount:{namespace}:{name}"
    return Account(user, namespace, token, plane.token_kubeconfig(name, token, namespace))
