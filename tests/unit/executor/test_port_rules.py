"""Which ports, paths and headers pass between a caller and a server in the pod."""

from __future__ import annotations

import pytest

from executor.wire import headers_from_port, headers_to_port, port_number, port_target


@pytest.mark.parametrize(("text", "port"), [("1", 1), ("80", 80), ("8081", 8081), ("65535", 65_535)])
def test_plain_digits_are_a_port(text: str, port: int) -> None:
    assert port_number(text) == port


@pytest.mark.parametrize(
    "text", ["", "0", "00", "08080", "8080", "02280", "+2280", "-1", "65536", "99999", "100000", "80 ", " 80", "80\n",
             "8080%20", "٨٠", "0x50", "1e3", "1_0", "80.0", "80:80"],
)  # fmt: skip
def test_everything_else_is_none(text: str) -> None:
    assert port_number(text) is None


@pytest.mark.parametrize("path", ["/..", "/a/../b", "/./a", "/a/.", "/%2e%2E/a", "/.%2e", "/a b", "/ä", "/a#b", "a"])
def test_a_path_that_leads_elsewhere_or_is_not_encoded_is_none(path: str) -> None:
    assert port_target(path, "") is None


def test_a_plain_path_passes_as_it_is_with_its_query() -> None:
    assert port_target("/a%2Fb/.c/..d/", "x=../y&z=%00") == "/a%2Fb/.c/..d/?x=../y&z=%00"


def test_two_lengths_that_differ_or_a_length_beside_chunks_never_pass() -> None:
    assert headers_from_port([("Content-Length", "3"), ("content-length", "4")]) == []
    assert headers_from_port([("Content-Length", "3"), ("Transfer-Encoding", "chunked")]) == []
    assert headers_from_port([("Content-Length", "3")]) == [("Content-Length", "3")]


@pytest.mark.parametrize("value", ["a\r\nX: 1", "a\nb", "a\0b", "\udc80", "\x7f", "\x85"])
def test_a_value_that_could_break_a_head_does_not_pass(value: str) -> None:
    assert headers_from_port([("X-A", value)]) == headers_to_port([("X-A", value)]) == []


def test_a_name_that_is_none_does_not_pass() -> None:
    assert headers_from_port([("X A", "1"), ("", "1"), ("X:", "1")]) == []
