"""A pod's cgroups: memory, cpu and process limits on v2, v1 and hybrid hosts. All functions block, briefly.

Each hierarchy of the machine that carries a wanted controller, and v2 wherever it is mounted (for `cgroup.kill`), gets
one directory per pod: `<mount>/sojourn/<pod>`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

PARENT: Final = "sojourn"
INNER: Final = "inner"  # below a pod's directory, without limits of its own: the executor's to divide up
LIMITS: Final = ("memory", "cpu", "pids")  # what a profile may ask for
_WANTED: Final = ("memory", "cpu", "cpuacct", "pids")  # cpuacct: v1's own hierarchy for usage
_CPU_PERIOD_US: Final = 100_000
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_LEAST_QUOTA_US: Final = 1_000  # the kernel refuses less


class Hierarchy(msgspec.Struct, frozen=True):
    """One mounted cgroup hierarchy."""

    version: int  # 1 or 2
    mount: str
    controllers: tuple[str, ...]  # the wanted ones that it carries


class PodCgroup(msgspec.Struct, frozen=True):
    """A pod's directory in one hierarchy."""

    version: int
    path: str
    controllers: tuple[str, ...]


class Limits(msgspec.Struct, frozen=True):
    """None: no limit."""

    memory_bytes: int | None = None
    cpu: float | None = None  # cores
    pids: int | None = None

    def asked(self) -> tuple[str, ...]:
        """The controllers that these limits need."""
        values = {"memory": self.memory_bytes, "cpu": self.cpu, "pids": self.pids}
        return tuple(name for name in LIMITS if values[name] is not None)


def find_hierarchies(mountinfo: str | None = None) -> list[Hierarchy]:
    """The hierarchies that pods would be put into, from /proc/self/mountinfo; [] where cgroups are not mounted."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return []
    found: list[Hierarchy] = []
    taken: set[str] = set()
    unified: str | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3 or fields[4] in [one.mount for one in found]:
            continue
        mount = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])  # the kernel writes a space as \040
        if kind[0] == "cgroup2":
            unified = unified or mount
        elif kind[0] == "cgroup":
            here = tuple(name for name in _WANTED if name in kind[2].split(",") and name not in taken)
            if here:
                taken.update(here)
                found.append(Hierarchy(1, mount, here))
    if unified is not None:
        offered = _words(Path(unified) / "cgroup.controllers")
        found.append(Hierarchy(2, unified, tuple(n for n in _WANTED if n in offered and n not in taken)))
    return found


def usable(hierarchies: Iterable[Hierarchy]) -> tuple[list[Hierarchy], dict[str, str]]:
    """The hierarchies in which we can make cgroups, and for each limit that cannot be set, why not."""
    good: list[Hierarchy] = []
    missing = dict.fromkeys(LIMITS, "no cgroup hierarchy with this controller is mounted")
    for one in hierarchies:
        try:
            _prepare(one)
        except OSError as why:
            reason = f"{one.mount}: {why.strerror or why}"
            missing.update({name: reason for name in one.controllers if name in missing})
            continue
        good.append(one)
        for name in one.controllers:
            missing.pop(name, None)
    return good, missing


def paths(hierarchies: Iterable[Hierarchy], name: str) -> list[PodCgroup]:
    """Where a pod's cgroups are, whether or not they exist."""
    return [PodCgroup(one.version, f"{one.mount}/{PARENT}/{name}", one.controllers) for one in hierarchies]


def make(groups: Iterable[PodCgroup], limits: Limits) -> None:
    """Makes the directories and sets the limits. Raises OSError; the caller then removes what there is."""
    for group in groups:
        os.makedirs(f"{group.path}/{INNER}", exist_ok=True)
        for file, value, needed in _settings(group, limits):
            try:
                Path(group.path, file).write_text(value, encoding="ascii")
            except OSError:
                if needed:
                    raise


def kill(groups: Iterable[PodCgroup]) -> bool:
    """Ends every process in them at once, where the kernel can (v2, Linux 5.14); False where it cannot."""
    for group in groups:
        if group.version == 2:
            try:
                Path(group.path, "cgroup.kill").write_text("1", encoding="ascii")
            except OSError:
                continue
            return True
    return False


def members(groups: Iterable[PodCgroup]) -> set[int]:
    """The pids in them; 0 stands for one that our own pid namespace cannot see."""
    found: set[int] = set()
    for group in groups:
        for directory in _with_all_below(Path(group.path)):
            found.update(map(int, _words(directory / "cgroup.procs")))
    return found


def remove(groups: Iterable[PodCgroup], timeout_sec: float = 5.0) -> None:
    """Removes the directories once the kernel has seen the last process leave. No error where they are gone.

    Raises OSError at the timeout."""
    deadline = time.monotonic() + timeout_sec
    for group in groups:
        while True:
            try:
                _remove_below(Path(group.path))
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def oom_kills(groups: Iterable[PodCgroup]) -> int:
    """How many processes the kernel has killed in there for want of memory."""
    for group in groups:
        if "memory" in group.controllers:
            if group.version == 2:
                return _oom_kills(Path(group.path, "memory.events"))
            # Version 1 counts a kill only where the victim was.
            return sum(_oom_kills(one / "memory.oom_control") for one in _with_all_below(Path(group.path)))
    return 0


def _oom_kills(file: Path) -> int:
    return int(_table(file).get("oom_kill", "0"))


def _with_all_below(top: Path) -> list[Path]:
    return [Path(directory) for directory, _below, _files in os.walk(top)]


def _prepare(one: Hierarchy) -> None:
    """Makes the parent of all pods and, on v2, hands its controllers down. Raises OSError."""
    parent = Path(one.mount, PARENT)
    parent.mkdir(exist_ok=True)
    if one.version == 2 and one.controllers:
        for directory in (Path(one.mount), parent):
            lacking = [name for name in one.controllers if name not in _words(directory / "cgroup.subtree_control")]
            if lacking:
                line = " ".join(f"+{name}" for name in lacking)
                (directory / "cgroup.subtree_control").write_text(line, encoding="ascii")
    if not os.access(parent, os.W_OK) or not os.access(parent / "cgroup.procs", os.W_OK):
        raise PermissionError(13, "not writable by this user")


def _settings(group: PodCgroup, limits: Limits) -> list[tuple[str, str, bool]]:
    """File, value, and whether the pod may not run without it."""
    found: list[tuple[str, str, bool]] = []
    v2 = group.version == 2
    if "memory" in group.controllers and limits.memory_bytes is not None:
        value = str(limits.memory_bytes)
        if v2:
            found += [("memory.max", value, True), ("memory.swap.max", "0", False)]
        else:
            # In this order: memory plus swap may never be less than memory. The second needs swap accounting.
            found += [("memory.limit_in_bytes", value, True), ("memory.memsw.limit_in_bytes", value, False)]
    if "cpu" in group.controllers and limits.cpu is not None:
        quota = max(_LEAST_QUOTA_US, round(limits.cpu * _CPU_PERIOD_US))
        if v2:
            found.append(("cpu.max", f"{quota} {_CPU_PERIOD_US}", True))
        else:
            found += [("cpu.cfs_period_us", str(_CPU_PERIOD_US), True), ("cpu.cfs_quota_us", str(quota), True)]
    if "pids" in group.controllers and limits.pids is not None:
        found.append(("pids.max", str(limits.pids), True))
    return found


def _remove_below(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            _remove_below(child)
    path.rmdir()


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def _table(path: Path) -> Mapping[str, str]:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = path.read_text(encoding="ascii").splitlines()
    return dict(pair for line in lines if len(pair := line.split(" ")) == 2)
