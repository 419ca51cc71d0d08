"""All measurements by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.harness.bench import Bench
from benchmarks.harness.commands import measure_bash, measure_exec, measure_noop, measure_session, measure_thousand
from benchmarks.harness.footprint import measure_bundle, measure_memory, measure_start
from benchmarks.harness.leaks import measure_leaks
from benchmarks.harness.transfers import measure_files, measure_output, measure_raw

PARTS: Final[dict[str, tuple[Callable[[Bench], dict[str, object]], str]]] = {
    "exec": (measure_exec, "`true` at 1, 8 and 64 at once, beside the peers"),
    "bash": (measure_bash, "`bash -c 'echo hi'` at 1 and 8 at once"),
    "noop": (measure_noop, "GET /healthz idle and under full exec load"),
    "session": (measure_session, "`echo` in a stateful session, beside SWE-ReX's"),
    "raw": (measure_raw, "1 GiB of output as raw bytes; time to the first byte"),
    "output": (measure_output, "1 GiB of output in frames: whole, speed, memory meanwhile"),
    "files": (measure_files, "256 MiB into a file and out of it"),
    "bundle": (measure_bundle, "size of the executor as one directory for any image"),
    "memory": (measure_memory, "memory and wake-ups of an idle executor with its helpers"),
    "start": (measure_start, "time from process start to the first answer"),
    "thousand": (measure_thousand, "1,000 x `sleep 1; echo N` at once, health checks meanwhile"),
    "leaks": (measure_leaks, "what 10,000 commands, 500 sessions and 300 terminals leave behind"),
}
