"""From settings to a process that runs until it is told to end: `up`, `serve` and the offline `keys`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, TextIO

import uvloop

from manager import datadir
from manager.app import Manager, Stop, open_objects_of, open_store, running
from manager.config import DEFAULT_PROFILE, BadConfig, ManagerConfig, ProjectPolicy
from manager.errors import InvalidRequest, ManagerError, Unauthenticated
from manager.model import Owner, Role
from manager.services.audit import Audit
from manager.services.tenants import Tenants
from manager.store.embedded import EmbeddedStoreError

log = logging.getLogger(__name__)

Tell = Callable[[str, TextIO], None]

DEVELOPER: Final = Owner("dev", "default")
_POOL_POLL_SEC: Final = 0.1
_POOL_STILL_SEC: Final = 1.0
_LOOK_FOR_GARBAGE: Final = (10_000, 20, 20)


def up(config: ManagerConfig, tell: Callable[..., None]) -> int:
    """Everything on this machine, until Ctrl-C or SIGTERM."""
    datadir.prepare(config.data_dir)
    config = for_one_machine(_with_secrets(config, make=True))
    return _run(_up(config, tell), tell)


def serve(config: ManagerConfig, tell: Callable[..., None]) -> int:
    """A production manager, until SIGTERM or Ctrl-C."""
    if config.redis_url is None:
        raise BadConfig("SOJOURN_REDIS_URL is not set: `serve` needs your Redis or Valkey; `up` brings its own")
    if any(target.provider == "local" for target in config.targets):
        datadir.prepare(config.data_dir)
    config = _with_secrets(config, make=False)
    return _run(_serve(config, tell), tell)


def keys(config: ManagerConfig, arguments: argparse.Namespace, tell: Callable[..., None]) -> int:
    """Creates, lists or revokes keys in the store."""
    if config.redis_url is None:
        datadir.prepare(config.data_dir)
    config = _with_secrets(config, make=config.redis_url is None)
    return _run(_keys(config, arguments, tell), tell)


def _run(work: Coroutine[Any, Any, int], tell: Callable[..., None]) -> int:
    try:
        return uvloop.run(work)
    except (BadConfig, EmbeddedStoreError) as why:
        tell(f"sojourn-server: {why}", sys.stderr)
        return 2
    except (ManagerError, OSError) as why:
        log.error("manager_failed", extra={"why": str(why)}, exc_info=None if isinstance(why, ManagerError) else why)
        tell(f"sojourn-server: {why}", sys.stderr)
        return 1


# ── settings that depend on the command ─────────────────────────────────────────────────────────────────────────


def _with_secrets(config: ManagerConfig, *, make: bool) -> ManagerConfig:
    """The configuration with both secrets: as given, else those in the data directory. Raises BadConfig."""
    found: dict[str, str] = {}
    names = (("manager_secret", "SOJOURN_MANAGER_SECRET"), ("key_pepper", "SOJOURN_KEY_PEPPER"))
    for field, variable in names:
        value = getattr(config, field) or datadir.secret(config.data_dir, field.replace("_", "-"), make=make)
        if value is None:
            raise BadConfig(
                f"{variable} is not set. Make one with `openssl rand -hex 32`, give it to every manager of one Redis, "
                f"and keep it: without it no API key is valid. {variable}_FILE may name a file that holds it"
            )
        found[field] = value
    return dataclasses.replace(config, manager_secret=found["manager_secret"], key_pepper=found["key_pepper"])


def for_one_machine(config: ManagerConfig) -> ManagerConfig:
    """`up`'s own project may use every profile, and its default profile promises only what the machine can hold."""
    projects = dict(config.projects)
    if DEVELOPER not in projects:
        others = [profile.name for profile in config.profiles if profile.name != DEFAULT_PROFILE]
        projects[DEVELOPER] = ProjectPolicy(profiles=(DEFAULT_PROFILE, *others), concurrency=None)
    lenient = config.allow_missing_limits or config.origins.get("profiles", "default") == "default"
    return dataclasses.replace(config, projects=projects, allow_missing_limits=lenient)


# ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _up(config: ManagerConfig, tell: Callable[..., None]) -> int:
    tell("Starting Sojourn; Ctrl-C ends it.")
    stop = Stop(interrupt_ends_pods=True)
    stop.listen(lambda: _forced(tell))
    try:
        stop.starting = asyncio.current_task()
        async with running(config, stop, tell) as manager:
            try:
                await _pool_filled(manager, tell)
                key = await _development_key(manager)
                address = _address(config.host, manager.port)
                datadir.write(config.data_dir, datadir.ADDRESS, address)
                stop.starting = None
                _keep_out_of_garbage()
                _greet(config, manager, address, key, tell)
                await manager.stopped(stop)
                tell("Ending " + ("with all sandboxes" if stop.ends_pods else "; sandboxes stay for the next start"))
            finally:
                datadir.remove(config.data_dir, datadir.ADDRESS)
    except asyncio.CancelledError:
        _started_stopping()
        if not stop.event.is_set():
            raise
    return 0


