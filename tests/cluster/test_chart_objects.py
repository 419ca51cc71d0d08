"""The Helm chart's objects on the real API server: all are taken, and they let and refuse what they should."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from tests.support.cluster.api import ApiError, KubeApi, Object
from tests.support.cluster.helm import EVERYTHING, KEDA, Helm, merged, one, pod_specs
from tests.support.cluster.node_agent import OpenAgent
from tests.support.cluster.waiting import pod_that, until_async

APPLY: Final = "application/apply-patch+yaml"
# What the chart uses of other projects' kinds, typed as their own definitions have it.
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
LABELS: Final = {"type": "object", "additionalProperties": TEXT}


def fields(**properties: Any) -> Object:
    return {"type": "object", "properties": properties}


FOREIGN: Final = {
    ("monitoring.coreos.com", "v1", "ServiceMonitor"): fields(
        selector=fields(matchLabels=LABELS),
        endpoints={"type": "array", "items": fields(port=TEXT, path=TEXT, interval=TEXT)},
    ),
    ("keda.sh", "v1alpha1", "ScaledObject"): fields(
        scaleTargetRef=fields(name=TEXT, kind=TEXT, apiVersion=TEXT), minReplicaCount=NUMBER, maxReplicaCount=NUMBER,
        cooldownPeriod=NUMBER, triggers={"type": "array", "items": fields(type=TEXT, metadata=LABELS)},
    ),
}  # fmt: skip


@pytest.fixture
async def spaces(new_namespace: Callable[[], Awaitable[str]]) -> tuple[str, str]:
    """The release's namespace, and that of sandboxes."""
    return await new_namespace(), await new_namespace()


async def path_of(admin: KubeApi, made: Object) -> str:
    """Where the API server has objects of this kind, and this one."""
    version, kind, meta = made["apiVersion"], made["kind"], made["metadata"]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    known = (await admin.get(base))["resources"]
    resource = next(entry for entry in known if entry["kind"] == kind and "/" not in entry["name"])
    where = f"/namespaces/{meta['namespace']}" if resource["namespaced"] else ""
    return f"{base}{where}/{resource['name']}/{meta['name']}"


async def apply(admin: KubeApi, made: Object, *, dry: bool) -> None:
    query = {"fieldManager": "test", "force": "true", "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry else {})
    await admin.call("PATCH", await path_of(admin, made), made, query=query, content=APPLY)


async def define(admin: KubeApi, group: str, version: str, kind: str, spec: Object) -> None:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "properties": {"spec": spec}}
    body = {
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }  # fmt: skip
    await admin.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)

    async def served() -> bool:
        found = await admin.find(f"/apis/{group}/{version}")
        return found is not None and any(entry["kind"] == kind for entry in found["resources"])

    await until_async(served, f"{kind} is served")


def in_spaces(spaces: tuple[str, str], values: Object) -> Object:
    return merged(values, {"jobs": {"namespace": spaces[1]}})


async def test_the_api_server_takes_every_object_in_each_of_its_forms(
    helm: Helm, own_plane: object, admin: KubeApi, spaces: tuple[str, str]
) -> None:
    for (group, version, kind), spec in FOREIGN.items():
        await define(admin, group, version, kind, spec)
    try:
        for values in ({}, EVERYTHING, {**KEDA, "service": {"type": "NodePort"}}):
            for made in helm.render(in_spaces(spaces, values), namespace=spaces[0]):
                if made["kind"] == "PriorityClass":  # the API server asks for it before it takes a pod that names it
                    await apply(admin, made, dry=False)
                await apply(admin, made, dry=True)
        misspelt = helm.render(in_spaces(spaces, EVERYTHING), namespace=spaces[0])
        monitor = one(misspelt, "ServiceMonitor", "sandbox-gateway")
        monitor["spec"]["endpoint"] = monitor["spec"].pop("endpoints")
        with pytest.raises(ApiError, match="endpoint"):
            await apply(admin, monitor, dry=True)
    finally:
        await admin.delete("/apis/scheduling.k8s.io/v1/priorityclasses/sandbox-placeholder")
        for group, _, kind in FOREIGN:
            crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            await admin.delete(f"{crds}/{kind.lower()}s.{group}")


async def test_every_pod_of_its_own_meets_pod_security_restricted(
    helm: Helm, own_plane: object, admin: KubeApi, spaces: tuple[str, str]
) -> None:
    """S15"""
    space = spaces[0]
    held = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await admin.patch(f"/api/v1/namespaces/{space}", held)
    pods = f"/api/v1/namespaces/{space}/pods"
    asked = {"dryRun": "All", "fieldValidation": "Strict"}

    async def refused(name: str, spec: Object) -> str:
        own = {**spec, "serviceAccountName": "default"}  # the account is no part of the question, nor is the priority
        own.pop("priorityClassName", None)
        try:
            await admin.call("POST", pods, {"metadata": {"name": name}, "spec": own}, query=asked)
        except ApiError as why:
            return str(why)
        return ""

    specs = pod_specs(helm.render(in_spaces(spaces, EVERYTHING), namespace=space))
    assert len(specs) == 6
    laxer = json.loads(json.dumps(specs["Deployment/sandbox-gateway"]))
    laxer["containers"][0]["securityContext"]["capabilities"] = {"add": ["NET_RAW"]}

    async def held_to_it() -> bool:
        return "restricted" in await refused("laxer", laxer)

    await until_async(held_to_it, "admission has seen the namespace's label")
    for number, (where, spec) in enumerate(specs.items()):
        assert await refused(f"p{number}", spec) == "", where


