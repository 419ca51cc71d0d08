"""A task session: commands, processes and files of one task, told with its sandbox.

Each call finds or provides the task's sandbox, counts as work on it while it runs, and goes to the pod's executor. A
pod that turns out to have ended before it got the call is replaced once; after that the outcome is unknown, and
nothing is run twice.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Final, Literal, Protocol, TypeVar

import aiohttp
import msgspec

from executor.wire import FRAME_START, ExecRequest, ExecResult, FrameEvent, SessionRequest, TerminalRequest, bad_field
from manager.errors import (
    ExecutorRefused,
    ExecutorUnreachable,
    InvalidRequest,
    ManagerError,
    NotFound,
    NotSupported,
    OutcomeUnknown,
    Provisioning,
    SandboxGone,
    SandboxReplaced,
)
from manager.executor_answers import ExecutorNotReached
from manager.executor_client import STREAM_IDLE_SEC, ExecutorClient, ForwardedResponse, PortAnswer
from manager.model import Binding, BindingState, Owner, PodEnded, Principal, owned_by_name
from manager.pod_socket import PodSocket
from manager.services.idempotency import Marks, Once
from manager.services.leases import Leases, Traffic
from manager.services.manifests import Manifest
from manager.services.sandboxes import Bound, Provisioned, Sandboxes, Workspace, gone, when
from manager.store.base import Store

_PROVIDES: Final = frozenset({"POST", "PUT"})
_ROOTS: Final = frozenset({"processes", "sessions", "terminals", "files", "archive", "usage"})
_CHANGED_BY_CALLS: Final = frozenset({"files", "archive"})
_CARRY_CONTENT: Final = ("/v1/files", "/v1/archive")
_MAX_WAIT_SEC: Final = 86_400.0
USAGE_SEC: Final = 5.0  # an executor that takes longer to say what it uses is not waited for
_STARTING: Final = frozenset({"/v1/processes", "/v1/sessions", "/v1/terminals"})
_BOUND_TO_POD: Final = frozenset({"processes", "sessions", "terminals"})  # their ids mean nothing in another pod
_EXEC_REQUEST: Final = msgspec.json.Decoder(ExecRequest)
_SESSION_REQUEST: Final = msgspec.json.Decoder(SessionRequest)
_TERMINAL_REQUEST: Final = msgspec.json.Decoder(TerminalRequest)
T = TypeVar("T")


class Previous(msgspec.Struct, frozen=True):
    """How the task's last pod ended, in an answer that comes from a new one."""

    reason: str
    at: str  # RFC 3339


class SandboxFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer adds about where it comes from."""

    sandbox_id: str
    pod_id: str
    provisioned: Provisioned
    workspace: Workspace
    previous: Previous | None = None


class TaskExecAnswer(msgspec.Struct, frozen=True):
    result: ExecResult
    facts: SandboxFacts


class TaskStream(msgspec.Struct, frozen=True):
    facts: SandboxFacts
    process_id: str
    events: AsyncIterator[FrameEvent]  # ends with Exit, or raises OutcomeUnknown


class TaskSocket(msgspec.Struct, frozen=True):
    """A WebSocket into a task's pod."""

    facts: SandboxFacts
    socket: PodSocket
    traffic: Callable[[], None]  # to be called for everything real that passes: that is what renews the lease
    check: Callable[[], None]  # raises SandboxGone where the pod's time is over
    truth: Callable[[ManagerError], Awaitable[ManagerError]]  # what to tell where the connection broke with that error


class TaskForward(msgspec.Struct, frozen=True):
    facts: SandboxFacts
    response: ForwardedResponse


class TaskPort(msgspec.Struct, frozen=True):
    """What a server in a task's pod answered."""

    facts: SandboxFacts
    answer: PortAnswer
    traffic: Callable[[], None]  # to be called for each piece of the answer


