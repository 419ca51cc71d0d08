"""Every sandbox of a project, of whichever kind, as it is now: `/api/v1/sandboxes`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from executor.wire import UsageReport
from manager.api.parsing import OWN_ID, no_query, segment
from manager.api.server import PRINCIPAL, SERVICES, json_reply
from manager.api.services import Services
from manager.api.tasks import sandbox_state
from manager.api.wire import SandboxList, SandboxState, rfc3339
from manager.errors import NotFound
from manager.model import Binding, BindingState, SandboxRecord, owned_by_name
from manager.model import SandboxState as Kept
from manager.services.tasks import TaskView


async def list_sandboxes(request: web.Request) -> web.Response:
    """Tasks' and long-lived ones; pool pods are nobody's, and what is destroyed is no more."""
    services, principal = request.app[SERVICES], request[PRINCIPAL]
    no_query(request)
    shown = [sandbox_state(services, view) for view in await services.tasks.list(principal)]
    after = ""
    while page := await services.longlived.page(principal.owner, after=after):
        after = page[-1].sandbox_id
        shown += [await _kept_state(services, record) for record in page if record.state is not Kept.DESTROYED]
    return json_reply(SandboxList(shown))


async def get_sandbox(request: web.Request) -> web.Response:
    services, principal = request.app[SERVICES], request[PRINCIPAL]
    no_query(request)
    sandbox_id = segment(request, 4)
    binding = await services.find_sandbox(sandbox_id)
    if binding is None or binding.owner != principal.owner or owned_by_name(binding.task_id) is not None:
        if not OWN_ID.match(sandbox_id):
            raise NotFound("there is no such sandbox")
        record = await services.longlived.get(principal.owner, sandbox_id)
        if record.state is Kept.DESTROYED:
            raise NotFound("there is no such sandbox")
        return json_reply(await _kept_state(services, record, ask=True))
    view = await services.tasks.get(principal, binding.task_id)
    if view.sandbox_id != sandbox_id:
        raise NotFound("there is no such sandbox")
    usage = await _usage(services, binding) if binding.state is BindingState.BOUND else None
    return json_reply(sandbox_state(services, view, usage=usage))


async def _usage(services: Services, binding: Binding) -> UsageReport | None:
    body = await services.tasks.usage(binding)
    try:
        return None if body is None else msgspec.json.decode(body, type=UsageReport)
    except msgspec.MsgspecError:
        return None  # what a pod says is a stranger's


async def _kept_state(services: Services, record: SandboxRecord, *, ask: bool = False) -> SandboxState:
    """A long-lived sandbox in the shape of a task's. `ask`: also its pod."""
    binding = await services.longlived.binding(record) if record.state is Kept.RUNNING else None
    if binding is not None and binding.pod:
        usage = await _usage(services, binding) if ask else None
        return sandbox_state(services, await services.tasks.view(binding, ask=ask), record, usage)
    view = TaskView(
        task_id="", sandbox_id=record.sandbox_id, stage="reclaimed", profile=record.profile, target=record.target,
        generation=0, pod_id=None, created_at=rfc3339(record.created_at),
    )  # fmt: skip
    return sandbox_state(services, view, record)
