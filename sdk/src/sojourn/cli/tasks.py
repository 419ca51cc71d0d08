"""`sojourn top` and `sojourn rm`: what a task's sandbox uses, and its end."""

from __future__ import annotations

import sys

import click

from sojourn.cli.output import print_json, print_table, size
from sojourn.cli.places import place
from sojourn.sync import Client
from sojourn.types import UsageReport


@click.command()
@click.argument("task")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --watch, one a line.")
@click.option("--watch", "-w", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option("--interval", "interval_sec", type=click.IntRange(1, 60), default=2, help="Seconds, with --watch.")
def top(task: str, as_json: bool, watch: bool, interval_sec: int) -> None:
    """Show what TASK's sandbox uses, against its limits."""
    with Client() as client:
        if not watch:
            _show(place(client, task).usage(), None, as_json)
            return
        for sample in place(client, task).usage_stream(interval_sec):
            if as_json:
                print_json(sample)
            else:
                click.clear()  # nothing where nobody looks on
                _show(sample.usage, sample.cpu_cores, as_json)
            sys.stdout.flush()


def _show(report: UsageReport, busy_cores: float | None, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for line in summary(report, busy_cores):
        click.echo(line)
    if report.processes:
        click.echo()
        heads = ("PID", "USER", "MEMORY", "CPU", "THREADS", "NAME")
        rows = [
            [str(one.pid), one.user, size(one.rss_bytes), f"{one.cpu_ms / 1000:.1f} s", str(one.threads), one.name]
            for one in report.processes
        ]
        print_table(heads, rows, right=frozenset({0, 2, 3, 4}))


def summary(report: UsageReport, busy_cores: float | None = None) -> list[str]:
    """Four lines: memory, cpu, pids, disk. `busy_cores`: how many were kept busy of late, where that is known."""
    memory, cpu, pids, disk = report.memory, report.cpu, report.pids, report.disk
    busy = "" if busy_cores is None else f"{busy_cores:.2f} of "
    cores = f"{cpu.limit_cores:g}" if cpu.limit_cores is not None else f"all {cpu.cores}"
    return [
        f"memory  {size(memory.working_set_bytes)} of {size(memory.limit_bytes)}",
        f"cpu     {busy}{cores} cores, {cpu.usage_ms / 1000:.2f} s used",
        f"pids    {pids.current} of {pids.limit if pids.limit is not None else 'no limit'}",
        f"disk    {size(disk.used_bytes)} of {size(disk.limit_bytes)} ({disk.path})",
    ]


@click.command()
@click.argument("tasks", nargs=-1, required=True)
def rm(tasks: tuple[str, ...]) -> None:
    """End the sandboxes of TASKS, with all that is in them.

    No error where a task has none. The next command of the task gets a fresh one.
    """
    with Client() as client:
        for task in tasks:
            client.task(task).delete()
