"""What does one project's flood do to another's commands? At most twice its idle p99, and never a refusal (S33).

One whole stack on this machine, two projects, a local pod each. The neighbour runs `true` every 20 ms on one
connection: alone, then beside each flood. Floods are closed-loop, from as many connections as named, as fast as answers
come; they share the processors with all of it. What is checked is the median round.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Final

if __name__ == "__main__":  # started as a file, the tree's root is not where imports are looked for
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import load, machine
from benchmarks.harness.servers import (
    STACK_READY_SEC,
    CannotMeasure,
    Target,
    Workshop,
    free_port,
    provision,
    running,
    stack_env,
    wait_until_ready,
    workshop,
)

MUST: Final = 2.0  # p99 beside a flood to p99 alone
PACE_MS: Final = 20
AHEAD_SEC: Final = 1.0  # a flood runs before it counts
_LIST: Final = ["--method", "GET", "--path", "/api/v1/sandboxes"]
_QUOTA: Final = ["--method", "GET", "--path", "/api/v1/quotas"]
FLOODS: Final[dict[str, tuple[int, list[str] | None]]] = {
    "8 x exec": (8, None), "64 x exec": (64, None), "64 x list": (64, _LIST), "256 x quotas": (256, _QUOTA),
}  # fmt: skip


@dataclass
class Row:
    """Of one kind of flood, a figure for each round; milliseconds."""

    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    refused: int = 0  # of the neighbour's requests: not answered, or not with what they asked for
    flood_per_sec: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement (6)")
    parser.add_argument("--check", action="store_true", help="exit 1 where the must does not hold")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started too
    about = machine.describe()
    try:
        with workshop("tcp") as shop, _stack(shop) as (flooding, neighbour):
            rows = _measured(shop, flooding, neighbour, flags.rounds, flags.seconds)
    except CannotMeasure as why:
        print(why, file=sys.stderr)
        return 2
    alone = median(rows["alone"].p99_ms)
    holds = {name: median(row.p99_ms) <= MUST * alone and not row.refused for name, row in rows.items()}
    if flags.json:
        print(json.dumps({"machine": about, "rows": {name: asdict(row) for name, row in rows.items()}}, indent=2))
    else:
        print(f"{about['date']}, commit {about['commit']}, {about['cores']} cores, load before {about['load_before']}")
        print(f"{'beside':<16}{'p50':>10}{'p99':>10}{'to alone':>10}{'refused':>9}{'flood':>10}")
        for name, row in rows.items():
            flood = f"{median(row.flood_per_sec):.0f}/s" if row.flood_per_sec else "-"
            p50, p99 = median(row.p50_ms), median(row.p99_ms)
            print(
                f"{name:<16}{p50:>7.1f} ms{p99:>7.1f} ms{p99 / alone:>9.1f}x{row.refused:>9}{flood:>10}"
                f"  {'holds' if holds[name] else 'FAILS'}"
            )
    return int(flags.check and not all(holds.values()))


def _measured(shop: Workshop, flooding: Target, neighbour: Target, rounds: int, seconds: float) -> dict[str, Row]:
    rows = {name: Row() for name in ("alone", *FLOODS)}
    paced = [*load.exec_options(neighbour), "--pace-ms", str(PACE_MS)]
    for _ in range(rounds):
        for name, row in rows.items():
            with _flood(shop, flooding, name, seconds + 2 * AHEAD_SEC, row):
                seen = load.run_load(shop, neighbour, paced, connections=1, seconds=seconds, warmup_sec=AHEAD_SEC)
            row.p50_ms.append(seen.p50_us / 1e3)
            row.p99_ms.append(seen.p99_us / 1e3)
            row.refused += seen.errors
    return rows


@contextmanager
def _flood(shop: Workshop, target: Target, name: str, seconds: float, row: Row) -> Iterator[None]:
    if name not in FLOODS:
        yield
        return
    connections, options = FLOODS[name]
    argv = load.argv_of(shop, target, options if options is not None else load.exec_options(target))
    argv += ["--connections", str(connections), "--seconds", str(seconds)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(AHEAD_SEC)
        yield
        out, _ = process.communicate(timeout=load.SPARE_SEC)
        row.flood_per_sec.append(json.loads(out)["per_sec"])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


@contextmanager
def _stack(shop: Workshop) -> Iterator[tuple[Target, Target]]:
    directory = shop.fresh("up", 0o711)
    log, port = directory / "log", str(free_port())
    env = stack_env(directory, port)
    keys = [_key(env, tenant) for tenant in ("flooding", "neighbour")]
    with running([sys.executable, "-m", "manager", "up"], env, log, end=signal.SIGINT) as process:
        targets = [
            Target(
                name="manager", address=("--tcp", port), exec_path="/sandbox/task/bench/exec",
                headers=(f"X-Api-Key: {key}",), pid=process.pid, log=log,
            )
            for key in keys
        ]  # fmt: skip
        wait_until_ready(targets[0], process, STACK_READY_SEC)
        for target in targets:
            provision(target)
        yield targets[0], targets[1]


def _key(env: dict[str, str], tenant: str) -> str:
    """A member's key of a project of its own. Raises CannotMeasure."""
    argv = [sys.executable, "-m", "manager", "keys", "create", "--tenant", tenant, "--project", "bench"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=STACK_READY_SEC, check=False)
    key = next((word for word in done.stdout.split() if word.startswith("sk_")), None)
    if key is None:
        raise CannotMeasure(f"no key could be made: {done.stderr.strip()[-400:]}")
    return key


if __name__ == "__main__":
    sys.exit(main())
