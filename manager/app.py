"""The composition root: opens store, data planes, services and surfaces in order, and closes them in reverse."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from ipaddress import ip_network
from typing import Final

from aiohttp import web

from manager.api.listener import Listener
from manager.api.routes import create_app
from manager.api.services import InFlight, Services
from manager.config import BadConfig, ManagerConfig, TargetConfig, variable
from manager.egress.dial import Dialler, DialRules
from manager.egress.fetch import Fetcher
from manager.errors import ManagerError, StoreUnavailable
from manager.executor_client import pod_token
from manager.metrics import CONTENT_TYPE, Metrics
from manager.model import BindingState, Owner, Role, new_id, owned_by_name
from manager.providers.base import Provider
from manager.providers.local.network import OutboundSettings
from manager.providers.local.provider import LocalProvider
from manager.services.audit import Audit
from manager.services.checkpoints import Checkpoints
from manager.services.core import Services as Core
from manager.services.pool import UNCLAIMED_SEC
from manager.services.sources import Sources, spool_in
from manager.services.tenants import Tenants
from manager.store.base import Store
from manager.store.embedded import embedded_valkey
from manager.store.objects import PROBE_KEY, Objects
from manager.store.opening import open_objects
from manager.store.redis import RedisStore

log = logging.getLogger(__name__)

Say = Callable[[str], None]

_ENDED_REASONS: Final = ("destroyed", "expired", "evicted", "oom", "node_lost", "lost")
_ENDING_AT_ONCE: Final = 8  # pods, when everything ends
_FILES_SEC: Final = 0.1  # a stop's answer waits so long for the files of its pod, once that has ended


class Stop:
    """How this manager was asked to end: not yet, leaving pods for the next one, or with everything.

    Before `serving`, a signal cancels the start instead."""

    def __init__(self, *, interrupt_ends_pods: bool) -> None:
        self.event = asyncio.Event()
        self.ends_pods = False
        self.starting: asyncio.Task[object] | None = None
        self._interrupt_ends_pods = interrupt_ends_pods

    def listen(self, forced: Callable[[], None]) -> None:
        """Takes SIGINT and SIGTERM over. `forced`: called for a SIGINT that comes while ending."""
        self._forced = forced
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGTERM, self.ask)

    def ask(self) -> None:
        if self.event.is_set():
            return
        self.event.set()
        if self.starting is not None:
            self.starting.cancel()

    def _interrupted(self) -> None:
        if self.event.is_set():
            self._forced()
        self.ends_pods = self._interrupt_ends_pods
        self.ask()


class Manager:
    """One running manager, for who started it."""

    def __init__(self, config: ManagerConfig, core: Core, tenants: Tenants, store: Store, objects: Objects) -> None:
        self.config, self.core, self.tenants, self.store, self.objects = config, core, tenants, store, objects
        self.port = 0
        self.metrics_port: int | None = None
        self.loops: asyncio.Task[None]
        self.in_flight: InFlight

    async def stopped(self, stop: Stop) -> None:
        """Returns when asked to stop. Raises what a background loop died of."""
        asked = asyncio.create_task(stop.event.wait(), name="wait-for-stop")
        try:
            await asyncio.wait([asked, self.loops], return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if self.loops.done():
            await self.loops
            raise RuntimeError("the background loops ended by themselves")


@asynccontextmanager
async def running(config: ManagerConfig, stop: Stop, say: Say) -> AsyncIterator[Manager]:
    """A manager that serves. `say` gets lines for people on what is being waited for.

    Raises BadConfig (also for an address that is taken), ManagerError (the store or a data plane), OSError."""
    secret, pepper = _secrets(config)
    async with AsyncExitStack() as stack:
        store = await open_store(config, stack, say)
        objects = await open_objects_of(config, stack, say)
        audit = Audit(store)
        stack.push_async_callback(audit.close)
        tenants = Tenants(store, objects, pepper, audit=audit)
        stack.push_async_callback(tenants.close)
        providers = await _open_providers(config, secret, stack, say)
        core = Core(
            store=store,
            providers=providers,
            regions={target.name: target.region for target in config.targets},
            profiles=config.profiles,
            policy=config.policy,
            terms=config.terms,
            secret=secret,
            holder=new_id("m"),
            audit=audit,
            audit_keep_sec=config.audit_keep_days * 86_400.0,
            objects=objects,
            cache=store,
            start_limit_sec=float(config.start_limit_sec),
        )
        core.longlived.sources = sources_of(config, core.checkpoints, stack)
        stack.push_async_callback(core.close)
        stack.push_async_callback(_end_pods, core, store, providers, stop, say)
        await core.start()
        if found := [pod for watch in core.watches.values() for pod in watch.pods.values()]:
            say(f"pods      {len(found)} of an earlier run found again")
        manager = Manager(config, core, tenants, store, objects)
        manager.loops = asyncio.create_task(core.run_forever(), name="services")
        stack.push_async_callback(_ended, manager.loops)
        services = surface(config, core, tenants, store)
        manager.in_flight = services.in_flight
        if config.metrics_port is not None:
            metrics = _metrics_app(services.metrics)
            manager.metrics_port = await _listen(stack, metrics, config, "metrics_host", "metrics_port")
        manager.port = await _listen(stack, create_app(services), config, "host", "port")
        stack.push_async_callback(_drain, services, stop, config)
        yield manager


# ── opening ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _secrets(config: ManagerConfig) -> tuple[bytes, bytes]:
    if not config.manager_secret or not config.key_pepper:
        raise BadConfig("SOJOURN_MANAGER_SECRET and SOJOURN_KEY_PEPPER are needed")
    for name, value in (("SOJOURN_MANAGER_SECRET", config.manager_secret), ("SOJOURN_KEY_PEPPER", config.key_pepper)):
        if len(value) < 32:
            raise BadConfig(f"{name} needs at least 32 characters; make one with: openssl rand -hex 32")
    return config.manager_secret.encode(), config.key_pepper.encode()


async def open_store(config: ManagerConfig, stack: AsyncExitStack, say: Say) -> RedisStore:
    url = config.redis_url
    if url is None:
        url = await stack.enter_async_context(embedded_valkey(config.data_dir))
    store = RedisStore.at(url)
    stack.push_async_callback(store.close)
    took = await store.ping()
    where = "your Redis" if config.redis_url else f"embedded Valkey in {config.data_dir}"
    say(f"store     {where}, answers in {took * 1000:.1f} ms")
    for warning in await store.warnings():
        log.warning("store_may_lose_writes", extra={"what": warning})
        say(f"          warning: {warning}")
    return store


async def open_objects_of(config: ManagerConfig, stack: AsyncExitStack, say: Say) -> Objects:
    """Raises BadConfig where the setting makes no sense, StoreUnavailable where nothing answers there."""
    try:
        objects = open_objects(config.objects, config.data_dir)
    except ValueError as why:
        raise BadConfig(f"{variable('objects')}: {why}") from why
    stack.push_async_callback(objects.close)
    await objects.head(PROBE_KEY)
    say(f"objects   {objects.describe}")
    if config.redis_url and not config.objects:
        say(f"          warning: {variable('objects')} is not set: what must last is on this machine alone")
    return objects


def sources_of(config: ManagerConfig, checkpoints: Checkpoints, stack: AsyncExitStack) -> Sources:
    """What sandboxes' workspaces may begin with: public https servers, and the buckets that the operator names."""
    threads = ThreadPoolExecutor(8, thread_name_prefix="source-names")
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)
    refused = tuple(ip_network(network) for network in config.outbound_refused)
    dialler = Dialler(DialRules(ports=frozenset({443}), refused=refused), threads)
    return Sources(
        checkpoints,
        Fetcher(dialler),
        prefixes=config.source_prefixes,
        open_at=lambda url: open_objects(url, config.data_dir),
        spool_dir=spool_in(config.data_dir),
    )


