"""The route table: from it aiohttp's routes, the OpenAPI document, /docs and the security tests are made."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from executor import wire
from manager import __version__
from manager.api import inspection, operators, ports, sandboxes, sockets, tasks
from manager.api.docs_page import page
from manager.api.openapi import document
from manager.api.server import DOCUMENTS, SERVICES, Documents, Route, expectation, guard
from manager.api.services import Services
from manager.api.wire import (
    EXEC_BODY_BYTES,
    AuditEventList,
    CommandResult,
    CreateKey,
    CreateSandbox,
    ForkSandbox,
    HealthState,
    KeyCreated,
    KeyList,
    LongLivedSandbox,
    LongLivedSandboxList,
    PatchSandbox,
    PoolList,
    QuotaList,
    SandboxList,
    SandboxState,
    SnapshotInfo,
    SnapshotList,
    StreamEvent,
    TakeSnapshot,
    TargetList,
    TaskCommand,
    TaskSession,
    TaskTerminal,
    WorkspaceWritten,
)
from manager.model import Role

# Ids are matched as whole path segments: aiohttp's own `{id}` takes no braces, and an empty id has its own refusal.
_TASK: Final = "/sandbox/task/{task_id:[^/]*}"
_SANDBOXES: Final = "/sandbox/sandboxes/v1"
_SNAPSHOTS: Final = "/sandbox/snapshots/v1"
_SNAPSHOT: Final = _SNAPSHOTS + "/{snapshot_id:[^/]+}"
_WAIT: Final = {"wait_sec": "for it to be done, 60 if not given; then the answer is 202"}
_MOVING: Final = (
    "not_found", "conflict", "sandbox_stopped", "sandbox_starting", "sandbox_gone", "executor_unreachable", "no_space",
    "not_supported", "wrong_pod",
)  # fmt: skip
_SANDBOX: Final = _SANDBOXES + "/{sandbox_id:[^/]+}"

_PROVISIONING: Final = (
    "invalid_task_id", "unknown_profile", "profile_mismatch", "sandbox_replaced", "no_target_in_region",
    "task_bound_elsewhere", "quota_exceeded", "rate_limited", "capacity_exhausted", "provisioning",
    "workspace_attaching", "target_unavailable", "image_pull_failed", "isolation_unavailable", "executor_unreachable",
    "sandbox_gone", "wrong_pod", "too_large",
)  # fmt: skip
_FINDING: Final = (
    "invalid_task_id", "not_found", "sandbox_gone", "sandbox_replaced", "executor_unreachable", "wrong_pod",
    "rate_limited", "target_unavailable",
)  # fmt: skip
_KEPT: Final = (
    "not_found", "sandbox_stopped", "sandbox_starting", "sandbox_gone", "sandbox_replaced", "profile_mismatch",
    "task_bound_elsewhere", "unknown_profile", "executor_unreachable", "wrong_pod", "rate_limited", "too_large",
    "quota_exceeded", "capacity_exhausted", "provisioning", "image_pull_failed", "isolation_unavailable",
)  # fmt: skip
_RUNNING: Final = ("invalid_cwd", "user_not_allowed", "idempotency_mismatch", "outcome_unknown", "not_supported")
_FILES: Final = ("invalid_path", "permission_denied", "file_not_found", "not_a_file", "not_a_directory")
_PATH: Final = {"path": "absolute, or relative to the workspace"}
_AS_USER: Final = {"user": "whom to act as; only users that the profile allows"}
_BINARY: Final = ("application/octet-stream",)


def _inside(at: str, providing: tuple[str, ...], finding: tuple[str, ...]) -> tuple[Route, ...]:
    """What can be done in a sandbox that is found at this path; the errors of calls that provide one, and of others."""
    process = at + "/processes/{process_id:[^/]+}"
    session = at + "/sessions/{session_id:[^/]+}"
    terminal = at + "/terminals/{terminal_id:[^/]+}"
    running = (*providing, *_RUNNING)
    served_by_ports = tuple(
        Route(
            method=method, path=at + "/ports/{port:[^/]*}" + rest, handler=ports.port_call,
            summary="A server in the sandbox, over HTTP" + (" or upgraded to a WebSocket." if method == "GET" else "."),
            request=bytes if method in ("POST", "PUT", "PATCH") else None,
            replies={200: bytes} | ({101: None} if method == "GET" else {}), content_types=("*/*",),
            errors=(*finding, "outcome_unknown", "shutting_down"),
        )
        for method in ports.METHODS
        for rest in ("", "/{path:.*}")
    )  # fmt: skip
    return (
        Route(
            method="POST", path=at + "/exec", handler=tasks.run_command,
            summary="Run a command in the sandbox; a task's is provisioned now if need be. "
            "Accept: application/x-ndjson, text/event-stream or application/vnd.sojourn.frames streams its events.",
            request=TaskCommand, replies={200: CommandResult}, stream=StreamEvent, errors=running,
        ),
        Route(
            method="GET", path=at + "/exec", handler=sockets.run_socket,
            summary="Run a command over a WebSocket: the exec body is the first frame; input, signals and output "
            "share it.",
            query={"stdout_offset": "where a joined command's output is to begin", "stderr_offset": "likewise"},
            replies={101: None}, errors=running,
        ),
        Route(
            method="POST", path=at + "/sessions", handler=tasks.make_session,
            summary="Make a session: a stateful shell whose directory, variables, functions and options persist.",
            request=TaskSession, replies={201: wire.SessionInfo, 200: wire.SessionInfo},
            errors=(*running, "no_space"),
        ),
        Route(
            method="GET", path=at + "/sessions", handler=tasks.forward, summary="The sandbox's sessions.",
            replies={200: wire.SessionList}, errors=finding,
        ),
        Route(
            method="GET", path=session, handler=tasks.forward, summary="A session's state.",
            replies={200: wire.SessionInfo}, errors=finding,
        ),
        Route(
            method="POST", path=session + "/exec", handler=tasks.run_in_session,
            summary="Run a text in the session's shell, after those that were given before. `Accept` as for exec.",
            request=wire.SessionExecRequest, replies={200: wire.ExecResult}, stream=wire.CommandEvent,
            errors=(*finding, "conflict", "idempotency_mismatch", "outcome_unknown", "no_space", "too_large"),
        ),
        Route(
            method="POST", path=session + "/interrupt", handler=tasks.forward,
            summary="Interrupt what the session's shell runs, as Ctrl-C does; what does not give way is ended.",
            request=wire.InterruptRequest, replies={200: wire.InterruptResult}, errors=finding,
        ),
        Route(
            method="DELETE", path=session, handler=tasks.forward,
            summary="End the session's shell and the command that it runs. What earlier ones left goes on.",
            query={"kill_descendants": "true: end that too"}, replies={204: None}, errors=finding,
        ),
        Route(
            method="POST", path=at + "/terminals", handler=tasks.open_terminal,
            summary="Open a terminal: a process on a pseudo-terminal that outlives the connections to it.",
            request=TaskTerminal, replies={201: wire.TerminalInfo, 200: wire.TerminalInfo}, errors=running,
        ),
        Route(
            method="GET", path=at + "/terminals", handler=tasks.forward, summary="The sandbox's terminals.",
            replies={200: wire.TerminalList}, errors=finding,
        ),
        Route(
            method="GET", path=terminal, handler=sockets.terminal_call,
            summary="A terminal's state; upgraded to a WebSocket, a connection to it.",
            query={"offset": "the first byte to replay; default: that of the last screens",
                   "mode": "control (the default; takes over) or view"},
            replies={101: None, 200: wire.TerminalInfo}, errors=(*finding, "shutting_down"),
        ),
        Route(
            method="DELETE", path=terminal, handler=tasks.forward,
            summary="Hang up, end the terminal's whole tree and forget it.", replies={204: None}, errors=finding,
        ),
        Route(
            method="POST", path=at + "/processes", handler=tasks.start_process, summary="Start a background process.",
            request=TaskCommand, replies={201: wire.ProcessInfo, 200: wire.ProcessInfo}, errors=running,
        ),
        Route(
            method="GET", path=at + "/processes", handler=tasks.forward, summary="The sandbox's processes.",
            replies={200: wire.ProcessList}, errors=finding,
        ),
        Route(
            method="GET", path=process, handler=tasks.forward, summary="A process's state and outcome.",
            query={"wait_sec": "wait so long for its end"}, replies={200: wire.ProcessInfo}, errors=finding,
        ),
        Route(
            method="DELETE", path=process, handler=tasks.forward,
            summary="Kill the process with its tree and forget it.",
            replies={204: None}, errors=finding,
        ),
        Route(
            method="GET", path=process + "/output", handler=tasks.forward,
            summary="A process's output as raw bytes from any offset; Sandbox-Output-Offset says the first byte's.",
            query={"stream": "stdout or stderr", "offset": "the first byte wanted", "follow": "true: until the end",
                   "limit": "at most so many bytes, without follow"},
            replies={200: bytes}, content_types=_BINARY, errors=finding,
        ),
        Route(
            method="POST", path=process + "/stdin", handler=tasks.forward, summary="Send input to the process.",
            request=bytes, replies={204: None}, errors=(*finding, "conflict"),
        ),
        Route(
            method="POST", path=process + "/stdin/close", handler=tasks.forward, summary="End the process's input.",
            replies={204: None}, errors=(*finding, "conflict"),
        ),
        Route(
            method="POST", path=process + "/signal", handler=tasks.forward,
            summary="Send a signal to the process or its tree.",
            request=wire.SignalRequest, replies={204: None}, errors=finding,
        ),
        Route(
            method="GET", path=at + "/files", handler=tasks.forward,
            summary="A file's content; ranges and If-None-Match work.",
            query=_PATH | _AS_USER | {"text": "true: refuse what is not UTF-8"},
            replies={200: bytes, 206: bytes, 304: None}, content_types=_BINARY,
            errors=(*finding, *_FILES, "not_utf8", "range_not_satisfiable"),
        ),
        Route(
            method="HEAD", path=at + "/files", handler=tasks.forward, summary="A file's size and ETag.", query=_PATH,
            replies={200: None}, errors=(*finding, *_FILES),
        ),
        Route(
            method="PUT", path=at + "/files", handler=tasks.forward,
            summary="Write a file in one atomic step, with its parent directories; If-Match works.",
            query=_PATH | _AS_USER | {"mode": "permission bits, octal"}, request=bytes,
            replies={200: wire.FileEntry, 201: wire.FileEntry},
            errors=(*providing, *_FILES, "precondition_failed", "no_space", "user_not_allowed"),
        ),
        Route(
            method="DELETE", path=at + "/files", handler=tasks.forward, summary="Delete a file or directory.",
            query=_PATH | {"recursive": "true: a directory with all in it"}, replies={204: None},
            errors=(*finding, *_FILES, "conflict"),
        ),
        Route(
            method="GET", path=at + "/files/stat", handler=tasks.forward, summary="What is at a path.", query=_PATH,
            replies={200: wire.FileEntry}, errors=(*finding, *_FILES),
        ),
        Route(
            method="GET", path=at + "/files/list", handler=tasks.forward, summary="A directory's entries, in pages.",
            query=_PATH | {"depth": "levels", "after": "`next` of the page before", "limit": "entries of a page"},
            replies={200: wire.FileList}, errors=(*finding, *_FILES),
        ),
        Route(
            method="POST", path=at + "/files/mkdir", handler=tasks.forward, summary="Make a directory.",
            request=wire.MkdirRequest, replies={200: wire.FileEntry, 201: wire.FileEntry},
            errors=(*providing, *_FILES, "conflict", "no_space"),
        ),
        Route(
            method="POST", path=at + "/files/move", handler=tasks.forward, summary="Move or rename.",
            request=wire.MoveRequest, replies={200: wire.FileEntry},
            errors=(*providing, *_FILES, "conflict", "no_space"),
        ),
        Route(
            method="POST", path=at + "/files/chmod", handler=tasks.forward,
            summary="Change the permission bits of a file, or of a directory with all below it.",
            request=wire.ChmodRequest, replies={200: wire.ChmodResult}, errors=(*providing, *_FILES),
        ),
        Route(
            method="GET", path=at + "/files/search", handler=tasks.forward,
            summary="Search files by name, by content or both, in pages.",
            query=_PATH | _AS_USER | {
                "name": "a glob for the last component", "content": "text to look for in lines",
                "regex": "true: content is a regular expression as Python's re has it",
                "ignore_case": "true: letters of either case", "depth": "levels", "limit": "matches of a page",
                "timeout_sec": "of the search, at most 60", "max_file_bytes": "larger files are passed over",
                "after": "`next` of the page before",
            },
            replies={200: wire.SearchResult}, errors=(*finding, *_FILES, "conflict", "too_large", "user_not_allowed"),
        ),
        Route(
            method="GET", path=at + "/files/watch", handler=tasks.forward,
            summary="Changes below a directory as JSON lines, as they happen, until the caller hangs up.",
            query=_PATH | _AS_USER | {"recursive": "false: only what is in the directory itself"},
            replies={200: bytes}, content_types=("application/x-ndjson",),
            errors=(*finding, *_FILES, "not_supported", "user_not_allowed"),
        ),
        Route(
            method="POST", path=at + "/files/watch", handler=tasks.forward,
            summary="The same with its terms in a body; a task's sandbox is made if need be.",
            request=wire.WatchRequest, replies={200: bytes}, content_types=("application/x-ndjson",),
            errors=(*providing, *_FILES, "not_supported"),
        ),
        Route(
            method="GET", path=at + "/archive", handler=tasks.forward,
            summary="A directory as a tar stream; the last member's pax comment tells what changed or was left out.",
            query=_PATH | _AS_USER | {"format": "tar (the default), gzip or zstd"}, replies={200: bytes},
            content_types=("application/x-tar", "application/gzip", "application/zstd"),
            errors=(*finding, *_FILES, "not_supported", "too_large", "user_not_allowed"),
        ),
        Route(
            method="PUT", path=at + "/archive", handler=tasks.forward,
            summary="Unpack a tar stream into a directory: all of it, or nothing where any of it is refused.",
            query=_PATH | _AS_USER | {"format": "tar, gzip or zstd; default: by Content-Type, else by the first bytes"},
            request=bytes, replies={200: wire.ArchiveUnpacked, 201: wire.ArchiveUnpacked},
            errors=(*providing, *_FILES, "conflict", "no_space", "not_supported", "user_not_allowed"),
        ),
        Route(
            method="GET", path=at + "/usage", handler=tasks.forward,
            summary="Memory, CPU, processes and disk in use, against the limits.",
            replies={200: wire.UsageReport}, errors=finding,
        ),
        Route(
            method="GET", path=at + "/usage/stream", handler=tasks.forward,
            summary="The same as JSON lines, every few seconds until the caller hangs up; CPU since this reader's "
            "last.",
            query={"interval_sec": "seconds between two lines, 1 to 60; 2 if not given"}, replies={200: bytes},
            content_types=("application/x-ndjson",), errors=finding,
        ),
        *served_by_ports,
    )  # fmt: skip


ROUTES: Final[tuple[Route, ...]] = (
    # ── task sessions ───────────────────────────────────────────────────────────────────────────────────────────
    *_inside(_TASK, _PROVISIONING, _FINDING),
    Route(
        method="GET", path=_TASK, handler=tasks.get_task,
        summary="The task's sandbox: stage, lease, pod, profile, target.",
        replies={200: SandboxState}, errors=("invalid_task_id", "not_found"),
    ),
    Route(
        method="POST", path=_TASK + "/writeback", handler=tasks.write_back,
        summary="Make what is in the task's pod durable: of that very pod (If-Sandbox-Pod), or not at all.",
        replies={200: WorkspaceWritten}, errors=(*_FINDING, "provisioning", "no_space", "not_supported", "conflict"),
    ),
    Route(
        method="DELETE", path=_TASK, handler=tasks.retire_task, role=None,
        summary="Retire the task: its sandbox and everything in it ends. Also where there is none.",
        replies={204: None}, errors=("invalid_task_id",),
    ),
    # ── long-lived sandboxes ────────────────────────────────────────────────────────────────────────────────────
    *_inside(_SANDBOX, _KEPT, _KEPT),
    Route(
        method="POST", path=_SANDBOXES, handler=sandboxes.create,
        summary="Make a sandbox that lives until it is ended or its time is over. 202: it is still being made.",
        request=CreateSandbox, replies={201: LongLivedSandbox, 202: LongLivedSandbox},
        errors=(
            "not_found", "not_supported", "rate_limited", "unknown_profile", "conflict", "idempotency_mismatch",
            "quota_exceeded", "capacity_exhausted",
            "provisioning", "image_pull_failed", "isolation_unavailable", "executor_unreachable", "too_large",
        ),
    ),
    Route(
        method="GET", path=_SANDBOXES, handler=sandboxes.listed,
        summary="The project's long-lived sandboxes, in pages; destroyed ones only where they are asked for.",
        query={"state": "only of these states, with commas", "name": "only of this name",
               "metadata": "<key>=<value>: only with this entry", "limit": "of a page, at most 200",
               "after": "`next` of the page before"},
        replies={200: LongLivedSandboxList},
    ),
    Route(
        method="GET", path=_SANDBOX, handler=sandboxes.get, summary="A long-lived sandbox, its state and its pod.",
        replies={200: LongLivedSandbox}, errors=("not_found",),
    ),
    Route(
        method="POST", path=_SANDBOX + "/stop", handler=sandboxes.stop,
        summary="Keep its workspace, then give pod and slot back. 202: its workspace is still being kept.",
        query=_WAIT, replies={200: LongLivedSandbox, 202: LongLivedSandbox}, errors=_MOVING,
    ),
    Route(
        method="POST", path=_SANDBOX + "/start", handler=sandboxes.start,
        summary="Take a slot and a pod, and bring its workspace back. 202: that goes on.",
        query=_WAIT, replies={200: LongLivedSandbox, 202: LongLivedSandbox},
        errors=(*_MOVING, "quota_exceeded", "capacity_exhausted", "provisioning", "image_pull_failed",
                "isolation_unavailable", "unknown_profile"),
    ),
    Route(
        method="POST", path=_SANDBOX + "/fork", handler=sandboxes.fork,
        summary="Make a sandbox with what is in this one's workspace now. This one runs on.",
        request=ForkSandbox, replies={201: LongLivedSandbox, 202: LongLivedSandbox},
        errors=(*_MOVING, "idempotency_mismatch", "quota_exceeded", "capacity_exhausted", "provisioning",
                "image_pull_failed", "isolation_unavailable", "unknown_profile", "too_large"),
    ),
    Route(
        method="POST", path=_SANDBOX + "/snapshots", handler=sandboxes.take_snapshot,
        summary="Keep what is in its workspace now under an id of its own, for good. It runs on.",
        request=TakeSnapshot, replies={201: SnapshotInfo}, errors=(*_MOVING, "too_large"),
    ),
    Route(
        method="GET", path=_SNAPSHOTS, handler=sandboxes.list_snapshots,
        summary="The project's snapshots, in pages, by id.",
        query={"limit": "of a page, at most 200", "after": "`next` of the page before"},
        replies={200: SnapshotList}, errors=("not_supported",),
    ),
    Route(
        method="GET", path=_SNAPSHOT, handler=sandboxes.get_snapshot, summary="One snapshot.",
        replies={200: SnapshotInfo}, errors=("not_found", "not_supported"),
    ),
    Route(
        method="DELETE", path=_SNAPSHOT, handler=sandboxes.delete_snapshot,
        summary="Delete a snapshot; what others share with it stays.", replies={204: None},
        errors=("not_found", "not_supported"),
    ),
    Route(
        method="PATCH", path=_SANDBOX, handler=sandboxes.patch,
        summary="Change its name, metadata, autostop, time to live or autostart.",
        request=PatchSandbox, replies={200: LongLivedSandbox},
        errors=("not_found", "sandbox_gone", "executor_unreachable", "too_large"),
    ),
    Route(
        method="DELETE", path=_SANDBOX, handler=sandboxes.destroy,
        summary="End it for good. Also where that was done already.",
        query={"purge": "true: keep nothing of it; else its last checkpoint stays a week, as a snapshot",
               "force": "true: also where its workspace cannot be kept",
               "wait_sec": "for its end, 60 if not given; then the answer is 202"},
        replies={204: None, 202: LongLivedSandbox},
        errors=_MOVING,
    ),
    # ── a project's sandboxes and keys ──────────────────────────────────────────────────────────────────────────
    Route(
        method="GET", path="/api/v1/sandboxes/", handler=inspection.list_sandboxes, summary="The project's sandboxes.",
        replies={200: SandboxList},
    ),
    Route(
        method="GET", path="/api/v1/sandboxes", handler=inspection.list_sandboxes, summary="The project's sandboxes.",
        replies={200: SandboxList},
    ),
    Route(
        method="GET", path="/api/v1/sandboxes/{sandbox_id:[^/]+}", handler=inspection.get_sandbox,
        summary="One sandbox.",
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
        method="GET", path="/api/v1/audit", handler=operators.list_audit, role=Role.ADMIN,
        summary="The project's audit log, oldest first: who changed what, when and from where.",
        query={"since": "a time: only events from then on", "after": "`next` of the page before",
               "limit": "events of a page, at most 500"},
        replies={200: AuditEventList},
    ),
    Route(
        method="GET", path="/api/v1/pools", handler=operators.list_pools, role=Role.ADMIN,
        summary="The warm pools of the profiles that the project may use.", replies={200: PoolList},
    ),
    Route(
        method="GET", path="/api/v1/quotas", handler=operators.list_quotas,
        summary="What the project holds of its concurrency, cpu and memory.", replies={200: QuotaList},
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
        if route.open and route.method == "GET":  # what probes and link checkers send
            app.router.add_route("HEAD", route.path, handler, expect_handler=expectation)
    app.on_response_prepare.append(_without_versions)
    return app


async def _without_versions(_request: web.Request, reply: web.StreamResponse) -> None:
    """Nobody is told which library of which version answers."""
    reply.headers.pop("Server", None)


def _of_its_own(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """The handler as an object that no other route has, so that the middleware knows the route by it."""

    @functools.wraps(handler)
    async def serve(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    return serve
