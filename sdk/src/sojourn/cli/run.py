"""`sojourn exec`: a command in a sandbox that behaves like a local one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Final

import click
import msgspec

from sojourn.capture import Capture
from sojourn.cli.places import async_place
from sojourn.cli.stdin import stdin_of_this_process
from sojourn.client import AsyncClient
from sojourn.errors import APIError, SojournError
from sojourn.streams import AsyncCommandStream
from sojourn.tasks import DEFAULT_OUTPUT_BYTES, AsyncPlace, Command
from sojourn.types import ExecResult, Exit, Output, Started, Where

KILL_WAIT_SEC: Final = 10.0  # for the end of a command that the second Ctrl-C killed
_ONE_WORD: Final = re.compile(r"[A-Za-z0-9_@%+:,./-]+\Z")


@click.command(
    "exec",
    epilog="""\b
Examples:
  sojourn exec demo -- python3 -c 'print(1 + 1)'     several words: run directly, no shell
  sojourn exec demo -- 'make test | tee log'         one word with shell syntax: run by bash
  sojourn exec demo --cwd src --env CI=1 -- make     in a directory, with an environment
  sojourn exec demo --timeout 60 -- ./slow           TERM, then KILL, after a minute
  tar c . | sojourn exec demo -- tar x               stdin goes to the command
  while read f; do sojourn exec -n demo -- wc "$f"; done <list     -n leaves stdin to the loop""",
)
@click.argument("task")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
@click.option("--cwd", metavar="DIR", help="Directory to run in; relative to the workspace.")
@click.option("--env", "-e", multiple=True, metavar="NAME[=VALUE]", help="Set a variable; without =, pass yours on.")
@click.option("--timeout", "timeout_sec", type=float, metavar="SEC", help="End the command after so long.")
@click.option("--profile", metavar="NAME", help="The operator's profile for a new sandbox.")
@click.option("--no-stdin", "-n", is_flag=True, help="The command reads end of input; ours is left alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with outcome and output at the end.")
def exec_command(
    task: str,
    command: tuple[str, ...],
    cwd: str | None,
    env: tuple[str, ...],
    timeout_sec: float | None,
    profile: str | None,
    no_stdin: bool,
    as_json: bool,
) -> int:
    """Run COMMAND in TASK's sandbox, like a local command.

    Input, output and errors pass through as they are, and the exit code is the command's. Ctrl-C sends INT to the
    command, a second one kills it. A sandbox is made if the task has none.
    """
    runner = Runner(
        what=chosen_form(command),
        cwd=cwd,
        env=environment_of(env),
        timeout_sec=timeout_sec,
        no_stdin=no_stdin,
        as_json=as_json,
    )
    return asyncio.run(runner.run(task, profile))


def chosen_form(words: tuple[str, ...]) -> Command:
    """Several words are run as they are; a single one too if it is just a program's name, else bash gets it."""
    if len(words) == 1 and not _ONE_WORD.match(words[0]):
        return words[0]
    return list(words)


def environment_of(given: tuple[str, ...]) -> dict[str, str]:
    """Of `--env` options. Raises UsageError for one to pass on that is not there."""
    return dict(_variable(text) for text in given)


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given:
        if name not in os.environ:
            raise click.UsageError(f"--env {name}: there is no such variable here to pass on")
        value = os.environ[name]
    return name, value


