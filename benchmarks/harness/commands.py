"""Commands: alone and many at once, in a session, beside no-ops; ours, the floor's and the peers'."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.harness.awake import processors_awake
from benchmarks.harness.bench import Bench, Cell, cell_of, ratio_of, turned
from benchmarks.harness.load import (
    NOOP_OPTIONS,
    Sample,
    background_load,
    exec_options,
    paced_noop,
    run_count,
    run_load,
)
from benchmarks.harness.servers import CannotMeasure, Target, request

CONCURRENCIES: Final = (1, 8, 64)
BASH_BODY: Final = '{"command": ["bash", "-c", "echo hi"]}'
BASH_EXPECT: Final = '"stdout":"hi\\n"'
ECHO_BODY: Final = '{"command": "echo hi"}'
NOOP_LOAD_CONNECTIONS: Final = 8
THOUSAND: Final = 1000
SPARE_AFTER_SEC: Final = 4.0

Samples = dict[int, dict[str, list[Sample]]]


def exec_samples(
    bench: Bench, what: str, targets: Sequence[Target], concurrencies: Sequence[int],
    options: Callable[[Target], list[str]],
) -> Samples:  # fmt: skip
    """By concurrency and target, a sample a round. A peer that takes many seconds for its last answers is measured
    once and then spared, or rather we are."""
    effort, spared = bench.effort, set[tuple[int, str]]()
    seen: dict[int, dict[str, list[Sample]]] = {at_once: {one.name: [] for one in targets} for at_once in concurrencies}
    for turn in range(effort.rounds):
        for at_once in concurrencies:
            for target in turned(targets, turn):
                if (at_once, target.name) in spared:
                    continue
                bench.say(f"{what}: round {turn + 1} of {effort.rounds}, {at_once} at once, {target.name}")
                began = time.monotonic()
                sample = run_load(
                    bench.shop, target, options(target),
                    connections=at_once, seconds=effort.seconds, warmup_sec=effort.warmup_sec,
                )  # fmt: skip
                seen[at_once][target.name].append(sample)
                overtime_sec = time.monotonic() - began - effort.seconds - effort.warmup_sec
                if target in bench.peers and overtime_sec > SPARE_AFTER_SEC:
                    spared.add((at_once, target.name))
    return seen


def cells_of(seen: Samples) -> dict[str, dict[str, Cell]]:
    """The floor is everybody's reference but the manager's, which is the executor."""
    cells: dict[str, dict[str, Cell]] = {}
    for at_once, by_name in seen.items():
        cells[str(at_once)] = {}
        for name, samples in by_name.items():
            reference = by_name.get("executor" if name == "manager" else "floor")
            cells[str(at_once)][name] = cell_of(samples, reference if reference is not samples else None)
    return cells


def leads_of(seen: Samples, peers: Sequence[Target]) -> dict[str, dict[str, dict[str, float | None]]]:
    """How many times faster than each peer the executor is: by the time of one command, and by commands a second."""
    leads: dict[str, dict[str, dict[str, float | None]]] = {}
    for at_once, by_name in seen.items():
        ours = by_name.get("executor")
        for peer in peers if ours else ():
            theirs = by_name[peer.name]
            leads.setdefault(str(at_once), {})[peer.name] = {
                "p50": ratio_of([one.p50_us for one in theirs], [one.p50_us for one in ours or ()]),
                "rate": ratio_of([one.per_sec for one in ours or ()], [one.per_sec for one in theirs]),
            }
    return leads


def measure_exec(bench: Bench) -> dict[str, object]:
    """`true` at 1, 8 and 64 at once on everything there is."""
    seen = exec_samples(bench, "exec true", [*bench.targets, *bench.peers], CONCURRENCIES, exec_options)
    return {"exec": cells_of(seen), "leads": leads_of(seen, bench.peers)}


def measure_bash(bench: Bench) -> dict[str, object]:
    options = lambda target: exec_options(target, BASH_BODY, BASH_EXPECT)  # noqa: E731
    return {"bash": cells_of(exec_samples(bench, "bash -c 'echo hi'", bench.targets, (1, 8), options))}


def _new_session(target: Target, path: str, body: str) -> dict[str, Any]:
    status, answer = request(target, "POST", path, body)
    if status not in (200, 201):
        raise CannotMeasure(f"{target.name} made no session: {status} {answer[:300]}")
    made: dict[str, Any] = json.loads(answer)
    return made


def measure_session(bench: Bench) -> dict[str, object]:
    """`echo hi` in a shell that stays, a no-op of the same server beside it, and SWE-ReX's sessions."""
    effort, seen = bench.effort, dict[str, dict[str, list[Sample]]]()
    calls: dict[str, list[str]] = {}
    ours = [one for one in (bench.executor, bench.manager) if one is not None]
    rex = bench.peer("swe-rex")
    for target in ours:
        id = _new_session(target, target.sessions_path, "{}")["id"]
        path = f"{target.sessions_path}/{id}/exec"
        calls[target.name] = ["--method", "POST", "--path", path, "--body", ECHO_BODY, "--expect", BASH_EXPECT]
    if rex is not None:
        _new_session(rex, "/create_session", '{"session_type": "bash"}')
        body = '{"action_type": "bash", "command": "echo hi"}'
        calls[rex.name] = ["--method", "POST", "--path", "/run_in_session", "--body", body, "--expect", '"output":"hi']
    for turn in range(effort.rounds):
        for target in turned([*ours, *([rex] if rex else [])], turn):
            bench.say(f"session: round {turn + 1} of {effort.rounds}, {target.name}")
            by_kind = seen.setdefault(target.name, {"echo": [], "noop": [], "awake": []})
            if target is rex:
                sample = run_count(bench.shop, target, calls[target.name], connections=1, count=effort.slow_calls)
                by_kind["echo"].append(sample)
                continue
            for kind, options in (("noop", NOOP_OPTIONS), ("echo", calls[target.name])):
                sample = run_load(
                    bench.shop, target, options, connections=1, seconds=effort.seconds, warmup_sec=effort.warmup_sec
                )
                by_kind[kind].append(sample)
            with processors_awake():
                by_kind["awake"].append(run_load(
                    bench.shop, target, calls[target.name], connections=1, seconds=effort.seconds,
                    warmup_sec=effort.warmup_sec,
                ))  # fmt: skip
    theirs = [one.p50_us for one in seen["swe-rex"]["echo"]] if "swe-rex" in seen else []
    return {
        "session": {
            name: {
                "p50_us": median(one.p50_us for one in of["echo"]),
                "best_p50_us": min(one.p50_us for one in of["echo"]),
                "awake_p50_us": median(one.p50_us for one in of["awake"]) if of["awake"] else None,
                "p99_us": median(one.p99_us for one in of["echo"]),
                "noop_p50_us": median(one.p50_us for one in of["noop"]) if of["noop"] else None,
                "above_noop_us": (
                    median(echo.p50_us - noop.p50_us for echo, noop in zip(of["echo"], of["noop"], strict=True))
                    if of["noop"] else None
                ),
                "lead": ratio_of(theirs, [one.p50_us for one in of["echo"]]) if theirs else None,
                "errors": sum(one.errors for kind in of.values() for one in kind),
                "first_error": next((one.first_error for one in of["echo"] if one.first_error), ""),
            }
            for name, of in seen.items()
        }
    }  # fmt: skip


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
