"""Cgroups of our own, where the pod lets us make some: as root of it, with its cgroups writable.

    <pod>/executor           this process
    <pod>/commands           its limits are a little under the pod's: what commands use up is never the executor's
    <pod>/commands/shared    the helpers, and commands that have just begun
    <pod>/commands/c1, ...   a command that has run for a second, and whatever it starts from then on

To move a process takes milliseconds, most of them waiting (the kernel waits for all processors once), and a fork into
a cgroup is not in Python's reach. So a short command is never moved, and no command waits for it
(docs/decisions/0008-a-cgroup-for-what-lives-long.md). All functions here block, briefly: they are for worker
threads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Final, Protocol

from executor import cgroup
from executor.cgroup import Cgroup, CgroupCounters, Hierarchy, Version, parse_figures, read_text
from executor.pressure import Counter

log = logging.getLogger("executor.leaves")

MAX_LEAVES: Final = 256  # further commands stay in `shared`
MAX_MOVES: Final = 4096  # processes of one command
DELEGATED: Final = "inner"  # where the pod's own directory is read-only, this one below it may be ours
RESERVED_PIDS: Final = 32
RESERVED_BYTES: Final = 64 << 20  # of the pod's memory, or an eighth of it where that is less
LEAST_PIDS: Final = 64  # in a pod with fewer, nothing is kept from commands


class Leaf:
    """One command's cgroup, in each hierarchy."""

    __slots__ = ("_paths", "_v2", "oom", "pids", "since")

    def __init__(self, paths: list[str], versions: list[Version], memory: int | None, pids: int | None) -> None:
        """`memory` and `pids`: which of the paths has that controller."""
        self._paths = paths
        self._v2 = next((path for path, one in zip(paths, versions, strict=True) if one == "cgroup2"), None)
        self.since = time.monotonic()  # when it became the command's
        self.oom = self.pids = None
        if memory is not None:
            name = "memory.events" if versions[memory] == "cgroup2" else "memory.oom_control"
            self.oom = Counter(lambda: _figure(paths[memory], name, "oom_kill"))
        if pids is not None and versions[pids] == "cgroup1":  # v2 counts where the limit is
            self.pids = Counter(lambda: _figure(paths[pids], "pids.events", "max"))

    def look(self, now: float) -> None:
        for counter in (self.oom, self.pids):
            if counter is not None:
                counter.look(now)

    def pids_inside(self) -> list[int]:
        """All that lives in it; [] where that cannot be read."""
        return _numbers(read_text(self._paths[0], "cgroup.procs"))

    def kill(self) -> None:
        """KILLs all that is in it, at once, however fast it forks: version 2, Linux 5.14. Else nothing."""
        if self._v2 is not None:
            try:
                _write(f"{self._v2}/cgroup.kill", "1")
            except OSError:
                pass

    def take_over(self) -> None:
        """For the next command."""
        self.since = time.monotonic()
        self.look(self.since)

    def move_in(self, leader: int) -> None:
        """The process and what descends from it. What it has let go of by now stays outside. Raises OSError for the
        leader."""
        wanted = [leader]
        for count, pid in enumerate(wanted):
            if count >= MAX_MOVES:
                break
            try:
                for path in self._paths:
                    _write(f"{path}/cgroup.procs", str(pid))
            except OSError:
                if pid == leader:
                    raise
                continue  # it has ended
            wanted += _numbers(read_text(f"/proc/{pid}/task/{pid}", "children"))  # those before the move


class Tenant(Protocol):
    """A command with a process."""

    pid: int
    leaf: Leaf | None


class Leaves:
    """The pod's own cgroups, and the leaves that are in no use."""

    def __init__(self, hierarchies: list[Hierarchy]) -> None:
        self._hierarchies = hierarchies
        self._free: list[Leaf] = []
        self._leaving: list[Leaf] = []  # of ended commands; something may still live in there
        self._made = 0
        self._has_entered = False

    def helper_files(self) -> list[str]:
        """What a helper writes 0 to, to enter the cgroup that commands begin in."""
        return [f"{one.directory}/commands/shared/cgroup.procs" for one in self._hierarchies]

    def enter(self) -> None:
        """Puts this process where commands' limits do not hold, and sets these. Call once the first helper is where it
        belongs; before that, no command has a leaf."""
        kept = []
        for one in self._hierarchies:
            try:
                _write(f"{one.directory}/executor/cgroup.procs", "0")
            except OSError as why:
                log.warning("cgroup_not_entered", extra={"path": one.directory, "errno": why.errno})
                continue
            kept.append(_limited(one))
        self._hierarchies = kept
        self._has_entered = True

    def with_controller(self, name: str) -> Hierarchy | None:
        if not self._has_entered:
            return None
        return next((one for one in self._hierarchies if name in one.controllers), None)

    def counters(self, pod: CgroupCounters) -> LeafCounters:
        return LeafCounters(self, pod)

    def adopt(self, commands: Iterable[Tenant]) -> None:
        """Gives each a leaf, as far as there are any, and puts it and its descendants there."""
        for command in commands:
            leaf = self._take()
            if leaf is None:
                return
            command.leaf = leaf  # first, so that what befalls it in there is known to be its own
            try:
                leaf.move_in(command.pid)
            except OSError:  # it has ended meanwhile
                pass

    def release(self, leaf: Leaf) -> None:
        """Of an ended command."""
        self._leaving.append(leaf)

    def _take(self) -> Leaf | None:
        if not self._free:
            leaving, self._leaving = self._leaving, []
            for leaf in leaving:
                (self._leaving if leaf.pids_inside() else self._free).append(leaf)
        if self._free:
            leaf = self._free.pop()
            leaf.take_over()
            return leaf
        if self._made >= MAX_LEAVES or not self._hierarchies or not self._has_entered:
            return None
        self._made += 1
        paths = [f"{one.directory}/commands/c{self._made}" for one in self._hierarchies]
        try:
            for path in paths:
                os.makedirs(path, exist_ok=True)
            return Leaf(
                paths, [one.version for one in self._hierarchies], self._index("memory"), self._index("pids")
            )  # fmt: skip
        except OSError as why:
            log.warning("cgroup_not_made", extra={"errno": why.errno})
            return None

    def _index(self, controller: str) -> int | None:
        return next((at for at, one in enumerate(self._hierarchies) if controller in one.controllers), None)


