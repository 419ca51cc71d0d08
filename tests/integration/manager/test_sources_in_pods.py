"""What a source makes of a workspace, in a real executor: the manager's own layers are laid like any other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import secrets
import shutil
import stat
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manager.egress.fetch import Fetcher
from manager.executor_client import ExecutorClient, PodRef, pod_token
from manager.model import Owner
from manager.services.checkpoints import Checkpoints
from manager.services.sources import Source, Sources
from manager.store.cloud import CloudObjects
from tests.support import tar_corpus, zip_corpus
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, running_executor
from tests.support.memory_objects import MemoryCache, memory_objects
from tests.support.tls_server import Certificates, dialler_for, reply, tls_server

ACME = Owner("acme", "web")
SECRET = b"s" * 32

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="layers need the program zstd")


class Stack:
    def __init__(self, certificates: Certificates, threads: ThreadPoolExecutor) -> None:
        self.bucket = memory_objects()
        self.certificates = certificates
        self.client = ExecutorClient(SECRET)
        self.objects: CloudObjects = memory_objects()
        self.checkpoints = Checkpoints(self.objects, MemoryCache(), self.client)
        self.dialler = dialler_for(threads)
        self.dialler.answers["archives.test"] = [["127.0.0.1"]]
        self.sources = Sources(
            self.checkpoints,
            Fetcher(self.dialler, tls=certificates.client),
            prefixes=("s3://data",),
            open_at=lambda url: self.bucket,
        )
        self.running = contextlib.ExitStack()

    async def from_archive(self, workspace: str, data: bytes) -> None:
        async with tls_server(self.certificates, lambda path: reply(data)) as served:
            self.dialler.opened.add(("127.0.0.1", served.port))
            self.dialler.rules = type(self.dialler.rules)(ports=frozenset({served.port}))
            await self.sources.prepare(ACME, workspace, Source(archive_url=f"{served.url}/x"))

    async def pod_of(self, workspace: str, **settings: str) -> tuple[PodRef, ExecutorProcess]:
        """A new pod with the workspace restored."""
        name = f"p{secrets.token_hex(4)}"
        process = await asyncio.to_thread(
            self.running.enter_context,
            running_executor(env={"SOJOURN_POD_NAME": name, **settings}, token=pod_token(SECRET, name)),
        )
        pod = PodRef(name, f"unix:{process.socket}", 600)
        await self.checkpoints.restore(ACME, workspace, pod)
        return pod, process


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    certificates = Certificates(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        made = Stack(certificates, threads)
        yield made
        await made.client.close()
        await asyncio.to_thread(made.running.close)
        await made.objects.close()
        await made.bucket.close()


@pytest.mark.parametrize("kind", ["tar", "zip"])
async def test_a_pod_begins_with_the_archives_tree_and_saves_only_what_changes(stack: Stack, kind: str) -> None:
    await stack.from_archive("w", {"tar": tar_corpus.ordinary(), "zip": zip_corpus.ordinary()}[kind])
    pod, process = await stack.pod_of("w")
    top = process.workspace
    assert (top / "run.sh").read_bytes() == b"#!/bin/sh\n"
    assert stat.S_IMODE((top / "run.sh").stat().st_mode) == 0o755
    assert os.readlink(top / "a" / ("up" if kind == "tar" else "link")) == "../run.sh"
    if kind == "tar":
        assert (top / "hard").stat().st_ino == (top / "secret").stat().st_ino
    if IS_ROOT:  # the files are the command user's, whoever that is there
        assert {path.lstat().st_uid for path in top.rglob("*")} == {process.user.pw_uid}
    (top / "run.sh").write_bytes(b"changed\n")
    saved = await stack.checkpoints.save(ACME, "w", pod)
    assert [layer.full for layer in saved.layers] == [True, False]
    assert saved.layers[1].entries <= 2
    _, again = await stack.pod_of("w")
    assert (again.workspace / "run.sh").read_bytes() == b"changed\n"


@pytest.mark.skipif(not IS_ROOT, reason="only root can run commands as whom it likes")
@pytest.mark.parametrize("name", ["daemon", "games"])
async def test_what_a_source_brings_belongs_to_whom_the_pod_runs_commands_as(stack: Stack, name: str) -> None:
    """Whatever number the command user has in an image: its commands can change what the source brought."""
    await stack.from_archive("w", tar_corpus.ordinary())
    await stack.bucket.put("run/file", b"1")
    await stack.sources.prepare(ACME, "p", Source(prefix="s3://data/acme/run/"))
    user = pwd.getpwnam(name)
    for workspace in ("w", "p"):
        _, process = await stack.pod_of(workspace, SOJOURN_COMMAND_USER=name)
        found = {(path.lstat().st_uid, path.lstat().st_gid) for path in process.workspace.rglob("*")}
        assert found == {(user.pw_uid, user.pw_gid)}


async def test_a_pod_begins_with_what_lies_under_a_prefix(stack: Stack) -> None:
    big = os.urandom(1 << 20)
    await stack.bucket.put("run/data/big", big)
    await stack.bucket.put("run/empty", b"")
    await stack.sources.prepare(ACME, "w", Source(prefix="s3://data/acme/run/"))
    _, process = await stack.pod_of("w")
    assert (process.workspace / "data/big").read_bytes() == big
    assert (process.workspace / "empty").read_bytes() == b""
