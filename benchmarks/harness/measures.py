"""The measurements, each interleaved: in every round each alternative is measured once, the order turning.

What ran in one round ran on the same machine in the same minute, so a ratio is the median of the rounds' ratios and
holds also where the machine does other work; the absolute figures are medians over rounds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

from benchmarks.harness.load import (
    NOOP_OPTIONS,
    Sample,
    background_load,
    exec_options,
    paced_noop,
    run_count,
    run_load,
    run_stream,
)
from benchmarks.harness.memory import peak_pss, pss_bytes, tree
from benchmarks.harness.servers import CannotMeasure, Target, Workshop, executor_server, wait_until_ready

CONCURRENCIES: Final = (1, 8, 64)
GIB: Final = 1 << 30
BASH_BODY: Final = '{"command": ["bash", "-c", "echo hi"]}'
BASH_EXPECT: Final = '"stdout":"hi\\n"'
NOOP_LOAD_CONNECTIONS: Final = 8
SETTLE_SEC: Final = 1.0
THOUSAND: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure."""

    rounds: int
    seconds: float  # of one cell: one target at one concurrency in one round
    warmup_sec: float
    stream_rounds: int
    start_rounds: int


QUICK: Final = Effort(rounds=3, seconds=0.35, warmup_sec=0.1, stream_rounds=1, start_rounds=3)
FULL: Final = Effort(rounds=9, seconds=2.0, warmup_sec=0.3, stream_rounds=3, start_rounds=9)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One target at one concurrency, over the rounds."""

    p50_us: float
    p90_us: float
    p99_us: float
    per_sec: float
    errors: int
    p50_ratio: float | None = None  # to the reference, the median of the rounds' ratios
    per_sec_ratio: float | None = None
    first_error: str = ""


@dataclass
class Bench:
    """What all measurements need: the tools, the effort, and where to say how far they are."""

    shop: Workshop
    effort: Effort
    say: Callable[[str], None]
    floors: list[Target] = field(default_factory=list)
    executor: Target | None = None
    executor_argv: list[str] = field(default_factory=list)
    manager: Target | None = None

    @property
    def targets(self) -> list[Target]:
        return [*self.floors, *(one for one in (self.executor, self.manager) if one is not None)]


def turned(items: Sequence[Target], by: int) -> list[Target]:
    at = by % len(items) if items else 0
    return [*items[at:], *items[:at]]


def ratio_of(rounds: Sequence[float], reference: Sequence[float]) -> float | None:
    """The median of the rounds' ratios; None without a round where both are known."""
    ratios = [one / other for one, other in zip(rounds, reference, strict=True) if one and other]
    return median(ratios) if ratios else None


def cell_of(samples: Sequence[Sample], reference: Sequence[Sample] | None) -> Cell:
    return Cell(
        p50_us=median(one.p50_us for one in samples),
        p90_us=median(one.p90_us for one in samples),
        p99_us=median(one.p99_us for one in samples),
        per_sec=median(one.per_sec for one in samples),
        errors=sum(one.errors for one in samples),
        p50_ratio=ratio_of([one.p50_us for one in samples], [one.p50_us for one in reference]) if reference else None,
        per_sec_ratio=(
            ratio_of([one.per_sec for one in samples], [one.per_sec for one in reference]) if reference else None
        ),
        first_error=next((one.first_error for one in samples if one.first_error), ""),
    )


def exec_cells(
    bench: Bench, what: str, concurrencies: Sequence[int], options: Callable[[Target], list[str]]
) -> dict[int, dict[str, Cell]]:
    """By concurrency and target. The floor is everybody's reference but the manager's, which is the executor."""
    effort, targets = bench.effort, bench.targets
    seen: dict[int, dict[str, list[Sample]]] = {at_once: {one.name: [] for one in targets} for at_once in concurrencies}
    for turn in range(effort.rounds):
        for at_once in concurrencies:
            for target in turned(targets, turn):
                bench.say(f"{what}: round {turn + 1} of {effort.rounds}, {at_once} at once, {target.name}")
                sample = run_load(
                    bench.shop, target, options(target),
                    connections=at_once, seconds=effort.seconds, warmup_sec=effort.warmup_sec,
                )  # fmt: skip
                seen[at_once][target.name].append(sample)
    cells: dict[int, dict[str, Cell]] = {}
    for at_once, by_name in seen.items():
        cells[at_once] = {}
        for name, samples in by_name.items():
            reference = by_name.get("executor" if name == "manager" else "floor")
            cells[at_once][name] = cell_of(samples, reference if reference is not samples else None)
    return cells


def measure_exec(bench: Bench) -> dict[str, object]:
    cells = exec_cells(bench, "exec true", CONCURRENCIES, exec_options)
    return {"exec": {str(at_once): by_name for at_once, by_name in cells.items()}}


def measure_bash(bench: Bench) -> dict[str, object]:
    cells = exec_cells(
        bench, "bash -c 'echo hi'", (1, 8), lambda target: exec_options(target, BASH_BODY, BASH_EXPECT)
    )  # fmt: skip
    return {"bash": {str(at_once): by_name for at_once, by_name in cells.items()}}


