"""Every test that a document's guarantees point to is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("executor.md", "kubernetes.md", "pools.md", "sandboxes.md", "sources.md", "tenants.md")
CONTRACT = "\n".join((ROOT / "docs" / name).read_text() for name in NAMES)
DEFINED = {
    name for path in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())
}


def test_every_guarantee_names_a_test_that_there_is() -> None:
    named = set(re.findall(r"`(test_\w+)`", CONTRACT))
    assert len(named) > 40
    assert named - DEFINED == set()


def test_every_file_of_tests_that_is_named_is_there() -> None:
    paths = set(re.findall(r"`(tests/[\w/.]+)`", CONTRACT))
    assert len(paths) > 5
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_every_row_of_a_table_of_guarantees_names_its_test() -> None:
    for table in re.findall(r"\| guaranteed \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", CONTRACT):
        for row in table.splitlines():
            assert "`test_" in row.split("|")[-2], row
