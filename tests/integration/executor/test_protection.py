"""What a command may do to the executor, to its token, and how it can hide: threats S1 to S3, S7 and fault F1."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from executor.app import routes_of
from tests.support.executor_pod import (
    IS_ROOT,
    ExecutorProcess,
    Pod,
    Tier,
    UnreachablePython,
    connected,
    processes_with,
    running_executor,
    until,
)

pytestmark = [pytest.mark.timeout(120)]
TOKEN = "canary-token-b7Qx2"


@pytest.fixture(scope="module", params=["split", "single"])
def started(request: pytest.FixtureRequest) -> Iterator[ExecutorProcess]:
    """One of its own: commands here kill all that their user runs."""
    if request.param == "split" and not IS_ROOT:
        pytest.skip("two users need root")
    try:
        with running_executor(request.param, token=TOKEN) as process:
            yield process
    except UnreachablePython as why:
        pytest.skip(str(why))


@pytest.fixture
async def pod(started: ExecutorProcess) -> AsyncIterator[Pod]:
    async with connected(started) as pod:
        yield pod


def split(pod: Pod) -> Pod:
    if pod.process.tier != "split":
        pytest.skip("in the single tier a command shares the executor's user; it can end its own pod")
    return pod


# ── S1: no call without the token, from wherever ────────────────────────────────────────────────────────────────


async def test_every_route_but_health_needs_the_token(pod: Pod) -> None:
    assert (await pod.call("GET", "/healthz", token="")).json == {"status": "ok", "message": None}
    routes = [
        ("PATCH" if route.method == "*" else route.method, re.sub(r"\{[a-z]+(:[^}]*)?\}", "1", route.path))
        for route in routes_of(MagicMock())
    ]
    assert len(routes) > 15
    for method, path in [*routes, ("GET", "/nothing/here")]:
        if path in ("/healthz", "/readyz"):
            continue
        for header in ("", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"):
            reply = await pod.call(method, path, headers={"Authorization": header}, token="")
            assert reply.status == 401, (method, path, header)
            assert method == "HEAD" or reply.code == "unauthenticated"


async def test_a_command_that_reaches_the_executor_is_not_let_in(pod: Pod) -> None:
    script = f"""
import socket, sys
try:
    s = socket.socket(socket.AF_UNIX); s.connect({pod.process.socket!r})
except PermissionError:
    sys.exit(7)
