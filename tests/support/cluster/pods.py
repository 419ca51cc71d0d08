"""Pods of the tests' own, and commands in them."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import aiohttp

from manager.executor_client import pod_token

SECRET: Final = b"the secret of a test's manager"
IMAGE: Final = "test.invalid/sojourn/executor:1"  # nobody pulls it: there is no container behind a simulated node


def executor_pod(name: str, **spec: Any) -> dict[str, Any]:
    """A pod whose executor answers to `pod_token(SECRET, name)`."""
    digest = hashlib.sha256(pod_token(SECRET, name).encode()).hexdigest()
    container = {
        "name": "executor", "image": IMAGE,
        "env": [
            {"name": "SOJOURN_POD_TOKEN_SHA256", "value": digest},
            {"name": "SOJOURN_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 2},
    }  # fmt: skip
    own = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "automountServiceAccountToken": False,
        "containers": [container],
    }  # fmt: skip
    return {"metadata": {"name": name, "labels": {"sojourn/state": "idle"}}, "spec": {**own, **spec}}


async def run(pod: dict[str, Any], command: str, *, port: int = 8080, token: str = "") -> dict[str, Any]:
    """What the executor of an `executor_pod`, or of one with another token, answers to one command."""
    name, ip = pod["metadata"]["name"], pod["status"]["podIP"]
    headers = {"Authorization": f"Bearer {token or pod_token(SECRET, name)}", "Sandbox-Pod": name}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"http://{ip}:{port}/v1/exec", json={"command": command}) as answer,
    ):
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        return body
