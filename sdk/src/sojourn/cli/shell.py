"""`sojourn shell`: a terminal in a sandbox that feels like ssh."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from typing import Final

import click

from sojourn.cli.escape import Escapes
from sojourn.cli.localtty import LocalTerminal, write_all
from sojourn.cli.places import async_place
from sojourn.cli.run import chosen_form, environment_of
from sojourn.cli.stdin import stdin_of_this_process
from sojourn.client import AsyncClient
from sojourn.errors import SojournError, TakenOver
from sojourn.tasks import AsyncPlace
from sojourn.terminals import AsyncTerminal, AsyncTerminalConnection
from sojourn.types import Exit, Gap, Output

FORGET_SEC: Final = 3.0  # for ending what has ended anyway
MAX_TYPED_AHEAD: Final = 1024  # pieces, mostly one key each, while the far side takes none
END_AGAIN_SEC: Final = (0.5, 1.0, 2.0, 4.0, 8.0)  # the pauses before the end of input is typed again
LEFT: Final = 0  # the exit code of leaving with `~.`


@click.command(
    "shell",
    epilog="""\b
Examples:
  sojourn shell demo                        an interactive shell in the task "demo"
  sojourn shell demo -- python3             another program on the terminal
  sojourn shell demo --attach ID            go on with a terminal that was left
  sojourn shell demo --attach ID --view     look on without typing

