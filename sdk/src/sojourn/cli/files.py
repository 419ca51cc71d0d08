"""`sojourn ls`: the project's sandboxes, or the files of one task."""

from __future__ import annotations

import stat
from typing import Final

import click

from sojourn.cli.output import print_json, print_table, size
from sojourn.cli.places import place
from sojourn.sync import Client
from sojourn.types import FileEntry, SandboxState

_KINDS: Final = {"directory": "d", "symlink": "l", "fifo": "p", "socket": "s", "char_device": "c", "block_device": "b"}


@click.command(
    epilog="""\b
Examples:
  sojourn ls                  the project's sandboxes
  sojourn ls demo             the workspace of the task "demo"
  sojourn ls demo src         a directory of it
  sojourn ls demo --json      for programs""",
)
@click.argument("task", required=False)
@click.argument("path", default=".")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def ls(task: str | None, path: str, as_json: bool) -> None:
    """List the sandboxes, or the files of TASK's sandbox."""
    with Client() as client:
        if task is None:
            sandboxes = client.sandboxes()
            if as_json:
                print_json(sandboxes)
            else:
                print_table(("TASK", "STAGE", "LEASE", "PROFILE", "SANDBOX"), [_sandbox(one) for one in sandboxes])
            return
        entries = place(client, task).files.list(path)
    if as_json:
        print_json(entries)
        return
    print_table(("MODE", "SIZE", "MODIFIED", "NAME"), [_entry(one) for one in entries], right=frozenset({1}))


def _sandbox(sandbox: SandboxState) -> list[str]:
    left = "" if sandbox.lease is None else f"{sandbox.lease.left_sec:.0f} s"
    return [sandbox.task_id or "", sandbox.stage, left, sandbox.profile or "", sandbox.sandbox_id]


def _entry(entry: FileEntry) -> list[str]:
    mode = _KINDS.get(entry.type, "-") + stat.filemode(entry.mode)[1:]
    name = entry.name + ("/" if entry.type == "directory" else "") + (f" -> {entry.target}" if entry.target else "")
    return [mode, size(entry.size), (entry.mtime or "")[:19].replace("T", " "), name]
