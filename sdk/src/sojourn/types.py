"""What the server answers, as this client reads it. Fields that it does not know are ignored, so that an old client
survives a new server; fields that an older server may leave out have defaults. Sizes are bytes, times RFC 3339.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sojourn.errors import CommandFailed

StreamName = Literal["stdout", "stderr"]


class ResourceUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of a command and the descendants it waited for."""

    user_ms: float = 0.0
    system_ms: float = 0.0
    max_rss_bytes: int = 0


class Previous(msgspec.Struct, frozen=True, kw_only=True):
    """How the task's last pod ended: `destroyed`, `expired`, `evicted`, `oom`, `node_lost` or `lost`."""

    reason: str
    at: str | float | None = None


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox that a command ran in, and how it came to it."""

    sandbox_id: str | None = None
    pod_id: str | None = None
    provisioned: str | None = None  # `bound`, `warm` or `cold`
    workspace: str | None = None  # `kept`, `restored` or `fresh`
    previous: Previous | None = None


# ── events of a command ─────────────────────────────────────────────────────────────────────────────────────────


class Started(Where, frozen=True, kw_only=True):
    """The command runs. The first event of every stream."""

    id: str
    pid: int | None = None
    joined: bool = False  # the id was known: this is the run that it already names


class Output(msgspec.Struct, frozen=True):
    """A piece of output, exact bytes; `offset` is how many bytes of that stream came before."""

    stream: StreamName
    offset: int
    data: bytes


class Gap(msgspec.Struct, frozen=True):
    """`bytes` of the stream from `offset` on were dropped because nobody read them in time."""

    stream: StreamName
    offset: int
    bytes: int


class Exit(Where, frozen=True, kw_only=True):
    """The command has ended. The last event of every stream that did not raise."""

    id: str
    pid: int | None = None
    exit_code: int  # 128 + n for a signal, also after a timeout; 127 not found, 126 not executable
    signal: str | None = None  # "SIGKILL"
    reason: str  # `exited`, `signaled`, `timeout`, `no_output_timeout`, `cancelled`, `oom_killed`, `lost` ...
    message: str | None = None  # for people: "timed out after 10 s"
    timed_out: bool = False
    stdout_bytes: int = 0  # produced in total
    stderr_bytes: int = 0
    truncated: bool = False
    descendants_left: bool = False
    started_at: str | None = None
    duration_ms: float = 0.0
    usage: ResourceUse | None = None
    shell_ended: bool = msgspec.field(default=False, name="ended")  # of a session: the shell and its state are gone
    fresh_shell: bool = False  # it began in a new shell, since the session's last one had ended


Event = Started | Output | Gap | Exit


class TerminalInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A terminal's state; the outcome's fields are None while its process runs."""

    id: str
    pid: int | None = None
    state: str = "running"  # or `starting`, `ended`
    command: str | list[str] = ""
    cols: int = 0
    rows: int = 0
    started_at: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    reason: str | None = None
    message: str | None = None
    output_bytes: int = 0  # shown in total: the offset of the next byte
    kept_from: int = 0  # the first byte that can still be replayed
    connections: int = 0
    controlled: bool = False  # whether one of them types


class TerminalList(msgspec.Struct, frozen=True):
    terminals: list[TerminalInfo]


