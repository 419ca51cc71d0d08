"""The bounded disk of a local pod: what a command meets when it is full, that nothing is left. Cases S5, F25, FI21."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manager.errors import CapacityExhausted, IsolationUnavailable
from manager.model import Pod, Profile
from manager.providers.local import disks
from manager.providers.local.provider import LocalProvider
from tests.support.creator import kill_hard, made, no_loop_devices, start_creator
from tests.support.local_pods import (
    MIB,
    MUTE_EXECUTOR,
    Open,
    executor_package,
    nothing_left,
    run,
    session_to,
    skip_without_isolation,
    until,
)

ROOT = Path(__file__).resolve().parents[3]
DISK = Profile(name="disk", cpu=None, memory_bytes=512 * MIB, pids=None, disk_bytes=64 * MIB)


@pytest.fixture(params=["loop", "memory"])
async def bounded(
    request: pytest.FixtureRequest, open_provider: Open, monkeypatch: pytest.MonkeyPatch
) -> LocalProvider:
    """A provider whose disks are held in this way."""
    if request.param == "memory":
        monkeypatch.setattr(disks, "make_image", no_loop_devices)
    opened = open_provider()
    await skip_without_isolation(opened)
    found = await opened.capabilities(disk=True)
    assert found.disk is not None
    if found.disk.way != request.param:
        pytest.skip(f"no disk by {request.param} here: {found.disk.weaker_because or found.disk.why_not}")
    if "memory" in found.missing_limits:
        pytest.skip(f"no limit of memory here: {found.missing_limits['memory']}")
    return opened


def loops_of(data_dir: Path) -> list[str]:
    """The files below `data_dir` that loop devices hold."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            path = file.read_text().strip()
        except OSError:
            continue
        if path.startswith(str(data_dir)):
            found.append(path)
    return found


def all_gone(data_dir: Path, name: str) -> bool:
    mounts = Path("/proc/mounts").read_text()
    return nothing_left(data_dir, name) and not loops_of(data_dir) and str(data_dir) not in mounts


async def put(pod: Pod, path: str, content: bytes) -> tuple[int, dict[str, Any]]:
    url = "http://pod/v1/files"
    async with session_to(pod) as session, session.put(url, params={"path": path}, data=content) as answer:
        return answer.status, await answer.json()


async def test_a_full_disk_is_no_space_to_commands_and_file_calls_and_the_pod_lives_on(
    bounded: LocalProvider, tmp_path: Path
) -> None:
    pod = await bounded.create(DISK, "p1", {}, {})
    status, _ = await put(pod, "kept", b"as it was")
    assert status in (200, 201)
    filled = await run(pod, "head -c 200M /dev/zero > big; echo $?; stat -c %s big; df --output=size -BM . | tail -1")
    code, size, shown = filled["stdout"].split()
    assert code == "1"
    assert "No space left on device" in filled["stderr"]
    assert 50 * MIB < int(size) <= 64 * MIB
    assert 56 <= int(shown.rstrip("M")) <= 64
    status, refused = await put(pod, "kept", b"x" * MIB)
    assert (status, refused["error"]["code"]) == (507, "no_space")
    seen = await run(pod, "cat kept; ls")
    assert seen["stdout"].split() == ["as", "it", "wasbig", "kept"], "the old content, and no half file"
    script = "for i in $(seq 3000); do echo output of a command that needs no disk of the pod; done"
    assert len((await run(pod, script))["stdout"].splitlines()) == 3000
    assert (await run(pod, "rm big; head -c 1M /dev/zero > big; stat -c %s big"))["stdout"].strip() == str(MIB)
    await bounded.delete("p1")
    await until(lambda: all_gone(tmp_path, "p1"), "nothing is left of the disk")


async def test_the_workspace_and_the_directories_for_temporary_files_share_one_disk(bounded: LocalProvider) -> None:
    pod = await bounded.create(DISK, "p1", {}, {})
    parts = "for d in /workspace /tmp /var/tmp; do head -c 25M /dev/zero > $d/part; stat -c %s $d/part; done"
    filled = await run(pod, parts)
    sizes = [int(size) for size in filled["stdout"].split()]
    assert sizes[0] == sizes[1] == 25 * MIB
    assert sum(sizes) <= 64 * MIB
    assert "No space left on device" in filled["stderr"]
    owners = await run(pod, "stat -c '%a %U' /workspace /tmp /var/tmp; ls -A /workspace; touch /tmp/x /var/tmp/x")
    assert owners["stdout"].splitlines() == ["755 sandbox", "1777 root", "1777 root", "part"]


async def test_a_million_small_files_end_at_the_disk_too(bounded: LocalProvider) -> None:
    small = msgspec.structs.replace(DISK, disk_bytes=16 * MIB)
    pod = await bounded.create(small, "p1", {}, {})
    script = textwrap.dedent(
        """
        import os
        made = 0
        try:
            while made < 1_000_000:
                with open(f"f{made}", "w") as file:
                    file.write("x")
                made += 1
        except OSError as why:
            print(made, why.errno)
        """
    )
    made, number = (await run(pod, ["python3", "-"], stdin=script, timeout_sec=50))["stdout"].split()
    assert int(number) == errno.ENOSPC
    assert int(made) < 20_000
    assert (await run(pod, "echo alive"))["stdout"] == "alive\n"


