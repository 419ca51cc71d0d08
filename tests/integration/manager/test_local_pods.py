"""Local pods as an attacker in them, a crashed manager and an unprivileged user find them: the real thing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from manager.errors import InvalidRequest, IsolationUnavailable, Provisioning
from manager.model import Profile
from manager.providers.local import provider as provider_module
from manager.providers.local.making import cgroup_name
from manager.providers.local.provider import LocalProvider
from manager.providers.local.removal import remove_tree
from tests.support.local_pods import (
    FREE,
    MIB,
    MUTE_EXECUTOR,
    WAIT_SEC,
    Open,
    cgroups_left,
    executor_package,
    lives,
    nothing_left,
    processes_with,
    record_of,
    run,
    session_to,
    skip_without_isolation,
    store_of,
    token_for,
    until,
)

ROOT = Path(__file__).resolve().parents[3]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# ── what a command sees ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_command_sees_neither_the_machines_files_nor_its_processes(
    provider: LocalProvider, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    canary.write_text("secret")
    pod = await provider.create(FREE, "p1", {}, {})
    home = os.path.expanduser("~")
    hidden = [home, "/home", "/mnt", "/opt", "/srv", "/boot"]
    seen = await run(pod, ["find", *hidden, "-xdev", "-type", "f"])
    assert seen["stdout"] == ""
    absent = [
        str(canary), "/etc/shadow", "/etc/ssh", "/etc/machine-id", "/var/run/docker.sock", "/var/log", "/etc/sudoers",
        "/sys/kernel", "/dev/vda", "/dev/mem", "/dev/kvm",
    ]  # fmt: skip
    for path in absent:
        assert (await run(pod, ["test", "-e", path]))["exit_code"] == 1, path
    pids = await run(pod, "ls /proc | grep -c '^[0-9]'; cat /proc/1/comm; hostname")
    count, first, hostname = pids["stdout"].split()
    assert int(count) < 12
    assert first.startswith("python")
    assert hostname == "p1"


async def test_a_command_has_no_network_but_its_own_loopback(provider: LocalProvider) -> None:
    pod = await provider.create(FREE, "p1", {}, {})
    seen = await run(pod, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '; tail -n +2 /proc/net/route")
    assert seen["stdout"].split() == ["lo"]
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    tried = await run(pod, ["python3", "-c", script])
    assert "unreachable" in tried["stderr"]


async def test_two_pods_share_no_files_processes_or_ports(provider: LocalProvider) -> None:
    first, second = await asyncio.gather(*(provider.create(FREE, name, {}, {}) for name in ("p1", "p2")))
    marker = "sleep 4321"
    async with session_to(first) as session:
        body = {"command": f"touch /tmp/of-pod-a /workspace/of-pod-a /dev/shm/of-pod-a; exec {marker}"}
        async with session.post("http://pod/v1/processes", json=body) as answer:
            assert answer.status == 201
        await until(lambda: bool(processes_with("4321")), "the first pod's command runs")
    seen = await run(second, "ls /tmp /workspace /dev/shm; cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat /proc/net/tcp")
    assert "of-pod-a" not in seen["stdout"]
    assert marker not in seen["stdout"].replace("cat /proc", "")
    assert len(seen["stdout"].split("local_address")[1].splitlines()) == 1


async def test_the_system_cannot_be_written(provider: LocalProvider) -> None:
    pod = await provider.create(FREE, "p1", {}, {})
    places = "/ /usr /usr/bin /etc /var /sys /proc/sys/kernel /home /root /opt /dev /sys/fs/cgroup"
    places += f" {ROOT / 'executor'} {sys.prefix}"
    tried = await run(pod, f'for d in {places}; do touch "$d/x" 2>/dev/null && echo "wrote $d"; done; true')
    assert tried["stdout"] == ""
    good = await run(pod, "for d in /workspace /tmp /var/tmp /run /dev/shm; do touch $d/x || echo no $d; done")
    assert (good["stdout"], good["stderr"]) == ("", "")


@pytest.mark.root
@needs_root
async def test_a_command_can_neither_enter_the_executors_directories_nor_signal_it(provider: LocalProvider) -> None:
    pod = await provider.create(FREE, "p1", {}, {})
    tried = await run(
        pod,
        "ls /run/sojourn /var/lib/sojourn; echo > /run/sojourn/executor.sock; mv /run/sojourn /run/x;"
        "rm -rf /run/sojourn; cat /proc/1/environ /proc/1/maps; ls /proc/1/fd; kill -9 1; kill -STOP 1;"
        "id -u; grep CapEff /proc/self/status",
    )
    assert tried["stdout"].split() == ["1000", "CapEff:", "0000000000000000"]
    assert (await run(pod, "echo still here"))["stdout"] == "still here\n"


async def test_commands_start_with_default_signals_and_a_filter(provider: LocalProvider) -> None:
    pod = await provider.create(FREE, "p1", {}, {})
    seen = (await run(pod, "grep -E '^(SigIgn|SigBlk|NoNewPrivs|Seccomp):' /proc/self/status"))["stdout"]
    values = {name: int(value, 16) for name, value in (line.split() for line in seen.splitlines())}
    values["SigIgn:"] &= 0x7FFFFFFF  # above are two of the C library's own
    assert values == {"NoNewPrivs:": 1, "Seccomp:": 2, "SigBlk:": 0, "SigIgn:": 0}


async def test_the_filter_refuses_what_escapes_are_made_of_and_lets_work_through(provider: LocalProvider) -> None:
    pod = await provider.create(FREE, "p1", {}, {})
    script = textwrap.dedent(
        """
        import ctypes, errno, os, socket, subprocess, threading
        libc = ctypes.CDLL(None, use_errno=True)
        def code(how):
            try:
                how()
            except OSError as why:
                return errno.errorcode[why.errno]
            return "ok"
        def result(name, *args):
            value = getattr(libc, name)(*args)
            return errno.errorcode[ctypes.get_errno()] if value < 0 else "ok"
        print("userns", result("unshare", 0x10000000))
        print("mount", result("mount", b"none", b"/tmp", b"tmpfs", 0, None))
        print("io_uring", result("syscall", 425, 8, None))
        print("alg", code(lambda: socket.socket(38, socket.SOCK_SEQPACKET)))
        print("vsock", code(lambda: socket.socket(40, socket.SOCK_STREAM)))
        print("personality", result("personality", 0x0400000))
        print("inet", code(lambda: socket.socket().close()))
        print("unix", code(lambda: socket.socketpair()[0].close()))
        traced = os.fork()
        if traced == 0: os._exit(0 if libc.ptrace(0, 0, 0, 0) == 0 else 1)
        print("trace", os.waitstatus_to_exitcode(os.waitpid(traced, 0)[1]))
        thread = threading.Thread(target=lambda: print("thread ok")); thread.start(); thread.join()
        print("child", subprocess.run(["true"]).returncode)
        """
    )
    answer = await run(pod, ["python3", "-"], stdin=script)
    said = dict(line.split(" ", 1) for line in answer["stdout"].splitlines())
    assert said == {
        "userns": "EPERM", "mount": "EPERM", "io_uring": "EPERM", "alg": "EAFNOSUPPORT",
        "vsock": "EAFNOSUPPORT", "personality": "EPERM", "inet": "ok", "unix": "ok", "trace": "0", "thread": "ok",
        "child": "0",
    }, answer["stderr"]  # fmt: skip


@pytest.mark.root
@needs_root
async def test_the_pod_is_given_the_hash_of_its_token_and_never_the_token(
    provider: LocalProvider, tmp_path: Path
) -> None:
    pod = await provider.create(FREE, "p1", {}, {})
    assert processes_with(pod.name)
    assert processes_with(token_for(pod.name)) == []
    kept = subprocess.run(["grep", "-rlsF", token_for(pod.name), str(tmp_path)], capture_output=True, check=False)
    assert kept.stdout == b""


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def limited(provider: LocalProvider) -> LocalProvider:
    missing = (await provider.capabilities()).missing_limits
    if missing:
        pytest.skip(f"limits cannot be set here: {missing}")
    return provider


@pytest.mark.root
async def test_a_command_over_the_memory_limit_dies_and_its_pod_lives(limited: LocalProvider) -> None:
    pod = await limited.create(Profile(name="m", memory_bytes=160 * MIB), "p1", {}, {})
    eaten = await run(pod, ["python3", "-c", "b = bytearray(400 << 20); print('no limit')"])
    assert eaten["stdout"] == ""
    assert eaten["signal"] == "SIGKILL"
    assert (await run(pod, "echo alive"))["stdout"] == "alive\n"
    for place in ("/tmp", "/dev/shm"):
        await run(pod, f"head -c 400M /dev/zero > {place}/x")
        filled = await run(pod, f"stat -c %s {place}/x; rm {place}/x")
        assert 0 < int(filled["stdout"]) < 160 * MIB
    assert await limited.get("p1") is not None


@pytest.mark.root
async def test_a_command_cannot_have_more_processes_than_its_pods_limit(limited: LocalProvider) -> None:
    pod = await limited.create(Profile(name="m", pids=48), "p1", {}, {})
    script = textwrap.dedent(
        """
        import os, signal
        children = []
        try:
            while len(children) < 300:
                child = os.fork()
                if child == 0:
                    signal.pause()
                children.append(child)
        except BlockingIOError:
            print("refused")
        for child in children:
            os.kill(child, signal.SIGKILL)
        print(len(children))
        """
    )
    refused, count = (await run(pod, ["python3", "-"], stdin=script))["stdout"].split()
    assert refused == "refused"
    assert 10 < int(count) < 48
    assert (await run(pod, "echo alive"))["stdout"] == "alive\n"


@pytest.mark.root
async def test_the_executor_reports_the_limits_of_its_pod(limited: LocalProvider) -> None:
    pod = await limited.create(Profile(name="m", memory_bytes=256 * MIB, cpu=0.5, pids=64), "p1", {}, {})
    async with session_to(pod) as session, session.get("http://pod/v1/usage") as answer:
        usage = await answer.json()
    assert usage["memory"]["limit_bytes"] == 256 * MIB
    assert usage["cpu"]["limit_cores"] == 0.5
    assert usage["pids"]["limit"] == 64


@pytest.mark.root
async def test_a_pod_s_executor_divides_its_cgroups_below_the_limits(limited: LocalProvider, tmp_path: Path) -> None:
    pod = await limited.create(Profile(name="m", memory_bytes=256 * MIB, pids=128), "p1", {}, {})
    record = record_of(tmp_path, "p1")
    assert record.inner is not None
    (memory,) = (group for group in record.cgroups if "memory" in group.controllers)
    assert f"/sojourn/{Path(memory.path).name}" in Path(f"/proc/{record.inner.pid}/cgroup").read_text()
    if memory.version == 2:
        pytest.skip("no controllers below a directory with processes in it")
    began = await run(pod, "sleep 4; cat /proc/self/cgroup")
    lines = [line for line in began["stdout"].splitlines() if ":memory:" in line]
    assert lines == [line for line in lines if line.endswith("/inner/commands/c1")] != [], began
    inner = Path(memory.path, "inner")
    assert int((inner / "commands/memory.limit_in_bytes").read_text()) == 224 * MIB
    assert str(record.inner.pid) in (inner / "executor/cgroup.procs").read_text().split()
    tried = await run(
        pod, "cd /sys/fs/cgroup/memory; for d in . inner; do echo 9G > $d/memory.limit_in_bytes; done; id"
    )
    assert tried["stderr"].count("ermission denied") + tried["stderr"].count("ead-only file system") == 2, tried
    await limited.delete("p1")
    assert nothing_left(tmp_path, "p1")


async def test_a_profile_that_this_machine_cannot_give_is_refused_before_anything_is_made(
    provider: LocalProvider, tmp_path: Path
) -> None:
    for profile in (
        Profile(name="x", isolation="kata"), Profile(name="x", network="open"), Profile(name="x", isolation="none"),
        Profile(name="x", users=("root",)),
    ):  # fmt: skip
        with pytest.raises(IsolationUnavailable):
            await provider.create(profile, "p1", {}, {})
    assert nothing_left(tmp_path, "p1")


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "-a", "a" * 64, ".trash-x", "a\n"])
async def test_a_name_that_could_lead_elsewhere_is_refused(provider: LocalProvider, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await provider.create(FREE, name, {}, {})
    assert await provider.get(name) is None
    await provider.delete(name)


@pytest.mark.parametrize("after_sec", [0.0, 0.01, 0.05, 0.15, 0.3])
async def test_a_create_cancelled_at_any_moment_leaves_nothing(
    provider: LocalProvider, tmp_path: Path, after_sec: float
) -> None:
    await provider.capabilities()
    task = asyncio.create_task(provider.create(FREE, "p1", {}, {}), name="create")
    await asyncio.wait([task], timeout=after_sec)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nothing_left(tmp_path, "p1")
    assert [pod.name for pod in await provider.list()] == ([] if task.cancelled() else ["p1"])


# ── the end of pods ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_deletion_leaves_no_process_cgroup_or_directory(provider: LocalProvider, tmp_path: Path) -> None:
    pod = await provider.create(FREE, "p1", {}, {})
    await run(pod, "for i in 1 2 3; do setsid sleep 7654 >/dev/null 2>&1 & done; trap '' TERM HUP INT")
    assert len(processes_with("7654")) == 3
    await provider.delete("p1")
    assert nothing_left(tmp_path, "p1")
    assert processes_with("7654") == []


async def test_a_deletion_waits_for_the_end_of_a_pod_and_no_longer_than_meant_for_its_files(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, remove = threading.Event(), remove_tree

    def waiting(path: Path) -> None:
        assert go_on.wait(60)
        remove(path)

    monkeypatch.setattr(provider_module, "remove_tree", waiting)
    provider = open_provider(files_sec=0.01)
    await skip_without_isolation(provider)
    try:
        pod = await provider.create(FREE, "p1", {}, {})
        await run(pod, "setsid sleep 7655 >/dev/null 2>&1 &")
        await provider.delete("p1")
        assert await provider.get("p1") is None
        assert processes_with("7655") == []
        assert not nothing_left(tmp_path, "p1")
        await provider.create(FREE, "p1", {}, {})  # the name is free
        await provider.delete("p1")
    finally:
        go_on.set()
    await until(lambda: nothing_left(tmp_path, "p1"), "the files are gone")


async def test_a_hostile_workspace_is_removed_and_nothing_outside_of_it(
    provider: LocalProvider, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    pod = await provider.create(FREE, "p1", {}, {})
    script = textwrap.dedent(
        f"""
        import os
        os.symlink({str(outside)!r}, "link"); os.symlink("/", "root"); os.mkfifo("fifo")
        os.mkdir("closed"); open("closed/file", "w").close(); os.mkdir("closed/in"); open("closed/in/f", "w").close()
        open(b"bad\\xff\\n name", "w").close()
        for number in range(10_000):
            os.mkdir("d"); os.chdir("d")
            if number % 1000 == 0: open("f", "w").close()
        os.chmod("/workspace/closed/in", 0); os.chmod("/workspace/closed", 0); os.chmod("/workspace", 0)
        print("made")
        """
    )
    made = await run(pod, ["python3", "-"], stdin=script)
    assert made["stdout"] == "made\n", made["stderr"]
    await provider.delete("p1")
    assert nothing_left(tmp_path, "p1")
    assert (outside / "kept").read_text() == "kept"


async def test_the_death_of_an_executor_is_noticed_and_its_leftovers_are_removed(
    provider: LocalProvider, tmp_path: Path
) -> None:
    await provider.create(FREE, "p1", {}, {})
    inner = record_of(tmp_path, "p1").inner
    assert inner is not None
    events = provider.watch()
    assert not (await anext(events)).gone
    os.kill(inner.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_SEC):
        event = await anext(events)
    assert (event.gone, event.reason) == (True, "lost")
    assert await provider.get("p1") is None
    await until(lambda: nothing_left(tmp_path, "p1"), "the leftovers are gone")


async def test_a_pod_that_ended_itself_when_its_time_was_over_has_expired(open_provider: Open, tmp_path: Path) -> None:
    short = open_provider(tmp_path / "data", unclaimed_sec=3.0)
    await skip_without_isolation(short)
    await short.create(FREE, "p1", {}, {})
    assert await end_of(short) == "expired"


async def test_a_pod_whose_executor_was_asked_to_end_by_a_signal_has_not_expired(
    provider: LocalProvider, tmp_path: Path
) -> None:
    await provider.create(FREE, "p1", {}, {})
    inner = record_of(tmp_path, "p1").inner
    assert inner is not None
    assert await end_of(provider, lambda: os.kill(inner.pid, signal.SIGTERM)) == "lost"


async def end_of(provider: LocalProvider, end: Callable[[], None] = lambda: None) -> str:
    """The reason that the watch tells of its only pod's end; `end` brings it about once the watch has seen the pod."""
    events = provider.watch()
    async with asyncio.timeout(WAIT_SEC):
        assert not (await anext(events)).gone
        end()
        event = await anext(events)
    assert event.gone
    return event.reason


