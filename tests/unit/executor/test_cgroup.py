"""Cgroup files as machines really have them, read from directories of fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor import cgroup
from executor.cgroup import CgroupCounters, find, parse_cpu_max, parse_cpuset, parse_figures, parse_limit
from executor.proctable import ProcessTable
from executor.usage import cpu_use, memory_use, pids_use

TABLE = ProcessTable(shown=[], is_cut=False, rss_bytes=7, cpu_ms=8.0, threads=9)
UNLIMITED_V1 = "9223372036854771712\n"
MiB = 1 << 20


def machine(root: Path, own: str, mounts: list[str], namespace: str = "cgroup:[4026532000]") -> None:
    """The files of /proc/self that say where the cgroups are."""
    proc = root / "proc" / "self"
    (proc / "ns").mkdir(parents=True)
    (proc / "cgroup").write_text(own)
    lines = [f"{30 + n} 23 0:{n} {mount}\n" for n, mount in enumerate(mounts)]
    (proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/vda rw\n" + "".join(lines))
    (proc / "ns" / "cgroup").symlink_to(namespace)


def put(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def v2_pod(root: Path) -> Path:
    """A container with a cgroup namespace: its own directory is the top that it sees."""
    machine(root, "0::/\n", ["/ /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate"])
    top = root / "sys/fs/cgroup"
    put(top, cgroup__type="domain\n", memory__current=f"{400 * MiB}\n", memory__max="536870912\n")
    put(top, memory__stat=f"anon 1\nfile 2\ninactive_file {300 * MiB}\n", memory__events="low 0\noom 1\noom_kill 3\n")
    put(top, cpu__stat="usage_usec 2500000\nthrottled_usec 1500\n", cpu__max="150000 100000\n")
    put(top, cpuset__cpus="", cpuset__cpus__effective="0-3\n", pids__current="12\n", pids__max="512\n")
    put(top, pids__events="max 4\n")
    return top


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("50000\n", 0.5), ("", None), ("x y\n", None), ("1 0", None)],
)
def test_cpu_max_is_read_in_all_its_forms(text: str, cores: float | None) -> None:
    """RS03"""
    assert parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("text", "count"),
    [("0-3\n", 4), ("1,3-4\n", 3), ("", None), ("\n", None), ("3-1", None), ("a", None), ("0-4294967295", None)],
)
def test_cpu_lists_are_counted(text: str, count: int | None) -> None:
    """RS07"""
    assert parse_cpuset(text) == count


@pytest.mark.parametrize(
    ("text", "limit"), [("max\n", None), ("536870912\n", 536870912), (UNLIMITED_V1, None), ("-1", None), (None, None)]
)
def test_limits_know_both_versions_words_for_none(text: str | None, limit: int | None) -> None:
    assert parse_limit(text) == limit


def test_lines_that_are_no_figures_are_left_out() -> None:
    assert parse_figures("a 1\nb\nc x\n\nd 2\ne 1 2\n") == {"a": 1, "d": 2}


def test_a_v2_pod_sees_its_own_limits_and_no_page_cache_as_use(tmp_path: Path) -> None:
    """RS01, RS05, RS07: also where cpuset.cpus is empty"""
    v2_pod(tmp_path)
    groups = find(str(tmp_path))
    memory, cpu, pids = memory_use(groups, TABLE), cpu_use(groups, TABLE), pids_use(groups, TABLE)
    assert (memory.working_set_bytes, memory.usage_bytes) == (100 * MiB, 400 * MiB)
    assert (memory.limit_bytes, memory.oom_kills, memory.source) == (536870912, 3, "cgroup2")
    assert (cpu.usage_ms, cpu.throttled_ms, cpu.limit_cores, cpu.cores) == (2500.0, 1.5, 1.5, 4)
    assert (pids.current, pids.limit, pids.source) == (12, 512, "cgroup2")


def test_a_leaf_of_the_executor_s_own_does_not_hide_the_pod(tmp_path: Path) -> None:
    top = v2_pod(tmp_path)
    (tmp_path / "proc/self/cgroup").write_text("0::/executor\n")
    put(top / "executor", cgroup__type="domain\n", memory__current="1\n", pids__current="1\n", cpu__max="max 1\n")
    assert memory_use(find(str(tmp_path)), TABLE).usage_bytes == 400 * MiB


def test_limits_further_up_hold_too_on_a_host(tmp_path: Path) -> None:
    machine(tmp_path, "0::/slice/unit\n", ["/ /sys/fs/cgroup rw - cgroup2 cgroup rw"], "cgroup:[4026531835]")
    top = tmp_path / "sys/fs/cgroup"
    put(top, cpu__stat="usage_usec 999\n")
    put(top / "slice", memory__max="1000\n", cpu__max="100000 100000\n", cgroup__type="domain\n")
    put(top / "slice/unit", memory__current="500\n", memory__max="2000\n", cpu__max="300000 100000\n")
    put(top / "slice/unit", cgroup__type="domain\n", cpu__stat="usage_usec 5000\n")
    groups = find(str(tmp_path))
    memory, cpu = memory_use(groups, TABLE), cpu_use(groups, TABLE)
    assert (memory.usage_bytes, memory.limit_bytes) == (500, 1000)
    assert (cpu.usage_ms, cpu.limit_cores) == (5.0, 1.0)


def v1_mounts(inner: str) -> list[str]:
    return [
        f"{inner} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
        f"{inner} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
        f"{inner} /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids",
        "/ /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw",
    ]


V1_OWN = "4:memory:/pods/one\n3:cpu,cpuacct:/pods/one\n2:pids:/pods/one\n1:name=systemd:/\n0::/\n"


def v1_files(top: Path, below: str) -> None:
    memory = top / "memory" / below
    put(memory, memory__usage_in_bytes=f"{90 * MiB}\n", memory__limit_in_bytes="536870912\n")
    put(memory, memory__stat=f"inactive_file 1\ntotal_inactive_file {50 * MiB}\n")
    put(memory, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    put(memory / "commands", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    cpu = top / "cpu,cpuacct" / below
    put(cpu, cpuacct__usage="3000000000\n", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    put(cpu, cpu__stat="nr_periods 5\nnr_throttled 1\nthrottled_time 2000000\n")
    put(top / "pids" / below, pids__current="3\n", pids__max="max\n", pids__events="max 2\n")
    put(top / "pids" / below / "commands", pids__events="max 5\n")
    put(top / "unified", cpu__stat="usage_usec 1\n")


@pytest.mark.parametrize("inner", ["/", "/pods/one"], ids=["whole hierarchy", "the pod's directories only"])
def test_a_hybrid_host_s_v1_controllers_are_found_by_path_or_mount(tmp_path: Path, inner: str) -> None:
    machine(tmp_path, V1_OWN, v1_mounts(inner), "cgroup:[4026531835]")
    v1_files(tmp_path / "sys/fs/cgroup", "pods/one" if inner == "/" else ".")
    groups = find(str(tmp_path))
    memory, cpu, pids = memory_use(groups, TABLE), cpu_use(groups, TABLE), pids_use(groups, TABLE)
    assert (memory.working_set_bytes, memory.limit_bytes, memory.source) == (40 * MiB, 536870912, "cgroup1")
    assert (cpu.usage_ms, cpu.throttled_ms, cpu.limit_cores, cpu.source) == (3000.0, 2.0, 0.5, "cgroup1")
    assert (pids.current, pids.limit) == (3, None)
    assert memory.oom_kills == 3


def test_the_machine_s_own_v1_figures_are_never_taken_for_a_pod_s(tmp_path: Path) -> None:
    machine(tmp_path, V1_OWN.replace("/pods/one", "/"), v1_mounts("/"), "cgroup:[4026531835]")
    v1_files(tmp_path / "sys/fs/cgroup", ".")
    groups = find(str(tmp_path))
    assert groups.memory is None
    assert memory_use(groups, TABLE).source == "processes"
    assert memory_use(groups, TABLE).working_set_bytes == TABLE.rss_bytes
    assert cpu_use(groups, TABLE).usage_ms == TABLE.cpu_ms
    assert pids_use(groups, TABLE).current == TABLE.threads


def test_v1_without_limits_says_none(tmp_path: Path) -> None:
    machine(tmp_path, V1_OWN, v1_mounts("/pods/one"))
    top = tmp_path / "sys/fs/cgroup"
    v1_files(top, ".")
    put(top / "memory", memory__limit_in_bytes=UNLIMITED_V1)
    put(top / "cpu,cpuacct", cpu__cfs_quota_us="-1\n")
    groups = find(str(tmp_path))
    assert memory_use(groups, TABLE).limit_bytes is None
    assert cpu_use(groups, TABLE).limit_cores is None


def test_counters_grow_with_what_the_kernel_counts(tmp_path: Path) -> None:
    machine(tmp_path, V1_OWN, v1_mounts("/pods/one"))
    top = tmp_path / "sys/fs/cgroup"
    v1_files(top, ".")
    counters = CgroupCounters(str(tmp_path))
    assert (counters.oom_kills(), counters.pids_denied()) == (3, 7)
    put(top / "memory/commands", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    put(top / "pids/commands", pids__events="max 6\n")
    assert (counters.oom_kills(), counters.pids_denied()) == (4, 8)


def test_v2_counters_are_read_from_their_events(tmp_path: Path) -> None:
    v2_pod(tmp_path)
    counters = CgroupCounters(str(tmp_path))
    assert (counters.oom_kills(), counters.pids_denied()) == (3, 4)


def test_nothing_raises_where_there_is_nothing(tmp_path: Path) -> None:
    counters = CgroupCounters(str(tmp_path))
    assert (counters.oom_kills(), counters.pids_denied()) == (0, 0)
    assert find(str(tmp_path)).memory is None


def test_odd_proc_files_say_nothing(tmp_path: Path) -> None:
    machine(tmp_path, "\n:\nx\n0::/../..\n", ["/ /sys", "- -", "/ /sys/fs/cgroup rw - cgroup2 cgroup2 rw"])
    put(tmp_path / "sys/fs/cgroup/..", memory__current="1\n")
    assert find(str(tmp_path)).memory is None


def test_files_that_vanish_after_they_were_found_do_not_raise(tmp_path: Path) -> None:
    top = v2_pod(tmp_path)
    groups = find(str(tmp_path))
    for path in top.iterdir():
        path.unlink()
    top.rmdir()
    assert memory_use(groups, TABLE).working_set_bytes == 0
    assert pids_use(groups, TABLE).current == 0
    assert cpu_use(groups, TABLE).source == "processes"


def test_a_file_of_any_size_is_read_only_in_part(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"1" * 1_000_000)
    text = cgroup.read_text(str(tmp_path), "big")
    assert text is not None
    assert len(text) == 65536
