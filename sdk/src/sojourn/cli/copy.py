"""`sojourn cp`: files and directories into a task's sandbox and out of it."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from typing import Final

import click

from sojourn.cli.output import clean, size
from sojourn.cli.places import place
from sojourn.errors import FileMissing, NotFound, SandboxGone, SojournError
from sojourn.sync import Client, Sandbox, Task
from sojourn.types import Transferred

_STEP_SEC: Final = 0.1  # between two updates of the progress line


@click.command(
    epilog="""\b
Examples:
  sojourn cp a.txt demo:              a file into the workspace of the task "demo"
  sojourn cp ./src demo:              a directory, as src in the workspace
  sojourn cp ./src/. demo:app         what is in a directory, into app
  sojourn cp demo:out/report.html .   a file out of the sandbox
  sojourn cp demo:out ./results       a directory out of it
  sojourn cp demo:. ./all             the whole workspace

A local path with a colon before its first slash is written ./like:this.""",
)
@click.argument("source")
@click.argument("target")
@click.option("--quiet", "-q", is_flag=True, help="No progress, and no word on what was left out.")
def cp(source: str, target: str, quiet: bool) -> int:
    """Copy SOURCE to TARGET, one of which is TASK:PATH.

    Directories are copied with all that is in them; as with cp, into TARGET where that is a directory. Modes are kept.
    Links that lead out of the directory, FIFOs, sockets and devices are left out and named.
    """
    remote_source, remote_target = split(source), split(target)
    if (remote_source is None) == (remote_target is None):
        raise click.UsageError("One of SOURCE and TARGET must be TASK:PATH, the other a local path.")
    progress = ProgressLine(shown=not quiet and sys.stderr.isatty())
    with Client() as client:
        if remote_target is not None:
            done = upload(place(client, remote_target[0]), Path(source), source, remote_target[1], progress)
        else:
            assert remote_source is not None
            done = download(place(client, remote_source[0]), remote_source[1], Path(target), progress)
    progress.end()
    if done is not None and not quiet:
        for left in done.left:
            click.echo(f"sojourn: not copied: {clean(left.path)}: {left.reason}", err=True)
    return 0


def split(word: str) -> tuple[str, str] | None:
    """(task, path) of TASK:PATH; None for a local path. As in scp, a slash before the first colon makes it local."""
    task, colon, path = word.partition(":")
    if not colon or not task or "/" in task:
        return None
    return task, path or "."


def upload(task: Task | Sandbox, source: Path, given: str, path: str, progress: ProgressLine) -> Transferred | None:
    mode = source.stat().st_mode
    wants_content = given.rstrip("/").endswith("/.") or given in (".", "..")
    if path.endswith("/") or _is_directory(task, path):
        path = path if wants_content and stat.S_ISDIR(mode) else f"{path.rstrip('/') or '/'}/{_name(source)}"
    if stat.S_ISDIR(mode):
        return task.upload_dir(source, path, progress=progress.at)
    if not stat.S_ISREG(mode):
        raise SojournError(f"{source} is neither a file nor a directory")
    task.files.write(path, source, mode=stat.S_IMODE(mode) & 0o777)
    progress.at(source.stat().st_size)
    return None


def download(task: Task | Sandbox, path: str, target: Path, progress: ProgressLine) -> Transferred | None:
    entry = task.files.stat(path)
    name = path.rstrip("/").rpartition("/")[2]
    if target.is_dir() and name not in (".", "..", ""):
        target = target / name
    if entry.type == "directory":
        return task.download_dir(path, target, progress=progress.at)
    if not target.parent.is_dir():
        raise SojournError(f"there is no directory {target.parent} on this machine; make it first")
    part = target.parent / f".{target.name}.{os.getpid()}.part"  # the old file stays until the new one is whole
    try:
        progress.at(task.files.download(path, part))
        part.chmod(entry.mode & 0o777)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return None


def _name(source: Path) -> str:
    return source.name if source.name not in ("", "..") else source.resolve().name


def _is_directory(task: Task | Sandbox, path: str) -> bool:
    """Of a sandbox that is not there yet, the workspace is one."""
    try:
        return task.files.stat(path).type == "directory"
    except FileMissing:
        return False
    except (NotFound, SandboxGone):
        return path.rstrip("/") in (".", "")


class ProgressLine:
    """`12.5 MiB` on a terminal, rewritten in place."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._next = 0.0
        self._bytes = 0

    def at(self, count: int) -> None:
        self._bytes = count
        now = time.monotonic()
        if self._shown and now >= self._next:
            self._next = now + _STEP_SEC
            click.echo(f"\r{size(count)}\x1b[K", err=True, nl=False)

    def end(self) -> None:
        if self._shown:
            click.echo(f"\r{size(self._bytes)} copied\x1b[K", err=True)
