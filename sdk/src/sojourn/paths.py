"""Paths of the HTTP interface, each piece encoded so that no proxy can read it as something else."""

from __future__ import annotations

import base64
import re
from typing import Final
from urllib.parse import quote

from sojourn.errors import InvalidTaskId

_PLAIN: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\Z")
MAX_TASK_BYTES: Final = 512


def task_path(task_id: str) -> str:
    """The path of a task. Ids that proxies mangle (slashes, dots alone, spaces ...) go as `~<base64url>`.

    Raises InvalidTaskId."""
    try:
        raw = task_id.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidTaskId("a task id must be valid UTF-8", status=400) from None
    if not 1 <= len(raw) <= MAX_TASK_BYTES:
        message = f"a task id has 1 to {MAX_TASK_BYTES} bytes of UTF-8, this one has {len(raw)}"
        raise InvalidTaskId(message, status=400)
    piece = task_id if _PLAIN.match(task_id) else "~" + base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return f"/sandbox/task/{piece}"


def sandbox_path(sandbox_id: str) -> str:
    """The path of a long-lived sandbox."""
    return f"/sandbox/sandboxes/v1/{piece(sandbox_id)}"


def piece(text: str) -> str:
    """`text` as one piece of a path."""
    return quote(text, safe="")
