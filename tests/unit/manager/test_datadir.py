"""What a manager keeps on its machine."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manager import datadir
from manager.config import BadConfig


def test_the_directory_is_made_for_its_owner_alone_and_narrowed_where_it_was_not(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    datadir.prepare(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    datadir.prepare(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadConfig, match="SOJOURN_DATA_DIR"):
        datadir.prepare(tmp_path / "file" / "below")


def test_a_secret_is_made_once_and_only_where_that_is_wanted(tmp_path: Path) -> None:
    assert datadir.secret(tmp_path, "s", make=False) is None
    made = datadir.secret(tmp_path, "s", make=True)
    assert made is not None
    assert len(made) == 64
    assert datadir.secret(tmp_path, "s", make=True) == made
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_managers_that_start_at_once_agree_on_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(lambda _: datadir.secret(tmp_path, "s", make=True), range(64)))
    assert len(set(made)) == 1
    assert os.listdir(tmp_path) == ["s"]


def test_what_is_written_replaces_what_was_there_and_leaves_nothing_beside(tmp_path: Path) -> None:
    datadir.write(tmp_path, "address", "one")
    datadir.write(tmp_path, "address", "two")
    assert datadir.read(tmp_path, "address") == "two"
    assert os.listdir(tmp_path) == ["address"]
    datadir.remove(tmp_path, "address")
    datadir.remove(tmp_path, "address")
    assert datadir.read(tmp_path, "address") is None
