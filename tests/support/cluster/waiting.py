"""Waits for what a cluster does in its own time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from tests.support.cluster.api import KubeApi

LONG_SEC: Final = 60.0
_AGAIN_SEC: Final = 0.05


async def until(holds: Callable[[], bool], what: str, limit_sec: float = LONG_SEC) -> None:
    """Fails with `what` where it does not come true in time."""
    give_up = time.monotonic() + limit_sec
    while not holds():
        assert time.monotonic() < give_up, f"not within {limit_sec:.0f} s: {what}"
        await asyncio.sleep(_AGAIN_SEC)


async def until_async(holds: Callable[[], Awaitable[object]], what: str, limit_sec: float = LONG_SEC) -> None:
    """Fails with `what` where what `holds` gives does not become true in time."""
    give_up = time.monotonic() + limit_sec
    while not await holds():
        assert time.monotonic() < give_up, f"not within {limit_sec:.0f} s: {what}"
        await asyncio.sleep(_AGAIN_SEC)


def is_ready(pod: dict[str, Any]) -> bool:
    return condition_of(pod, "Ready") == "True"


def condition_of(pod: dict[str, Any], kind: str) -> str:
    """True, False, Unknown; empty where it is not there."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == kind:
            return str(condition["status"])
    return ""


async def pod_that(
    api: KubeApi, namespace: str, name: str, what: str, holds: Callable[[dict[str, Any]], bool] = is_ready
) -> dict[str, Any]:
    """The pod once `holds` says so; fails with its status where it does not in time."""
    give_up = time.monotonic() + LONG_SEC
    while True:
        pod = await api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        if holds(pod):
            return pod
        assert time.monotonic() < give_up, f"not within {LONG_SEC:.0f} s: pod {name} {what}; {pod.get('status')}"
        await asyncio.sleep(_AGAIN_SEC)


async def pod_gone(api: KubeApi, namespace: str, name: str) -> None:
    async def gone() -> bool:
        return await api.find(f"/api/v1/namespaces/{namespace}/pods/{name}") is None

    await until_async(gone, f"pod {name} is gone")
