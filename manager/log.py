"""Log lines as JSON objects, one a line: an event's name and its fields, never a sentence built from values.

`log.info("pod_claimed", extra={"pod": name})` becomes {"at": ..., "level": "info", "event": "pod_claimed", "pod": ...}.
Values are untrusted: control and direction characters are escaped and long texts are cut.
"""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec

MAX_TEXT: Final = 4096  # characters of one field; tracebacks get four times that
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# JSON escapes only what is under U+0020. DEL and C1 can steer a terminal, the others reorder or break what is shown.
_STEERING: Final = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": _cut(record.getMessage()),
            "logger": record.name,
        }
        for name, value in record.__dict__.items():
            if name not in _STANDARD:
                line.setdefault(name, _plain(value))
        if record.exc_info:
            line["exception"] = _cut(self.formatException(record.exc_info), 4 * MAX_TEXT, keep_end=True)
        return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", _ENCODER.encode(line).decode())


def _plain(value: object) -> object:
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in list(value)[:100]]
    if isinstance(value, dict):
        return {_cut(str(key)): _plain(item) for key, item in list(value.items())[:100]}
    return _cut(str(value))


def _cut(text: str, most: int = MAX_TEXT, keep_end: bool = False) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be written as UTF-8
    if len(text) <= most:
        return text
    left_out = f"[{len(text) - most} characters left out]"
    return left_out + text[-most:] if keep_end else text[:most] + left_out


def set_up(level: str, stream: TextIO | None = None) -> None:
    """Sends every logger's lines to `stream` (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").disabled = True  # a line a request costs more than the request's own work
