"""The audit log over HTTP: an admin's own project, a platform key's named one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest

from manager.services.audit import Audit
from tests.support.api import Api, api
from tests.support.world import ACME


@pytest.fixture
async def surface() -> AsyncIterator[Api]:
    async with api() as made:
        yield made


async def test_an_admin_reads_its_own_projects_events_and_nobody_elses(surface: Api) -> None:
    audit = Audit(surface.world.store)
    for number in range(3):
        await audit.record("thing.changed", str(number), owner=ACME, by="reaper", why="idle")
    first = await surface.call("GET", "/api/v1/audit?limit=2", role="admin")
    assert first.status == 200
    assert [event["subject"] for event in first.json["events"]] == ["0", "1"]
    event = first.json["events"][0]
    assert (event["action"], event["by"], event["details"]) == ("thing.changed", "reaper", {"why": "idle"})
    rest = await surface.call("GET", f"/api/v1/audit?after={first.json['next']}", role="platform")
    assert ([event["subject"] for event in rest.json["events"]], rest.json["next"]) == (["2"], None)
    for role in ("foreign", "sibling"):
        assert (await surface.call("GET", "/api/v1/audit", role=role)).json["events"] == []
    assert (await surface.call("GET", "/api/v1/audit", role="member")).code == "forbidden"
    since = quote(event["at"])
    assert len((await surface.call("GET", f"/api/v1/audit?since={since}", role="admin")).json["events"]) == 3
    await audit.close()


@pytest.mark.parametrize(
    "query", ["since=yesterday", "since=2026-01-01T00:00:00", "limit=0", "limit=501", "limit=x", "after=x", "other=1"]
)
async def test_a_question_that_makes_no_sense_is_refused(surface: Api, query: str) -> None:
    reply = await surface.call("GET", f"/api/v1/audit?{query}", role="admin")
    assert (reply.status, reply.code) == (400, "invalid_request")
