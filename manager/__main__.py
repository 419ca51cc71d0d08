"""`python -m manager`: the server's command line. Settings are read here, once, and handed down."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from executor import footing
from manager.config import SETTINGS, BadConfig, ManagerConfig

PROGRAM: Final = "sojourn-server"
_ABOUT: Final = """\
Gives every task of an agent its own isolated sandbox.

  %(prog)s up       one machine, everything embedded: for trying and for development
  %(prog)s serve    production: your own Redis, one or more managers
  %(prog)s doctor   what this machine gives sandboxes, and what to do about what is missing
"""
_UP: Final = """\
Starts everything on this machine: an embedded Valkey, a warm pool of isolated local sandboxes, and the HTTP interface.
Prints the address, a key and three commands to try.

Ctrl-C ends the sandboxes and everything else. SIGTERM, or a crash, leaves the sandboxes running: the next `up` finds
them again. What is kept is in the data directory ($SOJOURN_DATA_DIR, ~/.local/share/sojourn); the development key is
in its file `api-key`.
"""
_SERVE: Final = """\
Runs a manager for production. It needs

  SOJOURN_REDIS_URL        your Redis or Valkey, with `appendonly yes` and `maxmemory-policy noeviction`
  SOJOURN_MANAGER_SECRET   what pod tokens are derived from (openssl rand -hex 32)
  SOJOURN_KEY_PEPPER       what API keys are hashed with (openssl rand -hex 32)

the two secrets the same for every manager of one Redis; ..._FILE variables name files that hold them. Make the first
API key with `keys create`. SIGTERM and Ctrl-C drain requests and leave sandboxes to the next manager.
"""
_KEYS: Final = """\
Works on the store directly, with the same settings as the manager: also while no manager runs. With `up`'s embedded
store, stop it first or use the HTTP interface: GET, POST and DELETE /api/v1/keys.
"""


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["doctor"]:  # has options of its own
        return run_doctor(argv[1:])
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except BadConfig as why:
        tell(f"{PROGRAM}: {why}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # before anything was started: from then on SIGINT is taken over


def tell(text: str, stream: Any = None) -> None:
    """A line for people; a reader that has gone is no error."""
    stream = stream or sys.stdout
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, short: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=short,
            description=text,
            epilog=_settings_help(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        _add_settings(added)
        return added

    command("up", "start everything on this machine", _UP, run_up)
    command("serve", "run a production manager", _SERVE, run_serve)
    command("config", "print the effective settings and where each came from", "Secrets are masked.", run_config)
    commands.add_parser("doctor", help="what this machine gives sandboxes, and what is missing")
    _add_keys(command("keys", "create, list and revoke API keys", _KEYS, run_keys))
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file of settings (or SOJOURN_CONFIG)")
    for setting in SETTINGS:
        if setting.flag is None:
            continue
        if setting.env is None:
            parser.add_argument(setting.flag, dest=setting.field, action="store_const", const=True, help=setting.doc)
        else:
            text = f"{setting.doc} ({setting.env})"
            parser.add_argument(setting.flag, dest=setting.field, metavar=setting.field.upper(), help=text)


def _settings_help() -> str:
    lines = ["settings from the environment (or, by the second name, from the file):"]
    for setting in SETTINGS:
        if setting.env is not None:
            name = f"  {setting.env}, {setting.field}"
            lines += [name, *textwrap.wrap(setting.doc, 100, initial_indent="      ", subsequent_indent="      ")]
    return "\n".join(lines).replace("%", "%%")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    create = actions.add_parser("create", help="make a key; its text is printed once and kept nowhere")
    create.add_argument("--tenant", default="dev")
    create.add_argument("--project", default="default")
    create.add_argument("--role", choices=("member", "admin", "platform"), default="member")
    create.add_argument("--member", metavar="EMAIL", help="the person whose key it is")
    create.add_argument("--name", default="", help="what it is for")
    create.add_argument("--expires-in-sec", type=float, metavar="SECONDS", help="until revoked, if not given")
    listing = actions.add_parser("list", help="show keys, without their secrets")
    listing.add_argument("--tenant")
    listing.add_argument("--project")
    revoke = actions.add_parser("revoke", help="make a key invalid for good")
    revoke.add_argument("key_id")


def load(
    arguments: argparse.Namespace,
    defaults: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> ManagerConfig:
    """Raises BadConfig."""
    flags = {setting.field: getattr(arguments, setting.field, None) for setting in SETTINGS if setting.flag}
    return ManagerConfig.load(os.environ if env is None else env, flags, defaults, arguments.config)


def raise_open_files() -> None:
    """Every command under way takes two connections: as many files as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            pass  # fewer connections, then


# ── commands: each imports what it needs, so that --help and config answer at once ──────────────────────────────


def check_footing(*more: str | None) -> None:
    """Before aiohttp is imported. Raises BadConfig."""
    refusals, warnings = footing.examine(os.environ)
    for warning in filter(None, (*warnings, *more)):
        logging.getLogger("manager").warning("footing", extra={"why": warning})
    if refusals:
        raise BadConfig("; ".join(refusals))


def run_up(arguments: argparse.Namespace) -> int:
    from manager import log

    config = load(arguments, {"log_level": "WARNING"})
    log.set_up(config.log_level)
    check_footing()
    from manager.run import up

    raise_open_files()
    return up(config, tell)


def run_serve(arguments: argparse.Namespace) -> int:
    from manager import log

    config = load(arguments, {"host": "0.0.0.0"})
    log.set_up(config.log_level)
    check_footing(footing.outdated_python())
    from manager.run import serve

    raise_open_files()
    return serve(config, tell)


def run_config(arguments: argparse.Namespace) -> int:
    tell(load(arguments).describe().rstrip())
    return 0


def run_doctor(argv: Sequence[str]) -> int:
    from manager.doctor import main as doctor

    return doctor(argv)


def run_keys(arguments: argparse.Namespace) -> int:
    from manager.run import keys

    return keys(load(arguments), arguments, tell)


if __name__ == "__main__":
    sys.exit(main())
