"""What a pod's limits do to commands, and what is said of it: real cgroups, writable for the executor and not."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.executor_pod import PYTHON, Pod, connected, processes_with, running_executor, until
from tests.support.pod_cgroups import PodCgroups, pod_cgroups

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]
MiB = 1 << 20
MEMORY = 256 * MiB
PIDS = 200
HOG = "x = bytearray(400 << 20)"


class LimitedPod(Pod):
    """A pod in cgroups of its own."""

    groups: PodCgroups

    @property
    def delegated(self) -> bool:
        return self.groups.is_writable

    def where(self, pid: int) -> str:
        return self.groups.of(pid, "memory")

    async def lasting(self, id: str) -> int:
        """The pid of a command once it is in a cgroup of its own, where there are any."""
        pid = int((await self.info(id))["pid"])
        if self.delegated:
            await until(lambda: self.where(pid).startswith("commands/c"), "a cgroup of its own")
        return pid


@pytest.fixture(scope="module", params=["rw", "ro"], ids=["own cgroups", "read-only cgroups"])
def groups(request: pytest.FixtureRequest) -> Iterator[PodCgroups]:
    with pod_cgroups(memory_bytes=MEMORY, pids=PIDS, mode=request.param) as found:
        if found is None:
            pytest.skip("needs root and version 1's memory and pids hierarchies")
        yield found


@pytest.fixture
async def pod(groups: PodCgroups) -> AsyncIterator[LimitedPod]:
    with running_executor(prefix=groups.prefix) as process:
        async with connected(process) as plain:
            pod = LimitedPod(plain.process, plain.session)
            pod.groups = groups
            assert (await pod.call("GET", "/v1/lease")).status == 200  # loads what a claimed pod has loaded
            yield pod


async def ends_as(pod: Pod, command: str | list[str], **fields: object) -> tuple[str, int]:
    answer = await pod.exec(command, **fields)
    return answer["reason"], answer["exit_code"]


# ── cgroups ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_where_cgroups_are_writable_the_executor_and_lasting_commands_have_their_own(pod: LimitedPod) -> None:
    id = await pod.start("sleep 300 & exec sleep 300")
    pid = await pod.lasting(id)
    if not pod.delegated:
        assert pod.where(pod.pid) == pod.where(pid) == ""
        return
    assert pod.where(pod.pid) == "executor"
    assert pod.where(pid) == "commands/c1"
    assert len(pod.groups.read("pids", "cgroup.procs", "commands/c1").split()) == 2
    limit, pids = (
        pod.groups.read("memory", "memory.limit_in_bytes", "commands"),
        pod.groups.read("pids", "pids.max", "commands"),
    )
    assert int(limit) == MEMORY - MEMORY // 8
    assert int(pids) == PIDS - 32
    assert (await pod.call("DELETE", f"/v1/processes/{id}")).status == 204
    again = await pod.start(["sleep", "300"])
    assert pod.where(await pod.lasting(again)) == "commands/c1", "an empty one is used again"


async def test_a_process_that_sheds_all_that_it_could_be_known_by_still_ends_with_its_command(pod: LimitedPod) -> None:
    """S7: the mark, the session, the group and the parents; what is left is the cgroup."""
    mark = f"300.{secrets.randbelow(10**9):09d}"
    script = f"""
