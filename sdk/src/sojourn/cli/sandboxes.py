"""`sojourn sandbox`: long-lived sandboxes, made once and used by their id."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import click

from sojourn.cli.copy import ProgressLine, cp
from sojourn.cli.files import ls
from sojourn.cli.logs import logs
from sojourn.cli.output import print_json, print_table, size
from sojourn.cli.places import GROUP, for_sandboxes
from sojourn.cli.run import exec_command
from sojourn.cli.shell import shell
from sojourn.cli.tasks import top
from sojourn.sync import Client, Sandbox
from sojourn.types import LongLivedSandbox

_LOOK_SEC: Final = 1.0


@click.group(GROUP)
def sandbox() -> None:
    """Make long-lived sandboxes, work in them, and end them.

    A task's sandbox comes and goes with its commands; one of these is made once and has an id. It keeps its files from
    command to command, holds one slot of your project while it runs, and ends when its time is over.

    \b
      id=$(sojourn sandbox create --name build)         make one; its id is printed
      sojourn sandbox exec $id -- 'git clone ... src'   run a command in it
      sojourn sandbox shell $id                         a shell in it
      sojourn sandbox cp $id:src/out .                  copy a directory out
      sojourn sandbox list                              what there is, and in which state
      sojourn sandbox stop $id                          keep its files, give pod and slot back
      sojourn sandbox start $id                         a pod again, with the same files
      sojourn sandbox fork $id                          another one with the same files
      sojourn sandbox snapshot $id --name v1            its files as they are now, for good
      sojourn sandbox rm $id                            end it for good
    """


@sandbox.command()
@click.option("--name", default="", help="For people; need not be the only one.")
@click.option("--profile", metavar="NAME", help="The operator's profile; default: the project's own.")
@click.option(
    "--autostop", "autostop_sec", type=click.IntRange(1), metavar="SEC", help="Stopped when quiet so long [1800]."
)
@click.option("--ttl", "ttl_sec", type=click.IntRange(1), metavar="SEC", help="Ended so long after its making [14400].")
@click.option("--autostart", is_flag=True, help="A call to it while it is stopped starts it.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="A variable of every command in it.")
@click.option("--metadata", "-m", multiple=True, metavar="KEY=VALUE", help="Yours to find it by.")
@click.option("--archive", "archive_url", metavar="URL", help="What is in this https archive is in it at first.")
@click.option("--sha256", metavar="HEX", help="Of the archive; another one is refused.")
@click.option("--prefix", metavar="URL", help="What lies below this prefix of a bucket is in it at first.")
@click.option("--snapshot", "snapshot_id", metavar="ID", help="What is in this snapshot is in it at first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the id.")
def create(
    name: str,
    profile: str | None,
    autostop_sec: int | None,
    ttl_sec: int | None,
    autostart: bool,
    env: tuple[str, ...],
    metadata: tuple[str, ...],
    archive_url: str | None,
    sha256: str | None,
    prefix: str | None,
    snapshot_id: str | None,
    as_json: bool,
) -> None:
    """Make a sandbox and print its id. It runs when this returns.

    \b
      id=$(sojourn sandbox create --name tests --ttl 3600)
      id=$(sojourn sandbox create --archive https://storage.example/task.zip)
    """
    given = {"archive_url": archive_url, "sha256": sha256, "prefix": prefix, "snapshot_id": snapshot_id}
    source = {field: value for field, value in given.items() if value is not None}
    with Client() as client:
        made = client.long_lived.create(
            name=name, profile=profile, autostop_sec=autostop_sec, ttl_sec=ttl_sec, autostart=autostart,
            env=_pairs(env, "--env"), metadata=_pairs(metadata, "--metadata"), source=source or None,
        )  # fmt: skip
        if as_json:
            print_json(made.info())
        else:
            click.echo(made.id)


@sandbox.command("list")
@click.option("--state", metavar="STATE,...", help="Only these; `destroyed` are shown only where asked for.")
@click.option("--name", help="Only those of this name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def list_sandboxes(state: str | None, name: str | None, as_json: bool) -> None:
    """List the project's long-lived sandboxes."""
    with Client() as client:
        found = client.long_lived.list(state=state, name=name)
    if as_json:
        print_json(found)
        return
    rows = [
        [one.sandbox_id, one.name, one.state, one.reason, _minute(one.since), _minute(one.expires_at)] for one in found
    ]
    print_table(("ID", "NAME", "STATE", "WHY", "SINCE", "ENDS"), rows)


@sandbox.command()
@click.argument("sandbox_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(sandbox_id: str, as_json: bool) -> None:
    """Show what ID is, in which state and since when."""
    with Client() as client:
        _show(client.sandbox(sandbox_id).info(), as_json)


@sandbox.command("set")
@click.argument("sandbox_id", metavar="ID")
@click.option("--name", help="Another name.")
@click.option("--autostop", "autostop_sec", type=click.IntRange(1), metavar="SEC", help="Stop it when quiet so long.")
@click.option("--ttl", "ttl_sec", type=click.IntRange(1), metavar="SEC", help="End it so long after its making.")
@click.option("--autostart/--no-autostart", default=None, help="Whether a call starts it while it is stopped.")
@click.option("--metadata", "-m", multiple=True, metavar="KEY=VALUE", help="All of its metadata from now on.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def change(
    sandbox_id: str,
    name: str | None,
    autostop_sec: int | None,
    ttl_sec: int | None,
    autostart: bool | None,
    metadata: tuple[str, ...],
    as_json: bool,
) -> None:
    """Change ID's name, times or metadata. What is not given stays as it is."""
    with Client() as client:
        changed = client.sandbox(sandbox_id).change(
            name=name, autostop_sec=autostop_sec, ttl_sec=ttl_sec, autostart=autostart,
            metadata=_pairs(metadata, "--metadata") if metadata else None,
        )  # fmt: skip
    _show(changed, as_json)


@sandbox.command()
@click.argument("sandbox_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stop(sandbox_id: str, as_json: bool) -> None:
    """Keep ID's files, then give its pod and slot back.

    How far that is is shown on stderr. Where the files cannot be kept it runs on.
    """
    with Client() as client:
        _show(_moved(client.sandbox(sandbox_id), "stopping", lambda one, sec: one.stop(wait_sec=sec)), as_json)


@sandbox.command()
@click.argument("sandbox_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def start(sandbox_id: str, as_json: bool) -> None:
    """Give ID a pod and a slot again, with its files as they were last kept."""
    with Client() as client:
        _show(_moved(client.sandbox(sandbox_id), "starting", lambda one, sec: one.resume(wait_sec=sec)), as_json)


@sandbox.command()
@click.argument("sandbox_id", metavar="ID")
@click.option("--name", default="", help="For people.")
@click.option("--autostart", is_flag=True, help="A call to it while it is stopped starts it.")
def fork(sandbox_id: str, name: str, autostart: bool) -> None:
    """Make a sandbox with what is in ID's workspace now, and print its id. ID runs on."""
    with Client() as client:
        click.echo(client.sandbox(sandbox_id).fork(name=name, autostart=autostart).id)


@sandbox.command()
@click.argument("sandbox_id", metavar="ID")
@click.option("--name", default="", help="For people.")
def snapshot(sandbox_id: str, name: str) -> None:
    """Keep what is in ID's workspace now, for good, and print the snapshot's id. ID runs on.

    \b
      sojourn sandbox create --snapshot $(sojourn sandbox snapshot $id)
    """
    with Client() as client:
        click.echo(client.sandbox(sandbox_id).snapshot(name).snapshot_id)


@sandbox.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def snapshots(as_json: bool) -> None:
    """List the project's snapshots."""
    with Client() as client:
        found = client.long_lived.snapshots()
    if as_json:
        print_json(found)
        return
    rows = [
        [one.snapshot_id, one.name, one.sandbox_id or "", size(one.stored_bytes), _minute(one.created_at),
         _minute(one.keep_until) or "never"]
        for one in found
    ]  # fmt: skip
    print_table(("SNAPSHOT", "NAME", "OF", "SIZE", "TAKEN", "ENDS"), rows)


@sandbox.command("rm-snapshot")
@click.argument("snapshot_ids", metavar="SNAPSHOT...", nargs=-1, required=True)
def remove_snapshots(snapshot_ids: tuple[str, ...]) -> None:
    """Delete snapshots. What others share with them stays."""
    with Client() as client:
        for snapshot_id in snapshot_ids:
            client.long_lived.delete_snapshot(snapshot_id)


@sandbox.command()
@click.argument("sandbox_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--purge", is_flag=True, help="Keep nothing of it; else its last files stay a week, as a snapshot.")
@click.option("--force", is_flag=True, help="Also where its workspace cannot be kept.")
def rm(sandbox_ids: tuple[str, ...], purge: bool, force: bool) -> None:
    """End sandboxes for good. No error where that was done already."""
    with Client() as client:
        for sandbox_id in sandbox_ids:
            client.sandbox(sandbox_id).delete(purge=purge, force=force)


@sandbox.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def quota(as_json: bool) -> None:
    """Show how many sandboxes, and how much cpu and memory, the project holds and may hold."""
    with Client() as client:
        found = client.quotas()
    if as_json:
        print_json(found[0])
        return
    for one in found:
        click.echo(f"{one.tenant}/{one.project}")
        click.echo(f"sandboxes  {one.slots_held} of {_limit(one.slots_limit)}")
        click.echo(f"cpu        {one.cpu_held:g} of {_limit(one.cpu_limit)} cores")
        click.echo(f"memory     {size(one.memory_held_bytes)} of {size(one.memory_limit_bytes)}")


for command in (exec_command, shell, ls, cp, top, logs):
    sandbox.add_command(for_sandboxes(command))


def _moved(one: Sandbox, going_on: str, move: Callable[[Sandbox, float], LongLivedSandbox]) -> LongLivedSandbox:
    """The sandbox when that is done; on a terminal it is shown meanwhile how far it is."""
    progress = ProgressLine(shown=sys.stderr.isatty())
    found = move(one, _LOOK_SEC)
    while found.state == going_on:
        if found.progress is not None:
            progress.at(found.progress.bytes)
        found = move(one, _LOOK_SEC)
    return found


def _show(one: LongLivedSandbox, as_json: bool) -> None:
    if as_json:
        print_json(one)
        return
    click.echo(f"id        {one.sandbox_id}")
    if one.name:
        click.echo(f"name      {one.name}")
    click.echo(f"state     {one.state} ({one.reason}) since {one.since}")
    click.echo(f"profile   {one.profile} on {one.target}")
    click.echo(f"stops     after {one.autostop_sec} s of quiet" + ("; a call starts it again" if one.autostart else ""))
    click.echo(f"ends      {one.expires_at}")
    if one.pod_id is not None:
        click.echo(f"pod       {one.pod_id}")
    if one.progress is not None:
        click.echo(f"progress  {size(one.progress.bytes)} of {size(one.progress.total_bytes)}")
    for key, value in sorted(one.metadata.items()):
        click.echo(f"metadata  {key}={value}")


def _pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{option} must be NAME=VALUE, not {text!r}")
        pairs[name] = value
    return pairs


def _limit(limit: float | None) -> str:
    return "no limit" if limit is None else f"{limit:g}"


def _minute(time: str | None) -> str:
    return "" if time is None else time[:16].replace("T", " ")