async def _open_providers(config: ManagerConfig, secret: bytes, stack: AsyncExitStack, say: Say) -> dict[str, Provider]:
    opened: dict[str, Provider] = {}
    for target in config.targets:
        if target.provider == "kubernetes":
            opened[target.name] = await _open_cluster(target, secret, stack, say)
            continue
        if target.provider != "local":
            raise BadConfig(
                f"target {target.name!r}: provider {target.provider!r} comes with a later version; this one has "
                "`local` and `kubernetes`"
            )
        provider = LocalProvider(
            target.name,
            config.data_dir,
            lambda pod: pod_token(secret, pod),
            insecure=config.insecure_no_isolation,
            allow_missing_limits=config.allow_missing_limits,
            unclaimed_sec=UNCLAIMED_SEC,
            outbound=OutboundSettings.of(config),
            bundle=config.executor_bundle,
            files_sec=_FILES_SEC,
        )
        stack.push_async_callback(provider.close)
        await _check_isolation(config, provider, say)
        opened[target.name] = provider
    return opened


async def _open_cluster(target: TargetConfig, secret: bytes, stack: AsyncExitStack, say: Say) -> Provider:
    """Raises BadConfig where there is no way to the cluster, TargetUnavailable where it does not answer."""
    try:  # only here: it takes most of a second and 50 MB
        from manager.providers.kubernetes.client import ClusterClient, NoCluster
        from manager.providers.kubernetes.provider import KubernetesProvider
    except ImportError as why:
        raise BadConfig(
            f"target {target.name!r}: the package `kubernetes` is missing ({why}); install sojourn-server[kubernetes]"
        ) from why
    try:
        client = await ClusterClient.connect(target.kubeconfig, target.context)
    except NoCluster as why:
        raise BadConfig(f"target {target.name!r}: {why}") from why
    provider = KubernetesProvider(
        target.name,
        client,
        target.namespace,
        lambda pod: pod_token(secret, pod),
        unclaimed_sec=UNCLAIMED_SEC,
    )
    stack.push_async_callback(provider.close)
    version = await provider.check()
    say(f"cluster   {target.name}: Kubernetes {version} at {client.host}, namespace {target.namespace}")
    return provider


