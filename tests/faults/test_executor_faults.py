"""Faults under a lone executor: killed, stopped, its disk full, a slow poller of much output."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time

import pytest

from tests.support.executor_pod import (
    DEFAULT_TIER,
    IS_ROOT,
    connected,
    processes_with,
    running_executor,
    until,
)

pytestmark = pytest.mark.timeout(300)
MiB = 1 << 20
LIVES = 50
AT_ONCE = 5
SEQ_BYTES = sum(9 * 10 ** (digits - 1) * (digits + 1) for digits in range(1, 7)) + 3_000_001 * 8  # of `seq 4000000`
TREES = (
    "sleep {n} & sleep 300", "setsid sleep {n} & sleep 300", "(setsid sh -c 'sleep {n} & exit' &); sleep 300",
    "trap '' TERM HUP; (trap '' TERM HUP; exec setsid sleep {n}) & sleep 300",
)  # fmt: skip


async def test_no_process_outlives_an_executor_that_is_killed_in_the_middle_of_commands() -> None:
    """F1: fifty lives of an executor, each ended by KILL while trees of every kind run."""

    async def live_and_die(number: int) -> str:
        mark = f"300.{secrets.randbelow(10**9):09d}"
        with running_executor(DEFAULT_TIER) as process:
            async with connected(process) as pod:
                boot = str((await pod.call("GET", "/v1/lease")).json["boot_id"])
                waiting = [asyncio.create_task(pod.exec(tree.format(n=mark))) for tree in TREES]
                await until(lambda: len(processes_with(mark)) >= len(TREES), "they run", 120)
                # At different moments of their starts and ends, too.
                waiting.append(asyncio.create_task(pod.exec(f"sleep {mark}")))
                await asyncio.sleep(0.002 * number)
                os.kill(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.process.wait, 30)
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(isinstance(one, Exception) for one in outcomes), "callers are told, never answered"
            await until(lambda: not processes_with(mark), "none is left")
        return boot

    boots: set[str] = set()
    for first in range(0, LIVES, AT_ONCE):
        boots.update(await asyncio.gather(*(live_and_die(first + at) for at in range(AT_ONCE))))
    assert len(boots) == LIVES


async def test_an_executor_that_was_stopped_over_its_end_ends_itself_and_its_commands_at_once() -> None:
    """F2: stopped, its lease over meanwhile, and continued. What it ran writes nothing after that."""
    with running_executor(env={"SOJOURN_QUIET_GRACE_SEC": "0.5", "SOJOURN_DRAIN_SEC": "1"}) as process:
        async with connected(process) as pod:
            bind = {
                "sandbox_id": "s" * 26, "task_id": "stopped", "lease": {"quiet_sec": 60, "hard_end_sec": 8},
            }  # fmt: skip
            assert (await pod.call("POST", "/v1/bind", bind)).status == 200
            over_at = time.monotonic() + 8
            await pod.start("while :; do date +%s.%N >> log; sleep 0.05; done & while :; do sleep 1; done")
            log = process.workspace / "log"
            await until(lambda: log.exists() and log.stat().st_size > 0, "it writes")
            os.kill(process.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(over_at + 1 - time.monotonic())
                calling = asyncio.create_task(pod.call("GET", "/v1/lease", timeout=None))
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert await asyncio.to_thread(process.process.wait, 30) == 0
            await asyncio.gather(calling, return_exceptions=True)
        written = log.stat().st_size
        await asyncio.sleep(1.5)
        assert log.stat().st_size == written
        assert process.log_text().count("pod_ends_itself") == 1


def in_mount_namespace(*mounts: str) -> tuple[str, ...]:
    """Runs an executor with these in place, for it and its commands alone."""
    script = " && ".join([*mounts, 'exec "$@"'])
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")


def tmpfs(where: str, **options: object) -> str:
    return f"mount -t tmpfs -o {','.join(f'{name}={value}' for name, value in options.items())} none {where}"


@pytest.mark.root
@pytest.mark.skipif(not IS_ROOT, reason="mounting needs root")
@pytest.mark.parametrize("inodes", [False, True], ids=["bytes", "inodes"])
async def test_a_full_disk_is_told_by_name_and_breaks_nothing_that_was_there(inodes: bool) -> None:
    """FI21, S5."""
    workspace = '"$SOJOURN_WORKSPACE"'
    limits = {"size": "64m", "nr_inodes": 60} if inodes else {"size": "4m"}
    with running_executor(prefix=in_mount_namespace(tmpfs(workspace, mode=777, **limits))) as process:
        async with connected(process) as pod:
            assert (await pod.call("PUT", "/v1/files?path=kept", b"as it was")).status == 201
            assert (await pod.exec("chmod 640 kept"))["exit_code"] == 0
            fill = "for i in $(seq 100); do : > f$i; done" if inodes else "head -c 100M /dev/zero > big"
            assert "No space left" in (await pod.exec(fill))["stderr"]
            for path in ("kept", "new/deep/er"):
                reply = await pod.call("PUT", f"/v1/files?path={path}", bytes(MiB))
                assert (reply.status, reply.code) == (507, "no_space"), (path, reply.body)
            reply = await pod.call("POST", "/v1/files/mkdir", {"path": "directory"})
            assert reply.status == 507 or (reply.status < 300 and not inodes), reply.body
            kept = await pod.call("GET", "/v1/files?path=kept")
            assert (kept.status, kept.body) == (200, b"as it was")
            assert (await pod.exec("stat -c %a kept; ls -A | grep -c part$"))["stdout"].split() == ["640", "0"]
            id = await pod.start("for i in $(seq 20000); do echo a line of a log that needs no disk of the pod; done")
            ended = await pod.ended(id)
            assert (ended["exit_code"], ended["truncated"]) == (0, False)
            assert len((await pod.output(id)).body) == ended["stdout_bytes"]
            assert (await pod.exec("echo hi"))["stdout"] == "hi\n"
            assert (await pod.call("GET", "/healthz")).json["status"] == "ok"
            await pod.exec("rm -rf big f* directory")
            assert (await pod.call("PUT", "/v1/files?path=kept", bytes(MiB))).status == 200


@pytest.mark.root
@pytest.mark.skipif(not IS_ROOT, reason="mounting needs root")
@pytest.mark.parametrize("state", ["full", "read-only"])
async def test_output_that_finds_no_disk_is_cut_and_its_command_ends_as_ever(state: str) -> None:
    """F25: the disk for output is 1 MiB, or cannot be written."""
    options = {"size": "1m"} if state == "full" else {"size": "1m", "ro": ""}
    mount = tmpfs("/mnt", **options).replace("ro=", "ro")
    with running_executor(
        prefix=in_mount_namespace(mount), env={"SOJOURN_EXECUTOR_STATE_DIR": "/mnt"}
    ) as process:  # fmt: skip
        async with connected(process) as pod:
            ids = [await pod.start("seq 4000000; echo the end") for _ in range(2)]
            for id in ids:
                ended = await pod.ended(id)
                assert (ended["exit_code"], ended["reason"], ended["truncated"]) == (0, "exited", True)
                size = ended["stdout_bytes"]
                assert size == SEQ_BYTES + len("the end\n")
                rest = await pod.output(id, offset=size - 1000)
                assert rest.body.endswith(b"4000000\nthe end\n")
                first = await pod.output(id, offset=0)
                assert int(first.headers["Sandbox-Output-Offset"]) > 0, "what is gone is skipped, and told"
            assert (await pod.exec("echo hi"))["stdout"] == "hi\n"
        events = [json.loads(line)["event"] for line in process.log_text().splitlines()]
        assert len(events) < 20, "no line for every byte that was not written"


async def test_half_a_gigabyte_for_a_slow_poller_keeps_its_id_and_the_executor() -> None:
    """LM05."""
    with running_executor() as process:
        async with connected(process) as pod:
            id = await pod.start("head -c 500000000 /dev/zero; echo end")
            before = process.status_kib("VmRSS")
            while (state := await pod.info(id))["state"] == "running":
                assert process.status_kib("VmRSS") - before < 90_000
                await asyncio.sleep(0.3)
            assert (state["exit_code"], state["stdout_bytes"]) == (0, 500_000_004)
            last = await pod.output(id, offset=500_000_000)
            assert last.body == b"end\n"
            assert process.process.poll() is None
