"""What all measurements share: the effort, the targets, and ratios that hold on a busy machine.

Every measurement is interleaved: in every round each alternative is measured once, the order turning. What ran in one
round ran on the same machine in the same seconds, so a ratio is the median of the rounds' ratios; absolute figures are
medians over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from benchmarks.harness.load import Sample
from benchmarks.harness.servers import Target, Workshop


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure."""

    rounds: int
    seconds: float  # of one cell: one target at one concurrency in one round
    warmup_sec: float
    stream_rounds: int
    start_rounds: int
    first_bytes: int  # streamed commands a round
    slow_calls: int  # a round, of what takes a tenth of a second each


QUICK: Final = Effort(
    rounds=3, seconds=0.35, warmup_sec=0.1, stream_rounds=2, start_rounds=3, first_bytes=30, slow_calls=4
)
FULL: Final = Effort(
    rounds=9, seconds=2.0, warmup_sec=0.3, stream_rounds=5, start_rounds=9, first_bytes=100, slow_calls=10
)


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
    peers: list[Target] = field(default_factory=list)
    fresh_pss: dict[str, int | None] = field(default_factory=dict)  # of the peers, before they were asked anything
    executor: Target | None = None
    executor_argv: list[str] = field(default_factory=list)
    manager: Target | None = None
    bundle: Path | None = None  # a ready one; None: it is made

    @property
    def targets(self) -> list[Target]:
        """Floors and ours."""
        return [*self.floors, *(one for one in (self.executor, self.manager) if one is not None)]

    def peer(self, name: str) -> Target | None:
        return next((one for one in self.peers if one.name == name), None)


def turned(items: Sequence[Target], by: int) -> list[Target]:
    at = by % len(items) if items else 0
    return [*items[at:], *items[:at]]


def ratio_of(rounds: Sequence[float], reference: Sequence[float]) -> float | None:
    """The median of the rounds' ratios; None without a round where both are known. One may have fewer rounds, which
    are then the first."""
    ratios = [one / other for one, other in zip(rounds, reference, strict=False) if one and other]
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
