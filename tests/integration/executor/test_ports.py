"""A server in the pod is reached through the executor: as it is, and with nothing of ours (S31)."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import WSMsgType

from tests.support.executor_pod import Pod, connected, until
from tests.support.port_app import App, serving
from tests.support.streams import connection

Serve = Callable[[bytes], Awaitable[int]]


@pytest.fixture
async def app() -> AsyncIterator[App]:
    async with serving("127.0.0.1") as app:
        yield app


@pytest.fixture
async def serve_raw() -> AsyncIterator[Serve]:
    """Starts a server that answers each connection with these bytes; its port."""
    servers: list[asyncio.Server] = []

    async def serve(answer: bytes) -> int:
        async def told(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(told, "127.0.0.1", 0)
        servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    yield serve
    for server in servers:
        server.close()
        await server.wait_closed()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def raw(pod: Pod, data: bytes) -> bytes:
    """All that the executor answers to these bytes on a connection of their own."""
    opening = asyncio.open_unix_connection(pod.process.socket)
    async with connection(opening) as (reader, writer), asyncio.timeout(60):
        writer.write(data)
        return await reader.read()


# ── where a call goes ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_server_on_either_loopback_address_is_reached(any_tier: Pod, host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    async with serving(host) as app:
        reply = await any_tier.call("PATCH", f"/v1/ports/{app.port}/a%2Fb/c;d?x=%20&y", b"hello")
    assert reply.status == 200, reply.body
    assert (reply.json["method"], reply.json["target"]) == ("PATCH", "/a%2Fb/c;d?x=%20&y")
    assert reply.json["body"] == "hello"
    assert reply.headers["Sandbox-Port"] == str(app.port)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"])
async def test_every_method_is_passed_on(executor: Pod, app: App, method: str) -> None:
    reply = await executor.call(method, f"/v1/ports/{app.port}")
    assert reply.status == 200
    assert [(request.method, request.raw_path) for request in app.seen] == [(method, "/")]
    assert (method == "HEAD") is (reply.body == b"")


@pytest.mark.parametrize(
    "port",
    ["08080", "+8080", "8080%20", "0", "99999", "65536", "8080", "-1", "1e3", "", "٣٠٠٠", "0x50", "3000.0", "1 000",
     "localhost:80", "127.0.0.1:80", "80@example.com", "%38080", "8_0"],
)  # fmt: skip
async def test_what_is_no_port_or_our_own_is_refused(executor: Pod, port: str) -> None:
    target = f"/v1/ports/{quote(port, safe='%+@:')}/healthz".encode()
    answer = await raw(
        executor,
        b"GET " + target + b" HTTP/1.1\r\nHost: pod\r\nConnection: close\r\nAuthorization: Bearer "
        + executor.token.encode() + b"\r\n\r\n",
    )  # fmt: skip
    assert b" 400 " in answer.splitlines()[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"


async def test_a_port_where_nobody_listens_is_not_found(executor: Pod) -> None:
    reply = await executor.call("POST", f"/v1/ports/{free_port()}/x", b"body")
    assert (reply.status, reply.code) == (404, "not_found")
    assert "nothing listens" in reply.json["error"]["message"]
    assert "Sandbox-Port" not in reply.headers


@pytest.mark.parametrize("path", ["a/../b", "..", ".", "%2e%2E/x", "a/.%2e", "x#y"])
async def test_dot_segments_and_fragments_are_refused(executor: Pod, app: App, path: str) -> None:
    answer = await raw(
        executor,
        f"GET /v1/ports/{app.port}/{path} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n"
        f"Authorization: Bearer {executor.token}\r\n\r\n".encode(),
    )
    assert b" 400 " in answer.splitlines()[0]
    assert app.seen == []


async def test_an_absolute_target_goes_nowhere(executor: Pod, app: App) -> None:
    for target in (f"http://127.0.0.1:{app.port}/", f"http://pod/v1/ports/{app.port}/x", f"//pod/v1/ports/{app.port}/"):
        answer = await raw(
            executor,
            f"GET {target} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n"
            f"Authorization: Bearer {executor.token}\r\n\r\n".encode(),
        )
        assert answer.splitlines()[0].split()[1] in (b"400", b"404"), answer
    assert app.seen == []


async def test_without_the_token_no_port_is_reached_by_http_or_websocket(executor: Pod, app: App) -> None:
    assert (await executor.call("GET", f"/v1/ports/{app.port}/", token="")).status == 401
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await executor.session.ws_connect(f"{executor.url}/v1/ports/{app.port}/")
    assert refused.value.status == 401
    assert app.seen == []


# ── what passes ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_nothing_of_ours_reaches_the_server(executor: Pod, app: App) -> None:
    reply = await executor.call(
        "GET", f"/v1/ports/{app.port}/",
        headers={
            "Sandbox-Lease-Sec": "600", "Sandbox_Pod": "x", "X-Api-Key": "sk-1", "X_Api_Key": "sk-2",
            "X-Sandbox-Tenant-Id": "acme", "Proxy-Authorization": "Basic x", "TE": "trailers", "Keep-Alive": "5",
            "Connection": "keep-alive, X-Hop", "X-Hop": "1", "Cookie": "app=1; sojourn_session=s3; __Host-Sojourn=s4",
            "X-Own": "kept", "Accept": "text/x",
        },
    )  # fmt: skip
    names = {name.lower(): value for name, value in reply.json["headers"]}
    assert names.pop("host") == f"localhost:{app.port}"
    assert names.pop("connection", "close") == "close"
    assert names.pop("accept-encoding", "") in ("", "gzip, deflate", "gzip, deflate, br", "gzip, deflate, br, zstd")
    assert names.pop("user-agent", "").startswith(("Python", ""))
    assert names == {"cookie": "app=1", "x-own": "kept", "accept": "text/x"}
    assert executor.token not in reply.body.decode()


async def test_a_server_can_forge_none_of_our_headers_and_sets_cookies_for_no_wider_domain(
    executor: Pod, app: App
) -> None:
    reply = await executor.call("GET", f"/v1/ports/{app.port}/cookies", allow_redirects=False)
    assert reply.status == 302
    assert reply.headers["Location"] == "https://elsewhere.example/"
    assert reply.headers.getall("Set-Cookie") == ["a=1; Path=/; HttpOnly", "b=2"]
    assert reply.headers["X-Own"] == "kept"
    assert "Sandbox-Pod" not in reply.headers
    assert "X-Private" not in reply.headers
    assert reply.headers.getall("Sandbox-Port") == [str(app.port)]


async def test_nothing_is_packed_or_unpacked_on_the_way(executor: Pod, app: App) -> None:
    reply = await executor.call("GET", f"/v1/ports/{app.port}/packed")  # the test's client unpacks it
    assert reply.headers["Content-Encoding"] == "gzip"
    assert reply.body == b"x" * 1000
    packed = gzip.compress(b"y" * 1000)
    reply = await executor.call(
        "POST", f"/v1/ports/{app.port}/length", packed, headers={"Content-Encoding": "gzip", "X-Size": "1"}
    )
    sent = dict(reply.json["headers"])
    assert sent["Content-Encoding"] == "gzip"
    assert int(sent["Content-Length"]) == len(packed)


async def test_bodies_of_any_size_pass_in_constant_memory_both_ways(executor: Pod, app: App) -> None:
    before = executor.process.status_kib("VmHWM")
    size = 96 << 20

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size >> 20):
            yield bytes(1 << 20)

    async with executor.session.post(
        f"{executor.url}/v1/ports/{app.port}/count", data=body(), headers={"Authorization": f"Bearer {executor.token}"}
    ) as answer:
        assert await answer.json() == size
    got = 0
    async with executor.session.get(
        f"{executor.url}/v1/ports/{app.port}/flood", headers={"Authorization": f"Bearer {executor.token}"}
    ) as answer:
        async for piece in answer.content.iter_any():
            got += len(piece)
            if got > size:
                break
    assert executor.process.status_kib("VmHWM") - before < 24 << 10


async def test_a_caller_that_does_not_read_holds_the_server_back(executor: Pod, app: App) -> None:
    async with executor.session.get(
        f"{executor.url}/v1/ports/{app.port}/flood", headers={"Authorization": f"Bearer {executor.token}"}
    ) as answer:
        await answer.content.readany()
        last = -1

        def stands_still() -> bool:
            nonlocal last
            still, last = app.sent == last, app.sent
            return still

        await until(stands_still, "the server is held back")
        assert app.sent < 128 << 20


async def test_a_caller_that_hangs_up_ends_the_call_to_the_server(executor: Pod, app: App) -> None:
    with pytest.raises(TimeoutError):
        await executor.call("GET", f"/v1/ports/{app.port}/never", timeout=aiohttp.ClientTimeout(total=0.5))
    await asyncio.wait_for(app.hung_up.wait(), 30)


# ── servers that misbehave, and callers ─────────────────────────────────────────────────────────────────────────

BROKEN = {
    "nothing": b"",
    "no http": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "a status that is none": b"HTTP/1.1 abc OK\r\n\r\n",
    "a head without an end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    "a header over its bound": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(500)) + b"\r\n",
    "another protocol unasked": b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nab",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_an_answer_that_is_none_gives_a_typed_error(executor: Pod, serve_raw: Serve, kind: str) -> None:
    reply = await executor.call("GET", f"/v1/ports/{await serve_raw(BROKEN[kind])}/")
    assert (reply.status, reply.code) == (504, "outcome_unknown"), reply.body
    assert (await executor.call("GET", "/v1/lease")).status == 200


async def test_a_body_that_breaks_off_never_looks_whole(executor: Pod, serve_raw: Serve) -> None:
    for answer in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
    ):
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
            await executor.call("GET", f"/v1/ports/{await serve_raw(answer)}/")


async def test_an_answer_with_two_framings_smuggles_nothing(executor: Pod, serve_raw: Serve) -> None:
    port = await serve_raw(
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen"
    )
    token = f"Authorization: Bearer {executor.token}\r\n"
    answer = await raw(
        executor,
        f"GET /v1/ports/{port}/ HTTP/1.1\r\nHost: pod\r\n{token}\r\n"
        f"GET /v1/lease HTTP/1.1\r\nHost: pod\r\n{token}Connection: close\r\n\r\n".encode(),
    )
    assert b"stolen" not in answer
    assert answer.count(b"HTTP/1.1 ") <= 2
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert not (b"content-length" in head and b"transfer-encoding" in head)


SMUGGLED = {
    "CL.TE": b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "TE.CL": b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\nGPOST / HTTP/1.1\r\n\r\n0\r\n\r\n",
    "TE.TE": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a signed length": b"Content-Length: +3\r\n\r\nabc",
    "a chunk size that is none": b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\nContent-Length: 3\r\n\r\nabc",
    "a folded header": b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 3\r\n\r\nabc",
}


@pytest.mark.parametrize("kind", SMUGGLED)
async def test_a_request_of_two_readings_never_reaches_the_server(executor: Pod, app: App, kind: str) -> None:
    head = f"POST /v1/ports/{app.port}/ HTTP/1.1\r\nHost: pod\r\nAuthorization: Bearer {executor.token}\r\n"
    answer = await raw(executor, head.encode() + SMUGGLED[kind])
    whole = [request for request in app.seen if request.method != "POST" or request.raw_path != "/"]
    assert whole == []
    assert b" 400 " in answer.splitlines()[0], answer


@pytest.mark.parametrize("protocol", ["h2c", "TLS/1.0", "websocket, h2c"])
async def test_only_an_upgrade_to_websocket_is_one(executor: Pod, app: App, protocol: str) -> None:
    reply = await executor.call(
        "GET", f"/v1/ports/{app.port}/", headers={"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol}
    )
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert app.seen == []


async def test_traffic_is_work_and_an_open_connection_is_none(fresh_executor: Any, app: App) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:

            async def quiet_for() -> float:
                return float((await pod.call("GET", "/v1/lease")).json["quiet_for_sec"])

            headers = {"Authorization": f"Bearer {pod.token}"}
            async with pod.session.ws_connect(f"{pod.url}/v1/ports/{app.port}/", headers=headers) as ws:
                while await quiet_for() < 1.2:
                    await asyncio.sleep(0.05)
                sent_at = time.monotonic()
                await ws.send_str("x")
                assert await ws.receive_str() == "x"
                assert await quiet_for() <= time.monotonic() - sent_at
                waiting = asyncio.create_task(pod.call("GET", f"/v1/ports/{app.port}/never"), name="waiting")
                while (await pod.call("GET", "/v1/lease")).json["operations"] != 1:
                    await asyncio.sleep(0.02)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting


# ── WebSockets ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_websocket_passes_messages_pings_and_the_close_both_ways(executor: Pod, app: App) -> None:
    headers = {"Authorization": f"Bearer {executor.token}", "X-Own": "kept", "Sandbox-Lease-Sec": "600"}
    async with executor.session.ws_connect(
        f"{executor.url}/v1/ports/{app.port}/chat?room=1", headers=headers, protocols=("other", "chat"), autoping=False
    ) as ws:
        assert ws.protocol == "chat"
        await ws.send_str("héllo")
        assert await ws.receive_str() == "héllo"
        await ws.send_bytes(os.urandom(1 << 20))
        assert len(await ws.receive_bytes()) == 1 << 20
        await ws.ping(b"are you there")
        pong = await ws.receive()
        assert (pong.type, bytes(pong.data)) == (WSMsgType.PONG, b"are you there")
        await ws.send_str("close 4321")
        end = await ws.receive()
        assert (end.type, end.data, end.extra) == (WSMsgType.CLOSE, 4321, "as asked")
    seen = app.seen[0]
    assert seen.raw_path == "/chat?room=1"
    assert executor.token not in str(seen.headers)
    assert not any(name.lower().startswith("sandbox-") for name in seen.headers)
    assert seen.headers["X-Own"] == "kept"


async def test_a_caller_that_leaves_ends_the_websocket_to_the_server(executor: Pod, app: App) -> None:
    headers = {"Authorization": f"Bearer {executor.token}"}
    ws = await executor.session.ws_connect(f"{executor.url}/v1/ports/{app.port}/", headers=headers)
    await ws.close()
    await asyncio.wait_for(app.hung_up.wait(), 30)


async def test_a_websocket_that_the_server_refuses_tells_its_status(executor: Pod, app: App) -> None:
    headers = {"Authorization": f"Bearer {executor.token}"}
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await executor.session.ws_connect(f"{executor.url}/v1/ports/{app.port}/refused", headers=headers)
    assert refused.value.status == 403
    with pytest.raises(aiohttp.WSServerHandshakeError) as dead:
        await executor.session.ws_connect(f"{executor.url}/v1/ports/{free_port()}/", headers=headers)
    assert dead.value.status == 404


async def test_a_message_over_the_bound_ends_the_websocket_with_1009(executor: Pod, app: App) -> None:
    headers = {"Authorization": f"Bearer {executor.token}"}
    async with executor.session.ws_connect(f"{executor.url}/v1/ports/{app.port}/", headers=headers) as ws:
        with contextlib.suppress(ConnectionError):
            await ws.send_bytes(bytes((4 << 20) + 1))
        end = await ws.receive()
        assert end.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
    await asyncio.wait_for(app.hung_up.wait(), 30)
