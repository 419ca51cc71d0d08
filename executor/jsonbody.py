"""JSON bodies as request types: strictly typed, and refused in words that name the field."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from executor.errors import InvalidRequest

_T = TypeVar("_T")
_DECODERS: Final[dict[type, msgspec.json.Decoder[Any]]] = {}  # one for each request type
_PLACE: Final = re.compile(r"at `\$\.([^`]*)`\Z")
_FIELD: Final = re.compile(r"field `([^`]*)`")


def decode_json(body: bytes, kind: type[_T]) -> _T:
    """Raises InvalidRequest for everything that is not exactly a `kind`: not JSON, not UTF-8, a wrong type, an unknown
    or missing field (details: `field`)."""
    try:
        value: _T = _decoder(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeError) as why:
        raise _refused(body, str(why)) from None
    except RecursionError:
        raise InvalidRequest("body: nested too deeply") from None
    return value


def _decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    decoder: msgspec.json.Decoder[_T] | None = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind, strict=True)
    return decoder


def _refused(body: bytes, why: str) -> InvalidRequest:
    if not body.strip():
        return InvalidRequest("body: is empty; a JSON object is needed")
    place, field = _PLACE.search(why), _FIELD.search(why)
    parts = [match.group(1) for match in (place, field) if match is not None]
    message = f"body: {why[:500]}"
    return InvalidRequest(message, field=".".join(parts)[:200]) if parts else InvalidRequest(message)
