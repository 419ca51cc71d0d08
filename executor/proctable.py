"""The pod's processes as psutil sees them: for the per-process part of the usage, and for all of it where no cgroup
can be read. psutil is imported at the first use only: it costs memory that an idle pod need not spend."""

from __future__ import annotations

import heapq
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from executor.wire import ProcessUse

MAX_SHOWN: Final = 200
_MAX_SCANNED: Final = 10_000
_INITIAL_NAMESPACE: Final = "pid:[4026531836]"  # a fixed number in the kernel's proc_ns.h


@dataclass(frozen=True)
class ProcessTable:
    shown: list[ProcessUse]  # the largest
    is_cut: bool
    rss_bytes: int  # of all; shared pages count in each process
    cpu_ms: float  # of all, and of the children that they have waited for
    threads: int  # of all: what a limit on pids counts


def read_processes(leaders: Mapping[int, str]) -> ProcessTable:
    """`leaders`: pid to our process id of running commands; their descendants are theirs too.

    In a PID namespace of the pod's own, all processes; in the machine's, only the executor and its descendants."""
    import psutil

    rows: dict[int, ProcessUse] = {}
    waited_ms = 0.0
    names: dict[int, str] = {}
    parents = _parents(psutil.pids())
    for pid in _of_pod(parents):
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                waited_ms += (times.children_user + times.children_system) * 1000
                rows[pid] = ProcessUse(
                    pid=pid,
                    ppid=process.ppid(),
                    name=_printable(process.name()),
                    user=_user_name(process.uids().real, names),
                    rss_bytes=process.memory_info().rss,
                    cpu_ms=(times.user + times.system) * 1000,
                    threads=process.num_threads(),
                    process_id=_owner(pid, parents, leaders),
                )
        except (psutil.Error, OSError, ValueError):
            continue  # it ended meanwhile
    shown = heapq.nlargest(MAX_SHOWN, rows.values(), key=lambda row: row.rss_bytes)
    return ProcessTable(
        shown=shown,
        is_cut=len(shown) < len(rows),
        rss_bytes=sum(row.rss_bytes for row in rows.values()),
        cpu_ms=sum(row.cpu_ms for row in rows.values()) + waited_ms,
        threads=sum(row.threads for row in rows.values()),
    )


def _parents(pids: list[int]) -> dict[int, int]:
    import psutil

    parents: dict[int, int] = {}
    for pid in pids[:_MAX_SCANNED]:
        try:
            parents[pid] = psutil.Process(pid).ppid()
        except (psutil.Error, OSError, ValueError):
            continue
    return parents


def _of_pod(parents: Mapping[int, int]) -> list[int]:
    try:
        is_ours_alone = os.readlink("/proc/self/ns/pid") != _INITIAL_NAMESPACE
    except OSError:
        is_ours_alone = True  # gVisor has no such link, and no other PID namespace to be in
    if is_ours_alone:
        return list(parents)
    me = os.getpid()
    return [pid for pid in parents if me in _line_of(pid, parents)]


def _owner(pid: int, parents: Mapping[int, int], leaders: Mapping[int, str]) -> str | None:
    return next((leaders[above] for above in _line_of(pid, parents) if above in leaders), None)


def _line_of(pid: int, parents: Mapping[int, int]) -> list[int]:
    """The process, its parent and so on. Pids that were used again while we read may make a ring: it is cut."""
    line: list[int] = []
    while pid and len(line) < 256 and pid not in line:
        line.append(pid)
        pid = parents.get(pid, 0)
    return line


def _user_name(uid: int, known: dict[int, str]) -> str:
    if uid not in known:
        try:
            known[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            known[uid] = str(uid)
    return known[uid]


def _printable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:256]
