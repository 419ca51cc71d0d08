"""A command's events as server-sent ones: named, numbered by what they tell, and nothing in them breaks a line."""

from __future__ import annotations

import json

from executor.wire import Gap, Heartbeat, ServerSentLines, Started, StderrEvent, StdoutEvent


def test_each_event_has_its_name_its_json_and_how_far_the_streams_are_told_of() -> None:
    lines = ServerSentLines()
    told = b"".join([
        lines.write(Started(id="p", pid=1, joined=False)),
        lines.write(StdoutEvent(offset=0, end_offset=9, text="a\n\r\nid: 7")),
        lines.write(Heartbeat(at="2026-01-01T00:00:00Z")),
        lines.write(StderrEvent(offset=0, end_offset=1, text="e")),
        lines.write(Gap(stream="stdout", offset=9, bytes=100)),
    ])  # fmt: skip
    blocks = told.decode().split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop(2) == ": heartbeat 2026-01-01T00:00:00Z"
    parsed = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    assert [(one["event"], one["id"]) for one in parsed] == [
        ("started", "0-0"), ("stdout", "9-0"), ("stderr", "9-1"), ("gap", "109-1"),
    ]  # fmt: skip
    assert json.loads(parsed[1]["data"])["text"] == "a\n\r\nid: 7"
    assert [json.loads(one["data"])["type"] for one in parsed] == [one["event"] for one in parsed]
