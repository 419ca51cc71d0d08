"""What a call can raise, as one tree. The API's error codes are classes of the same meaning, one each.

    SojournError
    ├── ConfigurationError      no address or key could be found
    ├── ConnectionFailed        the server was not reached, or hung up; nothing is known of the call but what it says
    ├── DeadlineExceeded        no answer within the call's deadline
    ├── UnexpectedAnswer        an answer that is not Sojourn's (a proxy's page, a redirect, broken JSON)
    ├── TakenOver               another connection controls the terminal now
    ├── CommandFailed           `check=True` and the command did not exit with 0; `result` has everything
    └── APIError                the server's own word: `code`, `message`, `retryable`, `details`, `status`
        ├── InvalidRequest ...  one class per code, see `CODES`

A code that this version does not know is raised as plain `APIError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from sojourn.types import ExecResult


class SojournError(Exception):
    """Base of everything that this package raises by itself."""

    code: ClassVar[str] = "client_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigurationError(SojournError):
    """No address or key: neither given, nor in the environment, nor in a local stack's data directory."""

    code = "not_configured"


class ConnectionFailed(SojournError):
    """The server could not be reached, or the connection broke before its answer was complete.

    `sent`: False where the request certainly never left."""

    code = "connection_failed"

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class DeadlineExceeded(SojournError):
    """No answer in time. The server may have done what was asked. For a command, its id can be asked again."""

    code = "deadline_exceeded"


class UnexpectedAnswer(SojournError):
    """Something answered that does not speak this protocol."""

    code = "unexpected_answer"

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = status in (429, 502, 503, 504)


class TakenOver(SojournError):
    """Another connection controls the terminal now. Its process runs on."""

    code = "taken_over"


class CommandFailed(SojournError):
    """The command ended, but not with exit code 0. `result` holds its outcome and output."""

    code = "command_failed"

    def __init__(self, result: ExecResult) -> None:
        ending = result.message or f"{result.reason} with exit code {result.exit_code}"
        last = result.stderr.strip()[-2000:]
        super().__init__(f"command {ending}" + (f"\n{last}" if last else ""))
        self.result = result


class APIError(SojournError):
    """The server refused or failed. `message` says what to do next."""

    code: ClassVar[str] = "unknown"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int = 0,
        retryable: bool = False,
        details: Mapping[str, Any] | None = None,
        retry_after_sec: float | None = None,
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code  # type: ignore[misc]  # a code without a class of its own
        self.status = status
        self.retryable = retryable
        self.details: dict[str, Any] = dict(details or {})
        self.retry_after_sec = retry_after_sec


class InvalidRequest(APIError):
    """The request says nothing that could be done; `details["field"]` where one is to blame. Nothing was done."""

    code = "invalid_request"


class InvalidTaskId(InvalidRequest):
    """A task id has 1 to 512 bytes of UTF-8."""

    code = "invalid_task_id"


class InvalidPath(InvalidRequest):
    """The path is malformed or leads out of the workspace."""

    code = "invalid_path"


class InvalidCwd(InvalidRequest):
    """`cwd` is no directory in the sandbox. Nothing ran."""

    code = "invalid_cwd"


class NotUtf8(InvalidRequest):
    """Text was asked for where the bytes are none."""

    code = "not_utf8"


class UnknownProfile(InvalidRequest):
    """The operator allows the project no such profile; `details["allowed"]` are those it has."""

    code = "unknown_profile"


class ScopeRequired(InvalidRequest):
    """A platform key has to say for which tenant and project it acts: `Client(tenant=..., project=...)`."""

    code = "scope_required"


class InlinePayload(InvalidRequest):
    """Payloads of durable executions are stored as objects and named by reference."""

    code = "inline_payload"


class Unauthenticated(APIError):
    """No API key, or none that is valid now."""

    code = "unauthenticated"


class Forbidden(APIError):
    """The key's role does not cover this call."""

    code = "forbidden"


class ScopeRefused(Forbidden):
    """Only a platform key may name a tenant and project."""

    code = "scope_refused"


class UserNotAllowed(Forbidden):
    """The profile does not let commands run as that user."""

    code = "user_not_allowed"


class PermissionDenied(Forbidden):
    """The sandbox's user may not touch that file."""

    code = "permission_denied"


class NotFound(APIError):
    """Does not exist, or is not yours: the answer is the same."""

    code = "not_found"


class FileMissing(NotFound):
    """No such file or directory."""

    code = "file_not_found"


class Conflict(APIError):
    """The state of things does not allow it now."""

    code = "conflict"


class WrongPod(Conflict):
    """The request reached a pod that it was not meant for."""

    code = "wrong_pod"


