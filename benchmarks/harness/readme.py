"""The short table in the project's README: figures of the last run that was kept, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.checks import Check

BEGIN: Final = "<!-- measured: begin (benchmarks/bench_exec.py --keep writes what is between) -->"
END: Final = "<!-- measured: end -->"


def short_table(machine: Mapping[str, Any], checks: Sequence[Check], result: str) -> str:
    """Markdown: what has a goal and was measured, and what idle executors use and busy ones leave behind.

    `result` is the kept report's place, relative to the README."""
    rows = [
        f"| {one.name} | {_figure(one)} | {_limit(one, one.must)} | {_limit(one, one.goal)} | {one.verdict} |"
        for one in checks
        if one.value is not None and (one.goal is not None or one.part in ("memory", "leaks"))
    ]
    cores = f"{machine['cores']} cores" if machine["cores"] != 1 else "one core"
    where = (
        f"{cores} of {machine['cpu'] or 'an unknown processor'}, kernel {machine['kernel']}, Python {machine['python']}"
    )
    busy = f"load {machine['load_before']} before it"
    return "\n".join([
        "| | measured | must | goal | reached |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"{machine['date'][:10]}, commit {machine['commit'] or 'unknown'}, {where}, {busy}. "
        f"Whole report: [{result}]({result}).",
    ])  # fmt: skip


def with_table(readme: str, table: str) -> str:
    """The README with the table in its place. Raises ValueError where it has no such place."""
    begin, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return f"{readme[:begin]}\n{table}\n{readme[end:]}"


def write_table(file: Path, table: str) -> None:
    file.write_text(with_table(file.read_text(), table))


def _figure(check: Check) -> str:
    return "" if check.value is None else f"{check.value:.3g} {check.unit}".rstrip()


def _limit(check: Check, value: float | None) -> str:
    return "" if value is None else f"{'≥' if check.at_least else '≤'} {value:g} {check.unit}".rstrip()
