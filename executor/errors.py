"""What the executor can refuse or fail at, as one tree.

    ExecutorError                 500 internal
    ├── InvalidRequest            400 invalid_request       ├── NotFound               404 not_found
    │   ├── InvalidPath           400 invalid_path          ├── FileMissing            404 file_not_found
    │   ├── InvalidCwd            400 invalid_cwd           ├── Conflict               409 conflict
    │   ├── NotUtf8               400 not_utf8              ├── WrongPod               409 wrong_pod
    │   ├── LateRequest           408 invalid_request       │
    │   └── LongHead              431 invalid_request       │
    ├── Unauthenticated           401 unauthenticated       ├── NotAFile               409 not_a_file
    ├── UserNotAllowed            403 user_not_allowed      ├── NotADirectory          409 not_a_directory
    ├── PermissionDenied          403 permission_denied     ├── PreconditionFailed     412 precondition_failed
    ├── TooLarge                  413 too_large             ├── RangeNotSatisfiable    416 range_not_satisfiable
    ├── IdempotencyMismatch       422 idempotency_mismatch  ├── RateLimited            429 rate_limited
    ├── NotSupported              501 not_supported         ├── ShuttingDown           503 shutting_down
    ├── PortUnanswered            504 outcome_unknown       └── NoSpace                507 no_space

A class holds the code, the status and whether the same call can succeed later. Only the middleware in
`executor.app` turns one into HTTP.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ExecutorError(Exception):
    """Something in the executor is broken. What was asked for may or may not have happened."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class InvalidRequest(ExecutorError):
    """The request says nothing that could be done. Nothing was done. details: `field` where one is to blame."""

    code, status = "invalid_request", 400


class InvalidPath(InvalidRequest):
    """The path is no path, or it leads out of the places that files may be in. Nothing was read or written."""

    code = "invalid_path"


class InvalidCwd(InvalidRequest):
    """The working directory cannot be entered. The command did not run."""

    code = "invalid_cwd"


class NotUtf8(InvalidRequest):
    """The content was asked for as text and is not UTF-8; the binary form has it."""

    code = "not_utf8"


class LateRequest(InvalidRequest):
    """The request came too slowly, or stopped before its end. Nothing was done."""

    status = 408


class LongHead(InvalidRequest):
    """The request line or the headers are over a limit. Nothing was done."""

    status = 431


class Unauthenticated(ExecutorError):
    """No pod token, or not this pod's."""

    code, status = "unauthenticated", 401


class UserNotAllowed(ExecutorError):
    """The profile does not let this pod act as that user. Nothing was done."""

    code, status = "user_not_allowed", 403


class PermissionDenied(ExecutorError):
    """The command user may not touch that file."""

    code, status = "permission_denied", 403


class NotFound(ExecutorError):
    """No such process, session or terminal in this pod: never made, deleted, or kept no longer."""

    code, status = "not_found", 404


class FileMissing(ExecutorError):
    """No file or directory is at that path."""

    code, status = "file_not_found", 404


class Conflict(ExecutorError):
    """What is there already does not go together with what was asked for."""

    code, status = "conflict", 409


class WrongPod(ExecutorError):
    """The call was meant for another pod. Nothing was done."""

    code, status = "wrong_pod", 409


class NotAFile(ExecutorError):
    """The path names something without plain content: a directory, FIFO, socket or device."""

    code, status = "not_a_file", 409


class NotADirectory(ExecutorError):
    """The path names something that cannot be listed or entered."""

    code, status = "not_a_directory", 409


class PreconditionFailed(ExecutorError):
    """The file changed since the caller looked. Nothing was written."""

    code, status = "precondition_failed", 412


class TooLarge(ExecutorError):
    """Over a limit. Nothing was kept. details: `limit` (bytes or count)."""

    code, status = "too_large", 413


class RangeNotSatisfiable(ExecutorError):
    """The file has no such bytes."""

    code, status = "range_not_satisfiable", 416


class IdempotencyMismatch(ExecutorError):
    """The id is taken by a command with another body. Nothing was run."""

    code, status = "idempotency_mismatch", 422


class RateLimited(ExecutorError):
    """As many commands run as this pod may run at once. Nothing was run."""

    code, status, retryable = "rate_limited", 429, True


class NotSupported(ExecutorError):
    """This build or machine cannot do that; the message says how to get it."""

    code, status = "not_supported", 501


class ShuttingDown(ExecutorError):
    """The pod is ending. Nothing was started."""

    code, status, retryable = "shutting_down", 503, True


class PortUnanswered(ExecutorError):
    """A server in the pod took the request and gave no answer that can be read. What it did is its own knowledge."""

    code, status = "outcome_unknown", 504


class NoSpace(ExecutorError):
    """The disk or its inodes are full. What was there before is unchanged."""

    code, status = "no_space", 507
