"""Every call of the executor in one table: what it takes, what it answers, what it can refuse with.

Data only, read when somebody asks for the OpenAPI document; the routes themselves are mounted in `executor.app`, and a
test holds both to the same list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from executor import layerwire, search, wire
from executor.filetree import MAX_DEPTH
from executor.wire import JSON_TYPE, NDJSON_TYPE

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One query parameter."""

    text: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Call:
    method: str
    path: str
    summary: str
    query: Mapping[str, Parameter] = field(default_factory=dict)
    request: Any = None  # type of the JSON body; bytes: any content
    is_body_optional: bool = False
    replies: Mapping[int, Any] = field(default_factory=lambda: {204: None})  # status -> type, None (empty) or bytes
    content_types: tuple[str, ...] = (JSON_TYPE,)  # of a reply of bytes
    stream: Any = None  # type of the events where the reply can be a stream
    errors: tuple[str, ...] = ()  # codes beside those that every call can give
    open: bool = False  # answered without the pod token


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_FLAG: Final = {"type": "boolean"}
_MODE: Final = {"type": "string", "pattern": "^0?[0-7]{1,3}$"}
_MAX_OFFSET: Final = 1 << 62
_PATH: Final = {"path": Parameter("absolute, or relative to the workspace", required=True)}
_TOP: Final = {"path": Parameter("absolute, or relative to the workspace; default: the workspace")}
_USER: Final = {"user": Parameter("whom to act as: one whom the pod's configuration allows")}
_FILES: Final = (
    "invalid_path", "user_not_allowed", "permission_denied", "file_not_found", "not_a_file", "not_a_directory",
)  # fmt: skip
_CHANGES: Final = (*_FILES, "conflict", "precondition_failed", "too_large", "no_space")
_RUNS: Final = (
    "invalid_cwd", "user_not_allowed", "idempotency_mismatch", "rate_limited", "too_large", "no_space", "conflict",
)  # fmt: skip
_KNOWN: Final = ("not_found",)
_BINARY: Final = ("application/octet-stream",)
_TAR: Final = ("application/x-tar", "application/gzip", "application/zstd")

