"""Cases of *Zombies and reaping*, against a running executor."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from executor.config import ExecutorConfig
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected, until

FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]


def zombies(process: ExecutorProcess) -> list[int]:
    return [pid for pid, state in process.descendants().items() if state == "Z"]


async def test_processes_killed_by_id_leave_no_zombies(any_tier: Pod) -> None:
    """ZO01"""

    async def start_and_kill(number: int) -> None:
        id = await any_tier.start(["sleep", "300"])
        if number % 2:
            assert (await any_tier.call("DELETE", f"/v1/processes/{id}")).status == 204
        else:
            await any_tier.call("POST", f"/v1/processes/{id}/signal", {"signal": "KILL"})
            await any_tier.ended(id)

    gate = asyncio.Semaphore(8)

    async def one(number: int) -> None:
        async with gate:
            await start_and_kill(number)

    await asyncio.gather(*(one(number) for number in range(100)))
    await until(lambda: not zombies(any_tier.process), "no zombie is left")


@contextlib.contextmanager
def pids_limit(limit: int) -> Iterator[tuple[str, ...] | None]:
    """What to start a program with so that it is under a limit on processes; None where no such limit can be made."""
    for root in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        group = Path(root) / f"sojourn-test-{secrets.token_hex(4)}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / "pids.max").write_text(str(limit))
            except OSError:
                continue
            yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
            return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    yield None


async def test_orphans_do_not_use_up_the_processes_a_pod_may_have(fresh_executor: FreshExecutor) -> None:
    """ZO03, with 1,500 orphans over a limit of 128 where one can be set"""
    with pids_limit(128) as join, fresh_executor(prefix=join or ()) as process:
        async with connected(process) as pod:
            gate = asyncio.Semaphore(4)

            async def orphan() -> tuple[int, str]:
                async with gate:
                    result = await pod.exec("(sleep 0.01 & sleep 0.01 & sleep 0.01 &) >/dev/null 2>&1; echo ok")
                    return result["exit_code"], result["stdout"] + result["stderr"]

            answers = await asyncio.gather(*(orphan() for _ in range(500)))
            assert set(answers) == {(0, "ok\n")}
            await until(lambda: not zombies(process), "no zombie is left")
            await until(lambda: len(process.descendants()) <= ExecutorConfig.helpers, "only the spawn helpers are left")


@pytest.mark.skipif(not IS_ROOT, reason="a limit on processes takes a cgroup, which takes root")
async def test_a_pod_without_processes_left_says_so_and_recovers(fresh_executor: FreshExecutor) -> None:
    """ZO03"""
    with pids_limit(64) as join:
        if join is None:
            pytest.skip("no cgroup with a pids limit can be made here")
        with fresh_executor(prefix=join) as process:
            async with connected(process) as pod:
                hogs = [await pod.call("POST", "/v1/processes", {"command": ["sleep", "300"]}) for _ in range(70)]
                assert {hog.status for hog in hogs} <= {201, 429}
                infos = (await pod.call("GET", "/v1/processes")).json["processes"]
                reasons = {one["reason"] for one in infos if one["state"] == "ended"}
                assert reasons == {"pids_exhausted"}
                assert (await pod.call("GET", "/healthz")).status == 200
                for one in infos:
                    await pod.call("DELETE", f"/v1/processes/{one['id']}")
                assert (await pod.exec("echo ok"))["stdout"] == "ok\n"


async def test_a_launcher_that_ignores_sigchld_takes_no_exit_code_away(fresh_executor: FreshExecutor) -> None:
    """ZO05"""
    with fresh_executor(prefix=("sh", "-c", "trap '' CHLD; exec \"$@\"", "sh")) as process:
        async with connected(process) as pod:
            assert (await pod.exec("exit 5", timeout_sec=60))["exit_code"] == 5
            assert (await pod.exec(["sh", "-c", "sleep 0.05; exit 6"]))["exit_code"] == 6
            child = await pod.exec("sh -c 'exit 7'; echo $?; grep SigIgn /proc/self/status")
            assert child["stdout"].split() == ["7", "SigIgn:", "0000000000000000"]


async def test_deep_orphans_are_reaped_too(executor: Pod) -> None:
    """ZO01"""
    await executor.exec("setsid sh -c '(setsid sh -c \"sleep 0.05 & sleep 0.01\" &)' >/dev/null 2>&1 </dev/null")
    await until(lambda: not zombies(executor.process), "no zombie is left")
