"""What goes on in a sandbox, be it a task's (`/sandbox/task/{task_id}/...`) or a long-lived one's
(`/sandbox/sandboxes/v1/{sandbox_id}/...`); and the list of a project's sandboxes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from aiohttp import web

from executor.wire import (
    FRAMES_TYPE,
    NDJSON_TYPE,
    SSE_TYPE,
    FrameEvent,
    OutputFrame,
    SessionExecRequest,
    StreamError,
    UsageReport,
)
from executor.wire import Exit as ExitEvent
from executor.wire import Gap as GapEvent
from executor.wire import Started as StartedEvent
from manager.api.parsing import (
    OWN_ID,
    body_stream,
    check_scope,
    idempotency_key,
    if_pod,
    no_body,
    no_query,
    process_id_of,
    raw_query,
    read_body,
    read_command,
    read_json,
    segment,
    task_id_of,
)
from manager.api.server import (
    PRINCIPAL,
    SERVICES,
    as_error,
    authenticate,
    bearer_matches,
    error_body,
    json_reply,
    named_scope,
    while_allowed,
)
from manager.api.services import Services
from manager.api.streams import Frames, JsonLines, Renderer, ServerSentEvents
from manager.api.wire import (
    API_KEY_HEADER,
    BODY_BYTES,
    EXEC_BODY_BYTES,
    CommandStarted,
    LeaseState,
    Previous,
    SandboxState,
    TaskCommand,
    TaskSession,
    TaskTerminal,
    WorkspaceWritten,
    exec_request,
    session_request,
    terminal_request,
)
from manager.errors import InvalidRequest, NotFound, OutcomeUnknown, ScopeRequired, Unauthenticated
from manager.model import Owner, Principal, Role, SandboxRecord, new_id, own_name
from manager.services.idempotency import process_id
from manager.services.tasks import LeaseView, SandboxFacts, TaskView
from manager.services.tenants import check_owner

log = logging.getLogger(__name__)

_ENCODE: Final = msgspec.json.Encoder().encode
_NO_STORE: Final = {"Cache-Control": "no-store"}
_TASK_SEGMENT: Final = 3  # of /sandbox/task/{task_id}/...
_SANDBOX_SEGMENT: Final = 4  # of /sandbox/sandboxes/v1/{sandbox_id}/...
# What a pod sends is a stranger's: a browser that is led here shall neither guess its type nor run it.
_STRANGERS: Final = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox; default-src 'none'"}
_TYPES: Final = (
    "application/json", "application/octet-stream", "text/plain; charset=utf-8", NDJSON_TYPE, FRAMES_TYPE,
    SSE_TYPE, "application/x-tar", "application/gzip", "application/zstd",
)  # fmt: skip
_SENT_ON: Final = ("Accept", "Content-Length", "Content-Type", "If-Match", "If-None-Match", "If-Range", "Range")
MAX_WAIT_SEC: Final = 3600
LAST_WORDS_SEC: Final = 2.0


def place_in(request: web.Request) -> int:
    """Which part of the raw path names the sandbox. Which route it is the router knows, however the path is spelt."""
    return _SANDBOX_SEGMENT if "sandbox_id" in request.match_info else _TASK_SEGMENT


def sandbox_id_in(request: web.Request) -> str:
    """Raises NotFound for what no sandbox can be called."""
    sandbox_id = segment(request, _SANDBOX_SEGMENT)
    if not OWN_ID.match(sandbox_id):
        raise NotFound("there is no such sandbox")
    return sandbox_id


def name_in(request: web.Request) -> str:
    """What the sandbox is found by: a task's id, or the `own_name` of a long-lived one."""
    if "sandbox_id" in request.match_info:
        return own_name(sandbox_id_in(request))
    return task_id_of(segment(request, _TASK_SEGMENT))


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────


