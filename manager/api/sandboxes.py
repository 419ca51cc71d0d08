"""Long-lived sandboxes: `/sandbox/sandboxes/v1`. What goes on inside one is served by `manager.api.tasks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from aiohttp import web

from manager.api.parsing import OWN_ID, idempotency_key, known_query, no_body, no_query, read_json, segment
from manager.api.server import PRINCIPAL, SERVICES, json_reply
from manager.api.services import Services
from manager.api.tasks import lease_state, sandbox_id_in
from manager.api.wire import (
    BODY_BYTES,
    CreateSandbox,
    ForkSandbox,
    KeptProgress,
    LongLivedSandbox,
    LongLivedSandboxList,
    PatchSandbox,
    SnapshotInfo,
    SnapshotList,
    TakeSnapshot,
    rfc3339,
)
from manager.errors import InvalidRequest, NotFound
from manager.model import SandboxRecord, SandboxState
from manager.services.longlived.asked import Asked, Changes
from manager.services.manifests import Snapshot

WAIT_SEC: Final = 60.0
_MAX_WAIT_SEC: Final = 3600.0
_MAX_PAGE: Final = 200
_LOOKED_AT: Final = 2000  # records that one request for a page of what is wanted looks at, or a page more
_SNAPSHOT_SEGMENT: Final = 4  # of /sandbox/snapshots/v1/{snapshot_id}
_COMING: Final = (SandboxState.CREATING, SandboxState.STARTING, SandboxState.STOPPING)


async def create(request: web.Request) -> web.Response:
    services, principal = request.app[SERVICES], request[PRINCIPAL]
    no_query(request)
    body = await read_json(request, CreateSandbox, BODY_BYTES, services.config.body_timeout_sec)
    asked = Asked(
        profile=body.profile, autostop_sec=body.autostop_sec, ttl_sec=body.ttl_sec, autostart=body.autostart,
        name=body.name, env=body.env, metadata=body.metadata,
        origin="" if body.source is None else msgspec.json.encode(body.source).decode(),
    )  # fmt: skip
    record = await services.longlived.create(
        principal, asked, key=idempotency_key(request), wait_sec=_wait(body.wait_sec), source=body.source
    )
    return await _reply(services, record, 201)


async def fork(request: web.Request) -> web.Response:
    services, principal = request.app[SERVICES], request[PRINCIPAL]
    no_query(request)
    sandbox_id = sandbox_id_in(request)
    body = ForkSandbox()
    if request.body_exists:
        body = await read_json(request, ForkSandbox, BODY_BYTES, services.config.body_timeout_sec)
    asked = Asked(
        profile=None, autostop_sec=body.autostop_sec, ttl_sec=body.ttl_sec, autostart=body.autostart, name=body.name,
        env=body.env, metadata=body.metadata, origin=f"sandbox {sandbox_id}",
    )  # fmt: skip
    record = await services.longlived.fork(
        principal, sandbox_id, asked, key=idempotency_key(request), wait_sec=_wait(body.wait_sec)
    )
    return await _reply(services, record, 201)


async def listed(request: web.Request) -> web.Response:
    """In pages, by id. What is destroyed is left out, unless it is asked for."""
    services, owner = request.app[SERVICES], request[PRINCIPAL].owner
    query = known_query(request, ("state", "name", "metadata", "limit", "after"))
    limit = _number("limit", query.get("limit", "100"), 1, _MAX_PAGE)
    after, wanted = query.get("after", ""), _filter(query)
    found: list[SandboxRecord] = []
    more, looked_at = True, 0
    while more and len(found) < limit and looked_at < _LOOKED_AT:
        page = await services.longlived.page(owner, after=after, limit=limit)
        more = len(page) == limit
        for record in page:
            if len(found) == limit:
                more = True
                break
            looked_at, after = looked_at + 1, record.sandbox_id
            if wanted(record):
                found.append(record)
    shown = [await _shown(services, record, ask=False) for record in found]
    return json_reply(LongLivedSandboxList(sandboxes=shown, next=after if more else None))


async def get(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    no_query(request)
    record = await services.longlived.get(request[PRINCIPAL].owner, sandbox_id_in(request))
    return json_reply(await _shown(services, record))


async def patch(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    no_query(request)
    body = await read_json(request, PatchSandbox, BODY_BYTES, services.config.body_timeout_sec)
    changes = Changes(
        name=body.name, metadata=body.metadata, autostop_sec=body.autostop_sec, ttl_sec=body.ttl_sec,
        autostart=body.autostart,
    )  # fmt: skip
    record = await services.longlived.change(request[PRINCIPAL], sandbox_id_in(request), changes)
    return json_reply(await _shown(services, record))


async def stop(request: web.Request) -> web.Response:
    services, principal = request.app[SERVICES], request[PRINCIPAL]
    await no_body(request, services.config.body_timeout_sec)
    record = await services.longlived.stop(
        principal, principal.owner, sandbox_id_in(request), reason="asked", wait_sec=_wait_of(request)
    )
    return await _reply(services, record, 200)


async def start(request: web.Request) -> web.Response:
    services, principal = request.app[SERVICES], request[PRINCIPAL]
    await no_body(request, services.config.body_timeout_sec)
    record = await services.longlived.start(
        principal, principal.owner, sandbox_id_in(request), wait_sec=_wait_of(request)
    )
    return await _reply(services, record, 200)


async def destroy(request: web.Request) -> web.Response:
    services, principal = request.app[SERVICES], request[PRINCIPAL]
    await no_body(request, services.config.body_timeout_sec)
    query = known_query(request, ("purge", "force", "wait_sec"))
    record = await services.longlived.destroy(
        principal, principal.owner, sandbox_id_in(request), purge=_flag(query, "purge"), force=_flag(query, "force"),
        wait_sec=_wait_of(request, query),
    )  # fmt: skip
    if record.state is SandboxState.DESTROYED:
        return web.Response(status=204)
    return await _reply(services, record, 202)


# ── snapshots ───────────────────────────────────────────────────────────────────────────────────────────────────


async def take_snapshot(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    no_query(request)
    body = TakeSnapshot()
    if request.body_exists:
        body = await read_json(request, TakeSnapshot, BODY_BYTES, services.config.body_timeout_sec)
    taken = await services.longlived.snapshot(request[PRINCIPAL], sandbox_id_in(request), body.name)
    return json_reply(_snapshot(taken), 201)


async def list_snapshots(request: web.Request) -> web.Response:
    services, query = request.app[SERVICES], known_query(request, ("limit", "after"))
    limit = _number("limit", query.get("limit", "100"), 1, _MAX_PAGE)
    found = await services.longlived.snapshots(request[PRINCIPAL].owner, after=query.get("after", ""), limit=limit)
    following = found[-1].snapshot_id if len(found) == limit else None
    return json_reply(SnapshotList(snapshots=[_snapshot(one) for one in found], next=following))


async def get_snapshot(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    no_query(request)
    snapshot_id = _snapshot_id(segment(request, _SNAPSHOT_SEGMENT))
    return json_reply(_snapshot(await services.longlived.get_snapshot(request[PRINCIPAL].owner, snapshot_id)))


async def delete_snapshot(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    no_query(request)
    await services.longlived.delete_snapshot(request[PRINCIPAL], _snapshot_id(segment(request, _SNAPSHOT_SEGMENT)))
    return web.Response(status=204)


def _snapshot(one: Snapshot) -> SnapshotInfo:
    return SnapshotInfo(
        snapshot_id=one.snapshot_id,
        name=one.name,
        created_at=rfc3339(one.created_at),
        sandbox_id=one.manifest.workspace,
        stored_bytes=one.manifest.stored_bytes,
        keep_until=None if one.keep_until is None else rfc3339(one.keep_until),
    )


def _snapshot_id(text: str) -> str:
    """Raises NotFound for what no snapshot can be called."""
    if not OWN_ID.match(text):
        raise NotFound("there is no such snapshot")
    return text


# ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def _reply(services: Services, record: SandboxRecord, status: int) -> web.Response:
    """202 while what was asked for goes on."""
    shown = await _shown(services, record)
    return json_reply(shown, 202 if record.state in _COMING else status)


async def _shown(services: Services, record: SandboxRecord, *, ask: bool = True) -> LongLivedSandbox:
    """`ask`: also the store, for its pod and lease."""
    progress = services.longlived.progress(record.sandbox_id)
    view = await services.longlived.pod_view(record) if ask and record.state is SandboxState.RUNNING else None
    return LongLivedSandbox(
        sandbox_id=record.sandbox_id,
        state=record.state,
        reason=record.reason,
        since=rfc3339(record.since),
        name=record.name,
        profile=record.profile,
        target=record.target,
        region=services.region_of(record.target),
        autostop_sec=record.autostop_sec,
        ttl_sec=record.ttl_sec,
        autostart=record.autostart,
        created_at=rfc3339(record.created_at),
        expires_at=rfc3339(record.expires_at),
        metadata=record.metadata,
        env_names=sorted(record.env),
        pod_id=None if view is None else view.pod_id,
        lease=None if view is None else lease_state(view.lease),
        progress=None if progress is None else KeptProgress(bytes=progress.bytes, total_bytes=progress.total_bytes),
    )


def _filter(query: Mapping[str, str]) -> Filter:
    state, name, metadata = query.get("state"), query.get("name"), query.get("metadata")
    states = frozenset(SandboxState) - {SandboxState.DESTROYED}
    if state is not None:
        try:
            states = frozenset(SandboxState(one) for one in state.split(","))
        except ValueError:
            raise InvalidRequest(f"state must be of {', '.join(SandboxState)}", field="state") from None
    key, equals, value = metadata.partition("=") if metadata is not None else ("", "", "")
    if metadata is not None and not equals:
        raise InvalidRequest("metadata must be <key>=<value>", field="metadata")
    return Filter(states, name, None if metadata is None else (key, value))


class Filter:
    def __init__(self, states: frozenset[SandboxState], name: str | None, metadata: tuple[str, str] | None) -> None:
        self._states, self._name, self._metadata = states, name, metadata

    def __call__(self, record: SandboxRecord) -> bool:
        if record.state not in self._states or (self._name is not None and record.name != self._name):
            return False
        return self._metadata is None or record.metadata.get(self._metadata[0]) == self._metadata[1]


def _number(name: str, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not low <= int(text) <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}", field=name)
    return int(text)


def _flag(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false", field=name)
    return text == "true"


def _wait_of(request: web.Request, query: Mapping[str, str] | None = None) -> float:
    text = (known_query(request, ("wait_sec",)) if query is None else query).get("wait_sec")
    return WAIT_SEC if text is None else float(_number("wait_sec", text, 0, int(_MAX_WAIT_SEC)))


def _wait(seconds: float) -> float:
    if not 0 <= seconds <= _MAX_WAIT_SEC:
        raise InvalidRequest(f"wait_sec must be from 0 to {_MAX_WAIT_SEC:.0f}", field="wait_sec")
    return seconds
