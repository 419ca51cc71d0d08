"""Local pods under gVisor: everything that other pods give, and the end of all of them with nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import textwrap
from pathlib import Path

import msgspec
import pytest

from manager.errors import IsolationUnavailable
from manager.model import Profile
from manager.providers.base import PodEvent
from manager.providers.local import gvisor
from manager.providers.local.provider import LocalProvider
from tests.support.creator import kill_hard, made, start_creator
from tests.support.local_pods import (
    MIB,
    MUTE_EXECUTOR,
    Open,
    executor_package,
    nothing_left,
    on_terminal,
    run,
    session_to,
    token_for,
    until,
)

GVISOR = Profile(name="g", isolation="gvisor", cpu=None, memory_bytes=1024 * MIB, pids=512)

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="gVisor needs root here"),
    pytest.mark.timeout(180),
]


@pytest.fixture
async def provider(open_provider: Open) -> LocalProvider:
    opened = open_provider()
    found = await opened.capabilities(gvisor=True)
    assert found.gvisor is not None
    if found.gvisor.platform is None:
        pytest.skip(f"NOT TESTED, no gVisor here: {found.gvisor.why_not} (Debian: apt-get install runsc)")
    return opened


async def test_a_command_runs_on_gvisors_kernel_with_the_walls_of_other_pods(
    provider: LocalProvider, tmp_path: Path
) -> None:
    (tmp_path / "canary").write_text("secret")
    pod = await provider.create(GVISOR, "p1", {}, {})
    seen = await run(pod, "uname -r; id -un; hostname; pwd; grep -c . /proc/net/route")
    release, *rest = seen["stdout"].split()
    assert release != os.uname().release
    assert rest == ["sandbox", "p1", "/workspace", "1"], seen
    for path in (str(tmp_path / "canary"), "/etc/shadow", "/etc/ssh", "/var/log", "/boot", "/dev/kvm", "/dev/vda"):
        assert (await run(pod, ["test", "-e", path]))["exit_code"] == 1, path
    places = "/ /usr /etc /var /home /root /opt /srv /sys/fs/cgroup"
    tried = await run(pod, f'for d in {places}; do touch "$d/x" 2>/dev/null && echo "wrote $d"; done; true')
    assert tried["stdout"] == ""
    good = await run(pod, "for d in /workspace /tmp /var/tmp /run /dev/shm; do touch $d/x || echo no $d; done")
    assert (good["stdout"], good["stderr"]) == ("", "")
    hidden = await run(
        pod, "cat /run/sojourn/* /var/lib/sojourn/* /proc/1/mem; kill -9 1; kill -STOP 1; grep CapEff /proc/self/status"
    )
    assert hidden["stdout"].split() == ["CapEff:", "0000000000000000"]
    # gVisor of 2022 lets everybody read environments: there is nothing in it but the hash.
    shown = await run(pod, "cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'")
    assert token_for("p1") not in shown["stdout"]
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    refused = (await run(pod, ["python3", "-c", script]))["stderr"]
    assert "No route to host" in refused or "Network is unreachable" in refused
    assert (await run(pod, "echo still here"))["stdout"] == "still here\n"


async def test_ends_of_commands_are_told_and_reach_every_descendant(provider: LocalProvider) -> None:
    pod = await provider.create(GVISOR, "p1", {}, {})
    assert (await run(pod, "exit 7"))["exit_code"] == 7
    assert (await run(pod, "kill -9 $$"))["signal"] == "SIGKILL"
    script = "(setsid setsid sh -c 'exec -a left-behind sleep 500' &) ; sleep 300"
    timed_out = await run(pod, script, timeout_sec=1)
    assert (timed_out["reason"], timed_out["timed_out"]) == ("timeout", True)
    left = await run(pod, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^left-behin[d]'")
    assert left["stdout"] == "0\n"
    behind = await run(pod, "setsid sleep 5 >/dev/null 2>&1 &")
    assert behind["descendants_left"] is True
    fed = await run(pod, ["wc", "-c"], stdin="x" * 300_000)
    assert fed["stdout"].strip() == "300000"


async def test_files_sessions_and_terminals_work_in_it(provider: LocalProvider) -> None:
    pod = await provider.create(GVISOR, "p1", {}, {})
    content = os.urandom(300_000)
    async with session_to(pod) as http:
        async with http.put("http://pod/v1/files", params={"path": "dir/file"}, data=content) as answer:
            assert answer.status in (200, 201), await answer.text()
        async with http.get("http://pod/v1/files", params={"path": "dir/file"}) as answer:
            assert await answer.read() == content
        async with http.get("http://pod/v1/files/list", params={"path": "dir"}) as answer:
            assert [entry["name"] for entry in (await answer.json())["entries"]] == ["file"]
        async with http.post("http://pod/v1/sessions", json={}) as answer:
            assert answer.status == 201, await answer.text()
            id = (await answer.json())["id"]
        for command, said in (("cd /tmp; export A=1", ""), ("pwd; echo $A", "/tmp\n1\n")):
            async with http.post(f"http://pod/v1/sessions/{id}/exec", json={"command": command}) as answer:
                assert (await answer.json())["stdout"] == said
        body = {"command": "sleep 100", "timeout_sec": 1}
        async with http.post(f"http://pod/v1/sessions/{id}/exec", json=body) as answer:
            assert (await answer.json())["timed_out"] is True
    terminal = await on_terminal(pod, "tty; stty size; exit 3")
    assert terminal.stdout.split(b"\r\n")[1] == b"30 100"


async def test_its_limits_are_the_kernels_and_usage_is_true(provider: LocalProvider) -> None:
    found = await provider.capabilities()
    if found.missing_limits:
        pytest.skip(f"limits cannot be set here: {found.missing_limits}")
    limited = msgspec.structs.replace(GVISOR, cpu=1.0, disk_bytes=64 * MIB)
    pod = await provider.create(limited, "p1", {}, {})
    async with session_to(pod) as http, http.get("http://pod/v1/usage") as answer:
        usage = await answer.json()
    assert usage["memory"]["limit_bytes"] == 1024 * MIB
    assert usage["memory"]["source"] != "processes"
    assert usage["cpu"]["limit_cores"] == 1.0
    assert 50 * MIB < usage["disk"]["limit_bytes"] <= 64 * MIB
    full = await run(pod, "head -c 200M /dev/zero > big; echo $?; rm big; echo alive")
    assert full["stdout"].split() == ["1", "alive"]
    assert "No space left" in full["stderr"]


async def reason_of_end(provider: LocalProvider, name: str) -> asyncio.Task[str]:
    """What the watch will tell as the reason of the pod's end. The watch sees the pod when this returns."""
    seen = asyncio.Event()

    async def watch() -> str:
        events = provider.watch()
        try:
            async with asyncio.timeout(60):
                event: PodEvent
                async for event in events:
                    if event.pod.name == name:
                        seen.set()
                        if event.gone:
                            return event.reason
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        raise AssertionError("the watch has ended")

    task = asyncio.create_task(watch(), name="watch")
    await asyncio.wait_for(seen.wait(), 30)
    return task


