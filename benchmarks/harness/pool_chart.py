"""A picture of simulated pools: what waiting costs, and how the size went over time. Plain SVG."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from html import escape

from benchmarks.harness.pool_simulation import Outcome

WIDTH, HEIGHT, GAP, LEFT, TOP, BOTTOM = 460, 250, 70, 60, 46, 44
FIXED, ELASTIC, CLAIMS = "#8a6d3b", "#1f6feb", "#c9d1d9"
Place = Callable[[float], float]


def picture(rows: Sequence[tuple[str, Sequence[float], Sequence[Outcome]]]) -> str:
    """A row for each kind of arrivals: its name, when claims came, and the pools that were tried on them."""
    wide, high = 2 * (WIDTH + GAP) + LEFT, len(rows) * (HEIGHT + TOP + BOTTOM)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for number, (name, arrivals, outcomes) in enumerate(rows):
        y = number * (HEIGHT + TOP + BOTTOM) + TOP
        parts += _costs(LEFT, y, name, outcomes)
        shown = next((outcome for outcome in outcomes if outcome.moments), None)
        if shown is not None:
            parts += _course(LEFT + WIDTH + GAP, y, shown, arrivals)
    return "\n".join([*parts, "</svg>", ""])


def _costs(x: float, y: float, name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """The wait of the slowest hundredth by the pods that stood ready; further down and to the left is better."""
    most_pods = max([1.0, *(outcome.pods for outcome in outcomes)]) * 1.15
    most_wait = max([0.1, *(outcome.wait(0.99) for outcome in outcomes)]) * 1.1
    across: Place = lambda pods: x + WIDTH * math.log1p(pods) / math.log1p(most_pods)  # noqa: E731
    up: Place = lambda wait: y + HEIGHT - HEIGHT * wait / most_wait  # noqa: E731
    parts = [_text(x, y - 24, f"{name}: p99 wait by pods that stood ready", bold=True)]
    parts += _frame(x, y, "pod-hours an hour", [(across(n), f"{n}") for n in _doubling(most_pods)],
                    [(up(wait), f"{wait:g} s") for wait in _even(most_wait)])  # fmt: skip
    fixed = sorted((outcome for outcome in outcomes if outcome.size.min == outcome.size.max), key=lambda one: one.pods)
    parts.append(_line([(across(one.pods), up(one.wait(0.99))) for one in fixed], FIXED))
    rise = 0
    for one in outcomes:
        elastic = one.size.min != one.size.max
        at = across(one.pods), up(one.wait(0.99))
        parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4.5" fill="{ELASTIC if elastic else FIXED}"/>')
        if elastic:  # a fixed size is where its number is on the axis
            rise += 14  # those that are close to each other can still be read
            label = f"u={one.size.utilisation:g}, {one.size.shrink_sec:.0f} s"
            parts.append(f'<path d="M{at[0]:.1f},{at[1] - 5:.1f}v-{rise}" stroke="{ELASTIC}" stroke-width="0.5"/>')
            parts.append(_text(at[0] + 3, at[1] - rise, label, small=True, fill=ELASTIC))
    parts.append(_text(x + WIDTH - 8, y + 18, "fixed size", anchor="end", fill=FIXED))
    parts.append(
        _text(x + WIDTH - 8, y + 34, "follows the claims (u: utilisation, time to shrink)", anchor="end", fill=ELASTIC)
    )
    return parts


def _course(x: float, y: float, outcome: Outcome, arrivals: Sequence[float]) -> list[str]:
    """Wanted and ready pods, and claims, over time."""
    end = max(outcome.moments[-1][0], 1.0)
    step = end / len(outcome.moments)
    claims = [bisect_right(arrivals, at) - bisect_right(arrivals, at - step) for at, _, _ in outcome.moments]
    most = max([1, *(wanted for _, _, wanted in outcome.moments)]) * 1.15
    most_claims = max([1, *claims]) * 1.6
    across: Place = lambda at: x + WIDTH * at / end  # noqa: E731
    up: Place = lambda pods: y + HEIGHT - HEIGHT * min(pods, most) / most  # noqa: E731
    hours = end / 3600
    parts = [_text(x, y - 24, f"{outcome.name}, over time", bold=True)]
    bars = [
        f"M{across(at):.0f},{y + HEIGHT}v-{HEIGHT * many / most_claims:.0f}"
        for (at, _, _), many in zip(outcome.moments, claims, strict=True)
    ]
    parts.append(f'<path d="{"".join(bars)}" stroke="{CLAIMS}" stroke-width="2"/>')
    parts += _frame(x, y, "hours", [(across(at * 3600), f"{at:g}") for at in _even(hours)],
                    [(up(pods), f"{pods:g}") for pods in _even(most)])  # fmt: skip
    parts.append(_line([(across(at), up(ready)) for at, ready, _ in outcome.moments], "#2da44e"))
    parts.append(_line([(across(at), up(wanted)) for at, _, wanted in outcome.moments], ELASTIC))
    for number, (words, colour) in enumerate((("wanted", ELASTIC), ("ready", "#2da44e"), ("claims", "#8c959f"))):
        parts.append(_text(x + WIDTH - 8 - 70 * number, y - 8, words, anchor="end", fill=colour))
    return parts


def _frame(x: float, y: float, below: str, across: list[tuple[float, str]], up: list[tuple[float, str]]) -> list[str]:
    parts = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#57606a"/>']
    for at, words in across:
        parts.append(f'<path d="M{at:.1f},{y + HEIGHT}v4" stroke="#57606a"/>')
        parts.append(_text(at, y + HEIGHT + 17, words, anchor="middle", small=True))
    for at, words in up:
        parts.append(f'<path d="M{x},{at:.1f}h{WIDTH}" stroke="#d0d7de" stroke-width="0.6"/>')
        parts.append(_text(x - 6, at + 4, words, anchor="end", small=True))
    return [*parts, _text(x + WIDTH / 2, y + HEIGHT + 33, below, anchor="middle", small=True)]


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>'


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, small: bool = False, fill: str = ""
) -> str:
    style = ' font-weight="bold"' * bold + ' font-size="11"' * small + (f' fill="{fill}"' if fill else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def _doubling(most: float) -> list[int]:
    return [0, *(1 << power for power in range(int(math.log2(most)) + 1))]


def _even(most: float) -> list[float]:
    """Round numbers from 0 up to `most`, five at the most."""
    step = 10 ** math.floor(math.log10(most))
    while most / step > 5:
        step *= 2
    while most / step < 2:
        step /= 2
    return [step * number for number in range(int(most / step) + 1)]
