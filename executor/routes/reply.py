"""JSON in and out of the routes: bodies are bounded, strictly typed and must arrive in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError

from executor.errors import InvalidRequest, LateRequest, TooLarge
from executor.jsonbody import decode_json
from executor.wire import JSON_TYPE, MiB

BODY_LIMIT_BYTES: Final = MiB

_T = TypeVar("_T")
_ENCODER: Final = msgspec.json.Encoder()


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_ENCODER.encode(value), status=status, headers=headers, content_type=JSON_TYPE)


class Patience(msgspec.Struct, frozen=True):
    """How long a body may keep us waiting, all waits together: a start, and more for what came. The time that we
    take ourselves, on a slow disk say, does not count."""

    start_sec: float
    bytes_per_sec: int
    pause_sec: float  # and none of the waits longer than this


JSON_PATIENCE: Final = Patience(10.0, 65_536, 10.0)
CONTENT_PATIENCE: Final = Patience(10.0, 1024, 60.0)


async def body_pieces(
    request: web.BaseRequest, patience: Patience | None = CONTENT_PATIENCE, *, as_it_is: bool = False
) -> AsyncGenerator[bytes, None]:
    """The body as it comes; None waits for as long as the caller likes. Asks for it where the caller waits to be asked
    (`Expect: 100-continue`): so a call that is refused before this is not sent it.

    Raises InvalidRequest where it is broken, or encoded and not wanted `as_it_is`; LateRequest."""
    if "Content-Encoding" in request.headers and not as_it_is:
        raise InvalidRequest("send the body without Content-Encoding", field="Content-Encoding")
    loop, content = asyncio.get_running_loop(), request.content
    waited, received = 0.0, 0
    await _ask_for_body(request)
    try:
        while True:
            if content.is_eof() or patience is None:  # no timer for what is there already, as nearly all bodies are
                piece = await content.readany()
            else:
                began = loop.time()
                left = patience.start_sec + received / patience.bytes_per_sec - waited
                async with asyncio.timeout(max(0.0, min(left, patience.pause_sec))):
                    piece = await content.readany()
                waited += loop.time() - began
            if not piece:
                return
            received += len(piece)
            yield piece
    except TimeoutError:
        raise LateRequest(f"body: it stopped, or came too slowly: {received} bytes in {waited:.0f} s") from None
    except (web.RequestPayloadError, PayloadEncodingError) as why:
        raise InvalidRequest(f"body: broken off or badly encoded: {str(why)[:200]}") from None


async def read_json(request: web.BaseRequest, kind: type[_T], limit_bytes: int = BODY_LIMIT_BYTES) -> _T:
    """The body as `kind`. Raises TooLarge, before more than the limit is kept, and InvalidRequest for everything that
    is not exactly a `kind`: not JSON, not UTF-8, a wrong type, an unknown or missing field (details: `field`)."""
    return decode_json(await read_body(request, limit_bytes), kind)


async def read_body(request: web.BaseRequest, limit_bytes: int = BODY_LIMIT_BYTES) -> bytes:
    """All of a JSON object's text. Raises TooLarge, LateRequest, and InvalidRequest for what cannot be one, all as
    soon as it is known; ConnectionError."""
    if request.content_length is not None and request.content_length > limit_bytes:
        raise _too_large(limit_bytes)
    if request.content_type.startswith("multipart/"):
        raise InvalidRequest("body: must be JSON, not a form", field="Content-Type")
    content = request.content
    if content.is_eof() and "Content-Encoding" not in request.headers:  # it came with the headers, as nearly all do
        try:
            body = content.read_nowait()
        except (web.RequestPayloadError, PayloadEncodingError) as why:
            raise InvalidRequest(f"body: broken off or badly encoded: {str(why)[:200]}") from None
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        return body
    kept = bytearray()
    async with aclosing(body_pieces(request, JSON_PATIENCE)) as pieces:
        async for piece in pieces:
            if not kept and piece.lstrip()[:1] not in (b"{", b""):
                raise InvalidRequest("body: must be a JSON object")
            kept += piece
            if len(kept) > limit_bytes:
                raise _too_large(limit_bytes)
    return bytes(kept)


async def _ask_for_body(request: web.BaseRequest) -> None:
    expected = request.headers.get("Expect")
    if expected is None:
        return
    if expected.lower() != "100-continue":
        raise InvalidRequest("Expect: can be 100-continue only", field="Expect")
    if not request.content.is_eof() and not request.content.total_bytes:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # that was no part of the answer


async def ask_later(_request: web.Request) -> None:
    """aiohttp's answer to `Expect`: none yet, the body may never be wanted (`body_pieces`)."""


def read_query(request: web.BaseRequest, *allowed: str) -> dict[str, str]:
    """The query's parameters, decoded exactly once; what is no UTF-8 becomes surrogate escapes, as in os.fsdecode.

    Raises InvalidRequest for a parameter that the call does not know, or that comes twice."""
    # Not `request.query`: it puts U+FFFD for such bytes, and so would name another file than the caller means.
    _, _, text = request.raw_path.partition("?")
    query: dict[str, str] = {}
    if not text:
        return query
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=32)
    except ValueError:
        raise InvalidRequest("query: more than 32 parameters") from None
    for name, value in pairs:
        shown = ascii(name[:80])
        if name not in allowed:
            raise InvalidRequest(f"query: unknown parameter {shown}", field=shown[1:-1])
        if name in query:
            raise InvalidRequest(f"query: {shown} is given more than once", field=name)
        query[name] = value
    return query


def flag_of(query: Mapping[str, str], name: str, default: bool = False) -> bool:
    """`true` or `1`, `false` or `0`; the default where it is not given. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return default
    if text not in ("true", "1", "false", "0"):
        raise InvalidRequest(f"query: {name} must be true or false", field=name)
    return text in ("true", "1")


def whole_of(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """A whole number within the bounds; the default where it is not given. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return default
    # More than 20 digits are over every bound of ours, and int() of very many is slow, then an error.
    if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
        raise InvalidRequest(f"query: {name} must be a whole number from {low} to {high}", field=name)
    return int(text)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"body: over the limit of {limit_bytes} bytes", limit=limit_bytes)
