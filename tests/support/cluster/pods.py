"""Pods of the tests' own, and commands in them."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
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


async def put_archive(pod: dict[str, Any], path: str, directory: Path) -> None:
    """A copy of a directory at a path in the workspace of an `executor_pod`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(directory, directory.name)
    async with (
        _calling(pod, "") as session,
        session.put(_url(pod, 8080, "archive"), params={"path": path}, data=packed.getvalue()) as answer,
    ):
        assert answer.status == 201, await answer.text()


async def run(pod: dict[str, Any], command: str, *, port: int = 8080, token: str = "") -> dict[str, Any]:
    """What the executor of an `executor_pod`, or of one with another token, answers to one command."""
    async with (
        _calling(pod, token) as session,
        session.post(_url(pod, port, "exec"), json={"command": command}) as answer,
    ):
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        return body


def _calling(pod: dict[str, Any], token: str) -> aiohttp.ClientSession:
    name = pod["metadata"]["name"]
    headers = {"Authorization": f"Bearer {token or pod_token(SECRET, name)}", "Sandbox-Pod": name}
    return aiohttp.ClientSession(headers=headers)


def _url(pod: dict[str, Any], port: int, call: str) -> str:
    return f"http://{pod['status']['podIP']}:{port}/v1/{call}"
