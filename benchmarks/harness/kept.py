"""A sandbox of a whole stack stopped, stopped again after ten changes, and started; beside the floor of a start.

The floor is what nothing that keeps layers of files can go below: the same layers fetched from the same object storage
by the manager's own code, which compares each chunk with its hash, and piped through `zstd -d | tar -x` into a fresh
directory of the same disk. It makes no pod, and as with a start nothing of it is waited for to be on the disk.
Floor and start take turns, each on a disk that has nothing left to do of what came before, in memory that it let go of.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from benchmarks.harness.servers import STACK_READY_SEC, Target, free_port, running, stack_env, wait_until_ready
from manager.services.checkpoints import MANIFEST_BYTES
from manager.services.manifests import Manifest
from manager.store.blobs import read_blob
from manager.store.objects import Objects
from manager.store.opening import open_objects
from manager.store.records import Records

ALL: Final = "/sandbox/sandboxes/v1"
TREE: Final = Path(__file__).with_name("tree.py")
_LONG_SEC: Final = 1800
_SETTLE_SEC: Final = 300.0


@dataclass(kw_only=True)
class Kept:
    """Seconds, bytes and processor seconds; lists are of the rounds."""

    first_sec: float = 0.0
    again_sec: float = 0.0
    unchanged_sec: list[float] = field(default_factory=list)
    start_sec: list[float] = field(default_factory=list)  # POST start to the first command's answer
    empty_start_sec: float = 0.0  # the same of a sandbox with nothing in it
    floor_sec: list[float] = field(default_factory=list)
    start_cpu_sec: list[float] = field(default_factory=list)  # of the stack and all of its processes
    floor_cpu_sec: list[float] = field(default_factory=list)
    first_bytes: int = 0
    again_bytes: int = 0
    memory_bytes: int = 0  # the manager's peak above what it had before the first stop
    exact: bool = False

    @property
    def start_ratio(self) -> float:
        return statistics.median(self.start_sec) / statistics.median(self.floor_sec)


class NoCache:
    """manager.store.base.Cache without anything in it."""

    async def cache_get(self, keys: Sequence[str]) -> Sequence[str | None]:
        return [None] * len(keys)

    async def cache_put(self, key: str, text: str, ttl_sec: float, *, only_absent: bool = False) -> None:
        return None

    async def cache_drop(self, key: str) -> None:
        pass


async def measured(top: Path, files: int, size: int, rounds: int, url: str | None) -> Kept:
    """`url`: of the object storage; None: a directory below `top`. Raises CannotMeasure."""
    found = Kept()
    async with _stack(top, url) as stack:
        empty = await stack.made()
        await stack.moved(empty, "stop")
        found.empty_start_sec = await stack.started(empty)
        await stack.ended(empty)
        sandbox_id = await stack.made()
        await stack.tree(sandbox_id, "fill", str(files), str(size))
        manager = psutil.Process(stack.pid)
        before = _peak_from_now(stack.pid)
        found.first_sec = await stack.moved(sandbox_id, "stop")
        await stack.started(sandbox_id)
        await stack.tree(sandbox_id, "change")
        wanted = await stack.tree(sandbox_id, "digest")
        found.again_sec = await stack.moved(sandbox_id, "stop")
        objects = open_objects(url, stack.data)
        try:
            manifest = await _manifest(objects)
            first, *later = (layer.blob.size for layer in manifest.layers)
            found.first_bytes, found.again_bytes = first, sum(later)
            plain = top / "plain"
            for turn in range(rounds):
                await _settled(top)
                cpu = _cpu_sec(psutil.Process())
                found.floor_sec.append(await _streamed(objects, manifest, plain))
                found.floor_cpu_sec.append(_cpu_sec(psutil.Process()) - cpu)
                # As a stop does: on a virtual machine, memory that nobody has had yet costs several times as much as
                # what another has just let go of.
                await asyncio.to_thread(shutil.rmtree, plain)
                await _settled(top)
                cpu = _cpu_sec(manager)
                found.start_sec.append(await stack.started(sandbox_id))
                found.start_cpu_sec.append(_cpu_sec(manager) - cpu)
                if turn == 0:
                    found.exact = await stack.tree(sandbox_id, "digest") == wanted
                found.unchanged_sec.append(await stack.moved(sandbox_id, "stop"))
        finally:
            await objects.close()
        found.memory_bytes = _peak(stack.pid) - before
        await stack.ended(sandbox_id)
    return found


class _Stack:
    def __init__(self, http: aiohttp.ClientSession, pid: int, data: Path) -> None:
        self._http = http
        self.pid = pid
        self.data = data

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        async with self._http.request(method, path, json=body) as answer:
            return answer.status, await answer.json() if answer.content_type == "application/json" else {}

    async def made(self) -> str:
        status, body = await self.call("POST", ALL, {"autostop_sec": 3600, "ttl_sec": 14400})
        if status not in (201, 202):
            raise SystemExit(f"no sandbox could be made: {status} {body}")
        return str(body["sandbox_id"])

    async def tree(self, sandbox_id: str, what: str, *more: str) -> str:
        """benchmarks/harness/tree.py in it; its output."""
        command = ["python3", "-c", TREE.read_text(), what, "/workspace", *more]
        body = {"command": command, "timeout_sec": _LONG_SEC}
        status, answer = await self.call("POST", f"{ALL}/{sandbox_id}/exec", body)
        if status != 200 or answer["exit_code"] != 0:
            raise SystemExit(f"{what} failed: {status} {answer}")
        return str(answer["stdout"])

    async def moved(self, sandbox_id: str, move: str) -> float:
        """Seconds until it is stopped or running."""
        began = time.perf_counter()
        status, body = await self.call("POST", f"{ALL}/{sandbox_id}/{move}?wait_sec=60")
        while status == 202:
            status, body = await self.call("GET", f"{ALL}/{sandbox_id}")
            if status == 200 and body["state"] in ("stopping", "starting"):
                status = 202
                await asyncio.sleep(0.05)
        wanted = "stopped" if move == "stop" else "running"
        if status != 200 or body["state"] != wanted:
            raise SystemExit(f"{move} failed: {status} {body}")
        return time.perf_counter() - began

    async def started(self, sandbox_id: str) -> float:
        """Seconds from the call that starts it to its first command's answer."""
        began = time.perf_counter()
        await self.moved(sandbox_id, "start")
        status, body = await self.call("POST", f"{ALL}/{sandbox_id}/exec", {"command": ["true"]})
        if status != 200 or body["exit_code"] != 0:
            raise SystemExit(f"its first command failed: {status} {body}")
        return time.perf_counter() - began

    async def ended(self, sandbox_id: str) -> None:
        await self.call("DELETE", f"{ALL}/{sandbox_id}?purge=true")