class TaskPortSocket(msgspec.Struct, frozen=True):
    """A WebSocket to a server in a task's pod."""

    facts: SandboxFacts
    ws: aiohttp.ClientWebSocketResponse
    traffic: Callable[[], None]
    check: Callable[[], None]  # raises SandboxGone where the pod's time is over


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    until: str  # RFC 3339
    hard_end: str
    left_sec: float
    operations: int


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A task's sandbox as it is now."""

    task_id: str
    sandbox_id: str
    stage: Literal["active", "idle", "reclaimed"]
    profile: str
    target: str
    generation: int
    pod_id: str | None
    created_at: str  # of this pod's claim
    image_digest: str = ""
    lease: LeaseView | None = None
    ended: Previous | None = None


class Keeps(Protocol):
    """`manager.services.keeping.TaskWorkspaces`."""

    async def save(self, bound: Bound) -> Manifest: ...


class WritesThrough(Protocol):
    """`manager.services.writethrough.WriteThrough`."""

    def wanted(self, binding: Binding) -> bool: ...

    async def changed(self, bound: Bound) -> None: ...


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What of a task's workspace is durable now."""

    sandbox_id: str
    pod_id: str
    checkpoint: int  # its number
    saved_at: str
    stored_bytes: int  # in object storage


class TaskSessions:
    def __init__(
        self, store: Store, sandboxes: Sandboxes, leases: Leases, client: ExecutorClient, marks: Marks
    ) -> None:
        self._store = store
        self._marks = marks
        self._sandboxes = sandboxes
        self._leases = leases
        self._client = client
        self.kept: Keeps | None = None
        self.write_through: WritesThrough | None = None
        self.stale_results_rejected = 0

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────

    async def exec(
        self,
        principal: Principal,
        task_id: str,
        request: ExecRequest,
        *,
        profile: str | None = None,
        region: str | None = None,
        idempotency_key: str | None = None,
        pod_expected: str | None = None,
    ) -> TaskExecAnswer:
        """Runs the command in the task's sandbox and waits for its end."""
        owner = principal.owner
        once = self._once(owner, task_id, idempotency_key, "exec", request)
        for last in (False, True):
            bound = await self._bound(principal, task_id, profile, region, pod_expected)
            with self._sandboxes.operation(bound):
                await once.prepare(bound)
                try:
                    result = await self._client.exec(bound.pod, once.request)
                except ExecutorNotReached:
                    if last or not await self._replaceable(bound, once):
                        raise
                    continue
                except (OutcomeUnknown, ExecutorUnreachable) as why:
                    raise await self._truth(bound, why, once.request.id) from why
                self._check_current(bound, once.request.id)
            return TaskExecAnswer(result, _facts(bound))
        raise AssertionError("the second try returned or raised")

    @asynccontextmanager
    async def stream(
        self,
        principal: Principal,
        task_id: str,
        request: ExecRequest,
        *,
        profile: str | None = None,
        region: str | None = None,
        idempotency_key: str | None = None,
        pod_expected: str | None = None,
    ) -> AsyncIterator[TaskStream]:
        """The same as events. Errors before the command was sent are raised on entering."""
        owner = principal.owner
        once = self._once(owner, task_id, idempotency_key, "exec", request)
        async with AsyncExitStack() as stack:
            for last in (False, True):
                bound = await self._bound(principal, task_id, profile, region, pod_expected)
                with self._sandboxes.operation(bound):
                    await once.prepare(bound)
                    try:
                        events = await stack.enter_async_context(self._client.stream(bound.pod, once.request))
                    except ExecutorNotReached:
                        if last or not await self._replaceable(bound, once):
                            raise
                        continue
                    except (OutcomeUnknown, ExecutorUnreachable) as why:
                        raise await self._truth(bound, why, once.request.id) from why
                    current = self._current_events(bound, once, events)
                    try:
                        yield TaskStream(_facts(bound), once.request.id or "", current)
                    finally:
                        await current.aclose()
                    return

    # ── processes, files, usage ─────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def forward(
        self,
        principal: Principal,
        task_id: str,
        method: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        body: AsyncIterator[bytes] | bytes | None,
        *,
        profile: str | None = None,
        region: str | None = None,
        idempotency_key: str | None = None,
        pod_expected: str | None = None,
        wait_sec: float | None = 0.0,
        outcome_of: str | None = None,
    ) -> AsyncIterator[TaskForward]:
        """One of the executor's own calls, authorised and leased.

        `path` is the executor's ("/v1/files"), it and `query` percent-encoded. POST and PUT provide a sandbox, but
        not for a process that can only be in one that is there; other methods never do. `wait_sec`: how long the
        executor may be silent on purpose (a long poll); None: as long as it likes (an output that is followed).
        `outcome_of`: the id of the command that the call runs; where its answer breaks off, the error names it."""
        parts = path.split("/")
        if len(parts) < 3 or parts[:2] != ["", "v1"] or parts[2] not in _ROOTS:
            raise NotFound(f"there is no {path[:100]!r} in a sandbox")
        owner = principal.owner
        starts = method == "POST" and path in _STARTING
        once: Once | None = None
        if starts:
            body, once = self._started_once(owner, task_id, path, idempotency_key, body)
            headers = {"Content-Type": "application/json"}
        provides = method in _PROVIDES and (starts or parts[2] not in _BOUND_TO_POD)
        works = method in ("POST", "PUT", "DELETE") or (method == "GET" and path in _CARRY_CONTENT)
        works = works and path != "/v1/files/watch"  # who only looks on keeps nothing alive
        changes_files = works and method != "GET" and parts[2] in _CHANGED_BY_CALLS
        idle_sec = None if wait_sec is None else STREAM_IDLE_SEC + min(wait_sec, _MAX_WAIT_SEC)
        given = _Given(body)
        async with AsyncExitStack() as stack:
            for last in (False, True):
                if provides:
                    bound = await self._bound(principal, task_id, profile, region, pod_expected)
                else:
                    bound = await self._existing(owner, task_id, pod_expected, renew=works)
                with self._sandboxes.operation(bound) if works else nullcontext():
                    if once is not None:
                        await once.prepare(bound)
                    try:
                        response = await stack.enter_async_context(
                            self._client.forward(
                                bound.pod, method, path, query, headers, given.body(), idle_sec=idle_sec
                            )
                        )
                    except ExecutorNotReached:
                        if not await self._sandboxes.check_gone(bound):
                            raise
                        if not provides:
                            raise gone(self._sandboxes.ended(bound.binding.pod)) from None
                        if last or given.begun:
                            raise
                        if once is not None:
                            await once.not_sent()
                        continue
                    except ExecutorRefused as why:
                        raise _of_an_earlier_pod(bound, why, path) or why from None
                    except ExecutorUnreachable as why:
                        if outcome_of is None:
                            raise await self._truth(bound, why, None) from why
                        unknown = OutcomeUnknown(f"{why.message}; ask for the process by its id", id=outcome_of)
                        raise await self._truth(bound, unknown, outcome_of) from why
                    if changes_files:
                        await self._make_durable(bound)
                    self._check_current(bound, once.request.id if once is not None else outcome_of)
                    yield TaskForward(_facts(bound), response)
                    return

    # ── both ways at once ───────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def exec_socket(
        self,
        principal: Principal,
        task_id: str,
        request: ExecRequest,
        query: str = "",
        *,
        profile: str | None = None,
        region: str | None = None,
        idempotency_key: str | None = None,
        pod_expected: str | None = None,
    ) -> AsyncIterator[TaskSocket]:
        """As `stream`, over a WebSocket on which the command was started: what comes is its events, what goes its
        input and signals. The command is work for as long as the connection lasts."""
        owner = principal.owner
        once = self._once(owner, task_id, idempotency_key, "exec", request)
        async with AsyncExitStack() as stack:
            for last in (False, True):
                bound = await self._bound(principal, task_id, profile, region, pod_expected)
                with self._sandboxes.operation(bound):
                    await once.prepare(bound)
                    try:
                        opening = self._client.socket(bound.pod, "/v1/exec", query, asked_id=once.request.id)
                        socket = await stack.enter_async_context(opening)
                    except ExecutorNotReached:
                        if last or not await self._replaceable(bound, once):
                            raise
                        continue
                    await socket.send(FRAME_START, msgspec.json.encode(once.request))
                    check = partial(self._check_current, bound, once.request.id)
                    truth = partial(self._truth, bound, process_id=once.request.id)
                    yield TaskSocket(_facts(bound), socket, _nothing, check, truth)
                    return

    @asynccontextmanager
    async def terminal_socket(
        self, principal: Principal, task_id: str, terminal_id: str, query: str, *, pod_expected: str | None = None
    ) -> AsyncIterator[TaskSocket]:
        """A connection to a terminal that is there. It is no work by itself: traffic is.

        Raises NotFound, SandboxGone, ExecutorRefused."""
        bound = await self._existing(principal.owner, task_id, pod_expected, renew=False)
        async with AsyncExitStack() as stack:
            try:
                opening = self._client.socket(bound.pod, f"/v1/terminals/{terminal_id}", query)
                socket = await stack.enter_async_context(opening)
            except ExecutorNotReached:
                if not await self._sandboxes.check_gone(bound):
                    raise
                raise gone(self._sandboxes.ended(bound.binding.pod)) from None
            traffic = Traffic(lambda: self._sandboxes.operation(bound))
            stack.callback(traffic.close)
            check = partial(self._check_current, bound, None)
            truth = partial(self._truth, bound, process_id=None)
            yield TaskSocket(_facts(bound), socket, traffic.passed, check, truth)

    # ── servers in the pod ──────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def port(
        self,
        principal: Principal,
        task_id: str,
        method: str,
        port: int,
        target: str,
        headers: list[tuple[str, str]],
        body: AsyncIterator[bytes] | None,
        *,
        pod_expected: str | None = None,
    ) -> AsyncIterator[TaskPort]:
        """A call to a server in the task's pod. No method provides a sandbox: in a new one nothing would listen. It is
        work until its answer begins, and then while something passes."""
        bound = await self._existing(principal.owner, task_id, pod_expected, renew=True)
        async with AsyncExitStack() as stack:
            traffic = self._traffic(bound, stack)
            sent = _passing(body, traffic) if body is not None else None
            with self._sandboxes.operation(bound):
                calling = self._client.port(bound.pod, method, port, target, headers, sent)
                answer = await self._reached(bound, stack, calling)
            self._check_current(bound, None)
            yield TaskPort(_facts(bound), answer, traffic.passed)

    @asynccontextmanager
    async def port_socket(
        self,
        principal: Principal,
        task_id: str,
        port: int,
        target: str,
        headers: list[tuple[str, str]],
        protocols: list[str],
        *,
        pod_expected: str | None = None,
    ) -> AsyncIterator[TaskPortSocket]:
        """A WebSocket to it: work while messages pass."""
        bound = await self._existing(principal.owner, task_id, pod_expected, renew=True)
        async with AsyncExitStack() as stack:
            traffic = self._traffic(bound, stack)
            with self._sandboxes.operation(bound):
                opening = self._client.port_socket(bound.pod, port, target, headers, protocols)
                ws = await self._reached(bound, stack, opening)
            yield TaskPortSocket(_facts(bound), ws, traffic.passed, partial(self._check_current, bound, None))

    def _traffic(self, bound: Bound, stack: AsyncExitStack) -> Traffic:
        traffic = Traffic(lambda: self._sandboxes.operation(bound))
        stack.callback(traffic.close)
        return traffic

    async def _reached(self, bound: Bound, stack: AsyncExitStack, opening: AbstractAsyncContextManager[T]) -> T:
        """Raises SandboxGone where it turns out that the pod has ended."""
        try:
            return await stack.enter_async_context(opening)
        except ExecutorNotReached:
            if not await self._sandboxes.check_gone(bound):
                raise
            raise gone(self._sandboxes.ended(bound.binding.pod)) from None

    # ── the task itself ─────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, principal: Principal, task_id: str) -> TaskView:
        """Raises NotFound for a task that was never used."""
        binding = await self._sandboxes.find(principal.owner, task_id)
        if binding is None:
            raise _unknown(task_id)
        return await self._view(binding)

    async def view(self, binding: Binding, *, ask: bool = True) -> TaskView:
        """Of any sandbox with a pod. `ask`: also the executor, for work that no operation holds."""
        return await self._view(binding, ask=ask)

    async def usage(self, binding: Binding) -> bytes | None:
        """What the sandbox uses, as its executor says; None where it does not answer."""
        pod = self._sandboxes.bound_of(binding).pod
        try:
            async with self._client.forward(pod, "GET", "/v1/usage", "", {}, None, idle_sec=USAGE_SEC) as response:
                return b"".join([piece async for piece in response.body])
        except ManagerError:
            return None

    async def list(self, principal: Principal) -> list[TaskView]:
        """Every task of the project that has a sandbox, oldest first."""
        bindings = await self._store.list_bindings(principal.owner)
        bindings = [binding for binding in bindings if owned_by_name(binding.task_id) is None]
        bindings.sort(key=lambda binding: (binding.created_at, binding.sandbox_id))
        return [await self._view(binding, ask=False) for binding in bindings]

    async def writeback(self, principal: Principal, task_id: str, *, pod_expected: str | None = None) -> Written:
        """Makes what is in the task's pod durable: of that very pod, or not at all.

        Raises NotFound, SandboxGone where the pod (that was asked for) has ended, NotSupported, StoreUnavailable."""
        if self.kept is None:
            raise NotSupported("this manager has no object storage, so that no workspace can be kept")
        owner = principal.owner
        binding = await self._sandboxes.find(owner, task_id)
        if binding is not None and pod_expected is not None and binding.pod != pod_expected:
            raise gone(self._sandboxes.ended(pod_expected) or binding.previous)
        bound = await self._existing(owner, task_id, pod_expected, renew=True)
        with self._sandboxes.operation(bound):
            saved = await self.kept.save(bound)
        self._check_current(bound, None)
        return Written(
            sandbox_id=bound.binding.sandbox_id,
            pod_id=bound.binding.pod,
            checkpoint=saved.number,
            saved_at=when(saved.saved_at),
            stored_bytes=saved.stored_bytes,
        )

    async def retire(self, owner: Owner, task_id: str, *, by: Principal | str = "manager") -> None:
        """Ends the task's sandbox; no error where there is none. `by`: for the audit log."""
        await self._sandboxes.retire(owner, task_id, by=by)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _started_once(
        self, owner: Owner, task_id: str, path: str, key: str | None, body: AsyncIterator[bytes] | bytes | None
    ) -> tuple[bytes, Once]:
        """The body of a call that starts something, with the id that keeps it from being started twice."""
        if path == "/v1/processes":
            once = self._once(owner, task_id, key, "process", _decoded(_EXEC_REQUEST, body, "process to start"))
            return msgspec.json.encode(once.request), once
        if path == "/v1/sessions":
            session = _decoded(_SESSION_REQUEST, body, "session to make")
            shell = ExecRequest(command=["-"], cwd=session.cwd, env=session.env, user=session.user, id=session.id)
            once = self._once(owner, task_id, key, "session", shell)
            return msgspec.json.encode(msgspec.structs.replace(session, id=once.request.id)), once
        asked = _decoded(_TERMINAL_REQUEST, body, "terminal to open")
        program = ExecRequest(
            command=["-"] if asked.command is None else asked.command, cwd=asked.cwd, env=asked.env, user=asked.user,
            id=asked.id,
        )  # fmt: skip
        once = self._once(owner, task_id, key, "terminal", program)
        return msgspec.json.encode(msgspec.structs.replace(asked, id=once.request.id)), once

    def _once(self, owner: Owner, task_id: str, key: str | None, kind: str, request: ExecRequest) -> Once:
        if (bad := bad_field(request)) is not None:
            raise InvalidRequest(f"{bad[0]} {bad[1]}", field=bad[0])
        return Once(self._marks, owner, task_id, key, kind, request)

    async def _bound(
        self, principal: Principal, task_id: str, profile: str | None, region: str | None, pod_expected: str | None
    ) -> Bound:
        owner = principal.owner
        if pod_expected is not None:
            await self._expect(owner, task_id, pod_expected)
        bound = await self._sandboxes.ensure(owner, task_id, profile, region, by=principal)
        if pod_expected is not None and bound.binding.pod != pod_expected:
            raise _replaced(pod_expected, bound.binding.pod)
        return bound

    async def _expect(self, owner: Owner, task_id: str, pod: str) -> None:
        """Raises SandboxReplaced or SandboxGone unless the task is bound to that very pod: no other is provided."""
        binding = await self._sandboxes.find(owner, task_id)
        if binding is None and owned_by_name(task_id) is not None:
            await self._sandboxes.ensure(owner, task_id)  # one that is not there, or has no pod, is that first
        if binding is None or binding.pod != pod:
            raise _replaced(pod, binding.pod if binding is not None else "")
        if binding.state is BindingState.ENDED:
            raise gone(binding.ended)

    async def _existing(self, owner: Owner, task_id: str, pod_expected: str | None, *, renew: bool) -> Bound:
        binding = await self._sandboxes.find(owner, task_id)
        if owned_by_name(task_id) is not None and (binding is None or binding.state is not BindingState.BOUND):
            kept = await self._sandboxes.ensure(owner, task_id)  # its keeper says what it is
            if pod_expected is not None and kept.binding.pod != pod_expected:
                raise _replaced(pod_expected, kept.binding.pod)
            return kept
        if binding is None:
            raise _unknown(task_id)
        if binding.state is BindingState.CLAIMING:
            raise Provisioning("the task's sandbox is still being made")
        if binding.state is BindingState.CLOSING and renew:
            raise Provisioning("the task's sandbox is just being reclaimed, with its files kept; try again shortly")
        if pod_expected is not None and binding.pod != pod_expected:
            raise _replaced(pod_expected, binding.pod)
        if binding.state is BindingState.ENDED:
            raise gone(binding.ended)
        if not renew:
            return self._sandboxes.bound_of(binding)
        bound = await self._sandboxes.ensure_found(binding)
        if bound is None:
            raise gone(self._sandboxes.ended(binding.pod))
        return bound

    async def _make_durable(self, bound: Bound) -> None:
        """What a call has just changed in the pod. Raises what says that it is there, but not yet durable."""
        through = self.write_through
        if through is None or not through.wanted(bound.binding):
            return
        try:
            await through.changed(bound)
        except SandboxGone:
            self._sandboxes.invalidate(bound.binding)
            raise
        except ManagerError as why:
            if isinstance(why, ExecutorUnreachable) and (truth := await self._truth(bound, why, None)) is not why:
                raise truth from why
            why.message = (
                f"the change is in the sandbox, but not yet durable: {why.message}. Repeating the call is safe"
            )
            why.details |= {"in_sandbox": True, "durable": False}
            raise

    async def _replaceable(self, bound: Bound, once: Once) -> bool:
        """The executor was not reached: whether its pod has ended, so that another may run the command."""
        if not await self._sandboxes.check_gone(bound):
            return False
        await once.not_sent()
        return True

    def _check_current(self, bound: Bound, process_id: str | None) -> None:
        """Raises SandboxGone where the pod's time was over before its answer came: it speaks for nobody any more."""
        ended = self._sandboxes.ended(bound.binding.pod)
        if ended is not None:
            self.stale_results_rejected += 1
            error = gone(ended)
            if process_id is not None:
                error.details["id"] = process_id
            raise error

    async def _current_events(
        self, bound: Bound, once: Once, events: AsyncIterator[FrameEvent]
    ) -> AsyncGenerator[FrameEvent, None]:
        try:
            async for event in events:
                if self._sandboxes.ended(bound.binding.pod) is not None:
                    self._check_current(bound, once.request.id)
                yield event
        except OutcomeUnknown as why:
            raise await self._truth(bound, why, once.request.id) from why

    async def _truth(self, bound: Bound, why: ManagerError, process_id: str | None) -> ManagerError:
        """What to tell whose command was under way when its pod could not be spoken to any more: that the pod has
        ended, and how, where that is so."""
        ended = await self._sandboxes.ended_under(bound)
        if ended is None:
            return why
        error = gone(ended)
        if process_id is not None:
            error.details["id"] = process_id
        return error

    async def _view(self, binding: Binding, *, ask: bool = True) -> TaskView:
        """`ask`: also the executor, for work that no operation holds."""
        live = binding.state is not BindingState.ENDED
        lease = await self._store.get_lease(binding.sandbox_id) if binding.state is BindingState.BOUND else None
        operations = max(lease.operations if lease else 0, self._leases.operations(binding.sandbox_id))
        working = operations > 0 or binding.state is BindingState.CLAIMING
        if ask and binding.state is BindingState.BOUND and not working:
            working = await self._runs(binding)
        return TaskView(
            task_id=binding.task_id,
            sandbox_id=binding.sandbox_id,
            stage="reclaimed" if not live else "active" if working else "idle",
            profile=binding.profile,
            target=binding.target,
            generation=binding.generation,
            pod_id=binding.pod if live and binding.pod else None,
            created_at=when(binding.created_at),
            image_digest=self._sandboxes.image_digest(binding) if live else "",
            lease=LeaseView(
                until=when(time.time() + lease.until - lease.now),  # the store's clock is compared with itself only
                hard_end=when(time.time() + lease.hard_end - lease.now),
                left_sec=round(max(0.0, lease.until - lease.now), 3),
                operations=operations,
            )
            if lease is not None
            else None,
            ended=_previous(binding.ended if not live else None),
        )

    async def _runs(self, binding: Binding) -> bool:
        """Whether background work runs, as far as the executor says so."""
        try:
            info = await self._client.lease(self._sandboxes.bound_of(binding).pod)
        except ManagerError:
            return False
        return info.running > 0


