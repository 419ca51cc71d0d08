"""The making of a pod up to the start of its processes. All calls block for some milliseconds."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import resource
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from executor import seccomp
from manager.errors import IsolationUnavailable, Provisioning
from manager.model import Profile
from manager.providers.local import bwrap, cgroups, disks, gvisor, images, launch, proxies, routed
from manager.providers.local.capability import Capabilities
from manager.providers.local.ending import log_tail
from manager.providers.local.entry import Entry
from manager.providers.local.network import (
    FORWARDER,
    PROXY_DIR,
    PROXY_PORT,
    PROXY_SOCKET,
    OutboundSettings,
    Way,
    network_for,
    proxy_environment,
)
from manager.providers.local.processes import identify
from manager.providers.local.state import PodRecord, PodStore

SOCKET_NAME: Final = "executor.sock"
INFO_SEC: Final = 10.0  # for bubblewrap to say which process it has started
_SOCKET_PATH_BYTES: Final = 107  # sun_path less the final NUL: unix(7)
_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of what makes a pod
_UNLIMITED_BYTES: Final = 2 << 30  # what /tmp and the like are sized by where memory has no limit
_PLAIN_USER: Final = "nobody"  # for commands of plain processes under root


Isolation = Literal["namespaces", "gvisor", "none"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a profile comes to on this machine."""

    isolation: Isolation
    tier: bwrap.Tier | None  # None: plain processes
    limits: cgroups.Limits
    image: images.Image | None = None  # None: this machine's own system
    disk_bytes: int | None  # of /workspace, /tmp and /var/tmp together
    rlimits: tuple[tuple[int, int], ...]  # (resource, limit): the weaker stand-in where cgroups are not to be had
    users: tuple[str, ...]
    network: Way | None  # None: nothing but loopback
    bytes_per_sec: int  # of the network, each way
    connections: int
    unenforced: tuple[str, ...]  # limits that the profile asks for and nothing holds


@dataclass
class Making:
    """A pod being made: what its maker holds, so that it can be given back on every way out."""

    record: PodRecord
    held: int | None = None  # descriptor of the maker's lock
    log: Path = field(default_factory=Path)

    def release(self) -> None:
        if self.held is not None:
            os.close(self.held)
            self.held = None


def plan_for(profile: Profile, found: Capabilities, *, insecure: bool, allow_missing_limits: bool) -> Plan:
    """Raises IsolationUnavailable or ImagePullFailed where this machine cannot give what the profile promises."""
    if profile.image != images.HOST:
        images.check(profile.image)
    if profile.network not in ("none", "outbound"):
        raise IsolationUnavailable(f"profile {profile.name!r} wants network {profile.network!r}, unknown here")
    bad = [user for user in profile.users if not _USER.match(user) or user in ("root", "nobody")]
    if bad:
        raise IsolationUnavailable(f"profile {profile.name!r}: commands cannot run as {', '.join(map(repr, bad))}")
    isolation, tier = _isolation_for(profile, found, insecure=insecure)
    limits = cgroups.Limits(memory_bytes=profile.memory_bytes, cpu=profile.cpu, pids=profile.pids)
    unenforced = tuple(name for name in limits.asked() if name in found.missing_limits)
    if unenforced and not allow_missing_limits:
        found.require(limits.asked())
    if profile.disk_bytes is not None:
        _check_disk(profile, found, profile.disk_bytes, isolated=tier is not None)
    if profile.image != images.HOST and tier is None:
        raise IsolationUnavailable(f"profile {profile.name!r} wants an image, which plain processes cannot have")
    users = profile.users or ("sandbox",)
    network = None if profile.network == "none" else _way_out(profile, found, isolated=tier is not None)
    return Plan(
        isolation=isolation, tier=tier, limits=limits, disk_bytes=profile.disk_bytes,
        rlimits=_rlimits(limits, unenforced, tier), unenforced=unenforced,
        network=network, bytes_per_sec=profile.bandwidth_bytes_sec, connections=profile.connections,
        users=users if tier == "split" else users[:1],
    )  # fmt: skip