import os, resource, time
open("begun", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
if not os.fork():
    hard = resource.getrlimit(5)[1]
    resource.setrlimit(5, (123456, 234567))
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execv("/bin/sleep", ["sleep", "{mark}"])
time.sleep(300)
"""
    id = await pod.start([PYTHON, "-c", script], cwd=str(pod.workspace))
    await pod.lasting(id)
    await pod.exec("touch go")
    await until(lambda: bool(processes_with(mark)), "it hides")
    assert (await pod.call("DELETE", f"/v1/processes/{id}")).status == 204
    if pod.delegated:
        assert processes_with(mark) == []


async def test_a_fork_bomb_ends_with_its_timeout(pod: LimitedPod) -> None:
    answer = await pod.exec("f() { f | f & }; f; sleep 300", timeout_sec=3, grace_sec=0.2)
    assert (answer["reason"], answer["descendants_left"]) == ("timeout", False)
    assert (await pod.exec("echo next"))["stdout"] == "next\n"


# ── reasons ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("before", ["", "import time; time.sleep(2.5); "], ids=["at once", "later"])
async def test_a_command_that_the_kernel_ends_for_want_of_memory_says_so(pod: LimitedPod, before: str) -> None:
    """S4, LM07."""
    assert await ends_as(pod, [PYTHON, "-c", before + HOG]) == ("oom_killed", 137)
    assert await ends_as(pod, "kill -9 $$") == ("signaled", 137)
    assert await ends_as(pod, f"{PYTHON} -c '{HOG}'; exit 137") == ("oom_killed", 137)
    assert await ends_as(pod, "exit 137") == ("exited", 137)


async def test_a_kill_long_after_memory_ran_out_is_not_put_down_to_memory(pod: LimitedPod) -> None:
    script = f"sleep 2; {PYTHON} -c '{HOG}'; sleep 6.5; kill -9 $$"
    assert await ends_as(pod, script) == ("signaled", 137)


async def test_a_kill_while_another_command_runs_out_of_memory_is_not_put_down_to_it(pod: LimitedPod) -> None:
    hog = asyncio.create_task(pod.exec([PYTHON, "-c", f"import time; time.sleep(2.5); {HOG}"]))
    other = await pod.start("while :; do sleep 0.05; done")
    await pod.lasting(other)
    assert (await hog)["reason"] == "oom_killed"
    await pod.call("POST", f"/v1/processes/{other}/signal", {"signal": "TERM", "to": "leader"})
    assert (await pod.ended(other))["reason"] != "oom_killed"


async def test_a_pool_of_workers_that_needs_too_much_memory_leaves_the_executor_alone(pod: LimitedPod) -> None:
    """LM07, S4."""
    script = "import multiprocessing as m; m.set_start_method('fork')\ndef f(n):\n x = bytearray(50 << 20); return n\n"
    script += "p = m.Pool(32)\nr = [p.apply_async(f, (n,)) for n in range(64)]\n[one.get(5) for one in r]"
    before = pod.pid
    answer = await pod.exec([PYTHON, "-c", script], timeout_sec=40)
    assert answer["exit_code"] != 0
    assert pod.process.process.poll() is None
    assert (await pod.exec("echo next"))["stdout"] == "next\n"
    assert before == pod.pid


async def test_a_command_that_gets_no_more_processes_says_so(pod: LimitedPod) -> None:
    """S4."""
    answer = await pod.exec("for i in $(seq 400); do sleep 300 & done; exit 4", id="many")
    assert answer["reason"] == "pids_exhausted"
    assert "processes" in answer["message"]
    await pod.call("DELETE", "/v1/processes/many")
    assert await ends_as(pod, "exit 4") == ("exited", 4)


async def test_a_pod_full_of_processes_still_answers_and_gets_them_back(pod: LimitedPod) -> None:
    """S4, LM07."""
    id = await pod.start("for i in $(seq 400); do sleep 300 & done; sleep 300")
    await until(lambda: int(pod.groups.read("pids", "pids.current")) >= PIDS - 32, "it is full")
    assert (await pod.call("GET", "/healthz")).json["status"] == "ok"
    answer = await pod.exec(["true"])
    assert answer["reason"] in ("pids_exhausted", "exited")
    assert (await pod.call("DELETE", f"/v1/processes/{id}")).status == 204
    assert await ends_as(pod, "echo x | cat") == ("exited", 0)
    await until(lambda: int(pod.groups.read("pids", "pids.current")) < 40, "its processes are given back")


# ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_pod_s_own_limits_are_told_and_its_page_cache_is_no_use(pod: LimitedPod) -> None:
    """RS01, RS05."""

    async def memory() -> dict[str, int]:
        report = (await pod.call("GET", "/v1/usage")).json["memory"]
        assert report["source"] == "cgroup1"
        assert report["limit_bytes"] == MEMORY
        return dict(report)

    assert (await pod.call("GET", "/v1/usage")).json["pids"]["limit"] == PIDS
    before = await memory()
    answer = await pod.exec("head -c 120M /dev/zero > big && sync big && cat big > /dev/null && rm -f nothing")
    assert answer["exit_code"] == 0, answer
    after = await memory()
    assert after["usage_bytes"] > after["working_set_bytes"]
    assert after["working_set_bytes"] - before["working_set_bytes"] < 40 * MiB
    await pod.exec("rm big")


async def test_kills_for_want_of_memory_are_counted_wherever_in_the_pod_they_were(pod: LimitedPod) -> None:
    async def kills() -> int:
        return int((await pod.call("GET", "/v1/usage")).json["memory"]["oom_kills"])

    before = await kills()
    assert await ends_as(pod, [PYTHON, "-c", HOG]) == ("oom_killed", 137)
    assert await kills() == before + 1
    assert await ends_as(pod, [PYTHON, "-c", f"import time; time.sleep(4); {HOG}"]) == ("oom_killed", 137)
    assert await kills() == before + 2


async def test_a_file_in_shared_memory_takes_the_commands_memory_and_not_the_executor_s(pod: LimitedPod) -> None:
    """S4: no process could be ended for it, and the next in line would be the executor."""
    if not pod.delegated:
        pytest.skip("without cgroups of its own the executor has its out-of-memory score alone")
    for _ in range(5):
        await pod.exec("head -c 1G /dev/zero > /dev/shm/big; exit 0")
    assert pod.process.process.poll() is None
    assert (await pod.call("GET", "/healthz")).status == 200
    await pod.exec("rm /dev/shm/big")
    left = Path(f"/proc/{pod.pid}/root/dev/shm/big")  # where there was no memory even for `rm`
    left.unlink(missing_ok=True)
    assert (await pod.exec("echo next"))["stdout"] == "next\n"