async def test_a_pod_that_never_gets_ready_says_why_and_leaves_nothing(open_provider: Open, tmp_path: Path) -> None:
    package = executor_package(tmp_path, MUTE_EXECUTOR)
    data_dir = tmp_path / "data"
    mute = open_provider(data_dir, package=package, ready_sec=8.0)
    await skip_without_isolation(mute)
    with pytest.raises(Provisioning, match="mute executor here"):
        await mute.create(FREE, "p1", {}, {})
    assert nothing_left(data_dir, "p1")


async def test_a_pod_whose_executor_fails_says_why_at_once_and_leaves_nothing(
    open_provider: Open, tmp_path: Path
) -> None:
    package = executor_package(tmp_path, "raise SystemExit('this executor does not like its settings')")
    data_dir = tmp_path / "data"
    failing = open_provider(data_dir, package=package)
    await skip_without_isolation(failing)
    with pytest.raises(Provisioning, match="does not like its settings"):
        await failing.create(FREE, "p1", {}, {})
    assert nothing_left(data_dir, "p1")


# ── managers that crash, restart and share ──────────────────────────────────────────────────────────────────────

CREATOR = """
import asyncio, sys
from pathlib import Path
from manager.model import Profile
from manager.providers.local.provider import LocalProvider
from manager.providers.local.removal import remove_tree
from tests.support.local_pods import token_for

async def main():
    package = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    provider = LocalProvider("here", Path(sys.argv[1]), token_for, package=package)
    profile = Profile(name="free", cpu=None, memory_bytes=None, pids=None)
    print("begun", flush=True)
    for name in sys.argv[2].split(","):
        pod = await provider.create(profile, name, {"made-by": "the first"}, {})
        print(name, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def start_creator(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CREATOR, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def kill_hard(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(WAIT_SEC)
    assert process.stdout is not None
    process.stdout.close()


async def lines_from(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_SEC):
        return [(await asyncio.to_thread(process.stdout.readline)).strip() for _ in range(count)]


async def test_pods_outlive_a_killed_manager_and_the_next_one_finds_and_ends_them(
    provider: LocalProvider, tmp_path: Path
) -> None:
    creator = start_creator(str(tmp_path), "p1,p2")
    try:
        assert await lines_from(creator, 3) == ["begun", "p1", "p2"]
    finally:
        kill_hard(creator)
    pods = await provider.list({"made-by": "the first"})
    assert [pod.name for pod in pods] == ["p1", "p2"]
    assert (await run(pods[0], "echo alive"))["stdout"] == "alive\n"
    claimed = await provider.patch("p1", pods[0].version, {"sojourn/state": "claimed"}, {})
    assert claimed.labels["sojourn/state"] == "claimed"
    await provider.delete("p1")
    await provider.delete("p2")
    assert nothing_left(tmp_path, "p1")
    assert not cgroups_left(tmp_path, "p2")


async def test_a_pod_that_a_killed_manager_was_making_is_cleared_away(open_provider: Open, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    package = executor_package(tmp_path, MUTE_EXECUTOR)
    second = open_provider(data_dir, package=package)
    await skip_without_isolation(second)
    creator = start_creator(str(data_dir), "p1", str(package))
    log = data_dir / "pods" / "p1" / "log"
    try:
        await until(lambda: log.exists() and "mute" in log.read_text(), "the executor has started")
        assert await second.list() == []
        assert (data_dir / "pods" / "p1").exists()  # its maker lives: not ours to clear
    finally:
        kill_hard(creator)
    assert await second.list() == []
    await until(lambda: nothing_left(data_dir, "p1"), "the half-made pod is gone")


async def test_a_recycled_pid_is_neither_trusted_nor_signalled(provider: LocalProvider, tmp_path: Path) -> None:
    """RE03"""
    await provider.create(FREE, "p1", {}, {})
    inner = record_of(tmp_path, "p1").inner
    assert inner is not None
    await provider.close()
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        file = tmp_path / "pods" / "p1" / "pod.json"
        record = json.loads(file.read_text())
        record["inner"]["pid"] = bystander.pid
        file.write_text(json.dumps(record))
        other = LocalProvider("here", tmp_path, token_for)
        assert await other.list() == []
        await until(lambda: nothing_left(tmp_path, "p1"), "the pod's leftovers are gone")
        await other.close()
        assert bystander.poll() is None
        assert not lives(inner.pid)
    finally:
        bystander.kill()
        bystander.wait()


async def test_of_patches_from_several_processes_exactly_one_wins(provider: LocalProvider, tmp_path: Path) -> None:
    pod = await provider.create(FREE, "p1", {}, {})
    script = textwrap.dedent(
        """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from manager.providers.base import ClaimLost
        from manager.providers.local.state import PodStore
        store = PodStore(Path(sys.argv[1]))
        sys.stdin.readline()
        def claim(number):
            try:
                store.patch("p1", "1", {}, {"token": f"{sys.argv[2]}-{number}"})
            except ClaimLost:
                return None
            return f"{sys.argv[2]}-{number}"
        with ThreadPoolExecutor(10) as pool:
            print(*[won for won in pool.map(claim, range(10)) if won])
        """
    )
    claimers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "pods"), str(number)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(5)
    ]  # fmt: skip
    outputs = await asyncio.gather(*(asyncio.to_thread(claimer.communicate, "go\n", WAIT_SEC) for claimer in claimers))
    winners = [word for out, _ in outputs for word in out.split()]
    assert len(winners) == 1
    found = await provider.get("p1")
    assert found is not None
    assert (found.annotations, found.version) == ({"token": winners[0]}, str(int(pod.version) + 1))


async def test_a_watch_sees_what_another_manager_does(provider: LocalProvider, open_provider: Open) -> None:
    other = open_provider()
    events = provider.watch()
    pod = await other.create(FREE, "p1", {}, {})
    async with asyncio.timeout(WAIT_SEC):
        assert (await anext(events)).pod == pod
        patched = await other.patch("p1", pod.version, {"a": "b"}, {})
        assert (await anext(events)).pod == patched
        await other.delete("p1")
        assert (await anext(events)).gone


async def test_two_targets_on_one_machine_keep_their_pods_apart(provider: LocalProvider, tmp_path: Path) -> None:
    await provider.create(FREE, "p1", {}, {})
    other = LocalProvider("there", tmp_path, token_for)
    assert await other.list() == []
    assert await other.get("p1") is None
    await other.close()
    assert await provider.get("p1") is not None


async def test_a_long_data_directory_still_gives_a_socket_that_can_be_reached(
    open_provider: Open, tmp_path: Path
) -> None:
    data_dir = tmp_path / ("d" * 120)
    far = open_provider(data_dir)
    await skip_without_isolation(far)
    pod = await far.create(FREE, "p" * 63, {}, {})
    assert len(pod.address) < 107
    assert (await run(pod, "echo reached"))["stdout"] == "reached\n"
    directory = Path(pod.address.removeprefix("unix:")).parent
    assert directory.parent.stat().st_mode & 0o777 == 0o700
    await far.delete(pod.name)
    assert not directory.parent.exists()


# ── weaker machines ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_plain_processes_run_only_when_asked_for_and_end_with_all_they_started(
    open_provider: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = open_provider(insecure=True, allow_missing_limits=True)
    pod = await plain.create(Profile(name="bare", isolation="none", memory_bytes=None), "p1", {}, {})
    assert "pods_not_isolated" in caplog.text
    answer = await run(pod, "pwd; setsid sleep 8765 >/dev/null 2>&1 &")
    workspace = Path(answer["stdout"].strip())
    assert workspace.name in ("workspace", f"sojourn-{cgroup_name(store_of(tmp_path), 'p1')}")
    assert answer["stderr"] == ""
    await until(lambda: bool(processes_with("8765")), "the command runs")
    await plain.delete("p1")
    await until(lambda: nothing_left(tmp_path, "p1"), "nothing is left")
    assert processes_with("8765") == []
    assert not workspace.exists()


@pytest.mark.root
@needs_root
async def test_an_unprivileged_user_gets_isolated_pods_of_the_single_tier(
    unprivileged_python: tuple[str, int],
) -> None:
    python, uid = unprivileged_python
    script = textwrap.dedent(
        """
        import asyncio, json, sys
        from pathlib import Path
        from manager.errors import IsolationUnavailable
        from manager.model import Profile
        from manager.providers.local.provider import LocalProvider
        from tests.support.local_pods import on_terminal, run, token_for

        async def main():
            provider = LocalProvider("here", Path(sys.argv[1]), token_for)
            found = await provider.capabilities()
            said = {"tier": found.tier, "why_not": found.why_not, "missing": sorted(found.missing_limits)}
            if found.tier is not None:
                try:
                    await provider.create(Profile(name="limited"), "p0", {}, {})
                except IsolationUnavailable as why:
                    said["refused"] = str(why)
                lax = LocalProvider("here", Path(sys.argv[1]), token_for, allow_missing_limits=True)
                pod = await lax.create(Profile(name="limited"), "p1", {}, {})
                command = "id -u; pwd; touch a; ls; touch /x /usr/x 2>/dev/null; ls -A /home"
                said["seen"] = (await run(pod, command))["stdout"]
                command = "tty; stty size; stat -c '%u %a' $(tty); set -m; sleep 9 & jobs; kill %1"
                said["terminal"] = (await on_terminal(pod, command)).stdout.decode()
                await lax.delete("p1")
                await lax.close()
                said["left"] = [entry.name for entry in Path(sys.argv[1], "pods").iterdir()]
            await provider.close()
            print(json.dumps(said))

        asyncio.run(main())
        """
    )
    home = Path(tempfile.mkdtemp(prefix="sojourn-home-"))
    os.chown(home, uid, uid)
    try:
        done = await asyncio.to_thread(
            subprocess.run, [python, "-c", script, str(home / "data")], cwd=ROOT, user=uid, group=uid, extra_groups=[],
            env={"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    if said["tier"] is None:
        pytest.skip(f"no user namespaces here: {said['why_not']}")
    assert said["tier"] == "single"
    assert said["missing"] == ["cpu", "memory", "pids"]
    assert "as root" in said["refused"]
    assert said["seen"].split() == ["1000", "/workspace", "a"]
    terminal = said["terminal"].split("\r\n")
    assert terminal[0].startswith("/dev/pts/")
    assert terminal[1:3] == ["30 100", "1000 620"]
    assert "Running" in terminal[3] or "Running" in terminal[4]  # behind the job's own number
    assert said["left"] == []
