"""Pods whose workspaces are dictionaries and whose layers are JSON: the executor's promises on layers, without one."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from manager.errors import ExecutorRefused, ExecutorUnreachable
from manager.executor_client import PodRef

Files = dict[str, str]


@dataclass
class Report:
    entries: int
    removed: int
    bytes: int
    written: str | None = None


@dataclass
class Applied:
    state: str | None


@dataclass
class Stream:
    base: str | None
    state: str
    body: bytes
    report: Report
    piece: int
    before_piece: Callable[[], Awaitable[None]] | None = None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for at in range(0, len(self.body), self.piece):
            if self.before_piece is not None:
                await self.before_piece()
            yield self.body[at : at + self.piece]


@dataclass
class LayerPod:
    """One pod. `lie` changes what it says of a layer before it is sent."""

    files: Files = field(default_factory=dict)
    known: dict[str, Files] = field(default_factory=dict)
    partial: bool = False
    lie: Callable[[Stream], None] | None = None
    before_piece: Callable[[], Awaitable[None]] | None = None
    before_written_piece: Callable[[], Awaitable[None]] | None = None
    calls: list[str] | None = None  # the paths that file calls have changed; None: an executor that keeps none
    began: int = field(default_factory=time.time_ns)

    def call(self, path: str, text: str | None) -> None:
        """A file call that has changed something."""
        if text is None:
            self.files.pop(path, None)
        else:
            self.files[path] = text
        self.calls = [*(self.calls or []), path]

    @property
    def calls_state(self) -> str:
        return f"{self.began:016x}{len(self.calls or []):016x}"


class LayerPods:
    """manager.services.checkpoints.PodLayers over `pods`, by name."""

    def __init__(self, piece: int = 100) -> None:
        self.pods: dict[str, LayerPod] = {}
        self.asked: list[str | None] = []  # the `since` of each call
        self.asked_written: list[str] = []
        self._piece = piece

    def add(self, name: str, files: Files | None = None) -> PodRef:
        self.pods[name] = LayerPod(files=dict(files or {}))
        return PodRef(name, f"unix:/run/{name}")

    @asynccontextmanager
    async def changes(self, pod: PodRef, since: str | None) -> AsyncIterator[Stream]:
        found = self._pod(pod)
        self.asked.append(since)
        base = since if since in found.known else None
        before = found.known[base] if base is not None else {}
        now = dict(found.files)
        changed = {path: text for path, text in now.items() if before.get(path) != text}
        removed = [path for path in before if path not in now]
        body = json.dumps({"full": base is None, "set": changed, "removed": removed}).encode()
        state = secrets.token_hex(16)
        written = found.calls_state if found.calls is not None else None
        report = Report(len(changed), len(removed), sum(len(text) for text in changed.values()), written)
        stream = Stream(base, state, body, report, self._piece, found.before_piece)
        if found.lie is not None:
            found.lie(stream)
        found.known = {**({base: before} if base is not None else {}), state: now}
        yield stream

    @asynccontextmanager
    async def written(self, pod: PodRef, since: str) -> AsyncIterator[Stream]:
        found = self._pod(pod)
        self.asked_written.append(since)
        if found.calls is None:
            raise ExecutorRefused("conflict", 409, "more than is remembered", False, {})
        known = since[:16] == f"{found.began:016x}"
        paths = dict.fromkeys(found.calls[int(since[16:], 16) if known else 0 :])
        now = {path: found.files[path] for path in paths if path in found.files}
        removed = [path for path in paths if path not in now]
        body = json.dumps({"full": False, "set": now, "removed": removed}).encode()
        report = Report(len(now), len(removed), sum(len(text) for text in now.values()), found.calls_state)
        yield Stream(since if known else None, found.calls_state, body, report, self._piece, found.before_written_piece)

    async def apply_layer(
        self,
        pod: PodRef,
        chunks: AsyncIterator[bytes],
        *,
        sha256: str,
        last: bool,
        max_bytes: int,
        max_entries: int,
        as_command_user: bool = False,
    ) -> Applied:
        found = self._pod(pod)
        if found.partial:
            raise ExecutorRefused("conflict", 409, "a layer was applied only in part", False, {"partial": True})
        found.partial = True
        body = b""
        try:
            async for chunk in chunks:
                body += chunk
        except Exception as why:
            raise ExecutorUnreachable("the layer broke off") from why
        if hashlib.sha256(body).hexdigest() != sha256:
            raise ExecutorRefused("invalid_request", 400, "sha256 differs", False, {"field": "sha256"})
        layer = json.loads(body)
        if len(layer["set"]) + len(layer["removed"]) > max_entries or sum(map(len, layer["set"].values())) > max_bytes:
            raise ExecutorRefused("too_large", 413, "more than was said", False, {})
        if layer["full"]:
            found.files = {}
        found.files |= layer["set"]
        for path in layer["removed"]:
            found.files.pop(path, None)
        found.partial = False
        state = secrets.token_hex(16) if last else None
        if state is not None:
            found.known = {state: dict(found.files)}
        return Applied(state)

    def _pod(self, pod: PodRef) -> LayerPod:
        if pod.name not in self.pods:
            raise ExecutorUnreachable("the pod is gone")
        return self.pods[pod.name]