async def run_command(request: web.Request) -> web.StreamResponse:
    services, task_id = request.app[SERVICES], name_in(request)
    no_query(request)
    command = await read_command(request, EXEC_BODY_BYTES, services.config.body_timeout_sec)
    accept = request.headers.get("Accept", "")
    if FRAMES_TYPE in accept:
        return await _stream(request, services, task_id, command, Frames())
    if NDJSON_TYPE in accept:
        return await _stream(request, services, task_id, command, JsonLines(command.encoding))
    if SSE_TYPE in accept:
        return await _stream(request, services, task_id, command, ServerSentEvents(command.encoding))
    answer = await services.tasks.exec(request[PRINCIPAL], task_id, exec_request(command), **_terms(request, command))
    services.metrics.command_ended(answer.result.reason, answer.facts.provisioned)
    # The two objects as one, without building a third: this is the hottest place of the manager.
    body = _ENCODE(answer.result)[:-1] + b"," + _ENCODE(answer.facts)[1:]
    return web.Response(body=body, content_type="application/json")


def _terms(request: web.BaseRequest, command: TaskCommand) -> dict[str, Any]:
    return {
        "profile": command.profile,
        "region": command.region,
        "idempotency_key": idempotency_key(request),
        "pod_expected": if_pod(request),
    }


async def _stream(
    request: web.Request, services: Services, task_id: str, command: TaskCommand, renderer: Renderer
) -> web.StreamResponse:
    """The command's events as they come. What goes wrong before the first is an answer of its own, after it the
    stream's last event."""
    running = services.tasks.stream(request[PRINCIPAL], task_id, exec_request(command), **_terms(request, command))
    async with running as stream:
        reply = web.StreamResponse(
            headers={"Content-Type": renderer.content_type, "X-Accel-Buffering": "no"} | _NO_STORE
        )
        await reply.prepare(request)
        outcome = "lost"
        try:
            async with while_allowed(request):
                outcome = await _send_events(reply, stream.events, stream.facts, renderer, stream.process_id)
        except (ConnectionError, asyncio.CancelledError):
            outcome = "disconnected"  # leaving the context closes the executor's stream: `on_disconnect` decides there
            raise
        except Exception as why:
            await _last_words(request, reply, renderer.plain(StreamError(error=error_body(as_error(why)))))
        finally:
            services.metrics.command_ended(outcome, stream.facts.provisioned)
        await reply.write_eof()
        return reply


async def _last_words(request: web.Request, reply: web.StreamResponse, data: bytes) -> None:
    """A caller that does not read them is hung up on: whoever has lost the right to be here cannot hold the pod."""
    try:
        async with asyncio.timeout(LAST_WORDS_SEC):
            await reply.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the caller reads no more") from None


async def _send_events(
    reply: web.StreamResponse,
    events: AsyncIterator[FrameEvent],
    facts: SandboxFacts,
    renderer: Renderer,
    process_id: str,
) -> str:
    """The reason that the command ended with. Each write waits while the caller does not read, and with it the pod."""
    async for event in events:
        if isinstance(event, OutputFrame):
            data = renderer.output(event)
        elif isinstance(event, GapEvent):
            data = renderer.gap(event)
        elif isinstance(event, StartedEvent):
            data = renderer.plain(started(event, facts))
        else:
            data = renderer.plain(event)
        if data:
            await reply.write(data)
        if isinstance(event, ExitEvent):
            return event.reason
        if isinstance(event, StreamError):
            return "lost"
    raise OutcomeUnknown("the stream ended before the command did; ask for the process by its id", id=process_id)


def started(event: StartedEvent, facts: SandboxFacts) -> CommandStarted:
    return CommandStarted(
        id=event.id,
        pid=event.pid,
        joined=event.joined,
        sandbox_id=facts.sandbox_id,
        pod_id=facts.pod_id,
        provisioned=facts.provisioned,
        workspace=facts.workspace,
        previous=msgspec.UNSET
        if facts.previous is None
        else Previous(reason=facts.previous.reason, at=facts.previous.at),
    )


# ── processes, files, usage: the executor's own calls ───────────────────────────────────────────────────────────


async def start_process(request: web.Request) -> web.StreamResponse:
    services, task_id = request.app[SERVICES], name_in(request)
    no_query(request)
    command = await read_command(request, EXEC_BODY_BYTES, services.config.body_timeout_sec)
    body, terms = _ENCODE(exec_request(command)), _terms(request, command)
    return await _pass_on(request, services, task_id, "/v1/processes", "", {}, body, terms)