def _isolation_for(profile: Profile, found: Capabilities, *, insecure: bool) -> tuple[Isolation, bwrap.Tier | None]:
    """How the profile's pods are isolated. Raises IsolationUnavailable where that is not to be had."""
    refused = f"profile {profile.name!r} wants"
    if profile.isolation == "gvisor":
        way = found.gvisor
        if way is None or way.platform is None:
            why = way.why_not if way else "not tried"
            raise IsolationUnavailable(
                f"{refused} isolation by gvisor, which is not to be had here: {why}. To get it: {gvisor.GET_RUNSC}"
            )
        if profile.pids is not None and profile.pids < gvisor.LEAST_PIDS:
            raise IsolationUnavailable(
                f"{refused} {profile.pids} pids under gvisor, whose own threads count among them: {gvisor.LEAST_PIDS} "
                "at least"
            )
        return "gvisor", "split"
    if profile.isolation == "namespaces" and found.tier is not None:
        return "namespaces", found.tier
    if profile.isolation not in ("namespaces", "none"):
        raise IsolationUnavailable(f"{refused} isolation {profile.isolation!r}, unknown here")
    if insecure:
        return "none", None
    wanted = "no isolation, which needs --insecure-no-isolation"
    if profile.isolation == "namespaces":
        wanted = f"isolation by namespaces, which is not to be had here: {found.why_not}. To get it: {found.advice}"
    raise IsolationUnavailable(f"{refused} {wanted}")


def _check_disk(profile: Profile, found: Capabilities, size_bytes: int, *, isolated: bool) -> None:
    """Raises IsolationUnavailable where the profile's `disk` would not be held."""
    refused = f"profile {profile.name!r} bounds `disk`"
    if not isolated:
        raise IsolationUnavailable(f"{refused}, which nothing does for plain processes")
    if found.disk is None or found.disk.way is None:
        why = found.disk.why_not if found.disk else "not tried"
        raise IsolationUnavailable(f"{refused}, which this machine cannot: {why}. See `sojourn doctor`")
    if found.disk.way == "memory":
        # With /dev/shm and /run still well under the limit of memory: a full disk is ENOSPC then, and not a killed pod.
        memory_bytes = profile.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size_bytes > memory_bytes // 2:
            raise IsolationUnavailable(
                f"{refused} to {size_bytes >> 20} MiB, and disks are in memory here ({found.disk.weaker_because}): "
                f"it may have half of the memory, {memory_bytes >> 21} MiB"
            )


def _way_out(profile: Profile, found: Capabilities, *, isolated: bool) -> Way:
    """Raises IsolationUnavailable where pods would have a weaker network than asked for, or none."""
    refused = f"profile {profile.name!r} wants network {profile.network!r}"
    if not isolated:
        raise IsolationUnavailable(f"{refused}, and nothing walls plain processes off from this machine's own")
    assert found.network is not None
    if found.network.way is None:
        advice = f". To get it: {found.network.advice}" if found.network.advice else ""
        raise IsolationUnavailable(f"{refused}, which is not to be had here: {found.network.why_not}{advice}")
    return found.network.way


def new_record(
    name: str, target: str, store: PodStore, found: Capabilities, plan: Plan, *, labels: dict[str, str],
    annotations: dict[str, str], now: float, boot: str,
) -> PodRecord:  # fmt: skip
    run_dir = _run_dir(store, name)
    workspace = ""
    if plan.isolation == "none" and found.root:
        # Even plain commands never run as root, and another user cannot reach into the data directory.
        workspace = f"/var/tmp/sojourn-{cgroup_name(store, name)}"
    return PodRecord(
        name=name, target=target, version=1, phase="creating", labels=labels, annotations=annotations,
        created_at=now, boot_id=boot,
        socket=str(run_dir / SOCKET_NAME), run_dir=str(run_dir), workspace=workspace,
        cgroups=cgroups.paths(found.hierarchies, cgroup_name(store, name)), isolation=plan.isolation,
        image="" if plan.image is None else str(plan.image.root),
        network=None if plan.network is None else network_for(
            plan.network, cgroup_name(store, name), bytes_per_sec=plan.bytes_per_sec, connections=plan.connections
        ),
    )  # fmt: skip


def cgroup_name(store: PodStore, name: str) -> str:
    """Also tells apart the pods of two data directories on one machine."""
    return name + cgroup_suffix(store)


def cgroup_suffix(store: PodStore) -> str:
    """What the names of all pods of one data directory end with."""
    return f"-{hashlib.sha256(os.fsencode(store.root)).hexdigest()[:8]}"


def start(
    making: Making, store: PodStore, found: Capabilities, entry: Entry, plan: Plan, *, token_sha256: str,
    unclaimed_sec: float | None, outbound: OutboundSettings,
) -> None:  # fmt: skip
    """Takes the pod's name, prepares its directories, cgroups and network and starts it; the record then tells its
    processes.

    Raises FileExistsError where the name is taken (nothing is held then), OSError, IsolationUnavailable, Provisioning.
    What was made before is the caller's to end."""
    making.held = store.begin(making.record)
    home = store.path(making.record.name)
    making.log = home / "log"
    record = making.record
    _directories(record, home, plan, outbound)
    cgroups.make(record.cgroups, plan.limits)
    if record.network is not None and record.network.way == "routed":
        routed.make(record.network, outbound)
    env = {
        "PATH": entry.search_path,
        "LANG": "C.UTF-8",
        "SOJOURN_POD_NAME": record.name,
        "SOJOURN_POD_TOKEN_SHA256": token_sha256,
    }
    if unclaimed_sec is not None:
        env["SOJOURN_UNCLAIMED_SEC"] = str(unclaimed_sec)
    if plan.isolation == "namespaces":
        record = _start_namespaces(record, home, found, entry, plan, env)
    elif plan.isolation == "gvisor":
        record = _start_gvisor(record, home, found, entry, plan, env)
    else:
        record = _start_plain(record, home, entry, plan, env)
    making.record = store.change(
        record.name, lambda stored: msgspec.structs.replace(stored, inner=record.inner, outer=record.outer)
    )


