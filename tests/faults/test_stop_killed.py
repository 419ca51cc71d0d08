"""kill -9 of a whole stack's manager in the middle of a stop and of a start: every file, and nothing left (F24)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manager.services.checkpoints import Checkpoints
from manager.services.manifests import LAYERS
from manager.store.directory import DirectoryObjects
from tests.support.checkpoint_process import MadeUpPod
from tests.support.long_lived import ALL, made
from tests.support.memory_objects import MemoryCache
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("zstd") is None, reason="layers need the program zstd"),
]
MIB = 40
EVERY = "stop:closing stop:uploading stop:kept stop:stopped start:claimed start:restoring start:started"
KILLS = os.environ.get("SOJOURN_TEST_KILLS", "stop:uploading start:claimed")  # "all": at every point
PROMISED_SEC = 60.0  # after which nothing of a dead manager is left
SLACK_SEC = 60.0  # for a machine that is busy with other tests
LONG_SEC = 150.0


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack().start()
    yield stack
    stack.remove()


def claimed(stack: Stack) -> set[str]:
    """The pods that are a sandbox's."""
    found = set()
    for path in (stack.data / "pods").glob("*/pod.json"):
        try:
            if json.loads(path.read_bytes())["labels"]["sojourn/state"] == "claimed":
                found.add(path.parent.name)
        except FileNotFoundError:
            pass
    return found


def record_of(stack: Stack, kind: str, sandbox_id: str) -> str:
    """As object storage has it."""
    try:
        return (stack.data / "objects" / "records" / kind / "dev" / "default" / sandbox_id).read_text()
    except FileNotFoundError:
        return ""


def chunks(stack: Stack) -> int:
    return sum(1 for path in (stack.data / "objects" / "layers").rglob("*") if path.is_file())


def point(stack: Stack, sandbox_id: str, name: str) -> Callable[[], bool]:
    """Whether the move has come so far."""
    before, head = chunks(stack), record_of(stack, "workspaces", sandbox_id)

    def state(*wanted: str) -> bool:
        record = record_of(stack, "sandboxes", sandbox_id)
        return any(f'"state":"{one}"' in record for one in wanted)

    points: dict[str, Callable[[], bool]] = {
        "stop:closing": lambda: state("stopping", "stopped"),
        "stop:uploading": lambda: chunks(stack) >= before + 2,
        "stop:kept": lambda: record_of(stack, "workspaces", sandbox_id) != head,
        "stop:stopped": lambda: state("stopped"),
        "start:claimed": lambda: bool(claimed(stack)),
        "start:restoring": lambda: any(_bytes_in(stack.data / "pods" / pod) > 10 << 20 for pod in claimed(stack)),
        "start:started": lambda: state("running"),
    }
    return points[name]


def _bytes_in(directory: Path) -> int:
    used = 0
    for path in directory.rglob("*"):
        try:
            used += path.lstat().st_blocks * 512
        except OSError:
            pass
    return used


async def put(stack: Stack, sandbox_id: str, name: str) -> str:
    """A file that does not pack; its SHA-256."""
    content = os.urandom(MIB << 20)
    status, body = await stack.call("PUT", f"{ALL}/{sandbox_id}/files?path={name}", data=io.BytesIO(content))
    assert status == 201, body
    return hashlib.sha256(content).hexdigest()


async def state_of(stack: Stack, sandbox_id: str) -> str:
    status, body = await stack.call("GET", f"{ALL}/{sandbox_id}")
    assert status == 200, body
    return str(body["state"])


async def reached(stack: Stack, sandbox_id: str, move: str, state: str) -> None:
    """However long a manager's death keeps others from it."""
    give_up = time.monotonic() + LONG_SEC
    while (now := await state_of(stack, sandbox_id)) != state:
        assert time.monotonic() < give_up, now
        await stack.call("POST", f"{ALL}/{sandbox_id}/{move}")
        await asyncio.sleep(0.2)


async def killed_in(stack: Stack, sandbox_id: str, name: str) -> None:
    """SIGKILL to the manager as soon as the move has come so far; then another one is started."""
    move, _, _ = name.partition(":")
    when = point(stack, sandbox_id, name)
    async with stack:
        call = asyncio.create_task(stack.call("POST", f"{ALL}/{sandbox_id}/{move}"), name=move)
        while not await asyncio.to_thread(when) and not call.done():
            await asyncio.sleep(0.002)
        await asyncio.to_thread(stack.end, signal.SIGKILL)
        await asyncio.gather(call, return_exceptions=True)
    await asyncio.to_thread(stack.start)


async def left(stack: Stack, sandbox_id: str) -> dict[str, object]:
    """What a dead manager's work has left that nobody needs; {} where it is all settled."""
    objects = DirectoryObjects(stack.data / "objects")
    try:
        state = await state_of(stack, sandbox_id)
        pods = 1 if state == "running" else 0
        marks = [info.key async for page in objects.list("records/saves/") for info in page]
        heads = [found.value async for found in Checkpoints(objects, MemoryCache(), MadeUpPod()).heads.every()]
        named = {key for head in heads for layer in head.layers for key in layer.blob.object_keys()}
        there = {info.key async for page in objects.list(LAYERS) for info in page}
        assert named <= there, "the last checkpoint is not whole"
        found: dict[str, object] = {
            "state": state if state not in ("running", "stopped", "failed") else "",
            "marks": marks,
            "layers": sorted(there - named),
            "temporary files": [path.name for path in (stack.data / "objects" / ".beside").iterdir()],
            "pods": sorted(claimed(stack)) if len(claimed(stack)) != pods else "",
            "slots": held if (held := await slots(stack)) != pods else "",
        }
        return {name: value for name, value in found.items() if value}
    finally:
        await objects.close()


async def slots(stack: Stack) -> int:
    held: int = (await stack.call("GET", "/api/v1/quotas"))[1]["quotas"][0]["slots_held"]
    return held


async def sums(stack: Stack, sandbox_id: str) -> dict[str, str]:
    status, body = await stack.call(
        "POST", f"{ALL}/{sandbox_id}/exec", json={"command": "sha256sum *", "timeout_sec": 100}
    )
    assert status == 200, body
    return {line.split()[1]: line.split()[0] for line in body["stdout"].splitlines()}


async def test_a_manager_killed_while_it_stops_or_starts_a_sandbox_loses_no_file_and_leaves_nothing_after_a_minute(
    stack: Stack,
) -> None:
    """With the default settings, and whatever it was at: no slot, pod, upload, mark or superseded layer stays."""
    wanted: dict[str, str] = {}
    async with stack:
        sandbox_id = await made(stack, autostop_sec=3600)
    for number, name in enumerate((EVERY if KILLS == "all" else KILLS).split()):
        async with stack:
            await reached(stack, sandbox_id, "start", "running")
            wanted[f"file-{number}"] = await put(stack, sandbox_id, f"file-{number}")
            if name.startswith("start"):
                await reached(stack, sandbox_id, "stop", "stopped")
        await killed_in(stack, sandbox_id, name)
        killed = time.monotonic()
        async with stack:
            while there := await left(stack, sandbox_id):
                assert time.monotonic() - killed < PROMISED_SEC + SLACK_SEC, (name, there)
                await asyncio.sleep(0.2)
            await reached(stack, sandbox_id, "start", "running")
            assert await sums(stack, sandbox_id) == wanted, name
