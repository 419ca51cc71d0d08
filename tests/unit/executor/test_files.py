"""The file service itself: one step or nothing, whose rights count, and trees of any shape."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from executor.config import ExecutorConfig
from executor.errors import (
    Conflict,
    FileMissing,
    InvalidPath,
    InvalidRequest,
    NoSpace,
    NotADirectory,
    NotAFile,
    NotSupported,
    NotUtf8,
    PermissionDenied,
    PreconditionFailed,
    TooLarge,
)
from executor.files import FileService
from executor.isolation import CommandUser
from executor.upload import WriteTerms
from executor.wire import FileEntry, MkdirRequest, MoveRequest

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can take on another user")
UID = 1000 if IS_ROOT else os.geteuid()
GID = 1000 if IS_ROOT else os.getegid()
USER = CommandUser("sandbox", UID, GID, (GID,), "/", "/bin/sh")
PLAIN = WriteTerms()


@pytest.fixture
def workspace() -> Iterator[Path]:
    """The command user's own; not pytest's directory, which root keeps to itself."""
    path = Path(tempfile.mkdtemp(prefix="files-", dir="/var/tmp"))
    path.chmod(0o755)
    if IS_ROOT:
        os.chown(path, UID, GID)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def files(workspace: Path) -> Iterator[FileService]:
    service = FileService(config_of(workspace), USER, other_roots=(), max_file_bytes=1_000_000)
    yield service
    service.close()


def config_of(workspace: Path) -> ExecutorConfig:
    return ExecutorConfig(token_sha256="0" * 64, workspace=str(workspace))


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def put(files: FileService, path: str, content: bytes, terms: WriteTerms = PLAIN) -> tuple[FileEntry, bool]:
    return await files.write(path, pieces_of(content), None, terms)


async def get(files: FileService, path: str) -> bytes:
    async with files.open(path) as file:
        return b"".join([piece async for piece in file.pieces(0, file.facts.entry.size)])


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_was_written_is_read_back_with_parents_made(files: FileService, workspace: Path) -> None:
    before = os.umask(0o077)  # a daemon's umask is not its users'
    try:
        entry, is_new = await put(files, "a/b/c.txt", b"hello")
    finally:
        os.umask(before)
    assert is_new
    assert await get(files, "a/b/c.txt") == b"hello"
    assert (entry.size, entry.mode, entry.uid) == (5, 0o644, UID)
    assert entry == await files.stat("a/b/c.txt")
    for directory in ("a", "a/b"):
        status = (workspace / directory).stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o755, UID)


async def test_a_replaced_file_keeps_its_mode_unless_another_is_given(files: FileService, workspace: Path) -> None:
    await put(files, "f", b"one", WriteTerms(mode=0o750))
    entry, is_new = await put(files, "f", b"two")
    assert (is_new, entry.mode) == (False, 0o750)
    entry, _ = await put(files, "f", b"three", WriteTerms(mode=0o600))
    assert entry.mode == 0o600
    assert os.listdir(workspace) == ["f"]


@needs_root
@pytest.mark.root
async def test_a_replaced_file_keeps_another_s_ownership_but_no_set_id_bits(
    files: FileService, workspace: Path
) -> None:
    target = workspace / "f"
    target.write_bytes(b"old")
    os.chown(target, 2000, 2001)
    target.chmod(0o4755)
    entry, _ = await put(files, "f", b"new")
    assert (entry.mode, entry.uid, entry.gid) == (0o755, 2000, 2001)
    assert target.read_bytes() == b"new"


async def test_a_link_is_replaced_and_never_written_through(files: FileService, workspace: Path) -> None:
    (workspace / "real").write_bytes(b"kept")
    (workspace / "link").symlink_to("real")
    await put(files, "link", b"new")
    assert (workspace / "real").read_bytes() == b"kept"
    assert not (workspace / "link").is_symlink()
    assert (workspace / "link").read_bytes() == b"new"


async def fails_after(pieces: int) -> AsyncIterator[bytes]:
    for _ in range(pieces):
        yield b"x" * 1000
    raise InvalidRequest("the body broke off")


async def test_an_upload_that_breaks_off_leaves_nothing(files: FileService, workspace: Path) -> None:
    with pytest.raises(InvalidRequest):
        await files.write("new/deep/f", fails_after(3), None, PLAIN)
    assert os.listdir(workspace) == []


async def test_an_upload_over_the_limit_leaves_what_was_there(files: FileService, workspace: Path) -> None:
    await put(files, "f", b"old")
    with pytest.raises(TooLarge):
        await files.write("f", pieces_of(*[b"x" * 100_000] * 11), None, PLAIN)
    with pytest.raises(TooLarge):
        await files.write("f", pieces_of(), 1_000_001, PLAIN)
    assert os.listdir(workspace) == ["f"]
    assert (workspace / "f").read_bytes() == b"old"


async def test_a_cancelled_upload_leaves_nothing_and_no_descriptor(files: FileService, workspace: Path) -> None:
    await put(files, "f", b"old")
    before = len(os.listdir("/proc/self/fd"))
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 10
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(files.write("f", endless(), None, PLAIN))
    await begun.wait()
    assert len(os.listdir(workspace)) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(workspace) == ["f"]
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_upload_cancelled_at_any_moment_leaves_nothing(files: FileService, workspace: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(30):
        task = asyncio.create_task(files.write("new/f", pieces_of(b"a", b"b"), None, PLAIN))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        names = [name for _, _, found in os.walk(workspace) for name in found]
        assert names in ([], ["f"])
    assert len(os.listdir("/proc/self/fd")) == before


async def test_conditions_are_checked_and_protect_what_is_there(files: FileService, workspace: Path) -> None:
    first, _ = await put(files, "f", b"one", WriteTerms(create_only=True))
    with pytest.raises(PreconditionFailed):
        await put(files, "f", b"two", WriteTerms(create_only=True))
    second, _ = await put(files, "f", b"two", WriteTerms(if_match=first.etag))
    with pytest.raises(PreconditionFailed):
        await put(files, "f", b"three", WriteTerms(if_match=first.etag))
    with pytest.raises(PreconditionFailed):
        await put(files, "missing", b"x", WriteTerms(if_match="*"))
    with pytest.raises(PreconditionFailed):
        await files.delete("f", recursive=False, if_match=first.etag)
    assert (workspace / "f").read_bytes() == b"two"
    await files.delete("f", recursive=False, if_match=second.etag)
    assert os.listdir(workspace) == []


async def test_of_concurrent_writers_who_saw_the_same_file_one_wins(files: FileService) -> None:
    seen, _ = await put(files, "f", b"0")
    terms = WriteTerms(if_match=seen.etag)
    results = await asyncio.gather(*(put(files, "f", b"%d" % n, terms) for n in range(20)), return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 1
    created = WriteTerms(create_only=True)
    results = await asyncio.gather(*(put(files, "g/h", b"%d" % n, created) for n in range(20)), return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 1
    assert all(isinstance(result, tuple | PreconditionFailed) for result in results)


async def test_in_place_edits_change_the_etag_whatever_the_clock_says(files: FileService, workspace: Path) -> None:
    before, _ = await put(files, "f", b"one")
    status = (workspace / "f").stat()
    with open(workspace / "f", "r+b") as file:
        file.write(b"two")
    os.utime(workspace / "f", ns=(status.st_atime_ns, status.st_mtime_ns))
    after = await files.stat("f")
    assert (after.size, after.mtime) == (before.size, before.mtime)
    assert after.etag != before.etag


@pytest.mark.parametrize("path", ["d/", ".", "d/.", ""])
async def test_a_directory_s_name_is_no_place_for_content(files: FileService, path: str) -> None:
    with pytest.raises(InvalidPath):
        await put(files, path, b"x")


async def test_directories_and_special_files_are_not_replaced(files: FileService, workspace: Path) -> None:
    (workspace / "d").mkdir()
    os.mkfifo(workspace / "fifo")
    for name in ("d", "fifo"):
        with pytest.raises(NotAFile):
            await put(files, name, b"x")
    with pytest.raises(NotADirectory):
        await put(files, "fifo/f", b"x")


# ── whose rights ────────────────────────────────────────────────────────────────────────────────────────────────


@needs_root
@pytest.mark.root
async def test_the_command_user_s_rights_decide_not_root_s(files: FileService, workspace: Path) -> None:
    for name, mode in (("secret", 0o600), ("closed", 0o700)):
        (workspace / name).mkdir() if mode == 0o700 else (workspace / name).write_bytes(b"root's")
        (workspace / name).chmod(mode)
    for call in (
        get(files, "secret"),
        put(files, "closed/f", b"x"),
        files.list("closed", 1, 10, None),
        files.stat("closed/f"),
        files.mkdir(MkdirRequest(path="closed/d")),
        files.move(MoveRequest(source="secret", target="closed/s")),
    ):
        with pytest.raises(PermissionDenied):
            await call
    assert os.geteuid() == 0
    assert (workspace / "secret").read_bytes() == b"root's"


@needs_root
@pytest.mark.root
async def test_supplementary_groups_count_and_root_s_do_not(workspace: Path) -> None:
    (workspace / "shared").write_bytes(b"for the group")
    os.chown(workspace / "shared", 0, 4321)
    (workspace / "shared").chmod(0o640)
    users = {
        "member": CommandUser("member", UID, GID, (GID, 4321), "/", "/bin/sh"),
        "stranger": CommandUser("stranger", UID, GID, (GID,), "/", "/bin/sh"),
    }
    service = FileService(config_of(workspace), users["stranger"], resolve_user=users.__getitem__)
    try:
        for _ in range(8):  # the threads change identity back and forth
            async with service.open(f"{workspace}/shared", "member") as file:
                assert await file.read(0, 100) == b"for the group"
            with pytest.raises(PermissionDenied):
                async with service.open(f"{workspace}/shared"):
                    pass
    finally:
        service.close()


async def test_no_other_user_can_be_named_where_none_is_allowed(files: FileService) -> None:
    with pytest.raises(InvalidRequest):
        await files.stat(".", "root")


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_has_no_content_is_refused_at_once(files: FileService, workspace: Path) -> None:
    os.mkfifo(workspace / "fifo")
    (workspace / "d").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(workspace / "socket"))
        for name in ("fifo", "d", "socket", "."):
            with pytest.raises(NotAFile):
                await get(files, name)


async def test_device_files_are_refused(workspace: Path) -> None:
    service = FileService(config_of(workspace), USER, other_roots=("/dev",))
    try:
        for path in ("/dev/zero", "/dev/null"):
            with pytest.raises(NotAFile):
                await get(service, path)
    finally:
        service.close()


async def test_links_are_shown_and_not_followed(files: FileService, workspace: Path) -> None:
    (workspace / "link").symlink_to("/etc/passwd")
    (workspace / "loop").symlink_to("loop")
    entry = await files.stat("link")
    assert (entry.type, entry.target, entry.etag) == ("symlink", "/etc/passwd", None)
    for name in ("link", "loop", "link/x"):
        with pytest.raises(InvalidPath, match=r"(link|loop) is a symbolic link"):
            await get(files, name)
    with pytest.raises(InvalidPath):
        await files.list("link", 1, 10, None)
    await files.delete("link", recursive=True)
    assert os.listdir(workspace) == ["loop"]


async def test_text_is_checked_across_pieces_and_cut_characters_are_none(files: FileService, workspace: Path) -> None:
    (workspace / "good").write_bytes("é".encode() * 400_000)
    (workspace / "bad").write_bytes(b"\xff\xfe")
    async with files.open("good") as file:
        await file.check_utf8(0, 800_000)
        with pytest.raises(NotUtf8):
            await file.check_utf8(0, 799_999)
    async with files.open("bad") as file:
        with pytest.raises(NotUtf8, match="binary"):
            await file.check_utf8(0, 2)


async def test_a_reader_keeps_the_file_it_opened(files: FileService) -> None:
    await put(files, "f", b"old")
    async with files.open("f") as file:
        await put(files, "f", b"new")
        assert await file.read(0, 10) == b"old"


# ── listing ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_listing_shows_each_kind_and_opens_none(files: FileService, workspace: Path) -> None:
    os.mkfifo(workspace / "fifo")
    (workspace / "dangling").symlink_to("nowhere")
    (workspace / "closed").mkdir(0o000)
    (workspace / "file").touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(workspace / "socket"))
        page = await files.list(".", 8, 100, None)
    (workspace / "closed").chmod(0o700)  # so that it may be cleared away
    kinds = {entry.name: entry.type for entry in page.entries}
    assert kinds == {
        "closed": "directory", "dangling": "symlink", "fifo": "fifo", "file": "file", "socket": "socket",
    }  # fmt: skip
    assert not page.truncated


async def test_pages_of_every_size_join_to_the_whole_tree(files: FileService, workspace: Path) -> None:
    for path in ("a/x", "a/y/z", "a.txt", "b", "c/d/e/f"):
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).touch()
    whole = (await files.list(".", 10, 100, None)).entries
    names = [entry.path.removeprefix(f"{workspace}/") for entry in whole]
    assert names == ["a", "a/x", "a/y", "a/y/z", "a.txt", "b", "c", "c/d", "c/d/e", "c/d/e/f"]
    for limit in range(1, 11):
        found, after = [], None
        while True:
            page = await files.list(".", 10, limit, after)
            found += page.entries
            assert len(page.entries) <= limit
            if page.next is None:
                break
            after = page.next
        assert found == whole


async def test_a_page_goes_on_where_its_last_name_was_deleted(files: FileService, workspace: Path) -> None:
    for name in "abcd":
        (workspace / name).touch()
    page = await files.list(".", 1, 2, None)
    (workspace / "b").unlink()
    assert [entry.name for entry in (await files.list(".", 1, 2, page.next)).entries] == ["c", "d"]


async def test_depth_bounds_the_listing(files: FileService, workspace: Path) -> None:
    (workspace / "a/b/c").mkdir(parents=True)
    for depth, expected in ((1, ["a"]), (2, ["a", "b"]), (3, ["a", "b", "c"])):
        assert [entry.name for entry in (await files.list(".", depth, 10, None)).entries] == expected


@pytest.mark.parametrize(
    "after", ["", "!", "Li4=", "Lw==", "YQBi", base64.urlsafe_b64encode(b"a/" * 40 + b"a").decode()]
)
async def test_a_made_up_cursor_is_refused(files: FileService, after: str) -> None:
    with pytest.raises(InvalidRequest):
        await files.list(".", 1, 10, after)


async def test_names_that_are_no_text_can_be_told_apart_and_used(files: FileService, workspace: Path) -> None:
    for raw in (b"\xff", b"\xfe"):
        with open(os.fsencode(workspace) + b"/" + raw, "wb") as file:
            file.write(raw)
    entries = (await files.list(".", 1, 10, None)).entries
    names = [base64.b64decode(entry.name_base64 or "") for entry in entries]
    assert names == [b"\xfe", b"\xff"]
    assert await get(files, names[1].decode("utf-8", "surrogateescape")) == b"\xff"


async def test_times_that_no_calendar_holds_do_not_fail_a_listing(files: FileService, workspace: Path) -> None:
    for name, seconds in (("old", -(1 << 33)), ("new", 1 << 33)):
        (workspace / name).touch()
        os.utime(workspace / name, (seconds, seconds))
    entries = {entry.name: entry.mtime for entry in (await files.list(".", 1, 10, None)).entries}
    assert entries["old"] < "1970" < entries["new"]


# ── deleting, moving, making ────────────────────────────────────────────────────────────────────────────────────


async def test_a_directory_goes_with_its_content_only_when_asked_to(files: FileService, workspace: Path) -> None:
    await put(files, "d/e/f", b"x")
    with pytest.raises(Conflict, match="recursive=true"):
        await files.delete("d", recursive=False)
    await files.delete("d", recursive=True)
    with pytest.raises(FileMissing):
        await files.delete("d", recursive=True)
    (workspace / "empty").mkdir()
    await files.delete("empty", recursive=False)
    assert os.listdir(workspace) == []


async def test_a_tree_of_any_depth_and_width_is_removed_with_few_descriptors(
    files: FileService, workspace: Path
) -> None:
    fd = os.open(workspace, os.O_RDONLY)
    for level in range(1500):  # deeper than Python's recursion and than the descriptors that a process may have
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
        os.close(os.open(f"f{level}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        if IS_ROOT:
            os.fchown(fd, UID, GID)
    for n in range(3000):
        os.close(os.open(f"w{n}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    await files.delete("d", recursive=True)
    assert os.listdir(workspace) == []


async def test_links_in_a_deleted_tree_lose_only_themselves(files: FileService, workspace: Path) -> None:
    (workspace / "kept").mkdir()
    (workspace / "kept/f").touch()
    (workspace / "d").mkdir()
    if IS_ROOT:
        os.chown(workspace / "d", UID, GID)
    (workspace / "d/link").symlink_to("../kept")
    await files.delete("d", recursive=True)
    assert (workspace / "kept/f").exists()


async def test_the_workspace_can_be_neither_deleted_nor_moved(files: FileService, workspace: Path) -> None:
    for path in (".", "./", str(workspace)):
        with pytest.raises(InvalidPath):
            await files.delete(path, recursive=True)
        with pytest.raises(InvalidPath):
            await files.move(MoveRequest(source=path, target="x"))
        with pytest.raises(InvalidPath):
            await files.move(MoveRequest(source="x", target=path, overwrite=True))
    assert workspace.exists()


async def test_a_move_replaces_only_when_asked_to(files: FileService, workspace: Path) -> None:
    await put(files, "a", b"a")
    await put(files, "b", b"b")
    with pytest.raises(Conflict, match="overwrite"):
        await files.move(MoveRequest(source="a", target="b"))
    assert await get(files, "b") == b"b"
    entry = await files.move(MoveRequest(source="a", target="b", overwrite=True))
    assert entry.name == "b"
    assert await get(files, "b") == b"a"
    assert os.listdir(workspace) == ["b"]
    with pytest.raises(FileMissing, match="/a does not exist"):
        await files.move(MoveRequest(source="a", target="c"))
    with pytest.raises(FileMissing):
        await files.move(MoveRequest(source="b", target="missing/c"))


async def test_a_directory_cannot_be_moved_into_itself(files: FileService) -> None:
    await files.mkdir(MkdirRequest(path="d"))
    with pytest.raises(InvalidPath):
        await files.move(MoveRequest(source="d", target="d/e"))


async def test_mkdir_makes_parents_or_says_what_is_missing(files: FileService, workspace: Path) -> None:
    entry, is_new = await files.mkdir(MkdirRequest(path="a/b", mode=0o700))
    assert (entry.type, entry.mode, is_new) == ("directory", 0o700, True)
    assert stat.S_IMODE((workspace / "a").stat().st_mode) == 0o755
    assert (await files.mkdir(MkdirRequest(path="a/b")))[1] is False
    with pytest.raises(Conflict):
        await files.mkdir(MkdirRequest(path="a/b", parents=False))
    with pytest.raises(FileMissing):
        await files.mkdir(MkdirRequest(path="x/y", parents=False))
    await put(files, "f", b"")
    with pytest.raises(NotADirectory):
        await files.mkdir(MkdirRequest(path="f/g"))
    with pytest.raises(InvalidRequest):
        await files.mkdir(MkdirRequest(path="z", mode=0o1777))
    assert not (workspace / "z").exists()


# ── a full disk ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_disk(workspace: Path) -> Iterator[Path]:
    """A file system of 2 MiB, in the workspace."""
    mount = workspace / "small"
    mount.mkdir()
    options = f"size=2m,uid={UID},gid={GID},mode=755"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this root may not mount: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@needs_root
@pytest.mark.root
async def test_a_full_disk_is_said_and_the_old_content_stays(workspace: Path, small_disk: Path) -> None:
    service = FileService(config_of(workspace), USER)
    try:
        await put(service, "small/f", b"old")
        (small_disk / "filler").write_bytes(b"x" * (1 << 20))
        with pytest.raises(NoSpace):
            await put(service, "small/f", b"y" * (1 << 20) + b"z" * 100_000)
        assert (small_disk / "f").read_bytes() == b"old"
        assert sorted(os.listdir(small_disk)) == ["f", "filler"]
        with pytest.raises(NotSupported, match="mv"):
            await service.move(MoveRequest(source="small/f", target="f"))
    finally:
        service.close()
