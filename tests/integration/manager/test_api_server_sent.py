"""A command's events as server-sent ones through the manager."""

from __future__ import annotations

import json

from executor.wire import SSE_TYPE
from tests.support.api import api


async def test_a_commands_events_come_as_server_sent_ones() -> None:
    async with api() as surface:
        reply = await surface.call(
            "POST", "/sandbox/task/t/exec", body={"command": ["echo", "hi"]}, headers={"Accept": SSE_TYPE}
        )
        pod = (await surface.world.binding("t")).pod
    assert reply.status == 200
    assert reply.headers["Content-Type"] == SSE_TYPE
    blocks = [block for block in reply.body.decode().removesuffix("\n\n").split("\n\n") if block[0] != ":"]
    events = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    assert [event["event"] for event in events] == ["started", "stdout", "exit"]
    assert json.loads(events[0]["data"])["pod_id"] == pod
    said = json.loads(events[1]["data"])
    assert said["text"].split() == ["hi"]
    assert events[1]["id"] == f"{said['end_offset']}-0"
    assert json.loads(events[2]["data"])["exit_code"] == 0