async def test_a_disk_in_memory_leaves_the_memory_that_commands_need(
    open_provider: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disks, "make_image", no_loop_devices)
    provider = open_provider()
    await skip_without_isolation(provider)
    large = msgspec.structs.replace(DISK, disk_bytes=512 * MIB)
    with pytest.raises(IsolationUnavailable, match="half of the memory"):
        await provider.create(large, "p1", {}, {})
    assert all_gone(tmp_path, "p1")


async def test_a_machine_that_can_hold_no_disk_refuses_the_profile(
    open_provider: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disks, "_try", lambda way, *_, **__: f"{way}: not permitted")
    provider = open_provider()
    await skip_without_isolation(provider)
    with pytest.raises(IsolationUnavailable, match="memory: not permitted"):
        await provider.create(DISK, "p1", {}, {})
    assert all_gone(tmp_path, "p1")


async def test_plain_processes_never_pass_for_pods_with_a_bounded_disk(open_provider: Open, tmp_path: Path) -> None:
    provider = open_provider(insecure=True)
    plain = msgspec.structs.replace(DISK, isolation="none")
    with pytest.raises(IsolationUnavailable, match="plain processes"):
        await provider.create(plain, "p1", {}, {})
    assert all_gone(tmp_path, "p1")


async def test_no_room_for_a_new_disk_is_no_capacity_and_leaves_nothing(
    bounded: LocalProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = await bounded.capabilities()
    assert found.disk is not None
    if found.disk.way != "loop":
        pytest.skip("only a file can find no room")

    def full(home: Path, size_bytes: int) -> None:
        (home / disks.IMAGE).write_bytes(b"begun")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disks, "make_image", full)
    with pytest.raises(CapacityExhausted):
        await bounded.create(DISK, "p1", {}, {})
    assert all_gone(tmp_path, "p1")


@pytest.mark.parametrize("after_sec", [0.0, 0.02, 0.05, 0.1, 0.3])
async def test_a_create_cancelled_at_any_moment_leaves_no_disk(
    bounded: LocalProvider, tmp_path: Path, after_sec: float
) -> None:
    task = asyncio.create_task(bounded.create(DISK, "p1", {}, {}), name="create")
    await asyncio.wait([task], timeout=after_sec)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await bounded.delete("p1")
    await until(lambda: all_gone(tmp_path, "p1"), "nothing is left of the disk")


# ── managers that crash ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pod_keeps_its_disk_over_a_killed_manager_and_the_next_one_removes_all_of_it(
    bounded: LocalProvider, creators: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    found = await bounded.capabilities()
    assert found.disk is not None
    creators.append(start_creator(tmp_path, DISK, loop=found.disk.way == "loop"))
    await made(creators[0])
    pod = await bounded.get("p1")
    assert pod is not None
    await run(pod, "echo before > file")
    kill_hard(creators.pop())
    pods = await bounded.list()
    assert [pod.name for pod in pods] == ["p1"]
    after = await run(pods[0], "cat file; head -c 200M /dev/zero > big; stat -c %s big")
    before, size = after["stdout"].split()
    assert before == "before"
    assert int(size) <= 64 * MIB
    await bounded.delete("p1")
    await until(lambda: all_gone(tmp_path, "p1"), "nothing is left of the disk")


async def test_the_disk_of_a_pod_that_a_killed_manager_was_making_is_cleared_away(
    bounded: LocalProvider, creators: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    found = await bounded.capabilities()
    assert found.disk is not None
    package = executor_package(tmp_path / "stand-in", MUTE_EXECUTOR)
    creators.append(start_creator(tmp_path, DISK, package, loop=found.disk.way == "loop"))
    log = tmp_path / "pods" / "p1" / "log"
    await until(lambda: log.exists() and "mute" in log.read_text(), "the executor has started")
    kill_hard(creators.pop())
    assert await bounded.list() == []
    await until(lambda: all_gone(tmp_path, "p1"), "the half-made pod and its disk are gone")


async def test_the_death_of_an_executor_takes_its_disk_along(bounded: LocalProvider, tmp_path: Path) -> None:
    await bounded.create(DISK, "p1", {}, {})
    record = bounded._store.read("p1")
    assert record is not None
    assert record.inner is not None
    os.kill(record.inner.pid, 9)
    await until(lambda: all_gone(tmp_path, "p1"), "nothing is left of the disk")


# ── without root ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to become another user")
async def test_an_unprivileged_user_gets_a_bounded_disk_in_memory_or_a_refusal(
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
        from tests.support.local_pods import run, token_for

        async def main():
            provider = LocalProvider("here", Path(sys.argv[1]), token_for)
            profile = Profile(name="disk", cpu=None, memory_bytes=None, pids=None, disk_bytes=32 << 20)
            said = {"tier": (await provider.capabilities()).tier}
            try:
                pod = await provider.create(profile, "p1", {}, {})
            except IsolationUnavailable as why:
                said["refused"] = str(why)
            else:
                command = "head -c 20M /dev/zero > /tmp/x; head -c 20M /dev/zero > y; stat -c '%s %U' /tmp/x y"
                said["seen"] = await run(pod, command)
                await provider.delete("p1")
            await provider.close()
            said["left"] = [entry.name for entry in Path(sys.argv[1], "pods").iterdir()]
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
    if "refused" in said:
        pytest.skip(f"refused here, as it should be: {said['refused']}")
    first, second = said["seen"]["stdout"].splitlines()
    assert first == f"{20 * MIB} sandbox"
    assert 0 < int(second.split()[0]) <= 12 * MIB
    assert "No space left on device" in said["seen"]["stderr"]
    assert said["left"] == []
