"""What every request passes through: the one error shape, bounds, deadlines, shutdown, figures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from manager.api.routes import ROUTES
from manager.api.server import Route
from manager.api.wire import BODY_BYTES, ERROR_CODES, EXEC_BODY_BYTES
from manager.errors import CapacityExhausted, ManagerError
from tests.support.api import Api, api
from tests.support.streams import connection
from tests.support.world import until


@pytest.fixture
async def surface() -> AsyncIterator[Api]:
    async with api() as made:
        yield made


def fail_with(surface: Api, error: Exception) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            raise error

    surface.services.tasks = Failing()


@pytest.mark.parametrize(
    "route", [r for r in ROUTES if not r.open], ids=lambda route: f"{route.method} {route.template}"
)
async def test_every_refusal_has_the_one_shape(surface: Api, route: Route) -> None:
    for role in (None, "member"):
        reply = await surface.call_route(route, role=role, headers=None if role else {"X-Api-Key": "wrong"})
        if reply.status >= 400 and route.method != "HEAD":
            assert reply.headers["Content-Type"] == "application/json"
            assert reply.code in ERROR_CODES
            assert ERROR_CODES[reply.code] == reply.status


@pytest.mark.parametrize(
    "path", ["/", "/sandbox", "/sandbox/task", "/api/v1/nothing", "/docs/", "/metrics", "/sandbox/task/a/b"]
)
async def test_a_path_that_is_not_there_is_not_found_with_or_without_a_key(surface: Api, path: str) -> None:
    for role in (None, "member"):
        reply = await surface.call("GET", path, role=role)
        assert (reply.status, reply.code) == (404, "not_found")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/docs", "/openapi.json"])
async def test_probes_may_ask_with_head_and_nobody_is_told_what_answers(surface: Api, path: str) -> None:
    reply = await surface.call("HEAD", path, role=None)
    assert (reply.status, reply.body) == (200, b"")
    for role in (None, "member"):
        for target in (path, "/nothing"):
            assert "Server" not in (await surface.call("GET", target, role=role)).headers


async def test_a_method_that_a_path_does_not_know_is_told_which_it_does(surface: Api) -> None:
    reply = await surface.call("PATCH", "/sandbox/task/t/exec")
    assert (reply.status, reply.code) == (405, "invalid_request")
    assert reply.headers["Allow"] == "GET, POST"


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(200)) + b"\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_http_that_can_be_read_is_refused_in_the_one_shape_and_closed(
    surface: Api, data: bytes
) -> None:
    head, _, body = (await surface.raw(data)).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert json.loads(body)["error"]["code"] == "invalid_request"


async def test_two_keys_or_hosts_smuggled_in_absolute_form_change_nothing(surface: Api) -> None:
    key = surface.keys["member"]
    head = f"GET http://elsewhere/api/v1/targets HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nConnection: close\r\n\r\n"
    assert b" 200 " in (await surface.raw(head.encode())).split(b"\r\n")[0]
    head = head.replace(f"X-Api-Key: {key}\r\n", "")
    assert b" 401 " in (await surface.raw(head.encode())).split(b"\r\n")[0]


async def test_only_100_continue_can_be_expected(surface: Api) -> None:
    head = (
        f"POST /sandbox/task/t/exec HTTP/1.1\r\nHost: x\r\nX-Api-Key: {surface.keys['member']}\r\nConnection: close\r\n"
    )
    body = b'{"command": ["echo", "x"]}'
    sent = head + f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    answer = await surface.raw(sent.encode() + body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    sent = sent.replace("100-continue", "a miracle")
    assert b'"invalid_request"' in await surface.raw(sent.encode() + body)


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────


def post_head(surface: Api, path: str, length: int) -> bytes:
    key = surface.keys["member"]
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nContent-Length: {length}\r\n\r\n".encode()


async def test_a_body_over_the_limit_is_refused_before_it_is_read(surface: Api) -> None:
    for path, limit in (("/sandbox/task/t/exec", EXEC_BODY_BYTES), ("/sandbox/task/t/files/mkdir", BODY_BYTES)):
        answer = (await surface.raw(post_head(surface, path, limit + 1))).partition(b"\r\n\r\n")[2]
        error = json.loads(answer)["error"]
        assert (error["code"], error["details"]) == ("too_large", {"limit": limit})
    assert surface.world.provider.pods == []


async def test_a_body_without_a_length_is_bounded_too(surface: Api) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65_536

    reply = await surface.call("POST", "/api/v1/keys", role="admin", body=endless())
    assert (reply.status, reply.code) == (413, "too_large")


async def test_a_body_that_does_not_come_is_not_waited_for(surface: Api) -> None:
    answer = await surface.raw(post_head(surface, "/sandbox/task/t/exec", 50) + b'{"command"')
    assert b"did not arrive within 2 seconds" in answer


async def test_a_compressed_body_is_refused(surface: Api) -> None:
    headers = {"Content-Encoding": "gzip"}
    reply = await surface.call("POST", "/sandbox/task/t/exec", headers=headers, body=b"\x1f\x8b")
    assert (reply.status, reply.code) == (400, "invalid_request")


# ── defects, capacity, shutdown ─────────────────────────────────────────────────────────────────────────────────


async def test_a_defect_is_answered_500_with_a_number_and_nothing_of_the_inside(
    surface: Api, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (RuntimeError("a secret inside"), ManagerError("a secret inside"), KeyError("a secret inside")):
        caplog.clear()
        fail_with(surface, error)
        reply = await surface.exec("t")
        assert (reply.status, reply.code) == (500, "internal")
        assert b"secret" not in reply.body
        logged = [record for record in caplog.records if record.message == "request_failed"]
        assert len(logged) == 1
        assert logged[0].__dict__["request"] in reply.json["error"]["message"]
        assert logged[0].exc_info is not None


@pytest.mark.parametrize(("seconds", "header"), [(0.1, "1"), (1.0, "1"), (1.2, "2"), (30.0, "30")])
async def test_retry_after_is_whole_seconds_rounded_up(surface: Api, seconds: float, header: str) -> None:
    fail_with(surface, CapacityExhausted("no room", retry_after_sec=seconds, said="0/3 nodes"))
    reply = await surface.exec("t")
    assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "capacity_exhausted", header)
    assert reply.json["error"]["retryable"] is True
    assert reply.json["error"]["details"] == {"said": "0/3 nodes"}


async def test_an_error_can_carry_text_that_no_utf8_can(surface: Api) -> None:
    fail_with(surface, CapacityExhausted("said \udcff", said=["\ud800"]))
    reply = await surface.exec("t")
    assert (reply.status, reply.json["error"]["message"]) == (503, "said \\udcff")


async def test_while_it_leaves_requests_are_taken_and_their_connections_closed(surface: Api) -> None:
    """F31: nobody is refused before load balancers know that a manager is ending."""
    kept = await surface.exec("t")
    surface.services.in_flight.leaving = True
    served = await surface.exec("t")
    assert (served.status, served.json["pod_id"]) == (200, kept.json["pod_id"])
    assert [reply.headers.get("Connection", "") for reply in (kept, served)] == ["", "close"]
    refused = await surface.call("GET", "/no/such/path")
    assert (refused.status, refused.headers["Connection"]) == (404, "close")
    assert (await surface.call("GET", "/readyz", role=None)).status == 503
    assert (await surface.call("GET", "/healthz", role=None)).json["status"] == "shutting_down"


async def test_while_it_ends_requests_under_way_finish_and_new_ones_are_refused(surface: Api) -> None:
    command = asyncio.create_task(surface.exec("t", "wait"))
    await until(lambda: bool(surface.world.provider.executors))
    executor = next(iter(surface.world.provider.executors.values()))
    await executor.waiting.wait()
    in_flight = surface.services.in_flight
    in_flight.leaving = in_flight.ending = True
    refused = await surface.exec("other")
    assert (refused.status, refused.code) == (503, "shutting_down")
    assert (await surface.call("GET", "/healthz", role=None)).json["status"] == "shutting_down"
    assert (await surface.call("GET", "/readyz", role=None)).status == 503
    assert not await in_flight.drained(0.01)
    executor.release()
    assert (await command).status == 200
    assert await in_flight.drained(20)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_connections_over_the_bound_are_told_so_and_those_within_go_on(run: Callable[[Any], None]) -> None:
    run(_over_the_bound())


async def _over_the_bound() -> None:
    async with api(max_connections=3) as surface, AsyncExitStack() as stack:
        held = [
            await stack.enter_async_context(connection(asyncio.open_connection("127.0.0.1", surface.port)))
            for _ in range(3)
        ]
        await until(lambda: surface.services.in_flight.count == 0)
        answer = await surface.raw(b"")
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b'"rate_limited"' in answer
        reader, writer = held[0]
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"


async def test_readiness_tells_of_a_store_that_does_not_answer(surface: Api) -> None:
    assert (await surface.call("GET", "/readyz", role=None)).status == 200

    async def missing() -> str:
        return "the store is away"

    surface.services.not_ready = missing
    reply = await surface.call("GET", "/readyz", role=None)
    assert (reply.status, reply.json["status"]) == (503, "degraded")


async def test_figures_have_labels_from_closed_sets_only(surface: Api) -> None:
    await surface.exec("a-task-with-a-name", "echo", "x")
    await surface.exec("a-task-with-a-name", "echo", "x", profile="no-such-profile")
    await surface.call("GET", "/no/such/path-of-mine")
    text = surface.services.metrics.render().decode()
    assert 'sojourn_commands_total{outcome="exited"} 1.0' in text
    assert 'sojourn_placements_total{provisioned="cold"} 1.0' in text
    assert 'sojourn_claims_total{provisioned="cold"} 1.0' in text
    assert 'sojourn_refusals_total{code="unknown_profile"} 1.0' in text
    assert 'sojourn_requests_total{route="none",status="4xx"} 1.0' in text
    for text_of_a_caller in ("a-task-with-a-name", "no-such-profile", "path-of-mine", "acme"):
        assert text_of_a_caller not in text


async def test_the_page_for_people_runs_nothing_and_takes_nothing_from_elsewhere(surface: Api) -> None:
    reply = await surface.call("GET", "/docs", role=None)
    policy = reply.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    for word in (b"<script", b"http://", b"https://", b"src="):
        assert word not in reply.body
    assert re.search(rb"<[^>]*\son[a-z]+\s*=", reply.body) is None  # no handler in any tag


async def test_pools_and_targets_are_those_of_the_project(surface: Api) -> None:
    pools = (await surface.call("GET", "/api/v1/pools", role="admin")).json["pools"]
    assert [pool["profile"] for pool in pools] == ["small", "large"]
    assert (await surface.call("GET", "/api/v1/pools", role="foreign")).json["pools"] == []
    targets = (await surface.call("GET", "/api/v1/targets")).json["targets"]
    assert targets == [
        {"name": "here", "provider": "local", "region": "north", "default": True, "profiles": ["small", "large"]}
    ]
    assert (await surface.call("GET", "/api/v1/targets?x=1")).code == "invalid_request"
