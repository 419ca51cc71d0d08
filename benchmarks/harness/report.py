"""Results as a table for people, and what must hold as checks with a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

MiB: Final = 1 << 20
# The executor keeps a window of each stream in memory, whatever the output's length: growth beyond it means a leak.
OUTPUT_GROWTH_MIB: Final = 64.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold. `ok` None: it was not measured in this run."""

    part: str  # of the measurements
    target: str
    name: str
    value: float | None
    limit: float
    unit: str
    ok: bool | None


class Must(msgspec.Struct, frozen=True):
    name: str
    path: tuple[str, ...]  # where its value stands in the results
    limit: float  # at most
    unit: str = "x"
    scale: float = 1.0


MUSTS: Final = (
    Must("exec true at 1: executor p50 / floor", ("exec", "1", "executor", "p50_ratio"), 2.0),
    Must("exec true at 8: executor p50 / floor", ("exec", "8", "executor", "p50_ratio"), 1.6),
    Must("exec true at 64: executor p50 / floor", ("exec", "64", "executor", "p50_ratio"), 1.6),
    Must("exec true at 1: manager p50 / executor", ("exec", "1", "manager", "p50_ratio"), 1.8),
    Must("exec true at 8: manager p50 / executor", ("exec", "8", "manager", "p50_ratio"), 1.8),
    Must("exec true at 64: manager p50 / executor", ("exec", "64", "manager", "p50_ratio"), 1.8),
    Must("no-op under exec load: executor p50 / idle", ("noop", "executor", "loaded", "p50_ratio"), 3.0),
    Must("1 GiB of output: memory growth", ("output", "executor", "pss_growth_bytes"), OUTPUT_GROWTH_MIB, "MiB", MiB),
    Must("idle executor with helpers: PSS", ("memory", "idle_pss_bytes"), 40, "MiB", MiB),
    Must("1,000 at once through the manager: wrong answers", ("thousand", "manager", "wrong"), 0, ""),
    Must("1,000 at once: failed health checks", ("thousand", "manager", "health_errors"), 0, ""),
)  # fmt: skip


def checks_of(results: Mapping[str, Any]) -> list[Check]:
    checks = []
    for must in MUSTS:
        value = _at(results, must.path)
        number = float(value) / must.scale if value is not None else None
        ok = None if number is None else number <= must.limit
        target = "manager" if "manager" in must.path else "executor"
        checks.append(Check(
            part=must.path[0], target=target, name=must.name, value=number, limit=must.limit, unit=must.unit, ok=ok
        ))  # fmt: skip
    for target, output in results.get("output", {}).items():
        lost = 0.0 if output["whole"] else 1.0
        name = f"1 GiB of output: cut ({target})"
        checks.append(Check(part="output", target=target, name=name, value=lost, limit=0, unit="", ok=not lost))
    cells = [
        cell for part in ("exec", "bash") for by_name in results.get(part, {}).values() for cell in by_name.values()
    ]
    if cells:
        wrong = sum(cell["errors"] for cell in cells)
        name = "wrong answers under load"
        checks.append(Check(part="exec", target="all", name=name, value=float(wrong), limit=0, unit="", ok=not wrong))
    return checks


def failed(checks: Sequence[Check], parts: Sequence[str], left_out: Sequence[str]) -> list[Check]:
    """What does not hold, and what should have been measured and was not: a part that broke must not pass."""
    return [
        check
        for check in checks
        if check.ok is False or (check.ok is None and check.part in parts and check.target not in left_out)
    ]


def _at(results: Mapping[str, Any], path: Sequence[str]) -> Any:
    at: Any = results
    for name in path:
        at = at.get(name) if isinstance(at, Mapping) else None
    return at


