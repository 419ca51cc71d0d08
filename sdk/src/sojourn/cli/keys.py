"""`sojourn keys`: the project's API keys."""

from __future__ import annotations

import click

from sojourn.cli.output import print_json, print_table
from sojourn.sync import Client


@click.group()
def keys() -> None:
    """Make, list and revoke the project's API keys (needs an admin's key)."""


@keys.command()
@click.argument("name", default="")
@click.option("--role", type=click.Choice(["member", "admin"]), default="member", show_default=True)
@click.option("--member", metavar="EMAIL", help="The person whose key it is.")
@click.option("--expires-in", "expires_in_sec", type=float, metavar="SEC", help="Valid for so long; else for ever.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def create(name: str, role: str, member: str | None, expires_in_sec: float | None, as_json: bool) -> None:
    """Make a key. Its secret is printed on stdout, this once.

    \b
      export SANDBOX_API_KEY=$(sojourn keys create ci)
    """
    with Client() as client:
        made = client.keys.create(name, role=role, member=member, expires_in_sec=expires_in_sec)
    if as_json:
        print_json(made)
        return
    click.echo(made.key)
    click.echo(f"key {made.key_id} of {made.tenant}/{made.project}; it cannot be shown again", err=True)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def list_keys(as_json: bool) -> None:
    """List the keys, without their secrets."""
    with Client() as client:
        found = client.keys.list()
    if as_json:
        print_json(found)
        return
    rows = [
        [one.key_id, one.name, one.role, one.member or "", _day(one.created_at), _day(one.expires_at)] for one in found
    ]
    print_table(("KEY", "NAME", "ROLE", "MEMBER", "CREATED", "EXPIRES"), rows)


@keys.command()
@click.argument("key_ids", nargs=-1, required=True)
def revoke(key_ids: tuple[str, ...]) -> None:
    """Make keys invalid, at once."""
    with Client() as client:
        for key_id in key_ids:
            client.keys.revoke(key_id)


def _day(time: str | None) -> str:
    return "never" if time is None else time[:10]
