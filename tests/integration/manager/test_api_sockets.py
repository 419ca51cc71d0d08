"""WebSockets through the manager: who gets in, what passes, what the lease and a hostile pod make of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest

from executor.wire import CLOSE_DONE, CLOSE_STALLED, CLOSE_TAKEN_OVER, FRAME_PONG, PROTOCOL
from manager.api import client_socket
from manager.api.wire import API_KEY_HEADER
from tests.support.api import Api, api
from tests.support.sockets import Socket, socket_at
from tests.support.world import ACME, until

TASK = "/sandbox/task/t"


@pytest.fixture
async def surface() -> AsyncIterator[Api]:
    async with api() as made:
        yield made


def opened(
    surface: Api, path: str, role: str = "member", headers: dict[str, str] | None = None, *, answers: bool = True
) -> AbstractAsyncContextManager[Socket]:
    sent = surface.as_role(role) | (headers or {})
    return socket_at(surface.session, surface.address + path, sent, answers=answers)


async def terminal(surface: Api, **fields: Any) -> str:
    reply = await surface.call("POST", TASK + "/terminals", body=fields)
    assert reply.status == 201, reply.body
    return str(reply.json["id"])


async def refused_with(surface: Api, path: str, headers: dict[str, str], protocols: tuple[str, ...]) -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await surface.session.ws_connect(surface.address + path, headers=headers, protocols=protocols)
    return refused.value.status


def operations(surface: Api) -> int:
    return surface.world.services.leases.operations_total


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_command_is_provisioned_run_and_told_of(surface: Api) -> None:
    async with opened(surface, TASK + "/exec") as socket:
        await socket.start(["cat"])
        await socket.type(b"hello")
        await socket.until(lambda: socket.stdout == b"hello", "the echo")
        await socket.end_input()
        await socket.to_end()
    assert socket.exit is not None
    assert socket.close_code == CLOSE_DONE
    executor = await surface.world.executor("t")
    assert [request.command for request in executor.runs] == [["cat"]]
    assert socket.started is not None
    assert socket.started.id == executor.runs[0].id


async def test_the_first_event_says_where_it_runs(surface: Api) -> None:
    async with surface.session.ws_connect(
        surface.address + TASK + "/exec", headers=surface.as_role("member"), protocols=(PROTOCOL,)
    ) as ws:
        await ws.send_bytes(b"\x10" + json.dumps({"command": ["true"]}).encode())
        message = await ws.receive()
    started = json.loads(message.data[1:])
    binding = await surface.world.binding("t")
    assert (started["sandbox_id"], started["pod_id"]) == (binding.sandbox_id, binding.pod)
    assert started["provisioned"] in ("warm", "cold")


async def test_five_mebibytes_pass_in_one_frame(surface: Api) -> None:
    """LM09"""
    async with opened(surface, TASK + "/exec") as socket:
        await socket.start(["cat"])
        await socket.type(bytes(5 << 20))
        await socket.until(lambda: len(socket.stdout) == 65_536, "the echo")
        await socket.end_input()
        await socket.to_end()
    executor = await surface.world.executor("t")
    assert len(executor.messages[0]) == 1 + (5 << 20)
    assert socket.close_code == CLOSE_DONE


async def test_an_idempotency_key_names_the_process(surface: Api) -> None:
    ids = []
    for _ in range(2):
        async with opened(surface, TASK + "/exec", headers={"Idempotency-Key": "once"}) as socket:
            await socket.start(["true"])
            await socket.to_end()
        assert socket.started is not None
        ids.append(socket.started.id)
    assert ids[0] == ids[1]
    async with opened(surface, TASK + "/exec", headers={"Idempotency-Key": "once"}) as socket:
        await socket.start(["false"])
        await socket.to_end()
    assert ([one.error.code for one in socket.errors], socket.close_code) == (["idempotency_mismatch"], 4422)


@pytest.mark.parametrize(("body", "code", "close"), [
    ({"command": []}, "invalid_request", 4400), ({"command": ["true"], "nosuch": 1}, "invalid_request", 4400),
    ({"command": ["true"], "profile": "nosuch"}, "unknown_profile", 4400),
    ({"command": ["true"], "region": "south"}, "no_target_in_region", 4409),
])  # fmt: skip
async def test_what_cannot_run_is_refused_with_its_error(surface: Api, body: Any, code: str, close: int) -> None:
    async with opened(surface, TASK + "/exec") as socket:
        await socket.send_json(0x10, body)
        await socket.to_end()
    assert ([one.error.code for one in socket.errors], socket.close_code) == ([code], close)
    assert (await surface.call("GET", TASK)).status == 404


async def test_a_running_command_is_an_operation_and_a_left_one_is_not(surface: Api) -> None:
    async with opened(surface, TASK + "/exec") as socket:
        await socket.start(["cat"])
        await socket.until(lambda: socket.started is not None, "the start")
        assert operations(surface) == 1
    await until(lambda: operations(surface) == 0)


# ── who gets in ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_nobody_is_upgraded_without_a_key_or_from_a_browsers_page(surface: Api) -> None:
    """S26"""
    id = await terminal(surface)
    member = surface.as_role("member")
    for path in (TASK + "/exec", f"{TASK}/terminals/{id}"):
        assert await refused_with(surface, path, {}, (PROTOCOL,)) == 401
        assert await refused_with(surface, path, {API_KEY_HEADER: "sk_wrong"}, (PROTOCOL,)) == 401
        for origin in ("http://evil.test", "null", surface.address, ""):
            assert await refused_with(surface, path, member | {"Origin": origin}, (PROTOCOL,)) == 403
        assert await refused_with(surface, path, member, ()) == 400
        assert await refused_with(surface, path, member, ("other.v1",)) == 400
    assert (await surface.call("GET", TASK + "/exec")).code == "invalid_request"


async def test_anothers_terminal_is_as_one_that_is_not_there(surface: Api) -> None:
    """S21"""
    id = await terminal(surface)
    foreign = surface.as_role("foreign")
    assert await refused_with(surface, f"{TASK}/terminals/{id}", foreign, (PROTOCOL,)) == 404
    assert await refused_with(surface, f"{TASK}/terminals/nosuch", surface.as_role("member"), (PROTOCOL,)) == 404
    assert await refused_with(surface, "/sandbox/task/never/terminals/x", surface.as_role("member"), (PROTOCOL,)) == 404


async def test_a_revoked_key_ends_its_open_connections(surface: Api) -> None:
    """S22"""
    id = await terminal(surface)
    reply = await surface.call("POST", "/api/v1/keys", role="admin", body={"name": "short"})
    headers = {API_KEY_HEADER: reply.json["key"]}
    async with (
        socket_at(surface.session, f"{surface.address}{TASK}/terminals/{id}", headers) as shell,
        socket_at(surface.session, surface.address + TASK + "/exec", headers) as command,
    ):
        await command.start(["cat"])
        await asyncio.gather(
            shell.until(lambda: shell.started is not None, "the start"),
            command.until(lambda: command.started is not None, "the start"),
        )
        gone = await surface.call("DELETE", f"/api/v1/keys/{reply.json['key_id']}", role="admin")
        assert gone.status == 204
        began = time.monotonic()
        await asyncio.gather(shell.to_end(), command.to_end())
        assert time.monotonic() - began < 15
    for socket in (shell, command):
        assert (socket.close_code, [one.error.code for one in socket.errors]) == (4401, ["unauthenticated"])


# ── terminals ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_terminal_is_opened_typed_into_and_ends(surface: Api) -> None:
    id = await terminal(surface, cols=100, rows=30)
    executor = await surface.world.executor("t")
    assert (executor.terminals[id].cols, executor.terminals[id].rows) == (100, 30)
    async with opened(surface, f"{TASK}/terminals/{id}") as socket:
        await socket.type(b"ls\r")
        await socket.resize(90, 20)
        await socket.until(lambda: socket.stdout == b"ls\r", "the echo")
        await socket.send(0x7F, b"x")
        await socket.until(lambda: len(socket.errors) == 1, "the refusal")
        await socket.end_input()
        await socket.to_end()
    assert socket.close_code == CLOSE_DONE
    assert executor.messages == [b"\x11ls\r", b'\x14{"cols": 90, "rows": 20}', b"\x12"]


async def test_opening_with_a_key_twice_names_one_terminal(surface: Api) -> None:
    replies = [
        await surface.call("POST", TASK + "/terminals", body={}, headers={"Idempotency-Key": "one"}) for _ in range(2)
    ]
    assert replies[0].json["id"] == replies[1].json["id"]
    assert len((await surface.world.executor("t")).terminals) == 1
    other = await surface.call(
        "POST", TASK + "/terminals", body={"command": ["top"]}, headers={"Idempotency-Key": "one"}
    )
    assert other.code == "idempotency_mismatch"


async def test_only_traffic_holds_the_lease(surface: Api) -> None:
    """RE09"""
    id = await terminal(surface)
    async with opened(surface, f"{TASK}/terminals/{id}") as socket:
        await socket.until(lambda: socket.started is not None, "the start")
        await until(lambda: operations(surface) == 0)
        for _ in range(5):
            await socket.send(FRAME_PONG)
        executor = await surface.world.executor("t")
        await until(lambda: len(executor.messages) == 5)
        assert operations(surface) == 0
        await socket.type(b"x")
        await until(lambda: operations(surface) == 1)
        await until(lambda: operations(surface) == 0)


async def test_a_dead_callers_connection_is_dropped_and_renews_nothing(
    surface: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RE09: a client that is cut off without a word says nothing any more"""
    monkeypatch.setattr(client_socket, "SILENT_SEC", 1.0)
    id = await terminal(surface)
    executor = await surface.world.executor("t")
    executor.says = [b'\x04{"at":"now"}']
    async with opened(surface, f"{TASK}/terminals/{id}", answers=False) as socket:
        await socket.to_end()
    assert socket.heartbeats == 1
    assert socket.close_code == CLOSE_STALLED
    assert operations(surface) == 0
    await until(lambda: len(executor.closed_with) == 1)