class Runner:
    """One command with its signals and streams."""

    def __init__(
        self,
        *,
        what: Command,
        cwd: str | None,
        env: dict[str, str],
        timeout_sec: float | None,
        no_stdin: bool,
        as_json: bool,
    ) -> None:
        self._what = what
        self._cwd = cwd
        self._env = env
        self._timeout_sec = timeout_sec
        self._no_stdin = no_stdin
        self._as_json = as_json
        self._stream: AsyncCommandStream | None = None
        self._running = False  # the command has started, so that signals can reach it
        self._waiting: list[str] = []  # signals that came before that
        self._interrupts = 0
        self._told: int | None = None  # the signal that asked us to end
        self._sending: set[asyncio.Task[None]] = set()

    async def run(self, task_id: str, profile: str | None) -> int:
        """The command's exit code. Raises SojournError where there is none."""
        async with AsyncClient() as client:
            main = asyncio.current_task()
            assert main is not None
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, self._interrupted, main)
            for forwarded in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(forwarded, self._told_to_end, forwarded, main)
            try:
                ended, where = await self._whole(async_place(client, task_id, profile))
            except asyncio.CancelledError:
                if self._told is not None:
                    return 128 + self._told
                if self._interrupts < 2:
                    raise
                raise KeyboardInterrupt from None
            finally:
                for sending in self._sending:
                    sending.cancel()
            _explain(ended, where)
            return ended.exit_code

    async def _whole(self, task: AsyncPlace) -> tuple[Exit, Where]:
        source = None if self._no_stdin else stdin_of_this_process()
        self._stream = task.stream(
            self._what, cwd=self._cwd, env=self._env, timeout_sec=self._timeout_sec, stdin=source
        )
        capture = Capture(DEFAULT_OUTPUT_BYTES)
        async with self._stream as events:
            async for event in events:
                if isinstance(event, Started):
                    self._has_started()
                elif isinstance(event, Exit):
                    if self._as_json:
                        click.echo(as_json(capture.result(event, events.where)))
                    return event, events.where
                elif self._as_json:
                    capture.add(event)
                elif isinstance(event, Output):
                    await self._write(event)
                else:
                    click.echo(f"sojourn: {event.bytes} bytes of {event.stream} were lost", err=True)
        raise SojournError("the stream ended without an outcome")

    async def _write(self, piece: Output) -> None:
        """To our own stdout or stderr. In a thread: a reader that does not read must not stop us from seeing Ctrl-C."""
        descriptor = 1 if piece.stream == "stdout" else 2
        try:
            await asyncio.to_thread(_write_all, descriptor, piece.data)
        except BrokenPipeError:  # as in `sojourn exec ... | head`: the command learns it the way a local one does
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            self._pass_on("PIPE")

    # ── signals ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _interrupted(self, main: asyncio.Task[int]) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._pass_on("INT")
        elif self._interrupts == 2 and self._running:
            click.echo("sojourn: killing the command", err=True)
            self._pass_on("KILL")
            asyncio.get_running_loop().call_later(KILL_WAIT_SEC, main.cancel)
        else:
            main.cancel()

    def _told_to_end(self, number: signal.Signals, main: asyncio.Task[int]) -> None:
        """Passes the signal on. A command that does not end by it is killed, and we end either way."""
        if self._told is not None:
            main.cancel()
            return
        self._told = int(number)
        self._pass_on(number.name.removeprefix("SIG"))
        loop = asyncio.get_running_loop()
        loop.call_later(KILL_WAIT_SEC, self._pass_on, "KILL")
        loop.call_later(KILL_WAIT_SEC + 1, main.cancel)

    def _has_started(self) -> None:
        self._running = True
        for name in self._waiting:
            self._pass_on(name)
        self._waiting.clear()

    def _pass_on(self, name: str) -> None:
        if not self._running:
            self._waiting.append(name)
            return
        sending = asyncio.get_running_loop().create_task(self._send(name), name=f"send-{name}")
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _send(self, name: str) -> None:
        assert self._stream is not None
        try:
            await self._stream.process.signal(name)
        except APIError:
            pass  # it has just ended
        except SojournError as why:
            click.echo(f"sojourn: {name} could not be sent: {why.message}", err=True)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _explain(ended: Exit, where: Where) -> None:
    """What the exit code alone does not say."""
    if where.previous is not None and where.workspace == "fresh":
        why = where.previous.reason
        click.echo(f"sojourn: the task's last sandbox ended ({why}); this one began with an empty workspace", err=True)
    if ended.reason not in ("exited", "signaled", "cancelled", "spawn_failed"):  # those were asked for, or say it
        click.echo(f"sojourn: {ended.message or ended.reason}", err=True)


def as_json(result: ExecResult) -> str:
    """One line: the outcome, where it ran, and the output as text."""
    where = {name: getattr(result.where, name) for name in Where.__struct_fields__}
    fields = (
        msgspec.to_builtins(result.exit)
        | where
        | {"stdout": result.stdout, "stderr": result.stderr, "truncated": result.truncated}
    )
    return msgspec.json.encode(fields).decode()
