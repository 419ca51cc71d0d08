"""A command swaps a directory and a link that leads out, as fast as it can, under every verb of the file service.

The outside belongs to the same user, so that only the walk keeps the calls in: no permission would. Threat S10: each
verb is raced for SOJOURN_RACE_SEC seconds (10) at least, until it has met directory and link often."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import cast

import pytest

from executor.archives import ArchiveService
from executor.config import ExecutorConfig
from executor.errors import ExecutorError, InvalidPath
from executor.files import FileService
from executor.isolation import CommandUser
from executor.spawn import Spawner
from executor.upload import WriteTerms
from executor.watch import WatchService
from executor.wire import ChmodRequest, MkdirRequest, MoveRequest
from tests.support.executor_pod import Pod
from tests.support.tar_corpus import END, directory, member

IS_ROOT = os.geteuid() == 0
UID = 1000 if IS_ROOT else os.geteuid()
GID = 1000 if IS_ROOT else os.getegid()
USER = CommandUser("sandbox", UID, GID, (GID,), "/", "/bin/sh")
ENOUGH = 1000  # calls that met the directory, and as many that met the link
RACE_SEC = float(os.environ.get("SOJOURN_RACE_SEC", "10"))
SWAPPER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
one, two = (path.encode() for path in sys.argv[1:3])
if libc.renameat2(-100, one, -100, two, 2):
    sys.exit("no RENAME_EXCHANGE here")
print("ready", flush=True)
while libc.renameat2(-100, one, -100, two, 2) == 0:
    pass
"""

Verb = Callable[[FileService, int], Awaitable[object]]


class Ground:
    """`base/ws/d` and `base/ws/link -> base/outside` change places all the time."""

    def __init__(self, base: Path) -> None:
        self.outside = base / "outside"
        self.workspace = base / "ws"
        for where, content in ((self.outside, "outside"), (self.workspace / "d", "inside")):
            where.mkdir(parents=True)
            (where / "f").write_text(content)
            (where / "f").chmod(0o640)
            (where / content).touch()
        (self.workspace / "link").symlink_to(self.outside)
        base.chmod(0o755)
        if IS_ROOT:
            for path in (base, *base.rglob("*")):
                os.chown(path, UID, GID, follow_symlinks=False)

    def outside_is_untouched(self) -> bool:
        file = self.outside / "f"
        names = sorted(os.listdir(self.outside)) == ["f", "outside"]
        return names and file.read_text() == "outside" and file.stat().st_mode & 0o777 == 0o640