class Captured(msgspec.Struct, frozen=True):
    """One stream's bytes as far as they were kept: all of them in `head`, or a head and a tail with a gap between."""

    head: bytes
    tail: bytes = b""
    dropped: int = 0  # bytes between the two

    @property
    def raw(self) -> bytes:
        return self.head + self.tail

    def text(self) -> str:
        """As text: bytes that are no UTF-8 replaced, and what is missing said in its place."""
        if not self.dropped:
            return self.raw.decode("utf-8", "replace")
        return (
            self.head.decode("utf-8", "ignore")
            + f"\n[... {self.dropped} bytes dropped ...]\n"
            + self.tail.decode("utf-8", "ignore")
        )


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, with its output."""

    exit: Exit
    where: Where
    captured: dict[StreamName, Captured]

    @property
    def id(self) -> str:
        return self.exit.id

    @property
    def exit_code(self) -> int:
        return self.exit.exit_code

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with exit code 0."""
        return self.exit.exit_code == 0 and self.exit.reason == "exited"

    @property
    def signal(self) -> str | None:
        return self.exit.signal

    @property
    def reason(self) -> str:
        return self.exit.reason

    @property
    def message(self) -> str | None:
        return self.exit.message

    @property
    def timed_out(self) -> bool:
        return self.exit.timed_out

    @property
    def duration_ms(self) -> float:
        return self.exit.duration_ms

    @property
    def usage(self) -> ResourceUse | None:
        return self.exit.usage

    @property
    def shell_ended(self) -> bool:
        """Whether the session's shell is gone, and its state with it."""
        return self.exit.shell_ended

    @property
    def fresh_shell(self) -> bool:
        """Whether the command began in a new shell, since the session's last one had ended."""
        return self.exit.fresh_shell

    @property
    def stdout(self) -> str:
        return self.captured["stdout"].text()

    @property
    def stderr(self) -> str:
        return self.captured["stderr"].text()

    @property
    def stdout_raw(self) -> bytes:
        return self.captured["stdout"].raw

    @property
    def stderr_raw(self) -> bytes:
        return self.captured["stderr"].raw

    @property
    def truncated(self) -> bool:
        """Whether output is missing: more than `max_output_bytes` of a stream, or lost before it was read."""
        return any(kept.dropped > 0 for kept in self.captured.values())

    def check(self) -> ExecResult:
        """This result itself. Raises CommandFailed unless `ok`."""
        if not self.ok:
            raise CommandFailed(self)
        return self


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A command's state; the outcome's fields are None while it runs."""

    id: str
    pid: int | None = None
    state: str  # `starting`, `running` or `ended`
    command: str | list[str] = ""
    started_at: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    reason: str | None = None
    message: str | None = None
    timed_out: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    descendants_left: bool = False
    duration_ms: float = 0.0
    usage: ResourceUse | None = None
    shell_ended: bool = msgspec.field(default=False, name="ended")  # of a command in a session, as in Exit
    fresh_shell: bool = False

    @property
    def ended(self) -> bool:
        return self.state == "ended"

    def as_exit(self) -> Exit:
        """The outcome of an ended command, as the event that a stream of it ends with."""
        return Exit(
            id=self.id,
            pid=self.pid,
            exit_code=-1 if self.exit_code is None else self.exit_code,
            signal=self.signal,
            reason=self.reason or "lost",
            message=self.message,
            timed_out=self.timed_out,
            stdout_bytes=self.stdout_bytes,
            stderr_bytes=self.stderr_bytes,
            truncated=self.truncated,
            descendants_left=self.descendants_left,
            started_at=self.started_at,
            duration_ms=self.duration_ms,
            usage=self.usage,
            shell_ended=self.shell_ended,
            fresh_shell=self.fresh_shell,
        )


class ProcessList(msgspec.Struct, frozen=True):
    processes: list[ProcessInfo]


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session and its shell. A dead one's next command gets a fresh shell."""

    id: str
    state: str  # `alive` or `dead`
    shell: str = ""  # its program
    pid: int | None = None
    user: str = ""
    started_at: str | None = None
    cwd: str = ""  # where the shell was after its last command
    busy: bool = False  # a command runs
    waiting: int = 0  # commands behind it
    commands: int = 0  # begun so far
    exit_code: int | None = None  # of the last shell that ended
    signal: str | None = None


class SessionList(msgspec.Struct, frozen=True):
    sessions: list[SessionInfo]


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: str
    type: str  # `file`, `directory`, `symlink`, ...
    size: int = 0
    mode: int = 0  # permission bits
    uid: int = 0
    gid: int = 0
    mtime: str | None = None
    etag: str | None = None
    target: str | None = None  # a symlink's
    name_base64: str | None = None  # the exact name where it is not UTF-8; `name` is then a rendering


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[FileEntry]
    truncated: bool = False
    next: str | None = None


class ChmodResult(msgspec.Struct, frozen=True, kw_only=True):
    entry: FileEntry
    changed: int = 0
    failed: int = 0  # below the top: not the user's to change
    truncated: bool = False  # too many or too deep for one call


class SearchMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A file, or with `content` one line of it."""

    path: str
    type: str
    size: int = 0
    line: int | None = None  # from 1
    column: int | None = None  # from 1, in characters
    text: str | None = None  # of the line, around the match
    path_base64: str | None = None  # the exact path where it is not UTF-8


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A page of matches. `skipped` counts what was not looked at, by reason."""

    matches: list[SearchMatch]
    truncated: bool = False  # by limit, depth or deadline
    next: str | None = None  # for `after`, to go on
    files_searched: int = 0
    skipped: dict[str, int] = {}


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """What `watch` tells. `overflow` means that events are missing; `ended` that the directory is gone."""

    type: str  # `watching`, `created`, `modified`, `deleted`, `attributes`, `moved`, `overflow`, `ended`
    path: str | None = None
    source: str | None = None  # where a moved thing was
    is_directory: bool = False
    directories: int | None = None  # that are watched, in `watching`
    truncated: bool = False
    reason: str | None = None  # of `overflow` and `ended`
    message: str | None = None
    path_base64: str | None = None
    source_base64: str | None = None


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was not copied as it is."""

    path: str  # below the directory
    reason: str


class Transferred(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy of a directory brought over; `left` names the first of what it did not."""

    entries: int
    bytes: int  # of the files together
    left: list[Left] = []


# ── resource use ────────────────────────────────────────────────────────────────────────────────────────────────


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    working_set_bytes: int
    usage_bytes: int = 0
    limit_bytes: int | None = None
    oom_kills: int = 0
    source: str = ""


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    usage_ms: float  # since the pod's start, all cores
    throttled_ms: float = 0.0
    limit_cores: float | None = None
    cores: int = 0
    source: str = ""