async def _check_isolation(config: ManagerConfig, provider: LocalProvider, say: Say) -> None:
    """Says what this machine gives. Raises BadConfig where that is no isolation and nobody asked to do without."""
    outbound = any(profile.network != "none" and profile.target == provider.name for profile in config.profiles)
    found = await provider.capabilities(network=outbound)
    if found.tier is None and not config.insecure_no_isolation:
        raise BadConfig(
            f"this machine gives no isolation: {found.why_not}.\nTo get it: {found.advice}\n"
            "`doctor` tells more. To run commands as plain processes of this machine all the same, where whatever a "
            "task runs can read and change what you can: --insecure-no-isolation"
        )
    limits = [name for name in ("memory", "cpu", "pids") if name not in found.missing_limits]
    if found.tier is None:
        say("isolation NONE: commands run as plain processes of this machine (--insecure-no-isolation)")
    else:
        say(f"isolation namespaces, {found.tier} tier; limits held: {', '.join(limits) or 'none'}")
    for name, why in found.missing_limits.items():
        say(f"          warning: no limit of {name}: {why}")
    if found.network is not None and found.network.way is not None:
        why = f" ({found.network.why_not})" if found.network.why_not else ""
        say(f"network   outbound, by profile: {found.network.way}{why}; public addresses only")
    elif found.network is not None:
        say(f"          warning: profiles with network outbound are refused: {found.network.why_not}")


def surface(config: ManagerConfig, core: Core, tenants: Tenants, store: Store) -> Services:
    async def only_project() -> Owner | None:
        owners = {Owner(key.tenant, key.project) for key in await tenants.every_key() if key.role is not Role.PLATFORM}
        owners |= {binding.owner for binding in await store.list_bindings()} | set(config.projects)
        return owners.pop() if len(owners) == 1 else None

    async def not_ready() -> str | None:
        try:
            await store.ping()
        except StoreUnavailable as why:
            return why.message
        behind = [name for name, watch in core.watches.items() if not watch.known]
        return f"the pods of {', '.join(behind)} are not known yet" if behind else None

    services = Services(
        config=config,
        tasks=core.tasks,
        longlived=core.longlived,
        tenants=tenants,
        audit=core.audit_archive,
        pool=core.pool,
        metrics=Metrics(),
        held=store.held,
        find_sandbox=store.find_sandbox,
        only_project=only_project,
        not_ready=not_ready,
    )
    _add_readings(services.metrics, core, services.in_flight)
    return services