CALLS: Final = (
    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────
    Call(
        method="POST", path="/v1/exec", summary="Run a command and wait for its end, or read its events as it runs.",
        request=wire.ExecRequest, replies={200: wire.ExecResult}, stream=wire.CommandEvent, errors=_RUNS,
    ),
    Call(
        method="GET", path="/v1/exec", summary="Run a command over a WebSocket; the first frame is the exec body.",
        query={
            f"{name}_offset": Parameter(f"where a joined command's {name} is to begin", _whole(0, _MAX_OFFSET))
            for name in ("stdout", "stderr")
        },
        replies={101: None},
    ),
    Call(
        method="POST", path="/v1/processes", summary="Start a background process.", request=wire.ExecRequest,
        replies={201: wire.ProcessInfo, 200: wire.ProcessInfo}, errors=_RUNS,
    ),
    Call(
        method="GET", path="/v1/processes", summary="All commands that run or whose outcome is kept.",
        replies={200: wire.ProcessList},
    ),
    Call(
        method="GET", path="/v1/processes/{id}", summary="A command's state, and its outcome once it has ended.",
        query={"wait_sec": Parameter("wait so long for its end", _whole(0, 3600))},
        replies={200: wire.ProcessInfo}, errors=(*_KNOWN, "invalid_cwd", "too_large"),
    ),
    Call(
        method="DELETE", path="/v1/processes/{id}", summary="End the command's whole tree and forget it.",
        errors=_KNOWN,
    ),
    Call(
        method="GET", path="/v1/processes/{id}/output", summary="Its output as raw bytes from any offset on.",
        query={
            "stream": Parameter("which; default: stdout", _one_of("stdout", "stderr")),
            "offset": Parameter("of the first byte wanted", _whole(0, _MAX_OFFSET)),
            "follow": Parameter("go on until the command ends, or to the next gap", _FLAG),
            "limit": Parameter("at most so many bytes, without follow", _whole(1, 1 << 20)),
        },
        replies={200: bytes}, content_types=_BINARY, errors=_KNOWN,
    ),
    Call(
        method="POST", path="/v1/processes/{id}/stdin", summary="Send input.", request=bytes,
        errors=(*_KNOWN, "conflict"),
    ),
    Call(method="POST", path="/v1/processes/{id}/stdin/close", summary="End its input.", errors=_KNOWN),
    Call(
        method="POST", path="/v1/processes/{id}/signal", summary="Send a signal to the process or its whole tree.",
        request=wire.SignalRequest, errors=_KNOWN,
    ),
    # ── sessions and terminals ──────────────────────────────────────────────────────────────────────────────────
    Call(
        method="POST", path="/v1/sessions", summary="Make a stateful shell.", request=wire.SessionRequest,
        is_body_optional=True, replies={201: wire.SessionInfo, 200: wire.SessionInfo},
        errors=(*_RUNS, "not_supported"),
    ),
    Call(method="GET", path="/v1/sessions", summary="The pod's sessions.", replies={200: wire.SessionList}),
    Call(
        method="GET", path="/v1/sessions/{id}", summary="A session's state.", replies={200: wire.SessionInfo},
        errors=_KNOWN,
    ),
    Call(
        method="DELETE", path="/v1/sessions/{id}", summary="End the shell; what earlier commands left goes on.",
        query={"kill_descendants": Parameter("end that too", _FLAG)}, errors=_KNOWN,
    ),
    Call(
        method="POST", path="/v1/sessions/{id}/exec", summary="Run a text in the shell, after those given before.",
        request=wire.SessionExecRequest, replies={200: wire.ExecResult}, stream=wire.CommandEvent,
        errors=(*_RUNS, *_KNOWN),
    ),
    Call(
        method="POST", path="/v1/sessions/{id}/interrupt", summary="Interrupt what the shell runs, as Ctrl-C does.",
        request=wire.InterruptRequest, is_body_optional=True, replies={200: wire.InterruptResult}, errors=_KNOWN,
    ),
    Call(
        method="POST", path="/v1/terminals", summary="Open a terminal, which outlives the connections to it.",
        request=wire.TerminalRequest, replies={201: wire.TerminalInfo, 200: wire.TerminalInfo},
        errors=(*_RUNS, "not_supported"),
    ),
    Call(method="GET", path="/v1/terminals", summary="The pod's terminals.", replies={200: wire.TerminalList}),
    Call(
        method="GET", path="/v1/terminals/{id}", summary="A terminal's state; upgraded to a WebSocket, its screen.",
        query={
            "offset": Parameter("of the first byte to replay; only with an upgrade", _whole(0, _MAX_OFFSET)),
            "mode": Parameter("control takes over; only with an upgrade", _one_of("control", "view")),
        },
        replies={200: wire.TerminalInfo, 101: None}, errors=(*_KNOWN, "rate_limited"),
    ),
    Call(method="DELETE", path="/v1/terminals/{id}", summary="End the terminal's tree and forget it.", errors=_KNOWN),
    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────
    Call(
        method="GET", path="/v1/files", summary="A file's content; ranges, If-Match and If-None-Match work.",
        query=_PATH | _USER | {"text": Parameter("refuse what is not UTF-8", _FLAG)},
        replies={200: bytes, 206: bytes, 304: None}, content_types=(*_BINARY, "text/plain"),
        errors=(*_FILES, "not_utf8", "precondition_failed", "range_not_satisfiable"),
    ),
    Call(
        method="HEAD", path="/v1/files", summary="A file's size and ETag.",
        query=_PATH | _USER | {"text": Parameter("refuse what is not UTF-8", _FLAG)},
        replies={200: None, 206: None, 304: None},
        errors=(*_FILES, "not_utf8", "precondition_failed", "range_not_satisfiable"),
    ),
    Call(
        method="PUT", path="/v1/files", summary="Write a file in one atomic step, with its parent directories.",
        query=_PATH | _USER | {"mode": Parameter("octal permission bits", _MODE)},
        request=bytes, replies={200: wire.FileEntry, 201: wire.FileEntry}, errors=_CHANGES,
    ),
    Call(
        method="DELETE", path="/v1/files", summary="Delete a file or directory.",
        query=_PATH | _USER | {"recursive": Parameter("a directory with all in it", _FLAG)}, errors=_CHANGES,
    ),
    Call(
        method="GET", path="/v1/files/stat", summary="What is at a path.", query=_PATH | _USER,
        replies={200: wire.FileEntry}, errors=_FILES,
    ),
    Call(
        method="GET", path="/v1/files/list", summary="A directory's entries, in pages.",
        query=_TOP | _USER | {
            "depth": Parameter("levels", _whole(1, MAX_DEPTH)), "after": Parameter("`next` of the page before"),
            "limit": Parameter("entries of a page", _whole(1, 10_000)),
        },
        replies={200: wire.FileList}, errors=_FILES,
    ),
    Call(
        method="POST", path="/v1/files/mkdir", summary="Make a directory.", query=_USER, request=wire.MkdirRequest,
        replies={200: wire.FileEntry, 201: wire.FileEntry}, errors=_CHANGES,
    ),
    Call(
        method="POST", path="/v1/files/move", summary="Move or rename.", query=_USER, request=wire.MoveRequest,
        replies={200: wire.FileEntry}, errors=_CHANGES,
    ),
    Call(
        method="POST", path="/v1/files/chmod", summary="Change permission bits, of a directory with all below it too.",
        query=_USER, request=wire.ChmodRequest, replies={200: wire.ChmodResult}, errors=_CHANGES,
    ),
    Call(
        method="GET", path="/v1/files/search", summary="Files by name, by content, or by both; in pages.",
        query=_TOP | _USER | {
            "name": Parameter("a glob for the last component"), "content": Parameter("text to look for in lines"),
            "regex": Parameter("content is a regular expression as Python's re has it", _FLAG),
            "ignore_case": Parameter("letters of either case", _FLAG),
            "depth": Parameter("levels", _whole(1, search.MAX_DEPTH)),
            "limit": Parameter("matches of a page", _whole(1, search.MAX_LIMIT)),
            "timeout_sec": Parameter("of the search", _whole(1, search.MAX_TIMEOUT_SEC)),
            "max_file_bytes": Parameter("larger files are passed over", _whole(1, search.MAX_FILE_BYTES)),
            "after": Parameter("`next` of the page before"),
        },
        replies={200: wire.SearchResult}, errors=(*_FILES, "conflict", "too_large", "rate_limited"),
    ),
    Call(
        method="GET", path="/v1/files/watch", summary="Changes below a directory as they happen, until you hang up.",
        query=_TOP | _USER | {"recursive": Parameter("false: only in the directory itself", _FLAG)},
        replies={200: bytes}, content_types=(NDJSON_TYPE,), errors=(*_FILES, "not_supported", "rate_limited"),
    ),
    Call(
        method="POST", path="/v1/files/watch", summary="The same with its terms in a body.", query=_USER,
        request=wire.WatchRequest, replies={200: bytes}, content_types=(NDJSON_TYPE,),
        errors=(*_FILES, "not_supported", "rate_limited"),
    ),
    Call(
        method="GET", path="/v1/archive", summary="A directory as a tar stream.",
        query=_TOP | _USER | {"format": Parameter("default: tar", _one_of("tar", "gzip", "zstd"))},
        replies={200: bytes}, content_types=_TAR, errors=(*_FILES, "too_large", "not_supported", "rate_limited"),
    ),
    Call(
        method="PUT", path="/v1/archive", summary="Unpack a tar stream into a directory: all of it, or nothing.",
        query=_PATH | _USER | {
            "format": Parameter("default: by Content-Type, else by the first bytes", _one_of("tar", "gzip", "zstd"))
        },
        request=bytes, replies={200: wire.ArchiveUnpacked, 201: wire.ArchiveUnpacked},
        errors=(*_CHANGES, "not_supported", "rate_limited"),
    ),
    Call(
        method="GET", path="/v1/changes",
        summary="What changed in the workspace since a state of it, as a layer; without one, all of it.",
        query={
            "since": Parameter(
                "the state, as a layer's head or the answer to its application names it; an unknown one counts as none",
                {"type": "string", "pattern": "^[0-9a-f]{32}$"},
            )
        },
        replies={200: bytes}, content_types=(layerwire.LAYER_TYPE,), errors=("conflict", "not_supported", "no_space"),
    ),
    Call(
        method="PUT", path="/v1/layers", summary="Lay one layer over the workspace.",
        query={
            "sha256": Parameter(
                "of the body, in hex", {"type": "string", "pattern": "^[0-9a-f]{64}$"}, required=True
            ),
            "last": Parameter("the answer is to name the workspace's state, for `since`", _FLAG),
            "max_bytes": Parameter("of content in it", _whole(0, layerwire.MAX_BYTES)),
            "max_entries": Parameter("of entries and marks in it", _whole(0, layerwire.MAX_ENTRIES)),
        },
        request=bytes, replies={200: layerwire.LayerApplied},
        errors=("invalid_path", "permission_denied", "file_not_found", "not_a_file", "not_a_directory", "conflict",
                "too_large", "not_supported", "no_space"),
    ),
    # ── the pod ─────────────────────────────────────────────────────────────────────────────────────────────────
    Call(
        method="POST", path="/v1/bind", summary="Give the pod its one identity; the same again changes nothing.",
        request=wire.BindRequest, replies={200: wire.LeaseInfo}, errors=_CHANGES,
    ),
    Call(
        method="GET", path="/v1/lease", summary="Operations under way, quiet time, deadlines.",
        replies={200: wire.LeaseInfo},
    ),
    Call(
        method="POST", path="/v1/lease", summary="Push the deadlines on.", request=wire.LeaseRequest,
        replies={200: wire.LeaseInfo}, errors=("conflict",),
    ),
    Call(
        method="GET", path="/v1/usage", summary="Memory, CPU, processes and disk in use, against the limits.",
        replies={200: wire.UsageReport},
    ),
    Call(
        method="GET", path="/v1/usage/stream", summary="The same every few seconds, until you hang up.",
        query={"interval_sec": Parameter("default: 2", _whole(1, 60))}, replies={200: bytes},
        content_types=(NDJSON_TYPE,), errors=("rate_limited",),
    ),
    Call(
        method="GET", path="/metrics", summary="The same for Prometheus.", replies={200: bytes},
        content_types=("text/plain",),
    ),
    *(
        Call(
            method=method, path="/v1/ports/{port}" + rest, summary="A server in the pod.",
            request=bytes if method in ("POST", "PUT", "PATCH") else None, is_body_optional=True,
            replies={200: bytes} | ({101: None} if method == "GET" else {}), content_types=("*/*",),
            errors=(*_KNOWN, "outcome_unknown", "rate_limited", "too_large"),
        )
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
        for rest in ("", "/{path}")
    ),
    Call(
        method="GET", path="/openapi.json", summary="This description.", replies={200: bytes},
    ),
    Call(
        method="GET", path="/healthz", summary="Whether the executor lives; it answers while the pod burns.",
        replies={200: wire.Health}, open=True,
    ),
    Call(
        method="GET", path="/readyz", summary="Whether it takes work.", replies={200: wire.Health, 503: wire.Health},
        open=True,
    ),
)  # fmt: skip
