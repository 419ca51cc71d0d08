"""The route table: from it aiohttp's routes, the OpenAPI document, /docs and the security tests are made."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from executor import wire
from manager import __version__
from manager.api import operators, ports, sockets, tasks
from manager.api.docs_page import page
from manager.api.openapi import document
from manager.api.server import DOCUMENTS, SERVICES, Documents, Route, expectation, guard
from manager.api.services import Services
from manager.api.wire import (
    EXEC_BODY_BYTES,
    CommandResult,
    CreateKey,
    HealthState,
    KeyCreated,
    KeyList,
    PoolList,
    SandboxList,
    SandboxState,
    StreamEvent,
    TargetList,
    TaskCommand,
    TaskSession,
    TaskTerminal,
)
from manager.model import Role

# Ids are matched as whole path segments: aiohttp's own `{id}` takes no braces, and an empty id has its own refusal.
_TASK: Final = "/sandbox/task/{task_id:[^/]*}"
_PROCESS: Final = _TASK + "/processes/{process_id:[^/]+}"
_SESSION: Final = _TASK + "/sessions/{session_id:[^/]+}"
_TERMINAL: Final = _TASK + "/terminals/{terminal_id:[^/]+}"

_PROVISIONING: Final = (
    "invalid_task_id", "unknown_profile", "profile_mismatch", "sandbox_replaced", "no_target_in_region",
    "task_bound_elsewhere", "quota_exceeded", "rate_limited", "capacity_exhausted", "provisioning",
    "image_pull_failed", "isolation_unavailable", "executor_unreachable", "sandbox_gone", "wrong_pod", "too_large",
)  # fmt: skip
_FINDING: Final = (
    "invalid_task_id", "not_found", "sandbox_gone", "sandbox_replaced", "executor_unreachable", "wrong_pod",
    "rate_limited",
)  # fmt: skip
_RUNNING: Final = (
    *_PROVISIONING, "invalid_cwd", "user_not_allowed", "idempotency_mismatch", "outcome_unknown", "not_supported",
)  # fmt: skip
_FILES: Final = ("invalid_path", "permission_denied", "file_not_found", "not_a_file", "not_a_directory")
_PATH: Final = {"path": "absolute, or relative to the workspace"}
_AS_USER: Final = {"user": "whom to act as; only users that the profile allows"}
_BINARY: Final = ("application/octet-stream",)

_PORTS: Final = tuple(
    Route(
        method=method, path=_TASK + "/ports/{port:[^/]*}" + rest, handler=ports.port_call,
        summary="A server in the sandbox, over HTTP" + (" or upgraded to a WebSocket." if method == "GET" else "."),
        request=bytes if method in ("POST", "PUT", "PATCH") else None,
        replies={200: bytes} | ({101: None} if method == "GET" else {}), content_types=("*/*",),
        errors=(*_FINDING, "outcome_unknown", "shutting_down"),
    )
    for method in ports.METHODS
    for rest in ("", "/{path:.*}")
)  # fmt: skip

ROUTES: Final[tuple[Route, ...]] = (
    # ── task sessions ───────────────────────────────────────────────────────────────────────────────────────────
    Route(
        method="POST", path=_TASK + "/exec", handler=tasks.run_command,
        summary="Run a command in the task's sandbox, provisioned now if need be. Accept: application/x-ndjson, "
        "text/event-stream or application/vnd.sojourn.frames streams its events.",
        request=TaskCommand, replies={200: CommandResult}, stream=StreamEvent, errors=_RUNNING,
    ),
    Route(
        method="GET", path=_TASK + "/exec", handler=sockets.run_socket,
        summary="Run a command over a WebSocket: the exec body is the first frame, input, signals and output share it.",
        query={"stdout_offset": "where a joined command's output is to begin", "stderr_offset": "likewise"},
        replies={101: None}, errors=_RUNNING,
    ),
    Route(
        method="POST", path=_TASK + "/sessions", handler=tasks.make_session,
        summary="Make a session: a stateful shell whose directory, variables, functions and options persist.",
        request=TaskSession, replies={201: wire.SessionInfo, 200: wire.SessionInfo},
        errors=(*_RUNNING, "no_space"),
    ),
    Route(
        method="GET", path=_TASK + "/sessions", handler=tasks.forward, summary="The sandbox's sessions.",
        replies={200: wire.SessionList}, errors=_FINDING,
    ),
    Route(
        method="GET", path=_SESSION, handler=tasks.forward, summary="A session's state.",
        replies={200: wire.SessionInfo}, errors=_FINDING,
    ),
    Route(
        method="POST", path=_SESSION + "/exec", handler=tasks.run_in_session,
        summary="Run a text in the session's shell, after those that were given before. `Accept` as for exec.",
        request=wire.SessionExecRequest, replies={200: wire.ExecResult}, stream=wire.CommandEvent,
        errors=(*_FINDING, "conflict", "idempotency_mismatch", "outcome_unknown", "no_space", "too_large"),
    ),
    Route(
        method="POST", path=_SESSION + "/interrupt", handler=tasks.forward,
        summary="Interrupt what the session's shell runs, as Ctrl-C does; what does not give way is ended.",
        request=wire.InterruptRequest, replies={200: wire.InterruptResult}, errors=_FINDING,
    ),
    Route(
        method="DELETE", path=_SESSION, handler=tasks.forward,
        summary="End the session's shell and the command that it runs. What earlier ones left goes on.",
        query={"kill_descendants": "true: end that too"}, replies={204: None}, errors=_FINDING,
    ),
    Route(
        method="POST", path=_TASK + "/terminals", handler=tasks.open_terminal,
        summary="Open a terminal: a process on a pseudo-terminal that outlives the connections to it.",
        request=TaskTerminal, replies={201: wire.TerminalInfo, 200: wire.TerminalInfo}, errors=_RUNNING,
    ),
    Route(
        method="GET", path=_TASK + "/terminals", handler=tasks.forward, summary="The sandbox's terminals.",
        replies={200: wire.TerminalList}, errors=_FINDING,
    ),
    Route(
        method="GET", path=_TERMINAL, handler=sockets.terminal_call,
        summary="A terminal's state; upgraded to a WebSocket, a connection to it.",
        query={"offset": "the first byte to replay; default: that of the last screens",
               "mode": "control (the default; takes over) or view"},
        replies={101: None, 200: wire.TerminalInfo}, errors=(*_FINDING, "shutting_down"),
    ),
    Route(
        method="DELETE", path=_TERMINAL, handler=tasks.forward,
        summary="Hang up, end the terminal's whole tree and forget it.", replies={204: None}, errors=_FINDING,
    ),
    Route(
        method="POST", path=_TASK + "/processes", handler=tasks.start_process, summary="Start a background process.",
        request=TaskCommand, replies={201: wire.ProcessInfo, 200: wire.ProcessInfo}, errors=_RUNNING,
    ),
    Route(
        method="GET", path=_TASK + "/processes", handler=tasks.forward, summary="The sandbox's processes.",
        replies={200: wire.ProcessList}, errors=_FINDING,
    ),
    Route(
        method="GET", path=_PROCESS, handler=tasks.forward, summary="A process's state and outcome.",
        query={"wait_sec": "wait so long for its end"}, replies={200: wire.ProcessInfo}, errors=_FINDING,
    ),
    Route(
        method="DELETE", path=_PROCESS, handler=tasks.forward, summary="Kill the process with its tree and forget it.",
        replies={204: None}, errors=_FINDING,
    ),
    Route(
        method="GET", path=_PROCESS + "/output", handler=tasks.forward,
        summary="A process's output as raw bytes from any offset; Sandbox-Output-Offset says the first byte's.",
        query={"stream": "stdout or stderr", "offset": "the first byte wanted", "follow": "true: until the end",
               "limit": "at most so many bytes, without follow"},
        replies={200: bytes}, content_types=_BINARY, errors=_FINDING,
    ),
    Route(
        method="POST", path=_PROCESS + "/stdin", handler=tasks.forward, summary="Send input to the process.",
        request=bytes, replies={204: None}, errors=(*_FINDING, "conflict"),
    ),
    Route(
        method="POST", path=_PROCESS + "/stdin/close", handler=tasks.forward, summary="End the process's input.",
        replies={204: None}, errors=(*_FINDING, "conflict"),
    ),
    Route(
        method="POST", path=_PROCESS + "/signal", handler=tasks.forward,
        summary="Send a signal to the process or its tree.",
        request=wire.SignalRequest, replies={204: None}, errors=_FINDING,
    ),
    Route(
        method="GET", path=_TASK + "/files", handler=tasks.forward,
        summary="A file's content; ranges and If-None-Match work.",
        query=_PATH | _AS_USER | {"text": "true: refuse what is not UTF-8"},
        replies={200: bytes, 206: bytes, 304: None}, content_types=_BINARY,
        errors=(*_FINDING, *_FILES, "not_utf8", "range_not_satisfiable"),
    ),
    Route(
        method="HEAD", path=_TASK + "/files", handler=tasks.forward, summary="A file's size and ETag.", query=_PATH,
        replies={200: None}, errors=(*_FINDING, *_FILES),
    ),
    Route(
        method="PUT", path=_TASK + "/files", handler=tasks.forward,
        summary="Write a file in one atomic step, with its parent directories; If-Match works.",
        query=_PATH | _AS_USER | {"mode": "permission bits, octal"}, request=bytes,
        replies={200: wire.FileEntry, 201: wire.FileEntry},
        errors=(*_PROVISIONING, *_FILES, "precondition_failed", "no_space", "user_not_allowed"),
    ),
    Route(
        method="DELETE", path=_TASK + "/files", handler=tasks.forward, summary="Delete a file or directory.",
        query=_PATH | {"recursive": "true: a directory with all in it"}, replies={204: None},
        errors=(*_FINDING, *_FILES, "conflict"),
    ),
    Route(
        method="GET", path=_TASK + "/files/stat", handler=tasks.forward, summary="What is at a path.", query=_PATH,
        replies={200: wire.FileEntry}, errors=(*_FINDING, *_FILES),
    ),
    Route(
        method="GET", path=_TASK + "/files/list", handler=tasks.forward, summary="A directory's entries, in pages.",
        query=_PATH | {"depth": "levels", "after": "`next` of the page before", "limit": "entries of a page"},
        replies={200: wire.FileList}, errors=(*_FINDING, *_FILES),
    ),
    Route(
        method="POST", path=_TASK + "/files/mkdir", handler=tasks.forward, summary="Make a directory.",
        request=wire.MkdirRequest, replies={200: wire.FileEntry, 201: wire.FileEntry},
        errors=(*_PROVISIONING, *_FILES, "conflict", "no_space"),
    ),
    Route(
        method="POST", path=_TASK + "/files/move", handler=tasks.forward, summary="Move or rename.",
        request=wire.MoveRequest, replies={200: wire.FileEntry},
        errors=(*_PROVISIONING, *_FILES, "conflict", "no_space"),
    ),
    Route(
        method="POST", path=_TASK + "/files/chmod", handler=tasks.forward,
        summary="Change the permission bits of a file, or of a directory with all below it.",
        request=wire.ChmodRequest, replies={200: wire.ChmodResult}, errors=(*_PROVISIONING, *_FILES),
    ),
    Route(
        method="GET", path=_TASK + "/files/search", handler=tasks.forward,
        summary="Search files by name, by content or both, in pages.",
        query=_PATH | _AS_USER | {
            "name": "a glob for the last component", "content": "text to look for in lines",
            "regex": "true: content is a regular expression as Python's re has it",
            "ignore_case": "true: letters of either case", "depth": "levels", "limit": "matches of a page",
            "timeout_sec": "of the search, at most 60", "max_file_bytes": "larger files are passed over",
            "after": "`next` of the page before",
        },
        replies={200: wire.SearchResult}, errors=(*_FINDING, *_FILES, "conflict", "too_large", "user_not_allowed"),
    ),
    Route(
        method="GET", path=_TASK + "/files/watch", handler=tasks.forward,
        summary="Changes below a directory as JSON lines, as they happen, until the caller hangs up.",
        query=_PATH | _AS_USER | {"recursive": "false: only what is in the directory itself"},
        replies={200: bytes}, content_types=("application/x-ndjson",),
        errors=(*_FINDING, *_FILES, "not_supported", "user_not_allowed"),
    ),
    Route(
        method="POST", path=_TASK + "/files/watch", handler=tasks.forward,
        summary="The same with its terms in a body, and a sandbox made if need be.",
        request=wire.WatchRequest, replies={200: bytes}, content_types=("application/x-ndjson",),
        errors=(*_PROVISIONING, *_FILES, "not_supported"),
    ),
    Route(
        method="GET", path=_TASK + "/archive", handler=tasks.forward,
        summary="A directory as a tar stream; the last member's pax comment tells what changed or was left out.",
        query=_PATH | _AS_USER | {"format": "tar (the default), gzip or zstd"}, replies={200: bytes},
        content_types=("application/x-tar", "application/gzip", "application/zstd"),
        errors=(*_FINDING, *_FILES, "not_supported", "too_large", "user_not_allowed"),
    ),
    Route(
        method="PUT", path=_TASK + "/archive", handler=tasks.forward,
        summary="Unpack a tar stream into a directory: all of it, or nothing where any of it is refused.",
        query=_PATH | _AS_USER | {"format": "tar, gzip or zstd; default: by Content-Type, else by the first bytes"},
        request=bytes, replies={200: wire.ArchiveUnpacked, 201: wire.ArchiveUnpacked},
        errors=(*_PROVISIONING, *_FILES, "conflict", "no_space", "not_supported", "user_not_allowed"),
    ),
    Route(
        method="GET", path=_TASK + "/usage", handler=tasks.forward,
        summary="Memory, CPU, processes and disk in use, against the limits.",
        replies={200: wire.UsageReport}, errors=_FINDING,
    ),
    Route(
        method="GET", path=_TASK + "/usage/stream", handler=tasks.forward,
        summary="The same as JSON lines, every few seconds until the caller hangs up; CPU since this reader's last.",
        query={"interval_sec": "seconds between two lines, 1 to 60; 2 if not given"}, replies={200: bytes},
        content_types=("application/x-ndjson",), errors=_FINDING,
    ),
    *_PORTS,
    Route(
        method="GET", path=_TASK, handler=tasks.get_task,
        summary="The task's sandbox: stage, lease, pod, profile, target.",
        replies={200: SandboxState}, errors=("invalid_task_id", "not_found"),
    ),
    Route(
        method="DELETE", path=_TASK, handler=tasks.retire_task, role=None,
        summary="Retire the task: its sandbox and everything in it ends. Also where there is none.",
        replies={204: None}, errors=("invalid_task_id",),
    ),
    # ── a project's sandboxes and keys ──────────────────────────────────────────────────────────────────────────
    Route(
        method="GET", path="/api/v1/sandboxes/", handler=tasks.list_sandboxes, summary="The project's sandboxes.",
        replies={200: SandboxList},
    ),
    Route(
        method="GET", path="/api/v1/sandboxes", handler=tasks.list_sandboxes, summary="The project's sandboxes.",
        replies={200: SandboxList},
    ),
    Route(
        method="GET", path="/api/v1/sandboxes/{sandbox_id:[^/]+}", handler=tasks.get_sandbox, summary="One sandbox.",
        replies={200: SandboxState}, errors=("not_found",),
    ),
    Route(
        method="GET", path="/api/v1/keys", handler=operators.list_keys, role=Role.ADMIN,
        summary="The project's API keys.",
        replies={200: KeyList},
    ),
    Route(
        method="POST", path="/api/v1/keys", handler=operators.create_key, role=Role.ADMIN,
        summary="Make an API key of the project; its text is in this answer and nowhere else.",
        request=CreateKey, replies={201: KeyCreated}, errors=("too_large",),
    ),
    Route(
        method="DELETE", path="/api/v1/keys/{key_id:[^/]+}", handler=operators.revoke_key, role=Role.ADMIN,
        summary="Revoke a key of the project.", replies={204: None}, errors=("not_found",),
    ),
    Route(
        method="GET", path="/api/v1/pools", handler=operators.list_pools, role=Role.ADMIN,
        summary="The warm pools of the profiles that the project may use.", replies={200: PoolList},
    ),
    Route(
        method="GET", path="/api/v1/targets", handler=operators.list_targets,
        summary="Where the project's sandboxes may run.", replies={200: TargetList},
    ),
    # ── this manager ────────────────────────────────────────────────────────────────────────────────────────────
    Route(
        method="GET", path="/healthz", handler=operators.healthz, open=True, summary="Whether this manager lives.",
        replies={200: HealthState},
    ),
    Route(
        method="GET", path="/readyz", handler=operators.readyz, open=True,
        summary="Whether this manager can serve: its store answers and its pods are known.",
        replies={200: HealthState, 503: HealthState},
    ),
    Route(
        method="GET", path="/openapi.json", handler=operators.openapi_json, open=True,
        summary="This interface as an OpenAPI 3.1 document.", replies={200: bytes},
    ),
    Route(
        method="GET", path="/docs", handler=operators.docs, open=True, summary="This interface for people.",
        replies={200: str}, content_types=("text/html",),
    ),
)  # fmt: skip


def create_app(services: Services, routes: Sequence[Route] = ROUTES) -> web.Application:
    """The application that serves the table."""
    by_handler: dict[Any, Route] = {}
    app = web.Application(middlewares=[guard(by_handler)], client_max_size=EXEC_BODY_BYTES)
    described = document(routes, __version__)
    app[SERVICES] = services
    app[DOCUMENTS] = Documents(msgspec.json.encode(described), page(described))
    for route in routes:
        handler = _of_its_own(route.handler)
        by_handler[handler] = route
        app.router.add_route(route.method, route.path, handler, expect_handler=expectation)
    return app


def _of_its_own(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """The handler as an object that no other route has, so that the middleware knows the route by it."""

    @functools.wraps(handler)
    async def serve(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    return serve
