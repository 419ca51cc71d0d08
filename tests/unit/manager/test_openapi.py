"""The OpenAPI document is sound: what it points to is there, and what it says of the types is what they do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from manager.api.docs_page import page
from manager.api.openapi import document
from manager.api.routes import ROUTES
from manager.api.wire import ERROR_CODES, TaskCommand

DOCUMENT = document(ROUTES, "1.2.3")
OPERATIONS = [
    (path, method, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]


def values_of(node: Any, name: str) -> Iterator[Any]:
    """Every value under that name, anywhere."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == name:
                yield value
            yield from values_of(value, name)
    elif isinstance(node, list):
        for item in node:
            yield from values_of(item, name)


def resolved(pointer: str) -> Any:
    node: Any = DOCUMENT
    for part in pointer.removeprefix("#/").split("/"):
        node = node[part]
    return node


def test_it_is_plain_json_of_version_3_1() -> None:
    again = json.loads(json.dumps(DOCUMENT))
    assert again == DOCUMENT
    assert (again["openapi"], again["info"]["version"]) == ("3.1.0", "1.2.3")


def test_every_reference_leads_somewhere() -> None:
    references = list(values_of(DOCUMENT, "$ref"))
    assert len(references) > 50
    for reference in references:
        assert resolved(reference)


def test_every_mapped_event_is_the_one_with_that_type() -> None:
    for mapping in values_of(DOCUMENT, "mapping"):
        for kind, reference in mapping.items():
            assert resolved(reference)["properties"]["type"]["enum"] == [kind]


def test_operation_ids_are_names_and_no_two_are_the_same() -> None:
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(names)) == len(names) == len(ROUTES)
    assert all(re.fullmatch(r"[a-z][a-z_]*", name) for name in names)


@pytest.mark.parametrize(
    ("path", "method", "operation"), OPERATIONS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_an_operation_declares_its_parameters_answers_and_who_may_call(path: str, method: str, operation: Any) -> None:
    in_path = {each["name"] for each in operation["parameters"] if each.get("in") == "path"}
    assert in_path == set(re.findall(r"\{(\w+)\}", path))
    assert "]" not in path
    assert any(status.startswith("2") or status == "101" for status in operation["responses"])
    assert all(re.fullmatch(r"101|[2-5]\d\d", status) for status in operation["responses"])
    if operation.get("security") != []:
        assert {"401", "403"} <= set(operation["responses"])
    if method in ("get", "head", "delete"):
        assert "requestBody" not in operation
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert all(name in schemes for each in operation.get("security", []) for name in each)


def test_the_exec_body_is_described_as_it_is_read() -> None:
    schema = DOCUMENT["components"]["schemas"]["TaskCommand"]
    assert schema["required"] == ["command"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(TaskCommand.__struct_fields__)
    assert schema["properties"]["encoding"]["enum"] == ["base64", "text"]


def test_the_page_tells_of_every_call_every_type_and_every_code() -> None:
    html = page(DOCUMENT)
    for path, _, operation in OPERATIONS:
        assert f"id='{operation['operationId']}'" in html
        assert path in html
    for name in DOCUMENT["components"]["schemas"]:
        assert f"id='type-{name}'" in html
    for code in ERROR_CODES:
        assert f"<code>{code}</code>" in html
    anchors = set(re.findall(r"id='?([\w-]+)", html))
    assert set(re.findall(r"href='#([\w-]+)'", html)) <= anchors


def test_the_page_escapes_what_it_shows() -> None:
    tampered = document(ROUTES, "<script>alert(1)</script>")
    assert "<script" not in page(tampered)
