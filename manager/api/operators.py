"""For operators and the people who own a project: health, keys, pools, targets, the documents."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from aiohttp import web

from manager.api.docs_page import CONTENT_SECURITY_POLICY
from manager.api.parsing import no_query, read_json, segment
from manager.api.server import DOCUMENTS, PRINCIPAL, SERVICES, json_reply
from manager.api.wire import (
    BODY_BYTES,
    CreateKey,
    HealthState,
    KeyCreated,
    KeyInfo,
    KeyList,
    PoolList,
    PoolState,
    TargetList,
    TargetState,
    rfc3339,
)
from manager.errors import InvalidRequest
from manager.store.base import KeyRecord

log = logging.getLogger(__name__)

_MAX_EXPIRY_SEC: Final = 10 * 365 * 86_400


async def healthz(request: web.Request) -> web.Response:
    ending = request.app[SERVICES].in_flight.ending
    return json_reply(HealthState(status="shutting_down" if ending else "ok"))


async def readyz(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    if services.in_flight.ending:
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


async def list_pools(request: web.Request) -> web.Response:
    no_query(request)
    config = request.app[SERVICES].config
    allowed = config.policy(request[PRINCIPAL].owner).profiles
    pools = [
        PoolState(
            profile=view.profile,
            target=view.target,
            ready=view.ready,
            starting=view.creating,
            wanted=view.wanted,
            message=view.last_error,
        )
        for view in request.app[SERVICES].pool.views()
        if view.profile in allowed
    ]
    return json_reply(PoolList(pools))
