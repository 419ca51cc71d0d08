"""A session of a pod, as a client has it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from executor.wire import NDJSON_TYPE
from tests.support.executor_pod import Pod, Reply, Streamed, frames_of


class SessionOf:
    """One session of an executor's."""

    def __init__(self, pod: Pod, id: str) -> None:
        self.pod = pod
        self.id = id
        self.path = f"/v1/sessions/{id}"

    async def call(self, command: str, **fields: Any) -> Reply:
        return await self.pod.call("POST", self.path + "/exec", {"command": command, **fields})

    async def exec(self, command: str, **fields: Any) -> dict[str, Any]:
        """Fails where the answer is not 200."""
        reply = await self.call(command, **fields)
        assert reply.status == 200, reply.body
        result: dict[str, Any] = reply.json
        return result

    async def said(self, command: str, **fields: Any) -> tuple[str, str, int]:
        """(stdout, stderr, exit code)."""
        result = await self.exec(command, **fields)
        return result["stdout"], result["stderr"], result["exit_code"]

    async def stream(self, command: str, **fields: Any) -> Streamed:
        async with self.pod.open_stream(command, path=self.path + "/exec", **fields) as answer:
            assert answer.status == 200, await answer.read()
            got = Streamed()
            async for event in frames_of(answer):
                got.add(event)
        assert got.exit is not None, "the stream ended without an exit event"
        return got

    async def lines(self, command: str, **fields: Any) -> list[dict[str, Any]]:
        """The events as JSON lines."""
        async with self.pod.open_stream(command, NDJSON_TYPE, path=self.path + "/exec", **fields) as answer:
            assert answer.status == 200, await answer.read()
            return [json.loads(line) for line in (await answer.read()).splitlines()]

    async def interrupt(self, **fields: Any) -> dict[str, Any]:
        reply = await self.pod.call("POST", self.path + "/interrupt", fields or None)
        assert reply.status == 200, reply.body
        result: dict[str, Any] = reply.json
        return result

    async def info(self) -> dict[str, Any]:
        reply = await self.pod.call("GET", self.path)
        assert reply.status == 200, reply.body
        found: dict[str, Any] = reply.json
        return found

    async def delete(self, query: str = "") -> Reply:
        return await self.pod.call("DELETE", self.path + query)


async def new_session(pod: Pod, **fields: Any) -> SessionOf:
    reply = await pod.call("POST", "/v1/sessions", fields)
    assert reply.status == 201, reply.body
    return SessionOf(pod, reply.json["id"])


@contextlib.asynccontextmanager
async def session_in(pod: Pod, **fields: Any) -> AsyncIterator[SessionOf]:
    """A new session, deleted with all it left on the way out."""
    session = await new_session(pod, **fields)
    try:
        yield session
    finally:
        await session.delete("?kill_descendants=true")
