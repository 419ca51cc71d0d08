"""`GET /v1/files/search`: by name, by content, or both."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from executor.routes.reply import flag_of, json_reply, read_query, whole_of
from executor.search import (
    DEFAULT_FILE_BYTES,
    DEFAULT_LIMIT,
    DEFAULT_TIMEOUT_SEC,
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_LIMIT,
    MAX_TIMEOUT_SEC,
    SearchService,
    SearchTerms,
)

_QUERY: Final = (
    "path", "name", "content", "regex", "ignore_case", "depth", "limit", "timeout_sec", "max_file_bytes", "after",
    "user",
)  # fmt: skip


def search_routes(searches: SearchService) -> list[web.RouteDef]:
    async def search(request: web.Request) -> web.Response:
        query = read_query(request, *_QUERY)
        terms = SearchTerms(
            path=query.get("path", "."),
            name=query.get("name"),
            content=query.get("content"),
            regex=flag_of(query, "regex"),
            ignore_case=flag_of(query, "ignore_case"),
            depth=whole_of(query, "depth", MAX_DEPTH, 1, MAX_DEPTH),
            limit=whole_of(query, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT),
            timeout_sec=whole_of(query, "timeout_sec", DEFAULT_TIMEOUT_SEC, 1, MAX_TIMEOUT_SEC),
            max_file_bytes=whole_of(query, "max_file_bytes", DEFAULT_FILE_BYTES, 1, MAX_FILE_BYTES),
            after=query.get("after"),
        )
        return json_reply(await searches.search(terms, query.get("user")))

    return [web.get("/v1/files/search", search, allow_head=False)]
