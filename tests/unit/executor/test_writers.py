"""Which form of a command's events a caller gets."""

from __future__ import annotations

import pytest

from executor.writers import FrameWriter, NdjsonWriter, RawWriter, SseWriter, writer_for


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", None),
        ("*/*", None),
        ("application/json", None),
        ("application/json, application/octet-stream", None),
        ("application/octet-stream, application/json", None),
        ("application/octet-stream", RawWriter),
        ("application/octet-stream; q=1", RawWriter),
        ("application/vnd.sojourn.frames", FrameWriter),
        ("text/html, application/x-ndjson", NdjsonWriter),
        ("text/event-stream", SseWriter),
    ],
)
def test_the_form_is_the_one_that_was_asked_for(accept: str, kind: type | None) -> None:
    assert type(writer_for(accept, "text")) is (kind or type(None))
