"""Whatever a caller sends gets a typed 4xx, never a 500, and leaves nothing behind (S29)."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.calls import CALLS, Call
from tests.support.executor_pod import ExecutorProcess, Pod

# Values that are wrong somewhere: types, bounds, what no program or path can be given.
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.sampled_from(["", "\0", "a\0b", "../..", "/etc/passwd", "~", "9" * 400, "\ud800", "root", "-1", "1e12"]),
    st.lists(st.text(max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
EXEC_FIELDS = (
    "cwd", "env", "stdin", "stdin_base64", "stdin_open", "user", "timeout_sec", "no_output_timeout_sec", "grace_sec",
    "max_output_bytes", "merge_output", "encoding", "id", "on_disconnect", "unknown",
)  # fmt: skip
EXEC = st.dictionaries(st.sampled_from(EXEC_FIELDS), ODD, max_size=4).map(lambda more: {"command": ["true"], **more})
BODIES = {
    "/v1/exec": EXEC | st.builds(lambda value: {"command": value, "timeout_sec": 5}, ODD),
    "/v1/processes": EXEC,
    "/v1/processes/none/signal": st.fixed_dictionaries({}, optional={"signal": ODD, "to": ODD}),
    "/v1/files/mkdir": st.fixed_dictionaries({}, optional={"path": ODD, "parents": ODD, "mode": ODD}),
    "/v1/files/move": st.fixed_dictionaries({}, optional={"source": ODD, "target": ODD, "overwrite": ODD}),
    "/v1/lease": st.fixed_dictionaries(
        {}, optional={"hard_end_sec": st.just("x"), "unclaimed_sec": st.just(-1), "x": ODD}
    ),
    "/v1/bind": st.fixed_dictionaries({}, optional={"task_id": ODD, "env": ODD, "secrets": ODD, "files": ODD}),
}


def send(pod: ExecutorProcess, method: str, target: str, body: bytes, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("pod", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(60)
    connection.sock.connect(pod.socket)
    try:
        all_headers = {"Authorization": f"Bearer {pod.token}", "Content-Type": "application/json", **headers}
        connection.request(method, target, body, all_headers)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    finally:
        connection.close()


def check(status: int, answer: Any, sent: object) -> None:
    assert status < 500, (sent, status, answer)
    if status >= 400:
        assert set(answer["error"]) == {"code", "message", "retryable", "details"}, (sent, answer)
        assert answer["error"]["code"] != "internal"


@pytest.mark.parametrize("path", BODIES)
def test_no_body_of_a_call_gives_a_500(executor_process: ExecutorProcess, path: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=BODIES[path])
    def try_one(body: Any) -> None:
        # Lone surrogates go out as escapes, which JSON allows and UTF-8 does not.
        status, answer = send(executor_process, "POST", path, json.dumps(body).encode())
        check(status, answer, body)

    try_one()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"1e999", b"NaN", b"{}" * 2, b"\xff\xfe", b'{"\xed\xa0\x80": 1}',
        b"[" * 200_000, b'{"a":' * 50_000, b'{"command": ["true"], "timeout_sec": ' + b"9" * 5000 + b"}",
        b'{"command": "true", "env": {"A": "\\ud800"}}', b'{"command": "true", "command": 1}',
    ],
)  # fmt: skip
def test_what_is_no_json_of_ours_is_refused(executor_process: ExecutorProcess, path: str, body: bytes) -> None:
    status, answer = send(executor_process, "POST", path, body)
    assert 400 <= status < 500, (path, body[:40], answer)
    check(status, answer, body[:40])


JSON_CALLS = [call for call in CALLS if call.request not in (None, bytes)]
BOMBS = {
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and open": b'{"a":[' * 100_000,
    "not a number": b"NaN",
    "infinite": b"-Infinity",
    "out of all bounds": b"1e99999",
    "ten million digits": b"9" * 10_000_000,
    "a fraction of as many": b"0." + b"1" * 500_000,
    "a lone surrogate": b'"\\ud800"',
    "half a pair": b'"\\udc00\\ud800"',
    "bytes that are no text": b'"\xff\xfe\xed\xa0\x80"',
    "a zero byte": b'"a\\u0000b"',
    "prototypes": b'{"__proto__": {"admin": true}, "constructor": 1}',
    "keys by the hundred thousand": b"{" + b",".join(b'"k%d":1' % number for number in range(80_000)) + b"}",
    "the same key again": b'{"a": 1, "a": {"a": 1, "a": []}}',
}


@pytest.mark.parametrize("call", JSON_CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_no_bomb_in_any_field_of_any_call_gives_a_500_or_takes_long(
    executor_process: ExecutorProcess, call: Call
) -> None:
    """S29: as the whole body, in each field, and in a field that is none"""
    path = re.sub(r"\{[^}]*\}", "none", call.path)
    names = [one.encode_name for one in msgspec.structs.fields(call.request)]
    for what, bomb in BOMBS.items():
        if what == "a fraction of as many" and path in ("/v1/lease", "/v1/bind"):
            continue  # that makes sense there, and would end the pod in a moment
        bodies = [bomb, *(b'{"%s": %s}' % (name.encode(), bomb) for name in [*names, "__proto__"])]
        if len(bomb) > 1_000_000:
            bodies = bodies[:2]
        for body in bodies:
            began = time.monotonic()
            status, answer = send(executor_process, call.method, path, body)
            check(status, answer, (what, body[:60]))
            assert status >= 400 or what in ("a zero byte", "a fraction of as many"), (what, body[:60], answer)
            assert time.monotonic() - began < 30, (what, body[:60])


@pytest.mark.parametrize(
    "call",
    [call for call in CALLS if not call.open and not call.path.startswith("/v1/ports") and call.method != "HEAD"],
    ids=lambda call: f"{call.method} {call.path}",
)
def test_an_unknown_query_parameter_is_refused_by_its_name_in_every_call(
    executor_process: ExecutorProcess, call: Call
) -> None:
    path = re.sub(r"\{[^}]*\}", "none", call.path)
    body = b'{"command": ["true"]}' if path in ("/v1/exec", "/v1/processes") else b"{}"
    status, answer = send(executor_process, call.method, f"{path}?timeout_sec_=1", body if call.request else b"")
    error = answer["error"]
    assert (status, error["code"]) == (400, "invalid_request"), answer
    if 101 not in call.replies:  # what is no upgrade is refused before its query is looked at
        assert error["details"] == {"field": "timeout_sec_"}


@given(query=st.text(max_size=30), value=st.binary(max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_query_gives_a_500(executor_process: ExecutorProcess, query: str, value: bytes) -> None:

    for path in ("/v1/files", "/v1/files/list", "/v1/files/stat"):
        for target in (f"{path}?path={quote(value)}", f"{path}?{quote(query)}={quote(value)}"):
            check(*send(executor_process, "GET", target, b""), target)


async def test_nothing_is_left_of_all_that(executor: Pod) -> None:
    running = [
        one for one in (await executor.call("GET", "/v1/processes")).json["processes"] if one["state"] != "ended"
    ]
    for one in running:  # background commands that were well formed by chance
        await executor.call("DELETE", f"/v1/processes/{one['id']}")
    assert (await executor.exec(["true"]))["exit_code"] == 0
