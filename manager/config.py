"""The manager's settings: a TOML file, then the environment, then flags, read once in `__main__` and handed down.

Every setting is one entry of SETTINGS, with its name in the file, its variable and the check of its value; `origins`
says for each where its value came from. Secrets come from files or the environment, never from flags, and are masked
wherever settings are shown.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, ip_address, ip_network
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from manager.config_cluster import ClusterTable, check_cluster, check_digest, cluster_pod
from manager.config_pool import PoolTable, pool_size
from manager.egress.addresses import is_public
from manager.model import ClusterPod, LeaseTerms, Owner, Profile

DEFAULT_PROFILE: Final = "sandboxes-default"
_PLAIN: Final = Profile(name=DEFAULT_PROFILE)
_DAY_SEC: Final = 86_400
_LEAST_DISK_BYTES: Final = 16 << 20
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")
_SIZE: Final = re.compile(r"(\d{1,15})(Ki|Mi|Gi|Ti|k|M|G|T)?\Z")
_UNITS: Final = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_UNITS_DECIMAL: Final = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


# Pods never reach an address of these, their own included.
_PRIVATE: Final = tuple(
    IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15")
)

T = TypeVar("T")


class BadConfig(Exception):
    """A setting is missing or makes no sense; the message names it and says what it should be. Nothing was started."""


# ── one value each ──────────────────────────────────────────────────────────────────────────────────────────────


def size_bytes(value: object) -> int:
    """Bytes of "1Gi", "512Mi", "10G" or a plain number. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    matched = _SIZE.match(value) if isinstance(value, str) else None
    if matched is None or int(matched[1]) == 0:
        raise ValueError(f'must be a size over 0 such as "512Mi" or "1Gi", not {value!r}')
    unit = matched[2] or ""
    return int(matched[1]) * (_UNITS.get(unit) or _UNITS_DECIMAL[unit])


def _whole(low: int, high: int, unit: str = "") -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 12:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"must be a whole number{unit} from {low} to {high}, not {value!r}")
        return value

    return parse


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"must be a line of text, not {value!r}")
    return value


def _secret(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\n" in value.strip():
        raise ValueError("must be one line of text")
    return value.strip()


def _redis(value: object) -> str:
    text = _text(value)
    if urlsplit(text).scheme not in ("redis", "rediss", "unix"):
        raise ValueError("must be a URL that starts with redis://, rediss:// or unix://")
    return text


def _objects(value: object) -> str:
    text = _text(value)
    parts = urlsplit(text)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/") and parts.path.strip("/"):
        return text
    if parts.scheme in ("s3", "gs", "az") and parts.netloc and not parts.username and not parts.password:
        return text
    raise ValueError("must be a URL such as file:///directory, s3://bucket/prefix, gs://... or az://..., no password")


def _path(value: object) -> Path:
    return Path(_text(value)).expanduser().absolute()


def _metrics_port(value: object) -> int | None:
    return None if value == "off" else _whole(0, 65_535)(value)


def _level(value: object) -> str:
    text = _text(value).upper()
    if text not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"must be debug, info, warning or error, not {value!r}")
    return text


def _listed(one: Callable[[str], T]) -> Callable[[object], tuple[T, ...]]:
    """A list of strings, or one string with commas."""

    def parse(value: object) -> tuple[T, ...]:
        items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str | int) for item in items):
            raise ValueError(f"must be a list, not {value!r}")
        return tuple(one(str(item)) for item in items if str(item))

    return parse