async def allowed(admin: KubeApi, user: str, verb: str, what: str, namespace: str = "") -> bool:
    """`what`: [group/]resource[/subresource]; a group has a dot or is one word before a colon."""
    group, _, rest = what.rpartition(":")
    resource, _, sub = rest.partition("/")
    about = {"verb": verb, "group": group, "resource": resource, "subresource": sub, "namespace": namespace}
    account = user.split(":")[2]
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{account}", "system:authenticated"]
    body = {"spec": {"user": user, "groups": groups, "resourceAttributes": about}}
    answer = await admin.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return bool(answer["status"]["allowed"])


async def test_a_manager_may_do_what_it_needs_where_sandboxes_are_and_nothing_else_anywhere(
    helm: Helm, own_plane: object, admin: KubeApi, spaces: tuple[str, str]
) -> None:
    """S15"""
    release, jobs = spaces
    for made in helm.render(in_spaces(spaces, EVERYTHING), namespace=release):
        if made["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            await apply(admin, made, dry=False)
    user = f"system:serviceaccount:{release}:sandbox-gateway"
    needed = [(verb, "pods") for verb in ("get", "list", "watch", "create", "patch", "delete")]
    needed += [(verb, "coordination.k8s.io:leases") for verb in ("get", "create", "update")]
    for verb, what in needed:  # the API server sees a binding in its own time

        async def granted(verb: str = verb, what: str = what) -> bool:
            return await allowed(admin, user, verb, what, jobs)

        await until_async(granted, f"{verb} {what} is allowed")
        for elsewhere in (release, "kube-system", "default", ""):
            assert not await allowed(admin, user, verb, what, elsewhere), (verb, what, elsewhere)
    never = [
        *((verb, f"pods/{sub}") for sub in ("exec", "attach", "portforward", "proxy") for verb in ("get", "create")),
        ("get", "pods/log"), ("create", "pods/eviction"), ("create", "pods/binding"), ("patch", "pods/status"),
        ("patch", "pods/ephemeralcontainers"), ("update", "pods"), ("deletecollection", "pods"),
        *((verb, what) for what in ("secrets", "configmaps", "persistentvolumeclaims", "services", "events")
          for verb in ("get", "list", "watch", "create", "update", "patch", "delete")),
        ("create", "serviceaccounts/token"), ("impersonate", "serviceaccounts"), ("delete", "namespaces"),
        ("create", "rbac.authorization.k8s.io:rolebindings"), ("escalate", "rbac.authorization.k8s.io:roles"),
        ("delete", "networking.k8s.io:networkpolicies"), ("delete", "coordination.k8s.io:leases"),
        *((verb, f"nodes{sub}") for sub in ("", "/proxy", "/stats", "/log") for verb in ("get", "list", "create")),
    ]  # fmt: skip
    for verb, what in never:
        for where in (jobs, release):
            assert not await allowed(admin, user, verb, what, where), (verb, what, where)
    assert await allowed(admin, "system:serviceaccount:kube-system:generic-garbage-collector", "get", "secrets", jobs)


async def test_an_eviction_takes_idle_pods_and_leaves_sandboxes_in_use(
    helm: Helm, open_agent: OpenAgent, admin: KubeApi, spaces: tuple[str, str]
) -> None:
    """F22"""
    agent = await open_agent(processes=False)
    await agent.add_node()
    release, jobs = spaces
    budget = one(helm.render(in_spaces(spaces, {}), namespace=release), "PodDisruptionBudget", "sandboxes-in-use")
    await apply(admin, budget, dry=False)
    pods = f"/api/v1/namespaces/{jobs}/pods"
    for state in ("claimed", "idle"):
        labels = {"app.kubernetes.io/name": "sojourn-sandbox", "sojourn/state": state}
        spec = {"containers": [{"name": "sandbox", "image": "test.invalid/x"}]}
        await admin.create(pods, {"metadata": {"name": state, "labels": labels}, "spec": spec})
        await pod_that(admin, jobs, state, "is ready")

    async def counted() -> bool:
        found = await admin.get(await path_of(admin, budget))
        return bool(found.get("status", {}).get("currentHealthy"))

    await until_async(counted, "the disruption controller knows of the pod")
    with pytest.raises(ApiError) as refused:
        await admin.create(f"{pods}/claimed/eviction", {"metadata": {"name": "claimed"}})
    assert refused.value.status == 429
    await admin.create(f"{pods}/idle/eviction", {"metadata": {"name": "idle"}})
