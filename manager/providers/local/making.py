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
from typing import Final

import msgspec

from manager.errors import ImagePullFailed, IsolationUnavailable, Provisioning
from manager.model import Profile
from manager.providers.local import bwrap, cgroups, launch, seccomp
from manager.providers.local.capability import Capabilities
from manager.providers.local.ending import log_tail
from manager.providers.local.entry import Entry
from manager.providers.local.processes import identify
from manager.providers.local.state import PodRecord, PodStore

SOCKET_NAME: Final = "executor.sock"
INFO_SEC: Final = 10.0  # for bubblewrap to say which process it has started
_SOCKET_PATH_BYTES: Final = 107  # sun_path less the final NUL: unix(7)
_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")
_UNLIMITED_BYTES: Final = 2 << 30  # what /tmp and the like are sized by where memory has no limit
_PLAIN_USER: Final = "nobody"  # for commands of plain processes under root


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a profile comes to on this machine."""

    isolated: bool
    limits: cgroups.Limits
    rlimits: tuple[tuple[int, int], ...]  # (resource, limit): the weaker stand-in where cgroups are not to be had
    users: tuple[str, ...]
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
    if profile.image != "host":
        raise ImagePullFailed(
            f"profile {profile.name!r} wants image {profile.image!r}; a local target runs this machine's own system "
            "only: image = \"host\""
        )
    if profile.network != "none":
        raise IsolationUnavailable(f"profile {profile.name!r} wants network {profile.network!r}; local pods have none")
    if profile.isolation not in ("namespaces", "none"):
        raise IsolationUnavailable(f"profile {profile.name!r} wants isolation {profile.isolation!r}, unknown here")
    if profile.disk_bytes is not None:
        raise IsolationUnavailable(f"profile {profile.name!r} bounds `disk`, which a local target cannot: leave it out")
    bad = [user for user in profile.users if not _USER.match(user) or user in ("root", "nobody")]
    if bad:
        raise IsolationUnavailable(f"profile {profile.name!r}: commands cannot run as {', '.join(map(repr, bad))}")
    isolated = profile.isolation == "namespaces" and found.tier is not None
    if not isolated and not insecure:
        wanted = "no isolation, which needs --insecure-no-isolation"
        if profile.isolation == "namespaces":
            wanted = f"isolation by namespaces, which is not to be had here: {found.why_not}. To get it: {found.advice}"
        raise IsolationUnavailable(f"profile {profile.name!r} wants {wanted}")
    limits = cgroups.Limits(memory_bytes=profile.memory_bytes, cpu=profile.cpu, pids=profile.pids)
    unenforced = tuple(name for name in limits.asked() if name in found.missing_limits)
    if unenforced and not allow_missing_limits:
        found.require(limits.asked())
    users = profile.users or ("sandbox",)
    return Plan(
        isolated=isolated, limits=limits, rlimits=_rlimits(limits, unenforced, found), unenforced=unenforced,
        users=users if found.tier == "split" else users[:1],
    )  # fmt: skip


def new_record(
    name: str, target: str, store: PodStore, found: Capabilities, plan: Plan, *, labels: dict[str, str],
    annotations: dict[str, str], now: float, boot: str,
) -> PodRecord:  # fmt: skip
    run_dir = _run_dir(store, name)
    workspace = ""
    if not plan.isolated and found.root:
        # Even plain commands never run as root, and another user cannot reach into the data directory.
        workspace = f"/var/tmp/sojourn-{cgroup_name(store, name)}"
    return PodRecord(
        name=name, target=target, version=1, phase="creating", labels=labels, annotations=annotations,
        created_at=now, boot_id=boot,
        socket=str(run_dir / SOCKET_NAME), run_dir=str(run_dir), workspace=workspace,
        cgroups=cgroups.paths(found.hierarchies, cgroup_name(store, name)),
    )  # fmt: skip


def cgroup_name(store: PodStore, name: str) -> str:
    """Also tells apart the pods of two data directories on one machine."""
    return f"{name}-{hashlib.sha256(os.fsencode(store.root)).hexdigest()[:8]}"


def start(
    making: Making, store: PodStore, found: Capabilities, entry: Entry, plan: Plan, *, token_sha256: str,
    unclaimed_sec: float | None,
) -> None:  # fmt: skip
    """Takes the pod's name, prepares its directories and cgroups and starts it; the record then tells its processes.

    Raises FileExistsError where the name is taken (nothing is held then), OSError, IsolationUnavailable, Provisioning.
    What was made before is the caller's to end."""
    making.held = store.begin(making.record)
    home = store.path(making.record.name)
    making.log = home / "log"
    record = making.record
    _directories(record, home, found, plan)
    cgroups.make(record.cgroups, plan.limits)
    env = {
        "PATH": entry.search_path,
        "LANG": "C.UTF-8",
        "SOJOURN_POD_NAME": record.name,
        "SOJOURN_POD_TOKEN_SHA256": token_sha256,
    }
    if unclaimed_sec is not None:
        env["SOJOURN_UNCLAIMED_SEC"] = str(unclaimed_sec)
    if plan.isolated:
        record = _start_isolated(record, home, found, entry, plan, env)
    else:
        record = _start_plain(record, home, entry, plan, env)
    making.record = store.change(
        record.name, lambda stored: msgspec.structs.replace(stored, inner=record.inner, outer=record.outer)
    )


