"""What a pod may say to its manager, and what becomes of everything else.

A pod is a hostile server: its tenant may have replaced the executor. So each answer is decoded strictly, every number
and text has a bound, and an error passes on only with a code that an executor has, under the status of that code.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from executor.wire import (
    ErrorBody,
    ErrorReply,
    ExecRequest,
    ExecResult,
    Exit,
    FrameEvent,
    Gap,
    Heartbeat,
    LeaseInfo,
    OutputFrame,
    ResourceUse,
    Started,
    StreamError,
)
from manager.errors import ExecutorRefused, ExecutorUnreachable

T = TypeVar("T")

ERROR_BYTES: Final = 64 << 10  # an error body; a longer one is cut off and then is no JSON
JSON_BYTES: Final = 16 << 20  # any other JSON answer
MAX_TEXT: Final = 1024  # characters of an error's text or of one detail
_MAX_COUNT: Final = (1 << 62) - 1  # bytes and offsets, so that a sum of two still fits 64 bits
_MAX_PID: Final = 1 << 31
_MAX_FIGURE: Final = 1e15  # milliseconds: some 30,000 years

# (status, whether the same call can succeed later) of the codes that an executor answers with. Its `unauthenticated`
# and `wrong_pod` are between it and us, and its `internal` is not a defect of ours: they are not passed on.
EXECUTOR_CODES: Final[dict[str, tuple[int, bool]]] = {
    "invalid_request": (400, False),
    "invalid_path": (400, False),
    "invalid_cwd": (400, False),
    "not_utf8": (400, False),
    "user_not_allowed": (403, False),
    "permission_denied": (403, False),
    "not_found": (404, False),
    "file_not_found": (404, False),
    "conflict": (409, False),
    "not_a_file": (409, False),
    "not_a_directory": (409, False),
    "precondition_failed": (412, False),
    "too_large": (413, False),
    "range_not_satisfiable": (416, False),
    "idempotency_mismatch": (422, False),
    "rate_limited": (429, True),
    "not_supported": (501, False),
    "shutting_down": (503, True),
    "outcome_unknown": (504, False),
    "no_space": (507, False),
}


class BadAnswer(ValueError):
    """The pod's answer is none that an executor gives."""


class ExecutorNotReached(ExecutorUnreachable):
    """The pod did not take the request: nothing was done. Safe to send again, also to another pod."""


class WrongPodAnswer(ExecutorNotReached):
    """At that address another pod answers, or the pod has another identity. Nothing was done."""


_ERROR = msgspec.json.Decoder(ErrorReply)


def decoded(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Raises BadAnswer, whatever the bytes are."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        raise BadAnswer(clean(str(why))) from None


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """A pod's text for a message: at most `limit` characters, none of them a control character."""
    cut = text[:limit]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else " " for c in cut)


def refusal(status: int, data: bytes) -> ExecutorUnreachable | ExecutorRefused:
    """The error to raise for an answer with an error status."""
    try:
        error = decoded(_ERROR, data[: ERROR_BYTES + 1]).error
    except BadAnswer:
        return ExecutorUnreachable(f"the pod answered {status} without an error that can be read")
    if error.code == "wrong_pod" and status == 409:
        return WrongPodAnswer("another pod answered at this pod's address")
    if error.code == "unauthenticated" and status == 401:
        return ExecutorNotReached("the pod refuses this manager's token: was the manager's secret changed?")
    if EXECUTOR_CODES.get(error.code, (0, False))[0] != status:
        return ExecutorUnreachable(f"the pod failed with status {status}: {clean(error.message, 200)}")
    return refused(error)


def refused(error: ErrorBody) -> ExecutorRefused:
    """`error`, whose code is one of EXECUTOR_CODES, with bounded texts and scalar details only."""
    status, retryable = EXECUTOR_CODES[error.code]
    details = {clean(key, 64): value for key, value in list(error.details.items())[:16] if _scalar(value)}
    short = {key: clean(value) if isinstance(value, str) else value for key, value in details.items()}
    for taken in ("message", "code", "status", "retryable", "details", "self", "retry_after_sec"):
        short.pop(taken, None)  # names of the exception's own arguments
    return ExecutorRefused(error.code, status, clean(error.message), retryable, short)


def _scalar(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= _MAX_COUNT
    return value is None or isinstance(value, str | float)


def answer_limit(request: ExecRequest) -> int:
    """Bytes that an honest plain answer to `request` can have: JSON writes a byte of output as six at most."""
    return 12 * (request.max_output_bytes + 4096) + (64 << 10)


def check_result(result: ExecResult | Exit, asked_id: str | None) -> None:
    """Raises BadAnswer where the outcome is of another command, or a figure cannot be."""
    if asked_id is not None and result.id != asked_id:
        raise BadAnswer("the outcome of another command")
    if len(result.id) > 128 or len(result.started_at) > 64 or len(result.signal or "") > 32:
        raise BadAnswer("a text over its bound")
    if result.message is not None and len(result.message) > 4 * MAX_TEXT:
        raise BadAnswer("a message over its bound")
    _check_pid(result.pid)
    if not 0 <= result.exit_code <= 255:
        raise BadAnswer("an exit code out of range")
    _check_counts(result.stdout_bytes, result.stderr_bytes)
    _check_figures(result.duration_ms, result.usage.user_ms, result.usage.system_ms)
    _check_use(result.usage)


def check_event(event: FrameEvent, asked_id: str | None) -> None:
    """Raises BadAnswer."""
    if isinstance(event, OutputFrame):
        _check_counts(event.offset)
    elif isinstance(event, Exit):
        check_result(event, asked_id)
    elif isinstance(event, Started):
        if len(event.id) > 128 or (asked_id is not None and event.id != asked_id):
            raise BadAnswer("the start of another command")
        _check_pid(event.pid)
    elif isinstance(event, Gap):
        _check_counts(event.offset, event.bytes)
    elif isinstance(event, Heartbeat):
        if len(event.at) > 64:
            raise BadAnswer("a text over its bound")
    else:
        assert isinstance(event, StreamError)


def check_lease(info: LeaseInfo) -> None:
    """Raises BadAnswer."""
    if len(info.boot_id) > 128 or len(info.sandbox_id or "") > 128:
        raise BadAnswer("a text over its bound")
    _check_counts(info.operations, info.running, info.terminals)
    _check_figures(info.quiet_for_sec)


def _check_pid(pid: int | None) -> None:
    if pid is not None and not 0 <= pid <= _MAX_PID:
        raise BadAnswer("a pid out of range")


def _check_counts(*counts: int) -> None:
    for count in counts:
        if not 0 <= count <= _MAX_COUNT:
            raise BadAnswer("a count out of range")


def _check_figures(*figures: float) -> None:
    for figure in figures:
        if not 0 <= figure <= _MAX_FIGURE:
            raise BadAnswer("a figure out of range")


def _check_use(use: ResourceUse) -> None:
    _check_counts(use.max_rss_bytes)
