"""Bytes in bulk: a command's output in frames and as it is, files up and down, each against a copy loop in C."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Final

from benchmarks.harness.bench import Bench, ratio_of, turned
from benchmarks.harness.load import (
    BulkSample,
    download_options,
    raw_options,
    run_bulk,
    run_stream,
    upload_options,
)
from benchmarks.harness.memory import peak_pss, pss_bytes, tree
from benchmarks.harness.servers import CannotMeasure

GIB: Final = 1 << 30
FILE_BYTES: Final = 256 << 20
FILE_NAME: Final = "bench"
GIB_BODY: Final = json.dumps({"command": ["head", "-c", str(GIB), "/dev/zero"]})
FIRST_BODY: Final = json.dumps({"command": ["echo", "x"]})


def measure_output(bench: Bench) -> dict[str, object]:
    """1 GiB of one command streamed in frames: whole, how fast against a C copy loop, and in how much memory."""
    targets = [one for one in bench.targets if one not in bench.floors[1:]]
    speeds: dict[str, list[float]] = {one.name: [] for one in targets}
    whole = {one.name: True for one in targets}
    growth: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for turn in range(bench.effort.stream_rounds):
        for target in turned(targets, turn):
            bench.say(f"1 GiB in frames: round {turn + 1} of {bench.effort.stream_rounds}, {target.name}")
            pids = tree(target.pid)
            before = pss_bytes(pids) or 0
            with peak_pss(pids) as peak:
                sample = run_stream(bench.shop, target, GIB_BODY)
            if not sample.whole(GIB):
                bench.say(f"{target.name}: not whole: {sample}")
                whole[target.name] = False
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


def measure_raw(bench: Bench) -> dict[str, object]:
    """1 GiB of one command's output as it is, and the time to the first byte of a short one."""
    targets = [one for one in (bench.floors[0], bench.executor, bench.peer("go")) if one is not None]
    for target in targets:  # whoever cannot is told of at once, not after minutes
        if (sample := run_bulk(bench.shop, target, raw_options(target, FIRST_BODY, 2))).errors:
            raise CannotMeasure(f"{target.name} gives no raw output: {sample.first_error}")
    whole: dict[str, list[BulkSample]] = {one.name: [] for one in targets}
    first: dict[str, list[BulkSample]] = {one.name: [] for one in targets}
    effort = bench.effort
    for turn in range(effort.rounds):
        for target in turned(targets, turn):
            bench.say(f"first byte: round {turn + 1} of {effort.rounds}, {target.name}")
            options = raw_options(target, FIRST_BODY, 2)
            first[target.name].append(run_bulk(bench.shop, target, options, count=effort.first_bytes))
    for turn in range(effort.stream_rounds):
        for target in turned(targets, turn):
            bench.say(f"1 GiB raw: round {turn + 1} of {effort.stream_rounds}, {target.name}")
            whole[target.name].append(run_bulk(bench.shop, target, raw_options(target, GIB_BODY, GIB)))
    floor_first = [one.first_byte_p50_us for one in first["floor"]]
    return {
        "raw": {
            one.name: _speeds(whole[one.name], whole["floor"])
            | {
                "first_byte_us": median(sample.first_byte_p50_us for sample in first[one.name]),
                "first_byte_ratio": ratio_of([sample.first_byte_p50_us for sample in first[one.name]], floor_first),
                "first_errors": sum(sample.errors for sample in first[one.name]),
            }
            for one in targets
        }
    }


def measure_files(bench: Bench) -> dict[str, object]:
    """256 MiB into a file and out of it again, on a file system in memory (but the manager's pod, which has a disk)."""
    found = (bench.floors[0], bench.executor, bench.peer("go"), bench.manager)
    targets = [one for one in found if one is not None]
    for target in targets:  # once with a look at every byte, which the rounds are spared
        bench.say(f"files: the bytes come back as they went, {target.name}")
        for options in (upload_options(target, FILE_NAME, FILE_BYTES), download_options(target, FILE_NAME, FILE_BYTES)):
            if (sample := run_bulk(bench.shop, target, options, verify="GET" in options)).errors:
                raise CannotMeasure(f"{target.name} does not keep files: {sample.first_error}")
    up: dict[str, list[BulkSample]] = {one.name: [] for one in targets}
    down: dict[str, list[BulkSample]] = {one.name: [] for one in targets}
    rounds = max(bench.effort.rounds, bench.effort.stream_rounds)
    for turn in range(rounds):
        for target in turned(targets, turn):
            bench.say(f"files: round {turn + 1} of {rounds}, {target.name}")
            up[target.name].append(run_bulk(bench.shop, target, upload_options(target, FILE_NAME, FILE_BYTES)))
            down[target.name].append(run_bulk(bench.shop, target, download_options(target, FILE_NAME, FILE_BYTES)))
    return {
        "files": {
            one.name: {"up": _speeds(up[one.name], up["floor"]), "down": _speeds(down[one.name], down["floor"])}
            for one in targets
        }
    }


def _speeds(samples: Sequence[BulkSample], reference: Sequence[BulkSample]) -> dict[str, object]:
    speeds = [one.mb_per_sec for one in samples]
    return {
        "mb_per_sec": median(speeds),
        "ratio": ratio_of(speeds, [one.mb_per_sec for one in reference]) if samples is not reference else None,
        "errors": sum(one.errors for one in samples),
        "first_error": next((one.first_error for one in samples if one.first_error), ""),
    }
