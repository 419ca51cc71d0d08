"""The simulator of pools runs the manager's sizing on made-up pods, and says what it finds."""

from __future__ import annotations

import random
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import simulate_pool
from benchmarks.harness.pool_arrivals import bursts, diurnal, from_csv, poisson
from benchmarks.harness.pool_simulation import Outcome, Simulation, Starts
from manager.model import PoolSize

STARTS = Starts(median_sec=2.0, slow_sec=3.0, together=40)
STEADY = Starts(median_sec=2.0, slow_sec=2.0, together=40)


def simulated(size: PoolSize, claims: list[float], starts: Starts = STARTS) -> Outcome:
    return Simulation("", size, starts, cold_together=4, seed=1, moments=True).run(claims)


def test_a_claim_waits_for_a_start_where_there_is_no_pod_and_for_nothing_where_there_is() -> None:
    none = simulated(PoolSize(min=0, max=0), [10.0, 20.0], STEADY)
    assert (none.waits, none.hits, none.pods) == ([2.0, 2.0], 0, 0.0)
    one = simulated(PoolSize(min=1, max=1), [10.0, 20.0], STEADY)
    assert (one.waits, one.hits, one.pods) == ([0.0, 0.0], 2, 1.0)


def test_claims_beyond_those_that_are_made_at_once_wait_for_their_turn() -> None:
    outcome = simulated(PoolSize(min=0, max=0), [1.0] * 10, STEADY)
    assert sorted(outcome.waits) == [2.0] * 4 + [4.0] * 4 + [6.0] * 2


def test_starts_beyond_what_a_cluster_does_at_once_wait_for_each_other() -> None:
    slow = Starts(median_sec=2.0, slow_sec=2.0, together=1)
    assert sorted(simulated(PoolSize(min=0, max=0), [1.0] * 3, slow).waits) == [2.0, 4.0, 6.0]


def test_every_claim_has_its_pod_and_the_pool_stays_within_its_bounds() -> None:
    claims = bursts(random.Random(3), 2.0, 0.1, size=80, every_sec=600.0, width_sec=10.0)
    size = PoolSize(min=2, max=30)
    outcome = simulated(size, claims)
    assert len(outcome.waits) == len(claims) > 500
    assert outcome.largest <= 30
    assert all(2 <= wanted <= 30 for _, _, wanted in outcome.moments)


def test_on_a_day_a_pool_that_follows_the_claims_is_as_good_as_a_fixed_one_for_less() -> None:
    claims = diurnal(random.Random(1), 3.0, 1.5)
    fixed = simulated(PoolSize(min=10, max=10), claims)
    follows = simulated(PoolSize(min=2, max=64), claims)
    assert fixed.wait(0.99) == follows.wait(0.99) == 0.0
    assert follows.hit_share > 0.995
    assert follows.pods < 0.95 * fixed.pods
    small = simulated(PoolSize(min=4, max=4), claims)
    assert small.wait(0.99) > 1.0


def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert simulate_pool.main(["--arrivals", "bursts", "--hours", "0.5", "--fixed", "4", "--elastic", "1:20"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "fixed 4" in said[0]
    assert "1 to 20, 0.7, 600 s" in said[0]


def test_recorded_claims_are_replayed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, picture = tmp_path / "claims.csv", tmp_path / "pools.svg"
    recorded.write_text(
        "time,tenant\n2026-01-31T12:00:00Z,a\n2026-01-31T12:00:05Z,b & c\n\n2026-01-31 12:00:02+00:00,c\n"
    )
    assert from_csv(recorded) == [0.0, 2.0, 5.0]
    assert simulate_pool.main(["--arrivals", str(recorded), "--fixed", "1", "--svg", str(picture)]) == 0
    assert "claims.csv (3 claims)" in capsys.readouterr().out
    drawn = ET.fromstring(picture.read_text())
    words = ["".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "claims.csv: p99 wait by pods that stood ready" in words
    assert "2 to 64, 0.7, 600 s, over time" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--elastic", "5:2"], "MIN < MAX"),
        (["--elastic", "5"], "MIN:MAX"),
        (["--elastic", "1:5:7"], "utilisation from 0.1 to 1"),
        (["--fixed", "many"], "many"),
        (["--rate", "0"], "must be over 0"),
        (["--start", "3", "--start-slow", "2"], "--start-slow is at least --start"),
        (["--arrivals", "/no/such/file.csv"], "/no/such/file.csv"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        simulate_pool.main(arguments)
    assert refused.value.code == 2
    assert words in capsys.readouterr().err


def test_a_file_with_a_line_that_is_no_time_is_refused_with_its_number(tmp_path: Path) -> None:
    recorded = tmp_path / "claims.csv"
    recorded.write_text("1\n2\nnoon\n")
    with pytest.raises(ValueError, match="line 3: 'noon'"):
        from_csv(recorded)
    recorded.write_text("time\n")
    with pytest.raises(ValueError, match="no times"):
        from_csv(recorded)


def test_made_up_claims_come_at_the_rate_that_was_asked_for() -> None:
    assert 3300 < len(poisson(random.Random(1), 1.0, 1.0)) < 3900
    day = diurnal(random.Random(1), 24.0, 0.1)
    night, noon = sum(at < 4 * 3600 for at in day), sum(10 * 3600 <= at < 14 * 3600 for at in day)
    assert noon > 5 * night > 0
