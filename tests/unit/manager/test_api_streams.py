"""A command's events as JSON lines and as frames."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from executor import wire
from manager.api.streams import Frames, JsonLines

EXIT = wire.Exit(
    id="p1", pid=7, exit_code=0, signal=None, reason="exited", timed_out=False, stdout_bytes=0, stderr_bytes=0,
    truncated=False, descendants_left=False, started_at="2026-01-01T00:00:00.000Z", duration_ms=1.0,
    usage=wire.ResourceUse(user_ms=0, system_ms=0, max_rss_bytes=0),
)  # fmt: skip


def pieces_of(data: bytes, cuts: list[int], stream: wire.StreamName = "stdout") -> list[wire.OutputFrame]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [wire.OutputFrame(stream, a, data[a:b]) for a, b in itertools.pairwise(bounds)]


def lines(rendered: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rendered.splitlines()]


@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode), st.lists(st.integers(0, 100), max_size=12))
def test_text_pieces_join_to_the_whole_decoded_at_once_however_they_were_cut(data: bytes, cuts: list[int]) -> None:
    renderer = JsonLines("text")
    rendered = b"".join(renderer.output(piece) for piece in pieces_of(data, cuts)) + renderer.plain(EXIT)
    events = [event for event in lines(rendered) if event["type"] == "stdout"]
    assert "".join(event["text"] for event in events) == data.decode("utf-8", "replace")
    at = 0
    for event in events:
        assert event["offset"] == at
        at = event["end_offset"]
        assert data[event["offset"] : at].decode("utf-8", "replace") == event["text"]
    assert at == len(data)


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=12))
def test_base64_pieces_join_to_the_exact_bytes(data: bytes, cuts: list[int]) -> None:
    renderer = JsonLines("base64")
    rendered = b"".join(renderer.output(piece) for piece in pieces_of(data, cuts, "stderr"))
    events = lines(rendered)
    assert b"".join(base64.b64decode(event["data_base64"]) for event in events) == data
    assert all(event["type"] == "stderr" and "text" not in event for event in events)


def test_a_character_that_comes_in_two_pieces_on_each_stream_is_whole_on_each() -> None:
    renderer = JsonLines("text")
    rendered = b""
    for part in (0, 1):
        for stream in ("stdout", "stderr"):
            data = b"\xe2" if part == 0 else b"\x80\x94"
            rendered += renderer.output(wire.OutputFrame(stream, part, data))
    assert [(event["type"], event["text"], event["offset"], event["end_offset"]) for event in lines(rendered)] == [
        ("stdout", "—", 0, 3),
        ("stderr", "—", 0, 3),
    ]


def test_a_gap_ends_a_character_that_waits_and_what_follows_starts_afresh() -> None:
    renderer = JsonLines("text")
    rendered = renderer.output(wire.OutputFrame("stdout", 0, b"a\xe2"))
    rendered += renderer.gap(wire.Gap(stream="stdout", offset=2, bytes=8))
    rendered += renderer.output(wire.OutputFrame("stdout", 10, "é".encode()))
    assert [(e["type"], e["offset"], e.get("text")) for e in lines(rendered)] == [
        ("stdout", 0, "a"),
        ("stdout", 1, "\ufffd"),
        ("gap", 2, None),
        ("stdout", 10, "é"),
    ]


def test_the_last_event_comes_after_what_was_still_waiting() -> None:
    renderer = JsonLines("text")
    assert renderer.output(wire.OutputFrame("stdout", 0, b"\xe2\x80")) == b""
    assert [event["type"] for event in lines(renderer.plain(EXIT))] == ["stdout", "exit"]


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=12))
def test_frames_carry_the_exact_bytes_and_can_be_read_again(data: bytes, cuts: list[int]) -> None:
    renderer = Frames()
    rendered = b"".join(renderer.output(piece) for piece in pieces_of(data, cuts)) + renderer.plain(EXIT)
    reader = wire.FrameReader()
    events = [wire.decode_frame(kind, payload) for kind, payload in reader.feed(rendered)]
    assert reader.pending == 0
    assert events[-1] == EXIT
    assert b"".join(event.data for event in events if isinstance(event, wire.OutputFrame)) == data
