"""A thin client of the Kubernetes API for what surrounds a test: it shares no code with what is tested."""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
CALL_SEC: Final = 60.0
WATCH_SEC: Final = 300  # the server ends a watch after this
Object = dict[str, Any]


class ApiError(Exception):
    """The API server refused; `body` is its Status."""

    def __init__(self, status: int, body: Object) -> None:
        super().__init__(f"{status} {body.get('reason', '')}: {body.get('message', body)}")
        self.status = status
        self.body = body

    @property
    def reason(self) -> str:
        return str(self.body.get("reason", ""))


class KubeApi:
    """One user's access. Open one with `connected`."""

    def __init__(self, server: str, session: aiohttp.ClientSession, namespace: str) -> None:
        self.server = server
        self.namespace = namespace  # the kubeconfig's own
        self._session = session

    async def call(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Object:  # fmt: skip
        """The answer's JSON. Raises ApiError."""
        data = None if body is None else json.dumps(body).encode()
        async with self._session.request(
            method, self.server + path, params=query, data=data, headers={"Content-Type": content}
        ) as answer:
            text = await answer.read()
        try:
            found = json.loads(text)
        except ValueError:
            found = {"message": text.decode(errors="replace")}
        if answer.status >= 400:
            raise ApiError(answer.status, found)
        return dict(found)

    async def get(self, path: str, **query: str) -> Object:
        return await self.call("GET", path, query=query)

    async def find(self, path: str) -> Object | None:
        """None where it does not exist."""
        try:
            return await self.get(path)
        except ApiError as why:
            if why.status == 404:
                return None
            raise

    async def list(self, path: str, **query: str) -> list[Object]:
        return list((await self.get(path, **query))["items"])

    async def create(self, path: str, body: Object) -> Object:
        return await self.call("POST", path, body)

    async def patch(self, path: str, body: Any, content: str = MERGE) -> Object:
        return await self.call("PATCH", path, body, content=content)

    async def delete(self, path: str, **options: Any) -> None:
        """No error where it is gone already. `options` are DeleteOptions' fields."""
        try:
            await self.call("DELETE", path, options or None)
        except ApiError as why:
            if why.status != 404:
                raise

    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[tuple[str, Object]]:
        """(type, object) from the resourceVersion on, until the server ends it."""
        query |= {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_SEC)}
        timeout = aiohttp.ClientTimeout(total=WATCH_SEC + CALL_SEC)
        async with self._session.get(self.server + path, params=query, timeout=timeout) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, await answer.json(content_type=None))
            left = b""
            async for data in answer.content.iter_any():
                *lines, left = (left + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]


@asynccontextmanager
async def connected(kubeconfig: Path) -> AsyncIterator[KubeApi]:
    """Access as the kubeconfig's current context says: certificate or token, data inline or in files."""
    config = yaml.safe_load(kubeconfig.read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    tls = _tls(cluster, user, kubeconfig.parent)
    headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls, limit=0), headers=headers, read_bufsize=1 << 20,
        timeout=aiohttp.ClientTimeout(total=CALL_SEC), trust_env=False,
    ) as session:  # fmt: skip
        yield KubeApi(cluster["server"].rstrip("/"), session, context.get("namespace", "default"))


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)


def _tls(cluster: Object, user: Object, beside: Path) -> ssl.SSLContext:
    tls = ssl.create_default_context()
    if "certificate-authority-data" in cluster:
        tls = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    elif "certificate-authority" in cluster:
        tls = ssl.create_default_context(cafile=str(beside / cluster["certificate-authority"]))
    if "client-certificate-data" in user:
        with tempfile.TemporaryDirectory(prefix="sojourn-kubeconfig-") as directory:
            chain, key = Path(directory, "crt"), Path(directory, "key")
            chain.write_bytes(base64.b64decode(user["client-certificate-data"]))
            key.write_bytes(base64.b64decode(user["client-key-data"]))
            tls.load_cert_chain(chain, key)
    elif "client-certificate" in user:
        tls.load_cert_chain(beside / user["client-certificate"], beside / user["client-key"])
    return tls
