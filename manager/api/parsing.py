"""What a request says: task ids out of the raw path, JSON bodies, conditions. All of it is checked before use."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError
from multidict import CIMultiDictProxy

from executor.wire import PROCESS_ID
from manager.api.wire import (
    BODY_BYTES,
    IDEMPOTENCY_HEADER,
    IF_POD_HEADER,
    NoFields,
    TaskCommand,
    TaskSession,
    TaskTerminal,
)
from manager.errors import InvalidRequest, InvalidTaskId, NotFound, TooLarge
from manager.model import check_task_id

T = TypeVar("T")

OWN_ID: Final = re.compile(r"[a-z0-9]{1,64}\Z")  # what an id that we gave can look like
_BAD_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]+={0,2}\Z")
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`\Z")
_NAMED: Final = re.compile(r"(?:unknown|required) field `([^`]*)`")
_IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,255}\Z")
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {}


# ── paths ───────────────────────────────────────────────────────────────────────────────────────────────────────


def segment(request: web.BaseRequest, index: int) -> str:
    """The raw path's part between its slashes `index` and `index + 1`; "" beyond the end."""
    parts = request.rel_url.raw_path.split("/", index + 1)
    return parts[index] if len(parts) > index else ""


def task_id_of(raw: str) -> str:
    """The task id that a path segment stands for: percent-decoded exactly once, or `~` and base64url.

    Raises InvalidTaskId."""
    if _BAD_PERCENT.search(raw):
        raise InvalidTaskId("a % in the path must be followed by two hexadecimal digits; % itself is written %25")
    try:
        text = unquote_to_bytes(raw).decode("utf-8")
    except UnicodeError:
        raise InvalidTaskId("a task id must be percent-encoded UTF-8") from None
    if text.startswith("~"):
        text = _from_base64url(text[1:])
    return check_task_id(text)


def _from_base64url(encoded: str) -> str:
    bare = encoded.rstrip("=")
    try:
        if not _BASE64URL.match(encoded):
            raise ValueError
        raw = base64.urlsafe_b64decode(bare + "=" * (-len(bare) % 4))
        # Unused bits that are not zero would give one task many spellings.
        if base64.urlsafe_b64encode(raw).decode().rstrip("=") != bare:
            raise ValueError
        return raw.decode("utf-8")
    except (ValueError, binascii.Error):
        raise InvalidTaskId("after ~ a task id is its UTF-8 in base64url") from None


def process_id_of(raw: str) -> str:
    """A process id out of a path segment. Raises NotFound for what no process can be called."""
    if not PROCESS_ID.match(raw):
        raise NotFound("no such process")
    return raw


def raw_query(request: web.BaseRequest) -> str:
    """The query as it came, to be passed on. Raises InvalidRequest where it is not plain ASCII."""
    query = request.rel_url.raw_query_string
    if not query.isascii():
        raise InvalidRequest("the query must be percent-encoded", field="query")
    return query


def no_query(request: web.BaseRequest) -> None:
    """Raises InvalidRequest where there is a query on a call that takes none: it would be ignored in silence."""
    if request.rel_url.raw_query_string:
        raise InvalidRequest("this call takes no query parameters", field="query")


def known_query(request: web.BaseRequest, known: tuple[str, ...]) -> Mapping[str, str]:
    """Raises InvalidRequest for what the call does not know, and what is given twice."""
    query = request.rel_url.query
    for name in query:
        if name not in known:
            raise InvalidRequest(f"this call takes {', '.join(known)}, not {name[:64]!r}", field=name[:64])
        if len(query.getall(name)) > 1:
            raise InvalidRequest(f"{name} may be given only once", field=name)
    return query


# ── headers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def single(headers: CIMultiDictProxy[str], name: str) -> str | None:
    """The header's one value, None where it is not there. Raises InvalidRequest where it is there twice."""
    values = headers.getall(name, None)
    if values is None:
        return None
    if len(values) > 1:
        raise InvalidRequest(f"the header {name} may be given only once", field=name)
    return values[0].strip()


def idempotency_key(request: web.BaseRequest) -> str | None:
    """Raises InvalidRequest unless it is 1 to 255 visible ASCII characters."""
    key = single(request.headers, IDEMPOTENCY_HEADER)
    if key is not None and not _IDEMPOTENCY_KEY.match(key):
        raise InvalidRequest(
            f"{IDEMPOTENCY_HEADER} must be 1 to 255 visible ASCII characters", field=IDEMPOTENCY_HEADER
        )
    return key


