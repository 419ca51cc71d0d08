"""The executor's own cgroups: where they are made, what limits they get, when nothing is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor.cgroup import CgroupCounters
from executor.leaves import Leaf, Leaves, open_leaves

GiB = 1 << 30
FILES = (
    "cgroup.procs",
    "cgroup.subtree_control",
    "memory.max",
    "pids.max",
    "memory.events",
    "pids.events",
    "cgroup.kill",
)


class Machine:
    """A directory that stands for a machine with version 2, whose cgroup files come to be with their directories."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.top = root, root / "sys/fs/cgroup"
        (root / "proc/self/ns").mkdir(parents=True)
        self.namespace("cgroup:[4026532000]")
        (root / "proc/self/cgroup").write_text("0::/\n")
        (root / "proc/self/mountinfo").write_text("30 22 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
        self.top.mkdir(parents=True)
        self.fill(self.top)
        for name, text in {
            "memory.current": "1",
            "pids.current": "1",
            "memory.max": f"{GiB}\n",
            "pids.max": "512\n",
        }.items():
            (self.top / name).write_text(text)
        (self.top / "cgroup.controllers").write_text("cpu memory pids\n")
        real = os.makedirs

        def makedirs(path: str, *, exist_ok: bool) -> None:
            real(path, exist_ok=exist_ok)
            at = Path(path)
            while at != self.top:
                self.fill(at)
                at = at.parent

        monkeypatch.setattr("executor.leaves.os.makedirs", makedirs)

    def namespace(self, name: str) -> None:
        link = self.root / "proc/self/ns/cgroup"
        link.unlink(missing_ok=True)
        link.symlink_to(name)

    def fill(self, directory: Path) -> None:
        for name in FILES:
            (directory / name).touch()

    def text(self, name: str) -> str:
        return (self.top / name).read_text()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


class Command:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.leaf: Leaf | None = None


def opened(machine: Machine) -> Leaves:
    leaves = open_leaves(str(machine.root))
    assert leaves is not None
    leaves.enter()
    return leaves


def test_commands_get_a_little_less_than_the_pod_has(machine: Machine) -> None:
    leaves = opened(machine)
    assert leaves.helper_files() == [f"{machine.top}/commands/shared/cgroup.procs"]
    assert machine.text("executor/cgroup.procs") == "0"
    assert machine.text("cgroup.subtree_control") == machine.text("commands/cgroup.subtree_control") == "+memory +pids"
    assert int(machine.text("commands/memory.max")) == GiB - (64 << 20)
    assert int(machine.text("commands/pids.max")) == 480


def test_what_has_no_limit_gets_none_and_a_small_pod_keeps_its_processes(machine: Machine) -> None:
    (machine.top / "memory.max").write_text("max\n")
    (machine.top / "pids.max").write_text("40\n")
    opened(machine)
    assert machine.text("commands/memory.max") == machine.text("commands/pids.max") == ""


def test_outside_of_a_cgroup_namespace_nothing_of_the_machine_s_is_touched(machine: Machine) -> None:
    machine.namespace("cgroup:[4026531835]")
    assert open_leaves(str(machine.root)) is None
    assert not (machine.top / "commands").exists()


def test_where_the_pod_s_directory_is_read_only_the_one_that_was_handed_down_is_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.makedirs

    def makedirs(path: str, *, exist_ok: bool) -> None:
        if "/inner/" not in path:
            raise OSError(30, "Read-only file system")
        real(path, exist_ok=exist_ok)

    monkeypatch.setattr("executor.leaves.os.makedirs", makedirs)
    (machine.top / "inner").mkdir()
    machine.fill(machine.top / "inner")
    opened(machine)
    assert int(machine.text("inner/commands/memory.max")) == GiB - (64 << 20)


def test_without_controllers_below_a_leaf_still_keeps_a_command_together(machine: Machine) -> None:
    (machine.top / "cgroup.subtree_control").unlink()  # as where another program of the pod sits in its directory
    leaves = opened(machine)
    command = Command(1 << 22)
    leaves.adopt([command])
    assert command.leaf is not None
    assert command.leaf.oom is None
    assert machine.text("commands/c1/cgroup.procs") == str(1 << 22)
    command.leaf.kill()
    assert machine.text("commands/c1/cgroup.kill") == "1"


def test_a_leaf_is_used_again_only_once_nothing_lives_in_it(machine: Machine) -> None:
    leaves = opened(machine)
    one, two, three = Command(1 << 22), Command((1 << 22) + 1), Command((1 << 22) + 2)
    leaves.adopt([one])
    assert one.leaf is not None
    assert one.leaf.pids_inside() == [1 << 22]
    leaves.release(one.leaf)
    leaves.adopt([two])
    assert two.leaf is not one.leaf
    (machine.top / "commands/c1/cgroup.procs").write_text("")
    leaves.adopt([three])
    assert three.leaf is one.leaf


def test_a_leaf_counts_what_comes_after_it_became_a_command_s(machine: Machine) -> None:
    leaves = opened(machine)
    one = Command(1 << 22)
    (machine.top / "commands/shared/memory.events").write_text("oom_kill 7\n")
    assert leaves.counters(CgroupCounters(str(machine.root))).oom_kills() == 7
    leaves.adopt([one])
    assert one.leaf is not None
    assert one.leaf.oom is not None
    (machine.top / "commands/c1/memory.events").write_text("oom_kill 1\n")
    one.leaf.look(one.leaf.since + 1)
    assert one.leaf.oom.take(one.leaf.since)
    assert not one.leaf.oom.take(one.leaf.since)