def _start_isolated(
    record: PodRecord, home: Path, found: Capabilities, entry: Entry, plan: Plan, env: dict[str, str]
) -> PodRecord:
    assert found.tier is not None
    spec = bwrap.PodSpec(
        name=record.name, tier=found.tier, system=bwrap.read_system(), programs=entry.programs,
        etc_dir=str(home / "etc"), run_dir=record.run_dir, state_dir=str(home / "state"),
        workspace=str(home / "workspace"), cgroups=tuple(record.cgroups), command=entry.command(plan.rlimits),
        memory_bytes=plan.limits.memory_bytes or _UNLIMITED_BYTES,
    )  # fmt: skip
    env |= {
        "HOME": bwrap.WORKSPACE,
        "SOJOURN_EXECUTOR_SOCKET": f"{bwrap.RUN_DIR}/{SOCKET_NAME}",
        "SOJOURN_EXECUTOR_STATE_DIR": bwrap.STATE_DIR,
        "SOJOURN_WORKSPACE": bwrap.WORKSPACE,
        "SOJOURN_COMMAND_USER": plan.users[0],
        "SOJOURN_USERS": ",".join(plan.users[1:]),
    }
    outer, info = launch.launch_bwrap(
        found.bwrap_path, bwrap.arguments(spec), env, seccomp=seccomp.program(), log=home / "log",
        launcher=home / "launcher", status=home / "status", cgroups=record.cgroups,
        oom_score=launch.EXECUTOR_OOM_SCORE if found.root else None,
    )  # fmt: skip
    child = launch.read_child_pid(info, INFO_SEC)
    if child is None:
        raise IsolationUnavailable(f"bubblewrap made no pod: {log_tail(home / 'log') or 'it said nothing'}")
    inner = identify(child)
    if inner is None:
        raise Provisioning(f"the executor ended at its start: {log_tail(home / 'log') or 'it said nothing'}")
    return msgspec.structs.replace(record, inner=inner, outer=identify(outer))


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


def _directories(record: PodRecord, home: Path, found: Capabilities, plan: Plan) -> None:
    for path in (Path(record.run_dir), home / "state", home / "etc", home / "workspace"):
        path.mkdir(mode=0o700)
    (home / "etc").chmod(0o755)
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    for file, text in bwrap.etc_files(record.name, plan.users, shell).items():
        path = home / "etc" / file
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644)
    (home / "workspace").chmod(0o755)
    if record.workspace:
        user = pwd.getpwnam(_PLAIN_USER)
        os.mkdir(record.workspace, 0o700)
        os.chown(record.workspace, user.pw_uid, user.pw_gid)
    if plan.isolated and found.tier == "split":
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


def _rlimits(limits: cgroups.Limits, unenforced: tuple[str, ...], found: Capabilities) -> tuple[tuple[int, int], ...]:
    """Of each process, not of the pod together: far weaker, better than nothing."""
    rlimits = []
    if "memory" in unenforced and limits.memory_bytes is not None:
        rlimits.append((resource.RLIMIT_DATA, limits.memory_bytes))
    # Counted per user namespace, so it holds for a pod only where that has one of its own.
    if "pids" in unenforced and limits.pids is not None and found.tier == "single":
        rlimits.append((resource.RLIMIT_NPROC, limits.pids))
    return tuple(rlimits)