@asynccontextmanager
async def _stack(top: Path, url: str | None) -> AsyncIterator[_Stack]:
    data, log, port = top / "data", top / "log", str(free_port())
    objects = {"SOJOURN_OBJECTS": url} if url is not None else {}
    env = stack_env(top, port, SOJOURN_START_LIMIT_SEC="600", **objects)
    with running([sys.executable, "-m", "manager", "up"], env, log, end=signal.SIGINT) as process:
        target = Target(name="manager", address=("--tcp", port), exec_path="", pid=process.pid, log=log)
        await asyncio.to_thread(wait_until_ready, target, process, STACK_READY_SEC)
        give_up = time.monotonic() + STACK_READY_SEC
        while not (data / "address").exists():
            if time.monotonic() > give_up:
                raise SystemExit(f"`up` did not become ready:\n{log.read_text()[-2000:]}")
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{port}", headers={"X-Api-Key": (data / "api-key").read_text().strip()},
            timeout=aiohttp.ClientTimeout(total=_LONG_SEC + 60),
        ) as http:  # fmt: skip
            yield _Stack(http, process.pid, data)


async def _manifest(objects: Objects) -> Manifest:
    """The one with most in it: the others are of what the stack keeps ready."""
    heads = Records(objects, NoCache(), "workspaces", Manifest, max_bytes=MANIFEST_BYTES)
    return max([found.value async for found in heads.every()], key=lambda manifest: manifest.stored_bytes)


async def _settled(top: Path) -> None:
    """Until the files of ended pods are gone and what was written is on the disk."""
    give_up, before, now = time.monotonic() + _SETTLE_SEC, -1, _files(top)
    while before != now:
        if time.monotonic() > give_up:
            raise SystemExit(f"files come and go in {top} without end")
        await asyncio.sleep(0.5)
        before, now = now, _files(top)
    await asyncio.to_thread(os.sync)


def _files(top: Path) -> int:
    """In use in its file system."""
    about = os.statvfs(top)
    return about.f_files - about.f_ffree


async def _streamed(objects: Objects, manifest: Manifest, into: Path) -> float:
    into.mkdir()  # noqa: ASYNC240 - nothing else runs here
    began = time.perf_counter()
    for layer in manifest.layers:
        process = await asyncio.create_subprocess_shell(
            f"zstd -dqc | tar -C '{into}' -xpf -", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdin is not None
        async for chunk in read_blob(objects, layer.blob):
            process.stdin.write(chunk)
            await process.stdin.drain()
        process.stdin.close()
        await process.wait()
    return time.perf_counter() - began


def _cpu_sec(process: psutil.Process) -> float:
    """Of it, what came of it, and what has ended of that."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(one.cpu_times()[:4])
    return total


def _peak_from_now(pid: int) -> int:
    """Bytes that it has now; its peak is counted from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(psutil.Process(pid).memory_info().rss)


def _peak(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) << 10
