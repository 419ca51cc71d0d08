"""Task ids out of paths, and request bodies: everything that is wrong is a typed refusal that names what."""

from __future__ import annotations

import base64
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.wire import ExecRequest
from manager.api.parsing import check_command, decode, process_id_of, task_id_of
from manager.api.wire import CreateKey, TaskCommand, exec_request
from manager.errors import InvalidRequest, InvalidTaskId, NotFound


@given(st.text(min_size=1, max_size=128).filter(lambda text: "\0" not in text and not text.startswith("~")))
def test_any_task_id_comes_back_from_its_percent_encoding(task_id: str) -> None:
    assert task_id_of(quote(task_id, safe="")) == task_id


@given(st.text(min_size=1, max_size=128).filter(lambda text: "\0" not in text))
def test_any_task_id_comes_back_from_base64url(task_id: str) -> None:
    assert task_id_of("~" + base64.urlsafe_b64encode(task_id.encode()).decode().rstrip("=")) == task_id


@given(st.text(max_size=300))
def test_any_path_segment_gives_a_task_id_or_a_typed_refusal(raw: str) -> None:
    try:
        task_id = task_id_of(raw)
    except InvalidTaskId:
        return
    assert 1 <= len(task_id.encode()) <= 512


def test_a_segment_is_decoded_exactly_once() -> None:
    assert task_id_of("a%252Fb") == "a%2Fb"
    assert task_id_of("a+b") == "a+b"
    assert task_id_of("..") == ".."


@pytest.mark.parametrize(
    "raw",
    [
        "", "%", "%zz", "100%", "%FF", "%ED%A0%80", "%00", "a" * 513, "%C3%A9" * 257, "~", "~a", "~!!", "~YQ=x", "~YR",
        "\udcff",
    ],
)  # fmt: skip
def test_what_is_no_task_id_is_refused(raw: str) -> None:
    with pytest.raises(InvalidTaskId):
        task_id_of(raw)


def test_a_task_id_may_have_512_bytes() -> None:
    assert task_id_of("%C3%A9" * 256) == "é" * 256


@pytest.mark.parametrize("raw", ["", "..", "a/b", "%2e%2e", "a" * 129, "-a"])
def test_what_no_process_can_be_called_is_not_found(raw: str) -> None:
    with pytest.raises(NotFound):
        process_id_of(raw)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"command": "a", "comand": 1}', "comand"),
        (b'{"command": "a", "env": {"A": 1}}', "env[...]"),
        (b'{"command": ["a", 1]}', "command[1]"),
        (b"{}", "command"),
        (b'{"command": "a", "timeout_sec": "1"}', "timeout_sec"),
        (b'{"command": "a", "timeout_sec": 1e999}', "timeout_sec"),
        (b'{"command": "a", "encoding": "latin1"}', "encoding"),
        (b'{"command": "a", "on_disconnect": "explode"}', "on_disconnect"),
    ],
)
def test_a_body_that_does_not_fit_names_the_field(body: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(body, TaskCommand)
    assert refused.value.details == {"field": field}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"  ", b"null", b"[]", b'"a"', b"{", b"\xff", b'{"command": "\\ud800"}', b'{"command": "\xed\xa0\x80"}',
        b"[" * 200_000, b'{"command":' + b"[" * 200_000, b'{"command": "a", "timeout_sec": NaN}', b'{"a":' * 50_000,
    ],
)  # fmt: skip
def test_what_is_no_object_of_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(body, TaskCommand)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (TaskCommand(command="a", stdin_base64="é"), "stdin_base64"),
        (TaskCommand(command="a", stdin_base64="abc"), "stdin_base64"),
        (TaskCommand(command="a", profile=""), "profile"),
        (TaskCommand(command="a", region="x" * 64), "region"),
    ],
)
def test_a_command_that_cannot_be_run_names_the_field(command: TaskCommand, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_command(command)
    assert refused.value.details == {"field": field}


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_exec_like = st.dictionaries(st.sampled_from([*TaskCommand.__struct_fields__, "unknown", ""]), _json_values, max_size=6)


@given(_exec_like | _json_values)
def test_no_json_value_at_all_is_more_than_a_typed_refusal(value: object) -> None:
    body = msgspec.json.encode(value)
    for kind in (TaskCommand, CreateKey):
        try:
            request = decode(body, kind)
            if isinstance(request, TaskCommand):
                check_command(request)
        except InvalidRequest:
            continue


@given(st.binary(max_size=200))
def test_no_bytes_at_all_are_more_than_a_typed_refusal(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(body, TaskCommand)


def test_the_executor_gets_the_exec_body_without_what_is_the_managers() -> None:
    command = TaskCommand(command=["a"], timeout_sec=3, id="own", profile="small", region="eu")
    assert exec_request(command) == ExecRequest(command=["a"], timeout_sec=3, id="own")
