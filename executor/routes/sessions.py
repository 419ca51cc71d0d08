"""`/v1/sessions`: stateful shells, and commands in them."""

from __future__ import annotations

from aiohttp import web

from executor.routes.commands import EXEC_BODY_BYTES, run_and_answer
from executor.routes.reply import flag_of, json_reply, read_json, read_query
from executor.sessions import Sessions
from executor.wire import InterruptRequest, SessionExecRequest, SessionList, SessionRequest


def session_routes(sessions: Sessions) -> list[web.RouteDef]:
    def id_of(request: web.Request) -> str:
        return request.match_info["id"]

    async def create(request: web.Request) -> web.Response:
        read_query(request)
        body = await read_json(request, SessionRequest) if request.body_exists else SessionRequest()
        info, joined = await sessions.create(body)
        return json_reply(info, status=200 if joined else 201)

    async def list_all(request: web.Request) -> web.Response:
        read_query(request)
        return json_reply(SessionList(sessions.all()))

    async def get(request: web.Request) -> web.Response:
        read_query(request)
        return json_reply(sessions.get(id_of(request)).info())

    async def run(request: web.Request) -> web.StreamResponse:
        read_query(request)
        body = await read_json(request, SessionExecRequest, EXEC_BODY_BYTES)
        return await run_and_answer(
            request, body, lambda streamed: sessions.run(id_of(request), body, streamed=streamed)
        )

    async def interrupt(request: web.Request) -> web.Response:
        read_query(request)
        body = await read_json(request, InterruptRequest) if request.body_exists else InterruptRequest()
        return json_reply(sessions.interrupt(id_of(request), escalate=body.escalate))

    async def delete(request: web.Request) -> web.Response:
        query = read_query(request, "kill_descendants")
        await sessions.delete(id_of(request), kill_descendants=flag_of(query, "kill_descendants"))
        return web.Response(status=204)

    return [
        web.post("/v1/sessions", create),
        web.get("/v1/sessions", list_all),
        web.get("/v1/sessions/{id}", get),
        web.delete("/v1/sessions/{id}", delete),
        web.post("/v1/sessions/{id}/exec", run),
        web.post("/v1/sessions/{id}/interrupt", interrupt),
    ]