def measure_noop(bench: Bench) -> dict[str, object]:
    """`GET /healthz` idle and while 8 connections run `true` as fast as they can."""
    effort = bench.effort
    targets = [one for one in bench.targets if one not in bench.floors[1:]]
    idle: dict[str, list[Sample]] = {one.name: [] for one in targets}
    loaded: dict[str, list[Sample]] = {one.name: [] for one in targets}
    for turn in range(effort.rounds):
        for target in turned(targets, turn):
            bench.say(f"no-op: round {turn + 1} of {effort.rounds}, {target.name}")
            timing = {"connections": 1, "seconds": effort.seconds, "warmup_sec": effort.warmup_sec}
            idle[target.name].append(run_load(bench.shop, target, NOOP_OPTIONS, **timing))  # type: ignore[arg-type]
            with background_load(bench.shop, target, exec_options(target), NOOP_LOAD_CONNECTIONS):
                loaded[target.name].append(run_load(bench.shop, target, NOOP_OPTIONS, **timing))  # type: ignore[arg-type]
    return {
        "noop": {
            one.name: {"idle": cell_of(idle[one.name], None), "loaded": cell_of(loaded[one.name], idle[one.name])}
            for one in targets
        }
    }


def measure_output(bench: Bench) -> dict[str, object]:
    """1 GiB of one command streamed in frames: whole, how fast against a C copy loop, and in how much memory."""
    body = f'{{"command": ["head", "-c", "{GIB}", "/dev/zero"]}}'
    targets = [one for one in bench.targets if one not in bench.floors[1:]]
    speeds: dict[str, list[float]] = {one.name: [] for one in targets}
    whole = {one.name: True for one in targets}
    growth: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for turn in range(bench.effort.stream_rounds):
        for target in turned(targets, turn):
            bench.say(f"1 GiB of output: round {turn + 1} of {bench.effort.stream_rounds}, {target.name}")
            pids = tree(target.pid)
            before = pss_bytes(pids) or 0
            with peak_pss(pids) as peak:
                sample = run_stream(bench.shop, target, body)
            whole[target.name] &= sample.whole(GIB)
            speeds[target.name].append(sample.stdout_bytes / sample.seconds / 1e6)
            if peak.samples and before:
                peaks[target.name] = max(peaks.get(target.name, 0), peak.pss_bytes)
                growth[target.name] = max(growth.get(target.name, 0), peak.pss_bytes - before)
    floor = speeds.get("floor", [])
    return {
        "output": {
            one.name: {
                "whole": whole[one.name],
                "mb_per_sec": median(speeds[one.name]),
                "ratio": ratio_of(speeds[one.name], floor) if floor and one.name != "floor" else None,
                "peak_pss_bytes": peaks.get(one.name),
                "pss_growth_bytes": growth.get(one.name),
            }
            for one in targets
        }
    }


def measure_memory(bench: Bench) -> dict[str, object]:
    """PSS of a fresh executor with its helpers, idle; and of the one that has had all the load so far."""
    bench.say("memory: a fresh executor")
    with executor_server(bench.shop, bench.executor_argv) as fresh:
        run_count(bench.shop, fresh, exec_options(fresh), connections=1, count=20)
        time.sleep(SETTLE_SEC)
        pids = tree(fresh.pid)
        idle = pss_bytes(pids)
    used = pss_bytes(tree(bench.executor.pid)) if bench.executor is not None else None
    return {"memory": {"idle_pss_bytes": idle, "processes": len(pids), "after_load_pss_bytes": used}}


def measure_start(bench: Bench) -> dict[str, object]:
    """From starting the process to the first answer of `/healthz`, against an interpreter that does nothing."""
    bare_ms: list[float] = []
    executor_ms: list[float] = []
    for turn in range(bench.effort.start_rounds):
        bench.say(f"start: round {turn + 1} of {bench.effort.start_rounds}")
        began = time.monotonic()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True, timeout=60)
        bare_ms.append((time.monotonic() - began) * 1e3)
        began = time.monotonic()
        with executor_server(bench.shop, bench.executor_argv, ready=False) as target:
            wait_until_ready(target, None, 60)
            executor_ms.append((time.monotonic() - began) * 1e3)
    return {
        "start": {
            "executor_ms": median(executor_ms),
            "best_ms": min(executor_ms),
            "bare_python_ms": median(bare_ms),
            "ratio": ratio_of(executor_ms, bare_ms),
        }
    }


def measure_thousand(bench: Bench) -> dict[str, object]:
    """1,000 x `sleep 1; echo N` at once, while a health check goes out every 20 ms."""
    answers: dict[str, object] = {}
    for target in (bench.executor, bench.manager):
        if target is None:
            continue
        bench.say(f"{THOUSAND} commands at once: {target.name}")
        checks: list[Sample] = []
        with paced_noop(bench.shop, target, 20, checks):
            sample = run_count(
                bench.shop, target, exec_options(target, '{"command": "sleep 1; echo {n}"}', '"stdout":"{n}\\n"'),
                connections=THOUSAND, count=THOUSAND,
            )  # fmt: skip
        answers[target.name] = {
            "commands": sample.requests,
            "wrong": sample.errors,
            "first_error": sample.first_error,
            "seconds": sample.seconds,
            "health_checks": checks[0].requests,
            "health_errors": checks[0].errors,
            "health_p50_ms": checks[0].p50_us / 1e3,
            "health_p99_ms": checks[0].p99_us / 1e3,
        }
    if not answers:
        raise CannotMeasure("neither executor nor manager runs")
    return {"thousand": answers}


PARTS: Final[dict[str, tuple[Callable[[Bench], dict[str, object]], str]]] = {
    "exec": (measure_exec, "`true` at 1, 8 and 64 at once on floor, executor and manager"),
    "bash": (measure_bash, "`bash -c 'echo hi'` at 1 and 8 at once"),
    "noop": (measure_noop, "GET /healthz idle and under full exec load"),
    "output": (measure_output, "1 GiB of output streamed: whole, speed, memory meanwhile"),
    "memory": (measure_memory, "PSS of the idle executor with its helpers"),
    "start": (measure_start, "time from process start to the first answer"),
    "thousand": (measure_thousand, "1,000 x `sleep 1; echo N` at once, health checks meanwhile"),
}
