"""Checkpoints of real executors' workspaces, through the manager's client into object storage and back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from manager.errors import ExecutorUnreachable, TooLarge
from manager.executor_client import ExecutorClient, PodRef, pod_token
from manager.model import Owner
from manager.services.checkpoints import Checkpoints
from manager.services.manifests import LAYERS
from manager.store.blobs import ObjectDamaged, Progress
from manager.store.objects import Objects
from manager.store.opening import open_objects
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, running_executor
from tests.support.memory_objects import MemoryCache
from tests.support.s3_server import CREDENTIALS, S3Server
from tests.support.trees import differences, picture

ACME = Owner("acme", "web")
SECRET = b"s" * 32
FILES = int(os.environ.get("SOJOURN_TEST_FILES", "1000"))  # of the many; the full measure: 50000

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="layers need the program zstd")


@dataclass
class Stack:
    """One manager's checkpoints over real executors, each a pod of its own."""

    objects: Objects
    client: ExecutorClient = field(default_factory=lambda: ExecutorClient(SECRET))
    pods: dict[str, ExecutorProcess] = field(default_factory=dict)
    running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.objects, MemoryCache(), self.client, chunk_bytes=1 << 20)

    async def pod(self) -> PodRef:
        """Another pod, with nothing in its workspace."""
        name = f"p{secrets.token_hex(4)}"
        process = await asyncio.to_thread(
            self.running.enter_context,
            running_executor(env={"SOJOURN_POD_NAME": name}, token=pod_token(SECRET, name)),
        )
        self.pods[name] = process
        return PodRef(name, f"unix:{process.socket}", 600)

    def tree(self, pod: PodRef) -> Path:
        return self.pods[pod.name].workspace

    def write(self, pod: PodRef, name: str, content: bytes) -> Path:
        """As one of the pod's commands would, whoever runs the tests."""
        path = self.tree(pod) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if IS_ROOT:
            user = self.pods[pod.name].user
            for owned in (path, *path.parents):
                if owned == self.tree(pod):
                    break
                os.chown(owned, user.pw_uid, user.pw_gid)
        return path

    async def layer_keys(self) -> set[str]:
        return {info.key async for page in self.objects.list(LAYERS) for info in page}


@contextlib.asynccontextmanager
async def stack_over(objects: Objects) -> AsyncIterator[Stack]:
    made = Stack(objects)
    yield made
    await made.client.close()
    await asyncio.to_thread(made.running.close)
    await objects.close()


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack_over(open_objects(None, tmp_path)) as made:
        yield made


@pytest.fixture
async def stack_on_s3(tmp_path: Path, s3: S3Server) -> AsyncIterator[Stack]:
    async with stack_over(open_objects(s3.url(secrets.token_hex(8)), tmp_path, CREDENTIALS)) as made:
        yield made


def fill(stack: Stack, pod: PodRef) -> None:
    """One of each kind of thing that a workspace can have."""
    top = stack.tree(pod)
    stack.write(pod, "plain", b"text\n")
    stack.write(pod, "run.sh", b"#!/bin/sh\n").chmod(0o755)
    stack.write(pod, "secretive", b"x").chmod(0o600)
    stack.write(pod, "empty", b"")
    stack.write(pod, "a/b/c/deep", os.urandom(300_000))
    (top / "link").symlink_to("a/b/c/deep")
    (top / "dangling").symlink_to("/nowhere/at/all")
    os.link(top / "plain", top / "a" / "same")
    stack.write(pod, "hollow/x", b"").unlink()
    with stack.write(pod, "sparse", b"").open("r+b") as sparse:
        sparse.seek(30 << 20)
        sparse.write(b"end")
    os.utime(top / "plain", ns=(1, 1_234_567_890_123_456_789))
    os.utime(top / "a", ns=(1, 987_654_321))


async def test_a_workspace_comes_back_exactly_as_it_was_in_a_new_pod(stack: Stack) -> None:
    """Modes, owners, links, empty directories, holes, times."""
    pod = await stack.pod()
    fill(stack, pod)
    before = picture(stack.tree(pod))
    saved = await stack.checkpoints.save(ACME, "w", pod)
    again = await stack.pod()
    await stack.checkpoints.restore(ACME, "w", again)
    assert differences(picture(stack.tree(again)), before) == []
    top = stack.tree(again)
    (top / "empty").unlink()
    (top / "plain").rename(top / "renamed")
    shutil.rmtree(top / "a")
    stack.write(again, "new", b"new")
    after = picture(top)
    second = await stack.checkpoints.save(ACME, "w", again)
    assert [layer.full for layer in second.layers] == [True, False]
    assert second.layers[0] == saved.layers[0]
    third = await stack.pod()
    await stack.checkpoints.restore(ACME, "w", third)
    assert differences(picture(stack.tree(third)), after) == []


