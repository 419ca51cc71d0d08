"""What a profile comes to on a machine, how the executor is started, and why a pod ended."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from manager.errors import ImagePullFailed, IsolationUnavailable
from manager.model import Profile
from manager.providers.local.capability import Capabilities
from manager.providers.local.cgroups import PodCgroup
from manager.providers.local.deaths import Deaths
from manager.providers.local.disks import DiskWay
from manager.providers.local.ending import end_pod, log_tail, reason_of, trim_log
from manager.providers.local.entry import Entry, find_entry
from manager.providers.local.making import plan_for
from manager.providers.local.network import NetworkWay
from manager.providers.local.processes import ProcessId, boot_id, identify, open_pidfd, parse_stat, send
from manager.providers.local.state import PodRecord, PodStore
from manager.providers.local.watching import Watchers

GOOD = Capabilities(root=True, tier="split", seccomp=True)
WEAK = Capabilities(
    root=False, tier="single", missing_limits={"memory": "not root", "cpu": "not root", "pids": "not root"}
)
NONE = Capabilities(root=True, tier=None, why_not="bubblewrap is not installed", advice="install it")
DEFAULT = Profile(name="default")


def test_a_profile_is_taken_as_it_is_where_the_machine_can() -> None:
    plan = plan_for(DEFAULT, GOOD, insecure=False, allow_missing_limits=False)
    assert (plan.isolation, plan.tier) == ("namespaces", "split")
    assert (plan.limits.memory_bytes, plan.limits.cpu, plan.limits.pids) == (1 << 30, 1.0, 512)
    assert (plan.rlimits, plan.unenforced, plan.users) == ((), (), ("sandbox",))


def test_no_isolation_is_refused_with_the_way_to_get_it() -> None:
    with pytest.raises(IsolationUnavailable, match=r"bubblewrap is not installed.*install it"):
        plan_for(DEFAULT, NONE, insecure=False, allow_missing_limits=False)
    with pytest.raises(IsolationUnavailable, match="--insecure-no-isolation"):
        plan_for(Profile(name="x", isolation="none"), GOOD, insecure=False, allow_missing_limits=False)


def test_insecure_gives_plain_processes_only_where_isolation_is_missing_or_not_wanted() -> None:
    assert plan_for(DEFAULT, NONE, insecure=True, allow_missing_limits=False).isolation == "none"
    assert plan_for(DEFAULT, GOOD, insecure=True, allow_missing_limits=False).isolation == "namespaces"
    bare = Profile(name="x", isolation="none")
    assert plan_for(bare, GOOD, insecure=True, allow_missing_limits=False).isolation == "none"


def test_limits_that_cannot_be_set_are_refused_unless_they_may_be_missing() -> None:
    with pytest.raises(IsolationUnavailable, match=r"memory \(not root\); cpu \(not root\); pids \(not root\)"):
        plan_for(DEFAULT, WEAK, insecure=False, allow_missing_limits=False)
    plan = plan_for(DEFAULT, WEAK, insecure=False, allow_missing_limits=True)
    assert plan.unenforced == ("memory", "cpu", "pids")
    assert dict(plan.rlimits) == {resource.RLIMIT_DATA: 1 << 30, resource.RLIMIT_NPROC: 512}


def test_a_profile_without_limits_needs_none() -> None:
    free = Profile(name="free", cpu=None, memory_bytes=None, pids=None)
    assert plan_for(free, WEAK, insecure=False, allow_missing_limits=False).unenforced == ()


@pytest.mark.parametrize("users", [("root",), ("nobody",), ("a:b",), ("x\ny",), ("../x",)])
def test_users_that_are_none_of_a_pods_are_refused(users: tuple[str, ...]) -> None:
    with pytest.raises(IsolationUnavailable):
        plan_for(Profile(name="x", users=users), GOOD, insecure=False, allow_missing_limits=False)


def test_a_network_is_refused_where_it_cannot_be_walled_in() -> None:
    wanted = Profile(name="x", network="outbound", connections=7, bandwidth_bytes_sec=9000)
    routed = msgspec.structs.replace(GOOD, network=NetworkWay(way="routed"))
    plan = plan_for(wanted, routed, insecure=False, allow_missing_limits=False)
    assert (plan.network, plan.connections, plan.bytes_per_sec) == ("routed", 7, 9000)
    none = msgspec.structs.replace(GOOD, network=NetworkWay(way=None, why_not="no tc", advice="install iproute2"))
    with pytest.raises(IsolationUnavailable, match=r"no tc.*install iproute2"):
        plan_for(wanted, none, insecure=True, allow_missing_limits=True)
    # Plain processes would have all of this machine's network.
    bare = Profile(name="x", network="outbound", isolation="none")
    with pytest.raises(IsolationUnavailable, match="plain processes"):
        plan_for(bare, routed, insecure=True, allow_missing_limits=True)


def test_images_are_not_for_a_local_target() -> None:
    with pytest.raises(ImagePullFailed):
        plan_for(Profile(name="x", image="python:3.12"), GOOD, insecure=False, allow_missing_limits=False)


def test_the_executor_is_found_beside_the_manager(tmp_path: Path) -> None:
    entry = find_entry(tmp_path)
    assert (entry.package / "wire.py").exists()
    assert entry.python == sys.executable
    for path in (Path.home(), tmp_path):
        assert str(path) not in entry.programs


def test_an_interpreter_that_would_show_pods_the_data_directory_is_refused() -> None:
    inside = Path(sys.prefix) / "data"
    if Path(sys.prefix).parts[:2] == ("/", "usr"):
        pytest.skip("the interpreter is part of the system")
    with pytest.raises(IsolationUnavailable, match="must not see"):
        find_entry(inside)
    assert find_entry(inside, isolated=False).python == sys.executable


def test_the_start_line_runs_the_package_with_its_limits(tmp_path: Path) -> None:
    package = tmp_path / "executor"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import resource; print(resource.getrlimit(resource.RLIMIT_CORE), __name__)")
    command = find_entry(tmp_path / "data", package).command([(resource.RLIMIT_CORE, 4096)])
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "(4096, 4096) __main__\n"


def test_an_installed_executor_is_started_by_its_name() -> None:
    entry = Entry("/v/bin/python", Path("/v/lib/python3.12/site-packages/executor"), (), None, "/bin")
    assert entry.command() == ("/v/bin/python", "-I", "-m", "executor")


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def dead() -> ProcessId:
    return ProcessId(2**22 - 1, 1)


def begin(store: PodStore, record: PodRecord) -> None:
    store.prepare()
    os.close(store.begin(record))


@pytest.mark.parametrize(("status", "oom_kills", "reason"), [
    ('{"child-pid": 7}\n{"exit-code": 137}', 1, "oom"),
    ('{"child-pid": 7}\n{"exit-code": 137}', 0, "lost"),
    ('{"child-pid": 7}\n{"exit-code": 0}', 1, "expired"),
    ('{"child-pid": 7}\n{"exit-code": 1}', 1, "lost"),
    ('{"child-pid": 7}\n{"exit-code": 143}', 1, "lost"),
    ('{"child-pid": 7}', 1, "lost"),
    ("no json", 1, "lost"),
])  # fmt: skip
def test_the_reason_of_an_end_comes_from_the_exit_code_and_the_cgroup(
    tmp_path: Path, dead: ProcessId, status: str, oom_kills: int, reason: str
) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.events").write_text(f"oom_kill {oom_kills}\n")
    store = PodStore(tmp_path / "pods")
    record = PodRecord(
        name="p1", target="here", version=1, phase="ready", labels={}, annotations={}, created_at=0.0,
        boot_id="another", socket="", run_dir="", inner=dead, outer=dead,
        cgroups=[PodCgroup(2, str(group), ("memory",))],
    )  # fmt: skip
    begin(store, record)
    (store.path("p1") / "status").write_text(status)
    (group / "memory.events").rename(tmp_path / "events")  # a directory of files cannot be removed like a cgroup
    (group / "memory.events").symlink_to(tmp_path / "events")
    assert reason_of(store, record, deleted=False) == reason
    assert reason_of(store, record, deleted=True) == "destroyed"


def test_ending_a_pod_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    store = PodStore(tmp_path)
    blank = PodRecord(
        name="p1", target="here", version=0, phase="creating", labels={}, annotations={}, created_at=0.0,
        boot_id=boot_id(), socket="", run_dir="",
    )  # fmt: skip
    assert end_pod(store, "p1", blank, deleted=True) == ("destroyed", None)


def test_a_pod_without_a_readable_record_is_ended_by_what_its_launcher_wrote(tmp_path: Path) -> None:
    store = PodStore(tmp_path / "pods")
    blank = PodRecord(
        name="p1", target="here", version=0, phase="creating", labels={}, annotations={}, created_at=0.0,
        boot_id=boot_id(), socket="", run_dir="",
    )  # fmt: skip
    begin(store, blank)
    process = subprocess.Popen(["sleep", "600"])
    try:
        (store.path("p1") / "launcher").write_bytes(Path(f"/proc/{process.pid}/stat").read_bytes())
        (store.path("p1") / "pod.json").write_text("{")
        _, trash = end_pod(store, "p1", blank, deleted=False)
        assert trash is not None
        assert store.names() == []
        assert identify(process.pid) is None or not ProcessId(process.pid, 0).alive()
    finally:
        process.kill()
        process.wait()


def test_a_log_is_cut_to_its_end_while_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "ab", buffering=0) as writer:
        writer.write(b"x" * 10_000 + b"\nthe end")
        trim_log(path, 5_000)
        writer.write(b"more\n")
    text = path.read_text()
    assert text.startswith("[cut at 5000 bytes]\n")
    assert text.endswith("the end\nmore\n")
    assert len(text) < 3_000
    assert log_tail(path).endswith("more")
    assert log_tail(tmp_path / "none") == ""


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_name_with_parentheses_and_spaces_does_not_confuse_the_start_time() -> None:
    line = b"12 (a) S (b) R) S 1 " + b" ".join(str(number).encode() for number in range(2, 20)) + b" 777 0 0"
    assert parse_stat(line)[0] == 12
    assert parse_stat(line)[1] == "S"
    with pytest.raises(ValueError, match="not a line"):
        parse_stat(b"12 (x) S 1")


def test_a_signal_reaches_the_process_and_never_its_namesake(sleeper: subprocess.Popen[bytes]) -> None:
    process = identify(sleeper.pid)
    assert process is not None
    send(msgspec.structs.replace(process, start_ticks=process.start_ticks + 1), signal.SIGKILL)
    assert process.alive()
    send(process, signal.SIGKILL)
    assert sleeper.wait(30) == -signal.SIGKILL
    assert open_pidfd(process) is None
    send(process, signal.SIGKILL)


@pytest.mark.parametrize("pidfd", [True, False])
async def test_a_death_is_told_once_with_and_without_pidfds(
    sleeper: subprocess.Popen[bytes], dead: ProcessId, monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:

        def refuse(_process: ProcessId) -> int | None:
            raise OSError(38, "not implemented")

        monkeypatch.setattr("manager.providers.local.deaths.open_pidfd", refuse)
    told: asyncio.Queue[str] = asyncio.Queue()
    deaths = Deaths(told.put_nowait)
    process = identify(sleeper.pid)
    assert process is not None
    deaths.add("long", process)
    deaths.add("long", process)
    deaths.add("short", dead)
    async with asyncio.timeout(30):
        assert await told.get() == "short"
        assert told.empty()
        sleeper.kill()
        assert await told.get() == "long"
    await deaths.close()
    assert told.empty()


async def test_a_watcher_that_is_slow_sees_each_changed_name_once() -> None:
    watchers = Watchers()
    watcher = watchers.join()
    for _ in range(1000):
        watchers.changed("a")
        watchers.changed("b")
    watchers.ended("a", "oom")
    assert await watcher.take(5.0) == ["a", "b"]
    assert await watcher.take(0.01) == []
    assert (watchers.reason("a"), watchers.reason("b")) == ("oom", "lost")


@pytest.mark.parametrize(
    "disk", [None, DiskWay(way=None, why_not="no loop devices"), DiskWay(way="memory", weaker_because="not root")]
)
def test_a_bound_on_disk_that_cannot_be_held_is_refused(disk: DiskWay | None) -> None:
    found = msgspec.structs.replace(GOOD, disk=disk)
    with pytest.raises(IsolationUnavailable, match="`disk`"):
        plan_for(Profile(name="p", disk_bytes=1 << 30), found, insecure=True, allow_missing_limits=True)


def test_a_disk_in_memory_may_have_half_of_it() -> None:
    found = msgspec.structs.replace(GOOD, disk=DiskWay(way="memory"))
    plan = plan_for(Profile(name="p", disk_bytes=1 << 29), found, insecure=False, allow_missing_limits=True)
    assert plan.disk_bytes == 1 << 29