def _view(record: PodRecord, home: Path, entry: Entry, plan: Plan, env: dict[str, str]) -> bwrap.PodSpec:
    """What an isolated pod is made of."""
    assert plan.tier is not None
    disk = "" if plan.disk_bytes is None else str(home / disks.MOUNT_POINT)
    beside: tuple[str, ...] = ()
    image = plan.image
    more = {} if image is None else dict(image.env)  # for commands too
    if plan.network == "proxy":
        beside = (f"{PROXY_DIR}/{FORWARDER}", f"{PROXY_DIR}/{PROXY_SOCKET}", str(PROXY_PORT))
        more |= proxy_environment()  # over an image's own: there is no other way out
    env = (
        env
        | more
        | {
            "HOME": bwrap.WORKSPACE,
            "SOJOURN_EXECUTOR_SOCKET": f"{bwrap.RUN_DIR}/{SOCKET_NAME}",
            "SOJOURN_EXECUTOR_STATE_DIR": bwrap.STATE_DIR,
            "SOJOURN_WORKSPACE": bwrap.WORKSPACE,
            "SOJOURN_COMMAND_USER": plan.users[0],
            "SOJOURN_USERS": ",".join(plan.users[1:]),
            "SOJOURN_PASS_ENV": ",".join(more.keys() - {"PATH", "LANG", "HOME"}),
        }
    )
    return bwrap.PodSpec(
        name=record.name, tier=plan.tier, env=env, programs=entry.programs,
        system=bwrap.read_system() if image is None else images.layout(image.root),
        bundle=None if image is None else (str(entry.package), images.BUNDLE_PATH),
        etc_dir=str(home / "etc"), run_dir=record.run_dir, state_dir=str(home / "state"),
        workspace=f"{disk or home}/workspace", disk=disk, cgroups=tuple(record.cgroups),
        netns=record.network.netns_path if record.network is not None else "",
        outbound_dir=str(home / proxies.DIRECTORY) if plan.network == "proxy" else "",
        memory_bytes=plan.limits.memory_bytes or _UNLIMITED_BYTES, command=entry.command(plan.rlimits, beside),
    )  # fmt: skip


def _start_namespaces(
    record: PodRecord, home: Path, found: Capabilities, entry: Entry, plan: Plan, env: dict[str, str]
) -> PodRecord:
    spec = _view(record, home, entry, plan, env)
    outer, info = launch.launch_bwrap(
        found.bwrap_path, bwrap.arguments(spec), {"PATH": _PATH}, seccomp=seccomp.program(), log=home / "log",
        launcher=home / "launcher", status=home / "status", before=_before(record, home, found, plan),
        cgroups=record.cgroups, oom_score=launch.EXECUTOR_OOM_SCORE if found.root else None,
    )  # fmt: skip
    return _started(record, home, "bubblewrap", outer, launch.read_child_pid(info, INFO_SEC))


def _start_gvisor(
    record: PodRecord, home: Path, found: Capabilities, entry: Entry, plan: Plan, env: dict[str, str]
) -> PodRecord:
    assert found.gvisor is not None
    spec = _view(record, home, entry, plan, env)
    gvisor.write_bundle(home, spec)
    # No oom_score: under gVisor the executor and its commands are one process of this machine.
    outer = launch.launch(
        [*_before(record, home, found, plan), *gvisor.argv(found.gvisor, home, spec)], {"PATH": _PATH},
        log=home / "log", launcher=home / "launcher", cgroups=record.cgroups,
    )  # fmt: skip
    return _started(record, home, "runsc", outer, gvisor.read_pid(home, outer, INFO_SEC))


def _started(record: PodRecord, home: Path, program: str, outer: int, child: int | None) -> PodRecord:
    """The record with its processes. Raises IsolationUnavailable, Provisioning where they are not there."""
    if child is None:
        raise IsolationUnavailable(f"{program} made no pod: {log_tail(home / 'log') or 'it said nothing'}")
    inner = identify(child)
    if inner is None:
        raise Provisioning(f"the executor ended at its start: {log_tail(home / 'log') or 'it said nothing'}")
    return msgspec.structs.replace(record, inner=inner, outer=identify(outer))


