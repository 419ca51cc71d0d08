"""Pods under gVisor: an OCI bundle of the same view of the system that bubblewrap gives, run by `runsc` as root.

The executor's socket is a file of this machine's that gVisor makes for it, so a pod is reached with no network at all.
A routed pod's network is gVisor's own stack over the pod's link; this machine's kernel judges what comes out of it.
All calls but `config` block.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from manager.providers.local import bwrap, launch
from manager.providers.local.bwrap import PodSpec
from manager.providers.local.entry import Entry
from manager.providers.local.processes import identify, wait_ended

PROBE_SEC: Final = 20.0
PLATFORMS: Final = ("systrap", "ptrace")  # never kvm: on some virtual machines it hangs for good
# gVisor's own threads count as the pod's: up to some 330 with the executor's, of which three a mounted path.
LEAST_PIDS: Final = 512
GET_RUNSC: Final = (
    "as root, install `runsc`: from gvisor.dev/docs/user_guide/install (the newest is faster and knows more system "
    "calls), or Debian's package `runsc`"
)
_PROBED: Final = "sojourn-probe-ok"
_FAILS_STATX: Final = "sojourn-probe-statx"
_ROOTFS: Final = "rootfs"  # in the bundle: directories to mount on, links
_OPEN_FILES: Final = 65_536

# Writes down how it ended, as bubblewrap does.
_SCRIPT: Final = 'status=$1; shift; "$@"; printf \'{"exit-code": %s}\\n\' "$?" >> "$status"'

# It refuses links of the machine's own network, and takes every one for that where these files are: newer kernels have
# them in all networks.
_HIDE_SETTINGS: Final = "mount -t tmpfs -o size=4k,mode=0555 none /proc/sys/net || exit 125\n"


class GvisorWay(msgspec.Struct, frozen=True, kw_only=True):
    """What gVisor comes to on this machine."""

    platform: str | None  # one of PLATFORMS; None: it is not to be had
    why_not: str = ""
    path: str = ""
    version: str = ""
    too_old: str = ""  # what does not work in it that programs of this system use


def probe(data_dir: Path, entry: Entry, *, root: bool) -> GvisorWay:
    """Runs a throwaway pod on each platform until one comes up."""
    program = shutil.which("runsc", path=f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/local/sbin:/usr/sbin")
    if program is None:
        return GvisorWay(platform=None, why_not="runsc is not installed")
    if not root:
        return GvisorWay(platform=None, why_not="it needs root here", path=program)
    failures: list[str] = []
    version = _version(program)
    for platform in PLATFORMS:
        said = _try(program, platform, data_dir, entry)
        if said.endswith(_PROBED):
            old = "coreutils 9 fails in it (ls, stat): statx refuses AT_NO_AUTOMOUNT" if _FAILS_STATX in said else ""
            return GvisorWay(platform=platform, path=program, version=version, too_old=old)
        failures.append(f"{platform}: {said or 'it ended without a word'}")
    return GvisorWay(platform=None, why_not="; ".join(failures), path=program, version=version)


def config(spec: PodSpec) -> dict[str, Any]:
    """The bundle's config.json. Where things are in the pod is as under bubblewrap."""
    # It takes over the links there, with their addresses and routes.
    network = {"type": "network", "path": spec.netns} if spec.netns else {"type": "network"}
    capabilities = [f"CAP_{name}" for name in bwrap.KEPT_CAPABILITIES]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(spec.command),
            "env": [f"{name}={value}" for name, value in spec.env.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted", "inheritable"), capabilities),
            "noNewPrivileges": True,
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": _OPEN_FILES, "soft": _OPEN_FILES}],
        },
        "root": {"path": _ROOTFS, "readonly": True},
        "hostname": bwrap.host_name(spec.name),
        "mounts": _mounts(spec),
        "linux": {"namespaces": [*({"type": kind} for kind in ("pid", "ipc", "uts", "mount")), network]},
    }


def write_bundle(home: Path, spec: PodSpec) -> None:
    """config.json and the root directory with what is not mounted into it. Raises OSError."""
    (home / "config.json").write_bytes(msgspec.json.encode(config(spec)))
    root = home / _ROOTFS
    root.mkdir(mode=0o755)
    for path in (*spec.system.directories, *spec.system.empty):
        (root / path[1:]).mkdir(mode=0o755, parents=True, exist_ok=True)
    for path, target in spec.system.links:
        link = root / path[1:]
        link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        link.symlink_to(target)
    root.chmod(0o755)


def container_id(home: Path) -> str:
    """Of the pod whose bundle that is: by it gVisor names a socket that all of this machine share."""
    return f"sojourn-{hashlib.sha256(os.fsencode(home)).hexdigest()[:24]}"


