"""What a command may do to the executor, to its token, and how it can hide: threats S1 to S3, S7 and fault F1."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from unittest.mock import MagicMock

import pytest

from executor.app import routes_of
from tests.support.executors import IS_ROOT, TOKEN, Executor, processes_with, until

pytestmark = [pytest.mark.timeout(120)]


@pytest.fixture(scope="module", params=["split", "single"])
def started(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "split" and not IS_ROOT:
        pytest.skip("two users need root")
    executor = Executor(tier=request.param).start()
    yield executor
    executor.remove()


@pytest.fixture
async def pod(started: Executor) -> AsyncIterator[Executor]:
    async with started:
        yield started


def split(pod: Executor) -> Executor:
    if pod.tier != "split":
        pytest.skip("in the single tier a command shares the executor's user; it can end its own pod")
    return pod


# ── S1: no call without the token, from wherever ────────────────────────────────────────────────────────────────


async def test_every_route_but_health_needs_the_token(pod: Executor) -> None:
    _, listed = await pod.call("GET", "/healthz")
    assert listed == {"status": "ok", "message": None}
    routes = [(route.method, route.path.replace("{id}", "x")) for route in routes_of(MagicMock())]
    assert len(routes) > 15
    for method, path in [*routes, ("GET", "/nothing/here")]:
        if path in ("/healthz", "/readyz"):
            continue
        for header in ("", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"):
            status, answer = await pod.call(method, path, headers={"Authorization": header})
            assert status == 401, (method, path, header)
            assert method == "HEAD" or answer["error"]["code"] == "unauthenticated"


async def test_a_command_that_reaches_the_executor_is_not_let_in(pod: Executor) -> None:
    script = f"""
import socket, sys
try:
    s = socket.socket(socket.AF_UNIX); s.connect({pod.address!r})
except PermissionError:
    sys.exit(7)
s.sendall(b"POST /v1/exec HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}")
print(s.recv(100).split()[1].decode())
"""
    answer = await pod.exec(["python3", "-c", script])
    assert (answer["exit_code"], answer["stdout"]) in [(7, ""), (0, "401\n")]
    assert pod.tier == "single" or answer["exit_code"] == 7


# ── S2: nothing in the pod is worth stealing, and the executor's own memory is closed ───────────────────────────


async def test_a_command_finds_the_token_nowhere(pod: Executor) -> None:
    """AU03, AU07: environment, argv, /proc of every process that it sees, descriptors of its own."""
    needle = TOKEN[:6] + '"+"' + TOKEN[6:]
    script = f"""
import os
needle = ("{needle}").encode()
hits = []
def look(path):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if needle in os.read(fd, 1 << 20):
                hits.append(path)
        finally:
            os.close(fd)
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "mem", "maps"):
        look(f"/proc/{{pid}}/{{name}}")
for fd in range(1024):
    look(f"/proc/self/fd/{{fd}}")
for directory, _, names in os.walk({str(pod.workspace)!r}):
    for name in names:
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            look(path)
print(hits)
"""
    answer = await pod.exec(["python3", "-c", script], env={"OTHER": "x"})
    assert (answer["exit_code"], answer["stdout"]) == (0, "[]\n"), answer
    assert TOKEN not in pod.log.read_text()


async def test_a_command_gets_no_descriptor_and_no_setting_of_the_executor(pod: Executor) -> None:
    answer = await pod.exec(
        "ls /proc/self/fd | wc -l; env | grep -c SOJOURN; grep -E 'NoNewPrivs|CapEff' /proc/self/status"
    )
    assert answer["stdout"] == "4\n0\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\n"


async def test_the_executors_environment_and_memory_cannot_be_read(pod: Executor) -> None:
    proc = f"/proc/{pod.pid}"
    answer = await pod.exec(f"cat {proc}/environ; head -c1 {proc}/mem; ls {proc}/fd/; readlink {proc}/cwd && echo read")
    assert answer["stdout"] == ""
    assert answer["stderr"].count("ermission denied") == 3, answer


async def test_no_command_can_dump_core(pod: Executor) -> None:
    assert (await pod.exec("ulimit -c"))["stdout"] == "0\n"


# ── S3: the executor cannot be traced, stopped or ended ─────────────────────────────────────────────────────────


async def test_a_command_cannot_signal_or_trace_the_executor(pod: Executor) -> None:
    pid = split(pod).pid
    script = f"""
import ctypes, os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
    try:
        os.kill({pid}, number); print("killed")
    except PermissionError:
        print("refused")
