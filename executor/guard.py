"""Who may call, and for which pod: what holds before every call but the open ones, whichever way it came in."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from executor.config import ExecutorConfig
from executor.errors import ExecutorError, Unauthenticated, WrongPod
from executor.lease import Lease
from executor.wire import ErrorBody, ErrorReply

# What can steer the terminal that a message is shown on, or reorder what it shows; it may stand in names that are told.
_STEERING: Final = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})


class Guard:
    def __init__(self, config: ExecutorConfig, lease: Lease) -> None:
        self._token_sha256 = config.token_sha256.encode()
        self._pod_name = config.pod_name
        self._lease = lease

    def admit(self, authorization: str | None, pod: str | None, lease_sec: str | None) -> None:
        """Takes the headers' values; None where a header is missing, or is there more than once. Whoever was admitted
        once with a token and a pod's name always is.

        Raises Unauthenticated, WrongPod, InvalidRequest for a lease that is none."""
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest().encode()
        if not hmac.compare_digest(digest, self._token_sha256) or scheme.lower() != "bearer":
            raise Unauthenticated("this pod's token is needed: Authorization: Bearer <pod token>")
        if pod is not None and pod != self._pod_name:
            raise WrongPod("this is another pod than the one the call is for")
        if lease_sec is not None:
            self.heard_lease(lease_sec)

    def heard_lease(self, lease_sec: str) -> None:
        """For a caller that was admitted before. Raises InvalidRequest."""
        self._lease.heard(lease_sec)


def error_body(error: ExecutorError) -> ErrorBody:
    message = _STEERING.sub(lambda found: f"\\x{ord(found[0]):02x}", error.message)
    return ErrorBody(code=error.code, message=message, retryable=error.retryable, details=error.details)


def error_reply(error: ExecutorError) -> ErrorReply:
    """The one shape of every error."""
    return ErrorReply(error_body(error))
