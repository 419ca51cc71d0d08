"""Cgroup hierarchies of every kind of machine, from what their files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.providers.local import cgroups
from manager.providers.local.cgroups import Hierarchy, Limits, PodCgroup

V1 = """\
30 25 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/systemd rw,nosuid - cgroup cgroup rw,xattr,name=systemd
32 30 0:28 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 / /sys/fs/cgroup/with\\040space rw,nosuid - cgroup cgroup rw,pids
"""


def test_controllers_of_a_v1_machine_are_found_where_they_are_mounted_together_too() -> None:
    assert cgroups.find_hierarchies(V1) == [
        Hierarchy(1, "/sys/fs/cgroup/memory", ("memory",)),
        Hierarchy(1, "/sys/fs/cgroup/cpu,cpuacct", ("cpu", "cpuacct")),
        Hierarchy(1, "/sys/fs/cgroup/with space", ("pids",)),
    ]


def test_a_v2_hierarchy_gives_the_controllers_that_no_v1_hierarchy_has(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    line = f"35 30 0:31 / {tmp_path} rw,nosuid - cgroup2 cgroup2 rw\n"
    assert cgroups.find_hierarchies(line) == [Hierarchy(2, str(tmp_path), ("memory", "cpu", "pids"))]
    hybrid = cgroups.find_hierarchies(V1 + line)
    assert hybrid[-1] == Hierarchy(2, str(tmp_path), ())


def test_a_machine_without_cgroups_has_none() -> None:
    assert cgroups.find_hierarchies("25 0 8:1 / / rw - ext4 /dev/sda rw\n") == []


@pytest.fixture
def unified(tmp_path: Path) -> Hierarchy:
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    parent = tmp_path / cgroups.PARENT
    parent.mkdir()
    for name in ("cgroup.subtree_control", "cgroup.procs"):
        (parent / name).write_text("")
    return Hierarchy(2, str(tmp_path), ("memory", "cpu", "pids"))


def test_a_v2_hierarchy_hands_its_controllers_down(unified: Hierarchy) -> None:
    good, missing = cgroups.usable([unified])
    assert (good, missing) == ([unified], {})
    assert Path(unified.mount, "cgroup.subtree_control").read_text() == "+cpu +pids"
    assert Path(unified.mount, cgroups.PARENT, "cgroup.subtree_control").read_text() == "+memory +cpu +pids"


def test_a_hierarchy_that_cannot_be_used_says_which_limits_are_missing_and_why(tmp_path: Path) -> None:
    good, missing = cgroups.usable([Hierarchy(1, str(tmp_path / "nowhere"), ("memory",))])
    assert good == []
    assert set(missing) == {"memory", "cpu", "pids"}
    assert "nowhere" in missing["memory"]


def settings(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir() if path.is_file()}


def test_limits_are_set_on_v2(tmp_path: Path) -> None:
    group = PodCgroup(2, str(tmp_path / "p"), ("memory", "cpu", "pids"))
    cgroups.make([group], Limits(memory_bytes=1 << 20, cpu=1.5, pids=7))
    assert settings(tmp_path / "p") == {
        "memory.max": "1048576", "memory.swap.max": "0", "cpu.max": "150000 100000", "pids.max": "7",
    }  # fmt: skip


def test_limits_are_set_on_v1_in_their_own_hierarchies(tmp_path: Path) -> None:
    memory, cpu = PodCgroup(1, str(tmp_path / "m"), ("memory",)), PodCgroup(1, str(tmp_path / "c"), ("cpu", "cpuacct"))
    cgroups.make([memory, cpu], Limits(memory_bytes=1 << 20, cpu=0.001, pids=7))
    assert settings(tmp_path / "m") == {
        "memory.limit_in_bytes": "1048576", "memory.memsw.limit_in_bytes": "1048576",
    }  # fmt: skip
    assert settings(tmp_path / "c") == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "1000"}


def test_no_limit_sets_nothing(tmp_path: Path) -> None:
    cgroups.make([PodCgroup(2, str(tmp_path / "p"), ("memory", "cpu", "pids"))], Limits())
    assert settings(tmp_path / "p") == {}
    assert Limits().asked() == ()
    assert Limits(cpu=1.0, pids=3).asked() == ("cpu", "pids")


def test_kills_for_want_of_memory_are_counted_on_both_versions(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert cgroups.oom_kills([PodCgroup(2, str(tmp_path), ("memory",))]) == 3
    assert cgroups.oom_kills([PodCgroup(1, str(tmp_path), ("cpu",)), PodCgroup(1, str(tmp_path), ("memory",))]) == 2
    assert cgroups.oom_kills([PodCgroup(1, str(tmp_path / "gone"), ("memory",))]) == 0
    below = tmp_path / "inner/commands/c1"
    below.mkdir(parents=True)
    (below / "memory.oom_control").write_text("oom_kill 5\n")
    (below / "cgroup.procs").write_text("17\n18\n")
    assert cgroups.oom_kills([PodCgroup(1, str(tmp_path), ("memory",))]) == 7
    assert cgroups.members([PodCgroup(1, str(tmp_path), ("memory",))]) == {17, 18}


def test_removing_takes_cgroups_that_a_pod_made_below_and_gone_ones_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "p" / "a" / "b").mkdir(parents=True)
    group = PodCgroup(2, str(tmp_path / "p"), ())
    cgroups.remove([group])
    cgroups.remove([group])
    assert not (tmp_path / "p").exists()
