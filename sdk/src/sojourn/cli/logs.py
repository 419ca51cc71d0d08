"""`sojourn logs`: what a background process wrote."""

from __future__ import annotations

import os
from typing import Final

import click

from sojourn.sync import Client
from sojourn.types import Gap, StreamName

_DESCRIPTORS: Final[dict[StreamName, int]] = {"stdout": 1, "stderr": 2}


@click.command()
@click.argument("task")
@click.argument("process")
@click.option("--follow", "-f", is_flag=True, help="Go on until the process has ended.")
@click.option("--stream", type=click.Choice(["stdout", "stderr"]), help="Only this one; both if not given.")
@click.option("--offset", type=click.IntRange(min=0), default=0, metavar="BYTES", help="Begin at this byte.")
def logs(task: str, process: str, follow: bool, stream: StreamName | None, offset: int) -> None:
    """Show what PROCESS in TASK's sandbox wrote, its stdout on ours and its stderr on ours, byte for byte.

    Output that the sandbox no longer keeps is told of on stderr. Ctrl-C ends the showing, not the process.
    """
    with Client() as client:
        for piece in client.task(task).process(process).output(stream, offset=offset, follow=follow):
            if isinstance(piece, Gap):
                click.echo(f"sojourn: {piece.bytes} bytes of {piece.stream} from {piece.offset} on are lost", err=True)
            else:
                _write_all(_DESCRIPTORS[piece.stream], piece.data)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
