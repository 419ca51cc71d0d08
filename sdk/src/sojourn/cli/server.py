"""`sojourn up`, `serve` and `doctor` belong to the server's distribution: found beside this one, or explained."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from typing import NoReturn

import click

from sojourn.errors import SojournError

_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}


class ServerMissing(SojournError):
    """The environment of this command has no server."""

    code = "server_not_installed"


def hand_over(command: str, arguments: tuple[str, ...]) -> NoReturn:
    """Becomes the server's own program: same process, so that signals reach it directly. Raises ServerMissing."""
    try:
        distribution("sojourn-server")
    except PackageNotFoundError:
        raise ServerMissing(
            f"`sojourn {command}` is the server's, which {sys.prefix} does not hold.\n"
            "  In Sojourn's source tree, `make up` sets it up and starts it; or install sojourn-server[manager,local]\n"
            "  into an environment of its own and run its `sojourn`."
        ) from None
    sys.stdout.flush()
    # -I: nothing in the current directory can stand in for the server's own modules
    os.execv(sys.executable, [sys.executable, "-I", "-m", "manager", command, *arguments])


@click.command(context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def up(arguments: tuple[str, ...]) -> None:
    """Start the whole stack on this machine; Ctrl-C ends it. `sojourn up --help` has the options."""
    hand_over("up", arguments)


@click.command(context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Run the manager for production. `sojourn serve --help` has the options."""
    hand_over("serve", arguments)


@click.command(context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(arguments: tuple[str, ...]) -> None:
    """Say what isolation and limits this machine really gives, and what is missing."""
    hand_over("doctor", arguments)
