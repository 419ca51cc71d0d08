"""`sojourn`: every command of the client, and the server's where the server is installed beside it."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import click

from sojourn.cli.audit import audit
from sojourn.cli.copy import cp
from sojourn.cli.files import ls
from sojourn.cli.keys import keys
from sojourn.cli.logs import logs
from sojourn.cli.run import exec_command
from sojourn.cli.sandboxes import sandbox
from sojourn.cli.server import doctor, serve, up
from sojourn.cli.shell import shell
from sojourn.cli.tasks import rm, top
from sojourn.errors import APIError, ConfigurationError, ConnectionFailed, SojournError, Unauthenticated

OWN_FAILURE: Final = 125  # ours, never the command's: the convention of docker and timeout(1)
INTERRUPTED: Final = 130


def _version() -> str:
    try:
        return version("sojourn")
    except PackageNotFoundError:
        return "not installed"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(_version(), prog_name="sojourn")
def cli() -> None:
    """Run an agent task's commands in its own isolated sandbox.

    A task is any name you choose. Its sandbox is made by the first command and keeps its files between commands;
    two tasks never see each other.

    \b
      sojourn up                                    start everything on this machine
      sojourn exec demo -- python3 --version        run a command in the task "demo"
      sojourn exec demo -- 'echo hi > a; cat a'     one word with shell syntax runs in bash
      sojourn shell demo                            a shell in the task's sandbox
      sojourn ls demo                               the task's files
      sojourn cp ./src demo:src                     copy a directory in; `cp demo:out .` copies one out
      sojourn rm demo                               end the task's sandbox
      sojourn sandbox create                        a sandbox that is made once and found by its id (--help)

    The server is found by SANDBOX_GATEWAY_URL and SANDBOX_API_KEY, else in the data directory that
    `sojourn up` uses (SOJOURN_DATA_DIR).

    \b
    Exit codes: `exec` and `shell` exit with the command's own code (128+n when signal n ended it);
      125 is sojourn's own failure, with the reason on stderr; 130 is Ctrl-C.
    """


for command in (up, exec_command, shell, ls, cp, top, logs, rm, sandbox, keys, audit, doctor, serve):
    cli.add_command(command)


def run() -> None:
    """The program's entry: runs, and exits."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """The exit code. Whatever fails on our side is said on stderr and gives 125."""
    try:
        code = cli.main(arguments, prog_name="sojourn", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as why:
        why.show()
        return OWN_FAILURE
    except click.UsageError as why:
        why.show()
        if "No such option" in why.message and "--" not in arguments:
            click.echo("Options of your command go behind `--`: sojourn exec TASK -- ls -l", err=True)
        return OWN_FAILURE
    except click.ClickException as why:
        why.show()
        return OWN_FAILURE
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SojournError as why:
        click.echo(f"sojourn: {_said(why)}", err=True)
        return OWN_FAILURE
    except BrokenPipeError:  # whoever read our output has left, as in `sojourn ls | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OWN_FAILURE
    except OSError as why:
        named = f"{why.filename}: {why.strerror}" if why.filename and why.strerror else str(why)
        click.echo(f"sojourn: {named}", err=True)
        return OWN_FAILURE
    return code if isinstance(code, int) else 0


def _said(error: SojournError) -> str:
    """The code, what happened, and what to do next."""
    text = f"{error.code}: {error.message}"
    match error:
        case Unauthenticated():
            text += "\n  Check SANDBOX_API_KEY; of a local stack the key is in $SOJOURN_DATA_DIR/api-key."
        case ConnectionFailed(sent=False):
            text += "\n  Is the stack running? Start it with `sojourn up`, or set SANDBOX_GATEWAY_URL."
        case APIError(details=details) if details:
            text += "".join(f"\n  {name}: {value}" for name, value in details.items())
        case ConfigurationError():
            pass
    return text
