"""Long-lived sandboxes over the HTTP interface, their workspaces in memory: what a caller is told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from manager.api import sandboxes
from tests.support.api import Api, api
from tests.support.memory_workspaces import MemoryWorkspaces

ALL = "/sandbox/sandboxes/v1"


@pytest.fixture
async def surface() -> AsyncIterator[Api]:
    async with api() as made:
        made.world.services.longlived.kept.workspaces = MemoryWorkspaces(made.world.provider)
        yield made


async def made(surface: Api, **fields: object) -> str:
    reply = await surface.call("POST", ALL, body=fields)
    assert reply.status == 201, reply.body
    sandbox_id: str = reply.json["sandbox_id"]
    return sandbox_id


async def test_who_made_or_started_a_sandbox_is_told_its_pod_and_lease(surface: Api) -> None:
    first = (await surface.call("POST", ALL, body={})).json
    assert first["pod_id"] in [pod.name for pod in surface.world.provider.claimed]
    assert first["lease"]["left_sec"] > 0
    at = f"{ALL}/{first['sandbox_id']}"
    assert (await surface.call("POST", f"{at}/stop")).json["pod_id"] is None
    started = (await surface.call("POST", f"{at}/start")).json
    assert started["pod_id"] in [pod.name for pod in surface.world.provider.claimed]
    assert started["pod_id"] != first["pod_id"]
    ran = await surface.call(
        "POST", f"{at}/exec", body={"command": "true"}, headers={"If-Sandbox-Pod": started["pod_id"]}
    )
    assert ran.status == 200


async def test_a_look_at_one_sandbox_says_which_image_its_pod_runs_on(surface: Api) -> None:
    sandbox_id = await made(surface)
    await surface.exec("a-task")
    digest = f"sha256:{'ab' * 32}"
    watch = surface.world.services.watches["here"]
    for pod in list(watch.pods.values()):
        watch.put(msgspec.structs.replace(pod, image_digest=digest))
    task = (await surface.call("GET", "/sandbox/task/a-task")).json
    shown = [(await surface.call("GET", f"/api/v1/sandboxes/{id}")).json for id in (sandbox_id, task["sandbox_id"])]
    assert [(one["image"], one["image_digest"]) for one in shown] == [("host", digest)] * 2
    assert [one["task_id"] for one in shown] == [None, "a-task"]
    await surface.call("POST", f"{ALL}/{sandbox_id}/stop")
    assert (await surface.call("GET", f"/api/v1/sandboxes/{sandbox_id}")).json["image_digest"] == ""


@pytest.mark.parametrize("call", ["POST /stop", "POST /start", "DELETE "])
async def test_a_field_in_the_body_of_a_call_that_takes_none_is_refused_by_its_name(surface: Api, call: str) -> None:
    method, _, end = call.partition(" ")
    at = f"{ALL}/{await made(surface)}"
    reply = await surface.call(method, at + end, body={"wait_sec": 0})
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert reply.json["error"]["details"]["field"] == "wait_sec"
    assert (await surface.call("GET", at)).json["state"] == "running"
    assert (await surface.call(method, at + end, body={})).status in (200, 204)


async def test_a_page_of_what_is_wanted_looks_at_so_many_and_goes_on_where_it_stopped(
    surface: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "_LOOKED_AT", 2)
    ids = sorted([await made(surface, name="wanted" if turn == 4 else "other") for turn in range(5)])
    pages: list[list[str]] = []
    after: str | None = ""
    while after is not None:
        page = (await surface.call("GET", f"{ALL}?name=wanted&limit=1&after={after}")).json
        pages.append([one["sandbox_id"] for one in page["sandboxes"]])
        after = page["next"]
        assert len(pages) <= 10
    assert len([one for page in pages for one in page]) == 1
    assert len(pages) >= 3
    assert [one["sandbox_id"] for one in (await surface.call("GET", ALL)).json["sandboxes"]] == ids
    whole = (await surface.call("GET", f"{ALL}?limit=5")).json
    assert (len(whole["sandboxes"]), (await surface.call("GET", f"{ALL}?after={ids[-1]}")).json) == (
        5, {"sandboxes": [], "next": None},
    )  # fmt: skip
