"""The dead-man's switch: a pod outlives its manager by lease and grace, never by more, and never while it works."""

from __future__ import annotations

import asyncio

import pytest

from executor.config import ExecutorConfig
from executor.errors import Conflict, InvalidRequest
from executor.lease import Lease
from executor.wire import BindRequest, LeaseRequest, LeaseTermsBody

TOKEN = "0" * 64


class Clock:
    """Stands in for the loop's time and timers, so that hours pass at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, object]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        monkeypatch.setattr(loop, "call_at", self._call_at)

    def _call_at(self, at: float, function: object) -> Clock:
        self.timers = [(at, function)]
        return self

    def cancel(self) -> None:
        self.timers = []

    def pass_sec(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and self.timers[0][0] <= end:
            at, function = self.timers.pop()
            self.now = max(self.now, at)
            assert callable(function)
            function()
        self.now = end


class Pod:
    def __init__(self, clock: Clock, unclaimed_sec: float | None = None) -> None:
        self.clock = clock
        self.running = 0
        self.ends: list[str] = []
        config = ExecutorConfig(token_sha256=TOKEN, unclaimed_sec=unclaimed_sec, quiet_grace_sec=30)
        self.lease = Lease(config, lambda: self.running, self.ends.append)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_an_executor_without_a_manager_has_no_deadline_and_no_timer(clock: Clock) -> None:
    pod = Pod(clock)
    clock.pass_sec(1e6)
    assert pod.ends == []
    assert clock.timers == []


async def test_a_quiet_pod_ends_itself_after_the_lease_and_the_grace(clock: Clock) -> None:
    pod = Pod(clock)
    pod.lease.heard("100")
    clock.pass_sec(129)
    assert pod.ends == []
    clock.pass_sec(2)
    assert pod.ends == ["quiet"]


async def test_a_working_pod_never_ends_for_being_quiet(clock: Clock) -> None:
    pod = Pod(clock)
    pod.lease.heard("10")
    pod.running = 1
    clock.pass_sec(10_000)
    assert pod.ends == []
    pod.running = 0
    pod.lease.worked()
    clock.pass_sec(39)
    assert pod.ends == []
    clock.pass_sec(41)
    assert pod.ends == ["quiet"]


async def test_a_call_under_way_counts_as_work(clock: Clock) -> None:
    pod = Pod(clock)
    pod.lease.heard("10")
    pod.lease.begin()
    clock.pass_sec(1000)
    assert pod.ends == []
    pod.lease.done()
    clock.pass_sec(81)
    assert pod.ends == ["quiet"]


async def test_the_hard_end_comes_whatever_runs(clock: Clock) -> None:
    pod = Pod(clock)
    pod.running = 1
    pod.lease.push(LeaseRequest(quiet_sec=10, hard_end_sec=500))
    clock.pass_sec(499)
    assert pod.ends == []
    clock.pass_sec(2)
    assert pod.ends == ["hard_end"]


async def test_an_unclaimed_pod_has_its_own_deadline_that_can_be_pushed_on(clock: Clock) -> None:
    pod = Pod(clock, unclaimed_sec=60)
    clock.pass_sec(50)
    pod.lease.push(LeaseRequest(unclaimed_sec=60))
    clock.pass_sec(59)
    assert pod.ends == []
    clock.pass_sec(2)
    assert pod.ends == ["unclaimed"]


async def test_a_claim_ends_the_unclaimed_deadline(clock: Clock) -> None:
    pod = Pod(clock, unclaimed_sec=60)
    assert pod.lease.bind(BindRequest(sandbox_id="s1", task_id="t", lease=LeaseTermsBody(quiet_sec=1000)))
    clock.pass_sec(900)
    assert pod.ends == []
    with pytest.raises(Conflict):
        pod.lease.push(LeaseRequest(unclaimed_sec=60))


async def test_binding_again_is_fine_for_the_same_sandbox_and_refused_for_another(clock: Clock) -> None:
    pod = Pod(clock)
    assert pod.lease.bind(BindRequest(sandbox_id="s1", task_id="t"))
    assert not pod.lease.bind(BindRequest(sandbox_id="s1", task_id="t"))
    with pytest.raises(Conflict):
        pod.lease.bind(BindRequest(sandbox_id="s2", task_id="t"))
    assert pod.lease.info().sandbox_id == "s1"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e99", "ten", ""])
async def test_a_lease_that_is_no_length_of_time_is_refused(clock: Clock, text: str) -> None:
    with pytest.raises(InvalidRequest):
        Pod(clock).lease.heard(text)