def if_pod(request: web.BaseRequest) -> str | None:
    """The pod that the call is meant for. Raises InvalidRequest."""
    pod = single(request.headers, IF_POD_HEADER)
    if pod is not None and not _IDEMPOTENCY_KEY.match(pod):
        raise InvalidRequest(f"{IF_POD_HEADER} must name a pod", field=IF_POD_HEADER)
    return pod


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def read_json(request: web.BaseRequest, kind: type[T], limit: int, timeout_sec: float) -> T:
    """The body as a `kind`. Raises TooLarge, and InvalidRequest (details: `field`) for anything but exactly that."""
    return decode(await read_body(request, limit, timeout_sec), kind)


async def no_body(request: web.BaseRequest, timeout_sec: float) -> None:
    """Raises InvalidRequest for a field in the body of a call that takes none: it would be passed over in silence."""
    if request.body_exists:
        await read_json(request, NoFields, BODY_BYTES, timeout_sec)


async def read_body(request: web.BaseRequest, limit: int, timeout_sec: float) -> bytes:
    """All of the body. Raises TooLarge, and InvalidRequest for one that is compressed, broken off or late."""
    coding = request.headers.get("Content-Encoding")
    if coding is not None and coding.lower() != "identity":
        raise InvalidRequest("send the body uncompressed", field="Content-Encoding")
    length = request.content_length
    if length is not None and length > limit:
        raise TooLarge(f"the body may have at most {limit} bytes", limit=limit)
    content, kept, size = request.content, [], 0
    try:
        if content.is_eof():  # it came with the headers, as small ones do: no timer needed
            kept.append(content.read_nowait())
            size = len(kept[0])
        else:
            async with asyncio.timeout(timeout_sec):
                while piece := await content.readany():
                    kept.append(piece)
                    if (size := size + len(piece)) > limit:
                        break
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {timeout_sec:.0f} seconds") from None
    except (web.RequestPayloadError, PayloadEncodingError):
        raise InvalidRequest("the body broke off or is badly encoded") from None
    if size > limit:
        raise TooLarge(f"the body may have at most {limit} bytes", limit=limit)
    return kept[0] if len(kept) == 1 else b"".join(kept)


def decode(body: bytes, kind: type[T]) -> T:
    """Raises InvalidRequest, naming the field where one is to blame."""
    decoder: msgspec.json.Decoder[T] | None = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    if not body.strip():
        raise InvalidRequest("the body must be a JSON object, and is empty")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as why:
        raise _invalid(str(why)) from None
    except (msgspec.MsgspecError, ValueError) as why:
        raise InvalidRequest(f"the body is no valid JSON in UTF-8: {why}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _invalid(why: str) -> InvalidRequest:
    place, named = _PLACE.search(why), _NAMED.search(why)
    what = why[: place.start()] if place else why
    field = ".".join(part for part in (place[1] if place else "", named[1] if named else "") if part)
    if not field:
        return InvalidRequest(f"the body does not fit: {what}")
    return InvalidRequest(f"the body does not fit at {field!r}: {what}", field=field)


async def read_command(request: web.BaseRequest, limit: int, timeout_sec: float) -> TaskCommand:
    """An exec body. Raises InvalidRequest, TooLarge. What the executor has to say about it the services check."""
    command = await read_json(request, TaskCommand, limit, timeout_sec)
    check_command(command)
    return command


def check_command(command: TaskCommand) -> None:
    """What only the manager knows of. Raises InvalidRequest naming the bad field."""
    if command.stdin_base64 is not None:
        try:
            base64.b64decode(command.stdin_base64, validate=True)
        except ValueError:  # binascii.Error, and text that is not ASCII
            raise InvalidRequest("stdin_base64 is no base64", field="stdin_base64") from None
    check_scope(command)


def check_scope(asked: TaskCommand | TaskSession | TaskTerminal) -> None:
    """Raises InvalidRequest for what no profile or region can be called."""
    for field in ("profile", "region"):
        value = getattr(asked, field)
        if value is not None and not 1 <= len(value) <= 63:
            raise InvalidRequest(f"{field} must have 1 to 63 characters", field=field)


async def body_stream(request: web.BaseRequest, pause_sec: float) -> AsyncIterator[bytes]:
    """The body piece by piece, in constant memory.

    Raises InvalidRequest where it breaks off or pauses for longer than `pause_sec`."""
    content = request.content
    while True:
        try:
            async with asyncio.timeout(pause_sec):
                piece = await content.readany()
        except TimeoutError:
            raise InvalidRequest(f"the body paused for more than {pause_sec:.0f} seconds") from None
        except (web.RequestPayloadError, PayloadEncodingError):
            raise InvalidRequest("the body broke off or is badly encoded") from None
        if not piece:
            return
        yield piece