def table_of(machine: Mapping[str, Any], results: Mapping[str, Any], checks: Sequence[Check]) -> str:
    """The whole report, lines of at most about 110 characters."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rows: list[tuple[str, ...]]
    lines = [
        f"{machine['cores']} cores ({machine['cpu'] or 'unknown'}), kernel {machine['kernel']}, "
        f"Python {machine['python']}, {packages}",
        f"{machine['date']}, commit {machine['commit'] or 'unknown'}, {machine['tier']} tier over "
        f"{machine['transport']}, load before {machine['load_before']}",
    ]
    lines += _load_lines("exec true", results.get("exec", {}))
    lines += _load_lines("bash -c 'echo hi'", results.get("bash", {}))
    if noop := results.get("noop"):
        rows = [
            (name, _us(of["idle"]["p50_us"]), _us(of["idle"]["p99_us"]), _us(of["loaded"]["p50_us"]),
             _us(of["loaded"]["p99_us"]), _ratio(of["loaded"]["p50_ratio"]))
            for name, of in noop.items()
        ]  # fmt: skip
        heads = ("", "idle p50", "p99", "loaded p50", "p99", "loaded/idle")
        lines += _rows("no-op (GET /healthz), idle and under exec load", heads, rows)
    if output := results.get("output"):
        rows = [
            (name, "whole" if of["whole"] else "CUT", f"{of['mb_per_sec']:.0f} MB/s", _ratio(of["ratio"]),
             _mib(of["peak_pss_bytes"]), _mib(of["pss_growth_bytes"]))
            for name, of in output.items()
        ]  # fmt: skip
        lines += _rows("1 GiB of output in frames", ("", "", "speed", "x floor", "peak PSS", "growth"), rows)
    if memory := results.get("memory"):
        fresh, after = _mib(memory["idle_pss_bytes"]), _mib(memory["after_load_pss_bytes"])
        lines += ["", f"idle PSS: {fresh} in {memory['processes']} processes; after this run's load {after}"]
    if start := results.get("start"):
        lines += [
            "",
            f"start to first answer: {start['executor_ms']:.0f} ms (best {start['best_ms']:.0f}), "
            f"{_ratio(start['ratio'])} of `python -I -S -c pass` ({start['bare_python_ms']:.0f} ms)",
        ]
    if thousand := results.get("thousand"):
        rows = [
            (name, str(of["commands"]), str(of["wrong"]), f"{of['seconds']:.2f} s", str(of["health_errors"]),
             f"{of['health_p50_ms']:.1f} ms", f"{of['health_p99_ms']:.1f} ms")
            for name, of in thousand.items()
        ]  # fmt: skip
        lines += _rows(
            "1,000 x `sleep 1; echo N` at once",
            ("", "answers", "wrong", "all within", "health failed", "p50", "p99"), rows,
        )  # fmt: skip
        lines += [f"  {name}: {of['first_error']}" for name, of in thousand.items() if of["first_error"]]
    rows = [
        (check.name, "not measured" if check.value is None else f"{check.value:.4g} {check.unit}".rstrip(),
         f"<= {check.limit:g} {check.unit}".rstrip(), {True: "ok", False: "FAILED", None: "-"}[check.ok])
        for check in checks
    ]  # fmt: skip
    lines += _rows("must", ("", "measured", "limit", ""), rows)
    return "\n".join(lines)


def _load_lines(title: str, cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for at_once, by_name in cells.items():
        for name, cell in by_name.items():
            rows.append((
                at_once, name, _us(cell["p50_us"]), _us(cell["p99_us"]), f"{cell['per_sec']:.0f}",
                _ratio(cell["p50_ratio"]), _ratio(cell["per_sec_ratio"]), str(cell["errors"] or ""),
            ))  # fmt: skip
    heads = ("at once", "", "p50", "p99", "per s", "p50 ratio", "rate ratio", "errors")
    return _rows(f"{title} (ratios: executor to floor, manager to executor)", heads, rows) if rows else []


def _rows(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    whole = [heads, *rows]
    widths = [max(len(row[column]) for row in whole) for column in range(len(heads))]
    out = ["", title]
    for row in whole:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        out.append(("  " + "  ".join(cells)).rstrip())
    return out


def _us(value: float) -> str:
    return f"{value / 1e3:.2f} ms"


def _mib(value: float | None) -> str:
    return "?" if value is None else f"{value / MiB:.1f} MiB"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
