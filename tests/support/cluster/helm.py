"""The Helm chart, rendered and installed by the helm that is built beside the control plane."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.children import die_with_parent

CHART: Final = Path(__file__).resolve().parents[3] / "helm" / "sojourn"
CALL_SEC: Final = 300
DIGEST: Final = "sha256:" + "ab" * 32
# What every installation has to name.
NEEDED: Final[Mapping[str, Any]] = {
    "manager": {"image": "test.invalid/sojourn/manager:1"},
    "sandboxImage": f"test.invalid/sojourn/python@{DIGEST}",
}
Object = dict[str, Any]
# Every option that makes more objects, but for those that exclude another.
EVERYTHING: Final[dict[str, Any]] = {
    "ingress": {"enabled": True, "host": "sandbox.example.com", "className": "nginx", "tlsSecret": "tls"},
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "autoscaling": {"enabled": True, "targetRequestsInFlight": 100},
    "worker": {"enabled": True, "image": "test.invalid/worker:1"},
    "warmNodes": {"prepull": {"enabled": True}, "placeholders": {"replicas": 2}},
    "jobs": {"quota": {"pods": "200"}},
    "cluster": {"executor_image": f"test.invalid/executor@{DIGEST}", "node_selector": {"pool": "sandboxes"}},
    "runtimeClass": {"nodeSelector": {"gvisor": "yes"}, "overhead": {"podFixed": {"memory": "64Mi"}}},
    "manager": {"envFrom": [{"secretRef": {"name": "bucket"}}], "priorityClassName": "system-cluster-critical"},
    "objects": {"url": "s3://bucket/prefix?region=eu-central-1"},
    "network": {"classes": {"packages": [{"cidr": "151.101.0.0/16", "ports": [443]}]}},
    "projects": {"acme/web": {"profiles": ["sandboxes-pool"], "concurrency": 20, "cpu": 1.5}},
    "settings": {"outbound_refused": ["203.0.112.0/24", "2600:1::/32"], "idle_ttl_sec": 600, "source_prefixes": ["s3://b/p"]},
}  # fmt: skip

KEDA: Final[Mapping[str, Any]] = {
    "keda": {"enabled": True, "prometheus": "http://prometheus:9090"},
    "warmNodes": {"placeholders": {"followPool": "sandboxes-pool"}},
}


class Refused(Exception):
    """helm ended with an error; the message is what it said."""


class Helm:
    """One helm, with settings and caches of its own in `directory`; `kubeconfig`: the cluster that it speaks to."""

    def __init__(self, program: Path, directory: Path, kubeconfig: Path | None = None) -> None:
        self._program = program
        self._directory = directory
        self._kubeconfig = kubeconfig
        self._files = 0

    def __call__(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """What it said on stdout. Raises Refused."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
        for kind in ("CACHE", "CONFIG", "DATA"):
            env[f"HELM_{kind}_HOME"] = str(self._directory / "helm" / kind.lower())
        if self._kubeconfig is not None:
            env["KUBECONFIG"] = str(self._kubeconfig)
        command = [str(self._program), *arguments]
        if values is not None:
            command += ["--values", str(self._written(values))]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=CALL_SEC, check=False, stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        if done.returncode:
            raise Refused(done.stderr + done.stdout)
        return done.stdout

    def render(
        self, values: Mapping[str, Any] | None = None, *options: str, namespace: str = "sandbox"
    ) -> list[Object]:
        """The objects of a release called `s` in the namespace, hooks included."""
        asked = merged(NEEDED, values or {})
        text = self("template", "s", str(CHART), "--namespace", namespace, *options, values=asked)
        return [found for found in yaml.safe_load_all(text) if found]

    def _written(self, values: Mapping[str, Any]) -> Path:
        self._files += 1
        path = self._directory / f"values-{self._files}.yaml"
        path.write_text(yaml.safe_dump(dict(values)))
        return path


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """As helm merges values: maps key by key, all else replaced."""
    found = dict(base)
    for key, value in over.items():
        before = found.get(key)
        found[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, Mapping) else value
    return found


def one(objects: list[Object], kind: str, name: str) -> Object:
    return next(found for found in objects if (found["kind"], found["metadata"]["name"]) == (kind, name))


def pod_specs(objects: list[Object]) -> dict[str, Object]:
    """Every pod that the objects make, by `Kind/name`."""
    found: dict[str, Object] = {}
    for made in objects:
        where = f"{made['kind']}/{made['metadata']['name']}"
        if made["kind"] == "Pod":
            found[where] = made["spec"]
        elif "template" in made.get("spec", {}):
            claims = [claim["metadata"]["name"] for claim in made["spec"].get("volumeClaimTemplates", [])]
            spec = dict(made["spec"]["template"]["spec"])
            own = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims]
            found[where] = {**spec, "volumes": [*spec.get("volumes", []), *own]}  # as their controller makes them
    return found
