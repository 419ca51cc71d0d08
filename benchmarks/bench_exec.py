"""How fast is a command? Executor and manager against the least that a C server can do, in one interleaved run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

if __name__ == "__main__":  # started as a file, the tree's root is not where imports are looked for
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import machine, report, servers
from benchmarks.harness.measures import FULL, PARTS, QUICK, Bench

EPILOG = """\
what is compared
  floor      a C server that vforks, its helper under the command user: the least that this machine can do
  floor-x2   the same with two helpers, as many as the executor has
  executor   `python -I -m executor`, called directly
  manager    `python -m manager up`, called as a task session with an API key; its pod is a real local one

how to read it
  Ratios compare what ran in the same round, so they hold on a busy machine; absolute figures do not.
  The executor's ratio is to the floor, the manager's is to the executor. As root, commands run as another user
  (split tier), which is how the limits under "must" are meant.

parts (--only)
{parts}

examples
  python benchmarks/bench_exec.py --quick                     everything, in under a minute
  python benchmarks/bench_exec.py --quick --only exec,noop    two parts of it
  python benchmarks/bench_exec.py --check --json out.json     all of it; exit 1 where a must does not hold
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parts = "\n".join(f"  {name:<10} {what}" for name, (_measure, what) in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="bench_exec.py", description=__doc__, epilog=EPILOG.format(parts=parts),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="short rounds: under a minute instead of about ten")
    parser.add_argument("--only", metavar="PART,...", type=_parts, default=list(PARTS), help="these parts alone")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds instead of the usual 9 (quick: 3)")
    parser.add_argument("--transport", choices=("tcp", "unix"), default="tcp", help="to floor and executor [tcp]")
    parser.add_argument("--no-manager", action="store_true", help="leave the manager out")
    parser.add_argument("--no-executor", action="store_true", help="leave the executor out: floors (and manager) alone")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the one line of JSON there too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a must does not hold or is unknown")
    options = parser.parse_args(argv)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"there is no part {name!r}; the parts are {', '.join(PARTS)}")
    if not names:
        raise argparse.ArgumentTypeError(f"name at least one of {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def say(what: str) -> None:
    """Progress: one line that is written over on a terminal, lines elsewhere."""
    end, start = ("", "\r\033[K") if sys.stderr.isatty() else ("\n", "")
    print(f"{start}{what}", end=end, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The machine, the results by part, and what was left out and why. Raises CannotMeasure."""
    effort = QUICK if options.quick else FULL
    if options.rounds is not None:
        effort = dataclasses.replace(effort, rounds=options.rounds)
    about = machine.describe()
    results: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        shop = stack.enter_context(servers.workshop(options.transport))
        about |= {"tier": shop.tier, "transport": options.transport}
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
        for name in options.only:
            if bench.executor is None and name in ("memory", "start"):
                continue
            try:
                results |= msgspec.to_builtins(PARTS[name][0](bench))
            except servers.CannotMeasure as why:
                skipped[name] = str(why)
                say(f"{name} could not be measured: {why}")
    say("")
    return {"machine": about, "effort": dataclasses.asdict(effort), "skipped": skipped, "results": results}


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, _stopped)
    try:
        measured = measure(options)
    except servers.CannotMeasure as why:
        print(f"\nbench_exec.py: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbench_exec.py: stopped; what it had started is gone", file=sys.stderr)
        return 130
    checks = report.checks_of(measured["results"])
    print(report.table_of(measured["machine"], measured["results"], checks))
    for name, reason in measured["skipped"].items():
        print(f"\nnot measured: {name}: {reason}")
    line = json.dumps(measured | {"checks": msgspec.to_builtins(checks)}, separators=(",", ":"))
    print("\n" + line)
    if options.json is not None:
        options.json.write_text(line + "\n")
    left_out = [name for name in ("executor", "manager") if getattr(options, f"no_{name}")]
    return 1 if options.check and report.failed(checks, options.only, left_out) else 0


def _stopped(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # ends what was started on the same way out as Ctrl-C


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
