"""Sessions through the whole product: in a sandbox made for them, used by the client, gone with their pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sojourn import AsyncClient, Client
from sojourn.errors import Conflict, NotFound, SandboxGone
from tests.support.stack import Stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.url, stack.key) as open_client:
        yield open_client


async def test_a_session_brings_its_sandbox_and_keeps_its_state(client: AsyncClient) -> None:
    async with await client.task("sessions-1").session(env={"GIVEN": "a'b\nc"}) as session:
        result = await session.exec("cd /tmp; export A=1; f() { echo f-$1; }; echo out; echo err >&2")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
        assert (result.shell_ended, result.fresh_shell) == (False, False)
        assert (await session.exec('pwd; echo $A; f x; printf %s "$GIVEN"')).stdout == "/tmp\n1\nf-x\na'b\nc"
        assert (await session.exec("cat; echo $P", stdin=b"in\n", env={"P": "own"})).stdout == "in\nown\n"
        info = await session.info()
        assert (info.state, info.cwd, info.commands) == ("alive", "/tmp", 3)
        assert [one.id for one in await client.task("sessions-1").sessions()] == [session.id]
    with pytest.raises(NotFound):
        await session.info()
    await session.close()


async def test_a_timeout_keeps_the_state_and_an_ended_shell_is_told(client: AsyncClient) -> None:
    async with await client.task("sessions-2").session() as session:
        await session.exec("A=kept")
        result = await session.exec("echo before; sleep 60; echo never", timeout_sec=0.5)
        assert (result.stdout, result.timed_out, result.shell_ended) == ("before\n", True, False)
        assert (await session.exec("echo $A")).stdout == "kept\n"
        assert (await session.exec("exit 3")).shell_ended is True
        fresh = await session.exec("echo ok${A-}")
        assert (fresh.stdout, fresh.fresh_shell) == ("ok\n", True)
        pid = (await session.exec("echo $$")).stdout.strip()
        await client.task("sessions-2").exec(["kill", "-9", pid])
        with pytest.raises(Conflict):
            await session.exec("echo lost")


async def test_an_interrupt_passes_through(client: AsyncClient) -> None:
    async with await client.task("sessions-3").session() as session:
        events = session.stream("echo up; sleep 100; echo never")
        seen = b""
        async for event in events:
            data = getattr(event, "data", b"")
            seen += data
            if data:
                assert await session.interrupt() is True
        assert seen == b"up\n"
        assert events.exit is not None
        assert (events.exit.reason, events.exit.exit_code) == ("cancelled", 130)
        assert await session.interrupt() is False


async def test_commands_given_at_once_are_run_one_by_one(client: AsyncClient) -> None:
    async with await client.task("sessions-4").session() as session:
        results = await asyncio.gather(*(session.exec(f"sleep 0.05; echo {n}") for n in range(8)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]


async def test_the_blocking_client_has_sessions_too(stack: Stack) -> None:
    def work() -> str:
        with Client(stack.url, stack.key) as client, client.task("sessions-5").session() as session:
            session.exec("X=1")
            return session.exec("echo $X", check=True).stdout

    assert await asyncio.to_thread(work) == "1\n"


async def test_the_same_key_makes_one_session_and_runs_a_command_once(stack: Stack) -> None:
    path = stack.task("sessions-6") + "/sessions"
    headers = {"Idempotency-Key": "one"}
    status, first = await stack.call("POST", path, json={}, headers=headers)
    again, second = await stack.call("POST", path, json={}, headers=headers)
    assert (status, again, first["pid"]) == (201, 200, second["pid"])
    run = f"{path}/{first['id']}/exec"
    headers = {"Idempotency-Key": "two"}
    answers = [
        await stack.call("POST", run, json={"command": "n=$((n+1)); echo $n"}, headers=headers) for _ in range(2)
    ]
    assert [answer["stdout"] for _status, answer in answers] == ["1\n", "1\n"]
    status, answer = await stack.call("POST", run, json={"command": "echo other"}, headers=headers)
    assert (status, answer["error"]["code"]) == (422, "idempotency_mismatch")


async def test_a_session_is_never_provided_by_asking_for_it(stack: Stack, client: AsyncClient) -> None:
    for method, rest, body in (
        ("GET", "", None), ("GET", "/s1", None), ("DELETE", "/s1", None), ("POST", "/s1/exec", {"command": "true"}),
        ("POST", "/s1/interrupt", {}),
    ):  # fmt: skip
        status, answer = await stack.call(method, f"{stack.task('sessions-7')}/sessions{rest}", json=body)
        assert (status, answer["error"]["code"]) == (404, "not_found")
    session = await client.task("sessions-7").session()
    await client.task("sessions-7").delete()
    with pytest.raises(SandboxGone):
        await session.exec("true")
    with pytest.raises(SandboxGone):
        await session.info()


@pytest.mark.parametrize(
    "body", [{"command": ["ls"]}, {"command": ""}, {"command": "x", "cwd": "/"}, {}, {"command": "a\0"}]
)
async def test_what_makes_no_sense_is_refused(stack: Stack, body: dict[str, object]) -> None:
    path = stack.task("sessions-8") + "/sessions"
    status, made = await stack.call("POST", path, json={"id": "s8"})
    assert status in (200, 201)
    status, answer = await stack.call("POST", f"{path}/{made['id']}/exec", json=body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
