"""JSON in and out of the routes: bodies are bounded, strictly typed and must arrive in time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError

from executor.errors import ExecutorError, InvalidRequest, TooLarge
from executor.wire import JSON_TYPE, MiB

BODY_LIMIT_BYTES: Final = MiB
BODY_DEADLINE_SEC: Final = 30.0  # a JSON body is small; who takes longer holds a connection for nothing

_T = TypeVar("_T")
_ENCODER: Final = msgspec.json.Encoder()
_DECODERS: Final[dict[type, msgspec.json.Decoder[Any]]] = {}  # one for each request type
_PLACE: Final = re.compile(r"at `\$\.([^`]*)`\Z")
_FIELD: Final = re.compile(r"field `([^`]*)`")


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_ENCODER.encode(value), status=status, headers=headers, content_type=JSON_TYPE)


async def read_json(request: web.BaseRequest, kind: type[_T], limit_bytes: int = BODY_LIMIT_BYTES) -> _T:
    """The body as `kind`. Raises TooLarge, before more than the limit is kept, and InvalidRequest for everything that
    is not exactly a `kind`: not JSON, not UTF-8, a wrong type, an unknown or missing field (details: `field`)."""
    return decode_json(await read_body(request, limit_bytes), kind)


def decode_json(body: bytes, kind: type[_T]) -> _T:
    """The same for a body that is there. Raises InvalidRequest."""
    try:
        value: _T = _decoder(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeError) as why:
        raise _refused(body, str(why)) from None
    except RecursionError:
        raise InvalidRequest("body: nested too deeply") from None
    return value


async def read_body(request: web.BaseRequest, limit_bytes: int = BODY_LIMIT_BYTES) -> bytes:
    """All of a small body. Raises TooLarge, InvalidRequest for a broken or late one, ConnectionError."""
    if request.content_length is not None and request.content_length > limit_bytes:
        raise _too_large(limit_bytes)
    content = request.content
    try:
        if content.is_eof():  # it came with the headers, as nearly all do: no timer needed
            body = content.read_nowait()
            if len(body) > limit_bytes:
                raise _too_large(limit_bytes)
            return body
        kept = bytearray()
        async with asyncio.timeout(BODY_DEADLINE_SEC):
            while piece := await content.readany():
                kept += piece
                if len(kept) > limit_bytes:
                    raise _too_large(limit_bytes)
        return bytes(kept)
    except TimeoutError:
        raise InvalidRequest(f"body: did not arrive within {BODY_DEADLINE_SEC:.0f} s") from None
    except (web.RequestPayloadError, PayloadEncodingError) as why:
        raise InvalidRequest(f"body: broken off or badly encoded: {str(why)[:200]}") from None


def read_query(request: web.BaseRequest, *allowed: str) -> dict[str, str]:
    """The query's parameters, decoded exactly once; what is no UTF-8 becomes surrogate escapes, as in os.fsdecode.

    Raises InvalidRequest for a parameter that the call does not know, or that comes twice."""
    # Not `request.query`: it puts U+FFFD for such bytes, and so would name another file than the caller means.
    _, _, text = request.raw_path.partition("?")
    query: dict[str, str] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=32)
    except ValueError:
        raise InvalidRequest("query: more than 32 parameters") from None
    for name, value in pairs:
        shown = ascii(name[:80])
        if name not in allowed:
            raise InvalidRequest(f"query: unknown parameter {shown}", field=shown)
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


def _decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    decoder: msgspec.json.Decoder[_T] | None = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind, strict=True)
    return decoder


def _refused(body: bytes, why: str) -> ExecutorError:
    if not body.strip():
        return InvalidRequest("body: is empty; a JSON object is needed")
    place, field = _PLACE.search(why), _FIELD.search(why)
    parts = [match.group(1) for match in (place, field) if match is not None]
    message = f"body: {why[:500]}"
    return InvalidRequest(message, field=".".join(parts)[:200]) if parts else InvalidRequest(message)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"body: over the limit of {limit_bytes} bytes", limit=limit_bytes)
