"""Servers in a sandbox through the manager: who reaches them, what passes, and that they get nothing of ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from manager.api.wire import API_KEY_HEADER
from tests.support.api import Api, api
from tests.support.port_app import App, serving
from tests.support.world import until


@pytest.fixture
async def surface() -> AsyncIterator[Api]:
    async with api() as made:
        await made.exec("t")
        yield made


@pytest.fixture
async def app() -> AsyncIterator[App]:
    async with serving("127.0.0.1") as app:
        yield app


def at(app: App, path: str = "", task: str = "t") -> str:
    return f"/sandbox/task/{task}/ports/{app.port}{path}"


def operations(surface: Api) -> int:
    return surface.world.services.leases.operations_total


# ── HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_a_call_passes_as_it_is(surface: Api, app: App, method: str) -> None:
    body = b"hello" if method in ("POST", "PUT", "PATCH") else None
    reply = await surface.call(method, at(app, "/a%2Fb/c?x=%20&y"), body=body, headers={"X-Own": "1"})
    assert reply.status == 200, reply.body
    assert reply.headers["Sandbox-Port"] == str(app.port)
    assert reply.headers["Sandbox-Pod"] == (await surface.world.binding("t")).pod
    if method != "HEAD":
        assert (reply.json["method"], reply.json["target"]) == (method, "/a%2Fb/c?x=%20&y")
        assert reply.json["body"] == ("hello" if body else "")
        assert ["X-Own", "1"] in reply.json["headers"]


async def test_the_root_is_reached_with_and_without_its_slash(surface: Api, app: App) -> None:
    for path in ("", "/", "?x=1"):
        assert (await surface.call("GET", at(app, path))).json["target"] == "/" + path.removeprefix("/")


async def test_the_server_gets_no_secret_of_ours(surface: Api, app: App) -> None:
    """S31"""
    key = surface.keys["member"]
    headers = {
        "Authorization": "Bearer s-auth", "Cookie": "app=1; sojourn_session=s-cookie", "X_Api_Key": "s-other",
        "If-Sandbox-Pod": (await surface.world.binding("t")).pod, "Sandbox-Lease-Sec": "1", "Sandbox-Pod": "s-pod",
        "Proxy-Authorization": "Basic s-proxy", "Connection": "X-Hop", "X-Hop": "s-hop", "X-Own": "kept",
        "Accept": "text/x", "User-Agent": "me", "Accept-Encoding": "identity",
    }  # fmt: skip
    reply = await surface.call("GET", at(app), headers=headers)
    assert reply.status == 200, reply.body
    names = {name.lower(): value for name, value in reply.json["headers"]}
    assert names.pop("connection", "close") == "close"
    assert names == {
        "host": f"localhost:{app.port}", "cookie": "app=1", "x-own": "kept", "accept": "text/x", "user-agent": "me",
        "accept-encoding": "identity",
    }  # fmt: skip
    assert key not in reply.body.decode()
    for secret in ("s-", "lease", "sandbox", "tenant", "bearer"):
        assert secret not in json.dumps(list(names.items())).lower()


async def test_an_answer_has_no_say_over_our_origin(surface: Api, app: App) -> None:
    async with surface.session.get(
        surface.address + at(app, "/cookies"), headers=surface.as_role("member"), allow_redirects=False
    ) as reply:
        assert reply.status == 302
        assert "Location" not in reply.headers
        assert reply.headers["Sandbox-App-Location"] == "https://elsewhere.example/"
        prefix = at(app)
        assert reply.headers.getall("Set-Cookie") == [f"a=1; HttpOnly; Path={prefix}/", f"b=2; Path={prefix}/"]
        assert reply.headers["Sandbox-Pod"] == (await surface.world.binding("t")).pod
        assert reply.headers["Content-Security-Policy"] == "sandbox; default-src 'none'"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Cache-Control"] == "no-store"
        assert "X-Private" not in reply.headers


async def test_no_body_of_any_size_is_kept(surface: Api, app: App) -> None:
    size = 32 << 20

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size >> 20):
            yield bytes(1 << 20)

    assert (await surface.call("POST", at(app, "/count"), body=body())).json == size
    async with surface.session.get(surface.address + at(app, "/flood"), headers=surface.as_role("member")) as reply:
        await reply.content.readexactly(1 << 20)
        last = -1

        def stands_still() -> bool:
            nonlocal last
            still, last = app.sent == last, app.sent
            return still

        await until(stands_still)
        assert app.sent < 128 << 20
    await asyncio.wait_for(app.hung_up.wait(), 30)


# ── who, and which port ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "port",
    ["08080", "+8080", "8080%20", "0", "99999", "8080", "02280", "+2280", "-1", "", "x", "80@evil", "127.0.0.1:80"],
)
async def test_what_is_no_port_is_refused(surface: Api, port: str) -> None:
    """AU05"""
    assert (await surface.call("GET", f"/sandbox/task/t/ports/{port}/x", role=None)).status == 401
    reply = await surface.call("GET", f"/sandbox/task/t/ports/{port}/x")
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert reply.json["error"]["details"] == {"field": "port"}


@pytest.mark.parametrize("path", ["/..", "/../../../exec", "/a/./b", "/%2e%2e/x", "/.%2E"])
async def test_a_path_does_not_lead_out_of_the_port(surface: Api, app: App, path: str) -> None:
    reply = await surface.call("GET", at(app, path))
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert app.seen == []


async def test_without_a_key_or_with_anothers_no_server_is_reached(surface: Api, app: App) -> None:
    url = surface.address + at(app)
    for role, status in ((None, 401), ("foreign", 404), ("sibling", 404)):
        assert (await surface.call("GET", at(app), role=role)).status == status
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await surface.session.ws_connect(url, headers=surface.as_role(role) if role else {})
        assert refused.value.status == status
    assert app.seen == []


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_no_method_provides_a_sandbox(surface: Api, app: App, method: str) -> None:
    reply = await surface.call(method, at(app, task="never-used"), body=b"x" if method != "GET" else None)
    assert (reply.status, reply.code) == (404, "not_found")
    await surface.call("DELETE", "/sandbox/task/t")
    reply = await surface.call(method, at(app), body=b"x" if method != "GET" else None)
    assert (reply.status, reply.code) == (410, "sandbox_gone")
    assert app.seen == []


async def test_a_port_where_nobody_listens_is_not_found_over_http_and_websocket(surface: Api) -> None:
    async with serving("127.0.0.1") as gone:
        pass
    reply = await surface.call("GET", at(gone))
    assert (reply.status, reply.code) == (404, "not_found")
    assert "nothing listens" in reply.json["error"]["message"]
    assert "Sandbox-Port" not in reply.headers
    assert (await surface.call("HEAD", at(gone))).status == 404
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await surface.session.ws_connect(surface.address + at(gone), headers=surface.as_role("member"))
    assert refused.value.status == 404


async def test_another_pod_than_the_expected_is_refused(surface: Api, app: App) -> None:
    reply = await surface.call("GET", at(app), headers={"If-Sandbox-Pod": "another"})
    assert (reply.status, reply.code) == (409, "sandbox_replaced")


@pytest.mark.parametrize("status", [200, 302, 401, 500])
async def test_a_pod_cannot_pass_its_own_answer_off_as_a_servers(surface: Api, app: App, status: int) -> None:
    executor = await surface.world.executor("t")
    executor.port_says = lambda: web.Response(status=status, text="forged", headers={"Location": "https://evil/"})
    reply = await surface.call("GET", at(app))
    assert (reply.status, reply.code) == (502, "executor_unreachable")
    assert b"forged" not in reply.body


async def test_a_request_of_two_readings_reaches_no_server(surface: Api, app: App) -> None:
    head = f"POST {at(app)} HTTP/1.1\r\nHost: m\r\n{API_KEY_HEADER}: {surface.keys['member']}\r\n"
    for body in (
        "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\nGPOST\r\n0\r\n\r\n",
        "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        "Transfer-Encoding : chunked\r\nContent-Length: 3\r\n\r\nabc",
    ):
        assert b" 400 " in (await surface.raw((head + body).encode())).splitlines()[0], body
    absolute = f"GET http://127.0.0.1:{app.port}/ HTTP/1.1\r\nHost: m\r\n{API_KEY_HEADER}: {surface.keys['member']}\r\n"
    answer = await surface.raw((absolute + "Connection: close\r\n\r\n").encode())
    assert answer.split()[1] in (b"400", b"404")
    assert app.seen == []


# ── the lease ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_call_under_way_is_work_and_its_end_ends_that(surface: Api, app: App) -> None:
    waiting = asyncio.create_task(surface.call("GET", at(app, "/never")), name="waiting")
    await until(lambda: operations(surface) == 1)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await until(lambda: operations(surface) == 0)
    await asyncio.wait_for(app.hung_up.wait(), 30)


# ── WebSockets ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_websocket_passes_both_ways_with_its_protocol_and_close(surface: Api, app: App) -> None:
    headers = surface.as_role("member") | {"X-Own": "kept", "Authorization": "Bearer s-auth"}
    async with surface.session.ws_connect(
        surface.address + at(app, "/chat?x=1"), headers=headers, protocols=("other", "chat"), autoping=False
    ) as ws:
        assert ws.protocol == "chat"
        await ws.send_str("héllo")
        assert await ws.receive_str() == "héllo"
        await ws.send_bytes(os.urandom(1 << 20))
        assert len(await ws.receive_bytes()) == 1 << 20
        await ws.ping(b"you")
        pong = await ws.receive()
        assert (pong.type, bytes(pong.data)) == (WSMsgType.PONG, b"you")
        await ws.send_str("close 4321")
        end = await ws.receive()
        assert (end.type, end.data, end.extra) == (WSMsgType.CLOSE, 4321, "as asked")
    (seen,) = app.seen
    assert seen.raw_path == "/chat?x=1"
    assert seen.headers["X-Own"] == "kept"
    assert surface.keys["member"] not in str(seen.headers)
    assert {"authorization", "sandbox-pod", "sandbox-lease-sec", API_KEY_HEADER.lower()}.isdisjoint(
        name.lower() for name in seen.headers
    )


async def test_an_idle_websocket_is_no_work_and_a_message_is(surface: Api, app: App) -> None:
    async with surface.session.ws_connect(surface.address + at(app), headers=surface.as_role("member")) as ws:
        await until(lambda: operations(surface) == 0)
        await ws.send_str("x")
        assert await ws.receive_str() == "x"
        assert operations(surface) == 1
        await until(lambda: operations(surface) == 0)
    await asyncio.wait_for(app.hung_up.wait(), 30)


async def test_a_websocket_that_the_server_declines_tells_its_status(surface: Api, app: App) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await surface.session.ws_connect(surface.address + at(app, "/refused"), headers=surface.as_role("member"))
    assert refused.value.status == 403


async def test_a_retired_task_and_a_revoked_key_end_their_websockets(surface: Api, app: App) -> None:
    made = await surface.call("POST", "/api/v1/keys", role="admin", body={"role": "member"})
    async with surface.session.ws_connect(
        surface.address + at(app), headers={API_KEY_HEADER: made.json["key"]}, autoclose=False
    ) as ws:
        await surface.call("DELETE", f"/api/v1/keys/{made.json['key_id']}", role="admin")
        end = await asyncio.wait_for(ws.receive(), 30)
        assert (end.type, end.data) == (WSMsgType.CLOSE, 4401)
    async with surface.session.ws_connect(
        surface.address + at(app), headers=surface.as_role("member"), autoclose=False
    ) as ws:
        await surface.call("DELETE", "/sandbox/task/t")
        end = await asyncio.wait_for(ws.receive(), 30)
        assert end.type in (WSMsgType.CLOSE, WSMsgType.CLOSED)


@pytest.mark.parametrize("protocol", ["h2c", "websocket, h2c"])
async def test_only_an_upgrade_to_websocket_is_one(surface: Api, app: App, protocol: str) -> None:
    reply = await surface.call("GET", at(app), headers={"Connection": "Upgrade", "Upgrade": protocol})
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert app.seen == []