async def _serve(config: ManagerConfig, tell: Callable[..., None]) -> int:
    stop = Stop(interrupt_ends_pods=False)
    stop.listen(lambda: _forced(tell))
    if config.cleanup_secret is None:
        log.warning("cleanup_secret_unset", extra={"setting": "SANDBOX_CLEANUP_AUTH_SECRET"})
    try:
        stop.starting = asyncio.current_task()
        async with running(config, stop, lambda line: log.info("starting", extra={"what": line})) as manager:
            stop.starting = None
            _keep_out_of_garbage()
            log.info("serving", extra={"address": _address(config.host, manager.port), "metrics": manager.metrics_port})
            await manager.stopped(stop)
            log.info("stopping")
    except asyncio.CancelledError:
        _started_stopping()
        if not stop.event.is_set():
            raise
    return 0


def _keep_out_of_garbage() -> None:
    """What is here now stays to the end. Each full look at it would hold all requests up, for tens of milliseconds."""
    gc.freeze()
    gc.set_threshold(*_LOOK_FOR_GARBAGE)


def _started_stopping() -> None:
    """A signal cancelled the start; what had been opened is closed by now, and the process ends in peace."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


def _forced(tell: Callable[..., None]) -> None:
    tell("Ended at once. What was left running is found, and cleared up, by the next start.", sys.stderr)
    os._exit(130)


async def _pool_filled(manager: Manager, tell: Callable[..., None]) -> None:
    """Waits until the warm pool is there, telling of each step; not where it cannot be had, nor for the rest of it
    while a manager that crashed still has the word on refilling."""
    told, moved_at = -1, time.monotonic()
    while time.monotonic() < moved_at + manager.config.start_limit_sec and not manager.loops.done():
        views = manager.core.pool.views()
        ready, wanted = sum(view.ready for view in views), sum(view.wanted for view in views)
        if ready != told or any(view.pending for view in views):
            moved_at = time.monotonic()
        if ready != told:
            tell(f"pool      {ready} of {wanted} sandboxes warm")
            told = ready
        if ready >= wanted or (ready and time.monotonic() - moved_at > _POOL_STILL_SEC):
            return
        if error := next((view.last_error for view in views if view.last_error), None):
            tell(f"          warning: {error}")
            return
        await asyncio.sleep(_POOL_POLL_SEC)


async def _development_key(manager: Manager) -> str:
    """The key that the data directory keeps, made anew where the store does not know it."""
    data_dir = manager.config.data_dir
    kept = datadir.read(data_dir, datadir.API_KEY)
    if kept is not None:
        try:
            await manager.tenants.authenticate(kept)
            return kept
        except (Unauthenticated, InvalidRequest):
            log.warning("development_key_replaced")
    key, _ = await manager.tenants.create_key(DEVELOPER, Role.ADMIN, "development key of `up`")
    datadir.write(data_dir, datadir.API_KEY, key)
    return key


def _address(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _greet(config: ManagerConfig, manager: Manager, address: str, key: str, tell: Callable[..., None]) -> None:
    client = Path(sys.executable).parent / "sojourn"
    sojourn = str(client) if client.exists() else "sojourn"
    if client.exists() and client.is_relative_to(Path.cwd()):
        sojourn = str(client.relative_to(Path.cwd()))
    tell("")
    tell(f"  address   {address}   (interface: {address}/docs)")
    tell(f"  key       {key}")
    tell(f"            also in {config.data_dir / datadir.API_KEY}")
    if config.cleanup_secret is None:
        tell("  note      SANDBOX_CLEANUP_AUTH_SECRET is not set: only API keys can retire tasks")
    tell("")
    tell("Try, in another terminal:")
    if config.origins.get("data_dir") != "default" or config.data_dir != ManagerConfig().data_dir:
        tell(f"  export SANDBOX_GATEWAY_URL={address} SANDBOX_API_KEY={key}")
    tell(f"  {sojourn} exec my-task -- python3 -c 'print(6 * 7)'")
    tell(f"  {sojourn} exec my-task -- bash -c 'echo kept > note.txt; ls -l; cat note.txt'")
    tell(f"  curl -s {address}/sandbox/task/my-task/exec -H 'X-Api-Key: {key}' -d '{{\"command\": \"id; pwd\"}}'")
    tell("")


# ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _keys(config: ManagerConfig, arguments: argparse.Namespace, tell: Callable[..., None]) -> int:
    async with AsyncExitStack() as stack:
        store = await open_store(config, stack, lambda _line: None)
        objects = await open_objects_of(config, stack, lambda _line: None)
        audit = Audit(store)
        stack.push_async_callback(audit.close)
        tenants = Tenants(store, objects, (config.key_pepper or "").encode(), audit=audit)
        stack.push_async_callback(tenants.close)
        if arguments.action == "create":
            expires = None if arguments.expires_in_sec is None else time.time() + arguments.expires_in_sec
            owner = Owner(arguments.tenant, arguments.project)
            key, record = await tenants.create_key(
                owner, Role(arguments.role), arguments.name, arguments.member, expires
            )
            tell(f"{record.key_id} of {owner}, {record.role}; its text is shown this once:", sys.stderr)
            tell(key)
            return 0
        if arguments.action == "revoke":
            if not await tenants.revoke_any(arguments.key_id):
                tell(f"sojourn-server: there is no key {arguments.key_id}", sys.stderr)
                return 1
            tell(f"revoked {arguments.key_id}")
            return 0
        for record in await tenants.every_key():
            if arguments.tenant in (None, record.tenant) and arguments.project in (None, record.project):
                owner = Owner(record.tenant, record.project)
                tell(f"{record.key_id}  {owner}  {record.role}  {record.member or '-'}  {record.name}")
        return 0
