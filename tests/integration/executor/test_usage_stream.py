"""`GET /v1/usage/stream`: lines at an interval, CPU as what this reader has not been told of."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.executor_pod import Pod


async def lines(executor: Pod, count: int, query: str = "interval_sec=1") -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {executor.token}"}
    async with executor.session.get(f"{executor.url}/v1/usage/stream?{query}", headers=headers) as answer:
        assert answer.status == 200
        assert answer.content_type == "application/x-ndjson"
        return [json.loads(await answer.content.readline()) for _ in range(count)]


async def test_the_first_line_comes_at_once_and_the_next_ones_tell_what_was_used_since(executor: Pod) -> None:
    id = await executor.start("while :; do :; done")
    first, *others = await lines(executor, 3)
    await executor.call("DELETE", f"/v1/processes/{id}")
    assert first["type"] == "usage"
    assert first["elapsed_sec"] is first["cpu_ms"] is first["cpu_cores"] is None
    for line, before in zip(others, [first, *others], strict=False):
        assert line["elapsed_sec"] >= 1
        used = line["usage"]["cpu"]["usage_ms"] - before["usage"]["cpu"]["usage_ms"]
        assert line["cpu_ms"] == pytest.approx(max(0, used), abs=0.01)
        assert line["cpu_ms"] > 0
        assert line["cpu_cores"] == pytest.approx(line["cpu_ms"] / 1000 / line["elapsed_sec"], abs=0.01)


async def test_readers_do_not_take_each_others_time_away(executor: Pod) -> None:
    both = await asyncio.gather(lines(executor, 2), lines(executor, 2))
    assert [[line["elapsed_sec"] is None for line in got] for got in both] == [[True, False], [True, False]]


@pytest.mark.parametrize(
    "query", ["interval_sec=0", "interval_sec=61", "interval_sec=1.5", "interval_sec=x", "other=1"]
)
async def test_a_bad_interval_is_refused(executor: Pod, query: str) -> None:
    reply = await executor.call("GET", f"/v1/usage/stream?{query}")
    assert (reply.status, reply.code) == (400, "invalid_request")


async def test_looking_on_is_no_work(executor: Pod) -> None:
    headers = {"Authorization": f"Bearer {executor.token}"}
    async with executor.session.get(f"{executor.url}/v1/usage/stream?interval_sec=1", headers=headers) as answer:
        await answer.content.readline()
        before = (await executor.call("GET", "/v1/lease")).json
        await answer.content.readline()
        after = (await executor.call("GET", "/v1/lease")).json
    assert after["operations"] == before["operations"] == 0
    assert after["quiet_for_sec"] > before["quiet_for_sec"]
