"""How long does a new task wait for its first command's answer, where its pod is warm, on a real Kubernetes API server?

Arrivals are open-loop: each task comes at its own random moment, whether or not those before it have been answered, and
its time is counted from that moment on. Everything is real but the kubelet: see `harness/cluster.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles

if __name__ == "__main__":  # started as a file, the tree's root is not where imports are looked for
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import machine
from benchmarks.harness.arrivals import Arrivals, Seen, called
from benchmarks.harness.cluster import (
    NoControlPlane,
    World,
    memory_bytes,
    patches_sec,
    processor_sec,
    serving,
    world,
)
from tests.support.cluster.audit import AuditLog

PUBLISHED = {"p50_ms": 92.0, "p99_ms": 376.0, "rate": 45.0, "writes": 23.0}  # of the best published figures
MUST_P50_MS, MUST_P99_MS, MUST_WRITES = 40.0, 150.0, 2.0
MUST_MEMORY_BYTES, MUST_RELIST_SEC = 300 << 20, 2.0
BEFORE_SEC = 2.0  # between the last pod's word and the first arrival


@dataclass
class Figures:
    claims: int
    failed: int
    warm: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    most_ms: float
    bound_p50_ms: float  # the next command of the same tasks, at the same rate
    bound_p99_ms: float
    server_p50_ms: float  # of the patch, by the API server's own word
    server_p99_ms: float
    writes: float  # to the API server, for each claim
    manager_ms: float  # processor time of the manager, for each claim and its command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="arrivals a second (50)")
    parser.add_argument("--pods", type=int, default=100, help="claims in a round: so many executors run (100)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--seed", type=int, default=7, help="of the moments of arrival")
    parser.add_argument("--crowd", action="store_true", help="also among 1,000 warm pods and 5,000 sandboxes")
    parser.add_argument("--crowd-warm", type=int, default=1000)
    parser.add_argument("--crowd-sandboxes", type=int, default=5000)
    parser.add_argument(
        "--load-now", action="store_true", help="executors load all of themselves right after their claim, as always"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where a must does not hold")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started too
    try:
        with tempfile.TemporaryDirectory(prefix="sojourn-claims-") as name:
            directory = Path(name)
            directory.chmod(0o711)  # commands have another user
            return asyncio.run(_measure(flags, directory))
    except NoControlPlane as why:
        print(why, file=sys.stderr)
        return 2


async def _measure(flags: argparse.Namespace, directory: Path) -> int:
    rounds = 2 if flags.quick else flags.rounds
    report: dict[str, object] = {"machine": machine.describe(), "rate": flags.rate, "published": PUBLISHED}
    async with world(directory, flags.crowd_warm if flags.crowd else 0, load_now=flags.load_now) as made:
        alone = await _rounds(made, flags, rounds)
        musts = _musts(alone)
        report["alone"] = asdict(alone)
        if flags.crowd:
            await made.ballast(flags.crowd_warm, flags.crowd_sandboxes)
            crowd, memory, relist_sec = await _crowd(made, flags, rounds)
            report["crowd"] = asdict(crowd) | {"memory_bytes": memory, "relist_sec": relist_sec}
            musts |= {
                "among many: the manager takes under 300 MiB": memory < MUST_MEMORY_BYTES,
                "among many: a list of all pods takes under 2 s": relist_sec < MUST_RELIST_SEC,
                "among many: p99 at most a quarter more, or 150 ms": (
                    crowd.p99_ms <= max(1.25 * alone.p99_ms, MUST_P99_MS)
                ),
            }
    report["musts"] = musts
    print(json.dumps(report, indent=2) if flags.json else _table(report))
    return int(flags.check and not all(musts.values()))


async def _crowd(made: World, flags: argparse.Namespace, rounds: int) -> tuple[Figures, int, float]:
    async with serving(made) as stack:
        figures = await _rounds_on(made, flags, rounds)
        memory = memory_bytes(stack.process.pid)
    return figures, memory, min([await made.relist_sec() for _ in range(3)])


async def _rounds(made: World, flags: argparse.Namespace, rounds: int) -> Figures:
    async with serving(made):
        return await _rounds_on(made, flags, rounds)


async def _rounds_on(made: World, flags: argparse.Namespace, rounds: int) -> Figures:
    assert made.manager is not None
    assert made.plane.audit_log is not None
    audit = AuditLog(made.plane.audit_log, made.admin)
    pid = made.manager.process.pid
    times: list[float] = []
    bound: list[float] = []
    server: list[float] = []
    outcomes: Counter[str] = Counter()
    writes, used_sec = 0, 0.0
    rng = random.Random(flags.seed)
    for number in range(rounds + 1):  # the first is for warming up
        count = flags.pods if number else min(20, flags.pods)
        await made.warm(count)
        await made.known_to_manager(count)
        _say(f"round {number} of {rounds}: {count} warm pods")
        await asyncio.sleep(BEFORE_SEC)
        mark, before_sec = audit.mark(), processor_sec(pid)
        tasks = [f"r{rng.getrandbits(40):x}-{index}" for index in range(count)]
        claimed = await _arrivals(made, tasks, flags.rate, rng)
        used = processor_sec(pid) - before_sec
        again = await _arrivals(made, tasks, flags.rate, rng)
        if number:
            times += [seen.ms for seen in claimed]
            bound += [seen.ms for seen in again]
            outcomes += Counter(seen.outcome for seen in claimed)
            server += [1000 * seconds for seconds in await patches_sec(made, mark)]
            written = await audit.writes_of(made.account.user, mark)
            writes += sum(times for (_, what), times in written.items() if what.startswith("pods"))
            used_sec += used
        await made.clear()
    made_of = quantiles(times, n=100, method="inclusive")
    of_bound = quantiles(bound, n=100, method="inclusive")
    of_server = quantiles(server, n=100, method="inclusive")
    return Figures(
        claims=len(times),
        failed=len(times) - outcomes["warm"] - outcomes["cold"],
        warm=outcomes["warm"],
        p50_ms=made_of[49],
        p90_ms=made_of[89],
        p99_ms=made_of[98],
        most_ms=max(times),
        bound_p50_ms=of_bound[49],
        bound_p99_ms=of_bound[98],
        server_p50_ms=of_server[49],
        server_p99_ms=of_server[98],
        writes=writes / len(times),
        manager_ms=1000 * used_sec / len(times),
    )


async def _arrivals(made: World, tasks: Sequence[str], rate: float, rng: random.Random) -> list[Seen]:
    assert made.manager is not None
    address, seed = made.manager.address, rng.getrandbits(40)
    said = Arrivals(address=address, headers=made.headers, tasks=list(tasks), rate=rate, seed=seed)
    return await called(said)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _musts(found: Figures) -> dict[str, bool]:
    return {
        f"p50 at most {MUST_P50_MS:g} ms": found.p50_ms <= MUST_P50_MS,
        f"p99 at most {MUST_P99_MS:g} ms": found.p99_ms <= MUST_P99_MS,
        f"at most {MUST_WRITES:g} writes to the API server for each claim": found.writes <= MUST_WRITES,
        "every claim found a warm pod, and its command ran": found.warm == found.claims,
    }


def _table(report: dict[str, object]) -> str:
    lines = [
        f"first command's answer of a new task, {report['rate']:g} arrivals a second, open-loop",
        f"{'':<12}{'claims':>8}{'p50':>10}{'p90':>10}{'p99':>10}{'most':>10}{'writes':>8}  parts",
        f"{'published':<12}{'':>8}{PUBLISHED['p50_ms']:>7.1f} ms{'':>10}{PUBLISHED['p99_ms']:>7.1f} ms{'':>10}"
        f"{PUBLISHED['writes']:>8.1f}  at {PUBLISHED['rate']:g} a second",
    ]
    for name in ("alone", "crowd"):
        found = report.get(name)
        if isinstance(found, dict):
            lines.append(
                f"{name:<12}{found['claims']:>8}{found['p50_ms']:>7.1f} ms{found['p90_ms']:>7.1f} ms"
                f"{found['p99_ms']:>7.1f} ms{found['most_ms']:>7.1f} ms{found['writes']:>8.2f}  "
                f"API server {found['server_p50_ms']:.1f}/{found['server_p99_ms']:.1f} ms, a bound task's command "
                f"{found['bound_p50_ms']:.1f}/{found['bound_p99_ms']:.1f} ms, manager {found['manager_ms']:.1f} ms CPU"
            )
            if found["failed"]:
                lines.append(f"{'':<12}{found['failed']:>8} of them failed")
            if "memory_bytes" in found:
                memory, relist = found["memory_bytes"] / (1 << 20), found["relist_sec"]
                lines.append(f"{'':<12}the manager takes {memory:.0f} MiB, a list of all pods {relist:.2f} s")
    musts = report["musts"]
    assert isinstance(musts, dict)
    return "\n".join([*lines, *(f"{'holds ' if held else 'FAILS '} {must}" for must, held in musts.items())])


if __name__ == "__main__":
    sys.exit(main())
