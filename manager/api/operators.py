"""For operators and the people who own a project: health, keys, pools, targets, the documents."""

from __future__ import annotations

import logging
import time
from datetime import datetime
from typing import Any, Final

from aiohttp import web

from manager.api.docs_page import CONTENT_SECURITY_POLICY
from manager.api.parsing import known_query, no_query, read_json, segment
from manager.api.server import DOCUMENTS, PRINCIPAL, SERVICES, json_reply
from manager.api.wire import (
    BODY_BYTES,
    AuditEventInfo,
    AuditEventList,
    CreateKey,
    HealthState,
    KeyCreated,
    KeyInfo,
    KeyList,
    PoolList,
    PoolState,
    QuotaList,
    QuotaState,
    TargetList,
    TargetState,
    rfc3339,
)
from manager.errors import InvalidRequest
from manager.services.audit_archive import PAGE_MAX
from manager.store.base import KeyRecord

log = logging.getLogger(__name__)

_MAX_EXPIRY_SEC: Final = 10 * 365 * 86_400


async def healthz(request: web.Request) -> web.Response:
    leaving = request.app[SERVICES].in_flight.leaving
    return json_reply(HealthState(status="shutting_down" if leaving else "ok"))


async def readyz(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    if services.in_flight.leaving:
        return json_reply(HealthState(status="shutting_down"), 503)
    missing = await services.not_ready()
    if missing:
        return json_reply(HealthState(status="degraded", message=missing), 503)
    return json_reply(HealthState(status="ok"))


async def openapi_json(request: web.Request) -> web.Response:
    return web.Response(body=request.app[DOCUMENTS].openapi, content_type="application/json")


async def docs(request: web.Request) -> web.Response:
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
    return web.Response(text=request.app[DOCUMENTS].page, content_type="text/html", headers=headers)


# ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def list_keys(request: web.Request) -> web.Response:
    no_query(request)
    records = await request.app[SERVICES].tenants.list_keys(request[PRINCIPAL])
    return json_reply(KeyList([KeyInfo(**_fields(record)) for record in records]))


async def create_key(request: web.Request) -> web.Response:
    services, principal = request.app[SERVICES], request[PRINCIPAL]
    no_query(request)
    body = await read_json(request, CreateKey, BODY_BYTES, services.config.body_timeout_sec)
    expires_at = None
    if body.expires_in_sec is not None:
        if not 1 <= body.expires_in_sec <= _MAX_EXPIRY_SEC:
            raise InvalidRequest(f"expires_in_sec must be from 1 to {_MAX_EXPIRY_SEC}", field="expires_in_sec")
        expires_at = time.time() + body.expires_in_sec
    key, record = await services.tenants.issue_key(principal, body.role, body.name, body.member, expires_at)
    log.info("key_created", extra={"key": record.key_id, "by": principal.key_id, "role": str(record.role)})
    return json_reply(KeyCreated(**_fields(record), key=key), 201, {"Cache-Control": "no-store"})


async def revoke_key(request: web.Request) -> web.Response:
    principal, key_id = request[PRINCIPAL], segment(request, 4)
    await request.app[SERVICES].tenants.revoke_key(principal, key_id)
    log.info("key_revoked", extra={"key": key_id, "by": principal.key_id})
    return web.Response(status=204)


def _fields(record: KeyRecord) -> dict[str, Any]:
    return {
        "key_id": record.key_id,
        "name": record.name,
        "tenant": record.tenant,
        "project": record.project,
        "role": record.role,
        "member": record.member,
        "created_at": rfc3339(record.created_at),
        "expires_at": None if record.expires_at is None else rfc3339(record.expires_at),
    }


# ── the audit log ───────────────────────────────────────────────────────────────────────────────────────────────


async def list_audit(request: web.Request) -> web.Response:
    """The project's events from `since` on, oldest first."""
    query = known_query(request, ("since", "after", "limit"))
    since = 0.0
    if "since" in query:
        try:
            moment = datetime.fromisoformat(query["since"])
            since = moment.timestamp()
        except (ValueError, OverflowError):
            raise InvalidRequest("since must be a time as in RFC 3339", field="since") from None
        if moment.tzinfo is None or not 0 <= since < 1e11:
            raise InvalidRequest("since must be a time as in RFC 3339, with its zone", field="since")
    limit = query.get("limit", "100")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX):
        raise InvalidRequest(f"limit must be a number from 1 to {PAGE_MAX}", field="limit")
    page = await request.app[SERVICES].audit.page(
        request[PRINCIPAL].owner, since=since, after=query.get("after", ""), limit=int(limit)
    )
    shown = [
        AuditEventInfo(
            event_id=event.event_id, at=rfc3339(event.at), action=event.action, subject=event.subject, by=event.by,
            role=event.role, member=event.member, address=event.address, details=event.details,
        )
        for event in page.events
    ]  # fmt: skip
    return json_reply(AuditEventList(shown, page.next))


# ── the data plane ──────────────────────────────────────────────────────────────────────────────────────────────


async def list_targets(request: web.Request) -> web.Response:
    """Where the caller's project may run, with the profiles it may use there."""
    no_query(request)
    config = request.app[SERVICES].config
    allowed = config.policy(request[PRINCIPAL].owner).profiles
    targets = [
        TargetState(
            name=target.name,
            provider=target.provider,
            region=target.region,
            default=target is config.targets[0],
            profiles=[each.name for each in config.profiles if each.target == target.name and each.name in allowed],
        )
        for target in config.targets
    ]
    return json_reply(TargetList(targets))


async def list_quotas(request: web.Request) -> web.Response:
    """The caller's project's, counted anew from what holds a slot now."""
    no_query(request)
    services, owner = request.app[SERVICES], request[PRINCIPAL].owner
    held, policy = await services.held(owner), services.config.policy(owner)
    state = QuotaState(
        tenant=owner.tenant,
        project=owner.project,
        slots_held=held.slots,
        slots_limit=policy.concurrency,
        cpu_held=held.cpu,
        cpu_limit=policy.cpu,
        memory_held_bytes=held.memory_bytes,
        memory_limit_bytes=policy.memory_bytes,
    )
    return json_reply(QuotaList([state]))


async def list_pools(request: web.Request) -> web.Response:
    no_query(request)
    config = request.app[SERVICES].config
    allowed = config.policy(request[PRINCIPAL].owner).profiles
    pools = [
        PoolState(
            profile=view.profile,
            target=view.target,
            ready=view.ready,
            pending=view.pending,
            wanted=view.wanted,
            message=view.last_error,
        )
        for view in request.app[SERVICES].pool.views()
        if view.profile in allowed
    ]
    return json_reply(PoolList(pools))
