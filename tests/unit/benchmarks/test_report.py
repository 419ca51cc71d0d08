"""Ratios, checks and the table of `bench_exec.py`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks import bench_exec
from benchmarks.harness import machine, report
from benchmarks.harness.load import Sample, StreamSample
from benchmarks.harness.measures import PARTS, cell_of, ratio_of, turned
from benchmarks.harness.servers import Target


def sample(p50_us: float, per_sec: float = 100.0, errors: int = 0) -> Sample:
    return Sample(
        requests=100, errors=errors, seconds=1.0, per_sec=per_sec, p50_us=p50_us, p90_us=p50_us, p99_us=p50_us,
        max_us=p50_us, first_error="status: 500" if errors else "",
    )  # fmt: skip


def results(**changed: Any) -> dict[str, Any]:
    cells = {"floor": cell_of([sample(100)], None), "executor": cell_of([sample(150)], [sample(100)])}
    whole: dict[str, Any] = {
        "exec": {"1": cells, "8": cells, "64": cells},
        "noop": {"executor": {"idle": cells["floor"], "loaded": cells["executor"]}},
        "output": {
            "executor": {"whole": True, "mb_per_sec": 900.0, "ratio": 0.9, "peak_pss_bytes": 50 << 20,
                         "pss_growth_bytes": 8 << 20},
        },
        "memory": {"idle_pss_bytes": 30 << 20, "processes": 3, "after_load_pss_bytes": 35 << 20},
        "start": {"executor_ms": 400.0, "best_ms": 380.0, "bare_python_ms": 16.0, "ratio": 25.0},
        "thousand": {
            "manager": {"commands": 1000, "wrong": 0, "first_error": "", "seconds": 3.0, "health_checks": 100,
                        "health_errors": 0, "health_p50_ms": 1.0, "health_p99_ms": 9.0},
        },
    }  # fmt: skip
    built: dict[str, Any] = msgspec.to_builtins(whole | changed)
    return built


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_medians() -> None:
    assert ratio_of([10, 30, 80], [10, 20, 10]) == 1.5
    assert ratio_of([], []) is None
    assert ratio_of([5.0], [0.0]) is None


def test_each_round_begins_with_another_target() -> None:
    targets = [Target(name=name, address=("--tcp", "1"), exec_path="/") for name in "abc"]
    assert ["".join(one.name for one in turned(targets, turn)) for turn in range(4)] == ["abc", "bca", "cab", "abc"]
    assert turned([], 3) == []


def test_everything_within_its_limit_passes() -> None:
    checks = report.checks_of(results())
    held = {check.name: check.ok for check in checks}
    assert held["exec true at 64: executor p50 / floor"] is True
    assert held["idle executor with helpers: PSS"] is True
    assert report.failed(checks, list(PARTS), ["manager"]) == []


@pytest.mark.parametrize(
    ("part", "value", "name"),
    [
        ("memory", {"idle_pss_bytes": 41 << 20, "processes": 3, "after_load_pss_bytes": None}, "idle executor"),
        ("exec", {"1": {"executor": cell_of([sample(201)], [sample(100)])}}, "exec true at 1: executor"),
        ("exec", {"8": {"executor": cell_of([sample(161)], [sample(100)])}}, "exec true at 8: executor"),
        ("exec", {"1": {"floor": cell_of([sample(1, errors=1)], None)}}, "wrong answers"),
        (
            "output",
            {"executor": {"whole": False, "mb_per_sec": 1.0, "ratio": 1.0, "peak_pss_bytes": None,
                          "pss_growth_bytes": None}},
            "cut (executor)",
        ),
    ],
)  # fmt: skip
def test_what_is_over_its_limit_fails_under_its_name(part: str, value: dict[str, Any], name: str) -> None:
    failed = report.failed(report.checks_of(results(**{part: value})), [], [])
    assert [check for check in failed if name in check.name]


def test_a_part_that_could_not_be_measured_does_not_pass_unless_it_was_left_out() -> None:
    checks = report.checks_of(results())
    assert report.failed(checks, ["exec"], [])  # no manager in these results
    assert not report.failed(checks, ["exec"], ["manager"])
    assert not report.failed(report.checks_of({}), ["start"], [])


def test_the_table_shows_each_part_and_each_verdict() -> None:
    found = results(memory={"idle_pss_bytes": 99 << 20, "processes": 3, "after_load_pss_bytes": None})
    about = machine.describe() | {"tier": "split", "transport": "tcp"}
    text = report.table_of(about, found, report.checks_of(found))
    for piece in ("exec true", "no-op", "1 GiB", "99.0 MiB", "start to first answer", "sleep 1", "FAILED", "ok"):
        assert piece in text
    assert "bash -c" not in text  # not measured in these results


def test_output_is_whole_only_with_every_byte_in_its_place_and_an_exit() -> None:
    whole = StreamSample(
        stdout_bytes=10, stderr_bytes=0, seconds=1, first_byte_us=1, gaps=0, misplaced=0, heartbeats=0, ended=True,
        exit={"exit_code": 0},
    )  # fmt: skip
    assert whole.whole(10)
    assert not whole.whole(11)
    for broken in ({"gaps": 1}, {"misplaced": 1}, {"ended": False}, {"exit": None}, {"exit": {"exit_code": 1}}):
        assert not msgspec.structs.replace(whole, **broken).whole(10)


def test_an_unknown_part_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_exec.parse(["--only", "exec,speed"])
    assert "thousand" in capsys.readouterr().err


def test_parts_keep_their_order_however_they_are_asked_for() -> None:
    assert bench_exec.parse(["--only", "noop,exec"]).only == ["exec", "noop"]
