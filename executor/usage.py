"""What the pod uses, against what it may use: from its cgroups, and from its processes where none can be read."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from executor import cgroup
from executor.cgroup import PodCgroups
from executor.config import ExecutorConfig
from executor.errors import ExecutorError
from executor.proctable import ProcessTable, read_processes
from executor.safepath import file_error
from executor.threads import started_pool
from executor.wire import CpuUse, DiskUse, MemoryUse, PidsUse, UsageReport

REPORT_DEADLINE_SEC: Final = 20.0
_METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
_NO_PROCESSES: Final = ProcessTable(shown=[], is_cut=False, rss_bytes=0, cpu_ms=0.0, threads=0)


def _none() -> dict[int, str]:
    return {}


class UsageService:
    """`gauges` adds figures to the metrics; `leaders` gives pid to process id of the running commands. Both are called
    on the event loop."""

    def __init__(
        self,
        config: ExecutorConfig,
        gauges: Callable[[], Mapping[str, float]],
        leaders: Callable[[], Mapping[int, str]] = _none,
        root: str = "/",
    ) -> None:
        self._workspace = config.workspace
        self._gauges = gauges
        self._leaders = leaders
        self._cgroups = cgroup.find(root)
        self._pool = started_pool(1, "usage")
        self._under_way: dict[bool, asyncio.Future[UsageReport]] = {}

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def report(self, with_processes: bool = True) -> UsageReport:
        """Callers at the same time share one reading, so that a thousand of them cost no more than one."""
        future = self._under_way.get(with_processes)
        if future is None:
            loop, leaders = asyncio.get_running_loop(), dict(self._leaders()) if with_processes else {}
            future = loop.run_in_executor(self._pool, self._read, with_processes, leaders)
            self._under_way[with_processes] = future
            future.add_done_callback(lambda done: self._forget(with_processes, done))
        try:
            async with asyncio.timeout(REPORT_DEADLINE_SEC):
                return await asyncio.shield(future)
        except TimeoutError:
            raise ExecutorError(f"the usage could not be read within {REPORT_DEADLINE_SEC:.0f} s") from None

    async def metrics(self) -> str:
        """In Prometheus' text format."""
        return metrics_text(await self.report(with_processes=False), self._gauges())

    def _forget(self, with_processes: bool, done: asyncio.Future[UsageReport]) -> None:
        self._under_way.pop(with_processes, None)
        if not done.cancelled():
            done.exception()  # seen, also where every caller has gone

    def _read(self, with_processes: bool, leaders: Mapping[int, str]) -> UsageReport:
        groups = self._cgroups
        needs_table = with_processes or groups.memory is None or groups.cpuacct is None or groups.pids is None
        table = read_processes(leaders) if needs_table else _NO_PROCESSES
        return UsageReport(
            at=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            memory=memory_use(groups, table),
            cpu=cpu_use(groups, table),
            pids=pids_use(groups, table),
            disk=disk_use(self._workspace),
            processes=table.shown if with_processes else [],
            processes_truncated=table.is_cut if with_processes else False,
        )


def memory_use(groups: PodCgroups, table: ProcessTable) -> MemoryUse:
    memory = groups.memory
    if memory is None:
        rss = table.rss_bytes
        return MemoryUse(working_set_bytes=rss, usage_bytes=rss, limit_bytes=None, oom_kills=0, source="processes")
    is_v2 = memory.version == "cgroup2"
    usage = memory.number("memory.current" if is_v2 else "memory.usage_in_bytes") or 0
    inactive = memory.figures("memory.stat").get("inactive_file" if is_v2 else "total_inactive_file", 0)
    return MemoryUse(
        working_set_bytes=max(usage - inactive, 0),
        usage_bytes=usage,
        limit_bytes=memory.least_limit("memory.max" if is_v2 else "memory.limit_in_bytes"),
        oom_kills=cgroup.oom_kills(memory),
        source=memory.version,
    )


def cpu_use(groups: PodCgroups, table: ProcessTable) -> CpuUse:
    figures = cgroup.cpu_figures(groups)
    cores = groups.cpuset.cores() if groups.cpuset is not None else None
    return CpuUse(
        usage_ms=figures.get("usage_ms", table.cpu_ms),
        throttled_ms=figures.get("throttled_ms", 0.0),
        limit_cores=groups.cpu.least_cores() if groups.cpu is not None else None,
        cores=cores if cores is not None else len(os.sched_getaffinity(0)),
        source=groups.cpuacct.version if groups.cpuacct is not None and "usage_ms" in figures else "processes",
    )


def pids_use(groups: PodCgroups, table: ProcessTable) -> PidsUse:
    pids = groups.pids
    if pids is None:
        return PidsUse(current=table.threads, limit=None, source="processes")
    return PidsUse(current=pids.number("pids.current") or 0, limit=pids.least_limit("pids.max"), source=pids.version)


def disk_use(path: str) -> DiskUse:
    """Of the file system that holds the workspace. Raises FileMissing, PermissionDenied."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise file_error(error, os.fsencode(path)) from None
    return DiskUse(
        path=path,
        used_bytes=(status.f_blocks - status.f_bfree) * status.f_frsize,
        limit_bytes=status.f_blocks * status.f_frsize,
        inodes_used=status.f_files - status.f_ffree,
        inodes_limit=status.f_files,
    )


def metrics_text(report: UsageReport, gauges: Mapping[str, float]) -> str:
    """Limits that are not set have no line."""
    memory, cpu, pids, disk = report.memory, report.cpu, report.pids, report.disk
    rows: list[tuple[str, str, float | None]] = [
        ("sojourn_pod_memory_working_set_bytes", "gauge", memory.working_set_bytes),
        ("sojourn_pod_memory_usage_bytes", "gauge", memory.usage_bytes),
        ("sojourn_pod_memory_limit_bytes", "gauge", memory.limit_bytes),
        ("sojourn_pod_oom_kills_total", "counter", memory.oom_kills),
        ("sojourn_pod_cpu_seconds_total", "counter", cpu.usage_ms / 1000),
        ("sojourn_pod_cpu_throttled_seconds_total", "counter", cpu.throttled_ms / 1000),
        ("sojourn_pod_cpu_limit_cores", "gauge", cpu.limit_cores),
        ("sojourn_pod_pids", "gauge", pids.current),
        ("sojourn_pod_pids_limit", "gauge", pids.limit),
        ("sojourn_pod_disk_used_bytes", "gauge", disk.used_bytes),
        ("sojourn_pod_disk_limit_bytes", "gauge", disk.limit_bytes),
        ("sojourn_pod_inodes_used", "gauge", disk.inodes_used),
        ("sojourn_pod_inodes_limit", "gauge", disk.inodes_limit),
    ]
    for name, value in sorted(gauges.items()):
        if _METRIC_NAME.match(name):
            rows.append((name, "counter" if name.endswith("_total") else "gauge", value))
    lines = [f"# TYPE {name} {kind}\n{name} {value!r}\n" for name, kind, value in rows if value is not None]
    return "".join(lines)
