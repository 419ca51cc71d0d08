"""A sandbox's usage as a stream, through the whole stack."""

from __future__ import annotations

import json

from tests.support.stack import Stack


async def test_usage_comes_line_by_line_and_provides_nothing(stack: Stack) -> None:
    await stack.exec("watched", ["true"])
    path = f"{stack.url}{stack.task('watched')}/usage/stream?interval_sec=1"
    async with stack.http.get(path) as answer:
        assert answer.status == 200
        assert answer.content_type == "application/x-ndjson"
        lines = [json.loads(await answer.content.readline()) for _ in range(2)]
    assert [line["type"] for line in lines] == ["usage", "usage"]
    assert lines[0]["cpu_ms"] is None
    assert lines[1]["cpu_ms"] >= 0
    status, answer = await stack.call("GET", f"{stack.task('never-used')}/usage/stream")
    assert (status, answer["error"]["code"]) == (404, "not_found")
