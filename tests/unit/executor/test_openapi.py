"""The executor's OpenAPI document is sound, and tells of exactly the calls that are mounted."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from aiohttp import web

from executor import __version__
from executor.app import routes_of
from executor.calls import CALLS
from executor.openapi import document, statuses

ROOT = Path(__file__).parents[3]
DOCUMENT = document("1.2.3")


def values_of(node: Any, name: str) -> Iterator[Any]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == name:
                yield value
            yield from values_of(value, name)
    elif isinstance(node, list):
        for item in node:
            yield from values_of(item, name)


def mounted() -> set[tuple[str, str]]:
    """(method, path) of every route, `*` for any method."""
    found = set()
    for route in routes_of(MagicMock()):
        assert isinstance(route, web.RouteDef)
        found.add((route.method, re.sub(r"\{([a-z]+):[^}]*\}", r"{\1}", route.path)))
    return found


def test_it_is_plain_json_of_version_3_1() -> None:
    again = json.loads(json.dumps(DOCUMENT))
    assert again == DOCUMENT
    assert (again["openapi"], again["info"]["version"]) == ("3.1.0", "1.2.3")


def test_every_reference_leads_somewhere() -> None:
    references = list(values_of(DOCUMENT, "$ref"))
    assert len(references) > 50
    for reference in references:
        node: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert node


def test_it_tells_of_every_route_and_of_no_other() -> None:
    told = {(call.method, call.path) for call in CALLS}
    routes = mounted()
    for method, path in routes:
        if method == "*":
            assert {one for one, where in told if where == path} > {"GET", "POST", "DELETE"}
        elif method == "HEAD" and path != "/v1/files":
            continue  # aiohttp's own companion of a GET
        else:
            assert (method, path) in told
    assert {(method, path) for method, path in told if "/ports/" not in path} <= routes


def test_no_call_stands_in_the_table_twice() -> None:
    assert len({(call.method, call.path) for call in CALLS}) == len(CALLS)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_every_code_of_a_call_is_one_that_there_is(call: Any) -> None:
    assert set(call.errors) <= set(statuses())
    assert call.summary.endswith(".")


def test_the_version_is_the_packages() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