@pytest.fixture
def ground() -> Iterator[Ground]:
    base = Path(tempfile.mkdtemp(prefix="race-", dir="/var/tmp"))
    ground = Ground(base)
    command = [sys.executable, "-c", SWAPPER, str(ground.workspace / "d"), str(ground.workspace / "link")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as swapper:
        assert swapper.stdout is not None
        assert swapper.stderr is not None
        if swapper.stdout.readline() != b"ready\n":
            pytest.skip(swapper.stderr.read().decode().strip())
        yield ground
        still_swapping = swapper.poll() is None
        swapper.kill()
    shutil.rmtree(base)
    assert still_swapping


@pytest.fixture
def files(ground: Ground) -> Iterator[FileService]:
    config = ExecutorConfig(token_sha256="0" * 64, workspace=str(ground.workspace))
    service = FileService(config, USER, other_roots=())
    yield service
    service.close()


async def content(text: bytes) -> AsyncIterator[bytes]:
    yield text


async def read(files: FileService, n: int) -> None:
    async with files.open("d/f") as file:
        assert await file.read(0, 100) == b"inside"


async def write(files: FileService, n: int) -> None:
    await files.write(f"d/new{n % 10}/f", content(b"written"), None, WriteTerms())


async def list_(files: FileService, n: int) -> None:
    page = await files.list("d", 2, 100, None)
    assert "outside" not in [entry.name for entry in page.entries]


async def list_above(files: FileService, n: int) -> None:
    page = await files.list(".", 3, 100, None)
    assert "outside" not in [entry.name for entry in page.entries]
    kinds = {entry.name: entry.type for entry in page.entries}
    if kinds.get("d") == "symlink":
        raise InvalidPath("met the link")


async def stat_(files: FileService, n: int) -> None:
    entry = await files.stat("d/inside")
    assert entry.name == "inside"


async def mkdir(files: FileService, n: int) -> None:
    await files.mkdir(MkdirRequest(path=f"d/made{n % 10}/inner"))


async def move(files: FileService, n: int) -> None:
    await files.move(MoveRequest(source="d/f", target="d/g", overwrite=True))
    await files.move(MoveRequest(source="d/g", target="d/f", overwrite=True))


async def move_in(files: FileService, n: int) -> None:
    await files.write("x", content(b"moved"), None, WriteTerms())
    await files.move(MoveRequest(source="x", target=f"d/moved{n % 10}", overwrite=True))


async def move_tree(files: FileService, n: int) -> None:
    await files.mkdir(MkdirRequest(path=f"d/tree{n}/below"))
    await files.move(MoveRequest(source=f"d/tree{n}", target=f"d/there{n % 10}/here{n}", overwrite=False))


async def overwrite(files: FileService, n: int) -> None:
    entry = await files.stat("d/f")
    await files.write("d/f", content(b"inside"), None, WriteTerms(if_match=entry.etag))


async def delete_tree(files: FileService, n: int) -> None:
    await files.write("d/tree/below/f", content(b"x"), None, WriteTerms())
    await files.delete("d/tree", recursive=True)


async def delete(files: FileService, n: int) -> None:
    await files.delete("d/f", recursive=False)
    await files.write("d/f", content(b"inside"), None, WriteTerms())


async def chmod(files: FileService, n: int) -> None:
    await files.chmod(ChmodRequest(path="d/f", mode=0o600 + n % 8))


async def chmod_tree(files: FileService, n: int) -> None:
    await files.chmod(ChmodRequest(path="d", mode=0o700 + n % 8, recursive=True))


def archives_of(files: FileService) -> ArchiveService:
    return ArchiveService(files, cast(Spawner, None))  # which only zstd is run by


async def unpack(files: FileService, n: int) -> None:
    data = directory(b"sub") + member(b"sub/unpacked", b"x") + member(b"f", b"inside") + END
    await archives_of(files).unpack("d", content(data), "tar")


async def unpack_new(files: FileService, n: int) -> None:
    await archives_of(files).unpack(f"d/unpacked{n % 10}/below", content(member(b"f", b"x") + END), "tar")


async def pack(files: FileService, n: int) -> None:
    async with archives_of(files).pack("d", "tar") as chunks:
        assert b"outside" not in b"".join([chunk async for chunk in chunks])


async def pack_above(files: FileService, n: int) -> None:
    async with archives_of(files).pack(".", "tar") as chunks:
        data = b"".join([chunk async for chunk in chunks])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        kinds = {one.name: one.type for one in tar.getmembers()}
    assert not any(name.endswith("/outside") for name in kinds)
    if kinds.get("d") == tarfile.SYMTYPE:
        raise InvalidPath("met the link")


async def watch(files: FileService, n: int) -> None:
    async with aclosing(WatchService(files).watch("d", recursive=True)) as batches:
        await anext(batches)


VERBS: list[Verb] = [
    read, write, list_, list_above, stat_, mkdir, move, delete, chmod, chmod_tree, unpack, unpack_new, pack, pack_above,
    watch, move_in, move_tree, overwrite, delete_tree,
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=[verb.__name__.strip("_") for verb in VERBS])
async def test_no_call_leaves_the_workspace_however_a_command_swaps(
    verb: Verb, files: FileService, ground: Ground
) -> None:
    met_directory = met_link = n = 0
    until = time.monotonic() + RACE_SEC
    async with asyncio.timeout(60 + RACE_SEC):
        while met_directory < ENOUGH or met_link < ENOUGH or time.monotonic() < until:
            n += 1
            try:
                await verb(files, n)
                met_directory += 1
            except InvalidPath:
                met_link += 1
            except ExecutorError:  # the file was where the last call put it, or is deleted already
                met_directory += 1
            if n % 50 == 0:
                assert ground.outside_is_untouched()
    assert ground.outside_is_untouched()


async def test_a_watch_tells_nothing_of_what_a_swapped_link_leads_to(files: FileService, ground: Ground) -> None:
    until = time.monotonic() + RACE_SEC
    rounds = 0
    while time.monotonic() < until or rounds < 20:
        rounds += 1
        async with asyncio.timeout(60), aclosing(WatchService(files).watch(".", recursive=True)) as batches:
            await anext(batches)
            os.utime(ground.outside / "outside")
            (ground.workspace / f"seen{rounds}").touch()
            async for batch in batches:
                told = repr(batch)
                assert "/outside" not in told, told
                if f"seen{rounds}" in told or "overflow" in told.lower():
                    break


async def test_a_search_finds_nothing_of_what_a_swapped_link_leads_to(executor: Pod) -> None:
    """The search's own process walks by itself: through a real executor."""
    ground = Ground(executor.workspace / "race")
    if IS_ROOT:
        for path in (executor.workspace / "race", *(executor.workspace / "race").rglob("*")):
            os.chown(path, executor.user.pw_uid, executor.user.pw_gid, follow_symlinks=False)
    shutil.move(ground.outside, executor.workspace.parent / "outside")
    (ground.workspace / "link").unlink()
    (ground.workspace / "link").symlink_to(executor.workspace.parent / "outside")
    met = {"directory": 0, "link": 0}
    command = [sys.executable, "-c", SWAPPER, str(ground.workspace / "d"), str(ground.workspace / "link")]
    until = time.monotonic() + RACE_SEC
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as swapper:
        assert swapper.stdout is not None
        if swapper.stdout.readline() != b"ready\n":
            pytest.skip("no RENAME_EXCHANGE here")
        try:
            async with asyncio.timeout(60 + RACE_SEC):
                while time.monotonic() < until or min(met.values()) < 10:
                    for below in ("", "/d"):
                        reply = await executor.call("GET", f"/v1/files/search?path=race/ws{below}&name=*&content=side")
                        if reply.status == 200:
                            found = reply.json["matches"]
                            assert not [one for one in found if "outside" in one["path"] + one["text"]], found
                            met["directory"] += bool(below and found)
                        else:
                            assert reply.code in ("invalid_path", "not_a_directory", "file_not_found"), reply.body
                            met["link"] += bool(below)
        finally:
            swapper.kill()
    shutil.rmtree(executor.workspace / "race")
    shutil.rmtree(executor.workspace.parent / "outside")


async def test_a_recursive_delete_never_empties_what_a_link_leads_to(files: FileService, ground: Ground) -> None:
    """The pair is inside the deleted tree itself."""
    tree = ground.workspace / "tree"
    for _ in range(50):
        tree.mkdir()
        (tree / "d").mkdir()
        for n in range(20):
            (tree / "d" / str(n)).touch()
        (tree / "link").symlink_to(ground.outside)
        if IS_ROOT:
            for path in (tree, *tree.rglob("*")):
                os.chown(path, UID, GID, follow_symlinks=False)
        command = [sys.executable, "-c", SWAPPER, str(tree / "d"), str(tree / "link")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as swapper:
            assert swapper.stdout is not None
            assert swapper.stdout.readline() == b"ready\n"
            await files.delete("tree", recursive=True)
            swapper.kill()
        assert not tree.exists()
        assert ground.outside_is_untouched()


STAGE_SWAPPER = """
import glob, os, sys
workspace, outside = sys.argv[1:3]
print("ready", flush=True)
n = 0
while True:
    for path in glob.glob(workspace + "/.sojourn-*.part/d"):
        n += 1
        try:
            os.rename(path, f"{path}{n}")
            os.symlink(outside, path)
        except OSError:
            pass
"""


async def in_pieces(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        await asyncio.sleep(0)
        yield part


async def test_an_archive_stays_inside_while_a_command_swaps_the_directories_that_it_is_unpacked_into(
    files: FileService, ground: Ground
) -> None:
    parts = [directory(b"d"), *(member(b"d/%d/%d" % (n % 2, n), b"x") for n in range(200)), END]
    command = [sys.executable, "-c", STAGE_SWAPPER, str(ground.workspace), str(ground.outside)]
    refused = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as swapper:
        try:
            assert swapper.stdout is not None
            assert swapper.stdout.readline() == b"ready\n"
            async with asyncio.timeout(60):
                while refused < 10:
                    try:
                        await archives_of(files).unpack("into", in_pieces(parts), "tar")
                    except ExecutorError:
                        refused += 1
                    assert ground.outside_is_untouched()
                    shutil.rmtree(ground.workspace / "into", ignore_errors=True)
        finally:
            swapper.kill()
    assert ground.outside_is_untouched()
