"""Where a server behind a port may send its caller."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from manager.api.ports import Place

PREFIX = "/sandbox/task/a%2Fb/ports/3000"


@pytest.fixture
def place() -> Place:
    return Place(make_mocked_request("GET", PREFIX + "/app/page?x=1"))


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("/login?next=/", "/login?next=/"),
        ("other", "/app/other"),
        ("?y=2", "/app/page?y=2"),
        ("../top", "/top"),
        ("../../../../api/v1/keys", "/api/v1/keys"),
        ("http://localhost:3000/x", "/x"),
        ("http://127.0.0.1:3000/x", "/x"),
        ("//localhost:3000/x", "/x"),
    ],
)
def test_a_place_of_the_same_server_stays_behind_its_port(place: Place, given: str, own: str) -> None:
    assert place.location(given) == PREFIX + own


@pytest.mark.parametrize(
    "given",
    [
        "https://evil.example/", "//evil.example/", "/\\evil.example", "\\\\evil.example", "javascript:alert(1)",
        "http://localhost:3001/", "http://localhost:3000@evil.example/", "http://localhost:30000/", "///evil.example/",
        "/%2e%2e/%2e%2e/keys", "/a/%2E%2e/b", "data:text/html,x", "http:evil", "/a b", "http://127.0.0.1:3000//evil.example",
    ],
)  # fmt: skip
def test_every_other_place_is_none(place: Place, given: str) -> None:
    assert place.location(given) is None
