"""Everything that crosses the pod's edge: requests, answers, events and binary frames. Needs msgspec only.

Requests refuse unknown fields; answers and events let them pass, so that an old client survives a new executor.
Durations are seconds, sizes bytes, times RFC 3339 in UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

PROTOCOL: Final = "sojourn.v1"
POD_HEADER: Final = "Sandbox-Pod"
LEASE_HEADER: Final = "Sandbox-Lease-Sec"
OFFSET_HEADER: Final = "Sandbox-Output-Offset"
PROCESS_HEADER: Final = "Sandbox-Process-Id"
PORT_HEADER: Final = "Sandbox-Port"  # on what a server behind /v1/ports/ answered itself, and on nothing else
JSON_TYPE: Final = "application/json"
NDJSON_TYPE: Final = "application/x-ndjson"
FRAMES_TYPE: Final = "application/vnd.sojourn.frames"
RAW_TYPE: Final = "application/octet-stream"
SSE_TYPE: Final = "text/event-stream"

MiB: Final = 1 << 20
MAX_TIMEOUT_SEC: Final = 86_400.0
MAX_GRACE_SEC: Final = 60.0
MAX_OUTPUT_BYTES: Final = 64 * MiB
DEFAULT_OUTPUT_BYTES: Final = 10 * MiB
MAX_ARG_BYTES: Final = 131_071  # the kernel's MAX_ARG_STRLEN less the final NUL: one argv or env entry (execve(2))
CHUNK_BYTES: Final = 65_536  # the most that one output event or frame carries
MAX_COLS: Final = 5000  # of a terminal; the kernel's own limit is 65,535
MAX_ROWS: Final = 5000
HEARTBEAT_SEC: Final = 15.0  # at most this long between two events of an open stream

# A process id may stand in a path, a label and a file name.
PROCESS_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")

Reason = Literal[
    "exited", "signaled", "timeout", "no_output_timeout", "cancelled", "oom_killed", "pids_exhausted", "spawn_failed",
    "executor_restarted", "lost",
]  # fmt: skip
StreamName = Literal["stdout", "stderr"]
Encoding = Literal["text", "base64"]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of what callers send: an unknown field is refused and named."""


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────


class ExecRequest(Request, frozen=True):
    """One command, for `/v1/exec` and `/v1/processes` alike."""

    command: str | list[str]  # argv, or a script for `bash -c` (`sh -c` where bash is missing)
    cwd: str | None = None  # absolute, or relative to the workspace; None: the workspace
    env: dict[str, str] = {}  # added to, and winning over, what the pod gives every command
    stdin: str | None = None
    stdin_base64: str | None = None
    # Keep stdin open for `/stdin` calls; None: only where no stdin was given, for a background process or over a
    # WebSocket.
    stdin_open: bool | None = None
    user: str | None = None
    timeout_sec: float | None = None  # > 0, at most MAX_TIMEOUT_SEC
    no_output_timeout_sec: float | None = None
    grace_sec: float = 2.0  # from TERM to KILL
    max_output_bytes: int = DEFAULT_OUTPUT_BYTES  # kept of each stream: head and tail; a stream's reader gets all of it
    merge_output: bool = False  # stderr into stdout's pipe, in the order written
    encoding: Encoding = "text"
    id: str | None = None  # the caller's name for the process; the same id again joins instead of running
    on_disconnect: Literal["continue", "kill"] = "continue"


class SignalRequest(Request, frozen=True):
    signal: str | int  # "INT", "SIGINT" or 2
    to: Literal["leader", "tree"] = "tree"


class SessionRequest(Request, frozen=True):
    """A stateful shell: bash, or sh where bash is missing."""

    cwd: str | None = None  # where it starts; absolute, or relative to the workspace
    env: dict[str, str] = {}
    user: str | None = None
    id: str | None = None  # the same id again joins instead of starting another


