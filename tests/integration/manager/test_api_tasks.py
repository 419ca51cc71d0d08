"""Task sessions over HTTP: commands, what their answers add, task ids of every kind, files and processes passed on."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.api import Api, Reply, api
from tests.support.world import ACME, until


@pytest.fixture
async def surface() -> AsyncIterator[Api]:
    async with api() as made:
        yield made


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_command_is_answered_with_its_outcome_and_where_it_ran(surface: Api) -> None:
    first = (await surface.exec("t", "echo", "hello")).json
    binding = await surface.world.binding("t")
    assert (first["stdout"], first["exit_code"], first["reason"]) == ("hello", 0, "exited")
    assert (first["sandbox_id"], first["pod_id"]) == (binding.sandbox_id, binding.pod)
    assert (first["provisioned"], first["workspace"]) == ("cold", "fresh")
    assert "previous" not in first
    second = (await surface.exec("t", "echo", "again")).json
    assert (second["provisioned"], second["workspace"], second["pod_id"]) == ("bound", "kept", first["pod_id"])


async def test_after_its_pod_has_ended_a_task_gets_another_and_the_answer_says_so(surface: Api) -> None:
    first = (await surface.exec("t")).json
    await surface.call("DELETE", "/sandbox/task/t")
    second = (await surface.exec("t")).json
    assert second["pod_id"] != first["pod_id"]
    assert second["previous"]["reason"] == "destroyed"
    assert second["workspace"] == "fresh"


async def test_the_executor_gets_the_command_and_nothing_that_is_the_managers(surface: Api) -> None:
    await surface.exec("t", "echo", "x", profile="small", region="north", timeout_sec=3, env={"A": "b"})
    request = (await surface.world.executor("t")).runs[0]
    assert (request.command, request.timeout_sec, request.env) == (["echo", "x"], 3, {"A": "b"})


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"profile": "huge"}, 400, "unknown_profile"),
        ({"profile": "large"}, 409, "profile_mismatch"),
        ({"region": "moon"}, 409, "task_bound_elsewhere"),
        ({"id": "p", "stdin": "other"}, 422, "idempotency_mismatch"),
    ],
)
async def test_what_does_not_go_with_the_tasks_sandbox_is_refused_by_name(
    surface: Api, fields: dict[str, str], status: int, code: str
) -> None:
    await surface.exec("t", id="p")
    reply = await surface.exec("t", **fields)
    assert (reply.status, reply.code) == (status, code)


@pytest.mark.parametrize("path", ["exec", "processes"])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"command": ""}, "command"),
        ({"command": []}, "command"),
        ({"command": "a\0b"}, "command"),
        ({"cwd": "\0"}, "cwd"),
        ({"env": {"A": "\0"}}, "env"),
        ({"env": {"A=B": ""}}, "env"),
        ({"timeout_sec": -1}, "timeout_sec"),
        ({"timeout_sec": 1e12}, "timeout_sec"),
        ({"no_output_timeout_sec": 0}, "no_output_timeout_sec"),
        ({"id": "../x"}, "id"),
        ({"stdin": "x", "stdin_base64": "eA=="}, "stdin_base64"),
        ({"stdin_base64": "not base64"}, "stdin_base64"),
        ({"profile": ""}, "profile"),
        ({"comand": 1}, "comand"),
    ],
)
async def test_a_command_that_cannot_be_run_names_the_field_and_provides_nothing(
    surface: Api, path: str, fields: dict[str, object], field: str
) -> None:
    reply = await surface.call("POST", f"/sandbox/task/t/{path}", body={"command": "true", **fields})
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert reply.json["error"]["details"] == {"field": field}
    assert surface.world.provider.pods == []


async def test_a_region_that_no_target_serves_provides_nothing(surface: Api) -> None:
    reply = await surface.exec("t", region="moon")
    assert (reply.status, reply.code) == (409, "no_target_in_region")
    assert await surface.world.store.get_binding(ACME, "t") is None


async def test_a_call_meant_for_another_pod_runs_nothing(surface: Api) -> None:
    first = (await surface.exec("t")).json
    body = {"command": "true"}
    for path in ("exec", "processes"):
        reply = await surface.call("POST", f"/sandbox/task/t/{path}", headers={"If-Sandbox-Pod": "p0"}, body=body)
        assert (reply.status, reply.code) == (409, "sandbox_replaced")
    reply = await surface.call("GET", "/sandbox/task/t/files?path=x", headers={"If-Sandbox-Pod": "p0"})
    assert reply.code == "sandbox_replaced"
    good = {"If-Sandbox-Pod": first["pod_id"]}
    assert (await surface.call("POST", "/sandbox/task/t/exec", headers=good, body=body)).status == 200
    assert len((await surface.world.executor("t")).runs) == 2


async def test_one_idempotency_key_is_one_run_and_fifty_same_answers(surface: Api) -> None:
    headers, body = {"Idempotency-Key": "k1"}, {"command": ["echo", "once"]}
    calls = [surface.call("POST", "/sandbox/task/t/exec", headers=headers, body=body) for _ in range(50)]
    replies = await asyncio.gather(*calls)
    assert {reply.status for reply in replies} == {200}
    assert len({reply.json["id"] for reply in replies}) == 1
    assert len((await surface.world.executor("t")).runs) == 1
    other = await surface.call("POST", "/sandbox/task/t/exec", headers=headers, body={"command": ["echo", "two"]})
    assert (other.status, other.code) == (422, "idempotency_mismatch")
    foreign = await surface.call("POST", "/sandbox/task/t/exec", headers=headers, body=body, role="foreign")
    assert foreign.status == 200
    assert foreign.json["id"] != replies[0].json["id"]


@pytest.mark.parametrize("key", ["", "é", "a b", "x" * 256])
async def test_an_idempotency_key_that_is_none_is_refused(surface: Api, key: str) -> None:
    body = {"command": "true"}
    reply = await surface.call("POST", "/sandbox/task/t/exec", headers={"Idempotency-Key": key}, body=body)
    assert (reply.status, reply.code) == (400, "invalid_request")


# ── task ids ────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = [
    "a/b:c", "🚀 to the moon", "x" * 500, "trailing---", "-", "a%2Fb", "a%b", "{braces}", "a+b c", "é", "~tilde",
    "a?b#c", "\n\t", "a" * 511 + "/", "..", ".", "...", "//", "\\", '"', "*",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
async def test_any_task_id_finds_its_own_sandbox_in_both_spellings(surface: Api, name: str) -> None:
    encoded = "~" + base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")
    spellings = [encoded]
    if name not in (".", "..") and not name.startswith("~"):
        spellings.append(quote(name, safe=""))
        spellings.append("".join(f"%{byte:02x}" for byte in name.encode()))
    seen = set()
    for spelling in spellings:
        reply = await surface.exec(spelling)
        assert reply.status == 200, reply.body
        seen.add(reply.json["sandbox_id"])
        assert (await surface.call("GET", f"/sandbox/task/{spelling}")).json["task_id"] == name
    assert len(seen) == 1
    assert (await surface.world.binding(name)).task_id == name


async def test_dots_in_the_raw_path_are_a_task_id_and_lead_nowhere(surface: Api) -> None:
    key = surface.keys["member"]
    for spelling in ("..", "%2e%2e", "%2E."):
        head = f"GET /sandbox/task/{spelling} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nConnection: close\r\n\r\n"
        answer = await surface.raw(head.encode())
        assert b" 404 " in answer.split(b"\r\n")[0]
        assert b"there is no such task" in answer


@pytest.mark.parametrize("raw", ["", "%", "%zz", "%FF", "%00", "a" * 513, "~", "~!", "%C3", "~YR"])
async def test_what_is_no_task_id_is_refused_and_provides_nothing(surface: Api, raw: str) -> None:
    for method, rest, body in (
        ("POST", "/exec", {"command": "true"}),
        ("GET", "", None),
        ("PUT", "/files?path=x", b"x"),
    ):
        reply = await surface.call(method, f"/sandbox/task/{raw}{rest}", body=body)
        assert (reply.status, reply.code) == (400, "invalid_task_id")
    assert surface.world.provider.pods == []


# ── processes and files ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_file_goes_in_and_comes_out_whole_and_as_bytes_that_no_browser_runs(surface: Api) -> None:
    content = bytes(range(256)) * 4000

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 99_999):
            yield content[start : start + 99_999]

    got = Reply(0, {}, b"")
    for body in (io.BytesIO(content), pieces()):
        put = await surface.call("PUT", "/sandbox/task/t/files?path=%C3%A9%20%2B.bin", body=body)
        assert put.status == 201
        got = await surface.call("GET", "/sandbox/task/t/files?path=%C3%A9%20%2B.bin")
        assert hashlib.sha256(got.body).digest() == hashlib.sha256(content).digest()
    assert got.headers["Content-Type"] == "application/octet-stream"
    assert got.headers["X-Content-Type-Options"] == "nosniff"
    assert got.headers["ETag"] == '"x"'
    assert "Set-Cookie" not in got.headers
    assert "X-Else" not in got.headers


async def test_reading_provides_nothing_and_writing_does(surface: Api) -> None:
    for path in ("", "/files?path=x", "/processes", "/processes/p", "/usage"):
        reply = await surface.call("GET", f"/sandbox/task/t{path}")
        assert (reply.status, reply.code) == (404, "not_found")
    assert surface.world.provider.pods == []
    assert (await surface.call("PUT", "/sandbox/task/t/files?path=x", body=b"x")).status == 201
    assert (await surface.call("GET", "/sandbox/task/t/usage")).status == 200


async def test_what_was_in_an_ended_pod_is_gone_with_the_reason(surface: Api) -> None:
    await surface.call("PUT", "/sandbox/task/t/files?path=x", body=b"x")
    await surface.call("DELETE", "/sandbox/task/t")
    for path in ("/files?path=x", "/processes/p", "/usage"):
        reply = await surface.call("GET", f"/sandbox/task/t{path}")
        assert (reply.status, reply.code) == (410, "sandbox_gone")
        assert reply.json["error"]["details"]["reason"] == "destroyed"


async def test_the_executors_refusals_are_passed_on_in_the_one_shape(surface: Api) -> None:
    await surface.exec("t")
    reply = await surface.call("GET", "/sandbox/task/t/files?path=missing")
    assert (reply.status, reply.code) == (404, "file_not_found")
    reply = await surface.call("GET", "/sandbox/task/t/processes/unknown")
    assert (reply.status, reply.code) == (404, "not_found")


@pytest.mark.parametrize(
    "path",
    [
        "/bind", "/lease", "/exec/..", "/processes/../lease", "/processes/%2e%2e/lease", "/files/../../v1/lease",
        "/healthz", "/processes/p/output/../../../lease", "/files/stat/x", "/v1/exec", "/processes/p%2Foutput",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_no_other_path_reaches_the_executor(surface: Api, method: str, path: str) -> None:
    await surface.exec("t")
    executor = await surface.world.executor("t")
    before = len(executor.lease_headers)
    reply = await surface.call(method, f"/sandbox/task/t{path}", body=b"{}" if method in ("POST", "PUT") else None)
    assert reply.status in (404, 405)
    assert len(executor.lease_headers) == before


async def test_a_background_process_starts_once_for_one_idempotency_key(surface: Api) -> None:
    headers, body = {"Idempotency-Key": "bg"}, {"command": ["sleep", "60"]}
    replies = [await surface.call("POST", "/sandbox/task/t/processes", headers=headers, body=body) for _ in range(3)]
    assert {reply.status for reply in replies} == {201}
    assert len({reply.json["id"] for reply in replies}) == 1
    assert len((await surface.world.executor("t")).runs) == 1


async def test_a_query_on_a_call_that_takes_none_is_refused_and_nothing_runs(surface: Api) -> None:
    for call in ("exec", "processes", "sessions", "terminals"):
        path = f"/sandbox/task/with-query/{call}?timeout_sec=1"
        reply = await surface.call("POST", path, body={"command": "true"} if call != "sessions" else {})
        assert (reply.status, reply.code) == (400, "invalid_request"), call
    assert (await surface.call("GET", "/sandbox/task/with-query")).status == 404


async def test_a_query_that_is_no_plain_ascii_or_waits_for_ever_is_refused(surface: Api) -> None:
    await surface.exec("t")
    for query in ("wait_sec=-1", "wait_sec=1e3", "wait_sec=99999999", "&".join(f"a{n}=1" for n in range(40))):
        reply = await surface.call("GET", f"/sandbox/task/t/processes/p?{query}")
        assert (reply.status, reply.code) == (400, "invalid_request"), query


async def test_a_sandbox_is_found_by_its_id_while_it_is_the_tasks(surface: Api) -> None:
    made = (await surface.exec("t")).json
    found = await surface.call("GET", f"/api/v1/sandboxes/{made['sandbox_id']}")
    assert (found.json["task_id"], found.json["region"], found.json["profile"]) == ("t", "north", "small")
    assert found.json["lease"]["left_sec"] > 0
    for other in ("x", "x" * 5000, "%00", "a%2Fb"):
        assert (await surface.call("GET", f"/api/v1/sandboxes/{other}")).status == 404


async def test_a_task_is_active_while_its_command_runs_and_idle_after(surface: Api) -> None:
    command = asyncio.create_task(surface.exec("t", "wait"))

    async def stage() -> str | None:
        reply = await surface.call("GET", "/sandbox/task/t")
        return str(reply.json["stage"]) if reply.status == 200 else None

    async def is_active() -> bool:
        return await stage() == "active"

    await until(is_active)
    executor = await surface.world.executor("t")
    await executor.waiting.wait()
    executor.release()
    await command

    async def is_idle() -> bool:
        return await stage() == "idle"

    await surface.world.services.leases.flush()
    await until(is_idle)


# ── nothing that is sent makes it answer 500 ────────────────────────────────────────────────────────────────────

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["command", "cwd", "env", "stdin", "stdin_base64", "user", "timeout_sec", "no_output_timeout_sec", "grace_sec",
          "max_output_bytes", "encoding", "id", "on_disconnect", "profile", "region", "x"]  # fmt: skip


async def test_no_body_and_no_path_makes_it_answer_500() -> None:
    async with api() as surface:
        loop = asyncio.get_running_loop()

        @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(
            body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5) | json_values,
            task=st.text(min_size=1, max_size=30),
            path=st.sampled_from(["/sandbox/task/{}/exec", "/sandbox/task/{}/processes", "/api/v1/keys"]),
        )
        def tried(body: object, task: str, path: str) -> None:
            call = surface.call("POST", path.format(quote(task, safe="")), body=body, role="admin")
            reply = asyncio.run_coroutine_threadsafe(call, loop).result(20)
            assert reply.status < 500
            assert reply.status < 400 or reply.code is not None

        await asyncio.to_thread(tried)
