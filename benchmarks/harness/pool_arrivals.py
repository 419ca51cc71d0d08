"""When sandboxes are asked for: shapes that are made up, and times that were recorded."""

from __future__ import annotations

import csv
import math
import random
from datetime import UTC, datetime
from pathlib import Path


def poisson(rng: random.Random, hours: float, rate: float) -> list[float]:
    """Seconds from the start, in order; `rate` a second, evenly and by chance."""
    times, at = [], 0.0
    while rate > 0 and (at := at + rng.expovariate(rate)) < hours * 3600:
        times.append(at)
    return times


def bursts(
    rng: random.Random, hours: float, rate: float, *, size: int, every_sec: float, width_sec: float
) -> list[float]:
    """The same, and a burst of `size` within `width_sec` every `every_sec` on average."""
    times = poisson(rng, hours, rate)
    for start in poisson(rng, hours, 1 / every_sec):
        times += (at for _ in range(size) if (at := start + rng.uniform(0.0, width_sec)) < hours * 3600)
    return sorted(times)


def diurnal(rng: random.Random, hours: float, rate: float) -> list[float]:
    """A day: `rate` a second at its middle, a twentieth of it at night; the day is as long as `hours`."""
    seconds, times = hours * 3600, []
    for at in poisson(rng, hours, rate):
        height = 0.05 + 0.95 * (0.5 - 0.5 * math.cos(2 * math.pi * at / seconds)) ** 2
        if rng.random() < height:
            times.append(at)
    return times


def from_csv(path: Path) -> list[float]:
    """The first column of `path`, seconds or ISO 8601; a first line that is neither is a heading. Raises ValueError."""
    times = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row or not row[0].strip():
                continue
            at = _moment(row[0].strip())
            if at is not None:
                times.append(at)
            elif times or number > 1:
                raise ValueError(f"{path}: line {number}: {row[0]!r} is neither seconds nor a time such as "
                                 "2026-01-31T12:00:00Z")  # fmt: skip
    if not times:
        raise ValueError(f"{path}: there are no times in it")
    first = min(times)
    return sorted(at - first for at in times)


def _moment(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        return seconds if math.isfinite(seconds) else None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
