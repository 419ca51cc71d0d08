"""Paths, frames, bounds and errors of the client, each by itself."""

from __future__ import annotations

import ast
import base64
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

import sojourn
from sojourn.capture import HeadAndTail
from sojourn.errors import CODES, APIError, InvalidTaskId, QuotaExceeded, UnexpectedAnswer, api_error
from sojourn.frames import MAX_FRAME_BYTES, FrameReader
from sojourn.paths import task_path
from sojourn.transport import may_repeat

SOURCE = Path(sojourn.__file__).parent


# ── paths ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("task_id", ["a", "my-task", "A_1.b", "-x", "x" * 512])
def test_a_plain_task_id_stands_in_the_path_as_it_is(task_id: str) -> None:
    assert task_path(task_id) == f"/sandbox/task/{task_id}"


@pytest.mark.parametrize("task_id", [".", "..", "a/b", "a b", "ä", "%2e", "~x", "a\n", ".hidden"])
def test_other_task_ids_are_encoded_whole(task_id: str) -> None:
    piece = task_path(task_id).removeprefix("/sandbox/task/")
    assert re.fullmatch("~[A-Za-z0-9_-]+", piece)
    assert base64.urlsafe_b64decode(piece[1:] + "==").decode() == task_id


@pytest.mark.parametrize("task_id", ["", "x" * 513, "ä" * 257, "\ud800"])
def test_what_is_no_task_id_is_refused_before_anything_is_sent(task_id: str) -> None:
    with pytest.raises(InvalidTaskId):
        task_path(task_id)


# ── frames ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    payloads=some.lists(some.tuples(some.integers(0, 255), some.binary(max_size=50)), max_size=10),
    cuts=some.lists(some.integers(1, 40), min_size=1),
)
def test_frames_are_the_same_however_the_bytes_arrive(payloads: list[tuple[int, bytes]], cuts: list[int]) -> None:
    whole = b"".join(bytes([kind]) + len(raw).to_bytes(4, "big") + raw for kind, raw in payloads)
    reader, got, at, turn = FrameReader(), [], 0, 0
    while at < len(whole):
        step = cuts[turn % len(cuts)]
        got += reader.feed(whole[at : at + step])
        at, turn = at + step, turn + 1
    assert got == payloads


def test_a_frame_over_the_bound_is_refused_before_it_is_kept() -> None:
    with pytest.raises(UnexpectedAnswer, match="over the bound"):
        FrameReader().feed(b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


# ── head and tail ───────────────────────────────────────────────────────────────────────────────────────────────


@given(pieces=some.lists(some.binary(max_size=300), max_size=30), limit=some.integers(0, 400))
def test_head_and_tail_are_those_of_the_whole(pieces: list[bytes], limit: int) -> None:
    kept = HeadAndTail(limit)
    for piece in pieces:
        kept.add(piece)
    captured, whole = kept.captured(), b"".join(pieces)
    assert len(captured.raw) == min(limit, len(whole))
    assert len(captured.raw) + captured.dropped == len(whole)
    assert whole.startswith(captured.head)
    assert whole.endswith(captured.tail)


def test_memory_stays_bounded_however_much_comes() -> None:
    kept = HeadAndTail(1000)
    for _ in range(10_000):
        kept.add(b"x" * 1000)
        assert len(kept._tail) < 70_000
    assert kept.captured().dropped == 10_000_000 - 1000


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_code_has_one_class_with_a_docstring() -> None:
    for code, kind in CODES.items():
        assert kind.code == code
        assert kind.__doc__
        assert kind.__doc__ != APIError.__doc__


def test_the_client_knows_every_code_that_the_manager_can_answer() -> None:
    # read as text: the client imports nothing of the manager, and neither does its test
    table = (SOURCE.parents[2] / "manager" / "api" / "wire.py").read_text()
    body = table[table.index("ERROR_CODES") :]
    codes = set(re.findall(r'^    "([a-z_0-9]+)": \d{3},$', body, re.MULTILINE))
    assert len(codes) > 30
    assert codes <= set(CODES)


def test_an_error_keeps_what_the_server_said() -> None:
    made = api_error("quota_exceeded", "full", status=429, retryable=True, details={"limit": 3}, retry_after_sec=5.0)
    assert isinstance(made, QuotaExceeded)
    assert (made.message, made.status, made.retryable, made.details, made.retry_after_sec) == (
        "full",
        429,
        True,
        {"limit": 3},
        5.0,
    )


def test_an_answer_that_may_have_done_something_is_repeated_only_where_that_is_safe() -> None:
    unreachable = api_error("executor_unreachable", "m", status=502, retryable=True)
    assert may_repeat(unreachable, "safe")
    assert not may_repeat(unreachable, "unsent")
    full = api_error("quota_exceeded", "m", status=429, retryable=True)
    assert may_repeat(full, "unsent")
    assert not may_repeat(api_error("internal", "m", status=500, retryable=False), "safe")


# ── the package ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_client_imports_nothing_of_the_server() -> None:
    for source in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.split(".")[0] for name in names} & {"executor", "manager"}, source


def test_the_package_says_that_it_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()
