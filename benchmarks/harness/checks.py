"""What must hold and what is the goal, each with its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

MiB: Final = 1 << 20
MB: Final = 1_000_000
# The executor keeps a window of each stream in memory, whatever the output's length: growth beyond it means a leak.
GROWTH_MIB: Final = 64.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold. `ok` None: it was not measured in this run."""

    part: str  # of the measurements
    target: str  # whose absence excuses it
    name: str
    value: float | None
    must: float
    goal: float | None  # None: there is no better than what must be
    at_least: bool
    unit: str
    ok: bool | None

    @property
    def verdict(self) -> str:
        if self.value is None or self.ok is None:
            return "not measured"
        if not self.ok:
            return "MISSED"
        return "goal" if self.goal is None or _within(self.value, self.goal, self.at_least) else "must"


class Must(msgspec.Struct, frozen=True):
    name: str
    path: tuple[str, ...]  # where its value stands in the results
    must: float
    goal: float | None = None
    unit: str = "x"
    scale: float = 1.0
    at_least: bool = False
    target: str = "executor"


def _rate(name: str, path: tuple[str, ...], must: float, goal: float, target: str = "executor") -> Must:
    return Must(name, path, must, goal, at_least=True, target=target)


def _manager(name: str, path: tuple[str, ...], must: float, unit: str = "x") -> Must:
    return Must(name, path, must, None, unit, target="manager")


MUSTS: Final = (
    Must("exec true, 1 at once: time, of the C server's", ("exec", "1", "executor", "p50_ratio"), 1.4, 1.2),
    _rate("exec true, 8 at once: rate, of the C server's", ("exec", "8", "executor", "per_sec_ratio"), 1.0, 1.2),
    _rate("exec true, 64 at once: rate, of the C server's", ("exec", "64", "executor", "per_sec_ratio"), 1.0, 1.2),
    _rate("exec true, 8 at once: rate, of the Go server's", ("leads", "8", "go", "rate"), 1.0, 1.4, "go"),
    _rate("exec true, 64 at once: rate, of the Go server's", ("leads", "64", "go", "rate"), 1.0, 1.4, "go"),
    _rate("exec true, 1 at once: times faster than SWE-ReX", ("leads", "1", "swe-rex", "p50"), 1, 4.8, "swe-rex"),
    _rate("exec true, 64 at once: rate, of SWE-ReX's", ("leads", "64", "swe-rex", "rate"), 1, 9, "swe-rex"),
    _manager("exec true, 1 at once: manager, of the executor's", ("exec", "1", "manager", "p50_ratio"), 1.8),
    _manager("exec true, 8 at once: manager, of the executor's", ("exec", "8", "manager", "p50_ratio"), 1.8),
    _manager("exec true, 64 at once: manager, of the executor's", ("exec", "64", "manager", "p50_ratio"), 1.8),
    Must("no-op under full exec load, of an idle one's time", ("noop", "executor", "loaded", "p50_ratio"), 3.0, 1.5),
    Must("echo in a session, over HTTP", ("session", "executor", "awake_p50_us"), 0.5, 0.25, "ms", 1e3),
    _rate("echo in a session: times faster than SWE-ReX", ("session", "executor", "lead"), 100, 500, "swe-rex"),
    _rate("1 GiB raw: speed, of a C copy loop's", ("raw", "executor", "ratio"), 0.8, 0.95),
    Must("raw output: time to the first byte, of the C server's", ("raw", "executor", "first_byte_ratio"), 1.3, 1.05),
    Must("1 GiB in frames: memory growth", ("output", "executor", "pss_growth_bytes"), GROWTH_MIB, None, "MiB", MiB),
    _rate("file up: speed, of a C copy loop's", ("files", "executor", "up", "ratio"), 0.7, 0.9),
    _rate("file down: speed, of a C copy loop's", ("files", "executor", "down", "ratio"), 0.7, 0.9),
    Must("bundle, packed", ("bundle", "xz_bytes"), 15, 9, "MB", MB),
    Must("idle executor with its helpers: PSS", ("memory", "idle_pss_bytes"), 28, 16, "MiB", MiB),
    Must("idle executor: wake-ups in 5 s", ("memory", "wakeups"), 0, None, ""),
    Must("start to ready, of `python -I -S -c pass`", ("start", "executor", "ratio"), 15, 8),
    Must("the same from the bundle", ("start", "bundle", "ratio"), 15, 8, target="bundle"),
    _manager("1,000 at once through the manager: wrong answers", ("thousand", "manager", "wrong"), 0, ""),
    _manager("1,000 at once: failed health checks", ("thousand", "manager", "health_errors"), 0, ""),
    Must("leak run: processes left", ("leaks", "left", "pids"), 0, None, ""),
    Must("leak run: descriptors left", ("leaks", "left", "fds"), 0, None, ""),
    Must("leak run: tasks left", ("leaks", "left", "tasks"), 0, None, ""),
    Must("leak run: memory growth", ("leaks", "rss_growth_bytes"), 20, None, "MiB", MiB),
)  # fmt: skip


def checks_of(results: Mapping[str, Any], parts: Sequence[str]) -> list[Check]:
    """The checks of these parts."""
    checks = []
    for must in MUSTS:
        part = "exec" if must.path[0] == "leads" else must.path[0]
        if part not in parts:
            continue
        found = at(results, must.path)
        value = float(found) / must.scale if found is not None else None
        checks.append(Check(
            part=part, target=must.target, name=must.name, value=value,
            must=must.must, goal=must.goal, at_least=must.at_least, unit=must.unit,
            ok=None if value is None else _within(value, must.must, must.at_least),
        ))  # fmt: skip
    for target, output in results.get("output", {}).items():
        checks.append(_none("output", target, f"1 GiB in frames: cut ({target})", 0 if output["whole"] else 1))
    loads = [part for part in ("exec", "bash", "session", "raw", "files") if part in results]
    return checks + [_none(part, "all", f"{part}: wrong answers", _errors(results[part])) for part in loads]


def _none(part: str, target: str, name: str, count: int) -> Check:
    """Of this there must be none."""
    return Check(
        part=part, target=target, name=name, value=float(count), must=0, goal=None, at_least=False, unit="",
        ok=not count,
    )  # fmt: skip


def _errors(found: Mapping[str, Any]) -> int:
    """Of ours and the floor; what a peer gets wrong is the peer's."""
    total = 0
    for name, value in found.items():
        if name in ("errors", "first_errors"):
            total += value
        elif isinstance(value, Mapping) and name not in ("go", "swe-rex", "agent-sandbox"):
            total += _errors(value)
    return total


def failed(checks: Sequence[Check], left_out: Sequence[str]) -> list[Check]:
    """What does not hold, and what should have been measured and was not: a part that broke must not pass."""
    return [check for check in checks if check.ok is False or (check.ok is None and check.target not in left_out)]


def at(results: Mapping[str, Any], path: Sequence[str]) -> Any:
    found: Any = results
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _within(value: float, limit: float, at_least: bool) -> bool:
    return value >= limit if at_least else value <= limit
