"""Log lines: one JSON object a line, whatever a caller put into the values."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.log import MAX_TEXT, JsonLines


@pytest.fixture
def logged() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("tests.log")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger, stream
    logger.removeHandler(handler)


def line_of(value: object) -> str:
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "an_event", (), None)
    record.__dict__["field"] = value
    return JsonLines().format(record)


def test_a_line_is_an_event_with_its_fields(logged: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = logged
    logger.info("pod_claimed", extra={"pod": "p1", "after_sec": 0.5, "labels": {"a": "b"}, "other": ["x", 1, None]})
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["logger"]) == ("pod_claimed", "info", "tests.log")
    assert (line["pod"], line["after_sec"], line["labels"], line["other"]) == ("p1", 0.5, {"a": "b"}, ["x", 1, None])
    assert line["at"].endswith("Z")


def test_no_field_takes_the_place_of_an_events_own(logged: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = logged
    logger.info("true_event", extra={"event": "forged", "level": "forged", "at": "forged"})
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"]) == ("true_event", "info")


@given(st.text() | st.text(alphabet=st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_no_text_can_forge_a_line_or_steer_a_terminal(text: str) -> None:
    line = line_of(text)
    assert len(line.splitlines()) == 1
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in line)
    assert json.loads(line)["field"] == text.encode("utf-8", "backslashreplace").decode()[: MAX_TEXT + 99]


@pytest.mark.parametrize("value", [object(), b"bytes", {1: {2: 3}}, [object()], float("nan"), {"\ud800": "x"}, 10**400])
def test_any_value_can_be_logged(value: Any) -> None:
    assert "field" in json.loads(line_of(value))


def test_long_texts_are_cut_and_say_so() -> None:
    text = json.loads(line_of("a" * 100_000))["field"]
    assert len(text) < MAX_TEXT + 100
    assert "[95904 characters left out]" in text


def test_a_traceback_keeps_its_end(logged: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = logged
    try:
        raise RuntimeError("x" * 100_000 + "the end")
    except RuntimeError:
        logger.exception("broken")
    assert json.loads(stream.getvalue())["exception"].endswith("the end")
