"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.harness.checks import Check, MiB

Row = tuple[str, ...]
BUSY_LOAD: Final = 1.0


def table_of(
    machine: Mapping[str, Any],
    results: Mapping[str, Any],
    checks: Sequence[Check],
    skipped: Mapping[str, str],
) -> str:
    """The whole report, lines of at most about 110 characters."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        f"{machine['cores']} cores ({machine['cpu'] or 'unknown'}), kernel {machine['kernel']}, "
        f"Python {machine['python']}, {packages}",
        f"{machine['date']}, commit {machine['commit'] or 'unknown'}, {machine['tier']} tier over "
        f"{machine['transport']}, load before {machine['load_before']}",
    ]
    if machine["load_before"] > BUSY_LOAD:
        lines += [
            "BUSY: others worked here. The executor's and the floor's commands give way to other work (nice 10), the",
            "peers' compete with it; absolute figures are far off. Do not keep this run.",
        ]
    lines += _load_lines("exec true", results.get("exec", {}), results.get("leads", {}))
    lines += _load_lines("bash -c 'echo hi'", results.get("bash", {}), {})
    for part in _TABLES:
        if part in results:
            title, heads, rows = _TABLES[part](results[part])
            lines += _rows(title, heads, rows)
            lines += [f"  {name}: {text}" for name, text in _first_errors(results[part])]
    lines += _rows("must and goal", ("", "measured", "must", "goal", ""), [_check_row(check) for check in checks])
    lines += [line for name, why in skipped.items() for line in ("", f"not measured: {name}: {why}")]
    return "\n".join(lines)


def _check_row(check: Check) -> Row:
    sign = ">=" if check.at_least else "<="
    goal = "" if check.goal is None else f"{sign} {check.goal:g} {check.unit}".rstrip()
    value = "-" if check.value is None else f"{check.value:.4g} {check.unit}".rstrip()
    return check.name, value, f"{sign} {check.must:g} {check.unit}".rstrip(), goal, check.verdict


def _load_lines(title: str, cells: Mapping[str, Mapping[str, Any]], leads: Mapping[str, Any]) -> list[str]:
    rows: list[Row] = []
    for at_once, by_name in cells.items():
        for name, cell in by_name.items():
            lead = leads.get(at_once, {}).get(name, {})
            rows.append((
                at_once, name, _us(cell["p50_us"]), _us(cell["p99_us"]), f"{cell['per_sec']:.0f}",
                _ratio(cell["p50_ratio"]), _ratio(cell["per_sec_ratio"]),
                _ratio(lead.get("p50")), _ratio(lead.get("rate")), str(cell["errors"] or ""),
            ))  # fmt: skip
    heads: Row = (
        "at once",
        "",
        "p50",
        "p99",
        "per s",
        "p50 ratio",
        "rate ratio",
        "executor's lead",
        "in rate",
        "errors",
    )
    if not leads:
        rows, heads = [(*row[:7], row[9]) for row in rows], (*heads[:7], heads[9])
    return _rows(f"{title} (ratios: to floor; manager's to executor)", heads, rows) if rows else []


def _noop(noop: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    rows: list[Row] = [
        (name, _us(of["idle"]["p50_us"]), _us(of["idle"]["p99_us"]), _us(of["loaded"]["p50_us"]),
         _us(of["loaded"]["p99_us"]), _ratio(of["loaded"]["p50_ratio"]))
        for name, of in noop.items()
    ]  # fmt: skip
    heads = ("", "idle p50", "p99", "loaded p50", "p99", "loaded/idle")
    return "no-op (GET /healthz), idle and under exec load", heads, rows


def _session(session: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    rows: list[Row] = [
        (name, _us(of["awake_p50_us"]), _us(of["p50_us"]), _us(of["p99_us"]), _us(of["noop_p50_us"]),
         _us(of["above_noop_us"]), _ratio(of["lead"]) if name != "swe-rex" else "")
        for name, of in session.items()
    ]  # fmt: skip
    heads = ("", "p50", "p50 idle", "p99 idle", "no-op idle", "above it", "SWE-ReX's / ours")
    return "echo in a stateful session", heads, rows


def _raw(raw: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    rows: list[Row] = [
        (name, f"{of['mb_per_sec']:.0f} MB/s", _ratio(of["ratio"]), _us(of["first_byte_us"]),
         _ratio(of["first_byte_ratio"]) if name != "floor" else "")
        for name, of in raw.items()
    ]  # fmt: skip
    return "1 GiB of output as raw bytes", ("", "speed", "x floor", "first byte", "x floor"), rows


def _output(output: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    rows: list[Row] = [
        (name, "whole" if of["whole"] else "CUT", f"{of['mb_per_sec']:.0f} MB/s", _ratio(of["ratio"]),
         _mib(of["peak_pss_bytes"]), _mib(of["pss_growth_bytes"]))
        for name, of in output.items()
    ]  # fmt: skip
    return "1 GiB of output in frames", ("", "", "speed", "x floor", "peak PSS", "growth"), rows


def _files(files: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    rows: list[Row] = [
        (name, f"{of['up']['mb_per_sec']:.0f} MB/s", _ratio(of["up"]["ratio"]),
         f"{of['down']['mb_per_sec']:.0f} MB/s", _ratio(of["down"]["ratio"]))
        for name, of in files.items()
    ]  # fmt: skip
    return "a file of 256 MiB", ("", "up", "x floor", "down", "x floor"), rows


def _bundle(of: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    row = tuple(f"{of[kind] / 1e6:.1f} MB" for kind in ("xz_bytes", "gz_bytes", "unpacked_bytes"))
    return "bundle", (".tar.xz", ".tar.gz", "unpacked"), [row]


def _memory(of: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    woken = f"{of['wakeups']} in {of['watched_sec']:g} s"
    rows: list[Row] = [
        ("executor", _mib(of["idle_pss_bytes"]), _mib(of["idle_alone_bytes"]), str(of["processes"]), woken),
        ("executor with all loaded", _mib(of["loaded_pss_bytes"]), _mib(of["loaded_alone_bytes"]), "", ""),
        ("executor after this run's load", _mib(of["after_load_pss_bytes"]), "", "", ""),
        *(
            [("executor from the bundle", "", _mib(of["bundle_alone_bytes"]), "", "")]
            if of["bundle_alone_bytes"]
            else []
        ),
        *((name, _mib(pss_bytes), "", "", "") for name, pss_bytes in of["peers_pss_bytes"].items()),
    ]
    heads = ("", "PSS", "as if alone on its machine", "processes", "wake-ups")
    return "memory of what idles, helpers included", heads, rows


def _start(start: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    rows: list[Row] = [("python -I -S -c pass", f"{start['bare_python_ms']:.0f} ms", "", "")]
    rows += [
        (name, f"{of['ms']:.0f} ms", f"{of['best_ms']:.0f} ms", _ratio(of["ratio"]))
        for name in ("executor", "bundle") if (of := start.get(name))
    ]  # fmt: skip
    return "start to first answer", ("", "median", "best", "of python's"), rows


def _thousand(thousand: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    rows: list[Row] = [
        (name, str(of["commands"]), str(of["wrong"]), f"{of['seconds']:.2f} s", str(of["health_errors"]),
         f"{of['health_p50_ms']:.1f} ms", f"{of['health_p99_ms']:.1f} ms")
        for name, of in thousand.items()
    ]  # fmt: skip
    heads = ("", "answers", "wrong", "all within", "health failed", "p50", "p99")
    return "1,000 x `sleep 1; echo N` at once", heads, rows


def _leaks(of: Mapping[str, Any]) -> tuple[str, Row, list[Row]]:
    rows: list[Row] = [
        (when, str(found["pids"]), str(found["fds"]), str(found["tasks"]), _mib(found["rss_bytes"]))
        for when, found in (("before", of["before"]), ("after", of["after"]))
    ]
    title = (
        f"{of['commands']:,} commands, {of['sessions']} sessions, {of['terminals']} terminals in {of['seconds']:.0f} s"
    )
    return title, ("", "processes", "descriptors", "tasks", "RSS"), rows


_TABLES = {
    "noop": _noop, "session": _session, "raw": _raw, "output": _output, "files": _files, "bundle": _bundle,
    "memory": _memory, "start": _start, "thousand": _thousand, "leaks": _leaks,
}  # fmt: skip


def _first_errors(found: Mapping[str, Any], name: str = "") -> Iterable[tuple[str, str]]:
    for key, value in found.items():
        if key == "first_error" and value:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _first_errors(value, f"{name} {key}".strip())


def _rows(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    whole = [heads, *rows]
    widths = [max(len(row[column]) for row in whole) for column in range(len(heads))]
    out = ["", title]
    for row in whole:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        out.append(("  " + "  ".join(cells)).rstrip())
    return out


def _us(value: float | None) -> str:
    return "" if value is None else f"{value / 1e3:.2f} ms"


def _mib(value: float | None) -> str:
    return "?" if value is None else f"{value / MiB:.1f} MiB"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
