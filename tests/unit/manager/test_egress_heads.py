"""What the proxy makes of requests and answers: pure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manager.egress.heads import BadHead, parse_request, parse_response, split_authority


def test_a_tunnel_is_asked_for_by_host_and_port() -> None:
    assert parse_request(b"CONNECT server.test:443 HTTP/1.1\r\nHost: x\r\n\r\n") == (True, "server.test", 443, b"")
    assert parse_request(b"CONNECT [2606::1]:443 HTTP/1.1\r\n\r\n")[1:3] == ("2606::1", 443)


def test_a_plain_request_becomes_one_that_a_server_understands() -> None:
    head = (
        b"POST http://server.test:8080/a/b?c=d#e HTTP/1.1\r\nHost: elsewhere\r\nProxy-Authorization: Basic c2VjcmV0\r\n"
        b"Proxy-Connection: keep-alive\r\nConnection: X-Mine, close\r\nX-Mine: 1\r\nTE: trailers\r\nUpgrade: h2c\r\n"
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\nCookie: a=b\r\nX-Two: 1\r\nX-Two: 2\r\n\r\n"
    )
    assert parse_request(head) == (
        False, "server.test", 8080,
        b"POST /a/b?c=d HTTP/1.1\r\nHost: server.test:8080\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n"
        b"Cookie: a=b\r\nX-Two: 1\r\nX-Two: 2\r\nConnection: close\r\n\r\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        (b"http://h", b"/"), (b"http://h/", b"/"), (b"HTTP://h?q", b"/?q"), (b"http://h//x", b"//x"),
        (b"http://h/%2e%2e/x", b"/%2e%2e/x"), (b"http://h/http://other/", b"/http://other/"),
    ],
)  # fmt: skip
def test_the_path_is_passed_on_as_it_is(target: bytes, origin: bytes) -> None:
    request = parse_request(b"GET " + target + b" HTTP/1.1\r\n\r\n")
    assert request.head.startswith(b"GET " + origin + b" HTTP/1.1\r\nHost: h\r\n")
    assert (request.host, request.port) == ("h", 80)


def test_what_frames_a_body_is_not_dropped_on_the_word_of_connection() -> None:
    request = parse_request(b"GET http://h/ HTTP/1.1\r\nConnection: content-length\r\nContent-Length: 3\r\n\r\n")
    assert b"Content-Length: 3" in request.head


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET http://h/ HTTP/2.0\r\n\r\n",
        b"GET  http://h/ HTTP/1.1\r\n\r\n", b"GET http://h/ HTTP/1.1 \r\n\r\n", b"G@T http://h/ HTTP/1.1\r\n\r\n",
        b"GET https://h/ HTTP/1.1\r\n\r\n", b"GET ftp://h/ HTTP/1.1\r\n\r\n",
        b"GET file:///etc/passwd HTTP/1.1\r\n\r\n",
        b"GET gopher://h/_x HTTP/1.1\r\n\r\n", b"GET http:///x HTTP/1.1\r\n\r\n", b"GET http://:80/x HTTP/1.1\r\n\r\n",
        b"GET http://public.test@10.0.0.1/ HTTP/1.1\r\n\r\n", b"GET http://u:p@h/ HTTP/1.1\r\n\r\n",
        b"GET http://h:0/ HTTP/1.1\r\n\r\n", b"GET http://h:65536/ HTTP/1.1\r\n\r\n",
        b"GET http://h:80x/ HTTP/1.1\r\n\r\n", b"GET http://h:+80/ HTTP/1.1\r\n\r\n",
        b"GET http://h\xc3\xa9/ HTTP/1.1\r\n\r\n", b"GET http://h/\tx HTTP/1.1\r\n\r\n",
        "GET http://①②⑦.⓪.⓪.①/ HTTP/1.1\r\n\r\n".encode(),
        b"CONNECT h HTTP/1.1\r\n\r\n", b"CONNECT h: HTTP/1.1\r\n\r\n", b"CONNECT a@h:443 HTTP/1.1\r\n\r\n",
        b"CONNECT [::1:443 HTTP/1.1\r\n\r\n", b"CONNECT [::1]443 HTTP/1.1\r\n\r\n", b"CONNECT ::1:443 HTTP/1.1\r\n\r\n",
        b"GET http://h/ HTTP/1.1\r\nX: 1\r\n folded\r\n\r\n", b"GET http://h/ HTTP/1.1\r\nX : 1\r\n\r\n",
        b"GET http://h/ HTTP/1.1\r\nno colon\r\n\r\n", b"GET http://h/ HTTP/1.1\r\nX: 1\nY: 2\r\n\r\n",
        b"GET http://h/ HTTP/1.1\r\nX: 1\rY: 2\r\n\r\n", b"GET http://h/ HTTP/1.1\r\nX: \0\r\n\r\n",
        b"GET http://h/ HTTP/1.1\nX: 1\r\n\r\n", b"GET http://h/ HTTP/1.1\r\n: 1\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_request_to_a_proxy_is_refused(head: bytes) -> None:
    with pytest.raises(BadHead):
        parse_request(head)


def test_an_answer_closes_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\nX: 1\r\n\r\n"
    assert parse_response(head) == (200, b"HTTP/1.1 200 OK\r\nX: 1\r\nConnection: close\r\n\r\n")
    assert parse_response(b"HTTP/1.1 100\r\n\r\n")[0] == 100


@pytest.mark.parametrize(
    "head", [b"ICY 200 OK\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 2000 x\r\n\r\n", b"\r\n\r\n"]
)
def test_what_is_no_answer_is_refused(head: bytes) -> None:
    with pytest.raises(BadHead):
        parse_response(head)


def test_an_authority_without_a_port_has_the_schemes() -> None:
    assert split_authority("h", 80) == ("h", 80)
    assert split_authority("[::1]", 80) == ("::1", 80)
    assert split_authority("h:81", 80) == ("h", 81)


PIECES = st.sampled_from(
    [
        b"GET", b"CONNECT", b" ", b"http://", b"h", b"h:80", b"a@h", b"[::1]", b"/", b"?", b"#", b"%0d%0a",
        b" HTTP/1.1",
        b"\r\n", b"\r", b"\n", b"\0", b"\t", b"\xff", b":", b"Host: x", b"Connection: host, content-length",
        b"Content-Length: 1", b"Transfer-Encoding: chunked", b"Proxy-Authorization: secret", b"X", b"\r\n\r\n",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=24).map(b"".join) | st.binary(max_size=200))
@settings(max_examples=600, deadline=None)
def test_whatever_is_sent_comes_out_as_one_whole_head_or_not_at_all(sent: bytes) -> None:
    as_fields, as_target = b"GET http://h/ HTTP/1.1\r\n" + sent, b"GET http://" + sent + b" HTTP/1.1"
    for head in (sent, as_fields + b"\r\n\r\n", as_target + b"\r\n\r\n"):
        try:
            request = parse_request(head)
        except BadHead:
            continue
        assert request.host
        assert 0 < request.port < 65_536
        if request.tunnel:
            assert request.head == b""
            continue
        assert request.head.count(b"\r\n\r\n") == 1
        assert request.head.endswith(b"\r\nConnection: close\r\n\r\n")
        lines = request.head[:-4].split(b"\r\n")
        assert lines[0].count(b" ") == 2
        assert [line for line in lines if line.lower().startswith(b"host:")] == [lines[1]]
        assert not any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines)
        assert not any(line.lower().startswith(b"proxy-") for line in lines)
