"""What the client makes of a session's answers, the broken ones too."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from sojourn import AsyncClient
from sojourn.errors import APIError, Conflict
from tests.support.fake_manager import STDOUT, FakeManager, Handler, drop, error, exited, frames, output, started

SESSIONS = "/sandbox/task/t/sessions"
INFO = {"id": "s1", "state": "alive", "pid": 5, "shell": "/bin/bash", "user": "sandbox", "cwd": "/", "started_at": "x"}


def says(value: object, status: int = 200) -> Handler:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.json_response(value, status=status)

    return handler


def answers(*parts: bytes, cut: bool = False) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await frames(request, *parts, cut=cut)

    return handler


async def test_a_session_is_asked_for_with_what_was_given(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(f"POST {SESSIONS}", says(INFO, 201))
    session = await client.task("t", profile="small").session(cwd="/tmp", env={"A": "1"})
    assert session.id == "s1"
    assert json.loads(fake.bodies[0]) == {"cwd": "/tmp", "env": {"A": "1"}, "profile": "small"}
    assert fake.requests[0].headers["Idempotency-Key"]


async def test_a_commands_own_fields_and_the_shells_end_come_through(fake: FakeManager, client: AsyncClient) -> None:
    done = exited("p1", 3, ended=True, fresh_shell=True)
    fake.on(f"POST {SESSIONS}/s1/exec", answers(started("p1"), output(STDOUT, 0, b"out"), done))
    session = client.task("t").session_by_id("s1")
    result = await session.exec("x", env={"P": "q"}, stdin="in", timeout_sec=5, id="p1")
    assert (result.stdout, result.exit_code, result.shell_ended, result.fresh_shell) == ("out", 3, True, True)
    body = json.loads(fake.bodies[0])
    assert body == {"command": "x", "env": {"P": "q"}, "stdin_base64": "aW4=", "timeout_sec": 5, "id": "p1"}


async def test_a_request_that_was_cut_is_sent_again_under_the_same_id(fake: FakeManager, client: AsyncClient) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        await drop(request)
        return web.Response()

    fake.on(f"POST {SESSIONS}/s1/exec", cut, answers(started("p1"), exited("p1")))
    await client.task("t").session_by_id("s1").exec("x")
    first, second = (json.loads(body)["id"] for body in fake.bodies)
    assert first == second


async def test_a_lost_shell_is_an_error_and_is_not_run_again(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(f"POST {SESSIONS}/s1/exec", lambda _request: _lost())
    with pytest.raises(Conflict):
        await client.task("t").session_by_id("s1").exec("x")
    assert len(fake.requests) == 1


async def _lost() -> web.StreamResponse:
    return error("conflict", 409)


async def test_closing_what_is_gone_is_no_error_and_other_errors_are(fake: FakeManager, client: AsyncClient) -> None:
    session = client.task("t").session_by_id("s1")
    await session.close()
    fake.on(f"DELETE {SESSIONS}/s1", says({}, 204), lambda _request: _lost())
    await session.close(kill_descendants=True)
    assert fake.requests[-1].query == {"kill_descendants": "true"}
    with pytest.raises(APIError):
        await session.close()


async def test_an_interruption_says_whether_there_was_anything(fake: FakeManager, client: AsyncClient) -> None:
    fake.on(f"POST {SESSIONS}/s1/interrupt", says({"interrupted": True, "id": "p1"}), says({"interrupted": False}))
    session = client.task("t").session_by_id("s1")
    assert await session.interrupt() is True
    assert await session.interrupt(escalate=False) is False
    assert [json.loads(body) for body in fake.bodies] == [{"escalate": True}, {"escalate": False}]
