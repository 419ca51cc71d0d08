"""The Helm chart as text: what it renders, what it refuses, and that the manager takes what it writes."""

from __future__ import annotations

import base64
import ipaddress
import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from manager.config import SETTINGS, ManagerConfig, TargetConfig, _ProfileTable, _ProjectTable
from manager.config_pool import PoolTable
from manager.egress.addresses import REFUSED_V4, is_public
from tests.support.cluster.accounts import MANAGER_RULES
from tests.support.cluster.helm import CHART, DIGEST, EVERYTHING, KEDA, Helm, Object, Refused, one, pod_specs


@pytest.fixture(scope="module")
def plain(helm: Helm) -> list[Object]:
    return helm.render()


@pytest.fixture(scope="module")
def everything(helm: Helm) -> list[Object]:
    return helm.render(EVERYTHING)


def config_of(objects: list[Object], directory: Path) -> ManagerConfig:
    """As the manager reads what its ConfigMap holds."""
    file = directory / "sojourn.toml"
    file.write_text(one(objects, "ConfigMap", "sandbox-gateway")["data"]["sojourn.toml"])
    return ManagerConfig.load({"SOJOURN_CONFIG": str(file)})


def test_helm_finds_nothing_wrong_with_the_chart(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize("name", ["kind", "cloud"])
def test_the_values_for_kind_and_for_a_cloud_are_taken_by_chart_and_manager(
    helm: Helm, name: str, tmp_path: Path
) -> None:
    text = (CHART / f"values-{name}.yaml").read_text()
    given = yaml.safe_load(text.replace("<digest>", "ab" * 32).replace("<", "").replace(">", ""))
    config = config_of(helm.render(given), tmp_path)
    assert config.targets[0].name == given["cluster"]["name"]
    assert [profile.name for profile in config.profiles] == [profile["name"] for profile in given["profiles"]]


def test_its_names_are_the_ones_that_are_promised(plain: list[Object], everything: list[Object]) -> None:
    assert one(plain, "Deployment", "sandbox-gateway")["metadata"]["namespace"] == "sandbox"
    service = one(plain, "Service", "sandbox-gateway")
    assert [port["port"] for port in service["spec"]["ports"]] == [8780]
    assert one(plain, "Namespace", "sandbox-jobs")
    assert one(plain, "Secret", "sandbox-runtime")["metadata"]["namespace"] == "sandbox"
    assert not [found for found in plain if found["metadata"]["name"] == "sandbox-harbor-worker"]
    (worker,) = one(everything, "Deployment", "sandbox-harbor-worker")["spec"]["template"]["spec"]["containers"]
    assert {"name": "SANDBOX_GATEWAY_URL", "value": "http://sandbox-gateway:8780"} in worker["env"]


def test_the_manager_takes_the_file_that_is_rendered(
    plain: list[Object], everything: list[Object], tmp_path: Path
) -> None:
    config = config_of(plain, tmp_path)
    default, pool = config.profiles
    assert (default.name, pool.name) == ("sandboxes-default", "sandboxes-pool")
    assert default.cluster is not None
    assert pool.cluster is not None
    assert (default.cluster.runtime_class, default.cluster.workspace) == ("gvisor", "volume")
    assert (pool.cluster.runtime_class, pool.cluster.workspace, pool.pool_min) == ("gvisor", "scratch", 2)
    assert (config.targets[0].provider, config.targets[0].namespace) == ("kubernetes", "sandbox-jobs")
    config = config_of(everything, tmp_path)
    (policy,) = config.projects.values()
    assert (policy.profiles, policy.concurrency, policy.cpu) == (("sandboxes-pool",), 20, 1.5)
    assert (config.idle_ttl_sec, config.objects) == (600, EVERYTHING["objects"]["url"])
    assert config.targets[0].node_selector == {"pool": "sandboxes"}


def test_a_value_reaches_the_file_as_it_was_written_and_never_as_more_of_the_file(helm: Helm, tmp_path: Path) -> None:
    region = 'a"\n[[targets]]\nname = "b"\\u0041\t</script>'
    projects = {"a.b/c-d": {"cpu": 1.25, "memory": "1500M"}}
    config = config_of(helm.render({"cluster": {"region": region}, "projects": projects}), tmp_path)
    assert [target.region for target in config.targets] == [region]
    (policy,) = config.projects.values()
    assert (policy.cpu, policy.memory_bytes) == (1.25, 1_500_000_000)


def test_every_value_under_the_managers_own_names_is_one_that_it_reads() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(schema["settings"]["properties"]) <= {setting.field for setting in SETTINGS if not setting.secret}
    profile = schema["profiles"]["items"]["properties"]
    assert set(profile) <= set(_ProfileTable.__struct_fields__) - {"target"}
    assert set(profile["pool"]["properties"]) <= set(PoolTable.__struct_fields__)
    own = {"provider", "namespace", "kubeconfig", "context"}
    assert set(schema["cluster"]["properties"]) <= set(TargetConfig.__struct_fields__) - own
    assert set(schema["projects"]["additionalProperties"]["properties"]) <= set(_ProjectTable.__struct_fields__)


PROFILE: Final = {"name": "sandboxes-default"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"manager": {"image": ""}}, "manager.image is needed"),
        ({"manager": {"replica": 3}}, "'replica' not allowed"),
        ({"manager": {"replicas": 0}}, "/manager/replicas"),
        ({"sandboxImage": "python:3.12"}, "/sandboxImage"),
        ({"sandboxImage": ""}, "image is needed, by digest"),
        ({"profiles": []}, "/profiles"),
        ({"profiles": [{"name": "other"}]}, "sandboxes-default is needed"),
        ({"profiles": [PROFILE, PROFILE]}, "twice"),
        ({"profiles": [{**PROFILE, "image": "python@latest"}]}, "/profiles/0/image"),
        ({"profiles": [{**PROFILE, "isolation": "none"}]}, "/profiles/0/isolation"),
        ({"profiles": [{**PROFILE, "idle_ttl": 5}]}, "'idle_ttl' not allowed"),
        ({"profiles": [{**PROFILE, "memory": "1 GB"}]}, "/profiles/0/memory"),
        ({"profiles": [{**PROFILE, "pool": {"min": 5, "max": 2}}]}, "min <= max"),
        ({"profiles": [{**PROFILE, "pool": {"size": 5, "max": 2}}]}, "not both"),
        ({"warmNodes": {"placeholders": {"followPool": "big"}}}, 'no profile "big"'),
        ({"profiles": [{**PROFILE, "network": "internet"}]}, "no class of network.classes"),
        ({"profiles": [{**PROFILE, "storage_class": "fast"}]}, 'workspace is not "volume"'),
        ({"projects": {"acme": {}}}, "acme"),
        ({"projects": {"acme/web": {"profiles": ["big"]}}}, 'no profile "big"'),
        ({"jobs": {"namespace": "sandbox"}}, "a namespace of their own"),
        ({"objects": {"url": "s3://key@bucket"}}, "/objects/url"),
        ({"objects": {"url": "https://bucket"}}, "/objects/url"),
        ({"network": {"classes": {"meta": [{"cidr": "169.254.169.254/32"}]}}}, "metadata"),
        ({"network": {"classes": {"half": [{"cidr": "128.0.0.0/1"}]}}}, "wider than a /8"),
        ({"network": {"classes": {"all": [{"cidr": "1.2.3.4/0"}]}}}, "write 0.0.0.0/0"),
        ({"network": {"classes": {"none": []}}}, "`none` reaches nothing"),
        ({"autoscaling": {"enabled": True}, "keda": {"enabled": True, "prometheus": "http://p"}}, "one of them"),
        ({"keda": {"enabled": True}}, "keda.prometheus is needed"),
        ({"ingress": {"enabled": True}}, "ingress.host is needed"),
        ({"worker": {"enabled": True}}, "worker.image is needed"),
        ({"redis": {"own": False}}, "redis-url"),
        ({"settings": {"manager_secret": "x" * 40}}, "'manager_secret' not allowed"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_by_name(helm: Helm, values: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(values)
    assert words in str(refused.value)


def test_a_managers_rights_are_these_and_the_ones_that_all_tests_run_with(plain: list[Object]) -> None:
    """S15"""
    (role,) = [found for found in plain if found["kind"] in ("Role", "ClusterRole")]
    assert (role["kind"], role["metadata"]["namespace"]) == ("Role", "sandbox-jobs")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "create", "patch", "delete"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
    ]
    assert role["rules"] == [dict(rule) for rule in MANAGER_RULES]
    (binding,) = [found for found in plain if found["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    assert binding["kind"] == "RoleBinding"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "sandbox-gateway", "namespace": "sandbox"}]


def test_only_managers_have_an_account_of_the_cluster_and_no_pod_has_more_than_it_needs(
    everything: list[Object],
) -> None:
    """S15"""
    pods = pod_specs(everything)
    assert len(pods) == 6
    for where, spec in pods.items():
        assert spec["automountServiceAccountToken"] is (where == "Deployment/sandbox-gateway"), where
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip


def test_no_secret_is_in_the_values_a_config_map_or_a_command(everything: list[Object]) -> None:
    secret = one(everything, "Secret", "sandbox-runtime")
    made = set(secret["stringData"].values())
    assert len(made) == 5
    assert all(len(value) >= 32 for value in made)
    rest = json.dumps([found for found in everything if found is not secret])
    assert not [value for value in made if value in rest or base64.b64encode(value.encode()).decode() in rest]
    text = (CHART / "values.yaml").read_text().lower()
    assert not [line for line in text.splitlines() if "password:" in line or "token:" in line]


def test_a_secret_is_made_once_and_is_no_part_of_what_an_upgrade_or_an_uninstall_touches(helm: Helm) -> None:
    (made,) = [found for found in helm.render() if found["kind"] == "Secret"]
    assert made["metadata"]["annotations"]["helm.sh/hook"] == "pre-install"
    assert made["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "hook-failed"
    assert not [found for found in helm.render({}, "--is-upgrade") if found["kind"] == "Secret"]
    assert not [found for found in helm.render({"secret": {"generate": False}}) if found["kind"] == "Secret"]


def test_the_namespace_of_sandboxes_is_held_to_what_its_pods_meet(helm: Helm) -> None:
    def level(values: dict[str, Any]) -> str:
        labels = one(helm.render(values), "Namespace", "sandbox-jobs")["metadata"]["labels"]
        return str(labels["pod-security.kubernetes.io/enforce"])

    assert level({}) == "baseline"
    assert level({"cluster": {"tier": "single"}}) == "restricted"
    mixed = {"cluster": {"tier": "single"}, "profiles": [PROFILE, {"name": "root", "tier": "split"}]}
    assert level(mixed) == "baseline"


def test_what_lasts_is_kept_when_a_release_goes(plain: list[Object]) -> None:
    for kind, name in (("Namespace", "sandbox-jobs"), ("PersistentVolumeClaim", "sandbox-gateway-objects")):
        assert one(plain, kind, name)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


# Networks: what policies let, read as the API's documentation says that they are read.


def egress_of(objects: list[Object], network: str) -> list[Object]:
    """The egress rules that hold for a sandbox's pod of the class."""
    labels = {"app.kubernetes.io/name": "sojourn-sandbox", "sojourn/network": network}
    policies = [found for found in objects if found["kind"] == "NetworkPolicy"]
    mine = [
        found["spec"]
        for found in policies
        if found["metadata"]["namespace"] == "sandbox-jobs"
        and found["spec"]["podSelector"].get("matchLabels", {}).items() <= labels.items()
    ]
    assert any("Egress" in spec["policyTypes"] and not spec.get("egress") for spec in mine), "closed but for rules"
    return [rule for spec in mine for rule in spec.get("egress", [])]


def reaches(rules: list[Object], address: str, port: int, protocol: str = "TCP") -> bool:
    def inside(block: Object) -> bool:
        real = ipaddress.ip_address(address)
        holds = [
            real.version == network.version and real in network
            for network in map(ipaddress.ip_network, (block["cidr"], *block.get("except", [])))
        ]
        return holds[0] and not any(holds[1:])

    def has(port_rules: list[Object]) -> bool:
        return not port_rules or any((one["protocol"], one["port"]) == (protocol, port) for one in port_rules)

    return any(has(rule.get("ports", [])) and any(inside(peer["ipBlock"]) for peer in rule["to"]) for rule in rules)


def test_a_sandbox_of_the_class_none_reaches_nothing(everything: list[Object]) -> None:
    """S16"""
    assert egress_of(everything, "none") == []


def test_a_sandbox_with_a_network_reaches_public_addresses_and_no_other(everything: list[Object]) -> None:
    """S16"""
    rules = egress_of(everything, "outbound")
    refused = tuple(map(ipaddress.ip_network, EVERYTHING["settings"]["outbound_refused"]))
    tried = [
        "1.1.1.1", "8.8.8.8", "93.184.216.34", "169.254.169.254", "10.96.0.1", "172.20.0.1", "192.168.1.1", "127.0.0.1",
        "100.100.100.200", "168.63.129.16", "192.0.0.192", "0.0.0.0", "224.0.0.1", "255.255.255.255", "203.0.112.9",
        "2606:4700::1111", "fd00:ec2::254", "fe80::1", "::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::",
        "2001:db8::1", "2600:1::5", "ff02::1",
    ]  # fmt: skip
    tried += [str(edge) for network in REFUSED_V4 for edge in (network[0], network[-1])]
    for address in tried:
        # What stands for an IPv4 address is refused outright here: no policy can look into it.
        plain = is_public(ipaddress.ip_address(address), refused) and not address.startswith(("64:", "2002:", "::ffff"))
        assert reaches(rules, address, 443) is plain, address
    assert reaches(rules, "1.1.1.1", 53, "UDP")
    blocks = {
        block["cidr"]: block["except"] for rule in rules for block in [rule["to"][0]["ipBlock"]] if "except" in block
    }
    assert set(map(str, REFUSED_V4)) <= set(blocks["0.0.0.0/0"])


def test_classes_of_ones_own_reach_names_and_what_they_list(everything: list[Object]) -> None:
    """S16"""
    packages, names = egress_of(everything, "packages"), egress_of(everything, "dns")
    for rules, listed in ((packages, True), (names, False)):
        assert reaches(rules, "151.101.0.223", 443) is listed
        assert reaches(rules, "1.1.1.1", 53, "UDP")
        assert not reaches(rules, "151.101.0.223", 80)
        assert not reaches(rules, "1.1.1.1", 443)
        assert not reaches(rules, "10.96.0.10", 53, "UDP")
    assert egress_of(everything, "no-such-class") == []


def test_only_managers_reach_sandboxes_and_no_sandbox_reaches_a_manager_or_the_store(plain: list[Object]) -> None:
    """S16"""
    (rule,) = one(plain, "NetworkPolicy", "from-managers")["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "sandbox"}}
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "manager"
    assert rule["ports"] == [{"protocol": "TCP", "port": 8080}]
    managers = one(plain, "NetworkPolicy", "sandbox-gateway")["spec"]["ingress"]
    spaces = [peer["namespaceSelector"] for rule in managers for peer in rule["from"] if "namespaceSelector" in peer]
    but = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["sandbox-jobs"]}
    assert spaces == [{"matchExpressions": [but]}] * 2
    store = one(plain, "NetworkPolicy", "sandbox-redis")["spec"]
    assert ("namespaceSelector" in str(store), store["policyTypes"]) == (False, ["Ingress", "Egress"])


def test_no_command_is_cut_off_where_a_manager_is_replaced(helm: Helm) -> None:
    """F31: a manager goes only after another is ready, and has longer than its answers take."""
    spec = one(helm.render({"settings": {"leaving_sec": 7, "drain_sec": 100}}), "Deployment", "sandbox-gateway")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 107
    assert spec["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_what_scales_managers_watches_metrics_that_they_have(helm: Helm, everything: list[Object]) -> None:
    source = (CHART.parents[1] / "manager" / "app.py").read_text()
    keda = helm.render(KEDA)
    follows = one(keda, "ScaledObject", "sandbox-placeholders")["spec"]["triggers"][0]["metadata"]["query"]
    assert follows == 'max(sojourn_pool_wanted{profile="sandboxes-pool"})'
    assert "replicas" not in one(keda, "Deployment", "sandbox-placeholders")["spec"]
    for objects in (everything, keda):
        scaler = next(found for found in objects if found["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"))
        assert "sojourn_requests_in_flight" in json.dumps(scaler)
        assert "replicas" not in one(objects, "Deployment", "sandbox-gateway")["spec"]
    assert '"sojourn_requests_in_flight"' in source
    assert '"sojourn_pool_wanted"' in source


def test_warm_nodes_pull_every_image_and_hold_room_that_sandboxes_take(everything: list[Object]) -> None:
    pulled = one(everything, "DaemonSet", "sandbox-images")["spec"]["template"]["spec"]
    assert [container["image"] for container in pulled["initContainers"]] == [
        f"test.invalid/executor@{DIGEST}", f"test.invalid/sojourn/python@{DIGEST}",
    ]  # fmt: skip
    assert pulled["nodeSelector"] == {"pool": "sandboxes"}
    room = one(everything, "PriorityClass", "sandbox-placeholder")
    assert (room["value"], room["preemptionPolicy"]) == (-10, "Never")
    held = one(everything, "Deployment", "sandbox-placeholders")["spec"]["template"]["spec"]
    assert (held["priorityClassName"], held["terminationGracePeriodSeconds"]) == ("sandbox-placeholder", 0)
