"""Heads of HTTP messages that pass through the proxy: what they ask for, and what of them is passed on. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

HEAD_BYTES: Final = 32_768
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_PORT: Final = re.compile(r"[0-9]{1,5}\Z")
_FIELD_END: Final = re.compile(rb"\r\n")
# Of one connection only, RFC 9110 section 7.6.1; `Transfer-Encoding` stays, since the body passes as it is.
_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"proxy-authenticate",
        b"te",
        b"upgrade",
    }
)


class BadHead(Exception):
    """Not a request that a proxy can do something with; the message says why."""


class Request(NamedTuple):
    tunnel: bool  # CONNECT
    host: str
    port: int
    head: bytes  # what the server gets; b"" for a tunnel


def parse_request(head: bytes) -> Request:
    """`head` up to and with its empty line. Raises BadHead."""
    first, fields = _split(head)
    words = first.split(b" ")
    if len(words) != 3 or not _TOKEN.match(words[0]) or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadHead("not an HTTP/1.1 request")
    method, target, version = words
    if not target.isascii() or any(byte <= 0x20 or byte == 0x7F for byte in target):
        raise BadHead("the target has characters that must be percent-encoded")
    text = target.decode("ascii")
    if method == b"CONNECT":
        host, port = split_authority(text, None)
        return Request(True, host, port, b"")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() != "http":
        raise BadHead("this is a proxy: ask for http://host/path, or CONNECT host:port for anything else")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    path = urlsplit("http://x" + rest[len(authority) :])
    host, port = split_authority(authority, 80)
    origin = (path.path or "/") + (f"?{path.query}" if path.query else "")
    lines = [b"%s %s %s" % (method, origin.encode("ascii"), version), b"Host: " + authority.encode("ascii")]
    lines += _end_to_end(fields, without=b"host")
    return Request(False, host, port, _joined(lines))


def parse_response(head: bytes) -> tuple[int, bytes]:
    """Status, and what the client gets of the head. Raises BadHead."""
    first, fields = _split(head)
    words = first.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not re.match(rb"[1-9][0-9]{2}\Z", words[1]):
        raise BadHead("the server's answer is no HTTP/1.1")
    return int(words[1]), _joined([first, *_end_to_end(fields)])


def split_authority(text: str, default_port: int | None) -> tuple[str, int]:
    """Host (an IPv6 address without its brackets) and port. Raises BadHead, also for one with a user's name."""
    if "@" in text:
        raise BadHead("no user names in a target")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not (rest == "" or rest.startswith(":")):
            raise BadHead("an IPv6 address stands in brackets")
        port = rest[1:]
    else:
        host, _, port = text.partition(":")
    if not host:
        raise BadHead("no host")
    if not port and default_port is not None:
        return host, default_port
    if not _PORT.match(port) or not 0 < int(port) < 65_536:
        raise BadHead("the port is a number from 1 to 65535")
    return host, int(port)


def _split(head: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """First line, and (name in lower case, whole line) of each field."""
    if not head.endswith(b"\r\n\r\n") or b"\0" in head:
        raise BadHead("not an HTTP head")
    first, *lines = _FIELD_END.split(head[:-4])
    fields = []
    for line in lines:
        name, colon, _ = line.partition(b":")
        if not colon or not _TOKEN.match(name):
            raise BadHead("a header that is none")
        fields.append((name.lower(), line))
    if any(b"\r" in line or b"\n" in line for line in (first, *lines)):
        raise BadHead("a line break of half a kind")
    return first, fields


def _end_to_end(fields: list[tuple[bytes, bytes]], without: bytes = b"") -> list[bytes]:
    named = {
        word.strip().lower()
        for name, line in fields
        if name == b"connection"
        for word in line.partition(b":")[2].split(b",")
    }
    # What frames the body passes whatever `Connection` says of it.
    dropped = (_HOP | named | {without}) - {b"transfer-encoding", b"content-length"}
    return [line for name, line in fields if name not in dropped]


def _joined(lines: list[bytes]) -> bytes:
    # One request a connection: the next one may be for another server.
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])
