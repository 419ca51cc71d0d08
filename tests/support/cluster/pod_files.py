"""What a pod's volumes hold, as directories of this machine: config maps, secrets, tokens, claims, empty ones."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.cluster.api import KubeApi
from tests.support.cluster.waiting import until_async

Object = dict[str, Any]
_TOKEN_SEC: Final = 7200


class PodFiles:
    """The files of one pod, below `directory`. `claimed(pod, claim)`: the directory behind a claim."""

    def __init__(
        self, api: KubeApi, pod: Object, directory: Path, claimed: Callable[[Object, str], Awaitable[Path]]
    ) -> None:
        self._api, self._pod, self._directory, self._claimed = api, pod, directory, claimed
        self._path = f"/api/v1/namespaces/{pod['metadata']['namespace']}"

    async def secrets_of(self, container: Object) -> dict[str, Mapping[str, str]]:
        """The Secrets that its variables name, by name."""
        sources = [entry.get("valueFrom", {}).get("secretKeyRef") for entry in container.get("env", [])]
        return {source["name"]: await self._secret(source["name"]) for source in sources if source}

    async def mounts_of(self, container: Object) -> dict[str, Path]:
        """The directory at each mount path."""
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes", [])}
        return {
            mount["mountPath"]: await self._made(volumes[mount["name"]]) for mount in container.get("volumeMounts", [])
        }

    async def _made(self, volume: Object) -> Path:
        if "persistentVolumeClaim" in volume:
            return await self._claimed(self._pod, str(volume["persistentVolumeClaim"]["claimName"]))
        directory: Path = self._directory / "volumes" / volume["name"]
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (await self._content(volume)).items():
            (directory / name).write_text(text)
        return directory

    async def _content(self, volume: Object) -> dict[str, str]:
        if "configMap" in volume:
            return await self._config_map(volume["configMap"]["name"], volume["configMap"].get("items"))
        if "secret" in volume:
            found = await self._secret(volume["secret"]["secretName"])
            return _chosen(found, volume["secret"].get("items"))
        content: dict[str, str] = {}
        for source in volume.get("projected", {}).get("sources", []):
            if "configMap" in source:
                content |= await self._config_map(source["configMap"]["name"], source["configMap"].get("items"))
            elif "serviceAccountToken" in source:
                content[source["serviceAccountToken"]["path"]] = await self._token()
            elif "downwardAPI" in source:
                content |= {
                    item["path"]: str(self._pod["metadata"][item["fieldRef"]["fieldPath"].removeprefix("metadata.")])
                    for item in source["downwardAPI"]["items"]
                }
        return content

    async def _config_map(self, name: str, items: list[Object] | None) -> dict[str, str]:
        return _chosen((await self._there(f"{self._path}/configmaps/{name}"))["data"], items)

    async def _secret(self, name: str) -> dict[str, str]:
        found = await self._there(f"{self._path}/secrets/{name}")
        return {key: base64.b64decode(value).decode() for key, value in found.get("data", {}).items()}

    async def _there(self, path: str) -> Object:
        """Waited for, as a kubelet waits for what a volume names."""

        async def there() -> bool:
            return await self._api.find(path) is not None

        await until_async(there, f"there is {path}, which a pod's volume names")
        return await self._api.get(path)

    async def _token(self) -> str:
        meta = self._pod["metadata"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        account = self._pod["spec"].get("serviceAccountName", "default")
        asked = await self._api.create(
            f"{self._path}/serviceaccounts/{account}/token",
            {"spec": {"expirationSeconds": _TOKEN_SEC, "boundObjectRef": bound}},
        )
        return str(asked["status"]["token"])


def _chosen(found: Mapping[str, str], items: list[Object] | None) -> dict[str, str]:
    """All of it, or the items that a volume asks for. Raises KeyError for one that is not there."""
    return dict(found) if items is None else {item["path"]: found[item["key"]] for item in items}
