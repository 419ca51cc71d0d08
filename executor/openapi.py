"""The executor's OpenAPI 3.1 document, made from the table of calls and the types of the code itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from executor import errors
from executor.calls import CALLS, Call
from executor.wire import (
    FRAMES_TYPE,
    JSON_TYPE,
    LEASE_HEADER,
    NDJSON_TYPE,
    OFFSET_HEADER,
    POD_HEADER,
    PROCESS_ID,
    PROTOCOL,
    RAW_TYPE,
    SSE_TYPE,
    ErrorReply,
)

_PARAMETER: Final = re.compile(r"\{([a-z]+)\}")
_EVERY_CALL: Final = ("invalid_request", "unauthenticated", "wrong_pod", "rate_limited", "shutting_down")
_PATH_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "id": {"type": "string", "pattern": "^" + PROCESS_ID.pattern.replace(r"\Z", "$")},
    "port": {"type": "integer", "minimum": 1, "maximum": 65_535},
    "path": {"type": "string"},
}


def document(version: str, calls: Sequence[Call] = CALLS) -> dict[str, Any]:
    """The whole document, ready for JSON."""
    types = _types_of(calls)
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(id, types), refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, schema_of)
    headers: tuple[tuple[str, str, dict[str, Any]], ...] = (
        (POD_HEADER, "Refuse with wrong_pod where this is another pod.", {"type": "string"}),
        (LEASE_HEADER, "Seconds of quiet after which the pod ends itself.", {"type": "integer", "minimum": 1}),
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sojourn executor",
            "version": version,
            "summary": "Commands, shells, terminals and files of one pod.",
            "description": "Every error has one shape, ErrorReply. docs/executor.md has the guarantees.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"podToken": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "parameters": {
                name: {"name": name, "in": "header", "description": text, "schema": schema}
                for name, text, schema in headers
            },
            "securitySchemes": {"podToken": {"type": "http", "scheme": "bearer", "description": "The pod's token."}},
        },
    }


def statuses() -> dict[str, int]:
    """The HTTP status of every code that the executor can answer with."""
    found: dict[str, int] = {}
    kinds: list[type[errors.ExecutorError]] = [errors.ExecutorError]
    while kinds:
        kind = kinds.pop()
        if "code" in vars(kind):  # else it says more of its parent's: how a connection was cut off
            found[kind.code] = kind.status
        kinds += kind.__subclasses__()
    return found


def _types_of(calls: Iterable[Call]) -> list[Any]:
    found: list[Any] = [ErrorReply]
    for call in calls:
        for kind in (call.request, call.stream, *call.replies.values()):
            if kind not in (None, bytes) and not any(kind is known for known in found):
                found.append(kind)
    return found


def _operation(call: Call, schema_of: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": "_".join([call.method.lower(), *re.findall(r"[a-z0-9]+", call.path)]),
        "summary": call.summary,
        "parameters": _parameters(call),
        "responses": {str(status): _reply(call, status, kind, schema_of) for status, kind in call.replies.items()},
    }
    if call.request is not None:
        content: dict[str, Any] = (
            {"application/octet-stream": {}}
            if call.request is bytes
            else {JSON_TYPE: {"schema": schema_of[id(call.request)]}}
        )
        operation["requestBody"] = {"required": not call.is_body_optional, "content": content}
    known = statuses()
    by_status: dict[int, list[str]] = {}
    for code in sorted({*call.errors, *(() if call.open else _EVERY_CALL), "internal"}):
        by_status.setdefault(known[code], []).append(code)
    for status, codes in sorted(by_status.items()):
        reply = {"description": ", ".join(codes), "content": {JSON_TYPE: {"schema": schema_of[id(ErrorReply)]}}}
        operation["responses"].setdefault(str(status), reply)
    if call.open:
        operation["security"] = []
    return operation


def _reply(call: Call, status: int, kind: Any, schema_of: dict[int, Any]) -> dict[str, Any]:
    if status == 101:
        return {"description": f"A WebSocket of the subprotocol {PROTOCOL}; docs/executor.md tells its frames."}
    if kind is None:
        return {"description": "Done; no content."}
    if kind is bytes:
        reply: dict[str, Any] = {"description": "The content.", "content": {name: {} for name in call.content_types}}
        if call.path.endswith("/output"):
            reply["headers"] = {OFFSET_HEADER: {"schema": {"type": "integer"}, "description": "of the first byte"}}
        return reply
    content: dict[str, Any] = {JSON_TYPE: {"schema": schema_of[id(kind)]}}
    if call.stream is not None:
        content |= {NDJSON_TYPE: {"schema": schema_of[id(call.stream)]}, SSE_TYPE: {}, FRAMES_TYPE: {}, RAW_TYPE: {}}
    return {"description": "The answer.", "content": content}


def _parameters(call: Call) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}
        for name in _PARAMETER.findall(call.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": one.required, "schema": dict(one.schema), "description": one.text}
        for name, one in call.query.items()
    ]
    if not call.open:
        parameters += [{"$ref": f"#/components/parameters/{name}"} for name in (POD_HEADER, LEASE_HEADER)]
    return parameters
