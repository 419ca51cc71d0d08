"""The OpenAPI 3.1 document, made from the route table and the types of the code itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from executor.wire import FRAMES_TYPE, JSON_TYPE, NDJSON_TYPE, PROTOCOL, SSE_TYPE, ErrorReply
from manager.api.server import Route
from manager.api.wire import (
    API_KEY_HEADER,
    ERROR_CODES,
    IDEMPOTENCY_HEADER,
    IF_POD_HEADER,
    MEMBER_HEADER,
    PROJECT_HEADER,
    TENANT_HEADER,
)

_PARAMETER: Final = re.compile(r"\{([a-z_]+)\}")
_EVERY_ROUTE: Final = ("invalid_request", "internal", "shutting_down")
_EVERY_KEYED: Final = (
    "unauthenticated",
    "forbidden",
    "scope_refused",
    "scope_required",
    "store_unavailable",
    "rate_limited",
)
_ABOUT_SANDBOXES: Final = ("/sandbox/task/", "/sandbox/sandboxes/")
_PATH_TEXT: Final = {
    "task_id": "UTF-8 of 1 to 512 bytes, percent-encoded; or ~ and the UTF-8 in base64url, which any id may be "
    "written as and `.`, `..` and ids that begin with ~ must be",
    "process_id": "the process's id",
    "session_id": "the session's id",
    "terminal_id": "the terminal's id",
    "port": "a port of the sandbox's loopback, 1 to 65535 in plain digits, but 8080",
    "path": "what the server is asked for, as it is to arrive",
    "sandbox_id": "the sandbox's id",
    "snapshot_id": "the snapshot's id",
    "key_id": "the key's id, which is not secret",
}
_HEADERS: Final = (
    (
        IDEMPOTENCY_HEADER,
        "1 to 255 visible ASCII characters of your choice: the same again, with the same body, starts nothing a second "
        "time and gives the same answer. Kept for a day.",
    ),
    (IF_POD_HEADER, "Refuse with sandbox_replaced where the task's pod is another one."),
    (TENANT_HEADER, "Platform keys only, and always there: the tenant to act for."),
    (PROJECT_HEADER, "Platform keys only, and always there: the project to act for."),
    (MEMBER_HEADER, "Platform keys only: the person to act for."),
)


def document(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """The whole document, ready for JSON."""
    types = _types_of(routes)
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(id, types), refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sojourn",
            "version": version,
            "summary": "One isolated sandbox per agent task.",
            "description": "Every error has one shape, ErrorReply; /docs says what each `code` means and what to do.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "parameters": {
                name: {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
                for name, text in _HEADERS
            },
            "securitySchemes": {
                "apiKey": {"type": "apiKey", "in": "header", "name": API_KEY_HEADER},
                "cleanupSecret": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "SANDBOX_CLEANUP_AUTH_SECRET, for retiring tasks.",
                },
            },
        },
    }


def error_codes(route: Route) -> list[str]:
    """Every code that the route can answer with, in the order of the table."""
    codes = set(route.errors) | set(_EVERY_ROUTE) | (set() if route.open else set(_EVERY_KEYED))
    return [code for code in ERROR_CODES if code in codes]


def _types_of(routes: Iterable[Route]) -> list[Any]:
    found: list[Any] = [ErrorReply]
    for route in routes:
        for kind in (route.request, route.stream, *route.replies.values()):
            if kind not in (None, bytes, str) and not any(kind is known for known in found):
                found.append(kind)
    return found


def _operation(route: Route, schema_of: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [_tag(route)],
        "parameters": _parameters(route),
        "responses": {str(status): _reply(route, status, kind, schema_of) for status, kind in route.replies.items()},
    }
    if route.request is bytes:
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    elif route.request is not None:
        body = {"required": True, "content": {JSON_TYPE: {"schema": schema_of[id(route.request)]}}}
        operation["requestBody"] = body
    by_status: dict[int, list[str]] = {}
    for code in error_codes(route):
        by_status.setdefault(ERROR_CODES[code], []).append(code)
    for status, codes in by_status.items():
        reply = {"description": ", ".join(codes), "content": {JSON_TYPE: {"schema": schema_of[id(ErrorReply)]}}}
        if status in (429, 503):
            reply["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
        operation["responses"].setdefault(str(status), reply)
    if route.open:
        operation["security"] = []
    elif route.role is None:
        operation["security"] = [{"apiKey": []}, {"cleanupSecret": []}]
    else:
        operation["x-sojourn-role"] = route.role.value
    return operation


def _reply(route: Route, status: int, kind: Any, schema_of: dict[int, Any]) -> dict[str, Any]:
    if status == 101:
        return {"description": f"A WebSocket of the subprotocol {PROTOCOL}; docs/executor.md tells its frames."}
    if kind is None:
        return {"description": "Done; no content."}
    if kind is bytes or kind is str:
        return {"description": "The content.", "content": {name: {} for name in route.content_types}}
    content: dict[str, Any] = {JSON_TYPE: {"schema": schema_of[id(kind)]}}
    if route.stream is not None:
        content[NDJSON_TYPE] = {"schema": schema_of[id(route.stream)]}
        content[SSE_TYPE] = {}
        content[FRAMES_TYPE] = {}
    return {"description": "The answer.", "content": content}


def _parameters(route: Route) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": _PATH_TEXT[name]}
        for name in _PARAMETER.findall(route.template)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}, "description": text}
        for name, text in route.query.items()
    ]
    if not route.open:
        parameters += [{"$ref": f"#/components/parameters/{name}"} for name in _headers(route)]
    return parameters


def _headers(route: Route) -> list[str]:
    about_task = route.template.startswith(_ABOUT_SANDBOXES)
    return [
        name
        for name, _ in _HEADERS
        if (name != IDEMPOTENCY_HEADER or (about_task and route.method == "POST"))
        and (name != IF_POD_HEADER or about_task)
    ]


def _operation_id(route: Route) -> str:
    words = re.findall(r"[a-z]+", route.template) + (["slash"] if route.template.endswith("/") else [])
    return "_".join([route.method.lower(), *words])


def _tag(route: Route) -> str:
    if route.template.startswith("/sandbox/task/"):
        return "Task sessions"
    if route.template.startswith("/sandbox/sandboxes/"):
        return "Long-lived sandboxes"
    if route.template.startswith("/sandbox/snapshots/"):
        return "Snapshots"
    return "Operators" if route.template.startswith("/api/") else "This manager"
