"""The end of a pod: everything in it killed, its cgroups removed, its directory taken away. All calls block."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

import msgspec

from manager.providers.base import PodGone
from manager.providers.local import cgroups, routed
from manager.providers.local.processes import ProcessId, boot_id, descendants, parse_stat, reap, send
from manager.providers.local.removal import remove_tree
from manager.providers.local.state import PodRecord, PodStore

KILL_SEC: Final = 20.0  # from KILL to the last process gone; a process in an uninterruptible wait takes its time
STATUS_SEC: Final = 1.0  # from the executor's end to bubblewrap's word about it
LOG_TAIL_BYTES: Final = 2048


class _Status(msgspec.Struct, frozen=True, rename="kebab"):
    exit_code: int | None = None


def end_pod(store: PodStore, name: str, blank: PodRecord, *, deleted: bool) -> tuple[str, Path | None]:
    """Ends what is left of the pod and takes it out of the store. Safe to repeat, also at the same time elsewhere.

    Gives the reason of its end, and the directory that is still to be removed (None: there was no such pod). `blank`
    stands in for a record that cannot be read. Raises OSError where a process or a cgroup would not go."""
    if deleted:
        with contextlib.suppress(PodGone):
            store.change(name, lambda record: msgspec.structs.replace(record, phase="deleting"))
    if not store.path(name).exists():
        return "destroyed", None
    record = store.read(name) or blank
    reason = reason_of(store, record, deleted=deleted)
    _kill(store, record)
    cgroups.remove(record.cgroups)
    if record.network is not None and record.network.way == "routed":
        routed.remove(record.network)
    if record.workspace:
        remove_tree(Path(record.workspace))
    if record.run_dir:
        remove_tree(Path(record.run_dir))
        if store.root not in Path(record.run_dir).parents:
            with contextlib.suppress(OSError):  # the last one takes the short directory with it
                Path(record.run_dir).parent.rmdir()
    return reason, store.retire(name)


def log_tail(path: Path) -> str:
    """The last lines of a pod's log; "" where there are none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def trim_log(path: Path, most_bytes: int) -> None:
    """Cuts a log that has grown over `most_bytes` down to its end. It is open for appending, so its writer goes on."""
    try:
        if path.stat().st_size > most_bytes:
            kept = log_tail(path)
            with open(path, "r+b") as file:
                file.truncate(0)
                file.write(f"[cut at {most_bytes} bytes]\n{kept}\n".encode())
    except OSError:
        pass


def reason_of(store: PodStore, record: PodRecord, *, deleted: bool) -> str:
    """`destroyed`, `expired`, `oom` or `lost`, as in the API's `previous`."""
    if deleted or record.phase == "deleting":
        return "destroyed"
    code = _exit_code(store, record)
    # Under gVisor the kernel kills the pod as a whole; runsc then has a code of its own, if it tells one in time.
    killed = code not in (0, 128 + signal.SIGTERM) if record.isolation == "gvisor" else code == 128 + signal.SIGKILL
    if killed and cgroups.oom_kills(record.cgroups) > 0:
        return "oom"
    # The executor ends itself in order when its lease has run out; anything else ends it otherwise.
    return "expired" if code == 0 else "lost"


def _exit_code(store: PodStore, record: PodRecord) -> int | None:
    """The executor's, as bubblewrap wrote it; None where nobody saw its end."""
    if record.inner is None or record.inner.alive():
        return None
    deadline = time.monotonic() + STATUS_SEC
    while record.outer is not None and record.outer.alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    try:
        lines = (store.path(record.name) / "status").read_bytes().splitlines()
        return msgspec.json.decode(lines[-1], type=_Status).exit_code
    except (OSError, IndexError, msgspec.DecodeError):
        return None


def _kill(store: PodStore, record: PodRecord) -> None:
    """Kills every process of the pod and waits for the last one. Raises TimeoutError."""
    if record.boot_id != boot_id():
        return
    known = _processes(store, record)
    cgroups.kill(record.cgroups)
    # The kernel follows the end of a pod's PID 1 with the end of its whole pid namespace.
    for process in known:
        send(process, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SEC
    pause = 0.001
    while True:
        for process in known:
            reap(process)
        left = cgroups.members(record.cgroups)
        if not left and not any(process.alive() for process in known):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"pod {record.name}: processes {sorted(left)} outlived KILL by {KILL_SEC:.0f} s")
        time.sleep(pause)
        pause = min(0.05, pause * 2)
        if not cgroups.kill(record.cgroups):
            _kill_members(record, left)


def _kill_members(record: PodRecord, pids: set[int]) -> None:
    """For kernels without `cgroup.kill`, and pods without a pid namespace."""
    for pid in pids:
        # Looked at again right before: nobody but the pod is ever in its cgroups.
        if pid > 0 and pid in cgroups.members(record.cgroups):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes(store: PodStore, record: PodRecord) -> list[ProcessId]:
    """The pod's PID 1 and bubblewrap outside; where a maker died before it wrote them down, by what is in the store."""
    outer = record.outer
    if outer is None:
        try:
            pid, _, start_ticks = parse_stat((store.path(record.name) / "launcher").read_bytes())
        except (OSError, ValueError):
            return []
        outer = ProcessId(pid, start_ticks)
    if record.inner is not None:
        return [record.inner, outer]
    if not outer.alive():
        return [outer]
    # Stopped first, or it could start the pod's PID 1 between the look and the kill.
    send(outer, signal.SIGSTOP)
    return [*descendants(outer.pid), outer]
