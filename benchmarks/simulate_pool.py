"""How large should a warm pool be? Tries sizes on claims that are made up, or that you recorded, and on no pods at all.

The sizes come from the manager's own code, manager/services/pool_sizing.py. A claim takes the steps that it takes in a
manager: it has a ready pod at once, or waits for its turn and then has what the pool has, or a pod that is made for it.
Only pods are made up: how long each takes to start is drawn by chance, the same in every run with the same --seed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # started as a file, the tree's root is not where imports are looked for
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import pool_arrivals
from benchmarks.harness.pool_chart import picture
from benchmarks.harness.pool_simulation import Outcome, Simulation, Starts
from manager.model import PoolSize

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = ("poisson", "bursts", "diurnal")
EXAMPLES = """\
examples:
  simulate_pool.py                                     the three shapes, fixed and elastic pools, one table each
  simulate_pool.py --arrivals poisson --rate 45 --hours 0.2 --settle 60 --fixed 100,200 --elastic 2:300
  simulate_pool.py --arrivals claims.csv --start 8 --start-slow 30      your own claims, slow nodes
  simulate_pool.py --arrivals bursts --elastic 2:64:0.7:600 --elastic 2:64:0.7:3600 --svg pools.svg

how to read the table:
  pods   pod-hours an hour: what stood ready or was starting for nobody, on average. What a pool costs
  most   of them at any time
  hit    the share of claims that found a ready pod
  p50, p99, most   seconds that claims waited for their pod: 0 where it was ready
A claim's own time (some milliseconds) comes on top. A good pool has a small p99 for few pods; a fixed one that is as
good as an elastic one was chosen by somebody who knew what would come.

