"""The executor's settings: read once from the environment, in `start.py`, and handed down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_SHA256_HEX = re.compile(r"[0-9a-f]{64}\Z")


class BadConfig(Exception):
    """A setting is missing or makes no sense; the message names it and says what it should be."""


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    token_sha256: str  # hex; the token itself is never in the pod
    pod_name: str = ""  # empty: any `Sandbox-Pod` header is refused as wrong
    host: str = "0.0.0.0"
    port: int = 8080
    socket: str | None = None  # a Unix socket instead of host and port
    workspace: str = "/workspace"
    command_user: str | None = None  # None: `sandbox` where it exists, else the executor's own user
    users: tuple[str, ...] = ()  # whom `user` may name besides the command user
    state_dir: str | None = (
        None  # for output on disk; only the executor's user may enter. None: a private temporary one
    )
    helpers: int = 3  # spawn helpers at most; most pods need one, and a crowd of commands at once all of them
    unclaimed_sec: float | None = None  # an unclaimed pool pod ends itself after this; None: never
    quiet_grace_sec: float = 30.0  # beyond Sandbox-Lease-Sec, so that a late renewal still finds the pod
    heartbeat_sec: float = 15.0  # between two heartbeats on a WebSocket; a client silent for three of them is dropped
    drain_sec: float = 3.0  # from SIGTERM to the exit, within a pod's grace period
    max_running: int = 4096  # commands at once; more are refused with 429
    max_sessions: int = 1024  # shells cost memory until they are deleted; more are refused with 429
    max_connections: int = 16_384  # in all; more are refused with 429
    max_connections_of_one: int = 4096  # from one address, so that one caller leaves room for the others
    reader_sec: float = 300.0  # a caller that takes nothing of its answer for so long is cut off
    pass_env: tuple[str, ...] = ()  # variables of the image that commands get too, beyond PATH, LANG, LC_*, TZ
    umask: int = 0o022  # of commands and written files, whatever the executor was started under

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Raises BadConfig."""
        token = env.get("SOJOURN_POD_TOKEN_SHA256", "").strip().lower()
        if not _SHA256_HEX.match(token):
            raise BadConfig(
                "SOJOURN_POD_TOKEN_SHA256 must be the pod token's SHA-256 as 64 hex digits: without it anyone could "
                "run commands here. To try the executor by hand: "
                "SOJOURN_POD_TOKEN_SHA256=$(printf %s my-token | sha256sum | cut -d' ' -f1)"
            )
        workspace = env.get("SOJOURN_WORKSPACE", cls.workspace)
        if not workspace.startswith("/"):
            raise BadConfig(f"SOJOURN_WORKSPACE must be an absolute path, not {workspace!r}")
        return cls(
            token_sha256=token,
            pod_name=env.get("SOJOURN_POD_NAME", ""),
            host=env.get("SOJOURN_EXECUTOR_HOST", cls.host),
            port=_whole(env, "SOJOURN_EXECUTOR_PORT", cls.port, 0, 65_535),
            socket=env.get("SOJOURN_EXECUTOR_SOCKET") or None,
            workspace=workspace,
            command_user=env.get("SOJOURN_COMMAND_USER") or None,
            users=tuple(name for name in env.get("SOJOURN_USERS", "").split(",") if name),
            pass_env=tuple(name for name in env.get("SOJOURN_PASS_ENV", "").split(",") if name),
            state_dir=env.get("SOJOURN_EXECUTOR_STATE_DIR") or None,
            helpers=_whole(env, "SOJOURN_SPAWN_HELPERS", cls.helpers, 1, 16),
            unclaimed_sec=_seconds(env, "SOJOURN_UNCLAIMED_SEC"),
            quiet_grace_sec=_seconds(env, "SOJOURN_QUIET_GRACE_SEC") or cls.quiet_grace_sec,
            heartbeat_sec=min(_seconds(env, "SOJOURN_HEARTBEAT_SEC") or cls.heartbeat_sec, cls.heartbeat_sec),
            drain_sec=_seconds(env, "SOJOURN_DRAIN_SEC") or cls.drain_sec,
            max_running=_whole(env, "SOJOURN_MAX_RUNNING", cls.max_running, 1, 100_000),
            max_sessions=_whole(env, "SOJOURN_MAX_SESSIONS", cls.max_sessions, 1, 100_000),
            reader_sec=_seconds(env, "SOJOURN_READER_SEC") or cls.reader_sec,
            max_connections=_whole(env, "SOJOURN_MAX_CONNECTIONS", cls.max_connections, 1, 1_000_000),
            max_connections_of_one=_whole(
                env, "SOJOURN_MAX_CONNECTIONS_OF_ONE", cls.max_connections_of_one, 1, 1_000_000
            ),
        )


def _whole(env: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = env.get(name)
    if text is None or text == "":
        return default
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise BadConfig(f"{name} must be a whole number from {low} to {high}, not {text!r}")
    return int(text)


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name)
    if text is None or text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise BadConfig(f"{name} must be a number of seconds over 0, not {text!r}")
    return value
