"""The report as a whole, on whatever machine runs the tests, and the text for Prometheus."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor import proctable
from executor.config import ExecutorConfig
from executor.errors import FileMissing
from executor.proctable import read_processes
from executor.usage import UsageService, disk_use, metrics_text


@pytest.fixture
def usage(tmp_path: Path) -> Iterator[UsageService]:
    config = ExecutorConfig(token_sha256="0" * 64, workspace=str(tmp_path))
    # Without cgroups: an empty directory stands for the machine.
    service = UsageService(config, lambda: {"sojourn_commands_running": 2.0, "bad name": 1.0}, root=str(tmp_path))
    yield service
    service.close()


@pytest.fixture
def child() -> Iterator[int]:
    """A process that holds about 40 MiB, once it has said so."""
    code = "import sys; kept = bytearray(40 << 20); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


async def test_without_cgroups_the_processes_are_summed_up(usage: UsageService, child: int) -> None:
    report = await usage.report()
    assert (report.memory.source, report.cpu.source, report.pids.source) == ("processes",) * 3
    rows = {row.pid: row for row in report.processes}
    assert rows[child].ppid == os.getpid()
    assert rows[child].rss_bytes > 40 << 20
    assert report.memory.working_set_bytes >= rows[child].rss_bytes + rows[os.getpid()].rss_bytes
    assert report.pids.current >= 2
    assert report.cpu.usage_ms > 0
    assert report.cpu.cores >= 1


async def test_concurrent_callers_share_one_reading(usage: UsageService) -> None:
    reports = await asyncio.gather(*(usage.report() for _ in range(50)))
    assert len({id(report) for report in reports}) == 1
    assert await usage.report() is not reports[0]


def test_descendants_belong_to_the_command_that_began_them(child: int) -> None:
    rows = {row.pid: row.process_id for row in read_processes({os.getpid(): "tests", child: "one"}).shown}
    assert rows[child] == "one"
    assert rows[os.getpid()] == "tests"


def test_the_list_of_processes_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch, child: int) -> None:
    whole = read_processes({})
    assert child in [row.pid for row in whole.shown]
    monkeypatch.setattr(proctable, "MAX_SHOWN", 1)
    table = read_processes({})
    assert table.is_cut
    assert len(table.shown) == 1
    assert table.threads >= 2  # the sums are of all, shown or not


def test_disk_use_is_that_of_the_workspace_s_file_system(tmp_path: Path) -> None:
    use = disk_use(str(tmp_path))
    assert 0 < use.used_bytes < use.limit_bytes
    with pytest.raises(FileMissing):
        disk_use(str(tmp_path / "missing"))


async def test_metrics_are_prometheus_text_with_the_gauges_given(usage: UsageService) -> None:
    lines = (await usage.metrics()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["sojourn_commands_running"] == "2.0"
    assert int(values["sojourn_pod_memory_working_set_bytes"]) > 0
    assert "sojourn_pod_memory_limit_bytes" not in values  # there is none
    assert not any("bad name" in line for line in lines)
    assert all(f"# TYPE {name} " in "\n".join(lines) for name in values)


async def test_metrics_do_not_list_processes(usage: UsageService) -> None:
    report = await usage.report(with_processes=False)
    assert report.processes == []
    assert "sojourn_pod_pids " in metrics_text(report, {})
