"""A namespace's pods, followed for ever: listed, then watched from there on, over a connection of its own.

The server is asked to end each watch after a while, with a bookmark before that, so that a live one never is silent for
long. Silence, 410, ERROR and a watch that ends at once are answered by a new list, never sooner than the pause before
it; a watch that ends in its time is taken up where it was. While it is not known that the picture is the present one,
`current` is False.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from manager.errors import TargetUnavailable
from manager.providers.kubernetes.client import ApiRefused, ClusterClient
from manager.providers.kubernetes.objects import ApiStatus, ListMeta, PodObject, PodPage

log = logging.getLogger(__name__)

WATCH_SEC: Final = 40.0  # the server ends a watch after this, having sent a bookmark two seconds before
IDLE_SEC: Final = 50.0  # without a byte: longer than a live watch is ever silent
AT_ONCE_SEC: Final = 1.0  # a watch that ended sooner, with nothing told, ended at once
FIRST_PAUSE_SEC: Final = 1.0
LAST_PAUSE_SEC: Final = 5.0
PAGE: Final = 250
LIST_SEC: Final = 30.0


class Listed(msgspec.Struct, frozen=True):
    """All there is: what is not among it is gone."""

    pods: list[PodObject]


class Changed(msgspec.Struct, frozen=True):
    pod: PodObject
    deleted: bool = False


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Marked(msgspec.Struct, frozen=True):
    """A bookmark holds only a version."""

    metadata: ListMeta


class _Ended(Exception):
    """The watch is over. `relist`: what was missed cannot be had from it."""

    def __init__(self, why: str, *, relist: bool, wait: bool) -> None:
        super().__init__(why)
        self.relist = relist
        self.wait = wait


_decode_event: Final = msgspec.json.Decoder(_Event).decode
_decode_pod: Final = msgspec.json.Decoder(PodObject).decode
_decode_page: Final = msgspec.json.Decoder(PodPage).decode
_decode_mark: Final = msgspec.json.Decoder(_Marked).decode
_decode_status: Final = msgspec.json.Decoder(ApiStatus).decode


async def list_pods(client: ClusterClient, path: str, labels: Mapping[str, str]) -> tuple[list[PodObject], str]:
    """Every pod with these labels as it is now, read in pages, and the version of that picture.

    Raises TargetUnavailable."""
    while True:
        found: list[PodObject] = []
        query = {"labelSelector": selector(labels), "limit": str(PAGE)}
        try:
            while True:
                page = _decoded(
                    _decode_page,
                    await client.request("GET", path, query=query, deadline_sec=LIST_SEC, try_sec=LIST_SEC),
                )
                found += page.items
                if not page.metadata.next_page:
                    return found, page.metadata.resource_version
                query["continue"] = page.metadata.next_page
        except ApiRefused as why:
            if why.api_status != 410 or "continue" not in query:
                raise
            await asyncio.sleep(FIRST_PAUSE_SEC)  # the pages took longer than the server keeps a picture


def selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


class PodFollower:
    """One endless `follow`. `current`: what it has told is known to be all there is to tell."""

    def __init__(
        self,
        client: ClusterClient,
        path: str,
        labels: Mapping[str, str],
        *,
        watch_sec: float = WATCH_SEC,
        idle_sec: float = IDLE_SEC,
        first_pause_sec: float = FIRST_PAUSE_SEC,
    ) -> None:
        self._client = client
        self._path = path
        self._labels = labels
        self._watch_sec = watch_sec
        self._idle_sec = idle_sec
        self._first_pause_sec = first_pause_sec
        self._version = ""  # "": to be listed
        self.current = False
        self.lists = 0
        self.watches = 0

    async def follow(self) -> AsyncIterator[Listed | Changed]:
        """A Listed first, and again whenever something may have been missed. Ends only with its task."""
        pause = self._first_pause_sec
        while True:
            try:
                if not self._version:
                    self.lists += 1
                    found, version = await list_pods(self._client, self._path, self._labels)
                    yield Listed(found)
                    self._version = version
                    self.current = True
                told, began = False, time.monotonic()
                async for event in self._watch():
                    if not told:
                        told, pause = True, self._first_pause_sec
                    if event is not None:
                        yield event
                if time.monotonic() - began < AT_ONCE_SEC:
                    await asyncio.sleep(self._first_pause_sec)  # nothing was missed, but there is no hurry either
                continue
            except _Ended as ended:
                why, wait_sec, relist = str(ended), pause if ended.wait else 0.0, ended.relist
            except ApiRefused as refused:
                why, wait_sec, relist = f"{refused.message} {refused.words}", pause, refused.api_status == 410
            except TargetUnavailable as unavailable:
                why, wait_sec, relist = unavailable.message, max(pause, unavailable.retry_after_sec or 0.0), False
            self.current = False
            if relist:
                self._version = ""
            log.warning("cluster_watch_broken", extra={"why": why, "relist": relist})
            if wait_sec:
                await asyncio.sleep(wait_sec * random.uniform(0.8, 1.2))
                pause = min(LAST_PAUSE_SEC, pause * 2)

    async def _watch(self) -> AsyncIterator[Changed | None]:
        """What one watch tells; None for a sign of life. Raises _Ended where it did not end in its time."""
        self.watches += 1
        began, told = time.monotonic(), False
        query = {
            "labelSelector": selector(self._labels),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(max(1, round(self._watch_sec * random.uniform(0.9, 1.0)))),
        }
        try:
            async with self._client.stream(self._path, query, idle_sec=self._idle_sec) as lines:
                self.current = True  # taken up where it was: what was missed comes first, and at once
                async for line in lines:
                    event = self._event(line)
                    told = True
                    yield event
        except TimeoutError as why:
            raise _Ended(f"silent for {self._idle_sec:g} s", relist=True, wait=True) from why
        except (aiohttp.ClientError, OSError) as why:
            raise _Ended(f"broke: {type(why).__name__} {why}", relist=False, wait=True) from why
        except (msgspec.DecodeError, ValueError) as why:
            raise _Ended(f"told something that is no event: {why}", relist=True, wait=True) from why
        if not told and time.monotonic() - began < AT_ONCE_SEC:
            raise _Ended("ended at once", relist=True, wait=True)

    def _event(self, line: bytes) -> Changed | None:
        event = _decode_event(line)
        if event.type == "ERROR":
            said = _decode_status(event.object)
            raise _Ended(f"ERROR {said.code} {said.reason}", relist=True, wait=True)
        if event.type == "BOOKMARK":
            self._version = _decode_mark(event.object).metadata.resource_version or self._version
            return None
        pod = _decode_pod(event.object)
        self._version = pod.metadata.resource_version or self._version
        return Changed(pod, deleted=event.type == "DELETED")


def _decoded(decode: Any, data: bytes) -> Any:
    """Raises TargetUnavailable for an answer that is none."""
    try:
        return decode(data)
    except msgspec.DecodeError as why:
        raise TargetUnavailable("the cluster's API server answered with something that is no list of pods") from why
