"""`sojourn audit`: who changed what in the project, when and from where."""

from __future__ import annotations

from typing import Final

import click

from sojourn.cli.output import print_json, print_table
from sojourn.sync import Client
from sojourn.types import AuditEvent

_PAGE: Final = 500


@click.command()
@click.option("--since", metavar="TIME", help="Only events from then on: 2026-01-31T12:00:00Z.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="At most so many.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def audit(since: str | None, limit: int, as_json: bool) -> None:
    """Show the project's audit log, oldest first (needs an admin's key)."""
    found: list[AuditEvent] = []
    after: str | None = None
    with Client() as client:
        while len(found) < limit:
            page = client.audit(since=since, after=after, limit=min(_PAGE, limit - len(found)))
            found += page.events
            after = page.next
            if after is None:
                break
    if as_json:
        print_json(found)
        return
    rows = [
        [event.at, event.action, event.subject, event.member or event.by, event.address, _said(event)]
        for event in found
    ]
    print_table(("WHEN", "WHAT", "ON", "WHO", "FROM", ""), rows)
    if after is not None:
        click.echo(f"there are more: these are the first {limit}; --since and --limit show others", err=True)


def _said(event: AuditEvent) -> str:
    return " ".join(f"{name}={value}" for name, value in event.details.items())
