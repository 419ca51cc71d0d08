"""A tree, the layers of its changes, and the tree that they make: the same to the nanosecond, whatever was done."""

from __future__ import annotations

import io
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.layerpack import LayerPacker
from executor.tarpack import PackLimit
from executor.treeindex import RACY_NS, TreeIndex, facts_of, same_as
from executor.treewalk import TreeWalk, mounts_below, open_own
from tests.support.trees import Edits, apply, differences, opened, pack, picture

IS_ROOT = os.geteuid() == 0


class Twins:
    """A tree and its copy, which only layers change."""

    def __init__(self, directory: Path) -> None:
        self.one, self.other = directory / "one", directory / "other"
        self.one.mkdir(parents=True)
        self.other.mkdir()
        self.other.joinpath("left over").write_text("the first layer takes it away")
        self.base: TreeIndex | None = None
        self.layer = b""
        self.packer: LayerPacker

    def checkpoint(self) -> None:
        self.layer, new, self.packer, _ = pack(self.one, self.base)
        if self.base is not None:
            self.base.close()
        self.base = new
        apply(self.layer, self.other)

    def settle(self) -> None:
        """Until what is in the tree can be told from what changes next."""
        time.sleep(2 * RACY_NS / 1e9)
        self.checkpoint()

    @property
    def different(self) -> list[str]:
        return differences(picture(self.one), picture(self.other))


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    found = Twins(tmp_path)
    yield found
    if found.base is not None:
        found.base.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), steps=st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_layers_of_any_edits_laid_over_each_other_make_the_same_tree(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: list[int]
) -> None:
    """Links of any target, hard links, holes, names of any bytes, types that change, times to the ns."""
    twins = Twins(tmp_path_factory.mktemp("twins"))
    edits = Edits(twins.one, seed, owners=IS_ROOT)
    try:
        edits.run(20)
        for count in steps:
            edits.run(count)
            if seed % 2:  # else most of it is sent again each time
                time.sleep(1.2 * RACY_NS / 1e9)
            twins.checkpoint()
            assert twins.different == []
    finally:
        if twins.base is not None:
            twins.base.close()


def test_a_layer_holds_only_what_changed_and_marks_what_is_gone(twins: Twins) -> None:
    for name in ("same", "edited", "removed", "dir/inner"):
        path = twins.one / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    twins.checkpoint()
    assert (twins.packer.entries, twins.packer.removed) == (6, 0)  # the workspace itself is one
    twins.settle()
    twins.checkpoint()
    assert (twins.packer.entries, twins.packer.removed) == (0, 0)
    (twins.one / "edited").write_text("other")
    (twins.one / "removed").unlink()
    (twins.one / "dir" / "inner").unlink()
    (twins.one / "dir").rmdir()
    twins.checkpoint()
    assert (twins.packer.entries, twins.packer.removed) == (2, 2)  # a directory's mark is that of its content
    assert not twins.different


def test_the_workspace_s_own_mode_and_attributes_are_a_change_too(twins: Twins) -> None:
    (twins.one / "f").write_text("x")
    twins.settle()
    twins.one.chmod(0o1750)
    twins.checkpoint()
    assert twins.packer.entries == 1
    assert not twins.different