libc = ctypes.CDLL(None, use_errno=True)
print("traced" if libc.ptrace(16, {pid}, 0, 0) == 0 else "refused")
"""
    answer = await pod.exec(["python3", "-c", script])
    assert answer["stdout"].split() == ["refused"] * 4, answer
    assert (await pod.exec(["true"]))["exit_code"] == 0


async def test_a_command_that_kills_all_it_can_costs_neither_the_executor_nor_its_own_exit_code(pod: Executor) -> None:
    split(pod)
    answer = await pod.exec("kill -9 -1; echo after; exit 9")
    assert (answer["exit_code"], answer["reason"], answer["stdout"]) == (9, "exited", "after\n")
    assert (await pod.exec("echo next"))["stdout"] == "next\n"


async def test_a_command_whose_helper_is_killed_under_it_goes_on_to_its_end(pod: Executor) -> None:
    split(pod)
    script = "pkill -9 -u $(id -u) -f [s]pawn_helper; sleep 0.5; echo done; exit 7"
    answer = await pod.exec(script)
    assert (answer["exit_code"], answer["reason"], answer["stdout"]) == (7, "exited", "done\n")


async def test_a_stopped_helper_does_not_stop_the_executor_for_good(pod: Executor) -> None:
    split(pod)
    answer = await pod.exec(
        "pkill -STOP -u $(id -u) -f [s]pawn_helper; sleep 0.2; pkill -CONT -u $(id -u) -f [s]pawn_helper; echo ok"
    )
    assert answer["stdout"] == "ok\n"


# ── S7: the tree cannot be left ─────────────────────────────────────────────────────────────────────────────────

ESCAPES = {
    "a background child": "sleep {n} & sleep 300",
    "a session of its own": "setsid sleep {n} & sleep 300",
    "a double fork": "(setsid sh -c 'sleep {n} & sleep {n} & exit' &); sleep 300",
    "a cleared environment": "(env -i setsid sh -c 'env -i setsid sleep {n} & exit' >/dev/null 2>&1 &); sleep 300",
    "deaf to TERM": "trap '' TERM; (trap '' TERM; exec setsid sleep {n}) & sleep 300",
}


@pytest.mark.parametrize("script", ESCAPES.values(), ids=ESCAPES.keys())
@pytest.mark.parametrize("way", ["timeout", "delete"])
async def test_nothing_that_a_command_started_survives_its_forced_end(pod: Executor, script: str, way: str) -> None:
    mark = f"300.{secrets.randbelow(10**9):09d}"
    command = script.format(n=mark)
    if way == "timeout":
        answer = await pod.exec(command, grace_sec=0.5, timeout_sec=1.0)
        assert (answer["reason"], answer["timed_out"], answer["descendants_left"]) == ("timeout", True, False)
    else:
        _, started = await pod.call("POST", "/v1/processes", json={"command": command, "grace_sec": 0.5})
        await until(lambda: processes_with(mark))
        assert (await pod.call("DELETE", f"/v1/processes/{started['id']}"))[0] == 204
    assert processes_with(mark) == []


async def test_after_a_normal_end_descendants_live_on_and_the_answer_says_so(pod: Executor) -> None:
    """EX01, S7."""
    mark = f"300.{secrets.randbelow(10**9):09d}"
    answer = await pod.exec(f"setsid sleep {mark} >/dev/null 2>&1 & echo done", id="leaves-one")
    assert (answer["stdout"], answer["reason"], answer["descendants_left"]) == ("done\n", "exited", True)
    assert len(processes_with(mark)) == 1
    await pod.call("DELETE", "/v1/processes/leaves-one")
    assert processes_with(mark) == []


# ── F1 and the end of the executor ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_command_outlives_its_executor(started: Executor, number: signal.Signals) -> None:
    for _ in range(5):
        executor = Executor(tier=started.tier, SOJOURN_DRAIN_SEC="1").start()
        mark = f"300.{secrets.randbelow(10**9):09d}"
        try:
            async with executor:
                running = [
                    asyncio.create_task(executor.call("POST", "/v1/exec", json={"command": script.format(n=mark)}))
                    for script in ESCAPES.values()
                ]
                await until(lambda mark=mark: len(processes_with(mark)) >= len(ESCAPES))
                code = await asyncio.to_thread(executor.kill, number)
                assert code == (0 if number is signal.SIGTERM else -9)
                await asyncio.gather(*running, return_exceptions=True)
            await until(lambda mark=mark: not processes_with(mark))
        finally:
            executor.remove()


async def test_a_new_life_of_the_executor_has_another_boot_id(started: Executor) -> None:
    ids = set()
    executor = Executor(tier=started.tier)
    try:
        for _ in range(2):
            executor.start()
            async with executor:
                ids.add((await executor.call("GET", "/v1/lease"))[1]["boot_id"])
            executor.kill()
    finally:
        executor.remove()
    assert len(ids) == 2


async def test_a_drain_tells_streams_how_their_commands_ended(started: Executor) -> None:
    executor = Executor(tier=started.tier).start()
    try:
        async with (
            executor,
            executor.http.post(
                "http://pod/v1/exec",
                json={"command": "echo up; sleep 300"},
                headers={"Accept": "application/x-ndjson"},
            ) as stream,
        ):
            lines: list[dict[str, object]] = []
            async for line in stream.content:
                lines.append(json.loads(line))
                if lines[-1]["type"] == "stdout":
                    os.kill(executor.pid, signal.SIGTERM)
        assert [line["type"] for line in lines] == ["started", "stdout", "exit"]
        assert (lines[-1]["reason"], lines[-1]["signal"]) == ("cancelled", "SIGTERM")
    finally:
        executor.remove()


async def test_an_executor_without_the_tokens_hash_refuses_to_start() -> None:
    executor = Executor(SOJOURN_POD_TOKEN_SHA256="")
    try:
        with pytest.raises(AssertionError, match="SOJOURN_POD_TOKEN_SHA256"):
            executor.start()
        assert executor.kill() == 2
    finally:
        executor.remove()
