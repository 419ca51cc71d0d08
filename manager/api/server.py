"""What every request passes through: shutdown, who is calling, errors as bodies, figures. And the guarded server.

The order matters: a manager that is ending refuses first, then the key, then the role; only then is the request looked
at, so that nobody without a key learns what exists.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, web

from executor.wire import JSON_TYPE, ErrorBody, ErrorReply
from manager.api.parsing import single
from manager.api.services import Services
from manager.api.wire import API_KEY_HEADER, ERROR_CODES, MEMBER_HEADER, PROJECT_HEADER, TENANT_HEADER
from manager.errors import (
    Forbidden,
    InvalidRequest,
    ManagerError,
    NotFound,
    RateLimited,
    ScopeRefused,
    ShuttingDown,
    StoreUnavailable,
    Unauthenticated,
)
from manager.model import Principal, Role, new_id

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Documents(msgspec.Struct, frozen=True):
    """The two descriptions of the interface, made once."""

    openapi: bytes
    page: str


SERVICES: Final = web.AppKey("services", Services)
DOCUMENTS: Final = web.AppKey("documents", Documents)
PRINCIPAL: Final = web.RequestKey("principal", Principal)

_PATTERN: Final = re.compile(r"\{([a-z_]+):[^}]*\}")
SCOPE_HEADERS: Final = (TENANT_HEADER, PROJECT_HEADER, MEMBER_HEADER)
# Some proxies and gateways turn one spelling into the other, so both count as naming a scope.
_SCOPE_SPELLINGS: Final = SCOPE_HEADERS + tuple(name.replace("-", "_") for name in SCOPE_HEADERS)
_RANK: Final = {Role.MEMBER: 0, Role.ADMIN: 1, Role.PLATFORM: 2}
_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)
REFUSAL_SEC: Final = 0.1  # before a key's request over its rate is answered
KEY_LOOK_SEC: Final = 2.0  # a key that was revoked ends its streams within this and what a manager remembers keys
NO_KEY: Final = f"give an API key in the {API_KEY_HEADER} header; `sojourn-server keys create` makes one"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One line of the route table: what aiohttp serves, the OpenAPI document says and the tests try."""

    method: str
    path: str
    handler: Handler
    summary: str
    role: Role | None = Role.MEMBER  # the least that may call it; None: the handler checks the caller itself
    open: bool = False  # served without a key
    request: Any = None  # type of the JSON body; bytes: any content
    replies: Mapping[int, Any] = field(default_factory=dict)  # status -> type, None (empty) or bytes
    content_types: tuple[str, ...] = (JSON_TYPE,)
    stream: Any = None  # type of the events where the reply can be a stream
    query: Mapping[str, str] = field(default_factory=dict)  # parameter -> what it does
    errors: tuple[str, ...] = ()  # codes beside those that every route can give

    @functools.cached_property
    def template(self) -> str:
        """The path as OpenAPI writes it, without the patterns."""
        return _PATTERN.sub(r"{\1}", self.path)


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────────────


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_ENCODER.encode(value), status=status, headers=headers, content_type=JSON_TYPE)


def error_body(error: ManagerError) -> ErrorBody:
    return ErrorBody(
        code=error.code, message=_clean(error.message), retryable=error.retryable, details=_clean(error.details)
    )


def error_reply(error: ManagerError) -> web.Response:
    """The one shape of every error; `Retry-After` in whole seconds, rounded up."""
    headers: dict[str, str] = {}
    if error.retry_after_sec is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_sec)))
    if error.status == 401:
        headers["WWW-Authenticate"] = 'ApiKey realm="sojourn"'
    return json_reply(ErrorReply(error_body(error)), error.status, headers)


def _clean(value: Any) -> Any:
    """`value` without lone surrogates, which no JSON in UTF-8 can carry."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_clean(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def as_error(why: Exception) -> ManagerError:
    """What to answer for `why`. Anything but a ManagerError is a defect: it is logged, and only its number is shown."""
    if isinstance(why, ManagerError) and why.status != 500:
        return why if why.code in ERROR_CODES else ManagerError("an answer with a code of its own came from below")
    number = new_id("req")
    log.error("request_failed", extra={"request": number}, exc_info=why)
    return ManagerError(f"something is broken here; the log has it under {number}", request=number)


# ── who is calling ──────────────────────────────────────────────────────────────────────────────────────────────


async def authenticate(request: web.Request) -> Principal:
    """The principal of the request's key, acting for the project it names where it is a platform key.

    Raises Unauthenticated, ScopeRefused, ScopeRequired, InvalidRequest (a header twice), StoreUnavailable."""
    headers = request.headers
    key = single(headers, API_KEY_HEADER)
    if not key:
        raise Unauthenticated(NO_KEY)
    tenants = request.app[SERVICES].tenants
    record = await tenants.authenticate(key, _address(request))
    if record.role is not Role.PLATFORM:
        for name in _SCOPE_SPELLINGS:
            if name in headers:
                raise ScopeRefused(f"{name} is only for platform keys; this key has its own tenant and project")
        return tenants.principal(record, None, None, None, request.remote or "")
    return tenants.principal(record, *named_scope(request), request.remote or "")


@asynccontextmanager
async def while_allowed(request: web.Request) -> AsyncIterator[None]:
    """Ends what is done inside once the caller's key is refused, and raises what it is refused with."""
    refused: list[ManagerError] = []

    async def look(limit: asyncio.Timeout) -> None:
        while not refused:
            await asyncio.sleep(KEY_LOOK_SEC)
            try:
                await authenticate(request)
            except StoreUnavailable:
                pass  # it was good a moment ago, and what it may do does not need the store
            except ManagerError as why:
                refused.append(why)
        limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as limit:
            looking = asyncio.create_task(look(limit), name="key-look")
            try:
                yield
            finally:
                looking.cancel()
    except TimeoutError:
        if not refused:
            raise
        raise refused[0] from None