class SessionExecRequest(Request, frozen=True):
    """What the session's shell runs next; the fields are those of an exec body."""

    command: str
    env: dict[str, str] = {}  # for this command alone; names that a shell variable can have
    stdin: str | None = None
    stdin_base64: str | None = None
    timeout_sec: float | None = None  # from when the shell begins with it, not while it waits for earlier ones
    no_output_timeout_sec: float | None = None
    grace_sec: float = 2.0  # from the interruption to the end of the shell itself
    max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    merge_output: bool = False
    encoding: Encoding = "text"
    id: str | None = None
    on_disconnect: Literal["continue", "kill"] = "continue"


class InterruptRequest(Request, frozen=True):
    escalate: bool = True  # after the command's grace_sec, also end what does not give way: in the end the shell


class TerminalRequest(Request, frozen=True):
    """A process on a new pseudo-terminal."""

    command: str | list[str] | None = None  # as an exec body's; None: `bash -i`, or `sh -i` where bash is missing
    cwd: str | None = None
    env: dict[str, str] = {}  # TERM is xterm-256color unless it says otherwise
    user: str | None = None
    cols: int = 80
    rows: int = 24
    id: str | None = None  # the same id again joins instead of opening another


class ResizeRequest(Request, frozen=True):
    """A terminal's size in characters; `bad_size` holds its bounds."""

    cols: int
    rows: int


class LeaseTermsBody(Request, frozen=True):
    quiet_sec: float | None = None  # of no work, after which the pod ends itself
    hard_end_sec: float | None = None  # from now; the pod ends then whatever it does


class FileBody(Request, frozen=True):
    path: str
    content: str | None = None
    content_base64: str | None = None
    mode: int | None = None
    secret: bool = False  # what is at this path is never in a layer of the workspace


class BindRequest(Request, frozen=True):
    """Gives an unclaimed pod its one identity, with the environment and files of the claim."""

    sandbox_id: str
    task_id: str | None = None
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}  # environment too, never shown again
    files: list[FileBody] = []
    lease: LeaseTermsBody = LeaseTermsBody()


class LeaseRequest(Request, frozen=True):
    quiet_sec: float | None = None
    hard_end_sec: float | None = None
    unclaimed_sec: float | None = None  # a pool pod's own deadline, from now


class MkdirRequest(Request, frozen=True):
    path: str
    parents: bool = True
    mode: int = 0o755


class MoveRequest(Request, frozen=True):
    source: str
    target: str
    overwrite: bool = False


class ChmodRequest(Request, frozen=True):
    path: str
    mode: int  # permission bits
    recursive: bool = False  # the same bits for all below, links left alone


class WatchRequest(Request, frozen=True):
    path: str = "."
    recursive: bool = True


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────


class ResourceUse(msgspec.Struct, frozen=True, gc=False):
    """wait4(2)'s figures for the command and the descendants that it waited for."""

    user_ms: float
    system_ms: float
    # Never under the spawn helper's own 10 MiB or so: the kernel carries the high-water mark over vfork.
    max_rss_bytes: int


class DroppedSpan(msgspec.Struct, frozen=True):
    """Where the kept head ends and how many bytes are missing before the kept tail."""

    offset: int
    bytes: int


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, with its output.

    With `encoding` "base64" the output is in `stdout_base64` and `stderr_base64`, and `stdout`/`stderr` are absent."""

    id: str
    pid: int | None
    exit_code: int  # 128 + n for a signal, also after a timeout; 127 not found, 126 not executable
    signal: str | None  # "SIGKILL"
    reason: Reason
    message: str | None = None  # for people: "timed out after 10 s"
    timed_out: bool
    stdout: str | msgspec.UnsetType = msgspec.UNSET
    stderr: str | msgspec.UnsetType = msgspec.UNSET
    stdout_base64: str | msgspec.UnsetType = msgspec.UNSET
    stderr_base64: str | msgspec.UnsetType = msgspec.UNSET
    stdout_bytes: int  # produced in total
    stderr_bytes: int
    truncated: bool
    stdout_dropped: DroppedSpan | None = None
    stderr_dropped: DroppedSpan | None = None
    descendants_left: bool
    started_at: str
    duration_ms: float
    usage: ResourceUse
    # of a command in a session only
    ended: bool | msgspec.UnsetType = msgspec.UNSET  # the shell is gone, and its state with it
    fresh_shell: bool | msgspec.UnsetType = msgspec.UNSET  # it began in a new shell, since the last one had ended


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A command's state; the outcome's fields are null while it runs."""

    id: str
    pid: int | None
    state: Literal["starting", "running", "ended"]
    command: str | list[str]
    started_at: str
    exit_code: int | None = None
    signal: str | None = None
    reason: Reason | None = None
    message: str | None = None
    timed_out: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    descendants_left: bool = False
    duration_ms: float = 0.0
    usage: ResourceUse | None = None
    ended: bool | msgspec.UnsetType = msgspec.UNSET  # of a command in a session only, as in ExecResult
    fresh_shell: bool | msgspec.UnsetType = msgspec.UNSET