async def test_memory_that_runs_out_ends_the_pod_and_is_told_as_that(provider: LocalProvider, tmp_path: Path) -> None:
    if "memory" in (await provider.capabilities()).missing_limits:
        pytest.skip("no limit of memory here")
    pod = await provider.create(msgspec.structs.replace(GVISOR, memory_bytes=384 * MIB), "p1", {}, {})
    ended = await reason_of_end(provider, "p1")
    hog = asyncio.create_task(run(pod, ["python3", "-c", "b = bytearray(2 << 30); print('no limit')"]), name="hog")
    done, _ = await asyncio.wait([hog], timeout=60)
    assert done
    if hog.exception() is None:  # on ptrace the kernel may also choose the one process, and the pod lives
        assert (hog.result()["stdout"], hog.result()["exit_code"]) == ("", 137)
        assert (await run(pod, "echo alive"))["stdout"] == "alive\n"
        await provider.delete("p1")
        assert await ended == "destroyed"
    else:
        assert await ended == "oom"
    await until(lambda: nothing_left(tmp_path, "p1"), "nothing is left")


async def test_a_fork_bomb_stays_within_the_pods_limit(provider: LocalProvider, tmp_path: Path) -> None:
    if "pids" in (await provider.capabilities()).missing_limits:
        pytest.skip("no limit of processes here")
    pod = await provider.create(msgspec.structs.replace(GVISOR, pids=gvisor.LEAST_PIDS), "p1", {}, {})
    script = textwrap.dedent(
        """
        import os, time
        while True:
            try:
                if os.fork() == 0: time.sleep(30); os._exit(0)
            except OSError: time.sleep(0.01)
        """
    )
    record = provider._store.read("p1")
    assert record is not None
    counter = next(Path(group.path, "pids.current") for group in record.cgroups if "pids" in group.controllers)
    bomb = asyncio.create_task(run(pod, ["python3", "-"], stdin=script, timeout_sec=5), name="bomb")
    most = 0
    while not bomb.done():
        try:
            most = max(most, int(counter.read_text()))
        except OSError:
            break
        await asyncio.sleep(0.05)
    await asyncio.wait([bomb], timeout=60)
    bomb.exception()
    assert 100 < most <= gvisor.LEAST_PIDS
    await provider.delete("p1")
    await until(lambda: nothing_left(tmp_path, "p1"), "nothing is left")