def _address(request: web.BaseRequest) -> str:
    """Whom failed attempts are counted against; "" on this machine itself, where a proxy stands for everybody."""
    address = request.remote or ""
    return "" if address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1") else address


def named_scope(request: web.BaseRequest) -> tuple[str | None, str | None, str | None]:
    """Tenant, project and member as the headers name them. Raises InvalidRequest where one is there twice or empty."""
    values: list[str | None] = []
    for name in SCOPE_HEADERS:
        value = single(request.headers, name)
        if value is not None and (not value or len(value) > 256 or not value.isprintable()):
            raise InvalidRequest(f"the header {name} must have 1 to 256 printable characters", field=name)
        values.append(value)
    return values[0], values[1], values[2]


def bearer_matches(request: web.BaseRequest, secret: str | None) -> bool:
    """Whether `Authorization: Bearer` carries the secret, compared in constant time. Never with an unset one."""
    given = single(request.headers, "Authorization") or ""
    scheme, _, token = given.partition(" ")
    expected = (secret or "").encode()
    same = hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), expected)
    return same and bool(expected) and scheme.lower() == "bearer"


# ── the middleware ──────────────────────────────────────────────────────────────────────────────────────────────


def guard(routes: Mapping[Any, Route]) -> Any:
    """The one middleware. `routes`: by the handler that aiohttp holds."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        services = request.app[SERVICES]
        metrics = services.metrics
        route = routes.get(handler)
        started = time.perf_counter()
        services.in_flight.enter()
        status, label = 500, "none" if route is None else route.template
        try:
            reply = await _answered(request, handler, route, services)
            status = reply.status
            if services.in_flight.leaving and not reply.prepared:
                reply.force_close()  # one that has begun was promised the connection for one more request
            return reply
        except asyncio.CancelledError:
            status = 499  # the caller hung up
            raise
        finally:
            services.in_flight.leave()
            metrics.request_ended(label, status, time.perf_counter() - started)

    return guarded


async def _answered(
    request: web.Request, handler: Handler, route: Route | None, services: Services
) -> web.StreamResponse:
    try:
        if route is None:
            return await _unmatched(request, handler)
        if not route.open:
            if services.in_flight.ending:
                raise ShuttingDown("this manager is shutting down; try again in a moment")
            if route.role is not None:
                principal = await authenticate(request)
                if _RANK[principal.role] < _RANK[route.role]:
                    raise Forbidden(f"this call needs a key of the role {route.role}, this one has {principal.role}")
                request[PRINCIPAL] = principal
                services.in_flight.enter_of(principal.owner, services.config.project_requests)
                young = None
                try:
                    young = await services.turns.begin(principal.owner)
                    await _within_rate(services, principal)
                    return await handler(request)
                finally:
                    services.turns.end(young)
                    services.in_flight.leave_of(principal.owner)
        return await handler(request)
    except web.HTTPException:
        raise
    except ConnectionError:
        raise  # the caller is gone: there is nobody to answer
    except Exception as why:
        error = as_error(why)
        services.metrics.refused(error.code)
        return error_reply(error)


async def _within_rate(services: Services, principal: Principal) -> None:
    """Raises RateLimited, after a moment: who asks again at once, on many connections, else keeps the loop busy."""
    try:
        services.rates.take(principal, services.config.key_requests_per_sec)
    except RateLimited:
        await asyncio.sleep(REFUSAL_SEC)
        raise


async def _unmatched(request: web.Request, handler: Handler) -> web.StreamResponse:
    """404 for a path that is not in the table, 405 for a method that the path does not know."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as why:
        allowed = sorted(why.allowed_methods)
        refused = InvalidRequest(f"this path knows {', '.join(allowed)}, not {request.method[:20]}", allowed=allowed)
        refused.status = 405
        reply = error_reply(refused)
        reply.headers["Allow"] = ", ".join(allowed)
        return reply
    except web.HTTPException:
        raise NotFound("there is nothing at this path; /docs lists what there is") from None


async def expectation(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue` is met; nothing else can be."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return error_reply(InvalidRequest("the only expectation that can be met is 100-continue", field="Expect"))
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the reply proper has not begun
    return None