class ProcessList(msgspec.Struct, frozen=True):
    processes: list[ProcessInfo]


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session and its shell. A dead one's next command gets a fresh shell."""

    id: str
    state: Literal["alive", "dead"]
    shell: str  # its program: "/usr/bin/bash"
    pid: int | None  # the shell's; None while it is dead
    user: str
    started_at: str  # of the shell
    cwd: str  # where the shell was after its last command
    busy: bool = False  # a command runs
    waiting: int = 0  # commands behind it
    commands: int = 0  # begun so far, in all of the session's shells
    exit_code: int | None = None  # of the last shell that ended
    signal: str | None = None


class SessionList(msgspec.Struct, frozen=True):
    sessions: list[SessionInfo]


class InterruptResult(msgspec.Struct, frozen=True, kw_only=True):
    interrupted: bool  # False: no command ran
    id: str | None = None  # of the command


class TerminalInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A terminal's state; the outcome's fields are null while its process runs."""

    id: str
    pid: int | None
    state: Literal["starting", "running", "ended"]
    command: str | list[str]
    cols: int
    rows: int
    started_at: str
    exit_code: int | None = None
    signal: str | None = None
    reason: Reason | None = None
    message: str | None = None
    descendants_left: bool = False
    output_bytes: int = 0  # produced in total: the offset that the next byte will have
    kept_from: int = 0  # the first byte that can still be replayed
    connections: int = 0
    controlled: bool = False  # whether one of them types


class TerminalList(msgspec.Struct, frozen=True):
    terminals: list[TerminalInfo]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # undecodable bytes as surrogate escapes are sent as `name_base64` instead, `name` then being a rendering
    path: str
    type: Literal["file", "directory", "symlink", "fifo", "socket", "char_device", "block_device", "unknown"]
    size: int
    mode: int  # permission bits
    uid: int
    gid: int
    mtime: str
    etag: str | None = None
    target: str | None = None  # a symlink's
    name_base64: str | msgspec.UnsetType = msgspec.UNSET


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[FileEntry]
    truncated: bool = False
    next: str | None = None  # give as `after=` for the next page


class ChmodResult(msgspec.Struct, frozen=True, kw_only=True):
    entry: FileEntry
    changed: int
    failed: int  # below the top: not the user's to change
    truncated: bool = False  # too many or too deep for one call; the same call again goes on


class SearchMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A file, or with `content` one line of it."""

    path: str
    type: Literal["file", "directory", "symlink", "fifo", "socket", "char_device", "block_device", "unknown"]
    size: int
    line: int | None = None  # from 1
    column: int | None = None  # from 1, in characters
    text: str | None = None  # of the line, at most 400 characters around the match
    path_base64: str | msgspec.UnsetType = msgspec.UNSET  # where the path is no UTF-8