async def make_session(request: web.Request) -> web.StreamResponse:
    services, task_id = request.app[SERVICES], name_in(request)
    no_query(request)
    asked = TaskSession()
    if request.body_exists:
        asked = await read_json(request, TaskSession, BODY_BYTES, services.config.body_timeout_sec)
    check_scope(asked)
    terms: dict[str, Any] = {
        "profile": asked.profile, "region": asked.region, "idempotency_key": idempotency_key(request),
        "pod_expected": if_pod(request),
    }  # fmt: skip
    return await _pass_on(request, services, task_id, "/v1/sessions", "", {}, _ENCODE(session_request(asked)), terms)


async def run_in_session(request: web.Request) -> web.StreamResponse:
    """The command gets an id here, so that its outcome can be asked for where the answer is lost."""
    services, task_id = request.app[SERVICES], name_in(request)
    no_query(request)
    asked = await read_json(request, SessionExecRequest, EXEC_BODY_BYTES, services.config.body_timeout_sec)
    key = idempotency_key(request)
    if asked.id is None:
        id = new_id() if key is None else process_id(request[PRINCIPAL].owner, task_id, key)
        asked = msgspec.structs.replace(asked, id=id)
    sent = {"Content-Type": "application/json", "Accept": request.headers.get("Accept", "*/*")}
    terms: dict[str, Any] = {"pod_expected": if_pod(request), "wait_sec": None, "outcome_of": asked.id}
    return await _pass_on(request, services, task_id, _executor_path(request), "", sent, _ENCODE(asked), terms)


async def open_terminal(request: web.Request) -> web.StreamResponse:
    services, task_id = request.app[SERVICES], name_in(request)
    no_query(request)
    asked = await read_json(request, TaskTerminal, EXEC_BODY_BYTES, services.config.body_timeout_sec)
    check_scope(asked)
    body = _ENCODE(terminal_request(asked))
    terms: dict[str, Any] = {
        "profile": asked.profile, "region": asked.region, "idempotency_key": idempotency_key(request),
        "pod_expected": if_pod(request),
    }  # fmt: skip
    return await _pass_on(request, services, task_id, "/v1/terminals", "", {}, body, terms)


async def forward(request: web.Request) -> web.StreamResponse:
    """The call as it is, its body and the answer's streamed in constant memory."""
    services, task_id = request.app[SERVICES], name_in(request)
    path, query = _executor_path(request), raw_query(request)
    sent = {name: request.headers[name] for name in _SENT_ON if name in request.headers}
    terms: dict[str, Any] = {"pod_expected": if_pod(request), "wait_sec": _wait_sec(query)}
    body: AsyncIterator[bytes] | bytes | None = None
    timeout_sec = services.config.body_timeout_sec
    if request.method == "PUT" or path.endswith("/stdin"):
        body = body_stream(request, timeout_sec)
    elif request.method == "POST":
        sent.pop("Content-Length", None)
        body = await read_body(request, BODY_BYTES, timeout_sec)
    elif request.body_exists:
        raise InvalidRequest(f"a {request.method} takes no body")
    return await _pass_on(request, services, task_id, path, query, sent, body, terms)


def _executor_path(request: web.Request) -> str:
    """The executor's path for one of the table's: nothing that stands in a URL is passed on unchecked."""
    parts = request.rel_url.raw_path.split("/")[place_in(request) + 1 :]
    if parts[0] in ("processes", "sessions", "terminals") and len(parts) > 1:
        process_id_of(parts[1])
    return "/v1/" + "/".join(parts)


