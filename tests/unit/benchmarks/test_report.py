"""Ratios, checks and the table of `bench_exec.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import bench_exec
from benchmarks.harness import machine, readme, report, servers
from benchmarks.harness.bench import cell_of, ratio_of, turned
from benchmarks.harness.checks import MUSTS, checks_of, failed
from benchmarks.harness.load import Sample, StreamSample
from benchmarks.harness.parts import PARTS
from benchmarks.harness.servers import ROOT, Target


def sample(p50_us: float, per_sec: float = 100.0, errors: int = 0) -> Sample:
    return Sample(
        requests=100, errors=errors, seconds=1.0, per_sec=per_sec, p50_us=p50_us, p90_us=p50_us, p99_us=p50_us,
        max_us=p50_us, first_error="status: 500" if errors else "",
    )  # fmt: skip


def results(**changed: Any) -> dict[str, Any]:
    p50s_us = {"floor": 100, "executor": 150, "go": 200}
    cells = {name: cell_of([sample(p50_us)], [sample(100)]) for name, p50_us in p50s_us.items()}
    whole: dict[str, Any] = {
        "exec": {"1": cells, "8": cells, "64": cells},
        "noop": {"executor": {"idle": cells["floor"], "loaded": cells["executor"]}},
        "output": {
            "executor": {"whole": True, "mb_per_sec": 900.0, "ratio": 0.9, "peak_pss_bytes": 50 << 20,
                         "pss_growth_bytes": 8 << 20},
        },
        "leads": {"64": {"go": {"p50": 1.1, "rate": 1.3}}},
        "session": {"executor": {"p50_us": 300.0, "best_p50_us": 250.0, "awake_p50_us": 300.0, "p99_us": 900.0,
                                 "noop_p50_us": 60.0,
                                 "above_noop_us": 240.0, "lead": 400.0, "errors": 0, "first_error": ""}},
        "files": {"executor": {"up": {"mb_per_sec": 700.0, "ratio": 0.75, "errors": 0, "first_error": ""},
                               "down": {"mb_per_sec": 900.0, "ratio": 0.95, "errors": 0, "first_error": ""}}},
        "memory": {"idle_pss_bytes": 20 << 20, "idle_alone_bytes": 30 << 20, "bundle_alone_bytes": None,
                   "loaded_pss_bytes": 30 << 20, "loaded_alone_bytes": 40 << 20, "peers_pss_bytes": {"go": 5 << 20},
                   "processes": 3, "after_load_pss_bytes": 35 << 20, "wakeups": 0, "watched_sec": 5.0},
        "start": {"bare_python_ms": 16.0, "executor": {"ms": 200.0, "best_ms": 180.0, "ratio": 12.5}},
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


def test_everything_within_its_limit_passes_and_what_reaches_the_goal_says_so() -> None:
    checks = checks_of(results(), ["exec", "session", "files", "memory"])
    verdicts = {check.name: check.verdict for check in checks}
    assert verdicts["exec true, 64 at once: rate, of the C server's"] == "must"
    assert verdicts["echo in a session, over HTTP"] == "must"
    assert verdicts["file up: speed, of a C copy loop's"] == "must"
    assert verdicts["file down: speed, of a C copy loop's"] == "goal"
    assert verdicts["idle executor: wake-ups in 5 s"] == "goal"
    missed = failed(checks, ["manager", "go", "swe-rex"])
    assert [check.name for check in missed] == [
        "exec true, 1 at once: time, of the C server's"
    ]  # 1.5, and 1.4 is allowed


@pytest.mark.parametrize(
    ("part", "value", "name"),
    [
        ("memory", {"idle_pss_bytes": 29 << 20}, "idle executor with its helpers: PSS"),
        ("memory", {"wakeups": 1}, "idle executor: wake-ups"),
        ("exec", {"8": {"executor": cell_of([sample(1, 99)], [sample(1, 100)])}}, "exec true, 8 at once: rate"),
        ("leads", {"64": {"go": {"rate": 0.99}}}, "rate, of the Go server's"),
        ("exec", {"1": {"floor": cell_of([sample(1, errors=1)], None)}}, "exec: wrong answers"),
        ("files", {"executor": {"up": {"ratio": 0.69}}}, "file up"),
        ("files", {"manager": {"down": {"errors": 1}}}, "files: wrong answers"),
        ("leaks", {"left": {"pids": 0, "fds": 1, "tasks": 0}}, "descriptors left"),
        (
            "output",
            {"executor": {"whole": False, "mb_per_sec": 1.0, "ratio": 1.0, "peak_pss_bytes": None,
                          "pss_growth_bytes": None}},
            "cut (executor)",
        ),
    ],
)  # fmt: skip
def test_what_is_over_its_limit_fails_under_its_name(part: str, value: dict[str, Any], name: str) -> None:
    missed = failed(checks_of(results(**{part: value}), list(PARTS)), [])
    assert [check for check in missed if name in check.name and check.verdict == "MISSED"]


def test_what_a_peer_gets_wrong_is_no_fault_of_ours() -> None:
    cells = {"1": {"swe-rex": cell_of([sample(1, errors=5)], None)}}
    wrong = next(check for check in checks_of(results(exec=cells), ["exec"]) if check.name == "exec: wrong answers")
    assert wrong.ok


def test_a_part_that_could_not_be_measured_does_not_pass_unless_it_was_left_out() -> None:
    missing = [check for check in checks_of(results(), ["exec"]) if check.value is None]
    assert {check.target for check in missing} == {"manager", "go", "swe-rex"}
    assert failed(missing, []) == missing
    assert failed(missing, ["manager"]) == [check for check in missing if check.target != "manager"]
    assert not failed(missing, ["manager", "go", "swe-rex"])
    assert [check.verdict for check in checks_of({}, ["start"])] == ["not measured", "not measured"]


def test_every_check_belongs_to_a_part_that_can_be_measured() -> None:
    assert {must.path[0] for must in MUSTS} - {"leads"} <= set(PARTS)


def test_the_table_shows_each_part_and_each_verdict() -> None:
    found = results(memory=results()["memory"] | {"idle_pss_bytes": 99 << 20})
    about = machine.describe() | {"tier": "split", "transport": "tcp", "load_before": 0.3}
    text = report.table_of(about, found, checks_of(found, list(PARTS)), {"agent-sandbox": "absent: no wheel"})
    for piece in ("exec true", "no-op", "1 GiB", "99.0 MiB", "start to first answer", "sleep 1", "MISSED", "must",
                  "goal", "1.30x", "not measured: agent-sandbox: absent: no wheel"):  # fmt: skip
        assert piece in text
    assert "bash -c" not in text  # not measured in these results
    assert "BUSY" not in text
    assert "BUSY" in report.table_of(about | {"load_before": 7.5}, found, [], {})


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


def test_an_unknown_peer_is_refused_and_none_leaves_all_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_exec.parse(["--peers", "none"]).peers == []
    assert bench_exec.parse(["--peers", "swe-rex,go"]).peers == ["go", "swe-rex"]
    with pytest.raises(SystemExit):
        bench_exec.parse(["--peers", "rust"])
    assert "agent-sandbox" in capsys.readouterr().err


def test_parts_keep_their_order_however_they_are_asked_for() -> None:
    assert bench_exec.parse(["--only", "noop,exec"]).only == ["exec", "noop"]


def test_the_readme_has_a_place_for_the_table_and_keeps_everything_else() -> None:
    table = readme.short_table(
        machine.describe(), checks_of(results(), ["session", "leaks", "start"]), "benchmarks/results/2026-01-01.txt"
    )
    assert "| echo in a session, over HTTP | 0.3 ms | ≤ 0.5 ms | ≤ 0.25 ms | must |" in table
    assert "the same from the bundle" not in table  # not measured in these results
    before = (ROOT / "README.md").read_text()
    after = readme.with_table(before, table)
    assert after.index("Two commands") < after.index(table) < after.index("What is where")
    assert readme.with_table(after, "nothing") == readme.with_table(before, "nothing")


def test_a_part_of_a_run_is_not_kept_as_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_exec.parse(["--only", "exec", "--keep"])
    assert "whole runs" in capsys.readouterr().err


def test_a_kept_run_is_in_the_results_by_date_and_in_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(f"before\n{readme.BEGIN}\nolder figures\n{readme.END}\nafter\n")
    monkeypatch.setattr(bench_exec, "RESULTS", tmp_path)
    monkeypatch.setattr(servers, "ROOT", tmp_path)
    about = machine.describe() | {"date": "2026-05-06T07:08:09Z"}
    bench_exec.keep(about, checks_of(results(), ["files"]), "the table", "{}")
    assert (tmp_path / "2026-05-06.txt").read_text() == "the table\n"
    assert (tmp_path / "2026-05-06.json").read_text() == "{}\n"
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "older figures" not in text
    assert "file down: speed" in text
    assert "2026-05-06.txt" in text
