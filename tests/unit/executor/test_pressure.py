"""Which command a rise of the kernel's counters is put down to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from executor.cgroup import CgroupCounters
from executor.pressure import RECENT_SEC, Counter, Pressure


class Kernel:
    def __init__(self) -> None:
        self.value = 0

    def read(self) -> int:
        return self.value


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_a_rise_is_put_down_to_what_ran_when_it_was_seen(kernel: Kernel) -> None:
    counter = Counter(kernel.read)
    kernel.value = 1
    counter.look(101.0)
    assert counter.rose(since=100.5)
    assert not counter.rose(since=101.0), "it began after that"


def test_each_kill_is_put_down_to_one_command_only(kernel: Kernel) -> None:
    counter = Counter(kernel.read)
    kernel.value = 2
    counter.look(101.0)
    assert [counter.take(since=100.5) for _ in range(3)] == [True, True, False]
    kernel.value = 3
    counter.look(102.0)
    assert counter.take(since=100.5)
    assert not counter.take(since=100.5)


def test_a_counter_that_falls_has_lost_what_it_counted_and_goes_on_from_there(kernel: Kernel) -> None:
    kernel.value = 9
    counter = Counter(kernel.read)
    kernel.value = 4
    counter.look(101.0)
    assert not counter.rose(since=0.0)
    kernel.value = 5
    counter.look(102.0)
    assert counter.take(since=0.0)


def v2_pod(root: Path, *, oom_kill: int, denied: int) -> None:
    if not (root / "proc").exists():
        (root / "proc/self/ns").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("0::/\n")
        (root / "proc/self/mountinfo").write_text("30 22 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
        (root / "proc/self/ns/cgroup").symlink_to("cgroup:[4026532000]")
        (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in {
        "memory.current": "1", "memory.events": f"oom_kill {oom_kill}\n", "pids.current": "1",
        "pids.events": f"max {denied}\n",
    }.items():  # fmt: skip
        (root / "sys/fs/cgroup" / name).write_text(text)


async def test_a_kill_is_not_put_down_to_memory_that_ran_out_before_the_command_began(tmp_path: Path) -> None:
    v2_pod(tmp_path, oom_kill=0, denied=0)
    pressure = Pressure(CgroupCounters(str(tmp_path)), lambda _now: True)
    v2_pod(tmp_path, oom_kill=1, denied=1)
    assert pressure.is_old
    pressure.begin()
    began = time.monotonic()
    assert not pressure.was_oom(began, None)
    assert not pressure.was_pids(began, None)
    v2_pod(tmp_path, oom_kill=2, denied=2)
    assert pressure.was_oom(began, None)
    assert not pressure.was_oom(began, None), "there was one kill"
    assert pressure.was_pids(began, None)
    pressure.close()


async def test_a_kill_is_not_put_down_to_memory_that_ran_out_long_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2_pod(tmp_path, oom_kill=0, denied=0)
    pressure = Pressure(CgroupCounters(str(tmp_path)), lambda _now: True)
    pressure.begin()
    began = time.monotonic()
    v2_pod(tmp_path, oom_kill=1, denied=0)
    pressure.begin()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + RECENT_SEC + 1)
    assert not pressure.was_oom(began, None)
    pressure.close()


async def test_where_no_counter_is_known_nothing_is_read_and_no_timer_runs(tmp_path: Path) -> None:
    pressure = Pressure(CgroupCounters(str(tmp_path)), lambda _now: True)
    assert not pressure.is_old
    assert not pressure.was_oom(0.0, None)
    assert not pressure.was_pids(0.0, None)
