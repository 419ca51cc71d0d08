"""What does Sojourn cost? Executor and manager beside a C server and beside others of their kind, in one run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

if __name__ == "__main__":  # started as a file, the tree's root is not where imports are looked for
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import checks as checking
from benchmarks.harness import machine, readme, report, servers
from benchmarks.harness.bench import FULL, QUICK, Bench
from benchmarks.harness.memory import pss_bytes, tree
from benchmarks.harness.parts import PARTS
from benchmarks.harness.peers import PEERS

RESULTS = Path(__file__).resolve().parent / "results"
NEED_EXECUTOR = ("session", "raw", "memory", "start", "leaks")  # what measures the executor, and starts its own

EPILOG = """\
what is compared
  floor          a C server that vforks, its helper under the command user: the least that this machine can do
  floor-x2       the same with two helpers, as many as the executor has
  executor       `python -I -m executor`, called directly
  manager        `python -m manager up`, called as a task session with an API key; its pod is a real local one
  go             a plain Go server, net/http and os/exec, built where go is installed
  swe-rex        SWE-ReX's server, and
  agent-sandbox  Alibaba's Agent Sandbox server: both unmodified, from PyPI, installed once under ~/.cache
  What cannot be had here is shown as absent, with why; it fails nothing.

how to read it
  Ratios compare what ran in the same round, so they hold on a busy machine; absolute figures do not.
  The executor's ratio is to the floor, the manager's is to the executor. As root, commands run as another user
  (split tier), which is how the limits under "must and goal" are meant.

parts (--only)
{parts}