a file of claims: the first column is the time, in seconds or as 2026-01-31T12:00:00Z; a heading is left out.
"""


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arrivals", action="append", metavar="SHAPE",
        help="poisson, bursts, diurnal or a CSV file; may be given more than once (default: the three shapes)",
    )  # fmt: skip
    parser.add_argument("--hours", type=_positive, help="how long (default: 4; diurnal: 24, which is one day)")
    parser.add_argument(
        "--rate", type=_positive, help="claims a second (default: 1; bursts: 0.1 between them; diurnal: 1 at noon)"
    )
    parser.add_argument("--burst-size", type=int, default=60, metavar="N", help="claims in a burst (default: 60)")
    parser.add_argument(
        "--burst-every", type=_positive, default=900, metavar="SEC", help="on average, by chance (default: 900)"
    )
    parser.add_argument(
        "--burst-width", type=_positive, default=30, metavar="SEC", help="in which a burst's claims come (default: 30)"
    )
    parser.add_argument("--start", type=_positive, default=2.0, metavar="SEC",
                        help="half of all pods start within this (default: 2: their nodes have the image)")  # fmt: skip
    parser.add_argument("--start-slow", type=_positive, default=3.0, metavar="SEC",
                        help="one in twenty takes this or longer (default: 3)")  # fmt: skip
    parser.add_argument("--together", type=int, default=40, metavar="N",
                        help="pods that can start at once: some 2 for each node (default: 40)")  # fmt: skip
    parser.add_argument("--cold-together", type=int, default=4, metavar="N",
                        help="pods made at once for claims that found none (default: 4, as a manager)")  # fmt: skip
    parser.add_argument(
        "--settle", type=float, default=0.0, metavar="SEC", help="leave claims of the first so many seconds out"
    )
    parser.add_argument("--fixed", default="2,4,8,16,32,64", help='fixed sizes (default: 2,4,8,16,32,64; "" for none)')
    parser.add_argument("--elastic", action="append", metavar="MIN:MAX[:UTILISATION[:SHRINK_SEC]]",
                        help="may be given more than once (default: 2:64 at 0.9, 0.7, 0.5; 0.7 with 3600)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it")
    parser.add_argument("--keep", action="store_true", help="write table and picture to benchmarks/results/")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"must be over 0, not {text}")
    return value


def fixed(text: str) -> list[PoolSize]:
    """Raises ValueError."""
    sizes = [int(part) for part in text.split(",") if part.strip()]
    if any(size < 0 for size in sizes):
        raise ValueError(f"--fixed must be numbers of pods, not {text!r}")
    return [PoolSize(min=size, max=size) for size in sizes]


def elastic(text: str) -> PoolSize:
    """Raises ValueError."""
    parts = text.split(":")
    if not 2 <= len(parts) <= 4:
        raise ValueError(
            f"--elastic must be MIN:MAX, MIN:MAX:UTILISATION or MIN:MAX:UTILISATION:SHRINK_SEC, not {text!r}"
        )
    size = PoolSize(min=int(parts[0]), max=int(parts[1]))
    share = float(parts[2]) if len(parts) > 2 else size.utilisation
    shrink_sec = float(parts[3]) if len(parts) > 3 else size.shrink_sec
    if not (0 <= size.min < size.max and 0.1 <= share <= 1 and 10 <= shrink_sec <= 86_400):
        raise ValueError(f"--elastic {text}: needs MIN < MAX, a utilisation from 0.1 to 1, 10 to 86400 seconds")
    return PoolSize(min=size.min, max=size.max, utilisation=share, shrink_sec=shrink_sec)


def named(size: PoolSize) -> str:
    if size.min == size.max:
        return f"fixed {size.min}"
    return f"{size.min} to {size.max}, {size.utilisation:g}, {size.shrink_sec:.0f} s"


def arrivals(shape: str, asked: argparse.Namespace) -> tuple[str, list[float]]:
    """What it is called, and seconds. Raises ValueError and OSError."""
    rng = random.Random(asked.seed)
    hours = asked.hours or (24.0 if shape == "diurnal" else 4.0)
    rate = asked.rate or (0.1 if shape == "bursts" else 1.0)
    made: dict[str, tuple[str, Callable[[], list[float]]]] = {
        "poisson": (f"{rate:g} claims a second", partial(pool_arrivals.poisson, rng, hours, rate)),
        "bursts": (
            f"{asked.burst_size} within {asked.burst_width:g} s, every {asked.burst_every:g} s or so",
            partial(
                pool_arrivals.bursts, rng, hours, rate,
                size=asked.burst_size, every_sec=asked.burst_every, width_sec=asked.burst_width,
            ),
        ),
        "diurnal": (f"a day of {hours:g} hours, {rate:g} claims a second at noon",
                    partial(pool_arrivals.diurnal, rng, hours, rate)),
    }  # fmt: skip
    if shape not in made:
        return Path(shape).name, pool_arrivals.from_csv(Path(shape))
    words, make = made[shape]
    return words, make()


def table(name: str, claims: int, outcomes: Sequence[Outcome]) -> str:
    lines = [
        f"{name} ({claims} claims)",
        f"  {'pool':28}{'pods':>8}{'most':>6}{'hit':>9}{'p50':>8}{'p99':>8}{'most':>8}",
    ]
    for one in outcomes:
        waits = "".join(f"{one.wait(share):8.2f}" for share in (0.5, 0.99, 1.0))
        lines.append(f"  {one.name:28}{one.pods:8.2f}{one.largest:6}{one.hit_share:9.2%}{waits}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    asked = parser.parse_args(arguments)
    starts = Starts(median_sec=asked.start, slow_sec=asked.start_slow, together=asked.together)
    try:
        sizes = fixed(asked.fixed)
        sizes += [elastic(text) for text in asked.elastic or ("2:64:0.9", "2:64", "2:64:0.5", "2:64:0.7:3600")]
        if asked.start_slow < asked.start or min(asked.together, asked.cold_together, asked.burst_size) < 1:
            raise ValueError(
                "--start-slow is at least --start; --together, --cold-together and --burst-size at least 1"
            )
        told = [arrivals(shape, asked) for shape in asked.arrivals or SHAPES]
    except (ValueError, OSError) as why:
        parser.error(str(why))
    rows = []
    given = " ".join(word for word in (sys.argv[1:] if arguments is None else arguments) if word != "--keep")
    text = (
        f"$ simulate_pool.py {given}".rstrip() + "\n"
        f"starts: half within {starts.median_sec:g} s, one in twenty over {starts.slow_sec:g} s, "
        f"{starts.together} at once; cold {asked.cold_together} at once; seed {asked.seed}\n"
    )
    print(text)
    drawn = next((size for size in sizes if size.min != size.max and size.utilisation == 0.7), sizes[-1])
    for name, times in told:
        outcomes = [
            Simulation(
                named(size), size, starts, cold_together=asked.cold_together, seed=asked.seed,
                settle_sec=asked.settle, moments=size == drawn,
            ).run(times)
            for size in sizes
        ]  # fmt: skip
        part = table(name, len(times), outcomes)
        print(part)
        text += "\n" + part
        rows.append((name, times, outcomes))
    files = [asked.svg] if asked.svg else []
    if asked.keep:
        base = RESULTS / f"pool-{datetime.now(UTC):%Y-%m-%d}"
        base.with_suffix(".txt").write_text(text)
        files.append(base.with_suffix(".svg"))
    for file in files:
        file.write_text(picture(rows))
        print(f"picture: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
