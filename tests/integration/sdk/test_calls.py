"""Plain calls: what is sent again and what never is, deadlines, and answers that are none."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import web

from sojourn import AsyncClient, transport
from sojourn.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    PreconditionFailed,
    QuotaExceeded,
    SojournError,
    StoreUnavailable,
    Unauthenticated,
    UnexpectedAnswer,
)
from tests.support.fake_manager import FakeManager, drop, error

TASK = "/sandbox/task/t"
INFO = {"sandbox_id": "s1", "task_id": "t", "stage": "idle", "something_new": {"deep": [1]}}


async def test_unknown_fields_of_an_answer_are_passed_over(fake: FakeManager, client: AsyncClient) -> None:
    async def tells(request: web.Request) -> web.StreamResponse:
        return web.json_response(INFO)

    fake.on(f"GET {TASK}", tells)
    assert (await client.task("t").info()).stage == "idle"


async def test_the_key_and_scope_travel_in_headers(fake: FakeManager) -> None:
    async def tells(request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    fake.on("GET /healthz", tells)
    async with AsyncClient(fake.address, "secret", tenant="acme", project="web", member="a@b.c") as client:
        assert (await client.health()).status == "ok"
    headers = fake.requests[0].headers
    assert headers["X-Api-Key"] == "secret"
    assert headers["X-Sandbox-Tenant-Id"] == "acme"
    assert headers["X-Sandbox-Project-Id"] == "web"
    assert headers["X-Sandbox-Member"] == "a@b.c"


async def test_a_lost_answer_to_a_read_is_asked_for_again(fake: FakeManager, client: AsyncClient) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        await drop(request)
        return web.Response()

    async def tells(request: web.Request) -> web.StreamResponse:
        return web.json_response(INFO)

    fake.on(f"GET {TASK}", breaks, breaks, tells)
    assert (await client.task("t").info()).sandbox_id == "s1"
    assert len(fake.requests) == 3


async def test_input_that_may_have_arrived_is_never_sent_twice(fake: FakeManager, client: AsyncClient) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        await drop(request)
        return web.Response()

    fake.on(f"POST {TASK}/processes/p1/stdin", breaks)
    with pytest.raises(ConnectionFailed):
        await client.task("t").process("p1").write_stdin(b"once")
    assert len(fake.requests) == 1


async def test_input_that_was_refused_for_now_is_sent_again(fake: FakeManager, client: AsyncClient) -> None:
    async def later(request: web.Request) -> web.StreamResponse:
        return error("store_unavailable", 503, retryable=True)

    async def takes(request: web.Request) -> web.StreamResponse:
        return web.Response(status=204)

    fake.on(f"POST {TASK}/processes/p1/stdin", later, takes)
    await client.task("t").process("p1").write_stdin(b"once")
    assert len(fake.requests) == 2


async def test_retry_after_is_honoured_as_far_as_there_is_patience(fake: FakeManager) -> None:
    async def full(request: web.Request) -> web.StreamResponse:
        return error("quota_exceeded", 429, retryable=True, headers={"Retry-After": "3600"})

    fake.on(f"POST {TASK}/processes", full)
    async with AsyncClient(fake.address, "key", retry_sec=30) as client:
        with pytest.raises(QuotaExceeded) as caught:
            await client.task("t").start("x")
    assert caught.value.retry_after_sec == 3600
    assert len(fake.requests) == 1


async def test_a_start_is_repeated_under_one_key(fake: FakeManager, client: AsyncClient) -> None:
    async def later(request: web.Request) -> web.StreamResponse:
        return error("store_unavailable", 503, retryable=True, headers={"Retry-After": "0"})

    async def starts(request: web.Request) -> web.StreamResponse:
        return web.json_response({"id": request.headers["Idempotency-Key"], "pid": 7, "state": "running"}, status=201)

    fake.on(f"POST {TASK}/processes", later, starts)
    process = await client.task("t").start("x")
    assert [request.headers["Idempotency-Key"] for request in fake.requests] == [process.id, process.id]


async def test_a_server_that_stays_unavailable_is_an_error_in_the_end(fake: FakeManager) -> None:
    async def later(request: web.Request) -> web.StreamResponse:
        return error("store_unavailable", 503, retryable=True)

    fake.on(f"GET {TASK}", later)
    async with AsyncClient(fake.address, "key", retry_sec=0.5) as client:
        with pytest.raises(StoreUnavailable):
            await client.task("t").info()


async def test_a_wrong_key_is_said_at_once(fake: FakeManager, client: AsyncClient) -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        return error("unauthenticated", 401)

    fake.on(f"GET {TASK}", refuses)
    with pytest.raises(Unauthenticated):
        await client.task("t").info()
    assert len(fake.requests) == 1


async def test_a_server_that_is_not_there_is_not_waited_for_long() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with AsyncClient(f"http://127.0.0.1:{unused.getsockname()[1]}", "key") as client:
            with pytest.raises(ConnectionFailed) as caught:
                await client.health()
    assert not caught.value.sent


async def test_an_answer_that_never_comes_ends_at_the_deadline(fake: FakeManager, client: AsyncClient) -> None:
    let_go = asyncio.Event()

    async def hangs(request: web.Request) -> web.StreamResponse:
        await let_go.wait()
        return web.Response()

    fake.on("GET /x", hangs)
    try:
        with pytest.raises(DeadlineExceeded):
            await client._transport.call("GET", "/x", retry="safe", deadline_sec=0.2)
    finally:
        let_go.set()


async def test_a_redirect_is_not_followed_and_the_key_not_sent_on(fake: FakeManager, client: AsyncClient) -> None:
    async def redirects(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    fake.on(f"GET {TASK}", redirects)
    with pytest.raises(UnexpectedAnswer, match="elsewhere"):
        await client.task("t").info()
    assert [request.path for request in fake.requests] == [TASK]


async def test_a_page_of_another_server_is_said_to_be_none_of_ours(fake: FakeManager, client: AsyncClient) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>hello</html>", content_type="text/html")

    fake.on(f"GET {TASK}", page)
    with pytest.raises(UnexpectedAnswer):
        await client.task("t").info()


async def test_an_answer_over_its_bound_is_refused(fake: FakeManager, client: AsyncClient) -> None:
    async def floods(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 2000)

    fake.on("GET /x", floods)
    with pytest.raises(UnexpectedAnswer, match="over 1000 bytes"):
        await client._transport.call("GET", "/x", retry="safe", max_bytes=1000)


async def test_a_closed_client_says_so(fake: FakeManager) -> None:
    client = AsyncClient(fake.address, "key")
    await client.close()
    with pytest.raises(SojournError, match="closed"):
        await client.health()


async def test_ids_that_proxies_mangle_are_sent_as_base64(fake: FakeManager, client: AsyncClient) -> None:
    async def tells(request: web.Request) -> web.StreamResponse:
        return web.json_response(INFO)

    fake.on("GET /sandbox/task/~YS8uLi9i", tells)
    assert (await client.task("a/../b").info()).sandbox_id == "s1"
    assert fake.requests[0].raw_path == "/sandbox/task/~YS8uLi9i"


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_download_that_breaks_goes_on_in_the_same_version(fake: FakeManager, client: AsyncClient) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"1"', "Content-Length": "10"})
        await response.prepare(request)
        await response.write(b"01234")
        await drop(request)
        return response

    async def rest(request: web.Request) -> web.StreamResponse:
        assert request.headers["Range"] == "bytes=5-"
        return web.Response(status=206, body=b"56789", headers={"ETag": '"1"'})

    fake.on(f"GET {TASK}/files", half, rest)
    assert await client.task("t").files.read("a") == b"0123456789"


async def test_a_file_that_changes_under_a_download_is_an_error(fake: FakeManager, client: AsyncClient) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"1"', "Content-Length": "10"})
        await response.prepare(request)
        await response.write(b"01234")
        await drop(request)
        return response

    async def other(request: web.Request) -> web.StreamResponse:
        return web.Response(status=206, body=b"abcde", headers={"ETag": '"2"'})

    fake.on(f"GET {TASK}/files", half, other)
    with pytest.raises(PreconditionFailed):
        await client.task("t").files.read("a")


async def test_a_part_of_a_file_is_asked_for_as_a_range(fake: FakeManager, client: AsyncClient) -> None:
    async def part(request: web.Request) -> web.StreamResponse:
        return web.Response(status=206, body=b"xy")

    fake.on(f"GET {TASK}/files", part)
    assert await client.task("t").files.read("a", offset=3, length=2) == b"xy"
    assert fake.requests[0].headers["Range"] == "bytes=3-4"
    assert await client.task("t").files.read("a", length=0) == b""


async def test_uploads_come_from_bytes_text_and_files(fake: FakeManager, client: AsyncClient, tmp_path: Path) -> None:
    async def takes(request: web.Request) -> web.StreamResponse:
        return web.json_response({"name": "a", "path": "a", "type": "file"}, status=201)

    fake.on(f"PUT {TASK}/files", takes)
    local = tmp_path / "local"
    local.write_bytes(b"z" * (3 << 20))
    files = client.task("t").files
    await files.write("a", b"\x00\xff", mode=0o755)
    await files.write("a", "ä", if_match='"1"')
    await files.write("a", local)
    with local.open("rb") as opened:
        await files.write("a", opened)
    assert fake.bodies == [b"\x00\xff", "ä".encode(), b"z" * (3 << 20), b"z" * (3 << 20)]
    assert fake.requests[0].query == {"path": "a", "mode": "755"}
    assert fake.requests[1].headers["If-Match"] == '"1"'


async def test_a_listing_is_read_to_its_last_page(fake: FakeManager, client: AsyncClient) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        after = int(request.query.get("after", "0"))
        entry = {"name": f"f{after}", "path": f"f{after}", "type": "file", "size": 1, "mode": 420}
        return web.json_response({"entries": [entry], "next": str(after + 1) if after < 2 else None})

    fake.on(f"GET {TASK}/files/list", page)
    assert [entry.name for entry in await client.task("t").files.list("dir", depth=2)] == ["f0", "f1", "f2"]
    assert fake.requests[0].query == {"path": "dir", "depth": "2"}


async def test_deleting_a_task_that_has_no_sandbox_is_no_error(fake: FakeManager, client: AsyncClient) -> None:
    async def missing(request: web.Request) -> web.StreamResponse:
        return error("not_found", 404)

    fake.on(f"DELETE {TASK}", missing)
    await client.task("t").delete()


async def test_the_first_contact_is_not_tried_for_longer_than_asked() -> None:
    assert transport.FIRST_CONTACT_SEC < transport.RETRY_SEC


# ── background processes ────────────────────────────────────────────────────────────────────────────────────────


async def test_waiting_has_a_limit_that_does_not_end_the_command(fake: FakeManager, client: AsyncClient) -> None:
    async def running(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        return web.json_response({"id": "p1", "state": "running"})

    fake.on(f"GET {TASK}/processes/p1", running)
    with pytest.raises(DeadlineExceeded, match="it goes on"):
        await client.task("t").process("p1").wait(timeout_sec=0.2)
    assert {request.method for request in fake.requests} == {"GET"}


async def test_output_of_a_running_process_ends_at_what_was_there(fake: FakeManager, client: AsyncClient) -> None:
    async def running(request: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "p1", "state": "running", "stdout_bytes": 3})

    async def log(request: web.Request) -> web.StreamResponse:
        offset = int(request.query["offset"])
        return web.Response(body=b"abc"[offset:], headers={"Sandbox-Output-Offset": str(offset)})

    fake.on(f"GET {TASK}/processes/p1", running)
    fake.on(f"GET {TASK}/processes/p1/output", log)
    pieces = [piece async for piece in client.task("t").process("p1").output("stdout")]
    assert len(pieces) == 1
