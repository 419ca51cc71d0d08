"""What the manager can refuse or fail at, as one tree; codes and statuses are those of the HTTP interface.

    ManagerError                       500 internal
    ├── InvalidRequest                 400 invalid_request
    │   ├── InvalidTaskId              400 invalid_task_id
    │   ├── UnknownProfile             400 unknown_profile      (details: allowed)
    │   └── ScopeRequired              400 scope_required
    ├── Unauthenticated                401 unauthenticated
    ├── Forbidden                      403 forbidden
    │   └── ScopeRefused               403 scope_refused
    ├── NotFound                       404 not_found            (the same for what is not yours)
    ├── ProfileMismatch                409 profile_mismatch
    ├── SandboxReplaced                409 sandbox_replaced
    ├── Conflict                       409 conflict
    │   └── IllegalMove                409 conflict
    ├── SandboxStopped                 409 sandbox_stopped
    ├── SandboxStarting                409 sandbox_starting
    ├── NoTargetInRegion               409 no_target_in_region
    ├── TaskBoundElsewhere             409 task_bound_elsewhere
    ├── SandboxGone                    410 sandbox_gone         (details: reason, at)
    ├── TooLarge                       413 too_large            (details: limit)
    ├── IdempotencyMismatch            422 idempotency_mismatch
    ├── QuotaExceeded                  429 quota_exceeded
    ├── RateLimited                    429 rate_limited
    ├── NotSupported                   501 not_supported
    ├── ExecutorUnreachable            502 executor_unreachable
    ├── OutcomeUnknown                 504 outcome_unknown      (details: id)
    ├── CapacityExhausted              503 capacity_exhausted   (details: what the data plane said)
    ├── Provisioning                   503 provisioning
    │   └── WorkspaceAttaching         503 workspace_attaching
    ├── ImagePullFailed                503 image_pull_failed
    ├── IsolationUnavailable           503 isolation_unavailable
    ├── StoreUnavailable               503 store_unavailable
    │   └── StoreUnsettled             503 store_unavailable
    ├── TargetUnavailable              503 target_unavailable
    ├── ShuttingDown                   503 shutting_down
    └── ExecutorRefused                what the executor said, passed on with its own code and status

Only the middleware in `manager.api.server` turns one into HTTP.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ManagerError(Exception):
    """A defect of ours. What was asked for may or may not have happened."""

    code: str = "internal"
    status: int = 500
    retryable: bool = False
    default_retry_after_sec: ClassVar[float | None] = None

    def __init__(self, message: str, *, retry_after_sec: float | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        self.retry_after_sec = self.default_retry_after_sec if retry_after_sec is None else retry_after_sec


class InvalidRequest(ManagerError):
    """The request says nothing that could be done. Nothing was done. details: `field` where one is to blame."""

    code, status = "invalid_request", 400


class InvalidTaskId(InvalidRequest):
    """A task id is UTF-8 of 1 to 512 bytes, percent-encoded or as `~<base64url>`."""

    code = "invalid_task_id"


class UnknownProfile(InvalidRequest):
    """The operator allows the project no such profile. details: `allowed`."""

    code = "unknown_profile"

    def __init__(self, name: str, allowed: list[str]) -> None:
        listed = ", ".join(allowed) or "none"
        super().__init__(f"profile {name!r} is not one that this project may use: {listed}", allowed=allowed)


class ScopeRequired(InvalidRequest):
    """A platform key acts for a project and has to say for which, on every request."""

    code = "scope_required"


class Unauthenticated(ManagerError):
    """No key, or none that is valid now."""

    code, status = "unauthenticated", 401


class Forbidden(ManagerError):
    """The key's role does not cover this call."""

    code, status = "forbidden", 403


class ScopeRefused(Forbidden):
    """Only a platform key may name a tenant and project; the key of a project has its own."""

    code = "scope_refused"


class NotFound(ManagerError):
    """Does not exist, or is not yours: the answer is the same."""

    code, status = "not_found", 404


class ProfileMismatch(ManagerError):
    """The task's sandbox runs another profile than the one asked for. Nothing was run."""

    code, status = "profile_mismatch", 409


class SandboxReplaced(ManagerError):
    """`If-Sandbox-Pod` names a pod that is no longer the task's. Nothing was run."""

    code, status = "sandbox_replaced", 409


class Conflict(ManagerError):
    """What is there does not go together with what was asked for. Nothing was changed."""

    code, status = "conflict", 409


