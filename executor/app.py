"""Opens the executor's services in order, mounts the routes behind one guard, closes in reverse."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from executor import isolation, kernel
from executor.archives import ArchiveService
from executor.cgroup import CgroupCounters
from executor.config import ExecutorConfig
from executor.errors import ExecutorError, InvalidRequest, NoSpace, NotFound, TooLarge
from executor.files import FileService
from executor.front import Front
from executor.guard import OPEN_PATHS, Guard, error_reply
from executor.isolation import Users
from executor.lease import Lease
from executor.ports import PortService
from executor.processes import Processes
from executor.reaper import Reaper
from executor.routes.archives import archive_routes
from executor.routes.commands import EXEC_BODY_BYTES, command_routes
from executor.routes.exec_socket import exec_socket_routes
from executor.routes.files import files_routes
from executor.routes.lease import health_routes, lease_routes
from executor.routes.ports import port_routes
from executor.routes.processes import process_routes
from executor.routes.reply import json_reply
from executor.routes.search import search_routes
from executor.routes.sessions import session_routes
from executor.routes.terminals import terminal_routes
from executor.routes.usage import usage_routes
from executor.routes.watch import watch_routes
from executor.search import SearchService
from executor.sessions import Sessions
from executor.spawn import Spawner
from executor.terminals import Terminals
from executor.threads import started_pool
from executor.upload import WriteTerms
from executor.usage import UsageService
from executor.watch import WatchService
from executor.wire import LEASE_HEADER, POD_HEADER

log = logging.getLogger("executor")


BACKLOG: Final = 4096
THREADS: Final = 4
LINE_BYTES: Final = 16_384


class Services:
    """Everything that lives while the executor does."""

    def __init__(self, config: ExecutorConfig, ended: Callable[[str], None]) -> None:
        self.config = config
        self.ended = ended
        self.users: Users
        self.processes: Processes
        self.sessions: Sessions
        self.terminals: Terminals
        self.lease: Lease
        self.guard: Guard
        self.files: FileService
        self.archives: ArchiveService
        self.searches: SearchService
        self.watches: WatchService
        self.ports: PortService
        self.usage: UsageService


async def open_services(
    stack: AsyncExitStack, config: ExecutorConfig, env: dict[str, str], ended: Callable[[str], None]
) -> Services:
    """Raises BadConfig, OSError."""
    services = Services(config, ended)
    services.users = users = Users(config)
    nofile = kernel.raise_open_files()
    workers = started_pool(THREADS, "worker")
    stack.callback(workers.shutdown, wait=False, cancel_futures=True)
    asyncio.get_running_loop().set_default_executor(workers)
    _prepare_workspace(config, users)
    for lacking in isolation.protect_executor():
        log.warning("protection_missing", extra={"what": lacking})
    reaper = Reaper()
    reaper.start()
    stack.callback(reaper.close)
    spawner = Spawner(reaper, users.default, helpers=config.helpers, umask=config.umask, nofile=nofile)
    stack.push_async_callback(spawner.close)
    await spawner.start()
    services.processes = processes = Processes(
        config, users, spawner, CgroupCounters(), env, changed=lambda: services.lease.worked()
    )
    stack.callback(processes.close)
    services.sessions = Sessions(config, users, processes, changed=lambda: services.lease.worked())
    stack.callback(services.sessions.close)
    services.terminals = terminals = Terminals(config, users, processes, traffic=lambda: services.lease.worked())
    services.lease = Lease(config, lambda: processes.running, ended, terminals=lambda: terminals.living)
    stack.callback(services.lease.close)
    services.guard = Guard(config, services.lease)
    services.files = FileService(config, users.default, resolve_user=users.get)
    stack.callback(services.files.close)
    services.archives = ArchiveService(services.files, spawner)
    services.searches = SearchService(services.files, spawner)
    services.watches = WatchService(services.files)
    services.ports = PortService(services.lease)
    stack.push_async_callback(services.ports.close)
    services.usage = UsageService(config, lambda: _gauges(services), lambda: processes.leaders() | terminals.leaders())
    stack.callback(services.usage.close)
    stack.push_async_callback(_drain, services)
    return services


async def _drain(services: Services) -> None:
    """Ends everything that runs, all at once, within the time that there is."""
    seconds = services.config.drain_sec
    await asyncio.gather(services.processes.drain(seconds), services.terminals.drain(seconds))


def _prepare_workspace(config: ExecutorConfig, users: Users) -> None:
    path = Path(config.workspace)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0 and path.stat().st_uid != users.default.uid:
            os.chown(path, users.default.uid, users.default.gid)
    except OSError as why:  # a command then says so, with 400 invalid_cwd; the rest of the pod is of use
        log.error("workspace_unusable", extra={"path": config.workspace, "errno": why.errno})


def _gauges(services: Services) -> dict[str, float]:
    return {
        "sojourn_commands_running": float(services.processes.running),
        "sojourn_operations": float(services.lease.operations),
    }


def routes_of(services: Services) -> list[web.RouteDef]:
    """Every call that there is."""
    return [
        *command_routes(services.processes),
        *exec_socket_routes(services.processes, services.config.heartbeat_sec),
        *process_routes(services.processes),
        *session_routes(services.sessions),
        *terminal_routes(services.terminals, services.config.heartbeat_sec),
        *files_routes(services.files),
        *archive_routes(services.archives),
        *search_routes(services.searches),
        *watch_routes(services.watches),
        *usage_routes(services.usage),
        *port_routes(services.ports),
        *lease_routes(services.lease, services.processes, _writer_of(services.files)),
        *health_routes(services.processes),
    ]


def make_app(services: Services) -> web.Application:
    app = web.Application(middlewares=[_guarded(services)], client_max_size=EXEC_BODY_BYTES)
    app.router.add_routes(routes_of(services))
    return app


def _writer_of(files: FileService) -> Callable[[str, bytes, int | None], Awaitable[None]]:
    async def write(path: str, content: bytes, mode: int | None) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        await files.write(path, pieces(), len(content), WriteTerms(mode=mode))

    return write


def _guarded(services: Services) -> Middleware:
    """The guard before every handler, the one error shape after it."""
    lease, guard = services.lease, services.guard

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        try:
            if path not in OPEN_PATHS:
                headers = request.headers
                authorization = headers.getall("Authorization", ())
                guard.admit(
                    authorization[0] if len(authorization) == 1 else None,
                    headers.get(POD_HEADER),
                    headers.get(LEASE_HEADER),
                )
            # Commands count as work by running; of the other calls only those that carry content do.
            if not path.startswith(("/v1/files", "/v1/archive")) or path.endswith("/watch"):
                return await handler(request)
            lease.begin()
            try:
                return await handler(request)
            finally:
                lease.done()
        except ExecutorError as error:
            return _error_reply(request, error)
        except web.HTTPException as error:
            return _error_reply(request, _from_aiohttp(error))
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            if kernel.is_space_error(error):
                return _error_reply(request, NoSpace("no space is left in the pod"))
            log.exception("request_failed", extra={"path": path[:200]})
            return _error_reply(request, ExecutorError("the executor failed; its log has the details"))
        except Exception:
            log.exception("request_failed", extra={"path": path[:200]})
            return _error_reply(request, ExecutorError("the executor failed; its log has the details"))

    return guarded


def _from_aiohttp(error: web.HTTPException) -> ExecutorError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return TooLarge("the body is over the limit", limit=EXEC_BODY_BYTES)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return NotFound(f"this path has no {error.method[:20]}; it has {allowed}")
    if error.status == 404:
        return NotFound("there is no such call")
    return InvalidRequest(error.reason or "the request cannot be read")


def _error_reply(request: web.Request, error: ExecutorError) -> web.StreamResponse:
    reply = json_reply(error_reply(error), status=error.status)
    if error.retryable:
        reply.headers["Retry-After"] = "1"
    if error.status == 416 and "size" in error.details:
        reply.headers["Content-Range"] = f"bytes */{error.details['size']}"
    if not request.content.is_eof():  # a body that nobody will read must not be taken for the next request
        reply.force_close()
    return reply


async def serve(config: ExecutorConfig, env: dict[str, str], stop: asyncio.Event) -> int:
    """Runs until `stop` or until the lease is over. The process's exit code."""
    why: list[str] = []

    def ended(reason: str) -> None:
        why.append(reason)
        stop.set()

    async with AsyncExitStack() as stack:
        services = await open_services(stack, config, env, ended)
        runner = web.AppRunner(
            make_app(services), access_log=None, handler_cancellation=True, max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES, keepalive_timeout=75.0, shutdown_timeout=0.5, handle_signals=False,
            auto_decompress=False,  # what goes to a port goes as it is; no other body of ours may come compressed
        )  # fmt: skip
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        front = Front(services.processes, services.guard, runner.server)
        server, where = await _listen(config, front)
        stack.callback(front.close)
        stack.callback(server.close)
        if config.socket is not None:
            stack.callback(_remove_stale, config.socket)
        # Commands are drained while their streams can still be answered, so before the runner is cleaned up.
        stack.push_async_callback(_drain, services)
        log.info("executor_ready", extra={"where": where, "tier": services.users.tier, "pid": os.getpid()})
        await stop.wait()
        log.info("executor_stopping", extra={"why": why[0] if why else "signal"})
    return 0


async def _listen(config: ExecutorConfig, front: Front) -> tuple[asyncio.Server, str]:
    loop = asyncio.get_running_loop()
    if config.socket is None:
        server = await loop.create_server(front, config.host, config.port, backlog=BACKLOG)
        return server, f"{config.host}:{server.sockets[0].getsockname()[1]}"
    _remove_stale(config.socket)
    before = os.umask(0o177)
    try:
        return await loop.create_unix_server(front, config.socket, backlog=BACKLOG), config.socket
    finally:
        os.umask(before)


def _remove_stale(path: str) -> None:
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
