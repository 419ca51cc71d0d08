"""`Accept: text/event-stream` on a command's stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executor.wire import SSE_TYPE
from tests.support.executor_pod import Pod


def parsed(body: str) -> list[tuple[str, str, Any]]:
    """(name, id, data) of each event."""
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        if not block.startswith(":"):
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            found.append((fields["event"], fields["id"], json.loads(fields["data"])))
    return found


@pytest.mark.parametrize("encoding", ["text", "base64"])
async def test_a_commands_events_come_as_server_sent_ones(executor: Pod, encoding: str) -> None:
    command = "printf 'ä\\n\\nb'; printf err >&2; exit 3"
    async with executor.open_stream(command, SSE_TYPE, encoding=encoding) as answer:
        assert answer.status == 200
        assert answer.content_type == SSE_TYPE
        events = parsed((await answer.read()).decode())
    assert events[0][0] == "started"
    assert (events[-1][0], events[-1][1], events[-1][2]["exit_code"]) == ("exit", "5-3", 3)
    assert [name for name, _, _ in events].count("exit") == 1
    assert all(data["type"] == name for name, _, data in events)
    if encoding == "text":
        assert "".join(data["text"] for name, _, data in events if name == "stdout") == "ä\n\nb"


async def test_what_cannot_start_is_an_ordinary_error(executor: Pod) -> None:
    async with executor.open_stream("true", SSE_TYPE, cwd="/nowhere") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "invalid_cwd"