def _before(record: PodRecord, home: Path, found: Capabilities, plan: Plan) -> tuple[str, ...]:
    """What enters the pod's network and mounts its disk, and then becomes the pod; () where it has none of its own."""
    before: tuple[str, ...] = ()
    if plan.network == "routed" and record.network is not None:
        before = (routed.program("nsenter"), f"--net={record.network.netns_path}", "--")
    size_bytes = plan.disk_bytes
    if size_bytes is None:
        return before
    assert found.disk is not None
    assert found.disk.way is not None
    (home / disks.MOUNT_POINT).mkdir(mode=0o700)
    if found.disk.way == "loop":
        disks.make_image(home, size_bytes)
    owner = bwrap.COMMAND_UID if plan.tier == "split" else os.geteuid()
    way, bwrap_path = found.disk.way, found.bwrap_path
    return before + disks.wrapper(way, home, size_bytes, owner=owner, root=found.root, bwrap_path=bwrap_path)


def _start_plain(record: PodRecord, home: Path, entry: Entry, plan: Plan, env: dict[str, str]) -> PodRecord:
    workspace = record.workspace or str(home / "workspace")
    if record.workspace:
        env["SOJOURN_COMMAND_USER"] = _PLAIN_USER
    env |= {
        "HOME": workspace,
        "SOJOURN_EXECUTOR_SOCKET": record.socket,
        "SOJOURN_EXECUTOR_STATE_DIR": str(home / "state"),
        "SOJOURN_WORKSPACE": workspace,
    }
    pid = launch.launch(
        entry.command(plan.rlimits), env, log=home / "log", launcher=home / "launcher", cgroups=record.cgroups
    )
    process = identify(pid)
    return msgspec.structs.replace(record, inner=process, outer=process)


def _directories(record: PodRecord, home: Path, plan: Plan, outbound: OutboundSettings) -> None:
    for path in (Path(record.run_dir), home / "state", home / "etc", home / "workspace"):
        path.mkdir(mode=0o700)
    (home / "etc").chmod(0o755)
    accounts = ("", "")
    if plan.image is not None:
        shell, accounts = plan.image.shell, (plan.image.text("/etc/passwd"), plan.image.text("/etc/group"))
    else:
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    resolvers = outbound.resolvers if plan.network == "routed" else ()
    for file, text in bwrap.etc_files(record.name, plan.users, shell, resolvers, accounts).items():
        path = home / "etc" / file
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644)
    (home / "workspace").chmod(0o755)
    if plan.network == "proxy":
        proxies.prepare(home)
    if record.workspace:
        user = pwd.getpwnam(_PLAIN_USER)
        os.mkdir(record.workspace, 0o700)
        os.chown(record.workspace, user.pw_uid, user.pw_gid)
    if plan.tier == "split":
        os.chown(home / "workspace", bwrap.COMMAND_UID, bwrap.COMMAND_UID)


def _run_dir(store: PodStore, name: str) -> Path:
    """Where the socket goes: into the pod's own directory, unless that makes its path too long for a socket."""
    path = store.path(name) / "run"
    if len(os.fsencode(path / SOCKET_NAME)) <= _SOCKET_PATH_BYTES:
        return path
    return _short_base(store) / hashlib.sha256(name.encode()).hexdigest()[:16]


def _short_base(store: PodStore) -> Path:
    """A directory with a short path that only we may enter. Raises IsolationUnavailable where somebody else has it."""
    uid = os.geteuid()
    parents: Iterable[Path] = (Path("/run") if uid == 0 else Path(f"/run/user/{uid}"), Path("/tmp"))
    parent = next(path for path in parents if os.access(path, os.W_OK) and path.is_dir())
    base = parent / f"sojourn-{uid}-{hashlib.sha256(os.fsencode(store.root)).hexdigest()[:12]}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    # In /tmp anybody may have been here first, with a directory or a link of theirs.
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o077:
        raise IsolationUnavailable(f"{base} is not a directory that only this user may enter; remove it")
    return base


def _rlimits(
    limits: cgroups.Limits, unenforced: tuple[str, ...], tier: bwrap.Tier | None
) -> tuple[tuple[int, int], ...]:
    """Of each process, not of the pod together: far weaker, better than nothing."""
    rlimits = []
    if "memory" in unenforced and limits.memory_bytes is not None:
        rlimits.append((resource.RLIMIT_DATA, limits.memory_bytes))
    # Counted per user namespace, so it holds for a pod only where that has one of its own.
    if "pids" in unenforced and limits.pids is not None and tier == "single":
        rlimits.append((resource.RLIMIT_NPROC, limits.pids))
    return tuple(rlimits)
