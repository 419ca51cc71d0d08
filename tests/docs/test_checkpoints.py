"""Every guarantee of checkpoints names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/checkpoints.md").read_text()
DEFINED = {
    name for path in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())
}


def test_every_guarantee_of_checkpoints_names_a_test_that_there_is() -> None:
    rows = re.findall(
        r"^\| .* \| (.*) \|$", TEXT.partition("| guaranteed | test |")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert len(rows) > 10
    for row in rows:
        named = set(re.findall(r"`(test_\w+)`", row))
        assert named, row
        assert named - DEFINED == set()