async def test_a_takeover_is_told_as_one(surface: Api) -> None:
    """PT13"""
    id = await terminal(surface)
    executor = await surface.world.executor("t")
    async with opened(surface, f"{TASK}/terminals/{id}") as socket:
        await socket.until(lambda: socket.started is not None, "the start")
        await executor.sockets[0].close(code=CLOSE_TAKEN_OVER)
        await socket.to_end()
    assert (socket.close_code, socket.exit) == (CLOSE_TAKEN_OVER, None)


async def test_a_pods_end_is_told_as_its_sandboxs_end(surface: Api) -> None:
    id = await terminal(surface)
    async with opened(surface, f"{TASK}/terminals/{id}") as socket:
        await socket.until(lambda: socket.started is not None, "the start")
        assert (await surface.call("DELETE", TASK)).status == 204
        await socket.to_end()
    assert ([one.error.code for one in socket.errors], socket.close_code) == (["sandbox_gone"], 4410)
    assert await refused_with(surface, f"{TASK}/terminals/{id}", surface.as_role("member"), (PROTOCOL,)) in (404, 410)


async def test_a_manager_that_ends_sends_its_terminals_away(surface: Api) -> None:
    id = await terminal(surface)
    async with opened(surface, f"{TASK}/terminals/{id}") as socket:
        await socket.until(lambda: socket.started is not None, "the start")
        surface.services.in_flight.ending = True
        await socket.to_end()
    assert socket.close_code == 4503