def _unknown(name: str) -> NotFound:
    return NotFound("there is no such task" if owned_by_name(name) is None else "there is no such sandbox")


def _nothing() -> None:
    pass


class _Given:
    """A caller's body, and whether any of it has gone to a pod."""

    def __init__(self, given: AsyncIterator[bytes] | bytes | None) -> None:
        self._given = given
        self.begun = False

    def body(self) -> AsyncIterator[bytes] | bytes | None:
        return self._given if self._given is None or isinstance(self._given, bytes) else self._chunks(self._given)

    async def _chunks(self, given: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.begun = True
        async for chunk in given:
            yield chunk


async def _passing(body: AsyncIterator[bytes], traffic: Traffic) -> AsyncIterator[bytes]:
    async for piece in body:
        traffic.passed()
        yield piece


def _decoded(decoder: msgspec.json.Decoder[T], body: AsyncIterator[bytes] | bytes | None, what: str) -> T:
    """Raises InvalidRequest."""
    if not isinstance(body, bytes):
        raise InvalidRequest(f"the body must be JSON: a {what}", field="command")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        raise InvalidRequest(f"the body is no {what}: {str(why)[:300]}") from None


def _of_an_earlier_pod(bound: Bound, refused: ExecutorRefused, path: str) -> SandboxGone | None:
    """What to say of an id that the pod does not know, of a task that had another pod before: it went with that one,
    as far as anybody can tell. None where there was no earlier pod, or something else was refused."""
    ended = bound.binding.previous
    if refused.code != "not_found" or ended is None or path.count("/") < 3 or path.split("/")[2] not in _BOUND_TO_POD:
        return None
    return SandboxGone(
        f"this pod knows no such id; the task's last pod has ended ({ended.reason}), and what ran in it with it",
        reason=ended.reason,
        at=when(ended.at),
    )


def _facts(bound: Bound) -> SandboxFacts:
    binding = bound.binding
    return SandboxFacts(binding.sandbox_id, binding.pod, bound.provisioned, bound.workspace, _previous(bound.previous))


def _previous(ended: PodEnded | None) -> Previous | None:
    return None if ended is None else Previous(ended.reason, when(ended.at))


def _replaced(expected: str, found: str) -> SandboxReplaced:
    now = f"it has {found} now" if found else "it has none now"
    return SandboxReplaced(f"the task's pod is not {expected[:64]!r} any more: {now}", pod_id=found or None)