class IllegalMove(Conflict):
    """The sandbox's state does not allow that step. Nothing was changed. details: `state`."""

    def __init__(self, sandbox_id: str, state: str, to: str) -> None:
        super().__init__(f"a sandbox that is {state} cannot become {to}", sandbox_id=sandbox_id, state=str(state))


class SandboxStopped(ManagerError):
    """The sandbox is stopped, or about to be; nothing was run. Start it, or give it `autostart`. details: `state`."""

    code, status = "sandbox_stopped", 409


class SandboxStarting(ManagerError):
    """The sandbox is being made or started; the same call a little later finds it. details: `state`."""

    code, status, retryable = "sandbox_starting", 409, True
    default_retry_after_sec = 2.0


class NoTargetInRegion(ManagerError):
    """No target serves that region, and nothing runs anywhere else."""

    code, status = "no_target_in_region", 409


class TaskBoundElsewhere(ManagerError):
    """The task's sandbox is in another region than the one asked for."""

    code, status = "task_bound_elsewhere", 409


class SandboxGone(ManagerError):
    """The pod has ended, and what was in it alone with it. details: `reason`, `at`."""

    code, status = "sandbox_gone", 410


class TooLarge(ManagerError):
    """Over a limit; nothing was kept. details: `limit`."""

    code, status = "too_large", 413


class IdempotencyMismatch(ManagerError):
    """The idempotency key was used with another body. Nothing was run this time."""

    code, status = "idempotency_mismatch", 422


class QuotaExceeded(ManagerError):
    """The project holds all the sandboxes, or all the cpu or memory, that it may. Nothing was started.

    details: `what` (slots, cpu or memory), `held`, `limit`, `free_in_sec` (None: nothing ends by itself)."""

    code, status, retryable = "quota_exceeded", 429, True
    default_retry_after_sec = 5.0


class RateLimited(ManagerError):
    """Too many requests at once. Nothing was started."""

    code, status, retryable = "rate_limited", 429, True
    default_retry_after_sec = 1.0


class NotSupported(ManagerError):
    """This build or target cannot do that; the message says how to get it."""

    code, status = "not_supported", 501


class ExecutorUnreachable(ManagerError):
    """The pod's executor did not answer. The command was not sent, or its outcome waits under its id."""

    code, status, retryable = "executor_unreachable", 502, True
    default_retry_after_sec = 1.0


class OutcomeUnknown(ManagerError):
    """The command was sent and its end was never seen. It is not run again by itself. details: `id`."""

    code, status = "outcome_unknown", 504


class CapacityExhausted(ManagerError):
    """The data plane has no room for another pod. Nothing was started."""

    code, status, retryable = "capacity_exhausted", 503, True
    default_retry_after_sec = 10.0


class Provisioning(ManagerError):
    """The sandbox is still being made; the same call a little later finds it."""

    code, status, retryable = "provisioning", 503, True
    default_retry_after_sec = 2.0


class WorkspaceAttaching(Provisioning):
    """The sandbox waits for the volume of its workspace; the same call a little later finds it."""

    code = "workspace_attaching"


class ImagePullFailed(ManagerError):
    """The profile's image cannot be had."""

    code, status = "image_pull_failed", 503


class IsolationUnavailable(ManagerError):
    """The target cannot give the isolation or limits that the profile promises, and nothing runs weaker."""

    code, status = "isolation_unavailable", 503


class StoreUnavailable(ManagerError):
    """Redis does not answer or refuses writes. Running commands go on."""

    code, status, retryable = "store_unavailable", 503, True
    default_retry_after_sec = 2.0


class StoreUnsettled(StoreUnavailable):
    """Redis is empty: what runs has to be found again before anything is started. Nothing was done."""


class TargetUnavailable(ManagerError):
    """The data plane's own interface does not answer or refuses. Sandboxes that have their pod go on."""

    code, status, retryable = "target_unavailable", 503, True
    default_retry_after_sec = 2.0


class ShuttingDown(ManagerError):
    """This manager is ending; another one, or the same one in a moment, takes the call."""

    code, status, retryable = "shutting_down", 503, True
    default_retry_after_sec = 1.0


class ExecutorRefused(ManagerError):
    """The pod's executor refused with an error of its own; code, status and details are the executor's."""

    def __init__(self, code: str, status: int, message: str, retryable: bool, details: dict[str, Any]) -> None:
        super().__init__(message, **details)
        self.code, self.status, self.retryable = code, status, retryable
