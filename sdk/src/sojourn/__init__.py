"""Run an agent task's commands in its own isolated sandbox.

    from sojourn import Client

    with Client() as client:
        task = client.task("my-task")
        print(task.exec("python3 --version").stdout)

`AsyncClient` is the same for asyncio. Errors are in `sojourn.errors`, the types of answers in `sojourn.types`.
"""

from sojourn.client import AsyncClient, AsyncKeys
from sojourn.errors import APIError, CommandFailed, SojournError
from sojourn.files import AsyncFiles
from sojourn.processes import AsyncProcess
from sojourn.sandboxes import AsyncSandbox, AsyncSandboxes
from sojourn.sessions import AsyncSession
from sojourn.streams import AsyncCommandStream
from sojourn.sync import Client, CommandStream, Files, Keys, Process, Sandbox, Sandboxes, Session, Task
from sojourn.tasks import AsyncTask
from sojourn.terminals import AsyncTerminal, AsyncTerminalConnection
from sojourn.types import Event, ExecResult, Exit, Gap, Output, Started

__all__ = [
    "APIError",
    "AsyncClient",
    "AsyncCommandStream",
    "AsyncFiles",
    "AsyncKeys",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxes",
    "AsyncSession",
    "AsyncTask",
    "AsyncTerminal",
    "AsyncTerminalConnection",
    "Client",
    "CommandFailed",
    "CommandStream",
    "Event",
    "ExecResult",
    "Exit",
    "Files",
    "Gap",
    "Keys",
    "Output",
    "Process",
    "Sandbox",
    "Sandboxes",
    "Session",
    "SojournError",
    "Started",
    "Task",
]
