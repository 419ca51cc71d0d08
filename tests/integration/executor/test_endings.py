"""Commands are ended and answered also where many end at once, and where the means for it are stopped or used up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected

FreshExecutor = Callable[..., AbstractContextManager[ExecutorProcess]]
FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.parametrize("limit", [{}, {"timeout_sec": 30}])
async def test_a_command_that_stops_its_helper_is_answered_all_the_same(any_tier: Pod, limit: dict[str, float]) -> None:
    for _ in range(2):
        async with asyncio.timeout(60):
            result = await any_tier.exec("kill -STOP $PPID; sleep 0.2; echo out; exit 3", **limit)
        assert (result["exit_code"], result["reason"], result["stdout"]) == (3, "exited", "out\n")


async def test_hundreds_that_time_out_together_are_all_ended_soon(executor: Pod) -> None:
    began = time.monotonic()
    results = await asyncio.gather(*(
        executor.exec("sleep 300 & sleep 300", timeout_sec=2, grace_sec=1) for _ in range(300)
    ))  # fmt: skip
    assert {result["reason"] for result in results} == {"timeout"}
    assert not any(result["descendants_left"] for result in results)
    assert time.monotonic() - began < 60


async def test_deleting_twice_at_once_is_no_error_and_spares_whoever_has_the_id_by_then(executor: Pod) -> None:
    async def start_once_free() -> None:
        while True:
            body = {"command": ["sleep", "300"], "id": "twice", "env": {"ANOTHER": "1"}}
            if (await executor.call("POST", "/v1/processes", body)).status == 201:
                return

    for _ in range(5):
        await executor.start(["sleep", "300"], id="twice")
        deletes = [executor.call("DELETE", "/v1/processes/twice") for _ in range(4)]
        replies = await asyncio.gather(*deletes)
        assert {reply.status for reply in replies} <= {204, 404}
        await executor.start(["sleep", "300"], id="twice")
        first, second, _ = await asyncio.gather(
            executor.call("DELETE", "/v1/processes/twice"), executor.call("DELETE", "/v1/processes/twice"),
            start_once_free(),
        )  # fmt: skip
        assert {first.status, second.status} <= {204, 404}
        assert (await executor.call("DELETE", "/v1/processes/twice")).status in (204, 404)


async def test_connections_that_use_up_the_descriptors_keep_no_command_alive(fresh_executor: FreshExecutor) -> None:
    with fresh_executor(prefix=("prlimit", "--nofile=128:128")) as process, contextlib.ExitStack() as held:
        async with connected(process, 2) as pod:
            began = time.monotonic()
            ids = [await pod.start(["sleep", "300"], timeout_sec=2, grace_sec=0.5) for _ in range(4)]
            for _ in range(200):
                sock = held.enter_context(socket.socket(socket.AF_UNIX))
                with contextlib.suppress(OSError):
                    sock.settimeout(1)
                    sock.connect(process.socket)
                    sock.sendall(b"GET / HTTP/1.1\r\nHost: pod\r\n")
            for id in ids:
                assert (await pod.ended(id))["reason"] == "timeout"
            assert time.monotonic() - began < 60


async def test_commands_that_use_up_the_descriptors_are_refused_and_the_others_still_end(
    fresh_executor: FreshExecutor,
) -> None:
    with fresh_executor(prefix=("prlimit", "--nofile=128:128")) as process:
        async with connected(process, 2) as pod:
            ids, refused = [], 0
            for _ in range(70):
                reply = await pod.call("POST", "/v1/processes", {"command": ["sleep", "300"], "timeout_sec": 3})
                assert reply.status in (201, 429), reply.body
                if reply.status == 201:
                    ids.append(reply.json["id"])
                else:
                    refused += 1
            assert refused
            for id in ids:
                assert (await pod.ended(id))["reason"] == "timeout"
            assert (await pod.exec(["echo", "hi"]))["stdout"] == "hi\n"


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose processes cannot even be killed while it is frozen."""
    if not IS_ROOT or not os.path.exists(FREEZER / "cgroup.procs"):
        pytest.skip("needs root and the freezer of cgroup version 1")
    group = FREEZER / f"sojourn-test-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        give_up = time.monotonic() + 20
        while (group / "cgroup.procs").read_text() and time.monotonic() < give_up:
            time.sleep(0.05)
        group.rmdir()


@pytest.mark.root
async def test_a_command_that_the_kernel_does_not_let_go_is_answered_at_last(executor: Pod, freezer: Path) -> None:
    id = await executor.start(["sleep", "300"], timeout_sec=1, grace_sec=0.1)
    (freezer / "cgroup.procs").write_text(str((await executor.info(id))["pid"]))
    (freezer / "freezer.state").write_text("FROZEN")
    ended = await executor.ended(id)
    assert (ended["reason"], ended["exit_code"], ended["descendants_left"]) == ("timeout", 137, True)
    assert "kernel" in ended["message"]
    (freezer / "freezer.state").write_text("THAWED")
    assert (await executor.call("DELETE", f"/v1/processes/{id}")).status == 204