class SearchSkips(msgspec.Struct, frozen=True, kw_only=True):
    """What was not searched, by reason."""

    binary: int = 0  # files with a NUL near their beginning
    large: int = 0  # files over `max_file_bytes`
    unreadable: int = 0
    slow: int = 0  # files that the regular expression could not be done with in time
    too_deep: int = 0  # directories below `depth`


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    matches: list[SearchMatch]
    truncated: bool = False  # by limit, depth or deadline
    next: str | None = None  # give as `after=` to go on
    files_searched: int  # whose content was looked at
    skipped: SearchSkips


class ArchiveUnpacked(msgspec.Struct, frozen=True, kw_only=True):
    """What `PUT /v1/archive` put in place."""

    path: str  # the directory
    entries: int
    files: int
    bytes: int  # of the files together


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    working_set_bytes: int  # usage less inactive page cache, as kubelet counts it
    usage_bytes: int
    limit_bytes: int | None
    oom_kills: int
    source: str  # "cgroup2", "cgroup1" or "processes"


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    usage_ms: float  # since the pod's start, all cores
    throttled_ms: float
    limit_cores: float | None
    cores: int
    source: str


class PidsUse(msgspec.Struct, frozen=True, kw_only=True):
    current: int
    limit: int | None
    source: str


class DiskUse(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    used_bytes: int
    limit_bytes: int
    inodes_used: int
    inodes_limit: int


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    ppid: int
    name: str
    user: str
    rss_bytes: int
    cpu_ms: float
    threads: int
    process_id: str | None = None  # of ours, where the tree it belongs to is known


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    at: str
    memory: MemoryUse
    cpu: CpuUse
    pids: PidsUse
    disk: DiskUse
    processes: list[ProcessUse]
    processes_truncated: bool = False


class UsageSample(msgspec.Struct, frozen=True, tag="usage", kw_only=True):
    """One line of `/v1/usage/stream`. What is counted since "before" is so for this reader; null in its first line."""

    elapsed_sec: float | None  # since the sample before
    cpu_ms: float | None  # used since, all cores
    cpu_cores: float | None  # the same as cores kept busy
    throttled_ms: float | None
    usage: UsageReport


class LeaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    bound: bool
    sandbox_id: str | None
    boot_id: str  # this executor's life
    operations: int  # under way now
    running: int  # commands and background processes
    terminals: int = 0  # open ones, which count as work only while something is typed or shown
    quiet_for_sec: float  # 0 while work runs
    quiet_left_sec: float | None  # None: no such deadline
    hard_left_sec: float | None
    unclaimed_left_sec: float | None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The open answer of `/healthz` and `/readyz`: no ids."""

    status: Literal["ok", "starting", "degraded", "shutting_down"]
    message: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    retryable: bool
    details: dict[str, Any] = {}


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


# ── events of a streamed command ────────────────────────────────────────────────────────────────────────────────


class Started(msgspec.Struct, frozen=True, tag="started", kw_only=True):
    id: str
    pid: int | None
    joined: bool = False


class _Output(msgspec.Struct, frozen=True, kw_only=True):
    offset: int  # bytes of this stream before this piece, counted from the command's start
    end_offset: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    data_base64: str | msgspec.UnsetType = msgspec.UNSET


class StdoutEvent(_Output, frozen=True, tag="stdout"):
    pass


class StderrEvent(_Output, frozen=True, tag="stderr"):
    pass


class Gap(msgspec.Struct, frozen=True, tag="gap", kw_only=True):
    """`bytes` of the stream from `offset` on were dropped; the next piece starts after them."""

    stream: StreamName
    offset: int
    bytes: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", kw_only=True):
    at: str


class Exit(msgspec.Struct, frozen=True, tag="exit", kw_only=True):
    """The one terminal event: `ExecResult` less the output."""

    id: str
    pid: int | None
    exit_code: int
    signal: str | None
    reason: Reason
    message: str | None = None
    timed_out: bool
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    descendants_left: bool
    started_at: str
    duration_ms: float
    usage: ResourceUse
    ended: bool | msgspec.UnsetType = msgspec.UNSET  # of a command in a session only, as in ExecResult
    fresh_shell: bool | msgspec.UnsetType = msgspec.UNSET


class StreamError(msgspec.Struct, frozen=True, tag="error", kw_only=True):
    """The stream ends without an outcome; the command's id still has it, or will."""

    error: ErrorBody


CommandEvent = Started | StdoutEvent | StderrEvent | Gap | Heartbeat | Exit | StreamError


class ServerSentLines:
    """A command's events as `text/event-stream`: the JSON events as data, their type as the event's name, and as its
    id how far each stream is told of: `<bytes of stdout>-<bytes of stderr>`. Heartbeats are comments."""

    def __init__(self) -> None:
        self._ends = {"stdout": 0, "stderr": 0}

    def write(self, event: msgspec.Struct) -> bytes:
        if isinstance(event, Heartbeat):
            return b": heartbeat %b\n\n" % event.at.encode()
        if isinstance(event, StdoutEvent | StderrEvent):
            self._ends["stdout" if isinstance(event, StdoutEvent) else "stderr"] = event.end_offset
        elif isinstance(event, Gap):
            self._ends[event.stream] = event.offset + event.bytes
        name, id = str(event.__struct_config__.tag), f"{self._ends['stdout']}-{self._ends['stderr']}"
        # JSON has no raw line break, so that one data line holds it.
        return f"event: {name}\nid: {id}\ndata: ".encode() + _ENCODER.encode(event) + b"\n\n"


# ── events of a watched directory ───────────────────────────────────────────────────────────────────────────────


class WatchStarted(msgspec.Struct, frozen=True, tag="watching", kw_only=True):
    """From now on nothing is missed."""

    path: str
    directories: int
    truncated: bool = False  # there are more directories than can be watched


class _FileChange(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    is_directory: bool
    path_base64: str | msgspec.UnsetType = msgspec.UNSET  # where the path is no UTF-8


class FileCreated(_FileChange, frozen=True, tag="created"):
    """Also what was moved in from elsewhere. May come twice for what was made in a directory that is new itself."""


class FileModified(_FileChange, frozen=True, tag="modified"):
    """Content; writes in quick succession are one event."""


class FileDeleted(_FileChange, frozen=True, tag="deleted"):
    """Also what was moved away."""


class FileAttributes(_FileChange, frozen=True, tag="attributes"):
    """Mode, owner, times or the number of links."""


class FileMoved(_FileChange, frozen=True, tag="moved"):
    """Within what is watched; `path` is where it is now."""

    source: str
    source_base64: str | msgspec.UnsetType = msgspec.UNSET


class WatchOverflow(msgspec.Struct, frozen=True, tag="overflow", kw_only=True):
    """Events are missing: list the directory again. The watch goes on."""

    reason: Literal["events", "directories"]  # too many at once; more directories than can be watched
    message: str


class WatchEnded(msgspec.Struct, frozen=True, tag="ended", kw_only=True):
    """The directory itself was deleted, moved or unmounted. The last event."""

    reason: Literal["deleted", "moved", "unmounted"]


FileEvent = FileCreated | FileModified | FileDeleted | FileAttributes | FileMoved
WatchEvent = WatchStarted | FileEvent | WatchOverflow | WatchEnded | Heartbeat


# ── binary frames: type byte, 4-byte big-endian length, payload ─────────────────────────────────────────────────

FRAME_STARTED: Final = 0x01
FRAME_STDOUT: Final = 0x02  # 8-byte big-endian offset, bytes
FRAME_STDERR: Final = 0x03
FRAME_HEARTBEAT: Final = 0x04
FRAME_GAP: Final = 0x05
FRAME_EXIT: Final = 0x06
FRAME_ERROR: Final = 0x07
FRAME_START: Final = 0x10
FRAME_STDIN: Final = 0x11
FRAME_STDIN_EOF: Final = 0x12
FRAME_SIGNAL: Final = 0x13
FRAME_RESIZE: Final = 0x14
FRAME_PONG: Final = 0x15
MAX_FRAME_BYTES: Final = 16 * MiB

# A WebSocket's own end. What was refused closes with 4000 + the error's status: 4401, 4404, 4409 and so on.
CLOSE_DONE: Final = 1000  # after the exit frame
CLOSE_TAKEN_OVER: Final = 4001  # another connection controls the terminal now; its process runs on
CLOSE_STALLED: Final = 4008  # nothing came from the client for three heartbeats
CLOSE_REFUSED: Final = 4000


class OutputFrame(msgspec.Struct, frozen=True):
    """Decoded 0x02 or 0x03."""

    stream: StreamName
    offset: int
    data: bytes


FrameEvent = Started | OutputFrame | Gap | Heartbeat | Exit | StreamError


class MalformedFrame(ValueError):
    """Bytes that are no frame of ours. The stream cannot be read on."""


_JSON_FRAMES: Final[dict[int, Any]] = {
    FRAME_STARTED: Started,
    FRAME_HEARTBEAT: Heartbeat,
    FRAME_GAP: Gap,
    FRAME_EXIT: Exit,
    FRAME_ERROR: StreamError,
}
_FRAME_OF: Final[dict[type, int]] = {kind: code for code, kind in _JSON_FRAMES.items()}
_DECODERS: Final = {code: msgspec.json.Decoder(kind) for code, kind in _JSON_FRAMES.items()}
_ENCODER: Final = msgspec.json.Encoder()


def frame(kind: int, payload: bytes) -> bytes:
    return kind.to_bytes(1, "big") + len(payload).to_bytes(4, "big") + payload


def event_frame(event: Started | Gap | Heartbeat | Exit | StreamError) -> bytes:
    return frame(_FRAME_OF[type(event)], _ENCODER.encode(event))


def output_frame_header(stream: StreamName, offset: int, length: int) -> bytes:
    """The 13 bytes before a frame's output, so that the output itself need not be copied."""
    kind = FRAME_STDOUT if stream == "stdout" else FRAME_STDERR
    return kind.to_bytes(1, "big") + (length + 8).to_bytes(4, "big") + offset.to_bytes(8, "big")


def event_message(event: Started | Gap | Heartbeat | Exit | StreamError) -> bytes:
    """The event as one WebSocket message: type byte and payload."""
    return _FRAME_OF[type(event)].to_bytes(1, "big") + _ENCODER.encode(event)


def output_message(stream: StreamName, offset: int, data: bytes) -> bytes:
    kind = FRAME_STDOUT if stream == "stdout" else FRAME_STDERR
    return kind.to_bytes(1, "big") + offset.to_bytes(8, "big") + data


def decode_frame(kind: int, payload: bytes) -> FrameEvent | None:
    """The event in a frame from the executor; None for a kind this version does not know. Raises MalformedFrame."""
    if kind in (FRAME_STDOUT, FRAME_STDERR):
        if len(payload) < 8:
            raise MalformedFrame(f"an output frame of {len(payload)} bytes has no offset")
        stream: StreamName = "stdout" if kind == FRAME_STDOUT else "stderr"
        return OutputFrame(stream, int.from_bytes(payload[:8], "big"), payload[8:])
    decoder = _DECODERS.get(kind)
    if decoder is None:
        return None
    try:
        event: FrameEvent = decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        raise MalformedFrame(str(why)) from why
    return event


class FrameReader:
    """Cuts a byte stream into frames; keeps at most one frame's bytes."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._kept = bytearray()
        self._max = max_bytes

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames completed by `data`, each payload copied once. Raises MalformedFrame for one over the bound."""
        kept, frames, at = self._kept, list[tuple[int, bytes]](), 0
        with memoryview(data) as view:
            if kept:  # a frame that began earlier: only what it lacks is joined to it
                at = max(0, 5 - len(kept))
                kept += view[:at]
                if len(kept) < 5:
                    return frames
                lacking = 5 + self._length(kept) - len(kept)
                kept += view[at : at + lacking]
                if len(view) - at < lacking:
                    return frames
                at += lacking
                with memoryview(kept) as whole:
                    frames.append((kept[0], bytes(whole[5:])))
                kept.clear()
            while len(view) - at >= 5:
                end = at + 5 + self._length(view[at : at + 5])
                if end > len(view):
                    break
                frames.append((view[at], bytes(view[at + 5 : end])))
                at = end
            kept += view[at:]
        return frames

    def _length(self, head: bytearray | memoryview) -> int:
        length = int.from_bytes(head[1:5], "big")
        if length > self._max:
            raise MalformedFrame(f"a frame of {length} bytes is over the bound of {self._max}")
        return length

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame: not 0 at the end of a stream means that it was cut."""
        return len(self._kept)


# ── checks that the types alone cannot make ─────────────────────────────────────────────────────────────────────


def bad_field(request: ExecRequest) -> tuple[str, str] | None:
    """(field, what is wrong with it) of the first bad field; None where the request can be run.

    Whether the pod allows `user`, and whether `cwd` exists, only the executor can say."""
    if isinstance(request.command, str):
        if not request.command.strip():
            return "command", "is empty"
    elif not request.command or not request.command[0]:
        return "command", "needs a program as its first entry"
    for text in (request.command,) if isinstance(request.command, str) else request.command:
        if "\0" in text:
            return "command", "holds a NUL character, which no program can be given"
    if request.cwd is not None and (not request.cwd or "\0" in request.cwd):
        return "cwd", "is empty or holds a NUL character"
    if request.env and (what := bad_env(request.env)) is not None:
        return "env", what
    if request.stdin is not None and request.stdin_base64 is not None:
        return "stdin_base64", "cannot be given beside stdin"
    if request.user is not None and (not request.user or "\0" in request.user):
        return "user", "is empty or holds a NUL character"
    if request.timeout_sec is not None and not 0 < request.timeout_sec <= MAX_TIMEOUT_SEC:
        return "timeout_sec", f"must be over 0 and at most {MAX_TIMEOUT_SEC:.0f} seconds"
    if request.no_output_timeout_sec is not None and not 0 < request.no_output_timeout_sec <= MAX_TIMEOUT_SEC:
        return "no_output_timeout_sec", f"must be over 0 and at most {MAX_TIMEOUT_SEC:.0f} seconds"
    if not 0 <= request.grace_sec <= MAX_GRACE_SEC:
        return "grace_sec", f"must be from 0 to {MAX_GRACE_SEC:.0f} seconds"
    if not 0 <= request.max_output_bytes <= MAX_OUTPUT_BYTES:
        return "max_output_bytes", f"must be from 0 to {MAX_OUTPUT_BYTES}"
    if request.id is not None and not PROCESS_ID.match(request.id):
        return "id", "must be 1 to 128 of A-Z a-z 0-9 . _ - and start with a letter or digit"
    return None


# Variables that a shell does not let anybody set, and those that are no names to it (bash(1), Shell Variables).
_SHELL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SHELL_OWN: Final = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID", "_"})


def bad_session_env(env: Mapping[str, str]) -> str | None:
    """As `bad_env`, for the environment of one command in a session."""
    for name in env:
        if not _SHELL_NAME.match(name) or name in _SHELL_OWN:
            return f"has a name that no shell variable can have: {name[:80]!r}; give it when the session is made"
    return bad_env(env)


def bad_size(cols: int, rows: int) -> tuple[str, str] | None:
    """As `bad_field`, for a terminal's size: a hidden window's zero, or one column, would squeeze what runs in it."""
    if not 2 <= cols <= MAX_COLS:
        return "cols", f"must be from 2 to {MAX_COLS}"
    if not 1 <= rows <= MAX_ROWS:
        return "rows", f"must be from 1 to {MAX_ROWS}"
    return None


def bad_env(env: Mapping[str, str]) -> str | None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            return f"has a name that no environment can hold: {name[:80]!r}"
        if "\0" in value:
            return f"{name[:80]} holds a NUL character"
    return None


# ── ports: what may pass between a caller and a server in the pod ───────────────────────────────────────────────

PORT_IDLE_SEC: Final = 300.0  # without a byte either way
PORT_MESSAGE_BYTES: Final = 4 * MiB  # of one WebSocket message: it is whole in memory while it passes
PORT_FIELD_BYTES: Final = 8_000  # of one header or status line
PORT_HEADERS: Final = 64
EXECUTOR_PORT: Final = 8080
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}\Z")
_PORT_TARGET: Final = re.compile(r"/[\x21\x22\x24-\x7e]*\Z")
_DOT_SEGMENT: Final = re.compile(r"/(?:\.|%2e){1,2}(?:/|\Z)", re.IGNORECASE)
_FIELD_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}\Z")
_FIELD_VALUE: Final = re.compile(r"[\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]*\Z")
_OF_ONE_HOP: Final = frozenset({
    "connection", "expect", "http2-settings", "keep-alive", "proxy-authenticate", "proxy-authentication-info",
    "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_CREDENTIALS: Final = frozenset({"authorization", "x-api-key", "if-sandbox-pod"})


def port_number(text: str) -> int | None:
    """The port that a path's segment, exactly as it came, stands for; None for anything but 1 to 65535 in plain
    digits, and for the executor's own: of two spellings of one port a check would sooner or later miss one."""
    if not _PORT.match(text) or int(text) > 65_535 or int(text) == EXECUTOR_PORT:
        return None
    return int(text)


def port_target(path: str, query: str) -> str | None:
    """What to ask the server for; None where a path is no plain one, or leads out of where it is mounted."""
    target = f"{path}?{query}" if query else path
    return target if _PORT_TARGET.match(target) and not _DOT_SEGMENT.search(path) else None


def headers_to_port(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """A caller's headers without those that are ours, secret or about this one connection. Framing is whose sends."""
    passed = []
    for name, value in _of_the_message(headers):
        plain = _plain(name)
        if plain in ("host", "content-length") or plain.startswith("sec-websocket-"):
            continue
        if plain == "cookie":
            value = "; ".join(pair for each in value.split(";") if (pair := each.strip()) and not _is_our_cookie(pair))
            if not value:
                continue
        passed.append((name, value))
    return passed


def headers_from_port(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """A server's headers, likewise. Content-Length stays only where the body is not chunked, and is there once; a
    cookie is for the host that it came from and for no wider domain."""
    given = list(headers)
    lengths = {value for name, value in given if name.lower() == "content-length"}
    is_chunked = any(name.lower() == "transfer-encoding" for name, _ in given)
    passed = []
    for name, value in _of_the_message(given):
        plain = _plain(name)
        if plain.startswith("sec-websocket-") or plain == "content-length":
            continue
        if plain == "set-cookie":
            if _is_our_cookie(value):
                continue
            value = "; ".join(part for part in _parts(value) if part.partition("=")[0].strip().lower() != "domain")
        passed.append((name, value))
    if len(lengths) == 1 and not is_chunked:
        passed.append(("Content-Length", lengths.pop()))
    return passed


def _of_the_message(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    given = list(headers)
    named = {each.strip().lower() for name, value in given if name.lower() == "connection" for each in value.split(",")}
    return [
        (name, value)
        for name, value in given
        if _FIELD_NAME.match(name)
        and _FIELD_VALUE.match(value)
        and (plain := _plain(name)) not in _OF_ONE_HOP
        and plain not in named
        and plain not in _CREDENTIALS
        and not plain.startswith(("sandbox-", "x-sandbox-"))
    ]


def _plain(name: str) -> str:
    """Many servers take `_` for `-`, so both spellings are one name here."""
    return name.lower().replace("_", "-")


def _parts(cookie: str) -> list[str]:
    return [part for each in cookie.split(";") if (part := each.strip())]


def _is_our_cookie(pair: str) -> bool:
    name = pair.partition("=")[0].strip().lower()
    return name.removeprefix("__host-").removeprefix("__secure-").startswith("sojourn")