examples
  python benchmarks/bench_exec.py --quick                     everything, in three minutes
  python benchmarks/bench_exec.py --quick --only exec,noop    two parts of it
  python benchmarks/bench_exec.py --quick --only raw,files --no-manager --peers none
  python benchmarks/bench_exec.py --check --keep              all of it; exit 1 where a must does not hold
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parts = "\n".join(f"  {name:<10} {what}" for name, (_measure, what) in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="bench_exec.py", description=__doc__, epilog=EPILOG.format(parts=parts),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="short rounds: three minutes instead of fifteen")
    parser.add_argument("--only", metavar="PART,...", type=_parts, default=list(PARTS), help="these parts alone")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds instead of the usual 9 (quick: 3)")
    parser.add_argument("--transport", choices=("tcp", "unix"), default="tcp", help="to floor and executor [tcp]")
    parser.add_argument("--peers", metavar="NAME,...", type=_peers, default=list(PEERS), help="these alone, or `none`")
    parser.add_argument("--no-manager", action="store_true", help="leave the manager out")
    parser.add_argument("--no-executor", action="store_true", help="leave the executor out: floors (and manager) alone")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the one line of JSON there too")
    parser.add_argument(
        "--keep", action="store_true", help="keep report and JSON in benchmarks/results/ by date, and README's table"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where a must does not hold or is unknown")
    options = parser.parse_args(argv)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.keep and options.only != list(PARTS):
        parser.error("--keep is for whole runs, without --only")
    return options


def _parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"there is no part {name!r}; the parts are {', '.join(PARTS)}")
    if not names:
        raise argparse.ArgumentTypeError(f"name at least one of {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def _peers(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"there is no peer {name!r}; the peers are {', '.join(PEERS)}, or none")
    return [name for name in PEERS if name in names]


BEGAN = time.monotonic()


def say(what: str) -> None:
    """Progress: one line that is written over on a terminal, lines elsewhere."""
    end, start = ("", "\r\033[K") if sys.stderr.isatty() else ("\n", "")
    told = f"{time.monotonic() - BEGAN:4.0f} s  {what}" if what else ""
    print(f"{start}{told}", end=end, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    """Puts in the machine, the results by part as they come, and what was left out and why. Raises CannotMeasure."""
    effort = QUICK if options.quick else FULL
    if options.rounds is not None:
        effort = dataclasses.replace(effort, rounds=options.rounds)
    about: dict[str, Any] = machine.describe()
    results: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    measured |= {"machine": about, "effort": dataclasses.asdict(effort), "skipped": skipped, "results": results}
    with ExitStack() as stack:
        shop = stack.enter_context(servers.workshop(options.transport))
        about.update(tier=shop.tier, transport=options.transport)
        bench = Bench(shop, effort, say, executor_argv=servers.executor_argv())
        bench.floors = [stack.enter_context(servers.floor_server(shop, helpers=helpers)) for helpers in (1, 2)]
        if options.no_executor:
            skipped["executor"] = "left out by --no-executor"
        else:
            bench.executor = stack.enter_context(servers.executor_server(shop, bench.executor_argv))
        if options.no_manager:
            skipped["manager"] = "left out by --no-manager"
        else:
            say("starting the manager")
            try:
                bench.manager = stack.enter_context(servers.manager_server(shop))
            except servers.CannotMeasure as why:
                skipped["manager"] = str(why)
                say(f"no manager in this run: {why}")
        for name, server in PEERS.items():
            if name not in options.peers:
                skipped[name] = "left out by --peers"
                continue
            say(f"starting {name} (installed or built where it is the first time)")
            try:
                bench.peers.append(stack.enter_context(server(shop)))
            except servers.CannotMeasure as why:
                skipped[name] = f"absent: {why}"
                say(f"{name} is absent: {why}")
        bench.fresh_pss = {peer.name: pss_bytes(tree(peer.pid)) for peer in bench.peers}
        for name in options.only:
            if bench.executor is None and name in NEED_EXECUTOR:
                continue
            try:
                results.update(msgspec.to_builtins(PARTS[name][0](bench)))
            except servers.CannotMeasure as why:
                skipped[name] = str(why)
                say(f"{name} could not be measured: {why}")
    say("")


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, _stopped)
    measured: dict[str, Any] = {}
    try:
        measure(options, measured)
    except servers.CannotMeasure as why:
        print(f"\nbench_exec.py: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbench_exec.py: stopped; what it had started is gone", file=sys.stderr)
        if results := measured.get("results"):
            checks = [check for check in checking.checks_of(results, options.only) if check.value is not None]
            print(report.table_of(measured["machine"], results, checks, measured["skipped"]))
        return 130
    checks = checking.checks_of(measured["results"], options.only)
    table = report.table_of(measured["machine"], measured["results"], checks, measured["skipped"])
    verdicts = [msgspec.to_builtins(check) | {"verdict": check.verdict} for check in checks]
    line = json.dumps(measured | {"checks": verdicts}, separators=(",", ":"))
    print(f"{table}\n\n{line}")
    if options.json is not None:
        options.json.write_text(line + "\n")
    if options.keep:
        keep(measured["machine"], checks, table, line)
    left_out = [name for name in ("executor", "manager") if getattr(options, f"no_{name}")]
    left_out += [name for name in PEERS if name in measured["skipped"]]
    left_out += [] if "bundle" in options.only else ["bundle"]
    missed = checking.failed(checks, left_out)
    if options.check and missed:
        print(f"\nbench_exec.py: {len(missed)} of what must hold does not or was not measured:", file=sys.stderr)
        print("\n".join(f"  {check.name}: {check.verdict}" for check in missed), file=sys.stderr)
    return 1 if options.check and missed else 0


def keep(about: dict[str, Any], checks: list[checking.Check], table: str, line: str) -> None:
    """In benchmarks/results/ by date, and the short table in the README."""
    date = about["date"][:10]
    (RESULTS / f"{date}.txt").write_text(table + "\n")
    (RESULTS / f"{date}.json").write_text(line + "\n")
    readme.write_table(servers.ROOT / "README.md", readme.short_table(about, checks, f"benchmarks/results/{date}.txt"))
    print(f"\nkept in {RESULTS / date}.txt and .json, and in the table of README.md", file=sys.stderr)


def _stopped(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # ends what was started on the same way out as Ctrl-C


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