class LeafCounters:
    """As CgroupCounters, of what is in no leaf of its own; of processes refused, all where v2 counts them."""

    def __init__(self, leaves: Leaves, pod: CgroupCounters) -> None:
        self._leaves = leaves
        self._pod = pod  # where there is no such controller below the pod's own directory

    @property
    def exist(self) -> bool:
        return self._pod.exist

    def oom_kills(self) -> int:
        one = self._leaves.with_controller("memory")
        if one is None:
            return self._pod.oom_kills()
        name = "memory.events" if one.version == "cgroup2" else "memory.oom_control"
        return _figure(f"{one.directory}/commands/shared", name, "oom_kill")

    def pids_denied(self) -> int:
        one = self._leaves.with_controller("pids")
        if one is None:
            return self._pod.pids_denied()
        shared = _figure(f"{one.directory}/commands/shared", "pids.events", "max")
        if one.version == "cgroup1":
            return shared
        return shared + _figure(f"{one.directory}/commands", "pids.events", "max")


def open_leaves(root: str = "/") -> Leaves | None:
    """None where we may make no cgroups, and nothing was changed then."""
    usable = []
    for one in cgroup.pods_own(root):
        for base in (one.directory, f"{one.directory}/{DELEGATED}"):
            if _prepared(base, one):
                usable.append(Hierarchy(base, one.version, one.controllers))
                break
    return Leaves(usable) if usable else None


def _prepared(base: str, one: Hierarchy) -> bool:
    is_v1_memory = one.version == "cgroup1" and "memory" in one.controllers
    if is_v1_memory and (read_text(base, "memory.use_hierarchy") or "").strip() != "1":
        return False  # kernels before 5.11: what is below would be outside of the pod's limit
    try:
        for name in ("executor", "commands/shared"):
            os.makedirs(f"{base}/{name}", exist_ok=True)
    except OSError:
        return False
    return os.access(f"{base}/cgroup.procs", os.W_OK)


def _limited(one: Hierarchy) -> Hierarchy:
    """Sets the commands' limits; which controllers there are for them. Version 2 has none below a directory with
    processes in it, such as another program's of the pod."""
    controllers = one.controllers
    if one.version == "cgroup2":
        controllers = tuple(name for name in ("memory", "pids") if name in controllers)
        try:
            for directory in (one.directory, f"{one.directory}/commands") if controllers else ():
                _write(f"{directory}/cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))
        except OSError as why:
            log.info("cgroup_without_controllers", extra={"path": one.directory, "errno": why.errno})
            controllers = ()
    is_v2 = one.version == "cgroup2"
    if "memory" in controllers:
        name = "memory.max" if is_v2 else "memory.limit_in_bytes"
        limit = _pods_limit(one, name)
        if limit is not None:
            _try_write(f"{one.directory}/commands/{name}", str(limit - min(RESERVED_BYTES, limit // 8)))
    if "pids" in controllers:
        limit = _pods_limit(one, "pids.max")
        if limit is not None and limit >= LEAST_PIDS:
            _try_write(f"{one.directory}/commands/pids.max", str(limit - min(RESERVED_PIDS, limit // 4)))
    return Hierarchy(one.directory, one.version, controllers)


def _pods_limit(one: Hierarchy, name: str) -> int | None:
    top = os.path.dirname(one.directory) if os.path.basename(one.directory) == DELEGATED else one.directory
    return Cgroup(one.directory, top, one.version).least_limit(name)


def _figure(directory: str, name: str, key: str) -> int:
    return parse_figures(read_text(directory, name)).get(key, 0)


def _numbers(text: str | None) -> list[int]:
    return [int(word) for word in (text or "").split() if word.isdigit() and word != "0"]


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _try_write(path: str, text: str) -> None:
    try:
        _write(path, text)
    except OSError as why:
        log.warning("cgroup_limit_not_set", extra={"path": path, "errno": why.errno})
