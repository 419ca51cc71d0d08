"""A pod's cgroups for an executor of a test: real ones, with limits, in a cgroup and a mount namespace of its own.

They need root and cgroup hierarchies that it may write to: version 1's `memory` and `pids`.
Version 2 is mounted besides where this machine has it, so that `cgroup.kill` is."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")
_NUMBERS: Final = itertools.count()

# Enters the cgroups, so that they are the tops of the new namespace, and mounts them as a container's runtime does.
_SCRIPT: Final = """\
set -e
while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs"; shift; done
shift
exec unshare --cgroup --mount --propagation private sh -ec '
mount -t tmpfs none /sys/fs/cgroup
while [ "$1" != -- ]; do
    case "$1" in
        unified) kind=cgroup2 more= ;;
        *) kind=cgroup more="-o $1" ;;
    esac
    mkdir -p "/sys/fs/cgroup/$1"
    mount -t $kind $more none "/sys/fs/cgroup/$1"
    [ "$MODE" = rw ] || mount -o remount,bind,ro "/sys/fs/cgroup/$1"
    shift
done
shift
size=64m  # as container runtimes bound it; memory that is a file could only be had back by its removal
[ "$MODE" = ro ] || size=100%
mount -t tmpfs -o mode=1777,size=$size none /dev/shm
exec "$@"' sh "$@"
"""


class PodCgroups:
    """Directories as this machine sees them, by controller; "unified" is version 2's."""

    def __init__(self, directories: dict[str, Path], mode: str) -> None:
        self.directories = directories
        self.is_writable = mode == "rw"
        self.prefix = (
            "env", f"MODE={mode}", "sh", "-c", _SCRIPT, "sh", *map(str, directories.values()), "--", *directories, "--",
        )  # fmt: skip

    def read(self, controller: str, name: str, below: str = ".") -> str:
        return (self.directories[controller] / below / name).read_text()

    def of(self, pid: int, controller: str) -> str:
        """Where a process is, from the pod's own directory."""
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(",") or (controller == "unified" and not names):
                return path.partition(self.directories[controller].name)[2].strip("/")
        raise AssertionError(f"{pid} is in no cgroup of {controller}")


@contextlib.contextmanager
def pod_cgroups(*, memory_bytes: int, pids: int, mode: str = "rw") -> Iterator[PodCgroups | None]:
    """None where this machine does not let us."""
    mounts = _mounts()
    if os.geteuid() != 0 or not {"memory", "pids"} <= mounts.keys():
        yield None
        return
    name = f"sojourn-test-{os.getpid()}-{next(_NUMBERS)}"
    directories: dict[str, Path] = {one: mounts[one] / name for one in ("memory", "pids", "unified") if one in mounts}
    try:
        for directory in directories.values():
            directory.mkdir()
        (directories["memory"] / "memory.limit_in_bytes").write_text(str(memory_bytes))
        with contextlib.suppress(OSError):  # a kernel without swap accounting
            (directories["memory"] / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
        (directories["pids"] / "pids.max").write_text(str(pids))
    except OSError:
        _remove(directories.values())
        yield None
        return
    try:
        yield PodCgroups(directories, mode)
    finally:
        _remove(directories.values())


def _mounts() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for line in MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point, kind = before.split()[4], after.split()
        if kind[0] == "cgroup2":
            found.setdefault("unified", Path(point))
        elif kind[0] == "cgroup":
            for controller in re.findall(r"\b(memory|pids)\b", kind[2]):
                found.setdefault(controller, Path(point))
    return found


def _remove(directories: Iterable[Path]) -> None:
    give_up = time.monotonic() + 60
    for top in directories:
        for directory in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), reverse=True):
            while directory.exists():
                try:
                    directory.rmdir()
                except OSError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.05)
