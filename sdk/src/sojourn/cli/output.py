"""Tables and figures for people; JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import msgspec


def print_json(value: object) -> None:
    """One line of JSON."""
    click.echo(msgspec.json.encode(value).decode())


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Columns as wide as their widest cell; heads only where a person looks on. `right`: columns of figures."""
    lines = [[clean(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        lines.insert(0, list(heads))
    widths = [max((len(line[at]) for line in lines), default=0) for at in range(len(heads))]
    for line in lines:
        cells = [cell.rjust(widths[at]) if at in right else cell.ljust(widths[at]) for at, cell in enumerate(line)]
        click.echo("  ".join(cells).rstrip())


def clean(text: str) -> str:
    """Names and texts out of a sandbox are an attacker's: no control character reaches the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def size(count: float | None) -> str:
    """Bytes in the largest unit that leaves at least one: `512 B`, `1.5 MiB`."""
    if count is None:
        return "no limit"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
