"""`sojourn logs`: what a process wrote, and which processes there are."""

from __future__ import annotations

import os
import shlex
from typing import Final

import click

from sojourn.cli.output import print_table, size
from sojourn.cli.places import place
from sojourn.sync import Client
from sojourn.types import Gap, ProcessInfo, StreamName

_DESCRIPTORS: Final[dict[StreamName, int]] = {"stdout": 1, "stderr": 2}


@click.command()
@click.argument("task")
@click.argument("process", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on until the process has ended.")
@click.option("--stream", type=click.Choice(["stdout", "stderr"]), help="Only this one; both if not given.")
@click.option("--offset", type=click.IntRange(min=0), default=0, metavar="BYTES", help="Begin at this byte.")
def logs(task: str, process: str | None, follow: bool, stream: StreamName | None, offset: int) -> None:
    """Show what PROCESS in TASK's sandbox wrote, its stdout on ours and its stderr on ours, byte for byte.

    Without PROCESS, list the sandbox's processes by their ids, the newest last. Output that the sandbox no longer keeps
    is told of on stderr. Ctrl-C ends the showing, not the process.
    """
    with Client() as client:
        if process is None:
            if follow or stream is not None or offset:
                raise click.UsageError(f"name the process: `sojourn logs {task}` lists those there are")
            _list(place(client, task).processes())
            return
        for piece in place(client, task).process(process).output(stream, offset=offset, follow=follow):
            if isinstance(piece, Gap):
                click.echo(f"sojourn: {piece.bytes} bytes of {piece.stream} from {piece.offset} on are lost", err=True)
            else:
                _write_all(_DESCRIPTORS[piece.stream], piece.data)


def _list(processes: list[ProcessInfo]) -> None:
    rows = []
    for one in sorted(processes, key=lambda one: one.started_at or ""):
        code = "" if one.exit_code is None else str(one.exit_code)
        command = one.command if isinstance(one.command, str) else shlex.join(one.command)
        rows.append([one.id, one.state, code, size(one.stdout_bytes + one.stderr_bytes), one.started_at or "", command])
    print_table(["PROCESS", "STATE", "EXIT", "OUTPUT", "STARTED", "COMMAND"], rows, right=frozenset({2, 3}))


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