def _source_prefix(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("s3", "gs", "az") or not parts.netloc or "@" in parts.netloc:
        raise ValueError("must hold URLs such as s3://bucket/path, gs://... or az://..., no password")
    return text


def _resolver(text: str) -> str:
    try:
        public = is_public(ip_address(text))
    except ValueError:
        public = False
    if not public or ":" in text:
        raise ValueError(f"must hold public IPv4 addresses, and {text!r} is none: pods reach no others")
    return text


def _network(text: str) -> str:
    try:
        return str(ip_network(text))
    except ValueError as why:
        raise ValueError(f"must hold networks such as 198.51.100.0/24: {why}") from None


def _dialled_port(text: str) -> int:
    return _whole(1, 65_535)(text)


def _pod_range(value: object) -> str:
    network: IPv4Network | None = None
    with contextlib.suppress(ValueError):
        network = IPv4Network(_text(value))
    if network is None or network.prefixlen > 28 or not any(network.subnet_of(private) for private in _PRIVATE):
        raise ValueError(f'must be a private network of 16 IPv4 addresses or more, "10.213.0.0/16", not {value!r}')
    return str(network)


def _outbound(value: object) -> str:
    if value not in ("auto", "routed", "proxy"):
        raise ValueError(f"must be auto, routed or proxy, not {value!r}")
    return str(value)


def _flag_only(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value: `field` in the file and in ManagerConfig, `env` outside.

    `parse` raises ValueError saying what it takes."""

    field: str
    env: str | None  # None: a flag only
    parse: Callable[[object], Any]
    doc: str
    secret: bool = False
    flag: str | None = None


_seconds = _whole(1, 365 * _DAY_SEC, " of seconds")

SETTINGS: Final = (
    Setting(field="host", env="SOJOURN_HOST", parse=_text, flag="--host", doc="address to listen on"),
    Setting(
        field="port", env="SOJOURN_PORT", parse=_whole(0, 65_535), flag="--port",
        doc="port to listen on; 0: any free one",
    ),
    Setting(field="metrics_host", env="SOJOURN_METRICS_HOST", parse=_text, doc="address of /metrics"),
    Setting(
        field="metrics_port", env="SOJOURN_METRICS_PORT", parse=_metrics_port,
        doc='port of /metrics; unset: the one after SOJOURN_PORT; 0: any free one; "off": none',
    ),
    Setting(
        field="data_dir", env="SOJOURN_DATA_DIR", parse=_path, flag="--data-dir",
        doc="what this machine keeps: embedded Valkey, local pods, generated secrets; mode 0700",
    ),
    Setting(
        field="redis_url", env="SOJOURN_REDIS_URL", parse=_redis, secret=True,
        doc="your own Redis or Valkey; unset: an embedded Valkey in the data directory (`up` only)",
    ),
    Setting(
        field="objects", env="SOJOURN_OBJECTS", parse=_objects,
        doc="what must last: file:///directory, s3://bucket/prefix, gs://..., az://...; unset: in the data directory",
    ),
    Setting(
        field="source_prefixes", env="SOJOURN_SOURCE_PREFIXES", parse=_listed(_source_prefix),
        doc="bucket URLs, `s3://bucket/path`: sandboxes may load what lies in them under their tenant's name",
    ),
    Setting(
        field="audit_keep_days", env="SOJOURN_AUDIT_KEEP_DAYS", parse=_whole(1, 36_500, " of days"),
        doc="events of the audit log are deleted after so many days",
    ),
    Setting(
        field="manager_secret", env="SOJOURN_MANAGER_SECRET", parse=_secret, secret=True,
        doc="what pod tokens are derived from; the same for every manager of one store",
    ),
    Setting(
        field="key_pepper", env="SOJOURN_KEY_PEPPER", parse=_secret, secret=True,
        doc="what API keys are hashed with; the same for every manager of one store",
    ),
    Setting(
        field="cleanup_secret", env="SANDBOX_CLEANUP_AUTH_SECRET", parse=_secret, secret=True,
        doc="the bearer secret that may retire tasks; unset: only the owner's API key may",
    ),
    Setting(
        field="active_ttl_sec", env="SANDBOX_TASK_ACTIVE_TTL", parse=_seconds,
        doc="one sign of running work keeps a sandbox this long",
    ),
    Setting(
        field="idle_ttl_sec", env="SANDBOX_TASK_IDLE_TTL", parse=_seconds,
        doc="a quiet sandbox is reclaimed this long after its last operation",
    ),
    Setting(
        field="max_ttl_sec", env="SANDBOX_TASK_MAX_TTL", parse=_seconds,
        doc="no work carries a sandbox's pod past this age",
    ),
    Setting(
        field="start_limit_sec", env="SOJOURN_START_LIMIT_SEC", parse=_whole(1, 3600, " of seconds"),
        doc="a request waits this long for a sandbox that is being made",
    ),
    Setting(
        field="leaving_sec", env="SOJOURN_LEAVING_SEC", parse=_whole(0, 3600, " of seconds"),
        doc="at shutdown, requests are taken for so long still, until whoever sends them here has learnt of it",
    ),
    Setting(
        field="drain_sec", env="SOJOURN_DRAIN_SEC", parse=_whole(1, 3600, " of seconds"),
        doc="at shutdown, requests under way have this long to finish",
    ),
    Setting(
        field="body_timeout_sec", env="SOJOURN_BODY_TIMEOUT_SEC", parse=_whole(1, 3600, " of seconds"),
        doc="a request's JSON body has to arrive within this; a streamed upload may pause this long",
    ),
    Setting(
        field="keepalive_sec", env="SOJOURN_KEEPALIVE_SEC", parse=_whole(1, 3600, " of seconds"),
        doc="an idle client connection is closed after this",
    ),
    Setting(
        field="max_connections", env="SOJOURN_MAX_CONNECTIONS", parse=_whole(1, 1_000_000),
        doc="client connections at once; those beyond are answered 429 and closed",
    ),
    Setting(
        field="project_requests", env="SOJOURN_PROJECT_REQUESTS", parse=_whole(1, 1_000_000),
        doc="requests of one project under way at once, open streams too; those beyond are answered 429",
    ),
    Setting(
        field="key_requests_per_sec", env="SOJOURN_KEY_REQUESTS_PER_SEC", parse=_whole(1, 1_000_000),
        doc="requests with one key a second, to one manager; two seconds' worth at once; more are answered 429",
    ),
    Setting(
        field="outbound", env="SOJOURN_OUTBOUND", parse=_outbound,
        doc="how pods with network outbound reach it: routed (needs root), proxy, or auto: routed where that works",
    ),
    Setting(
        field="outbound_range", env="SOJOURN_OUTBOUND_RANGE", parse=_pod_range,
        doc="private network of which each routed pod takes four addresses; this machine must have no route into it",
    ),
    Setting(
        field="outbound_resolvers", env="SOJOURN_OUTBOUND_RESOLVERS", parse=_listed(_resolver),
        doc="public name servers that routed pods ask",
    ),
    Setting(
        field="outbound_refused", env="SOJOURN_OUTBOUND_REFUSED", parse=_listed(_network),
        doc="public networks that pods must not reach all the same, such as your own",
    ),
    Setting(
        field="outbound_ports", env="SOJOURN_OUTBOUND_PORTS", parse=_listed(_dialled_port),
        doc="ports that the proxy dials for pods; routed pods reach every port",
    ),
    Setting(
        field="log_level", env="SOJOURN_LOG_LEVEL", parse=_level, flag="--log-level",
        doc="debug, info, warning or error",
    ),
    Setting(
        field="executor_bundle", env="SOJOURN_EXECUTOR_BUNDLE", parse=_path,
        doc="the executor as `make bundle` makes it, for local pods with an image; unset: dist/sojourn-executor",
    ),
    Setting(
        field="insecure_no_isolation", env=None, parse=_flag_only, flag="--insecure-no-isolation",
        doc="run commands as plain processes of this machine where isolation is not available",
    ),
    Setting(
        field="allow_missing_limits", env=None, parse=_flag_only, flag="--allow-missing-limits",
        doc="run pods without the memory, cpu or process limits that this machine cannot hold, instead of refusing",
    ),
)  # fmt: skip
_BY_FIELD: Final = {setting.field: setting for setting in SETTINGS}


def variable(field: str) -> str:
    """The environment's name of a setting, for messages."""
    return _BY_FIELD[field].env or field


# ── the tables of the file ──────────────────────────────────────────────────────────────────────────────────────


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TargetConfig(ClusterTable, frozen=True, kw_only=True):
    """A data plane: a provider and where it is, with what a cluster needs where it is one."""

    name: str
    provider: Literal["local", "kubernetes", "opensandbox", "e2b"]
    region: str | None = None


class _ProfileTable(_Table, frozen=True):
    name: str
    image: str = "host"
    isolation: Literal["namespaces", "gvisor", "none"] = "namespaces"
    cpu: float | int | None = 1.0
    memory: str | int | None = "1Gi"
    pids: int | None = 512
    disk: str | int | None = None
    network: str = "none"
    bandwidth: str | int | None = None
    connections: int | None = None
    users: tuple[str, ...] = ("sandbox",)
    tier: Literal["split", "single"] | None = None
    workspace: Literal["scratch", "volume"] | None = None
    storage_class: str | None = None
    keep_workspace: bool = True
    write_through: bool = True
    pool: PoolTable = PoolTable()
    target: str | None = None
    active_ttl_sec: int | None = None
    idle_ttl_sec: int | None = None
    max_ttl_sec: int | None = None


class _ProjectTable(_Table, frozen=True):
    profiles: list[str] | None = None
    concurrency: int | None = None
    cpu: float | int | None = None
    memory: str | int | None = None


class ProjectPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator lets one project do."""

    profiles: tuple[str, ...]  # the first is the project's own, used where a request names none
    concurrency: int | None  # sandboxes with a pod at once; None: no bound but the data plane's
    cpu: float | None = None  # cores of all of them together; None: no bound
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ManagerConfig:
    """The effective settings. Durations are whole seconds."""

    host: str = "127.0.0.1"
    port: int = 8780
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = 8781
    data_dir: Path = field(default_factory=lambda: Path("~/.local/share/sojourn").expanduser())
    redis_url: str | None = None
    objects: str | None = None
    source_prefixes: tuple[str, ...] = ()
    audit_keep_days: int = 400
    manager_secret: str | None = None
    key_pepper: str | None = None
    cleanup_secret: str | None = None
    active_ttl_sec: int = 7200
    idle_ttl_sec: int = 1800
    max_ttl_sec: int = 86_400
    start_limit_sec: int = 60
    leaving_sec: int = 0
    drain_sec: int = 10
    body_timeout_sec: int = 60
    keepalive_sec: int = 75
    max_connections: int = 8192
    project_requests: int = 4096
    key_requests_per_sec: int = 2000
    outbound: Literal["auto", "routed", "proxy"] = "auto"
    outbound_range: str = "10.213.0.0/16"
    outbound_resolvers: tuple[str, ...] = ("1.1.1.1", "8.8.8.8")
    outbound_refused: tuple[str, ...] = ()
    outbound_ports: tuple[int, ...] = (80, 443)
    log_level: str = "INFO"
    executor_bundle: Path | None = None
    insecure_no_isolation: bool = False
    allow_missing_limits: bool = False
    targets: tuple[TargetConfig, ...] = (TargetConfig(name="here", provider="local"),)
    profiles: tuple[Profile, ...] = (Profile(name=DEFAULT_PROFILE),)
    projects: Mapping[Owner, ProjectPolicy] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)  # field -> "default", "file ...", "flag ..."

    @property
    def terms(self) -> LeaseTerms:
        return LeaseTerms(float(self.active_ttl_sec), float(self.idle_ttl_sec), float(self.max_ttl_sec))

    def policy(self, owner: Owner) -> ProjectPolicy:
        """A project that the file does not list may use the default profile, unbounded."""
        return self.projects.get(owner) or ProjectPolicy(profiles=(DEFAULT_PROFILE,), concurrency=None)

    @classmethod
    def load(
        cls,
        env: Mapping[str, str],
        flags: Mapping[str, object] | None = None,
        defaults: Mapping[str, object] | None = None,
        file: Path | None = None,
    ) -> Self:
        """`flags` and `defaults` (of the subcommand) by field; a flag of None was not given.

        `file`: else the one that SOJOURN_CONFIG names, if any. Raises BadConfig."""
        path = file or (Path(env["SOJOURN_CONFIG"]) if env.get("SOJOURN_CONFIG") else None)
        table = _read_toml(path) if path is not None else {}
        values: dict[str, Any] = dict(defaults or {})
        origins: dict[str, str] = dict.fromkeys(_BY_FIELD, "default")
        for setting in SETTINGS:
            for raw, origin in _given(setting, table, path, env, flags or {}):
                try:
                    values[setting.field] = setting.parse(raw)
                except ValueError as why:
                    shown = "a value that is refused: it " if setting.secret else ""
                    name = setting.field if origin.startswith("file") else setting.env or setting.field
                    raise BadConfig(f"{origin}: {name} {shown}{why}") from None
                origins[setting.field] = origin
        if "metrics_port" not in values:
            port = values.get("port", cls.port)
            values["metrics_port"] = port + 1 if 0 < port < 65_535 else 0
        tables = {name: table.pop(name) for name in ("targets", "profiles", "projects") if name in table}
        known = set(_BY_FIELD) | {f"{s.field}_file" for s in SETTINGS if s.secret}
        if unknown := sorted(set(table) - known):
            raise BadConfig(f"{path}: there is no setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        for name in ("targets", "profiles", "projects"):
            origins[name] = f"file {path}" if name in tables else "default"
        targets = _targets(tables.get("targets"), path)
        profiles = _profiles(
            tables.get("profiles"), targets, path, values.get("outbound_resolvers", cls.outbound_resolvers)
        )
        projects = _projects(tables.get("projects"), profiles, path)
        return cls(**values, targets=targets, profiles=profiles, projects=projects, origins=origins)

    def describe(self) -> str:
        """Every setting as a line of TOML with its variable and origin; secrets masked."""
        lines = []
        for setting in SETTINGS:
            value = _shown(setting, getattr(self, setting.field))
            name = f"{setting.env}, " if setting.env else ""
            lines.append(f"{setting.field} = {value}  # {name}{self.origins.get(setting.field, 'default')}")
        for name, items in (("targets", self.targets), ("profiles", self.profiles)):
            for item in items:
                lines += ["", f"[[{name}]]  # {self.origins.get(name, 'default')}"]
                lines += _fields(item)
        for owner, policy in self.projects.items():
            lines += ["", f"[projects.{_toml(str(owner))}]  # {self.origins.get('projects', 'default')}"]
            lines += _fields(policy)
        return "\n".join(lines) + "\n"


def _given(
    setting: Setting, table: Mapping[str, Any], path: Path | None, env: Mapping[str, str], flags: Mapping[str, object]
) -> list[tuple[object, str]]:
    """What was given for a setting, weakest first, with where. An empty variable counts as unset."""
    found: list[tuple[object, str]] = []
    if setting.secret and f"{setting.field}_file" in table:
        found.append((_read_secret(str(table[f"{setting.field}_file"])), f"file {path}"))
    if setting.field in table:
        found.append((table[setting.field], f"file {path}"))
    if setting.env and setting.secret and env.get(f"{setting.env}_FILE"):
        found.append((_read_secret(env[f"{setting.env}_FILE"]), f"environment {setting.env}_FILE"))
    if setting.env and env.get(setting.env):
        found.append((env[setting.env], f"environment {setting.env}"))
    if setting.flag and flags.get(setting.field) is not None:
        found.append((flags[setting.field], f"flag {setting.flag}"))
    return found


def _read_secret(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as why:
        raise BadConfig(f"the secret in {name} cannot be read: {why}") from why


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise BadConfig(f"{path}: {why}") from why


def _convert(raw: object, kind: Any, what: str) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as why:
        raise BadConfig(f"{what}: {why}") from None


def _named(items: Sequence[Any], what: str) -> None:
    """Raises BadConfig where a name cannot stand in a label, or stands twice."""
    names = [item.name for item in items]
    for name in names:
        if not _LABEL_VALUE.match(name):
            raise BadConfig(f"{what}: the name {name!r} must be 1 to 63 letters, digits, . _ or -")
        if names.count(name) > 1:
            raise BadConfig(f"{what}: {name!r} is there twice")


def _targets(raw: object, path: Path | None) -> tuple[TargetConfig, ...]:
    if raw is None:
        return ManagerConfig.targets
    what = f"{path}: targets"
    targets: list[TargetConfig] = _convert(raw, list[TargetConfig], what)
    _named(targets, what)
    if not targets:
        raise BadConfig(f"{what}: at least one is needed")
    by_region: dict[str | None, str] = {}
    for target in targets:
        _check_target(target, f"{what}: {target.name}")
        if (other := by_region.setdefault(target.region, target.name)) != target.name:
            where = "have no region" if target.region is None else f"are both in region {target.region!r}"
            raise BadConfig(f"{what}: {other!r} and {target.name!r} {where}; one region has one target")
    return tuple(targets)


def _check_target(target: TargetConfig, what: str) -> None:
    if target.provider == "kubernetes":
        try:
            check_cluster(target)
        except ValueError as why:
            raise BadConfig(f"{what}: {why}") from None
        return
    plain = ClusterTable()
    for name in ClusterTable.__struct_fields__:
        if getattr(target, name) != getattr(plain, name):
            raise BadConfig(f"{what}: {name} is for a cluster, and its provider is {target.provider}")


def _profiles(
    raw: object, targets: tuple[TargetConfig, ...], path: Path | None, resolvers: tuple[str, ...]
) -> tuple[Profile, ...]:
    what = f"{path}: profiles"
    tables: list[_ProfileTable] = [] if raw is None else _convert(raw, list[_ProfileTable], what)
    _named(tables, what)
    if not any(table.name == DEFAULT_PROFILE for table in tables):
        tables.insert(0, _ProfileTable(name=DEFAULT_PROFILE))
    return tuple(_profile(table, targets, f"{what}: {table.name}", resolvers) for table in tables)


def _profile(table: _ProfileTable, targets: tuple[TargetConfig, ...], what: str, resolvers: tuple[str, ...]) -> Profile:
    target = table.target or targets[0].name
    if target not in [known.name for known in targets]:
        raise BadConfig(f"{what}: there is no target {target!r}")
    if table.cpu is not None and not 0 < table.cpu <= 1024:
        raise BadConfig(f"{what}: cpu must be a number of cores over 0, not {table.cpu!r}")
    if table.pids is not None and table.pids < 16:
        raise BadConfig(f"{what}: pids must be at least 16: the executor itself needs a few")
    try:
        pool = pool_size(table.pool)
    except ValueError as why:
        raise BadConfig(f"{what}: {why}") from None
    if not table.users or any(not _LABEL_VALUE.match(user) for user in table.users):
        raise BadConfig(f"{what}: users must name at least one user")
    sizes: dict[str, int | None] = {}
    for name, size in (("memory", table.memory), ("disk", table.disk), ("bandwidth", table.bandwidth)):
        try:
            sizes[name] = None if size is None else size_bytes(size)
        except ValueError as why:
            raise BadConfig(f"{what}: {name} {why}") from None
    if sizes["disk"] is not None and sizes["disk"] < _LEAST_DISK_BYTES:
        raise BadConfig(f"{what}: disk must be at least 16Mi: a file system needs some for itself")
    if table.network == "none" and (table.bandwidth, table.connections) != (None, None):
        raise BadConfig(f'{what}: bandwidth and connections bound a network, and there is none: network = "outbound"?')
    if (sizes["bandwidth"] or 8192) < 8192:
        raise BadConfig(f"{what}: bandwidth is bytes a second, at least 8192")
    if table.connections is not None and not 1 <= table.connections <= 65_536:
        raise BadConfig(f"{what}: connections must be a number from 1 to 65536, not {table.connections!r}")
    for name in ("active_ttl_sec", "idle_ttl_sec", "max_ttl_sec"):
        value = getattr(table, name)
        if value is not None and not 0 < value <= 365 * _DAY_SEC:
            raise BadConfig(f"{what}: {name} must be a whole number of seconds over 0, not {value!r}")
    return Profile(
        cluster=_cluster_of(table, next(known for known in targets if known.name == target), what, resolvers),
        name=table.name,
        image=table.image,
        isolation=table.isolation,
        cpu=None if table.cpu is None else float(table.cpu),
        memory_bytes=sizes["memory"],
        disk_bytes=sizes["disk"],
        pids=table.pids,
        network=table.network,
        bandwidth_bytes_sec=sizes["bandwidth"] or _PLAIN.bandwidth_bytes_sec,
        connections=table.connections or _PLAIN.connections,
        users=table.users,
        keep_workspace=table.keep_workspace,
        write_through=table.write_through,
        pool_min=pool.min,
        pool_max=pool.max,
        pool_utilisation=pool.utilisation,
        pool_shrink_sec=pool.shrink_sec,
        target=target,
        active_sec=table.active_ttl_sec,
        idle_sec=table.idle_ttl_sec,
        max_sec=table.max_ttl_sec,
    )


def _cluster_of(table: _ProfileTable, target: TargetConfig, what: str, resolvers: tuple[str, ...]) -> ClusterPod | None:
    """What a profile's pods have of their cluster; None where its target is none. Raises BadConfig."""
    if target.provider != "kubernetes":
        for name in ("tier", "workspace", "storage_class"):
            if getattr(table, name) is not None:
                raise BadConfig(f"{what}: {name} is for pods of a cluster, and target {target.name!r} is none")
        return None
    try:
        check_digest("image", table.image)
        if not _LABEL_VALUE.match(table.network):
            raise ValueError(f'network must be "none", "outbound" or a class of yours, not {table.network!r}')
        made = cluster_pod(
            target,
            isolation=table.isolation,
            tier=table.tier,
            workspace=table.workspace,
            storage_class=table.storage_class,
            resolvers=resolvers if table.network != "none" else (),
        )
        if made.tier == "single" and len(table.users) > 1:
            raise ValueError("users can name only one where the tier is single: nobody else can be become")
    except ValueError as why:
        raise BadConfig(f"{what}: {why}") from None
    return made


def _projects(raw: object, profiles: tuple[Profile, ...], path: Path | None) -> dict[Owner, ProjectPolicy]:
    what = f"{path}: projects"
    tables: dict[str, _ProjectTable] = {} if raw is None else _convert(raw, dict[str, _ProjectTable], what)
    known = [profile.name for profile in profiles]
    policies: dict[Owner, ProjectPolicy] = {}
    for name, table in tables.items():
        tenant, slash, project = name.partition("/")
        if not slash or not _LABEL_VALUE.match(tenant) or not _LABEL_VALUE.match(project):
            raise BadConfig(f'{what}: {name!r} must be written "<tenant>/<project>"')
        allowed = [DEFAULT_PROFILE] if table.profiles is None else table.profiles
        if missing := [profile for profile in allowed if profile not in known]:
            raise BadConfig(f"{what}: {name}: there is no profile {', '.join(missing)}; there are {', '.join(known)}")
        if not allowed:
            raise BadConfig(f"{what}: {name}: profiles must name at least one")
        if table.concurrency is not None and table.concurrency < 1:
            raise BadConfig(f"{what}: {name}: concurrency must be at least 1")
        policies[Owner(tenant, project)] = _policy(table, allowed, profiles, f"{what}: {name}")
    return policies


def _policy(table: _ProjectTable, allowed: Sequence[str], profiles: Sequence[Profile], what: str) -> ProjectPolicy:
    if table.cpu is not None and not 0 < table.cpu <= 1_000_000:
        raise BadConfig(f"{what}: cpu must be a number of cores over 0, not {table.cpu!r}")
    try:
        memory_bytes = None if table.memory is None else size_bytes(table.memory)
    except ValueError as why:
        raise BadConfig(f"{what}: memory {why}") from None
    for profile in profiles:
        for what_of, limit, own in (
            ("cpu", table.cpu, profile.cpu),
            ("memory", memory_bytes, profile.memory_bytes),
        ):
            if profile.name in allowed and limit is not None and own is None:
                raise BadConfig(
                    f"{what}: {what_of} cannot be bounded in all: profile {profile.name!r} has no {what_of} limit"
                )
            if profile.name in allowed and limit is not None and own is not None and own > limit:
                raise BadConfig(f"{what}: profile {profile.name!r} never fits into the {what_of} of the whole project")
    cpu = None if table.cpu is None else float(table.cpu)
    return ProjectPolicy(profiles=tuple(allowed), concurrency=table.concurrency, cpu=cpu, memory_bytes=memory_bytes)


def _shown(setting: Setting, value: object) -> str:
    if value is None:
        return '"off"' if setting.field == "metrics_port" else '""'
    return '"(set, not shown)"' if setting.secret else _toml(value)


def _fields(item: msgspec.Struct) -> list[str]:
    lines = []
    local = isinstance(item, TargetConfig) and item.provider != "kubernetes"
    for key, value in msgspec.structs.asdict(item).items():
        if value is None or (local and key in ClusterTable.__struct_fields__):
            continue
        if isinstance(value, msgspec.Struct):
            lines += _fields(value)
        elif isinstance(value, dict):
            lines.append(f"{key} = {{{', '.join(f'{_toml(one)} = {_toml(other)}' for one, other in value.items())}}}")
        else:
            lines.append(f"{key} = {_toml(value)}")
    return lines


def _toml(value: object) -> str:
    """`value` as TOML; JSON's strings, numbers, booleans and arrays of them are TOML too."""
    return msgspec.json.encode(str(value) if isinstance(value, Path) else value).decode()
