"""From a caller's path to a directory: what is refused before any system call, and what the walk refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.errors import FileMissing, InvalidPath, NotADirectory
from executor.safepath import Roots, directory_at, enter_or_make, parent_of, shown

ROOTS = Roots(("/no/workspace", "/no/tmp"))


@pytest.mark.parametrize(
    "path",
    ["", "..", "a/../b", "/no/workspace/../etc", "a/..", "\0", "a\0b", "/", "/etc/passwd", "/no", "/no/workspace2/a"],
)
def test_paths_that_lead_nowhere_good_are_refused(path: str) -> None:
    with pytest.raises(InvalidPath) as caught:
        ROOTS.place(path)
    assert caught.value.details == {"field": "path"}


@pytest.mark.parametrize("path", ["x" * 256, "é" * 128, "a/" * 2049, "\ud800"])
def test_names_and_paths_that_no_kernel_takes_are_refused(path: str) -> None:
    with pytest.raises(InvalidPath):
        ROOTS.place(path)


@pytest.mark.parametrize("path", ["x" * 255, "é" * 127, "a/" * 2048, "a%20b", "...", "a\nb", "\udcff"])
def test_odd_names_are_names_like_any_other(path: str) -> None:
    assert b"/".join(ROOTS.place(path).parts) == path.rstrip("/").encode("utf-8", "surrogateescape")


def test_relative_paths_start_at_the_workspace_and_absolute_ones_lie_in_a_root() -> None:
    relative, absolute = ROOTS.place("a/./b//c"), ROOTS.place("/no/workspace/a/b/c/")
    assert relative == absolute
    assert relative.path == b"/no/workspace/a/b/c"
    assert ROOTS.place("/no/tmp/x").parts == (b"x",)
    assert ROOTS.place(".").is_root


def test_the_innermost_of_nested_roots_is_the_place_s_own() -> None:
    nested = Roots(("/no/tmp/workspace", "/no/tmp"))
    assert nested.place("/no/tmp/workspace").is_root
    assert nested.place("/no/tmp/workspace/a").parts == (b"a",)
    assert nested.holds_root(nested.place("/no/tmp"))
    assert not nested.holds_root(nested.place("/no/tmp/other"))


def test_a_directory_above_a_root_holds_it() -> None:
    nested = Roots(("/no/tmp/a/workspace", "/no/tmp"))
    assert nested.holds_root(nested.place("/no/tmp/a"))
    assert nested.place("/no/tmp/a/b").is_below(nested.place("/no/tmp/a"))
    assert not nested.place("/no/tmp/a").is_below(nested.place("/no/tmp/a"))


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_every_text_is_a_place_in_a_root_or_refused(path: str) -> None:
    try:
        place = ROOTS.place(path)
    except InvalidPath:
        return
    assert place.root in ((b"no", b"workspace"), (b"no", b"tmp"))
    for part in place.parts:
        assert part not in (b"", b".", b"..")
        assert not set(b"/\0") & set(part)


def test_the_walk_refuses_a_link_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    roots = Roots((str(tmp_path),))
    with pytest.raises(InvalidPath, match=r"/link is a symbolic link"), directory_at(roots.place("link/inner")):
        pass
    with directory_at(roots.place("real/inner")) as fd:
        assert os.path.samestat(os.fstat(fd), (tmp_path / "real" / "inner").stat())


def test_a_link_above_the_root_is_the_operator_s_and_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "workspace").symlink_to("real")
    roots = Roots((str(tmp_path / "workspace"),))
    for path in ("f", f"{tmp_path}/workspace/f", f"{tmp_path}/real/f"):
        with parent_of(roots.place(path)) as (fd, name):
            assert name == b"f"
            assert os.path.samestat(os.fstat(fd), (tmp_path / "real").stat())
    (tmp_path / "workspace").unlink()
    (tmp_path / "real").rename(tmp_path / "moved")
    (tmp_path / "real").symlink_to("moved")  # what a command could do, had it the right to
    with pytest.raises(InvalidPath), directory_at(roots.place(".")):
        pass


def test_a_file_or_nothing_in_the_way_has_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    roots = Roots((str(tmp_path),))
    with pytest.raises(NotADirectory), directory_at(roots.place("file/x")):
        pass
    with pytest.raises(FileMissing, match="missing does not exist"), directory_at(roots.place("missing/x")):
        pass


def test_the_walk_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    roots = Roots((str(tmp_path),))
    before = len(os.listdir("/proc/self/fd"))
    for path in ("a/b", "a/missing/x", "link/x"):
        try:
            with directory_at(roots.place(path)):
                pass
        except (FileMissing, InvalidPath):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_that_is_made_has_just_the_mode_asked_for(tmp_path: Path) -> None:
    roots = Roots((str(tmp_path),))
    before = os.umask(0o077)
    try:
        with directory_at(roots.place(".")) as parent:
            made, is_new = enter_or_make(parent, b"d", 0o775, b"/d")
            os.close(made)
            again, is_new_again = enter_or_make(parent, b"d", 0o700, b"/d")
            os.close(again)
    finally:
        os.umask(before)
    assert (is_new, is_new_again) == (True, False)
    assert (tmp_path / "d").stat().st_mode & 0o7777 == 0o775


def test_shown_paths_are_short_and_always_text() -> None:
    assert shown(b"/a\xff") == "/a\ufffd"
    assert len(shown(b"/" + b"x" * 4000)) == 400