def argv(way: GvisorWay, home: Path, spec: PodSpec) -> tuple[str, ...]:
    """What runs the bundle in `home`, which was made from `spec`, to its end, and then writes its exit code down there.

    Of this machine's Unix sockets a pod connects to none, but where its way out is one."""
    assert way.platform is not None
    runsc = (
        way.path, "--root", str(home / "runsc"), "--platform", way.platform,
        "--network", "sandbox" if spec.netns else "none", f"--host-uds={'all' if spec.outbound_dir else 'create'}",
        "--ignore-cgroups", "--overlay2=none", "run", "--bundle", str(home), "--pid-file", str(home / "pid"),
        container_id(home),
    )  # fmt: skip
    # In a mount namespace of its own: newer ones mount something below --root, which then goes with the pod.
    private = ("unshare", "--mount", "--propagation", "private")
    script = _HIDE_SETTINGS + _SCRIPT if spec.netns else _SCRIPT
    return (*private, "sh", "-c", script, "sojourn-gvisor", str(home / "status"), *runsc)


def read_pid(home: Path, outer: int, timeout_sec: float) -> int | None:
    """The process that is the pod, once runsc has told it; None where runsc ended or stayed silent."""
    process = identify(outer)
    deadline = time.monotonic() + timeout_sec
    while time.monotonic() < deadline:
        try:
            text = (home / "pid").read_text(encoding="ascii")
        except FileNotFoundError:
            text = ""
        if text.isdigit():
            return int(text)
        if process is None or not process.alive():
            return None
        time.sleep(0.005)
    return None


def _mounts(spec: PodSpec) -> list[dict[str, Any]]:
    found = [_mount("/proc", "proc", "proc", ())]
    found += [_bind(spec.system.root + path, path, writable=False) for path in spec.system.binds]
    own_etc = bwrap.etc_files(spec.name, ())
    found += [_bind(f"{spec.etc_dir}/{name}", f"/etc/{name}", writable=False) for name in own_etc]
    for path, source, size in bwrap.scratch(spec):
        if source is not None:
            found.append(_bind(source, path, writable=True))
        else:
            found.append(_mount(path, "tmpfs", "tmpfs", ("nosuid", "nodev", "mode=1777", f"size={size}")))
    for source, path, writable in bwrap.own_binds(spec):
        found.append(_bind(source, path, writable=writable))
    return found


def _bind(source: str, path: str, *, writable: bool) -> dict[str, Any]:
    return _mount(path, "bind", source, ("rbind", "rw" if writable else "ro", "nosuid", "nodev"))


def _mount(path: str, kind: str, source: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": path, "type": kind, "source": source, "options": list(options)}


def _version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=PROBE_SEC, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.decode(errors="replace").split("\n")[0].removeprefix("runsc version").strip() or "unknown"


def _try(program: str, platform: str, data_dir: Path, entry: Entry) -> str:
    """What a throwaway pod said, or what went wrong."""
    uid = bwrap.COMMAND_UID
    script = (
        f"import ctypes, os\nos.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})\n"
        "if ctypes.CDLL(None).statx(-100, b'/', 0x800, 0x7ff, ctypes.create_string_buffer(512)):\n"
        f"    os.write(1, {_FAILS_STATX.encode()!r})\n"
        f"os.write(1, {_PROBED.encode()!r})"
    )
    where = next(path for path in (data_dir, *data_dir.parents) if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".probe-gvisor-", dir=where) as name:
        home = Path(name)
        for directory in ("etc", "run", "state", "workspace"):
            (home / directory).mkdir()
        for file, text in bwrap.etc_files("probe", ["sandbox"]).items():
            (home / "etc" / file).write_text(text, encoding="utf-8")
        spec = PodSpec(
            name="probe", tier="split", system=bwrap.read_system(), programs=entry.programs, etc_dir=f"{home}/etc",
            run_dir=f"{home}/run", state_dir=f"{home}/state", workspace=f"{home}/workspace",
            command=(entry.python, "-I", "-S", "-c", script), env={"PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        way = GvisorWay(platform=platform, path=program)
        write_bundle(home, spec)
        pid = launch.launch(argv(way, home, spec), dict(os.environ), log=home / "log", launcher=home / "launcher")
        process = identify(pid)
        if process is None or wait_ended(process, PROBE_SEC):
            return (home / "log").read_text(encoding="utf-8", errors="replace").strip()[-400:]
        # What hangs is left to nobody: its whole session goes.
        os.killpg(pid, signal.SIGKILL)
        inner = read_pid(home, pid, 0.01)
        if inner is not None:
            os.kill(inner, signal.SIGKILL)
        return f"no end within {PROBE_SEC:.0f} s"