class SandboxReplaced(Conflict):
    """The task's pod is another one than the caller last saw. Nothing was run."""

    code = "sandbox_replaced"


class ProfileMismatch(Conflict):
    """The task's sandbox runs another profile. Nothing was run."""

    code = "profile_mismatch"


class SandboxStopped(Conflict):
    """The sandbox is stopped; start it first."""

    code = "sandbox_stopped"


class SandboxStarting(Conflict):
    """The sandbox is not running yet."""

    code = "sandbox_starting"


class WorkspaceBusy(Conflict):
    """Another run holds the workspace."""

    code = "workspace_busy"


class NoTargetInRegion(Conflict):
    """Nothing serves that region, and nothing runs anywhere else."""

    code = "no_target_in_region"


class TaskBoundElsewhere(Conflict):
    """The task's sandbox is in another region than the one asked for."""

    code = "task_bound_elsewhere"


class NotAFile(Conflict):
    """A directory or special file where a regular file is needed."""

    code = "not_a_file"


class NotADirectory(Conflict):
    """Something else where a directory is needed."""

    code = "not_a_directory"


class AgentCliMissing(Conflict):
    """The image does not hold the agent's command."""

    code = "agent_cli_missing"


class SandboxGone(APIError):
    """The pod has ended; `details` has `reason` and `at`. The task's next command gets a fresh one."""

    code = "sandbox_gone"


class PreconditionFailed(APIError):
    """The file is no longer the version that the caller named."""

    code = "precondition_failed"


class TooLarge(APIError):
    """Over a limit, which is `details["limit"]`. Nothing was kept."""

    code = "too_large"


class RangeNotSatisfiable(APIError):
    """The file has no such bytes."""

    code = "range_not_satisfiable"


class IdempotencyMismatch(APIError):
    """The id was used before with another body. Nothing was run this time."""

    code = "idempotency_mismatch"


class QuotaExceeded(APIError):
    """The project holds all the sandboxes it may. Nothing was started."""

    code = "quota_exceeded"


class RateLimited(APIError):
    """Too many requests at once. Nothing was started."""

    code = "rate_limited"


class InternalError(APIError):
    """A defect of the server. What was asked for may or may not have happened."""

    code = "internal"


class NotSupported(APIError):
    """This server or target cannot do that; the message says how to get it."""

    code = "not_supported"


class ExecutorUnreachable(APIError):
    """The sandbox did not answer the manager."""

    code = "executor_unreachable"


class OutcomeUnknown(APIError):
    """The command was sent and its end was never seen. It is not run again by itself; `details["id"]` is its id."""

    code = "outcome_unknown"


class CapacityExhausted(APIError):
    """No room for another sandbox. Nothing was started."""

    code = "capacity_exhausted"


class Provisioning(APIError):
    """The sandbox is still being made; a little later it is there."""

    code = "provisioning"


class WorkspaceAttaching(Provisioning):
    """The sandbox waits for the volume of its workspace; a little later it is there."""

    code = "workspace_attaching"


class ImagePullFailed(APIError):
    """The profile's image cannot be had."""

    code = "image_pull_failed"


class IsolationUnavailable(APIError):
    """The target cannot give the isolation that the profile promises, and nothing runs weaker."""

    code = "isolation_unavailable"


class StoreUnavailable(APIError):
    """The manager's store does not answer. Running commands go on."""

    code = "store_unavailable"


class TargetUnavailable(APIError):
    """The data plane's own interface does not answer. Sandboxes that have their pod go on."""

    code = "target_unavailable"


class ShuttingDown(APIError):
    """This server is ending; another one, or the same one in a moment, takes the call."""

    code = "shutting_down"


class NoSpace(APIError):
    """The sandbox's disk is full."""

    code = "no_space"


def _all_classes(base: type[APIError]) -> list[type[APIError]]:
    return [kind for child in base.__subclasses__() for kind in (child, *_all_classes(child))]


# Every code of the API with its class.
CODES: Final[Mapping[str, type[APIError]]] = {kind.code: kind for kind in _all_classes(APIError)}


def api_error(
    code: str,
    message: str,
    *,
    status: int = 0,
    retryable: bool = False,
    details: Mapping[str, Any] | None = None,
    retry_after_sec: float | None = None,
) -> APIError:
    """The error of that code's class; plain APIError with the code where there is no such class."""
    kind = CODES.get(code, APIError)
    return kind(
        message,
        code=None if kind is not APIError else code,
        status=status,
        retryable=retryable,
        details=details,
        retry_after_sec=retry_after_sec,
    )