At the start of a line: `~.` leaves (the terminal goes on, and can be attached again), `~~` is a tilde.""",
)
@click.argument("task")
@click.argument("command", nargs=-1, metavar="[-- COMMAND...]", type=click.UNPROCESSED)
@click.option("--cwd", metavar="DIR", help="Directory to start in; relative to the workspace.")
@click.option("--env", "-e", multiple=True, metavar="NAME[=VALUE]", help="Set a variable; without =, pass yours on.")
@click.option("--profile", metavar="NAME", help="The operator's profile for a new sandbox.")
@click.option("--attach", "terminal_id", metavar="ID", help="Connect to this terminal instead of opening one.")
@click.option("--view", is_flag=True, help="With --attach: only look on.")
def shell(
    task: str,
    command: tuple[str, ...],
    cwd: str | None,
    env: tuple[str, ...],
    profile: str | None,
    terminal_id: str | None,
    view: bool,
) -> int:
    """Open a terminal in TASK's sandbox: a shell, or COMMAND.

    It behaves like ssh: every key goes to the far side, its size follows yours, and the exit code is the shell's. A
    connection that breaks is taken up again where it broke. A sandbox is made if the task has none.
    """
    if view and terminal_id is None:
        raise click.UsageError("--view needs --attach: there is nothing to look at yet")
    if terminal_id is not None and (command or cwd or env):
        raise click.UsageError("--attach goes on with what runs: it takes no command, --cwd or --env")
    session = _Session(task, terminal_id, view)
    return asyncio.run(session.run(profile, command, cwd, environment_of(env)))


class _Session:
    """One terminal between two ends."""

    def __init__(self, task_id: str, terminal_id: str | None, view: bool) -> None:
        self._task_id = task_id
        self._terminal_id = terminal_id
        self._view = view
        self._local = LocalTerminal()
        self._ended_by: int | None = None  # a signal to this process
        self._left = False

    async def run(self, profile: str | None, command: tuple[str, ...], cwd: str | None, env: dict[str, str]) -> int:
        """The exit code. Raises SojournError where there is none."""
        async with AsyncClient() as client:
            task = async_place(client, self._task_id, profile)
            terminal = await self._opened(task, command, cwd, env)
            connection = terminal.connect(
                mode="view" if self._view else "control", on_break=lambda why: self._local.say(f"{why}; trying again")
            )
            with self._local.raw():
                try:
                    await self._between(connection)
                except BaseException:
                    self._local.restore(reset=True)
                    raise
                if connection.exit is None:
                    self._local.restore(reset=True)
            return await self._finished(terminal, connection.exit)

    async def _opened(
        self, task: AsyncPlace, command: tuple[str, ...], cwd: str | None, env: dict[str, str]
    ) -> AsyncTerminal:
        if self._terminal_id is not None:
            return task.terminal_by_id(self._terminal_id)
        cols, rows = self._local.size()
        what = chosen_form(command) if command else None
        return await task.terminal(what, cwd=cwd, env=env or None, cols=cols, rows=rows)

    async def _finished(self, terminal: AsyncTerminal, ended: Exit | None) -> int:
        if ended is not None:
            if not self._view:
                await _forget(terminal)
            if ended.reason not in ("exited", "signaled"):
                self._local.say(ended.message or ended.reason)
            return ended.exit_code
        again = f"sojourn shell {shlex.quote(self._task_id)} --attach {terminal.id}"
        self._local.say(f"left; what runs there goes on. To come back: {again}")
        return 128 + self._ended_by if self._ended_by is not None else LEFT

    # ── the session ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _between(self, connection: AsyncTerminalConnection) -> None:
        """Until the terminal's process has ended or we leave."""
        loop = asyncio.get_running_loop()
        showing = asyncio.create_task(self._show(connection), name="terminal-output")
        typing = asyncio.create_task(self._type(connection, showing), name="terminal-input")
        resizing: set[asyncio.Task[None]] = set()

        def resized() -> None:
            task = loop.create_task(connection.resize(*self._local.size()), name="terminal-resize")
            resizing.add(task)
            task.add_done_callback(resizing.discard)

        def told_to_end(number: int) -> None:
            self._ended_by = number
            showing.cancel()

        if not self._view:
            loop.add_signal_handler(signal.SIGWINCH, resized)
            if self._terminal_id is not None and self._local.interactive:
                resized()  # the terminal has the size of whoever had it before
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, told_to_end, number)
        if not self._local.interactive:
            loop.add_signal_handler(signal.SIGINT, told_to_end, signal.SIGINT)
        try:
            await showing
        except asyncio.CancelledError:
            if self._ended_by is None and not self._left:
                raise
        finally:
            for task in (typing, showing, *resizing):
                task.cancel()
            await asyncio.gather(typing, showing, *resizing, return_exceptions=True)

    async def _show(self, connection: AsyncTerminalConnection) -> None:
        try:
            async with connection:
                async for event in connection:
                    if isinstance(event, Output):
                        # In a thread: a terminal that does not take it must not keep us from the keys.
                        await asyncio.to_thread(write_all, self._local.out_fd, event.data)
                    elif isinstance(event, Gap):
                        self._local.say(f"{event.bytes} bytes of output were lost")
        except TakenOver as why:
            self._local.restore(reset=True)
            raise SojournError(why.message) from why

    async def _type(self, connection: AsyncTerminalConnection, showing: asyncio.Task[None]) -> None:
        source = stdin_of_this_process()
        if source is None:
            if not self._view and not os.isatty(0):  # closed, or /dev/null; a terminal is another job's for now
                await _end_input(connection)
            return
        keys: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_TYPED_AHEAD)
        delivering = asyncio.create_task(_deliver(keys, connection), name="terminal-keys")
        escapes = Escapes()
        try:
            async for data in source:
                typed = escapes.feed(data) if self._local.interactive else data
                if typed and not self._view:
                    await self._put(keys, typed)
                if escapes.left:
                    self._left = True
                    showing.cancel()
                    return
            if not self._view:
                await keys.put(escapes.end())
                await keys.put(None)
                await delivering
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    async def _put(self, keys: asyncio.Queue[bytes | None], typed: bytes) -> None:
        """A pipe waits for the far side. A person does not: `~.` must be heard while nothing else gets through."""
        if not self._local.interactive:
            await keys.put(typed)
            return
        try:
            keys.put_nowait(typed)
        except asyncio.QueueFull:
            write_all(self._local.out_fd, b"\a")


async def _deliver(keys: asyncio.Queue[bytes | None], connection: AsyncTerminalConnection) -> None:
    while (typed := await keys.get()) is not None:
        await connection.write(typed)
    await _end_input(connection)


async def _end_input(connection: AsyncTerminalConnection) -> None:
    """More than once: a program that sets its terminal up only then, as a shell's line editor does, throws away what
    was typed before."""
    await connection.end_input()
    for pause_sec in END_AGAIN_SEC:
        await asyncio.sleep(pause_sec)
        await connection.end_input()


async def _forget(terminal: AsyncTerminal) -> None:
    try:
        async with asyncio.timeout(FORGET_SEC):
            await terminal.delete()
    except (SojournError, TimeoutError):
        pass  # it has ended; the sandbox forgets it by itself
