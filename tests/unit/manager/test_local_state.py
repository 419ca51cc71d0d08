"""The label store: one directory a pod, shared by processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from manager.providers.base import ClaimLost, PodGone
from manager.providers.local.processes import ProcessId, boot_id, identify
from manager.providers.local.state import PodRecord, PodStore, pod_of


def record_of(name: str) -> PodRecord:
    return PodRecord(
        name=name, target="here", version=1, phase="ready", labels={"a": "1"}, annotations={}, created_at=5.0,
        boot_id=boot_id(), socket="/s", run_dir="/r",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> PodStore:
    store = PodStore(tmp_path / "pods")
    store.prepare()
    os.close(store.begin(record_of("p1")))
    return store


def test_what_was_begun_is_read_back(store: PodStore) -> None:
    assert store.read("p1") == record_of("p1")
    assert store.names() == ["p1"]
    pod = pod_of(record_of("p1"))
    assert (pod.address, pod.version, pod.ready, pod.target) == ("unix:/s", "1", True, "here")


def test_what_is_no_directory_is_no_pod(store: PodStore) -> None:
    (store.root / "notes").write_text("left by somebody")
    (store.root / "link").symlink_to(store.root / "p1")
    assert store.names() == ["p1"]


def test_the_store_is_for_its_user_alone(store: PodStore) -> None:
    assert store.root.stat().st_mode & 0o777 == 0o700
    assert store.path("p1").stat().st_mode & 0o777 == 0o700


def test_a_name_is_taken_once(store: PodStore) -> None:
    with pytest.raises(FileExistsError):
        store.begin(record_of("p1"))
    assert os.listdir(store.root) == ["p1"]


def test_a_patch_needs_the_version_and_counts_it_up(store: PodStore) -> None:
    patched = store.patch("p1", "1", {"a": None, "b": "2"}, {"note": "x"})
    assert (patched.labels, patched.annotations, patched.version) == ({"b": "2"}, {"note": "x"}, 2)
    with pytest.raises(ClaimLost):
        store.patch("p1", "1", {"b": None}, {})
    assert store.read("p1") == patched


def test_a_pod_that_is_going_away_is_no_candidate(store: PodStore) -> None:
    store.change("p1", lambda record: msgspec.structs.replace(record, phase="deleting"))
    with pytest.raises(ClaimLost):
        store.patch("p1", "1", {}, {})


def test_a_change_that_fails_changes_nothing_and_gives_the_lock_back(store: PodStore) -> None:
    def fail(_record: PodRecord) -> PodRecord:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.change("p1", fail)
    assert store.patch("p1", "1", {}, {}).version == 2
    assert sorted(os.listdir(store.path("p1"))) == ["creating", "lock", "pod.json"]


def test_a_pod_that_is_gone_says_so(store: PodStore) -> None:
    trash = store.retire("p1")
    assert trash is not None
    assert (store.read("p1"), store.names(), store.retire("p1")) == (None, [], None)
    assert store.leftovers() == [trash]
    with pytest.raises(PodGone):
        store.patch("p1", "1", {}, {})


def test_a_file_that_is_no_record_is_no_pod(store: PodStore) -> None:
    (store.path("p1") / "pod.json").write_text("")
    assert store.read("p1") is None


def test_a_pod_being_made_is_not_abandoned_until_its_maker_lets_go(store: PodStore) -> None:
    held = store.begin(record_of("p2"))
    assert not store.abandoned("p2")
    os.close(held)
    assert store.abandoned("p2")


def test_a_half_begun_directory_is_left_alone_while_it_is_fresh(store: PodStore) -> None:
    fresh = store.root / ".new-p3-x"
    fresh.mkdir()
    assert store.leftovers() == []
    os.utime(fresh, (time.time() - 3600,) * 2)
    assert store.leftovers() == [fresh]


def test_a_process_lives_only_with_its_own_start_time_and_boot() -> None:
    me = identify(os.getpid())
    assert me is not None
    alive = msgspec.structs.replace(record_of("p"), inner=me)
    assert alive.alive(boot_id())
    assert not alive.alive("another boot")
    assert not record_of("p").alive(boot_id())
    other = msgspec.structs.replace(alive, inner=ProcessId(me.pid, me.start_ticks + 1))
    assert not other.alive(boot_id())
