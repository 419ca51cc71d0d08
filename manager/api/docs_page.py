"""The human page at /docs: the same document as HTML, made here, with nothing from anywhere else and no script."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Any, Final

from manager.api.wire import ERROR_CODES

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.45 ui-monospace, monospace }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; border-radius: 6px }
section { border-top: 1px solid var(--line); margin-top: 1.5rem }
h3 code { font-size: 1rem }
td code { overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line) }
summary { cursor: pointer }
"""
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_EXAMPLE: Final = """curl -s "$SANDBOX_GATEWAY_URL/sandbox/task/my-task/exec" \\
     -H "X-Api-Key: $SANDBOX_API_KEY" \\
     -d '{"command": ["python3", "-c", "print(6 * 7)"], "timeout_sec": 30}'"""


def page(document: dict[str, Any]) -> str:
    """The page for an OpenAPI document of ours."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Sojourn's HTTP interface</title><style>{_STYLE}</style>",
        f"<h1>Sojourn {escape(info['version'])}</h1>",
        f"<p>{escape(info['summary'])} Send your key as <code>X-Api-Key</code>. Durations are seconds, sizes bytes, ",
        "times RFC 3339 in UTC. For programs: <a href=/openapi.json>openapi.json</a>.",
        f"<pre>{escape(_EXAMPLE)}</pre>",
        _contents(document),
    ]
    for path, operations in document["paths"].items():
        parts += [_operation(path, method, operation) for method, operation in operations.items()]
    parts += ["<section><h2 id=types>Types</h2>"]
    parts += [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    parts += ["</section>", _errors()]
    return "\n".join(parts)


def _contents(document: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{method.upper()}</code>"
        f"<td><a href='#{operation['operationId']}'><code>{escape(path)}</code></a><td>{escape(operation['summary'])}"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return "<h2>Calls</h2><table>" + "".join(rows) + "</table>"


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    text = [
        f"<section><h3 id='{operation['operationId']}'><code>{method.upper()} {escape(path)}</code></h3>",
        f"<p>{escape(operation['summary'])} {_who(operation)}",
    ]
    named = [parameter for parameter in operation["parameters"] if "name" in parameter]
    if named:
        rows = "".join(
            f"<tr><td><code>{escape(each['name'])}</code><td>{each['in']}<td>{escape(each['description'])}"
            for each in named
        )
        text.append(f"<table>{rows}</table>")
    if "requestBody" in operation:
        text.append(f"<p>Body: {_content(operation['requestBody']['content'])}")
    rows = "".join(
        f"<tr><td>{status}<td>{_content(reply['content']) if int(status) < 400 and 'content' in reply else ''} "
        f"{escape(reply['description'])}"
        for status, reply in sorted(operation["responses"].items())
    )
    return "\n".join([*text, f"<details><summary>Answers</summary><table>{rows}</table></details></section>"])


def _who(operation: dict[str, Any]) -> str:
    if "x-sojourn-role" in operation:
        return f"Role: <code>{escape(operation['x-sojourn-role'])}</code> or more."
    return "Open to everybody." if not operation.get("security") else "An API key of the owner, or the cleanup secret."


def _content(content: dict[str, Any]) -> str:
    return ", ".join(
        f"<code>{escape(kind)}</code>" + (f" {_type(body['schema'])}" if "schema" in body else "")
        for kind, body in content.items()
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    head = f"<h3 id='type-{escape(name)}'>{escape(name)}</h3><p>{escape(schema.get('description', ''))}"
    required = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{_type(kind)}<td>{_default(field, kind, required)}"
        for field, kind in schema.get("properties", {}).items()
    )
    return f"{head}<table>{rows}</table>"


def _default(field: str, kind: dict[str, Any], required: list[str]) -> str:
    if field in required:
        return "always there"
    return f"default <code>{escape(str(kind['default']))}</code>" if "default" in kind else "may be left out"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f"<a href='#type-{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and "additionalProperties" in schema:
        inner = schema["additionalProperties"]
        return f"object of {_type(inner)}" if isinstance(inner, dict) else "object"
    return escape(str(schema.get("type", "anything")))


def _errors() -> str:
    rows = "".join(f"<tr><td>{status}<td><code>{code}</code>" for code, status in ERROR_CODES.items())
    shape = escape('{"error": {"code", "message", "retryable", "details"}}')
    return f"<section><h2 id=errors>Errors</h2><p>One shape: <code>{shape}</code><table>{rows}</table></section>"