async def test_rounds_of_writing_stopping_and_starting_lose_nothing(stack_on_s3: Stack) -> None:
    stack = stack_on_s3
    written: dict[str, bytes] = {}
    pod = await stack.pod()
    for round_ in range(3):
        name = f"round{round_}"
        written[name] = os.urandom(3 << 20)
        stack.write(pod, name, written[name])
        await stack.checkpoints.save(ACME, "w", pod)
        pod = await stack.pod()
        await stack.checkpoints.restore(ACME, "w", pod)
        for name, content in written.items():
            assert (stack.tree(pod) / name).read_bytes() == content, f"{name} after round {round_}"


async def test_ten_changed_of_many_files_make_a_layer_of_ten(stack: Stack) -> None:
    pod = await stack.pod()
    rng = random.Random(1)
    for number in range(FILES):
        stack.write(pod, f"{number % 100}/{number}", rng.randbytes(500))
    first = await stack.checkpoints.save(ACME, "w", pod)
    for number in range(10):
        stack.write(pod, f"{number}/{number}", b"changed")
    second = await stack.checkpoints.save(ACME, "w", pod)
    assert second.layers[1].blob.size * 10 < first.layers[0].blob.size
    assert second.layers[1].entries < 40
    again = await stack.pod()
    await stack.checkpoints.restore(ACME, "w", again)
    assert differences(picture(stack.tree(again)), picture(stack.tree(pod))) == []
    stack.write(again, "5/5", b"changed again")
    third = await stack.checkpoints.save(ACME, "w", again)
    assert [layer.full for layer in third.layers] == [True, False, False]
    assert third.layers[2].entries < 10


async def test_an_executor_killed_in_the_middle_of_a_checkpoint_loses_no_last_one(stack: Stack) -> None:
    """F24: nothing of the half one is left."""
    pod = await stack.pod()
    stack.write(pod, "a", os.urandom(100_000))
    before = picture(stack.tree(pod))
    await stack.checkpoints.save(ACME, "w", pod)
    kept = await stack.layer_keys()
    stack.write(pod, "b", os.urandom(40 << 20))
    with pytest.raises(ExecutorUnreachable):
        await stack.checkpoints.save(ACME, "w", pod, progress=killing(stack, pod, 5 << 20))
    assert await stack.layer_keys() == kept
    again = await stack.pod()
    await stack.checkpoints.restore(ACME, "w", again)
    assert differences(picture(stack.tree(again)), before) == []


async def test_an_executor_killed_in_the_middle_of_a_restore_harms_nothing(stack: Stack) -> None:
    pod = await stack.pod()
    stack.write(pod, "a", os.urandom(40 << 20))
    await stack.checkpoints.save(ACME, "w", pod)
    second = await stack.pod()
    with pytest.raises(ExecutorUnreachable):
        await stack.checkpoints.restore(ACME, "w", second, progress=killing(stack, second, 5 << 20))
    third = await stack.pod()
    await stack.checkpoints.restore(ACME, "w", third)
    assert differences(picture(stack.tree(third)), picture(stack.tree(pod))) == []


def killing(stack: Stack, pod: PodRef, at: int) -> Progress:
    def progress(done: int, _total: int | None) -> None:
        if done >= at:
            stack.pods[pod.name].process.kill()

    return progress


async def test_a_damaged_layer_is_told_of_and_never_served(stack: Stack) -> None:
    """F24."""
    pod = await stack.pod()
    content = os.urandom(5 << 20)
    stack.write(pod, "a", content)
    saved = await stack.checkpoints.save(ACME, "w", pod)
    key = saved.layers[0].blob.object_keys()[2]
    chunk = await stack.objects.get(key, limit=1 << 20)
    assert chunk is not None
    await stack.objects.put(key, b"?" + chunk.data[1:])
    second = await stack.pod()
    with pytest.raises(ObjectDamaged):
        await stack.checkpoints.restore(ACME, "w", second)
    served = [path.read_bytes() for path in stack.tree(second).rglob("*") if path.is_file()]
    assert all(content.startswith(part) and len(part) < 3 << 20 for part in served)


async def test_a_workspace_over_its_profiles_disk_is_not_saved(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manager.services.checkpoints._SPARE_BYTES", 1 << 20)
    pod = await stack.pod()
    stack.write(pod, "a", os.urandom(8 << 20))
    with pytest.raises(TooLarge):
        await stack.checkpoints.save(ACME, "w", pod, disk_bytes=1 << 20)
    assert await stack.layer_keys() == set()


async def test_a_fork_of_a_workspace_in_use_goes_its_own_way(stack: Stack) -> None:
    pod = await stack.pod()
    stack.write(pod, "a", b"both")
    await stack.checkpoints.save(ACME, "w", pod)
    await stack.checkpoints.fork(ACME, "w", "v")
    stack.write(pod, "a", b"w's")
    await stack.checkpoints.save(ACME, "w", pod)
    other = await stack.pod()
    await stack.checkpoints.restore(ACME, "v", other)
    assert (stack.tree(other) / "a").read_bytes() == b"both"
    snapshot = await stack.checkpoints.snapshot(ACME, "w", name="now")
    await stack.checkpoints.from_snapshot(ACME, snapshot.snapshot_id, "u")
    third = await stack.pod()
    await stack.checkpoints.restore(ACME, "u", third)
    assert (stack.tree(third) / "a").read_bytes() == b"w's"