def _add_readings(metrics: Metrics, core: Core, in_flight: InFlight) -> None:
    """Figures that the services keep themselves, read at each scrape."""
    pool, leases, sandboxes = core.pool, core.leases, core.sandboxes

    def pools(field: str) -> Callable[[], Mapping[tuple[str, ...], float]]:
        return lambda: {(view.profile,): float(getattr(view, field)) for view in pool.views()}

    def ended() -> Mapping[tuple[str, ...], float]:
        counts = dict.fromkeys(_ENDED_REASONS, 0)
        for reason, count in sandboxes.ended_by_reason.items():
            counts[reason if reason in counts else "lost"] += count
        return {(reason,): float(count) for reason, count in counts.items()}

    metrics.gauge(
        "sojourn_watch_current",
        "1 where what is known of a target's pods is the present state.",
        ("target",),
        lambda: {(name,): float(watch.synced) for name, watch in core.watches.items()},
    )
    metrics.gauge("sojourn_requests_in_flight", "Requests under way.", (), lambda: {(): float(in_flight.count)})
    by_profile = ("profile",)
    metrics.gauge("sojourn_pool_ready", "Warm pods ready to be claimed.", by_profile, pools("ready"))
    metrics.gauge("sojourn_pool_pending", "Warm pods asked for and not ready.", by_profile, pools("pending"))
    metrics.gauge(
        "sojourn_pool_wanted", "Warm pods, ready and pending, that there should be.", by_profile, pools("wanted")
    )
    metrics.gauge("sojourn_pool_demand", "Pods claimed within the length of a start.", by_profile, pools("demand"))
    metrics.gauge(
        "sojourn_pool_utilisation",
        "Pods claimed within the length of a start, by the warm pods there are; over 1: first commands wait.",
        by_profile,
        pools("utilisation"),
    )
    metrics.gauge("sojourn_pool_start_seconds", "How long a warm pod takes to start.", by_profile, pools("start_sec"))
    metrics.counter("sojourn_pool_claims", "Warm pods claimed by this manager.", by_profile, pools("claims"))
    metrics.counter("sojourn_pool_misses", "First commands that found no warm pod.", by_profile, pools("misses"))
    metrics.counter("sojourn_pool_created", "Warm pods made by this manager.", by_profile, pools("created"))
    metrics.counter("sojourn_pool_failures", "Warm pods that could not be made.", by_profile, pools("failed"))
    metrics.gauge(
        "sojourn_pool_leads", "1 where this manager is the one that refills.", (), lambda: {(): float(pool.leads)}
    )
    metrics.counter(
        "sojourn_claims",
        "Sandboxes provided, from a warm pod or a cold one.",
        ("provisioned",),
        lambda: {(kind,): float(count) for kind, count in sandboxes.provisioned.items()},
    )
    metrics.counter("sojourn_sandboxes_ended", "Sandboxes whose pod has ended, by reason.", ("reason",), ended)
    metrics.gauge(
        "sojourn_operations", "Operations that hold leases here.", (), lambda: {(): float(leases.operations_total)}
    )
    metrics.counter("sojourn_lease_flushes", "Lease writes.", (), lambda: {(): float(leases.flushes)})
    metrics.counter(
        "sojourn_lease_flush_failures", "Lease writes that failed.", (), lambda: {(): float(leases.flush_failures)}
    )


def _metrics_app(metrics: Metrics) -> web.Application:
    async def scrape(_request: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", scrape)
    return app


async def _listen(
    stack: AsyncExitStack, app: web.Application, config: ManagerConfig, host_field: str, port_field: str
) -> int:
    """The port that it really is. Raises BadConfig where the address cannot be had."""
    host, port = getattr(config, host_field), getattr(config, port_field)
    listener = Listener(
        app,
        host=host,
        port=port,
        keepalive_sec=float(config.keepalive_sec),
        max_connections=config.max_connections,
    )
    try:
        await stack.enter_async_context(listener)
    except OSError as why:
        if why.errno == errno.EADDRINUSE:
            what = f"port {port} is taken: end what listens there, or set {variable(port_field)} to another"
        else:
            what = f"that address cannot be had: {why.strerror or why}; {variable(host_field)} and "
            what += f"{variable(port_field)} say which"
        raise BadConfig(f"listening on {host}:{port}: {what}") from why
    return listener.port


# ── closing ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _drain(services: Services, stop: Stop, config: ManagerConfig) -> None:
    """Requests are taken for a while, by connections that then close. After it new ones are refused and those under way
    may finish, but not where their pods end anyway."""
    services.in_flight.leaving = True
    if not stop.ends_pods:
        await asyncio.sleep(config.leaving_sec)
    services.in_flight.ending = True
    if not stop.ends_pods and not await services.in_flight.drained(float(config.drain_sec)):
        log.warning("requests_cut_off", extra={"requests": services.in_flight.count})


async def _ended(loops: asyncio.Task[None]) -> None:
    loops.cancel()
    await asyncio.wait([loops])


async def _end_pods(core: Core, store: Store, providers: Mapping[str, Provider], stop: Stop, say: Say) -> None:
    """Everything that runs for anybody ends, where the one who started all of it has said so."""
    if not stop.ends_pods:
        return
    await core.sandboxes.close()
    await core.claims.close()
    await core.longlived.close()
    kept = [binding for binding in await store.list_bindings() if owned_by_name(binding.task_id) is not None]
    await _each([partial(core.keeper.stop_for_good, binding) for binding in kept])
    bindings = [binding for binding in await store.list_bindings() if binding.state is BindingState.BOUND]
    await _each([partial(core.sandboxes.end, binding, "destroyed") for binding in bindings])
    left: list[Callable[[], Awaitable[object]]] = []
    for provider in providers.values():
        left += [partial(provider.delete, pod.name) for pod in await provider.list()]
    await _each(left)
    if kept:
        say(f"stopped   {len(kept)} long-lived sandboxes")
    say(f"ended     {len(bindings)} sandboxes, {len(left)} warm pods")


async def _each(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    room = asyncio.Semaphore(_ENDING_AT_ONCE)

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        async with room:
            try:
                await call()
            except (ManagerError, OSError) as why:
                log.warning("pod_not_ended", extra={"why": str(why)})

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(one(call), name="end-pod")
