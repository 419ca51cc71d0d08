"""Who of the managers does what only one has to, by a Lease of the cluster.

A lease is another's until it has not been renewed for its length as this process saw it pass: clocks of two machines
are never compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from manager.errors import TargetUnavailable
from manager.providers.kubernetes.client import ApiRefused, ClusterClient

_PREFIX: Final = "sojourn-"


class _Spec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Meta(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    name: str
    namespace: str
    resource_version: str | None = None


class _Lease(msgspec.Struct, frozen=True, rename="camel"):
    metadata: _Meta
    spec: _Spec
    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"


class Election:
    """`lead` as the store has it, in a namespace of a cluster."""

    def __init__(self, client: ClusterClient, namespace: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._namespace = namespace
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._clock = clock
        self._mine: dict[str, float] = {}  # name -> until when it is ours for sure
        self._seen: dict[str, tuple[str, float]] = {}  # name -> the version seen, and when it was first seen
        self._turns: dict[str, asyncio.Lock] = {}

    async def lead(self, name: str, holder: str, seconds: float) -> bool:
        """Takes or renews the leadership `name` for so long; False where another holds it. 0 seconds give it up.

        A leadership with more than half of its time left is not written again. Raises TargetUnavailable."""
        async with self._turns.setdefault(name, asyncio.Lock()):
            began = self._clock()
            if seconds > 0 and self._mine.get(name, 0.0) - began > seconds / 2:
                return True
            try:
                held = await self._held(name, holder, seconds, began)
            except TargetUnavailable:
                if seconds > 0 and self._mine.get(name, 0.0) > began:
                    return True
                raise
            if held and seconds > 0:
                # From before the request: the others count from when they see it.
                self._mine[name] = began + seconds
            else:
                self._mine.pop(name, None)
            return held and seconds > 0

    async def _held(self, name: str, holder: str, seconds: float, now: float) -> bool:
        lease = await self._read(name)
        if lease is None:
            if seconds <= 0:
                return False
            return await self._write("POST", self._path, self._lease(name, holder, seconds, None))
        spec, version = lease.spec, lease.metadata.resource_version or ""
        free = not spec.holder_identity or spec.holder_identity == holder
        if not free:
            seen_version, since = self._seen.get(name, ("", now))
            if seen_version != version:
                self._seen[name] = (version, now)
                return False
            if now - since < (spec.lease_duration_seconds or 1):
                return False
        if seconds <= 0:
            if spec.holder_identity != holder:
                return False
            given_up = self._lease(name, None, 1, lease)
            return await self._write("PUT", f"{self._path}/{_PREFIX}{name}", given_up)
        return await self._write("PUT", f"{self._path}/{_PREFIX}{name}", self._lease(name, holder, seconds, lease))

    async def _read(self, name: str) -> _Lease | None:
        try:
            data = await self._client.request("GET", f"{self._path}/{_PREFIX}{name}")
        except ApiRefused as why:
            if why.api_status == 404:
                return None
            raise
        try:
            return msgspec.json.decode(data, type=_Lease)
        except msgspec.DecodeError as why:
            raise TargetUnavailable("the cluster's API server answered with something that is no lease") from why

    def _lease(self, name: str, holder: str | None, seconds: float, before: _Lease | None) -> _Lease:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        kept = before is not None and before.spec.holder_identity == holder
        turns = (before.spec.lease_transitions or 0) if before is not None else 0
        return _Lease(
            _Meta(
                name=_PREFIX + name,
                namespace=self._namespace,
                resource_version=before.metadata.resource_version if before is not None else None,
            ),
            _Spec(
                holder_identity=holder,
                lease_duration_seconds=max(1, round(seconds)),
                acquire_time=before.spec.acquire_time if before is not None and kept else now,
                renew_time=now,
                lease_transitions=turns if kept else turns + 1,
            ),
        )

    async def _write(self, method: str, path: str, lease: _Lease) -> bool:
        """False where somebody else was faster."""
        try:
            await self._client.request("POST" if method == "POST" else "PUT", path, body=msgspec.to_builtins(lease))
        except ApiRefused as why:
            if why.api_status == 409:
                # Ours, if an earlier try of this very write was the faster one.
                return why.doubtful and await self._is_ours(lease)
            raise
        return True

    async def _is_ours(self, written: _Lease) -> bool:
        found = await self._read(written.metadata.name.removeprefix(_PREFIX))
        return (
            found is not None
            and found.spec.holder_identity == written.spec.holder_identity
            and found.spec.renew_time == written.spec.renew_time
        )
