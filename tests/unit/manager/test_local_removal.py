"""Removing what a pod's commands made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manager.providers.local.removal import remove_tree


def test_a_missing_directory_is_no_error(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(kept)
    (tree / "deep").mkdir()
    (tree / "deep" / "link").symlink_to(kept, target_is_directory=True)
    (tree / "dangling").symlink_to("/nowhere")
    remove_tree(tree)
    assert not tree.exists()
    assert (kept / "file").exists()


def test_a_link_in_the_place_of_the_tree_is_removed_itself(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / "tree").symlink_to(kept)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").is_symlink()
    assert (kept / "file").exists()


@pytest.mark.parametrize("mode", [0, 0o400, 0o100, 0o1000])
def test_closed_directories_are_opened(tmp_path: Path, mode: int) -> None:
    inner = tmp_path / "tree" / "closed" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").touch(mode=0)
    inner.chmod(mode)
    inner.parent.chmod(mode)
    (tmp_path / "tree").chmod(mode)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_a_depth_beyond_every_path_length_and_descriptor_limit_is_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    parent = os.open(tree, os.O_RDONLY)
    for level in range(3000):
        os.mkdir("directory", dir_fd=parent)
        if level % 500 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=parent))
        child = os.open("directory", os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = child
    os.close(parent)
    remove_tree(tree)
    assert not tree.exists()


def test_many_entries_and_names_that_are_no_text_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "many").mkdir(parents=True)
    for number in range(5000):
        (tree / "many" / str(number)).touch()
    os.mkdir(os.fsencode(tree) + b"/bad\xff\n")
    os.mkfifo(tree / "fifo")
    remove_tree(tree)
    assert not tree.exists()
