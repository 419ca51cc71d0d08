"""Commands that work in a sandbox, whatever it is found by: `sojourn exec TASK` and `sojourn sandbox exec ID`."""

from __future__ import annotations

import copy
from typing import Final

import click

from sojourn.client import AsyncClient
from sojourn.sandboxes import AsyncSandbox
from sojourn.sync import Client, Sandbox, Task
from sojourn.tasks import AsyncTask

GROUP: Final = "sandbox"
_WORDS: Final = (
    (" A sandbox\nis made if the task has none.", ""),
    ('of the task "demo"', "of the sandbox"),
    ("demo", "$id"),
    ("in the sandbox of TASK", "in the sandbox ID"),
    ("sandboxes of TASKS", "sandboxes"),
    ("TASK's sandbox", "the sandbox ID"),
    ("in TASK", "in ID"),
    ("the task's", "its"),
    ("TASK:PATH", "ID:PATH"),
    ("TASK", "ID"),
    ("sojourn ", f"sojourn {GROUP} "),
)


def place(client: Client, name: str) -> Task | Sandbox:
    """The handle that the command line names."""
    return client.sandbox(name) if _long_lived() else client.task(name)


def async_place(client: AsyncClient, name: str, profile: str | None = None) -> AsyncTask | AsyncSandbox:
    if not _long_lived():
        return client.task(name, profile=profile)
    if profile is not None:
        raise click.UsageError("a long-lived sandbox has the profile that it was made with")
    return client.sandbox(name)


def for_sandboxes(command: click.Command) -> click.Command:
    """The same command for the group `sandbox`, its help speaking of an ID."""
    twin = copy.copy(command)
    twin.params = [copy.copy(param) for param in command.params if param.name != "profile"]
    twin.params += [_hidden(param) for param in command.params if param.name == "profile"]
    for param in twin.params:
        if isinstance(param, click.Argument) and param.name in ("task", "tasks"):
            param.metavar = "ID"
    for field in ("help", "epilog", "short_help"):
        text = getattr(command, field)
        for old, new in _WORDS if text else ():
            text = text.replace(old, new)
        setattr(twin, field, text)
    return twin


def _hidden(param: click.Parameter) -> click.Parameter:
    hidden = copy.copy(param)
    if isinstance(hidden, click.Option):
        hidden.hidden = True
    return hidden


def _long_lived() -> bool:
    context = click.get_current_context(silent=True)
    while context is not None:
        if isinstance(context.command, click.Group) and context.command.name == GROUP:
            return True
        context = context.parent
    return False