@pytest.mark.parametrize("message", [
    b"", b"\x02short", b"\x02" + bytes(8) + bytes(600_000), b"\x06{}", b"\x06not json", b"\x05[]",
    b'\x07{"error":{"code":"made_up","message":"x","retryable":false}}', b"\x02" + b"\xff" * 8 + b"x",
    b'\x01{"id":"' + b"x" * 200 + b'","pid":1}',
])  # fmt: skip
async def test_what_no_executor_says_ends_the_connection_and_is_not_passed_on(surface: Api, message: bytes) -> None:
    """S19"""
    id = await terminal(surface)
    (await surface.world.executor("t")).says = [message]
    async with opened(surface, f"{TASK}/terminals/{id}") as socket:
        await socket.to_end()
    assert ([one.error.code for one in socket.errors], socket.close_code) == (["executor_unreachable"], 4502)
    assert socket.stdout == b""


async def test_errors_of_a_pod_are_cleaned_and_end_nothing(surface: Api) -> None:
    """S24"""
    id = await terminal(surface)
    error = {"error": {"code": "conflict", "message": "a\x1b]52;c;x\x07b" + "y" * 5000, "retryable": False}}
    (await surface.world.executor("t")).says = [b"\x07" + json.dumps(error).encode(), b"\x7fof a later version"]
    async with opened(surface, f"{TASK}/terminals/{id}") as socket:
        await socket.type(b"on")
        await socket.until(lambda: socket.stdout == b"on", "the echo")
        await socket.end_input()
        await socket.to_end()
    assert socket.errors[0].error.code == "conflict"
    assert "\x1b" not in socket.errors[0].error.message
    assert len(socket.errors[0].error.message) <= 1024
    assert socket.close_code == CLOSE_DONE


async def test_a_terminal_of_an_ended_sandbox_is_gone_and_getting_it_provisions_nothing(surface: Api) -> None:
    for path in (TASK + "/terminals", TASK + "/terminals/x"):
        assert (await surface.call("GET", path)).status == 404
    assert (await surface.call("DELETE", TASK + "/terminals/x")).status == 404
    assert await surface.world.store.get_binding(ACME, "t") is None