def _wait_sec(query: str) -> float | None:
    """How long the executor may be silent on purpose: a long poll so long, an output that is followed for ever."""
    try:
        pairs = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=32))
    except ValueError:
        raise InvalidRequest("the query has more than 32 parameters", field="query") from None
    if pairs.get("follow") in ("true", "1"):
        return None
    text = pairs.get("wait_sec", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 5 or int(text) > MAX_WAIT_SEC:
        raise InvalidRequest(f"wait_sec must be a whole number of seconds up to {MAX_WAIT_SEC}", field="wait_sec")
    return float(text)


async def _pass_on(
    request: web.Request,
    services: Services,
    task_id: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    body: AsyncIterator[bytes] | bytes | None,
    terms: dict[str, Any],
) -> web.StreamResponse:
    call = services.tasks.forward(request[PRINCIPAL], task_id, request.method, path, query, headers, body, **terms)
    async with call as forwarded:
        response = forwarded.response
        reply = web.StreamResponse(status=response.status, headers=_safe(response.headers))
        reply.headers["Sandbox-Id"] = forwarded.facts.sandbox_id
        reply.headers["Sandbox-Pod"] = forwarded.facts.pod_id
        await reply.prepare(request)
        try:
            if request.method != "HEAD":
                async with while_allowed(request):
                    async for piece in response.body:
                        await reply.write(piece)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as why:
            # The status is out already: only a broken connection tells the caller that this is not all.
            log.warning("answer_broke_off", extra={"why": str(why), "path": path})
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the pod's answer broke off") from why
        await reply.write_eof()
        return reply


def _safe(headers: Mapping[str, str]) -> dict[str, str]:
    kind = headers.get("Content-Type", "")
    return {**headers, **_STRANGERS, **_NO_STORE, "Content-Type": kind if kind in (*_TYPES, SSE_TYPE) else _TYPES[1]}


# ── the task itself ─────────────────────────────────────────────────────────────────────────────────────────────


async def get_task(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    no_query(request)
    return json_reply(sandbox_state(services, await services.tasks.get(request[PRINCIPAL], name_in(request))))


async def write_back(request: web.Request) -> web.Response:
    """What is in the task's pod, made durable."""
    services = request.app[SERVICES]
    no_query(request)
    await no_body(request, services.config.body_timeout_sec)
    written = await services.tasks.writeback(request[PRINCIPAL], name_in(request), pod_expected=if_pod(request))
    return json_reply(WorkspaceWritten(**msgspec.structs.asdict(written)))


async def retire_task(request: web.Request) -> web.Response:
    """For the owner's key, or for the teardown secret with the scope in headers."""
    services = request.app[SERVICES]
    by = await _retirer(request, services)
    no_query(request)
    await services.tasks.retire(by.owner, name_in(request), by=by)
    return web.Response(status=204)


async def _retirer(request: web.Request, services: Services) -> Principal:
    """Who retires a task of its owner. Raises Unauthenticated, ScopeRequired, ScopeRefused."""
    if API_KEY_HEADER in request.headers or "Authorization" not in request.headers:
        return await authenticate(request)
    if not bearer_matches(request, services.config.cleanup_secret):
        raise Unauthenticated(
            "the bearer secret is not this manager's SANDBOX_CLEANUP_AUTH_SECRET; the owner's API key works too"
        )
    tenant, project, _ = named_scope(request)
    if tenant is not None and project is not None:
        return _secret_holder(request, check_owner(Owner(tenant, project)))
    only = await services.only_project()
    if only is None or (tenant or only.tenant, project or only.project) != (only.tenant, only.project):
        raise ScopeRequired(
            "say whose task in X-Sandbox-Tenant-Id and X-Sandbox-Project-Id: there are several projects"
        )
    return _secret_holder(request, only)


def _secret_holder(request: web.Request, owner: Owner) -> Principal:
    return Principal(owner, Role.ADMIN, "cleanup-secret", address=request.remote or "")


def lease_state(lease: LeaseView | None) -> LeaseState | None:
    if lease is None:
        return None
    return LeaseState(until=lease.until, hard_end=lease.hard_end, operations=lease.operations, left_sec=lease.left_sec)


def sandbox_state(
    services: Services, view: TaskView, record: SandboxRecord | None = None, usage: UsageReport | None = None
) -> SandboxState:
    """`record`: of a long-lived one, whose view it is then."""
    image = next((profile.image for profile in services.config.profiles if profile.name == view.profile), "")
    ended = view.ended
    return SandboxState(
        sandbox_id=view.sandbox_id,
        task_id=view.task_id if record is None else None,
        state=None if record is None else record.state,
        name=None if record is None else record.name,
        image=image,
        image_digest=view.image_digest,
        stage=view.stage,
        profile=view.profile,
        target=view.target,
        region=services.region_of(view.target),
        generation=view.generation,
        pod_id=view.pod_id,
        created_at=view.created_at,
        lease=lease_state(view.lease),
        ended=None if ended is None else Previous(reason=ended.reason, at=ended.at),
        usage=usage,
    )