s.sendall(b"POST /v1/exec HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}")
print(s.recv(100).split()[1].decode())
"""
    answer = await pod.exec(["python3", "-c", script])
    assert (answer["exit_code"], answer["stdout"]) in [(7, ""), (0, "401\n")]
    assert pod.process.tier == "single" or answer["exit_code"] == 7


# ── S2: nothing in the pod is worth stealing, and the executor's own memory is closed ───────────────────────────


async def test_a_command_finds_the_token_nowhere(pod: Pod) -> None:
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
    assert TOKEN not in pod.process.log_text()


async def test_a_command_gets_no_descriptor_and_no_setting_of_the_executor(pod: Pod) -> None:
    answer = await pod.exec(
        "ls /proc/self/fd | wc -l; env | grep -c SOJOURN; grep -E 'NoNewPrivs|CapEff' /proc/self/status"
    )
    assert answer["stdout"] == "4\n0\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\n"


async def test_the_executors_environment_and_memory_cannot_be_read(pod: Pod) -> None:
    proc = f"/proc/{pod.pid}"
    answer = await pod.exec(f"cat {proc}/environ; head -c1 {proc}/mem; ls {proc}/fd/; readlink {proc}/cwd && echo read")
    assert answer["stdout"] == ""
    assert answer["stderr"].count("ermission denied") == 3, answer


async def test_no_command_can_dump_core(pod: Pod) -> None:
    assert (await pod.exec("ulimit -c"))["stdout"] == "0\n"


# ── S3: the executor cannot be traced, stopped or ended ─────────────────────────────────────────────────────────


async def test_a_command_cannot_signal_or_trace_the_executor(pod: Pod) -> None:
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


async def test_a_command_that_kills_all_it_can_costs_neither_the_executor_nor_its_own_exit_code(pod: Pod) -> None:
    split(pod)
    answer = await pod.exec("kill -9 -1; echo after; exit 9")
    assert (answer["exit_code"], answer["reason"], answer["stdout"]) == (9, "exited", "after\n")
    assert (await pod.exec("echo next"))["stdout"] == "next\n"


async def test_a_command_whose_helper_is_killed_under_it_goes_on_to_its_end(pod: Pod) -> None:
    split(pod)
    script = "pkill -9 -u $(id -u) -f [s]pawn_helper; sleep 0.5; echo done; exit 7"
    answer = await pod.exec(script)
    assert (answer["exit_code"], answer["reason"], answer["stdout"]) == (7, "exited", "done\n")


async def test_a_stopped_helper_does_not_stop_the_executor_for_good(pod: Pod) -> None:
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
async def test_nothing_that_a_command_started_survives_its_forced_end(pod: Pod, script: str, way: str) -> None:
    mark = f"300.{secrets.randbelow(10**9):09d}"
    command = script.format(n=mark)
    if way == "timeout":
        answer = await pod.exec(command, grace_sec=0.5, timeout_sec=1.0)
        assert (answer["reason"], answer["timed_out"], answer["descendants_left"]) == ("timeout", True, False)
    else:
        id = await pod.start(command, grace_sec=0.5)
        await until(lambda: bool(processes_with(mark)), "it runs")
        assert (await pod.call("DELETE", f"/v1/processes/{id}")).status == 204
    assert processes_with(mark) == []


async def test_after_a_normal_end_descendants_live_on_and_the_answer_says_so(pod: Pod) -> None:
    """EX01, S7."""
    mark = f"300.{secrets.randbelow(10**9):09d}"
    answer = await pod.exec(f"setsid sleep {mark} >/dev/null 2>&1 & echo done", id="leaves-one")
    assert (answer["stdout"], answer["reason"], answer["descendants_left"]) == ("done\n", "exited", True)
    assert len(processes_with(mark)) == 1
    await pod.call("DELETE", "/v1/processes/leaves-one")
    assert processes_with(mark) == []


# ── F1 and the end of the executor ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_command_outlives_its_executor(started: ExecutorProcess, number: signal.Signals) -> None:
    tier: Tier = started.tier
    for _ in range(5):
        mark = f"300.{secrets.randbelow(10**9):09d}"
        with running_executor(tier, env={"SOJOURN_DRAIN_SEC": "1"}) as process:
            async with connected(process) as pod:
                running = [asyncio.create_task(pod.exec(script.format(n=mark))) for script in ESCAPES.values()]
                await until(lambda mark=mark: len(processes_with(mark)) >= len(ESCAPES), "they run")  # type: ignore[misc]
                process.process.send_signal(number)
                code = await asyncio.to_thread(process.process.wait, 30)
                assert code == (128 + number if number is signal.SIGTERM else -number)
                await asyncio.gather(*running, return_exceptions=True)
            await until(lambda mark=mark: not processes_with(mark), "all have ended")  # type: ignore[misc]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_what_takes_off_every_sign_of_its_command_ends_with_the_executor_at_the_latest(
    started: ExecutorProcess, number: signal.Signals
) -> None:
    """S7: it leaves its session, its parents and the limit that it is known by."""
    mark = f"300.{secrets.randbelow(10**9):09d}"
    with running_executor(started.tier) as process:
        async with connected(process) as pod:
            await pod.exec(f"(env -i setsid sh -c 'ulimit -m 5; setsid sleep {mark} & exit' >/dev/null 2>&1 &)")
            await until(lambda: bool(processes_with(mark)), "it runs")
            process.process.send_signal(number)
            await asyncio.to_thread(process.process.wait, 30)
        await until(lambda: not processes_with(mark), "it has ended")


async def test_a_new_life_of_the_executor_has_another_boot_id(started: ExecutorProcess) -> None:
    ids = set()
    for _ in range(2):
        with running_executor(started.tier) as process:
            async with connected(process) as pod:
                ids.add((await pod.call("GET", "/v1/lease")).json["boot_id"])
    assert len(ids) == 2


async def test_a_drain_tells_streams_how_their_commands_ended(started: ExecutorProcess) -> None:
    with running_executor(started.tier) as process:
        async with connected(process) as pod, pod.open_stream("echo up; sleep 300", "application/x-ndjson") as stream:
            lines: list[dict[str, object]] = []
            async for line in stream.content:
                lines.append(json.loads(line))
                if lines[-1]["type"] == "stdout":
                    os.kill(process.pid, signal.SIGTERM)
    assert [line["type"] for line in lines] == ["started", "stdout", "exit"]
    assert (lines[-1]["reason"], lines[-1]["signal"]) == ("cancelled", "SIGTERM")


async def test_an_executor_without_the_tokens_hash_refuses_to_start() -> None:
    with (
        pytest.raises(AssertionError, match=r"did not start \(2\)[\s\S]*SOJOURN_POD_TOKEN_SHA256"),
        running_executor(env={"SOJOURN_POD_TOKEN_SHA256": ""}),
    ):
        pass


async def test_a_kernel_without_memory_picks_commands_before_what_serves_them(any_tier: Pod) -> None:
    """S4, LM07: neither the executor nor a spawn helper, though they are larger than most commands"""
    session = await any_tier.call("POST", "/v1/sessions", {})
    command = "cat /proc/self/oom_score_adj"
    for path in ("/v1/exec", f"/v1/sessions/{session.json['id']}/exec"):
        said = (await any_tier.call("POST", path, {"command": command})).json["stdout"].split()
        assert said[0] == "1000"
    own = Path(f"/proc/{any_tier.pid}/oom_score_adj").read_text()
    helpers = [pid for pid in any_tier.process.descendants() if "spawn_helper" in command_line(pid)]
    assert helpers
    assert {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in helpers} == {own}
    await any_tier.call("DELETE", f"/v1/sessions/{session.json['id']}")


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


async def test_the_executor_comes_before_its_commands_when_the_processor_is_short(pod: Pod) -> None:
    nice = (await pod.exec("nice; cat /proc/self/autogroup 2>/dev/null"))["stdout"].split()
    ours = os.getpriority(os.PRIO_PROCESS, 0)  # which the executor has from us
    assert int(nice[0]) == min(19, ours + 10)
    assert nice[1:] == [] or nice[-1] == "5"
    with open(f"/proc/{pod.pid}/stat") as stat:
        assert int(stat.read().rpartition(")")[2].split()[16]) == ours
