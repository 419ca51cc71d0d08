"""What the API server's audit log says: who wrote what."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.cluster.api import KubeApi

WRITES: Final = ("create", "update", "patch", "delete", "deletecollection")
_SETTLE_SEC: Final = 60.0

# One line for each finished write, and for reads of whoever is under test: reads of the control plane are many.
POLICY: Final = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted, Panic]
omitManagedFields: true
rules:
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: Metadata
  nonResourceURLs: ["/version"]
- level: None
  userGroups: ["system:masters", "system:nodes"]
- level: None
  users: ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"]
- level: None
  userGroups: ["system:serviceaccounts:kube-system"]
- level: Metadata
"""


@dataclass(frozen=True)
class Entry:
    """One finished call."""

    user: str  # such as system:serviceaccount:NAMESPACE:NAME
    verb: str
    resource: str  # with the subresource, such as pods/status; empty for paths such as /version
    namespace: str
    name: str  # empty where a collection was meant or the server made it up
    status: int
    uri: str


class AuditLog:
    """Reads the log from a mark on."""

    def __init__(self, path: Path, admin: KubeApi) -> None:
        self._path = path
        self._admin = admin

    def mark(self) -> int:
        """Where the log ends now."""
        return self._path.stat().st_size if self._path.exists() else 0

    async def settled(self) -> None:
        """Returns once all calls that were answered before are in the log: it is written as they end."""
        word, mark = secrets.token_hex(8), self.mark()
        await self._admin.call("GET", "/version", query={"settled": word})
        give_up = time.monotonic() + _SETTLE_SEC
        while not any(word in entry.uri for entry in self.entries(mark)):
            assert time.monotonic() < give_up, "the audit log does not show a call that was answered"
            await asyncio.sleep(0.02)

    def entries(self, since: int = 0) -> list[Entry]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(since)
            lines = file.read().split(b"\n")
        return [_entry(json.loads(line)) for line in lines[:-1]]  # the last has no end yet

    async def calls_of(self, user: str, since: int = 0, verbs: Sequence[str] = ()) -> list[Entry]:
        """The user's calls that were answered by now, failed ones too; `verbs` empty: all."""
        await self.settled()
        return [entry for entry in self.entries(since) if entry.user == user and (not verbs or entry.verb in verbs)]

    async def writes_of(self, user: str, since: int = 0) -> Counter[tuple[str, str]]:
        """How often the user has written what: (verb, resource) -> count. Refused and failed writes count too."""
        return Counter((entry.verb, entry.resource) for entry in await self.calls_of(user, since, WRITES))


def _entry(line: dict[str, Any]) -> Entry:
    what = line.get("objectRef", {})
    resource = what.get("resource", "")
    if "subresource" in what:
        resource += "/" + what["subresource"]
    return Entry(
        user=line["user"].get("username", ""), verb=line["verb"], resource=resource,
        namespace=what.get("namespace", ""), name=what.get("name", ""),
        status=line.get("responseStatus", {}).get("code", 0), uri=line["requestURI"],
    )  # fmt: skip