class PidsUse(msgspec.Struct, frozen=True, kw_only=True):
    current: int
    limit: int | None = None
    source: str = ""


class DiskUse(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    used_bytes: int
    limit_bytes: int = 0
    inodes_used: int = 0
    inodes_limit: int = 0


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    ppid: int = 0
    name: str = ""
    user: str = ""
    rss_bytes: int = 0
    cpu_ms: float = 0.0
    threads: int = 0
    process_id: str | None = None


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the sandbox uses against its limits."""

    at: str
    memory: MemoryUse
    cpu: CpuUse
    pids: PidsUse
    disk: DiskUse
    processes: list[ProcessUse] = []
    processes_truncated: bool = False


class UsageSample(msgspec.Struct, frozen=True, kw_only=True):
    """One of `usage_stream`: the figures but `usage` are of the time since the sample before, None in the first."""

    elapsed_sec: float | None
    cpu_ms: float | None  # used, all cores
    cpu_cores: float | None  # the same as cores kept busy
    throttled_ms: float | None
    usage: UsageReport


# ── sandboxes and keys ──────────────────────────────────────────────────────────────────────────────────────────


class LeaseState(msgspec.Struct, frozen=True, kw_only=True):
    until: str  # the sandbox is reclaimed then, unless something renews the lease
    hard_end: str | None = None  # whatever renews it
    operations: int = 0
    left_sec: float = 0.0


class SandboxState(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox. `stage`: `starting`, `active` (operations run), `idle`, or `reclaimed` (it has no pod)."""

    sandbox_id: str
    task_id: str | None = None  # None: a long-lived sandbox
    state: str | None = None  # of a long-lived one
    name: str | None = None
    image: str = ""
    image_digest: str = ""  # of what its pod runs on, where that has one
    stage: str
    profile: str | None = None
    target: str | None = None
    region: str | None = None
    generation: int = 0  # 1 for the task's first pod
    pod_id: str | None = None
    created_at: str | None = None
    lease: LeaseState | None = None
    previous: Previous | None = None
    ended: Previous | None = None
    usage: UsageReport | None = None  # of one that was asked for by its id


class KeptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the keeping or restoring of a workspace is."""

    bytes: int
    total_bytes: int | None = None


class LongLivedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A long-lived sandbox. `state`: `creating`, `running`, `stopping`, `stopped`, `starting`, `failed` (its pod was
    lost; what was kept last can be started) or `destroyed`."""

    sandbox_id: str
    state: str
    reason: str = ""  # why it is in this state
    since: str | None = None
    name: str = ""
    profile: str | None = None
    target: str | None = None
    region: str | None = None
    autostop_sec: int = 0
    ttl_sec: int = 0
    autostart: bool = False
    created_at: str | None = None
    expires_at: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    env_names: list[str] = msgspec.field(default_factory=list)
    pod_id: str | None = None
    lease: LeaseState | None = None
    progress: KeptProgress | None = None


class LongLivedSandboxList(msgspec.Struct, frozen=True, kw_only=True):
    sandboxes: list[LongLivedSandbox]
    next: str | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What was in a sandbox's workspace at a moment; nobody changes it."""

    snapshot_id: str
    name: str = ""
    created_at: str | None = None
    sandbox_id: str | None = None
    stored_bytes: int = 0
    keep_until: str | None = None  # None: until it is deleted


class SnapshotList(msgspec.Struct, frozen=True, kw_only=True):
    snapshots: list[Snapshot]
    next: str | None = None


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What a project holds of its concurrency, cpu and memory; a limit of None is none."""

    tenant: str
    project: str
    slots_held: int
    slots_limit: int | None = None
    cpu_held: float = 0.0
    cpu_limit: float | None = None
    memory_held_bytes: int = 0
    memory_limit_bytes: int | None = None


class QuotaList(msgspec.Struct, frozen=True):
    quotas: list[Quota]


class SandboxList(msgspec.Struct, frozen=True):
    sandboxes: list[SandboxState]


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change: who made it, what it was, when and from where. `by`: a key's id, or a part of the server."""

    event_id: str
    at: str
    action: str
    subject: str
    by: str
    role: str | None = None
    member: str | None = None
    address: str = ""
    details: dict[str, str | int | float | bool | None] = {}


class AuditPage(msgspec.Struct, frozen=True):
    events: list[AuditEvent]
    next: str | None = None  # `after` of the next page


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An API key, without its secret."""

    key_id: str
    name: str = ""
    tenant: str = ""
    project: str = ""
    role: str = ""
    member: str | None = None
    created_at: str | None = None
    expires_at: str | None = None


class KeyCreated(KeyInfo, frozen=True, kw_only=True):
    """A new key. `key` is shown this once."""

    key: str


class KeyList(msgspec.Struct, frozen=True):
    keys: list[KeyInfo]


# ── the server's errors and health ──────────────────────────────────────────────────────────────────────────────


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str = ""
    retryable: bool = False
    details: dict[str, Any] = {}


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    message: str | None = None