async def test_pods_of_both_kinds_share_no_files_and_no_ports(provider: LocalProvider) -> None:
    if (await provider.capabilities()).tier is None:
        pytest.skip("no namespaces here")
    plain = msgspec.structs.replace(GVISOR, isolation="namespaces")
    one, two = await asyncio.gather(provider.create(GVISOR, "p1", {}, {}), provider.create(plain, "p2", {}, {}))
    await run(one, "for d in /workspace /tmp /dev/shm; do touch $d/of-one; done")
    seen = await run(two, "ls /workspace /tmp /dev/shm; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "of-one" not in seen["stdout"]
    assert "runsc" not in seen["stdout"]


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_deletion_leaves_no_process_cgroup_or_directory(provider: LocalProvider, tmp_path: Path) -> None:
    pod = await provider.create(GVISOR, "p1", {}, {})
    await run(pod, "(setsid sleep 1000 &) ; true")
    await provider.delete("p1")
    assert nothing_left(tmp_path, "p1")
    assert runsc_processes(tmp_path) == []


async def test_the_executors_own_end_when_its_time_is_over_is_told_as_such(
    provider: LocalProvider, open_provider: Open, tmp_path: Path
) -> None:
    short = open_provider(tmp_path / "short", unclaimed_sec=5.0)
    await short.create(GVISOR, "p1", {}, {})
    assert await (await reason_of_end(short, "p1")) == "expired"
    await until(lambda: nothing_left(tmp_path / "short", "p1"), "nothing is left")


async def test_an_executor_that_was_asked_to_end_by_a_signal_has_not_expired(
    provider: LocalProvider, tmp_path: Path
) -> None:
    await provider.create(GVISOR, "p1", {}, {})
    ended = await reason_of_end(provider, "p1")
    record = provider._store.read("p1")
    assert record is not None
    found = await provider.capabilities()
    assert found.gvisor is not None
    home = tmp_path / "pods" / "p1"
    command = [found.gvisor.path, "--root", str(home / "runsc"), "kill", gvisor.container_id(home), "TERM"]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=30)
    assert await ended == "lost"
    await until(lambda: nothing_left(tmp_path, "p1"), "nothing is left")


