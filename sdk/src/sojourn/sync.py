"""The blocking client. Its methods are the asynchronous ones, waited for; see `sojourn.bridge`."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from sojourn.bridge import Blocking, Bridge, blocking, blocking_as, iterated, iterating, wrapping
from sojourn.client import AsyncClient, AsyncKeys
from sojourn.config import Server
from sojourn.files import AsyncFiles
from sojourn.processes import AsyncProcess
from sojourn.sandboxes import AsyncSandbox, AsyncSandboxes
from sojourn.sessions import AsyncSession
from sojourn.streams import AsyncCommandStream
from sojourn.tasks import AsyncPlace, AsyncTask
from sojourn.transport import RETRY_SEC
from sojourn.types import Event, Exit, Where


class Process(Blocking):
    """A handle on one command; see AsyncProcess."""

    def __init__(self, bridge: Bridge, inner: AsyncProcess) -> None:
        super().__init__(bridge, inner)
        self.id = inner.id

    info = blocking(AsyncProcess.info)
    wait = blocking(AsyncProcess.wait)
    output = iterating(AsyncProcess.output)
    write_stdin = blocking(AsyncProcess.write_stdin)
    close_stdin = blocking(AsyncProcess.close_stdin)
    signal = blocking(AsyncProcess.signal)
    kill = blocking(AsyncProcess.kill)
    delete = blocking(AsyncProcess.delete)


class CommandStream(Blocking):
    """The events of one command: iterate it, or use it in `with`; see AsyncCommandStream."""

    _inner: AsyncCommandStream

    def __init__(self, bridge: Bridge, inner: AsyncCommandStream) -> None:
        super().__init__(bridge, inner)
        self.process = Process(bridge, inner.process)
        self._events = iterated(bridge, inner.events)

    @property
    def exit(self) -> Exit | None:
        return self._inner.exit

    @property
    def where(self) -> Where:
        return self._inner.where

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading. The command goes on."""
        self._events.close()

    collect = blocking(AsyncCommandStream.collect)


class Session(Blocking):
    """A handle on one session, closed at the end of `with`; see AsyncSession."""

    def __init__(self, bridge: Bridge, inner: AsyncSession) -> None:
        super().__init__(bridge, inner)
        self.id = inner.id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    exec = blocking(AsyncSession.exec)
    stream = wrapping(CommandStream, AsyncSession.stream)
    interrupt = blocking(AsyncSession.interrupt)
    info = blocking(AsyncSession.info)
    close = blocking(AsyncSession.close)


class Files(Blocking):
    """The files of a task's sandbox; see AsyncFiles."""

    read = blocking(AsyncFiles.read)
    read_text = blocking(AsyncFiles.read_text)
    iter = iterating(AsyncFiles.iter)
    download = blocking(AsyncFiles.download)
    write = blocking(AsyncFiles.write)
    list = blocking(AsyncFiles.list)
    stat = blocking(AsyncFiles.stat)
    exists = blocking(AsyncFiles.exists)
    delete = blocking(AsyncFiles.delete)
    mkdir = blocking(AsyncFiles.mkdir)
    move = blocking(AsyncFiles.move)
    chmod = blocking(AsyncFiles.chmod)
    search = blocking(AsyncFiles.search)
    watch = iterating(AsyncFiles.watch)


class _Place(Blocking):
    """What can be done in a sandbox; see AsyncPlace."""

    def __init__(self, bridge: Bridge, inner: AsyncPlace) -> None:
        super().__init__(bridge, inner)
        self.id = inner.id
        self.files = Files(bridge, inner.files)

    exec = blocking(AsyncPlace.exec)
    stream = wrapping(CommandStream, AsyncPlace.stream)
    start = blocking_as(Process, AsyncPlace.start)
    process = wrapping(Process, AsyncPlace.process)
    processes = blocking(AsyncPlace.processes)
    session = blocking_as(Session, AsyncPlace.session)
    session_by_id = wrapping(Session, AsyncPlace.session_by_id)
    sessions = blocking(AsyncPlace.sessions)
    terminals = blocking(AsyncPlace.terminals)
    upload_dir = blocking(AsyncPlace.upload_dir)
    download_dir = blocking(AsyncPlace.download_dir)
    usage = blocking(AsyncPlace.usage)
    usage_stream = iterating(AsyncPlace.usage_stream)


class Task(_Place):
    """A handle on one task; see AsyncTask."""

    info = blocking(AsyncTask.info)
    delete = blocking(AsyncTask.delete)


class Sandbox(_Place):
    """A handle on one long-lived sandbox; see AsyncSandbox."""

    info = blocking(AsyncSandbox.info)
    change = blocking(AsyncSandbox.change)
    stop = blocking(AsyncSandbox.stop)
    resume = blocking(AsyncSandbox.resume)
    snapshot = blocking(AsyncSandbox.snapshot)

    fork = blocking_as(lambda bridge, inner: Sandbox(bridge, inner), AsyncSandbox.fork)
    delete = blocking(AsyncSandbox.delete)


class Sandboxes(Blocking):
    """The project's long-lived sandboxes; see AsyncSandboxes."""

    create = blocking_as(Sandbox, AsyncSandboxes.create)
    list = blocking(AsyncSandboxes.list)
    iterate = iterating(AsyncSandboxes.iterate)
    snapshots = blocking(AsyncSandboxes.snapshots)
    delete_snapshot = blocking(AsyncSandboxes.delete_snapshot)


class Keys(Blocking):
    """The project's API keys; see AsyncKeys."""

    create = blocking(AsyncKeys.create)
    list = blocking(AsyncKeys.list)
    revoke = blocking(AsyncKeys.revoke)


class Client(Blocking):
    """A client for blocking code, from any number of threads; arguments as for AsyncClient.

    It has a thread and an event loop of its own, so it also works where another loop runs (a notebook). Use it in
    `with`, or call `close`."""

    _inner: AsyncClient

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        tenant: str | None = None,
        project: str | None = None,
        member: str | None = None,
        max_connections: int = 100,
        retry_sec: float = RETRY_SEC,
    ) -> None:
        inner = AsyncClient(
            address,
            api_key,
            tenant=tenant,
            project=project,
            member=member,
            max_connections=max_connections,
            retry_sec=retry_sec,
        )
        super().__init__(Bridge(), inner)
        self.keys = Keys(self._bridge, inner.keys)
        self.long_lived = Sandboxes(self._bridge, inner.long_lived)

    @property
    def server(self) -> Server:
        return self._inner.server

    task = wrapping(Task, AsyncClient.task)
    sandbox = wrapping(Sandbox, AsyncClient.sandbox)
    sandboxes = blocking(AsyncClient.sandboxes)
    quotas = blocking(AsyncClient.quotas)
    audit = blocking(AsyncClient.audit)
    health = blocking(AsyncClient.health)

    def close(self) -> None:
        """Ends all connections and the thread. Commands that run go on. Safe to repeat."""
        if self._bridge.running:
            self._bridge.run(self._inner.close())
            self._bridge.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
