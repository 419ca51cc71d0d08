"""What goes on in a sandbox: commands, processes, sessions, files, resource use. And a task, whose sandbox is made by
the first call that needs it."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from sojourn.archives import DEFAULT_MAX_BYTES, Progress, download_dir, upload_dir
from sojourn.errors import NotFound, SojournError
from sojourn.files import AsyncFiles
from sojourn.paths import task_path
from sojourn.processes import AsyncProcess, StartedProcess, new_process_id
from sojourn.sessions import AsyncSession
from sojourn.streams import START_SEC, AsyncCommandStream
from sojourn.terminals import AsyncTerminal, terminal_body
from sojourn.transport import Transport, decode, error_of
from sojourn.types import (
    ErrorBody,
    ExecResult,
    ProcessInfo,
    ProcessList,
    SandboxState,
    SessionInfo,
    SessionList,
    TerminalInfo,
    TerminalList,
    Transferred,
    UsageReport,
    UsageSample,
)

Command = str | Sequence[str]
Stdin = str | bytes | AsyncIterable[bytes]

DEFAULT_OUTPUT_BYTES: Final = 10 << 20
MAX_KEPT_BY_SERVER: Final = 64 << 20
INLINE_STDIN_BYTES: Final = 4 << 20  # more goes in pieces, beside the running command


USAGE_IDLE_SEC: Final = 60.0  # four heartbeats missed
MAX_SAMPLE_BYTES: Final = 4 << 20


class _UsageEvent(msgspec.Struct, frozen=True):
    """What a line of the usage is: `usage`, `heartbeat` or `error`."""

    type: str
    error: ErrorBody | None = None


class AsyncPlace:
    """What can be done in a sandbox, whatever it is found by. Making the handle calls nobody."""

    def __init__(self, transport: Transport, id: str, path: str, scope: Mapping[str, str | None]) -> None:
        self.id = id
        self._transport = transport
        self._path = path
        self._scope = scope
        self.files = AsyncFiles(transport, self._path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def stream(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stdin | None = None,
        timeout_sec: float | None = None,
        no_output_timeout_sec: float | None = None,
        grace_sec: float | None = None,
        user: str | None = None,
        merge_output: bool = False,
        id: str | None = None,
        on_disconnect: Literal["continue", "kill"] | None = None,
    ) -> AsyncCommandStream:
        """The command's events as they happen. It runs in bash if it is a string, directly if it is a list.

        Without `stdin` the command reads an immediate end of input. `id` names the process: the same id again joins
        the first run instead of running again. The stream raises APIError where the command could not be started,
        and OutcomeUnknown, ConnectionFailed or DeadlineExceeded where its end was not seen."""
        body = self._body(
            command,
            cwd=cwd,
            env=env,
            timeout_sec=timeout_sec,
            no_output_timeout_sec=no_output_timeout_sec,
            grace_sec=grace_sec,
            user=user,
            merge_output=merge_output or None,
            id=id or new_process_id(),
            on_disconnect=on_disconnect,
        )
        source: AsyncIterable[bytes] | None = None
        if stdin is not None:
            raw = stdin.encode() if isinstance(stdin, str) else stdin
            if isinstance(raw, bytes) and len(raw) <= INLINE_STDIN_BYTES:
                body["stdin_base64"] = base64.b64encode(raw).decode()
            else:
                body["stdin_open"] = True
                source = _once(raw) if isinstance(raw, bytes) else raw
        return AsyncCommandStream(self._transport, self._path, body, stdin=source)

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stdin | None = None,
        timeout_sec: float | None = None,
        no_output_timeout_sec: float | None = None,
        grace_sec: float | None = None,
        user: str | None = None,
        merge_output: bool = False,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        id: str | None = None,
        check: bool = False,
    ) -> ExecResult:
        """Runs the command and waits for its end; arguments as for `stream`.

        A command that fails, or is stopped by its own `timeout_sec`, is a result; with `check` it raises
        CommandFailed. Of each output stream at most `max_output_bytes` are kept, head and tail."""
        stream = self.stream(
            command,
            cwd=cwd,
            env=env,
            stdin=stdin,
            timeout_sec=timeout_sec,
            no_output_timeout_sec=no_output_timeout_sec,
            grace_sec=grace_sec,
            user=user,
            merge_output=merge_output,
            id=id,
        )
        result = await stream.collect(max_output_bytes)
        return result.check() if check else result

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout_sec: float | None = None,
        no_output_timeout_sec: float | None = None,
        grace_sec: float | None = None,
        user: str | None = None,
        merge_output: bool = False,
        id: str | None = None,
    ) -> AsyncProcess:
        """Starts the command in the background. Without `stdin` its input stays open for `write_stdin`."""
        body = self._body(
            command,
            cwd=cwd,
            env=env,
            timeout_sec=timeout_sec,
            no_output_timeout_sec=no_output_timeout_sec,
            grace_sec=grace_sec,
            user=user,
            merge_output=merge_output or None,
            id=id or new_process_id(),
        )
        if stdin is not None:
            raw = stdin.encode() if isinstance(stdin, str) else stdin
            body["stdin_base64"] = base64.b64encode(raw).decode()
        answer = await self._transport.call(
            "POST",
            f"{self._path}/processes",
            retry="safe",
            json=body,
            headers={"Idempotency-Key": body["id"]},
            deadline_sec=START_SEC,
        )
        return self.process(decode(answer.body, StartedProcess).id)

    def process(self, process_id: str) -> AsyncProcess:
        """The handle of a process that runs or ran in the task's sandbox."""
        return AsyncProcess(self._transport, self._path, process_id)

    async def processes(self) -> list[ProcessInfo]:
        """The commands that the task's sandbox runs or has lately run."""
        answer = await self._transport.call("GET", f"{self._path}/processes", retry="safe")
        return decode(answer.body, ProcessList).processes

    async def session(
        self,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        id: str | None = None,
    ) -> AsyncSession:
        """Starts a shell whose state persists from command to command. The same `id` again is the same session."""
        given = {"cwd": cwd, "env": None if env is None else dict(env), "user": user, "id": id, **self._scope}
        answer = await self._transport.call(
            "POST",
            f"{self._path}/sessions",
            retry="safe",
            json={name: value for name, value in given.items() if value is not None},
            headers={"Idempotency-Key": id or new_process_id()},
            deadline_sec=START_SEC,
        )
        return self.session_by_id(decode(answer.body, SessionInfo).id)

    def session_by_id(self, session_id: str) -> AsyncSession:
        """The handle of a session that was made before."""
        return AsyncSession(self._transport, self._path, session_id)

    async def sessions(self) -> list[SessionInfo]:
        """The sessions of the task's sandbox, dead ones included."""
        answer = await self._transport.call("GET", f"{self._path}/sessions", retry="safe")
        return decode(answer.body, SessionList).sessions

    async def terminal(
        self,
        command: Command | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cols: int = 80,
        rows: int = 24,
        id: str | None = None,
    ) -> AsyncTerminal:
        """Opens a terminal with the command on it, or with an interactive shell. The same `id` again is the same
        terminal."""
        body = terminal_body(
            command=command if command is None or isinstance(command, str) else list(command), cwd=cwd,
            env=None if env is None else dict(env), user=user, cols=cols, rows=rows, id=id, **self._scope,
        )  # fmt: skip
        answer = await self._transport.call(
            "POST",
            f"{self._path}/terminals",
            retry="safe",
            json=body,
            headers={"Idempotency-Key": id or new_process_id()},
            deadline_sec=START_SEC,
        )
        return self.terminal_by_id(decode(answer.body, TerminalInfo).id)

    def terminal_by_id(self, terminal_id: str) -> AsyncTerminal:
        """The handle of a terminal that is open, or ended a short while ago."""
        return AsyncTerminal(self._transport, self._path, terminal_id)

    async def terminals(self) -> list[TerminalInfo]:
        """The terminals of the task's sandbox, and those that ended a short while ago."""
        answer = await self._transport.call("GET", f"{self._path}/terminals", retry="safe")
        return decode(answer.body, TerminalList).terminals

    async def upload_dir(
        self, local: str | os.PathLike[str], remote: str = ".", *, progress: Progress | None = None
    ) -> Transferred:
        """Copies what is in the local directory into `remote`, made if need be: all of it, or nothing.

        Modes, empty directories and links that stay inside are kept; `left` names what is not copied. `progress` is
        called with the bytes so far."""
        return await upload_dir(self._transport, self._path, local, remote, progress)

    async def download_dir(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        progress: Progress | None = None,
    ) -> Transferred:
        """Copies what is in the sandbox's directory into `local`, made if need be: all of it, or nothing.

        Nothing is written outside `local`, whatever the sandbox sends, and no link in it leads out. Raises
        UnexpectedAnswer for an archive that is damaged or over `max_bytes`, FileExistsError where a directory would
        have to replace a file or the other way round."""
        return await download_dir(self._transport, self._path, remote, local, max_bytes, progress)

    async def usage(self) -> UsageReport:
        """What the sandbox uses now, against its limits. Raises NotFound or SandboxGone where there is none."""
        answer = await self._transport.call("GET", f"{self._path}/usage", retry="safe")
        return decode(answer.body, UsageReport)

    async def usage_stream(self, interval_sec: int = 2) -> AsyncGenerator[UsageSample, None]:
        """What the sandbox uses, at once and then every `interval_sec` (1 to 60), for as long as you read on.

        Raises NotFound or SandboxGone where there is no sandbox, ConnectionFailed where the connection breaks."""
        async with self._transport.open(
            "GET", f"{self._path}/usage/stream", params={"interval_sec": str(interval_sec)}, idle_sec=USAGE_IDLE_SEC
        ) as response:
            kept = b""
            async for data in response.content.iter_any():
                *lines, kept = (kept + data).split(b"\n")
                if len(kept) > MAX_SAMPLE_BYTES:
                    raise SojournError("a sample of the usage is too long")
                for line in lines:
                    event = decode(line, _UsageEvent)
                    if event.error is not None:
                        raise error_of(event.error)
                    if event.type == "usage":
                        yield decode(line, UsageSample)

    def _body(self, command: Command, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"command": command if isinstance(command, str) else list(command)}
        env = fields.pop("env")
        if env is not None:
            body["env"] = dict(env)
        given = {**fields, **self._scope}
        return body | {name: value for name, value in given.items() if value is not None}


class AsyncTask(AsyncPlace):
    """A handle on one task of the caller's project. Making the handle calls nobody."""

    def __init__(self, transport: Transport, task_id: str, *, profile: str | None, region: str | None) -> None:
        super().__init__(transport, task_id, task_path(task_id), {"profile": profile, "region": region})

    async def info(self) -> SandboxState:
        """The task's sandbox: its stage, lease and pod. Raises NotFound for a task that was never used."""
        answer = await self._transport.call("GET", self._path, retry="safe")
        return decode(answer.body, SandboxState)

    async def delete(self) -> None:
        """Ends the task's sandbox with all that is in it. No error where there is none."""
        try:
            await self._transport.call("DELETE", self._path, retry="safe")
        except NotFound:
            pass


async def _once(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data
