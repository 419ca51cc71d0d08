"""A session of a task: a shell whose directory, variables, functions and options persist from command to command."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from sojourn.errors import NotFound, SandboxGone
from sojourn.paths import piece
from sojourn.processes import new_process_id
from sojourn.streams import AsyncCommandStream
from sojourn.transport import Transport, decode
from sojourn.types import ExecResult, SessionInfo

DEFAULT_OUTPUT_BYTES: Final = 10 << 20
TURN_SEC: Final = 86_400.0  # a command waits for the session's earlier ones, which may take as long as a command may


class AsyncSession:
    """A handle on one session. Commands given to it at once are run one after another.

    In `async with` it is closed at the end."""

    def __init__(self, transport: Transport, task: str, session_id: str) -> None:
        self._transport = transport
        self._task = task
        self.id = session_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def stream(
        self,
        command: str,
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout_sec: float | None = None,
        no_output_timeout_sec: float | None = None,
        grace_sec: float | None = None,
        merge_output: bool = False,
        id: str | None = None,
        on_disconnect: Literal["continue", "kill"] | None = None,
    ) -> AsyncCommandStream:
        """The command's events as they happen; `env` is for this command alone, and arguments are as for a task's.

        A command whose time is over is given up and the shell kept, with its state. `shell_ended` of the exit says
        that it could not be kept, or that the command ended it; the next command then has a new shell, which its exit
        tells as `fresh_shell`. Raises Conflict, once, where the shell was ended between two commands."""
        given: dict[str, Any] = {
            "env": None if env is None else dict(env),
            "timeout_sec": timeout_sec,
            "no_output_timeout_sec": no_output_timeout_sec,
            "grace_sec": grace_sec,
            "merge_output": merge_output or None,
            "on_disconnect": on_disconnect,
        }
        body = {name: value for name, value in given.items() if value is not None}
        body |= {"command": command, "id": id or new_process_id()}
        if stdin is not None:
            body["stdin_base64"] = base64.b64encode(stdin.encode() if isinstance(stdin, str) else stdin).decode()
        return AsyncCommandStream(
            self._transport, self._task, body, path=f"/sessions/{piece(self.id)}/exec", start_sec=TURN_SEC
        )

    async def exec(
        self,
        command: str,
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout_sec: float | None = None,
        no_output_timeout_sec: float | None = None,
        grace_sec: float | None = None,
        merge_output: bool = False,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        id: str | None = None,
        check: bool = False,
    ) -> ExecResult:
        """Runs the command and waits for its end; arguments as for `stream`, and as for a task's `exec`."""
        stream = self.stream(
            command,
            env=env,
            stdin=stdin,
            timeout_sec=timeout_sec,
            no_output_timeout_sec=no_output_timeout_sec,
            grace_sec=grace_sec,
            merge_output=merge_output,
            id=id,
        )
        result = await stream.collect(max_output_bytes)
        return result.check() if check else result

    async def interrupt(self, *, escalate: bool = True) -> bool:
        """Interrupts what the shell runs, as Ctrl-C does, and keeps the shell; False where it runs nothing.

        With `escalate`, a program that does not give way is ended after the command's `grace_sec`, in the end with
        the shell."""
        answer = await self._transport.call(
            "POST", self._path("/interrupt"), retry="unsent", json={"escalate": escalate}
        )
        return decode(answer.body, Interrupted).interrupted

    async def info(self) -> SessionInfo:
        """Its state now."""
        answer = await self._transport.call("GET", self._path(""), retry="safe")
        return decode(answer.body, SessionInfo)

    async def close(self, *, kill_descendants: bool = False) -> None:
        """Ends the shell and the command that it runs; with `kill_descendants` also what earlier ones left behind.

        No error where the session is not there any more."""
        params = {"kill_descendants": "true"} if kill_descendants else None
        try:
            await self._transport.call("DELETE", self._path(""), retry="safe", params=params)
        except (NotFound, SandboxGone):
            pass

    def _path(self, rest: str) -> str:
        return f"{self._task}/sessions/{piece(self.id)}{rest}"


class Interrupted(msgspec.Struct, frozen=True):
    """The answer to an interruption."""

    interrupted: bool