async def test_the_death_of_the_sandbox_is_noticed_and_cleared_up(provider: LocalProvider, tmp_path: Path) -> None:
    await provider.create(GVISOR, "p1", {}, {})
    ended = await reason_of_end(provider, "p1")
    record = provider._store.read("p1")
    assert record is not None
    assert record.inner is not None
    os.kill(record.inner.pid, signal.SIGKILL)
    assert await ended == "lost"
    await until(lambda: nothing_left(tmp_path, "p1"), "nothing is left")
    assert runsc_processes(tmp_path) == []


async def test_a_pod_outlives_a_killed_manager_and_the_next_one_ends_it(
    provider: LocalProvider, creators: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    creators.append(start_creator(tmp_path, GVISOR))
    await made(creators[0])
    kill_hard(creators.pop())
    pods = await provider.list()
    assert [pod.name for pod in pods] == ["p1"]
    assert (await run(pods[0], "echo alive"))["stdout"] == "alive\n"
    await provider.delete("p1")
    assert nothing_left(tmp_path, "p1")
    assert runsc_processes(tmp_path) == []


async def test_a_pod_that_a_killed_manager_was_making_is_cleared_away(
    provider: LocalProvider, creators: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    package = executor_package(tmp_path / "stand-in", MUTE_EXECUTOR)
    creators.append(start_creator(tmp_path, GVISOR, package))
    log = tmp_path / "pods" / "p1" / "log"
    await until(lambda: log.exists() and "mute" in log.read_text(), "the executor has started")
    kill_hard(creators.pop())
    assert await provider.list() == []
    await until(lambda: nothing_left(tmp_path, "p1"), "the half-made pod is gone")
    assert runsc_processes(tmp_path) == []


@pytest.mark.parametrize("after_sec", [0.02, 0.1, 0.3, 0.6])
async def test_a_create_cancelled_at_any_moment_leaves_nothing(
    provider: LocalProvider, tmp_path: Path, after_sec: float
) -> None:
    task = asyncio.create_task(provider.create(GVISOR, "p1", {}, {}), name="create")
    await asyncio.wait([task], timeout=after_sec)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nothing_left(tmp_path, "p1")
        assert runsc_processes(tmp_path) == []


def runsc_processes(data_dir: Path) -> list[str]:
    """Command lines of what gVisor runs for pods below `data_dir`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            of_runsc = words[0].rpartition(b"/")[2].startswith(b"runsc")
            if of_runsc and any(os.fsencode(data_dir) in word for word in words):
                found.append(b" ".join(words).decode(errors="replace"))
    return found


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_runsc_the_profile_is_refused_with_how_to_get_it(
    open_provider: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    provider = open_provider(insecure=True)
    with pytest.raises(IsolationUnavailable, match=r"runsc is not installed.*install `runsc`"):
        await provider.create(GVISOR, "p1", {}, {})
    assert nothing_left(tmp_path, "p1")


async def test_a_runsc_that_hangs_is_given_up_at_the_deadline(
    open_provider: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck = tmp_path / "bin" / "runsc"
    stuck.parent.mkdir()
    stuck.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexec sleep 600\n')
    stuck.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stuck.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(gvisor, "PROBE_SEC", 0.5)
    provider = open_provider(tmp_path / "data")
    with pytest.raises(IsolationUnavailable, match="no end within"):
        await provider.create(GVISOR, "p1", {}, {})
    assert nothing_left(tmp_path / "data", "p1")


async def test_too_few_processes_for_gvisor_itself_are_refused(provider: LocalProvider, tmp_path: Path) -> None:
    with pytest.raises(IsolationUnavailable, match="own threads"):
        await provider.create(msgspec.structs.replace(GVISOR, pids=64), "p1", {}, {})
    assert nothing_left(tmp_path, "p1")