def test_content_of_the_same_size_with_its_old_time_set_back_is_seen(twins: Twins) -> None:
    """Programs can set mtime, not ctime."""
    path = twins.one / "f"
    path.write_bytes(b"before")
    twins.settle()
    status = path.stat()
    path.write_bytes(b"after!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    twins.checkpoint()
    assert twins.packer.entries == 1
    assert not twins.different


def test_what_changed_within_the_clock_s_last_tick_is_sent_again(twins: Twins) -> None:
    """The kernel would give a second change of that tick the same ctime."""
    path = twins.one / "f"
    for content in (b"one", b"two", b"six"):
        path.write_bytes(content)
        twins.checkpoint()
        assert not twins.different
    status = path.stat()
    soon, later = (facts_of(b"f", status, status.st_ctime_ns + RACY_NS + ns) for ns in (0, 1))
    assert (soon == same_as(b"f", status), later == same_as(b"f", status)) == (False, True)


def test_a_directory_keeps_its_time_where_only_a_file_in_it_changed(twins: Twins) -> None:
    (twins.one / "d").mkdir()
    (twins.one / "d" / "f").write_text("before")
    os.utime(twins.one / "d", ns=(1, 1_000_000_001))
    twins.settle()
    (twins.one / "d" / "f").write_text("after")
    twins.checkpoint()
    assert twins.packer.entries == 1
    assert not twins.different


def test_a_user_s_own_files_with_names_of_marks_stay_files(twins: Twins) -> None:
    for name in (".wh.x", ".wh..wh..opq", ".wh.", ".wh..wh.x"):
        (twins.one / name).write_text(name)
    (twins.one / "x").write_text("stays")
    twins.settle()
    assert not twins.different
    (twins.one / ".wh.x").unlink()
    twins.checkpoint()
    assert (twins.one / "x").exists()
    assert not twins.different


def test_the_longest_name_can_be_marked_as_gone(twins: Twins) -> None:
    (twins.one / ("n" * 255)).write_text("x")
    twins.settle()
    (twins.one / ("n" * 255)).unlink()
    twins.checkpoint()
    assert not twins.different


@pytest.mark.parametrize("before", ["file", "directory", "symlink", "fifo"])
@pytest.mark.parametrize("after", ["file", "directory", "symlink", "fifo"])
def test_anything_can_become_anything(twins: Twins, before: str, after: str) -> None:
    path = twins.one / "thing"
    make: dict[str, Callable[[], object]] = {
        "file": lambda: path.write_text("x"),
        "directory": lambda: (path / "inner" / "more").mkdir(parents=True),
        "symlink": lambda: path.symlink_to("/nonexistent"),
        "fifo": lambda: os.mkfifo(path),
    }
    make[before]()
    twins.settle()
    path.rename(twins.one / "elsewhere")
    make[after]()
    twins.checkpoint()
    assert not twins.different


def test_a_directory_renamed_with_all_in_it_is_at_its_new_place_only(twins: Twins) -> None:
    (twins.one / "m" / "deep").mkdir(parents=True)
    (twins.one / "m" / "deep" / "file").write_text("x")
    twins.settle()
    (twins.one / "m").rename(twins.one / "a")
    twins.checkpoint()
    assert not twins.different
    assert twins.packer.removed == 1


def test_all_names_of_a_changed_file_are_one_file_again(twins: Twins) -> None:
    (twins.one / "b").write_text("x")
    for name in ("a", "c", "z"):
        (twins.one / name).hardlink_to(twins.one / "b")
    twins.settle()
    (twins.one / "c").write_text("new")
    twins.checkpoint()
    assert not twins.different
    assert len({(twins.other / name).stat().st_ino for name in "abcz"}) == 1
    (twins.one / "a").unlink()
    (twins.one / "n").hardlink_to(twins.one / "z")
    twins.checkpoint()
    assert not twins.different


def test_a_sparse_file_costs_its_content_only_and_has_its_holes_again(twins: Twins) -> None:
    with (twins.one / "sparse").open("wb") as file:
        for at in (0, 8 << 20, 16 << 20):
            file.seek(at)
            file.write(b"data")
        file.truncate(32 << 20)
    with (twins.one / "hole").open("wb") as file:
        file.truncate(16 << 20)
    twins.checkpoint()
    assert not twins.different
    assert len(twins.layer) < 1 << 20
    assert (twins.other / "sparse").stat().st_blocks == (twins.one / "sparse").stat().st_blocks


def test_a_file_of_more_holes_than_a_layer_tells_of_keeps_its_content(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.layerpack.MAX_EXTENTS", 100)
    with (twins.one / "comb").open("wb") as file:
        for index in range(150):
            file.seek(index * 8192)
            file.write(b"x")
    twins.checkpoint()
    one, other = picture(twins.one)[b"comb"], picture(twins.other)[b"comb"]
    assert one[:7] == other[:7]


def test_extended_attributes_of_the_user_come_and_go(twins: Twins) -> None:
    path = twins.one / "f"
    path.write_text("x")
    try:
        os.setxattr(path, "user.a=b%", b"\0value=\n")
    except OSError as why:
        pytest.skip(f"no user attributes here: {why}")
    (twins.one / "d").mkdir()
    os.setxattr(twins.one / "d", "user.dir", b"")
    path.chmod(0o444)
    twins.settle()
    assert not twins.different
    path.chmod(0o644)
    os.removexattr(path, "user.a=b%")
    os.removexattr(twins.one / "d", "user.dir")
    twins.checkpoint()
    assert not twins.different


def test_owners_and_set_id_bits_of_a_user_s_files_are_kept_and_root_s_are_not(twins: Twins) -> None:
    if not IS_ROOT:
        pytest.skip("only root gives files away")
    for name, uid, gid, mode in (
        ("theirs", 1000, 1000, 0o6755), ("root_s", 0, 0, 0o4755), ("group_of_root", 1000, 0, 0o2755),
        ("far", 4_000_000_000, 3_000_000_000, 0o644),
    ):  # fmt: skip
        path = twins.one / name
        path.write_text(name)
        os.chown(path, uid, gid)
        path.chmod(mode)
    (twins.one / "shared").mkdir()
    os.chown(twins.one / "shared", 1000, 1000)
    (twins.one / "shared").chmod(0o3777)
    twins.layer, twins.base, _, _ = pack(twins.one, None)
    applier = apply(twins.layer, twins.other)
    assert applier.set_id_dropped == 2
    found = {path.name: (path.stat().st_uid, path.stat().st_gid, stat.S_IMODE(path.stat().st_mode))
             for path in twins.other.iterdir()}  # fmt: skip
    assert found == {
        "theirs": (1000, 1000, 0o6755), "root_s": (0, 0, 0o755), "group_of_root": (1000, 0, 0o755),
        "far": (4_000_000_000, 3_000_000_000, 0o644), "shared": (1000, 1000, 0o3777),
    }  # fmt: skip


def test_sockets_and_uploads_that_are_not_done_are_left_out(twins: Twins) -> None:
    (twins.one / (".sojourn-" + "0" * 24 + ".part")).write_text("half")
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        here = os.getcwd()
        os.chdir(twins.one)  # a socket's path has 107 bytes at most
        stack.callback(os.chdir, here)
        server.bind("socket")
    layer, index, _, walk = pack(twins.one, None)
    index.close()
    apply(layer, twins.other)
    assert walk.left.sockets == 1
    assert list(twins.other.iterdir()) == []


def test_mounts_and_secrets_are_neither_read_nor_written_nor_marked_as_gone(twins: Twins) -> None:
    """S14: what was bound as a secret is in no layer."""
    (twins.one / "mnt" / "inner").mkdir(parents=True)
    (twins.one / ".env").write_text("SECRET=1")
    (twins.one / "plain").write_text("x")
    before, base, _, _ = pack(twins.one, None)
    layer, index, packer, walk = pack(twins.one, base, mounts=frozenset({b"mnt"}), alone=frozenset({b".env"}))
    base.close()
    index.close()
    assert (walk.left.mounts, packer.removed, b"SECRET" in layer, b"mnt" in layer) == (1, 0, False, False)
    (twins.other / ".env").write_text("here")
    (twins.other / "mnt" / "own").mkdir(parents=True)
    (twins.other / "deep").mkdir()
    for name in ("secret", "left over"):
        (twins.other / "deep" / name).write_text(name)
    alone = frozenset({b"mnt", b".env", b"deep\0secret"})
    applier = apply(before, twins.other, alone=alone)
    assert applier.left_alone == 3
    assert (twins.other / ".env").read_text() == "here"
    assert sorted(path.name for path in twins.other.iterdir()) == [".env", "deep", "mnt", "plain"]
    assert [path.name for path in (twins.other / "deep").iterdir()] == ["secret"]
    assert sorted(path.name for path in (twins.other / "mnt").iterdir()) == ["own"]


def test_mount_points_are_told_by_the_kernel_s_list() -> None:
    text = (
        b"36 35 98:0 / / rw - ext4 /dev/root rw\n"
        b"37 36 0:5 / /work/a\\040b rw - tmpfs tmpfs rw\n"
        b"38 36 0:6 /x /work/c/d rw - tmpfs tmpfs rw\n"
        b"39 36 0:6 /x /workshop rw - tmpfs tmpfs rw\nbroken\n"
    )
    assert mounts_below((b"work",), lambda: text) == {b"a b", b"c\0d"}


def test_a_file_that_shrinks_or_grows_while_it_is_read_leaves_the_layer_whole(twins: Twins) -> None:
    for name in ("shrinks", "grows"):
        (twins.one / name).write_bytes(b"x" * 700_000)
    (twins.one / "zzz").write_text("after them")
    out = io.BytesIO()
    done = set[str]()

    def write(data: bytes) -> None:
        out.write(data)
        for name in {"shrinks", "grows"} - done:
            if name.encode() in data:
                done.add(name)
                os.truncate(twins.one / name, 10 if name == "shrinks" else 700_009)

    with opened(twins.one) as fd:
        packer = LayerPacker(fd, TreeWalk(fd), None, TreeIndex(None), write)
        packer.run()
    twins.base = packer.new
    assert packer.changed == 2
    apply(out.getvalue(), twins.other)
    assert (twins.other / "zzz").read_text() == "after them"
    twins.checkpoint()
    assert not twins.different


def test_what_vanishes_while_the_tree_is_walked_is_gone_in_the_copy(twins: Twins) -> None:
    for index in range(20):
        (twins.one / f"d{index:02}").mkdir()
        (twins.one / f"d{index:02}" / "f").write_bytes(b"x" * 300_000)
    twins.settle()
    for index in range(20):
        (twins.one / f"d{index:02}" / "f").write_bytes(b"y" * 300_000)
    out, calls = io.BytesIO(), 0

    def write(data: bytes) -> None:
        nonlocal calls
        out.write(data)
        calls += 1
        if calls == 4:
            for index in range(10, 20, 2):
                (twins.one / f"d{index}" / "f").unlink()
                (twins.one / f"d{index}").rmdir()

    with opened(twins.one) as fd:
        packer = LayerPacker(fd, TreeWalk(fd), twins.base, TreeIndex(None), write)
        packer.run()
    assert twins.base is not None
    twins.base.close()
    twins.base = packer.new
    apply(out.getvalue(), twins.other)
    assert packer.removed == 5
    assert {path.name for path in twins.other.iterdir()} == {path.name for path in twins.one.iterdir()}


def test_a_tree_deeper_than_a_layer_goes_is_told_of_and_nothing_of_it_is_marked_as_gone(twins: Twins) -> None:
    here = os.getcwd()
    os.chdir(twins.one)
    try:
        for _ in range(300):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    layer, index, packer, walk = pack(twins.one, None)
    again, last, second, _ = pack(twins.one, index)
    index.close()
    last.close()
    apply(layer, twins.other)
    apply(again, twins.other)
    assert (walk.left.too_deep, packer.entries, second.removed) == (1, 257, 0)


def test_more_entries_or_bytes_than_may_be_packed_end_the_layer_before_its_end_mark(twins: Twins) -> None:
    for index in range(5):
        (twins.one / f"f{index}").write_bytes(b"x" * 100)
    for most_entries, most_bytes in ((5, 1000), (100, 450)):
        out = io.BytesIO()
        with opened(twins.one) as fd:
            packer = LayerPacker(
                fd, TreeWalk(fd), None, TreeIndex(None), out.write, max_entries=most_entries, max_bytes=most_bytes
            )
            with pytest.raises(PackLimit):
                packer.run()
            packer.new.close()


def test_a_huge_directory_is_walked_in_order_with_few_names_in_memory(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.treewalk._BATCH", 70)
    names = [f"{number * 7919 % 1000:03}" for number in range(1000)]
    for name in names:
        (twins.one / name).touch()
    with opened(twins.one) as fd:
        seen = [one.key.decode() for one in TreeWalk(fd).entries()]
    assert seen == sorted(names)


def test_modes_that_keep_their_owner_out_do_not_keep_anything_out_of_a_layer(twins: Twins) -> None:
    inner = twins.one / "closed" / "inner"
    inner.mkdir(parents=True)
    (inner / "f").write_text("x")
    (inner / "f").chmod(0)
    inner.chmod(0o444)
    (twins.one / "closed").chmod(0)
    try:
        twins.checkpoint()
        if IS_ROOT:
            assert twins.different == []
        assert stat.S_IMODE((twins.one / "closed").stat().st_mode) == 0
        assert stat.S_IMODE((twins.other / "closed").stat().st_mode) == 0
    finally:
        for top in (twins.one, twins.other):
            for path in (top / "closed", top / "closed" / "inner"):
                path.chmod(0o700)
    assert (twins.other / "closed" / "inner" / "f").stat().st_size == 1


def test_a_link_is_never_opened_for_its_owner(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/shadow")
    with opened(tmp_path) as fd, pytest.raises(OSError, match="symbolic links"):
        open_own(fd, b"link", os.O_RDONLY | os.O_NOFOLLOW)
