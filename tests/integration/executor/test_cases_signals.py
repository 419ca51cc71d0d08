"""Cases of *Signals and kill*, against a running executor."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.executor_pod import Pod, processes_with, until


async def test_a_timeout_ends_the_process_and_not_only_the_call(any_tier: Pod) -> None:
    """SG01"""
    mark = f"MARK1{any_tier.pid}"
    result = await any_tier.exec(["sh", "-c", f"echo {mark} >/dev/null; sleep 300; :"], timeout_sec=0.7)
    assert (result["reason"], result["timed_out"], result["exit_code"]) == ("timeout", True, 143)
    assert not processes_with(mark)


async def test_descendants_in_the_background_do_not_outlive_the_timeout(any_tier: Pod) -> None:
    """SG03"""
    mark = f"300.03{any_tier.pid}"
    late = any_tier.workspace / "late"
    command = f"(sleep {mark}; touch {late}) & wait"
    result = await any_tier.exec(command, timeout_sec=0.7)
    assert result["timed_out"] is True
    assert not processes_with(mark)
    assert not processes_with(str(late))
    assert not late.exists()


@pytest.mark.parametrize("escape", [
    "setsid sleep {mark} &", "(setsid sh -c 'sleep {mark} & sleep {mark} & wait' &) ; ", "nohup sleep {mark} &",
    "env -i setsid sh -c 'env -i sleep {mark} & exec env -i sleep {mark}' &", "sh -c 'cd /; (sleep {mark} &)';",
])  # fmt: skip
async def test_descendants_that_left_the_session_do_not_outlive_the_timeout(any_tier: Pod, escape: str) -> None:
    """SG03"""
    mark = f"300.3{any_tier.pid}"
    command = escape.format(mark=mark) + f" while ! pgrep -f '[3]00.3{any_tier.pid}' >/dev/null; do :; done; sleep 299"
    result = await any_tier.exec(command, timeout_sec=1.5, grace_sec=0.5)
    assert result["timed_out"] is True
    assert result["descendants_left"] is False
    assert not processes_with(f"sleep\0{mark}")


async def test_what_ignores_term_is_killed_after_the_grace(any_tier: Pod) -> None:
    """SG05"""
    mark = f"300.05{any_tier.pid}"
    command = f"trap '' TERM; (trap '' TERM; sleep {mark}) & wait; sleep {mark}"
    began = time.monotonic()
    result = await any_tier.exec(command, timeout_sec=1, grace_sec=1)
    took_sec = time.monotonic() - began
    assert 1.9 <= took_sec < 45, "KILL after timeout and grace"
    assert (result["reason"], result["exit_code"], result["signal"]) == ("timeout", 137, "SIGKILL")
    assert not processes_with(mark)


async def test_a_process_may_clean_up_within_the_grace(executor: Pod) -> None:
    """SG05"""
    result = await executor.exec(
        "trap 'echo cleaned; exit 9' TERM; echo up; while :; do sleep 0.05; done", timeout_sec=1, grace_sec=30
    )
    assert (result["stdout"], result["exit_code"], result["reason"]) == ("up\ncleaned\n", 9, "timeout")


async def test_a_process_is_signalled_by_its_id_and_again_without_harm(any_tier: Pod) -> None:
    """SG07"""
    id = await any_tier.start(["sleep", "300"])
    assert (await any_tier.call("POST", f"/v1/processes/{id}/signal", {"signal": "TERM"})).status == 204
    info = await any_tier.ended(id)
    assert (info["exit_code"], info["signal"]) == (143, "SIGTERM")
    assert (await any_tier.call("POST", f"/v1/processes/{id}/signal", {"signal": "TERM"})).status == 204
    unknown = await any_tier.call("POST", "/v1/processes/no-such-id/signal", {"signal": "TERM"})
    assert (unknown.status, unknown.code) == (404, "not_found")


@pytest.mark.parametrize("signal", ["TERM", "SIGTERM", 15, "15", "sigterm"])
async def test_a_signal_may_be_named_in_every_usual_way(executor: Pod, signal: str | int) -> None:
    """SG07"""
    id = await executor.start(["sleep", "300"])
    assert (await executor.call("POST", f"/v1/processes/{id}/signal", {"signal": signal})).status == 204
    assert (await executor.ended(id))["signal"] == "SIGTERM"


@pytest.mark.parametrize("signal", ["NOPE", "", 0, -1, 99, "SIGSIGTERM", 1.5, None, []])
async def test_what_is_no_signal_is_refused(executor: Pod, signal: object) -> None:
    """SG07"""
    id = await executor.start(["sleep", "300"])
    reply = await executor.call("POST", f"/v1/processes/{id}/signal", {"signal": signal})
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert (await executor.info(id))["state"] == "running"
    assert (await executor.call("DELETE", f"/v1/processes/{id}")).status == 204


async def test_a_signal_to_the_leader_spares_its_children(executor: Pod) -> None:
    """SG07"""
    child = "sh -c 'trap \"echo child\" INT; sleep 2'"
    id = await executor.start(f"trap 'echo leader; exit 0' INT; {child} & echo up; wait")
    await _until_output(executor, id, b"up\n")
    await executor.call("POST", f"/v1/processes/{id}/signal", {"signal": "INT", "to": "leader"})
    assert (await executor.ended(id))["exit_code"] == 0
    assert b"child" not in (await executor.output(id)).body
    await executor.call("DELETE", f"/v1/processes/{id}")


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("SEGV", 139), ("TERM", 143), ("ABRT", 134)])
async def test_death_by_a_signal_is_never_exit_0(any_tier: Pod, name: str, code: int) -> None:
    """SG09"""
    command = f"kill -{name} $$"
    result = await any_tier.exec(command)
    assert (result["exit_code"], result["signal"], result["reason"]) == (code, f"SIG{name}", "signaled")
    got = await any_tier.stream(command)
    assert got.exit is not None
    assert (got.exit.exit_code, got.exit.signal, got.exit.reason) == (code, f"SIG{name}", "signaled")
    info = await any_tier.ended(await any_tier.start(command))
    assert (info["exit_code"], info["signal"], info["reason"]) == (code, f"SIG{name}", "signaled")


async def test_no_ignored_signal_is_inherited(any_tier: Pod) -> None:
    """SG11"""
    look = ["grep", "-E", "^(SigIgn|SigBlk)", "/proc/self/status"]
    clean = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"
    assert (await any_tier.exec(look))["stdout"] == clean
    assert (await any_tier.exec(" ".join(f"'{word}'" for word in look)))["stdout"] == clean
    assert (await any_tier.stream(look)).stdout.decode() == clean
    id = await any_tier.start(look)
    await any_tier.ended(id)
    assert (await any_tier.output(id)).body.decode() == clean


async def test_a_pipeline_ends_with_its_reader_and_in_silence(any_tier: Pod) -> None:
    """SG11"""
    result = await any_tier.exec("yes | head -1; echo ${PIPESTATUS[@]}", timeout_sec=60)
    assert (result["stdout"], result["stderr"]) == ("y\n141 0\n", "")


async def test_the_ways_to_be_killed_are_told_apart(any_tier: Pod) -> None:
    """SG13 (the kernel's out-of-memory killer needs a memory limit, see the tests of the pods)"""
    by_call, by_itself, by_time = await asyncio.gather(
        any_tier.start(["sleep", "300"]),
        any_tier.start("kill -KILL $$"),
        any_tier.start(["sleep", "300"], timeout_sec=0.3, grace_sec=0),
    )
    await any_tier.call("POST", f"/v1/processes/{by_call}/signal", {"signal": "KILL"})
    found = {id: await any_tier.ended(id) for id in (by_call, by_itself, by_time)}
    assert [found[id]["reason"] for id in (by_call, by_itself, by_time)] == ["cancelled", "signaled", "timeout"]
    assert [found[id]["timed_out"] for id in (by_call, by_itself, by_time)] == [False, False, True]
    assert all(one["exit_code"] >= 128 and one["signal"] for one in found.values())


async def test_deleting_a_process_kills_its_whole_tree(any_tier: Pod) -> None:
    """SG13"""
    mark = f"300.13{any_tier.pid}"
    id = await any_tier.start(f"trap '' TERM; setsid sleep {mark} & sleep {mark} & wait; sleep {mark}", grace_sec=0.2)
    await until(lambda: len(processes_with(f"sleep\0{mark}")) == 2, "both children run")
    assert (await any_tier.call("DELETE", f"/v1/processes/{id}")).status == 204
    assert not processes_with(mark)
    assert (await any_tier.call("DELETE", f"/v1/processes/{id}")).code == "not_found"


async def test_a_fork_bomb_that_ignores_term_is_ended_by_the_timeout(executor: Pod) -> None:
    """SG05: bounded, so that a failure of this test does not take the machine with it"""
    mark = f"BOMB{executor.pid}"
    bomb = f": {mark}; trap '' TERM; n=${{1:-6}}; [ $n -gt 0 ] && for i in 1 2; do sh \"$0\" $((n-1)) & done; sleep 300"
    path = executor.workspace / "bomb.sh"
    path.write_text(bomb)
    result = await executor.exec(["sh", str(path)], timeout_sec=1.5, grace_sec=0.3)
    assert result["timed_out"] is True
    await until(lambda: not processes_with(str(path)), "the whole tree is gone")


async def _until_output(pod: Pod, id: str, expected: bytes) -> None:
    for _ in range(1000):
        if (await pod.output(id)).body == expected:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{expected!r} never came")
