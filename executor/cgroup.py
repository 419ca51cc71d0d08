"""What the pod's cgroups say, of either version. Nothing here raises: a file that is missing or odd says nothing.

Where they are: in a pod, the mounts of /proc/self/mountinfo lead to the pod's own directories; elsewhere the paths of
/proc/self/cgroup lead from the mounts to ours. `root` stands for `/` in all of it, so that a directory of fixtures
can stand in for a machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

_MAX_FILE_BYTES: Final = 64 * 1024
_UNLIMITED: Final = 1 << 60  # v1 writes the greatest multiple of a page under 2**63 for "none"
_MAX_CORES: Final = 65_536
_MAX_BELOW: Final = 512
_INITIAL_NAMESPACE: Final = "cgroup:[4026531835]"  # a fixed number in the kernel's proc_ns.h
# Under gVisor what is mounted from outside is of this kind, whatever it is: a cgroup is known by its place.
_GOFER: Final = "9p"
_V2_POINTS: Final = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")

Version = Literal["cgroup1", "cgroup2"]


class Cgroup(msgspec.Struct, frozen=True):
    """One controller's directory for the pod, and how far up there are others that limit it too."""

    directory: str
    mount: str
    version: Version

    def text(self, name: str) -> str | None:
        return read_text(self.directory, name)

    def number(self, name: str) -> int | None:
        return parse_number(self.text(name))

    def figures(self, name: str) -> dict[str, int]:
        return parse_figures(self.text(name))

    def least_limit(self, name: str) -> int | None:
        """The smallest of the directory's limit and those above it, as the kernel applies all of them."""
        limits = [limit for at in self._upwards() if (limit := parse_limit(read_text(at, name))) is not None]
        return min(limits, default=None)

    def least_cores(self) -> float | None:
        """The CPU time per time that the pod may use; None without a limit."""
        cores = [limit for at in self._upwards() if (limit := self._cores_at(at)) is not None]
        return min(cores, default=None)

    def cores(self) -> int | None:
        """Of a cpuset: what is left of the wish after what is above. v2's wish is often empty, its effect never."""
        names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
        return next((count for name in names if (count := parse_cpuset(self.text(name))) is not None), None)

    def all_below(self) -> Iterator[str]:
        """This directory and those in it, however deep, as far as one may look."""
        places = [self.directory]
        for count, place in enumerate(places):
            yield place
            if count < _MAX_BELOW:
                places += _subdirectories(place)

    def _cores_at(self, directory: str) -> float | None:
        if self.version == "cgroup2":
            return parse_cpu_max(read_text(directory, "cpu.max"))
        quota = parse_number(read_text(directory, "cpu.cfs_quota_us"))
        period = parse_number(read_text(directory, "cpu.cfs_period_us"))
        return quota / period if quota is not None and period is not None and quota > 0 and period > 0 else None

    def _upwards(self) -> Iterator[str]:
        at = self.directory
        yield at
        while at.startswith(self.mount + "/"):
            at = os.path.dirname(at)
            yield at


class PodCgroups(msgspec.Struct, frozen=True):
    """None where the controller says nothing about this pod alone."""

    memory: Cgroup | None
    cpu: Cgroup | None  # limit and throttling
    cpuacct: Cgroup | None  # use
    cpuset: Cgroup | None
    pids: Cgroup | None


def find(root: str = "/") -> PodCgroups:
    own = _own_paths(read_text(root, "proc/self/cgroup"))
    mounts = _mounts(read_text(root, "proc/self/mountinfo"))
    in_own_namespace = _namespace(root) != _INITIAL_NAMESPACE

    def at(controller: str, v2_file: str, v1_file: str) -> Cgroup | None:
        for mount in mounts:
            is_v2 = mount.controllers is None
            if not is_v2 and controller not in (mount.controllers or ()):
                continue
            path = own.get("" if is_v2 else controller, "/")
            name = v2_file if is_v2 else v1_file
            for directory in _candidates(mount, path, root, in_own_namespace):
                if os.path.exists(os.path.join(directory, name)):
                    version: Version = "cgroup2" if is_v2 else "cgroup1"
                    return Cgroup(directory, os.path.join(root, mount.point.lstrip("/")).rstrip("/"), version)
        return None

    return PodCgroups(
        memory=at("memory", "memory.current", "memory.usage_in_bytes"),
        cpu=at("cpu", "cpu.max", "cpu.cfs_quota_us"),
        # cpu.stat is in every v2 directory, also the machine's own; cgroup.type only in those below it.
        cpuacct=at("cpuacct", "cgroup.type", "cpuacct.usage"),
        cpuset=at("cpuset", "cpuset.cpus.effective", "cpuset.cpus"),
        pids=at("pids", "pids.current", "pids.current"),
    )


class Hierarchy(msgspec.Struct, frozen=True):
    """A part of a hierarchy that is the pod's alone, as far as a mount can say."""

    directory: str
    version: Version
    controllers: tuple[str, ...]


def pods_own(root: str = "/") -> list[Hierarchy]:
    """Version 2, and what of version 1 limits memory or processes; none that is the machine's."""
    in_own_namespace = _namespace(root) != _INITIAL_NAMESPACE
    found: list[Hierarchy] = []
    for mount in _mounts(read_text(root, "proc/self/mountinfo")):
        if (mount.inner == "/" and not in_own_namespace) or ".." in mount.inner.split("/"):
            continue
        directory = os.path.join(root, mount.point.lstrip("/"))
        if any(directory.startswith(one.directory + "/") for one in found):
            continue  # a part of it, made writable
        if mount.controllers is None:
            offered = (read_text(directory, "cgroup.controllers") or "").split()
            found.append(Hierarchy(directory, "cgroup2", tuple(offered)))
        elif "memory" in mount.controllers or "pids" in mount.controllers:
            found.append(Hierarchy(directory, "cgroup1", mount.controllers))
    return found


