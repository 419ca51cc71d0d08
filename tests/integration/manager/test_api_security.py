"""Who may call what: generated from the route table, so that a new route is tried from its first day."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Final

import pytest

from executor import wire
from executor.wire import SessionExecRequest
from manager.api.routes import ROUTES
from manager.api.server import SCOPE_HEADERS, Route
from manager.api.wire import API_KEY_HEADER, PROJECT_HEADER, TENANT_HEADER, TaskCommand
from manager.model import Owner, Role
from manager.services.tenants import Tenants
from tests.support.api import CLEANUP, PLACES, Api, Reply, api
from tests.support.world import ACME, SHOP

CLOSED = [route for route in ROUTES if not route.open]
OPEN = [route for route in ROUTES if route.open]


def named(route: Route) -> str:
    return f"{route.method} {route.template}"


BACKGROUND = {
    "touch_leases",
    "cached_key",
    "lead",
    "ping",
}  # of no request, or of whichever is a key's first in a while


every_closed = pytest.mark.parametrize("route", CLOSED, ids=named)


@pytest.fixture
async def surface() -> AsyncIterator[Api]:
    async with api() as made:
        yield made


def same(first: Reply, second: Reply) -> bool:
    def kept(reply: Reply) -> dict[str, str]:
        return {name: value for name, value in reply.headers.items() if name != "Date"}

    return (first.status, first.body, kept(first)) == (second.status, second.body, kept(second))


# ── no key, a wrong key, a key in the wrong place ───────────────────────────────────────────────────────────────


@every_closed
async def test_nobody_gets_in_without_a_valid_key(surface: Api, route: Route) -> None:
    good = surface.keys["member"]
    wrong = ["", "x", good[:-1], good + "a", good.upper(), "sk_" + "a" * 26 + "_" + "b" * 39, "Bearer " + good, "é"]
    tries = [{}, *({API_KEY_HEADER: key} for key in wrong)]
    replies = [await surface.call_route(route, role=None, headers=headers) for headers in tries]
    if route.method != "HEAD":
        assert {reply.code for reply in replies} == {"unauthenticated"}
    assert {reply.status for reply in replies} == {401}


@every_closed
async def test_a_key_counts_only_in_its_own_header(surface: Api, route: Route) -> None:
    key = surface.keys["admin"]
    path = route.template.format(**PLACES)
    in_query = await surface.call(route.method, f"{path}?api_key={key}&X-Api-Key={key}", role=None)
    in_bearer = await surface.call(route.method, path, role=None, headers={"Authorization": f"Bearer {key}"})
    in_cookie = await surface.call(route.method, path, role=None, headers={"Cookie": f"X-Api-Key={key}"})
    assert [in_query.status, in_bearer.status, in_cookie.status] == [401, 401, 401]


@every_closed
async def test_two_keys_in_one_request_are_refused(surface: Api, route: Route) -> None:
    path = route.template.format(**PLACES)
    headers = [(API_KEY_HEADER, surface.keys["foreign"])]
    reply = await surface.call(route.method, path, role="member", headers=headers)
    assert reply.status == 400


@pytest.mark.parametrize("route", OPEN, ids=named)
async def test_open_calls_answer_without_a_key_and_tell_no_ids(surface: Api, route: Route) -> None:
    await surface.exec("a-secret-task-name")
    reply = await surface.call_route(route, role=None)
    assert reply.status == 200
    sandbox = (await surface.world.binding("a-secret-task-name")).sandbox_id
    for secret in ("a-secret-task-name", sandbox, ACME.tenant):
        assert secret.encode() not in reply.body


# ── scope headers ───────────────────────────────────────────────────────────────────────────────────────────────


@every_closed
@pytest.mark.parametrize("role", ["member", "admin", "foreign"])
async def test_scope_headers_from_any_but_a_platform_key_are_refused(surface: Api, route: Route, role: str) -> None:
    for name in (*SCOPE_HEADERS, *(name.replace("-", "_") for name in SCOPE_HEADERS), SCOPE_HEADERS[0].lower()):
        reply = await surface.call_route(route, role=role, headers={name: ACME.tenant})
        assert reply.status == 403
        if route.method != "HEAD":
            assert reply.code == "scope_refused"


@every_closed
async def test_a_platform_key_has_to_say_for_whom_it_acts(surface: Api, route: Route) -> None:
    key = {API_KEY_HEADER: surface.keys["platform"]}
    for headers in (key, key | {TENANT_HEADER: "acme"}, key | {PROJECT_HEADER: "web"}):
        reply = await surface.call_route(route, role=None, headers=headers)
        assert reply.status == 400
        if route.method != "HEAD":
            assert reply.code == "scope_required"


async def test_a_scope_header_that_comes_twice_is_refused(surface: Api) -> None:
    headers = [(TENANT_HEADER, "other")]
    reply = await surface.call("GET", "/api/v1/sandboxes", role="platform", headers=headers)
    assert (reply.status, reply.code) == (400, "invalid_request")


async def test_a_platform_key_acts_for_the_project_it_names_and_no_other(surface: Api) -> None:
    await surface.exec("t", role="member")
    assert (await surface.call("GET", "/sandbox/task/t", role="platform")).status == 200
    elsewhere = {API_KEY_HEADER: surface.keys["platform"], TENANT_HEADER: "other", PROJECT_HEADER: "web"}
    assert (await surface.call("GET", "/sandbox/task/t", role=None, headers=elsewhere)).status == 404


async def test_what_a_proxy_says_of_itself_changes_nothing(surface: Api) -> None:
    await surface.exec("t")
    headers = {
        "X-Forwarded-For": "10.0.0.1",
        "X-Forwarded-Host": "evil",
        "X-Sandbox-Pod-IP": "1.2.3.4",
        "Forwarded": "for=x",
    }
    assert (await surface.call("GET", "/sandbox/task/t", headers=headers)).status == 200
    assert (await surface.call("GET", "/sandbox/task/t", role="foreign", headers=headers)).status == 404


# ── roles ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("route", [route for route in CLOSED if route.role is Role.ADMIN], ids=named)
async def test_a_member_may_not_do_what_is_for_admins(surface: Api, route: Route) -> None:
    reply = await surface.call_route(route, role="member")
    assert (reply.status, reply.code) == (403, "forbidden")


async def test_an_admin_makes_no_platform_key(surface: Api) -> None:
    reply = await surface.call("POST", "/api/v1/keys", role="admin", body={"role": "platform"})
    assert (reply.status, reply.code) == (403, "forbidden")
    assert (await surface.call("POST", "/api/v1/keys", role="platform", body={"role": "platform"})).status == 201


async def test_a_key_is_made_used_listed_without_its_text_and_revoked(surface: Api) -> None:
    made = await surface.call("POST", "/api/v1/keys", role="admin", body={"name": "ci", "role": "member"})
    assert made.status == 201
    key, key_id = made.json["key"], made.json["key_id"]
    assert (await surface.call("GET", "/api/v1/targets", role=None, headers={API_KEY_HEADER: key})).status == 200
    listed = await surface.call("GET", "/api/v1/keys", role="admin")
    assert key_id in [each["key_id"] for each in listed.json["keys"]]
    assert key.encode() not in listed.body
    assert (await surface.call("DELETE", f"/api/v1/keys/{key_id}", role="admin")).status == 204
    assert (await surface.call("GET", "/api/v1/targets", role=None, headers={API_KEY_HEADER: key})).status == 401
    assert (await surface.call("DELETE", f"/api/v1/keys/{key_id}", role="admin")).status == 404


BODIES: Final = {
    TaskCommand: b'{"command": "true"}',
    SessionExecRequest: b'{"command": "true"}',
    wire.MkdirRequest: b'{"path": "x"}',
    wire.MoveRequest: b'{"source": "x", "target": "y"}',
    wire.ChmodRequest: b'{"path": "x", "mode": 420}',
    wire.SignalRequest: b'{"signal": "INT"}',
}


# ── what is not yours is as what does not exist ─────────────────────────────────────────────────────────────────


async def a_snapshot(surface: Api) -> str:
    """The id of one that ACME has."""

    async def layer() -> AsyncIterator[bytes]:
        yield b"a layer"

    checkpoints = surface.world.services.checkpoints
    await checkpoints.add_layer(ACME, "w", layer(), lambda: (7, 1), limit=100)
    return (await checkpoints.snapshot(ACME, "w")).snapshot_id


@pytest.mark.parametrize("role", ["foreign", "sibling"])
async def test_a_foreign_thing_is_answered_exactly_as_one_that_does_not_exist(surface: Api, role: str) -> None:
    await surface.exec("mine")
    started = await surface.call("POST", "/sandbox/task/mine/processes", body={"command": "true", "id": "p"})
    assert started.status == 201
    binding = await surface.world.binding("mine")
    admin = surface.services.tenants.principal(
        await surface.services.tenants.authenticate(surface.keys["admin"]), None, None, None
    )
    _, record = await surface.services.tenants.issue_key(admin, Role.MEMBER, "mine")
    made = await surface.call("POST", "/sandbox/sandboxes/v1", body={})
    assert made.status == 201
    kept_id = made.json["sandbox_id"]
    mine = {
        "task_id": "mine", "process_id": "p", "sandbox_id": binding.sandbox_id, "key_id": record.key_id,
        "snapshot_id": await a_snapshot(surface),
    }  # fmt: skip
    none = {
        "task_id": "none", "process_id": "q", "sandbox_id": "s" * 26, "key_id": "b" * 26, "snapshot_id": "n" + "s" * 26,
    }  # fmt: skip
    missing = PLACES | none
    tried = 0
    for route in CLOSED:
        kept = route.template.startswith("/sandbox/sandboxes/")
        places = PLACES | mine | ({"sandbox_id": kept_id} if kept else {})
        provides = route.method in ("POST", "PUT") or 101 in route.replies
        if "{" not in route.template or (provides and "not_found" not in route.errors):
            continue  # no id in it, or it provides: in the caller's own project
        if 101 in route.replies and 200 not in route.replies:
            continue  # only upgraded: its own test is in test_api_sockets
        body = None if route.request is None else BODIES.get(route.request, b"{}")
        calls = surface.world.store.calls
        calls.clear()
        foreign = await surface.call(route.method, route.template.format(**places), role=role, body=body)
        asked = [call for call in calls if call not in BACKGROUND]
        calls.clear()
        absent = await surface.call(route.method, route.template.format(**missing), role=role, body=body)
        assert same(foreign, absent), named(route)
        # Neither takes longer: the same questions are put to the store.
        assert asked == [call for call in calls if call not in BACKGROUND], named(route)
        assert foreign.status == (204 if route.role is None else 404), named(route)
        tried += 1
    assert tried >= 60
    assert (await surface.call("GET", f"/sandbox/snapshots/v1/{mine['snapshot_id']}")).status == 200
    assert (await surface.call("GET", f"/sandbox/sandboxes/v1/{kept_id}")).json["state"] == "running"
    assert (await surface.call("GET", "/sandbox/task/mine")).status == 200  # and nothing of it was touched


async def test_one_task_id_in_two_projects_is_two_sandboxes_and_no_list_tells_of_the_other(surface: Api) -> None:
    mine = await surface.exec("shared-name", role="member")
    theirs = await surface.exec("shared-name", role="foreign")
    assert mine.json["sandbox_id"] != theirs.json["sandbox_id"]
    for role, own in (("member", mine), ("foreign", theirs)):
        for path in ("/api/v1/sandboxes", "/api/v1/sandboxes/"):
            listed = await surface.call("GET", path, role=role)
            assert [each["sandbox_id"] for each in listed.json["sandboxes"]] == [own.json["sandbox_id"]]


# ── the teardown secret ─────────────────────────────────────────────────────────────────────────────────────────

SCOPE = {TENANT_HEADER: ACME.tenant, PROJECT_HEADER: ACME.project}


async def retire(surface: Api, authorization: str | None, scope: dict[str, str] = SCOPE, task: str = "t") -> Reply:
    headers = scope | ({} if authorization is None else {"Authorization": authorization})
    return await surface.call("DELETE", f"/sandbox/task/{task}", role=None, headers=headers)


async def test_the_teardown_secret_retires_a_task_and_again(surface: Api) -> None:
    await surface.exec("t")
    assert (await retire(surface, f"Bearer {CLEANUP}")).status == 204
    assert (await surface.call("GET", "/sandbox/task/t")).json["stage"] == "reclaimed"
    assert (await retire(surface, f"bearer {CLEANUP}")).status == 204
    assert (await retire(surface, f"Bearer {CLEANUP}", task="never-used")).status == 204


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {CLEANUP}x",
        f"Bearer {CLEANUP[:-1]}",
        f"Basic {CLEANUP}",
        CLEANUP,
        "Bearer é",
    ],
)
async def test_without_the_right_secret_the_sandbox_stays(surface: Api, authorization: str | None) -> None:
    await surface.exec("t")
    reply = await retire(surface, authorization)
    assert (reply.status, reply.code) == (401, "unauthenticated")
    assert (await surface.call("GET", "/sandbox/task/t")).json["stage"] in ("active", "idle")


@pytest.mark.parametrize("secret", [None, ""])
@pytest.mark.parametrize("authorization", ["Bearer ", "Bearer", "Bearer None", f"Bearer {CLEANUP}"])
async def test_where_no_secret_is_set_no_bearer_retires_anything(secret: str | None, authorization: str) -> None:
    async with api(cleanup_secret=secret) as surface:
        await surface.exec("t")
        assert (await retire(surface, authorization)).status == 401
        assert (await surface.call("GET", "/sandbox/task/t")).json["stage"] in ("active", "idle")


async def test_the_secret_has_to_say_whose_task_where_there_are_several_projects(surface: Api) -> None:
    await surface.exec("t")
    reply = await retire(surface, f"Bearer {CLEANUP}", {})
    assert (reply.status, reply.code) == (400, "scope_required")
    assert (await retire(surface, f"Bearer {CLEANUP}", {TENANT_HEADER: "other", PROJECT_HEADER: "web"})).status == 204
    assert (await surface.call("GET", "/sandbox/task/t")).json["stage"] in ("active", "idle")


async def test_the_scope_may_be_left_out_where_there_is_one_project() -> None:
    async with api() as surface:
        await surface.exec("t")
        tenants = surface.services.tenants
        assert isinstance(tenants, Tenants)
        for record in await tenants.every_key():
            if Owner(record.tenant, record.project) != ACME:
                assert await tenants.revoke_any(record.key_id)
        assert (await retire(surface, f"Bearer {CLEANUP}", {TENANT_HEADER: "other"})).status == 400
        assert (await retire(surface, f"Bearer {CLEANUP}", {})).status == 204


async def test_the_owners_key_retires_its_own_task_only(surface: Api) -> None:
    await surface.exec("t")
    for role in ("foreign", "sibling"):
        assert (await surface.call("DELETE", "/sandbox/task/t", role=role)).status == 204
    assert (await surface.call("GET", "/sandbox/task/t")).json["stage"] in ("active", "idle")
    assert (await surface.call("DELETE", "/sandbox/task/t", role="member")).status == 204
    assert (await surface.call("GET", "/sandbox/task/t")).json["stage"] == "reclaimed"


async def test_the_teardown_secret_opens_nothing_else(surface: Api) -> None:
    for route in CLOSED:
        if route.role is not None:
            headers = SCOPE | {"Authorization": f"Bearer {CLEANUP}"}
            assert (await surface.call_route(route, role=None, headers=headers)).status == 401, named(route)


async def test_an_expired_key_is_refused(surface: Api) -> None:
    made = await surface.call("POST", "/api/v1/keys", role="admin", body={"expires_in_sec": 1})
    until = time.time() + 1.1
    key = {API_KEY_HEADER: made.json["key"]}
    assert (await surface.call("GET", "/api/v1/targets", role=None, headers=key)).status == 200
    while time.time() < until:
        await surface.call("GET", "/healthz", role=None)
    assert (await surface.call("GET", "/api/v1/targets", role=None, headers=key)).status == 401


async def test_the_second_project_of_a_tenant_is_another_owner(surface: Api) -> None:
    await surface.exec("t")
    assert (await surface.call("GET", "/sandbox/task/t", role="sibling")).status == 404
    assert await surface.world.store.get_binding(SHOP, "t") is None
