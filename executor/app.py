"""The application: every call that there is, its services, one guard before and one error shape behind.

Loaded by `executor.mount` when it is first called for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from executor import kernel
from executor.archives import ArchiveService
from executor.core import Core
from executor.edge import Edge, without_server
from executor.errors import ExecutorError, InvalidRequest, NoSpace, NotFound, TooLarge
from executor.files import FileService
from executor.guard import OPEN_PATHS, error_reply
from executor.httplog import Complaints
from executor.layers import LayerService
from executor.ports import PortService
from executor.routes.archives import archive_routes
from executor.routes.commands import EXEC_BODY_BYTES, command_routes
from executor.routes.exec_socket import exec_socket_routes
from executor.routes.files import files_routes
from executor.routes.layers import layer_routes
from executor.routes.lease import health_routes, lease_routes
from executor.routes.openapi import openapi_routes
from executor.routes.ports import port_routes
from executor.routes.processes import process_routes
from executor.routes.reply import ask_later, json_reply
from executor.routes.search import search_routes
from executor.routes.sessions import session_routes
from executor.routes.terminals import terminal_routes
from executor.routes.usage import usage_routes
from executor.routes.watch import watch_routes
from executor.search import SearchService
from executor.sessions import Sessions
from executor.terminals import Terminals
from executor.upload import WriteTerms
from executor.usage import UsageService
from executor.watch import WatchService
from executor.wire import LEASE_HEADER, POD_HEADER
from executor.writtenlayers import WrittenLayers

log = logging.getLogger("executor")

_CONTENT_PATHS = ("/v1/files", "/v1/archive", "/v1/changes", "/v1/layers")


class Services:
    """What the calls need beside the core."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.sessions: Sessions
        self.terminals: Terminals
        self.files: FileService
        self.archives: ArchiveService
        self.layers: LayerService
        self.written: WrittenLayers
        self.searches: SearchService
        self.watches: WatchService
        self.ports: PortService
        self.usage: UsageService


async def open_services(stack: AsyncExitStack, core: Core) -> Services:
    """Raises RuntimeError, OSError where threads or memory are short."""
    services = Services(core)
    config, users, processes, lease = core.config, core.users, core.processes, core.lease
    services.sessions = Sessions(config, users, processes, changed=lease.worked)
    stack.callback(services.sessions.close)
    services.terminals = terminals = Terminals(config, users, processes, traffic=lease.worked)
    lease.count_terminals = lambda: terminals.living
    services.files = FileService(config, users.default, resolve_user=users.get)
    stack.callback(services.files.close)
    services.archives = ArchiveService(services.files, core.spawner)
    services.layers = LayerService(config, services.files, core.spawner, lambda: lease.bound)
    stack.callback(services.layers.close)
    services.written = WrittenLayers(services.files, services.layers)
    stack.callback(services.written.close)
    services.searches = SearchService(services.files, core.spawner)
    services.watches = WatchService(services.files)
    services.ports = PortService(lease)
    stack.push_async_callback(services.ports.close)
    services.usage = UsageService(config, lambda: _gauges(core), lambda: processes.leaders() | terminals.leaders())
    stack.callback(services.usage.close)
    return services


def _gauges(core: Core) -> dict[str, float]:
    return {
        "sojourn_commands_running": float(core.processes.running),
        "sojourn_operations": float(core.lease.operations),
        "sojourn_connections": float(core.connections.count),
        "sojourn_connections_refused_total": float(core.connections.refused),
        "sojourn_connections_expired_total": float(core.connections.expired),
        "sojourn_tasks": float(len(asyncio.all_tasks())),
    }


class Application:
    """Makes the protocol of every connection that the front hands over."""

    def __init__(self, stack: AsyncExitStack, services: Services, server: web.Server) -> None:
        self._stack = stack
        self._services = services
        self._server = server
        self._complaints = Complaints()
        self._loop = asyncio.get_running_loop()

    @property
    def sessions(self) -> Sessions:
        return self._services.sessions

    def handler(self, address: str) -> Edge:
        """`address` is what the connection was counted under."""
        return Edge(self._server, self._loop, self._complaints, self._services.core.connections, address)

    async def drain(self, seconds: float) -> None:
        await self._services.terminals.drain(seconds)

    async def close(self) -> None:
        await self._stack.aclose()


async def open_application(core: Core) -> Application:
    """Raises as open_services; nothing is then left open."""
    async with AsyncExitStack() as stack:
        services = await open_services(stack, core)
        stack.push_async_callback(services.terminals.drain, core.config.drain_sec)
        runner = web.AppRunner(
            make_app(services), handler_cancellation=True, shutdown_timeout=0.5, handle_signals=False
        )
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        assert runner.server is not None
        return Application(stack.pop_all(), services, runner.server)


def routes_of(services: Services) -> list[web.RouteDef]:
    """Every call that there is."""
    core = services.core
    return [
        *command_routes(core.processes),
        *exec_socket_routes(core.processes, core.config.heartbeat_sec),
        *process_routes(core.processes),
        *session_routes(services.sessions),
        *terminal_routes(services.terminals, core.config.heartbeat_sec),
        *files_routes(services.files),
        *archive_routes(services.archives),
        *layer_routes(services.layers, services.written),
        *search_routes(services.searches),
        *watch_routes(services.watches),
        *usage_routes(services.usage),
        *port_routes(services.ports),
        *lease_routes(core.lease, core.processes, _writer_of(services.files)),
        *openapi_routes(),
        *health_routes(core.processes),
    ]


def make_app(services: Services) -> web.Application:
    app = web.Application(middlewares=[_guarded(services)], client_max_size=EXEC_BODY_BYTES)
    routes = routes_of(services)
    for route in routes:
        route.kwargs["expect_handler"] = ask_later
    app.router.add_routes(routes)
    app.on_response_prepare.append(without_server)
    return app


def _writer_of(files: FileService) -> Callable[[str, bytes, int | None], Awaitable[None]]:
    async def write(path: str, content: bytes, mode: int | None) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        await files.write(path, pieces(), len(content), WriteTerms(mode=mode))

    return write


def _guarded(services: Services) -> Middleware:
    """The guard before every handler, the one error shape after it."""
    lease, guard = services.core.lease, services.core.guard

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
            if not path.startswith(_CONTENT_PATHS) or path.endswith("/watch"):
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