class CgroupCounters:
    """Two counters that rise as commands run into the pod's limits (`executor.pressure`). Cheap, and never raise;
    0 where nothing is known."""

    def __init__(self, root: str = "/") -> None:
        found = find(root)
        self._memory, self._pids = found.memory, found.pids

    @property
    def exist(self) -> bool:
        return self._memory is not None or self._pids is not None

    def oom_kills(self) -> int:
        return oom_kills(self._memory) if self._memory is not None else 0

    def pids_denied(self) -> int:
        """Forks refused for the limit on processes. Version 1 counts them where the process is that wanted to fork;
        so did version 2, which now counts them where the limit is."""
        if self._pids is None:
            return 0
        return sum(parse_figures(read_text(place, "pids.events")).get("max", 0) for place in self._pids.all_below())


def oom_kills(memory: Cgroup) -> int:
    if memory.version == "cgroup2":
        return memory.figures("memory.events").get("oom_kill", 0)  # counts what happens below it too
    # v1 counts a kill only where the victim was
    return sum(parse_figures(read_text(place, "memory.oom_control")).get("oom_kill", 0) for place in memory.all_below())


# ── texts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def read_text(directory: str, name: str) -> str | None:
    try:
        with open(os.path.join(directory, name), "rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def parse_number(text: str | None) -> int | None:
    if text is None:
        return None
    word = text.strip()
    digits = word.removeprefix("-")
    return int(word) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None


def parse_limit(text: str | None) -> int | None:
    """None for "max", for v1's huge number that means the same, and for what is no number."""
    number = parse_number(text)
    return number if number is not None and 0 <= number < _UNLIMITED else None


def parse_cpu_max(text: str | None) -> float | None:
    """Cores out of "quota period" in microseconds; the period may be missing (then 100 ms, the kernel's default)."""
    words = (text or "").split()
    quota = parse_number(words[0]) if words else None
    period = parse_number(words[1]) if len(words) > 1 else 100_000
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def parse_cpuset(text: str | None) -> int | None:
    """How many cores "1,3-4" names; None for an empty or odd list."""
    count = 0
    for item in (text or "").strip().split(","):
        first, _, last = item.partition("-")
        low, high = parse_number(first), parse_number(last or first)
        if low is None or high is None or not 0 <= low <= high < _MAX_CORES:
            return None
        count += high - low + 1
    return count or None


def parse_figures(text: str | None) -> dict[str, int]:
    """Lines of "name number"; others are left out."""
    figures: dict[str, int] = {}
    for line in (text or "").splitlines():
        name, _, value = line.strip().partition(" ")
        number = parse_number(value)
        if number is not None:
            figures[name] = number
    return figures


# ── places ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Mount(msgspec.Struct, frozen=True):
    inner: str  # the directory of the hierarchy that is mounted, "/" being its top as our namespace sees it
    point: str
    controllers: tuple[str, ...] | None  # None: version 2


def _mounts(mountinfo: str | None) -> list[_Mount]:
    mounts: list[_Mount] = []
    for line in (mountinfo or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        inner, point = _unescaped(fields[3]), _unescaped(fields[4])
        if kind[0] == "cgroup2" or (kind[0] == _GOFER and point in _V2_POINTS):
            mounts.append(_Mount(inner, point, None))
        elif kind[0] == "cgroup":
            mounts.append(_Mount(inner, point, tuple(kind[2].split(","))))
        elif kind[0] == _GOFER and os.path.dirname(point) == _V2_POINTS[0]:
            mounts.append(_Mount(inner, point, tuple(os.path.basename(point).split(","))))
    return mounts


def _own_paths(text: str | None) -> dict[str, str]:
    """Controller to our path in its hierarchy; "" for version 2."""
    paths: dict[str, str] = {}
    for line in (text or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _subdirectories(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as scan:
            return [entry.path for entry in scan if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _candidates(mount: _Mount, own: str, root: str, in_own_namespace: bool) -> Iterator[str]:
    """The pod's directory before ours in it: where a part of the hierarchy is mounted, that part is the pod's. The
    whole machine's is none, though version 1 has all files there too."""
    point = os.path.join(root, mount.point.lstrip("/"))
    is_pods = mount.inner != "/" or in_own_namespace or mount.controllers is None
    if is_pods:
        yield point
    if ".." not in own.split("/") and own != "/":
        yield os.path.join(point, own.removeprefix("/"))


def _namespace(root: str) -> str | None:
    try:
        return os.readlink(os.path.join(root, "proc/self/ns/cgroup"))
    except OSError:
        return None


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), field)


def cpu_figures(cgroups: PodCgroups) -> Mapping[str, float]:
    """`usage_ms` and `throttled_ms` where they are known."""
    figures: dict[str, float] = {}
    if (use := cgroups.cpuacct) is not None:
        if use.version == "cgroup2":
            micro = use.figures("cpu.stat").get("usage_usec")
            nano = micro * 1000 if micro is not None else None
        else:
            nano = use.number("cpuacct.usage")
        if nano is not None:
            figures["usage_ms"] = nano / 1e6
    if (limit := cgroups.cpu) is not None:
        stat = limit.figures("cpu.stat")
        nano = stat.get("throttled_time") if limit.version == "cgroup1" else stat.get("throttled_usec", 0) * 1000
        figures["throttled_ms"] = (nano or 0) / 1e6
    return figures
