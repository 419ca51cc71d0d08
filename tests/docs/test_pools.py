"""What docs/pools.md says of figures is what a manager shows."""

from __future__ import annotations

import re
from pathlib import Path

from manager.api.services import InFlight
from manager.app import _add_readings
from manager.metrics import Metrics
from tests.support.world import world

DOCUMENT = (Path(__file__).parents[2] / "docs" / "pools.md").read_text()


async def test_every_figure_of_pools_is_in_the_document_with_its_kind() -> None:
    metrics = Metrics()
    async with world() as here:
        _add_readings(metrics, here.services, InFlight())
        text = metrics.render().decode()
    shown = dict(re.findall(r"^# TYPE (sojourn_pool_\w+) (\w+)$", text, re.MULTILINE))
    told = dict(re.findall(r"^\| `(sojourn_pool_\w+)` \| (gauge|counter)", DOCUMENT, re.MULTILINE))
    assert len(shown) == 11
    assert shown == told
    assert set(re.findall(r"^# HELP (sojourn_pool_\w+) \S", text, re.MULTILINE)) == set(told)
    assert set(re.findall(r"^(sojourn_pool_\w+)[{ ]", text, re.MULTILINE)) == set(told)
    assert set(re.findall(r"sojourn_pool_\w+", DOCUMENT)) == set(told)
