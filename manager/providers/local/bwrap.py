"""What a pod is made of, as arguments of bubblewrap. Pure, but for `read_system`, which looks at this machine once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from manager.providers.local.cgroups import PodCgroup

Tier = Literal["split", "single"]

COMMAND_UID: Final = 1000
RUN_DIR: Final = "/run/sojourn"  # the executor's socket
STATE_DIR: Final = "/var/lib/sojourn"  # its output logs
WORKSPACE: Final = "/workspace"

# Descriptors that the launched bubblewrap gets.
SECCOMP_FD: Final = 3
INFO_FD: Final = 4
STATUS_FD: Final = 5
ARGS_FD: Final = 6

# All that the executor needs to be root of its pod: become the command user, end its processes, reach its files.
KEPT_CAPABILITIES: Final = ("SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER")

_SHM_BYTES: Final = 256 << 20

_USR_MERGED: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Of /etc only what programs need to run, and nothing that is particular to this machine or secret: no shadow, no ssh,
# no keys under ssl/private, no machine-id.
_ETC: Final = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf", "ca-certificates",
    "ca-certificates.conf", "pki/tls/certs", "pki/ca-trust/extracted", "crypto-policies", "localtime", "timezone",
    "nsswitch.conf", "terminfo", "inputrc", "bash.bashrc", "profile", "profile.d", "skel", "shells", "login.defs",
    "mime.types", "magic", "services", "protocols", "rpc", "gai.conf", "host.conf", "debian_version", "os-release",
    "lsb-release", "redhat-release", "alpine-release", "fonts", "java-17-openjdk", "java-21-openjdk", "perl", "vim",
    "python3", "python3.11", "python3.12", "python3.13",
)  # fmt: skip
_MASKED: Final = ("/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/sched_debug")
_UNWRITABLE: Final = ("/proc/sys", "/proc/sysrq-trigger")  # root of a pod is the machine's root to these, even so bare


@dataclass(frozen=True)
class SystemLayout:
    """What of this machine's system pods see, read-only."""

    links: tuple[tuple[str, str], ...]  # (path, target) of /bin and the like where they point into /usr
    binds: tuple[str, ...]
    masked: tuple[str, ...]
    unwritable: tuple[str, ...]


def read_system(root: str = "/") -> SystemLayout:
    links, binds = [], ["/usr"]
    for path in _USR_MERGED:
        here = Path(root, path[1:])
        if here.is_symlink():
            links.append((path, os.readlink(here)))
        elif here.is_dir():
            binds.append(path)
    binds += [f"/etc/{entry}" for entry in _ETC if Path(root, "etc", entry).exists()]
    return SystemLayout(
        tuple(links), tuple(binds),
        masked=tuple(path for path in _MASKED if Path(root, path[1:]).exists()),
        unwritable=tuple(path for path in _UNWRITABLE if Path(root, path[1:]).exists()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PodSpec:
    """One pod's container."""

    name: str
    tier: Tier
    system: SystemLayout
    programs: tuple[str, ...]  # files and directories of the executor and its interpreter, seen at their own paths
    etc_dir: str  # generated files, each seen in /etc under its own name
    run_dir: str
    state_dir: str
    workspace: str
    cgroups: tuple[PodCgroup, ...] = ()
    memory_bytes: int = 2 << 30  # what the pod's tmpfs mounts share, with room left
    command: tuple[str, ...] = ()


def host_name(pod: str) -> str:
    """The start of the pod's name: enough for a prompt, and a valid host name."""
    return pod[:16].rstrip("-.") or "sandbox"


def etc_files(spec_name: str, users: Iterable[str], shell: str = "/bin/sh") -> dict[str, str]:
    """The generated files of /etc. The first of `users` is the command user; the others follow it by number."""
    passwd = ["root:x:0:0:root:/root:/bin/sh"]
    group = ["root:x:0:", "tty:x:5:"]
    for uid, user in enumerate(users, COMMAND_UID):
        passwd.append(f"{user}:x:{uid}:{uid}::{WORKSPACE}:{shell}")
        group.append(f"{user}:x:{uid}:")
    passwd.append("nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
    group.append("nogroup:x:65534:")
    host = host_name(spec_name)
    return {
        "passwd": "\n".join(passwd) + "\n",
        "group": "\n".join(group) + "\n",
        "hostname": host + "\n",
        "hosts": f"127.0.0.1 localhost {host}\n::1 localhost ip6-localhost ip6-loopback\n",
        "resolv.conf": "",
    }


def arguments(spec: PodSpec) -> list[str]:
    """bubblewrap's arguments for the pod, the command included; the order is the order of the mounts."""
    return [*_namespaces(spec), *_system(spec), *_own(spec), "--", *spec.command]


def _namespaces(spec: PodSpec) -> list[str]:
    args = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try"]
    if spec.tier == "single":
        # The only uid that a user namespace made without privileges can map.
        args += ["--unshare-user", "--uid", str(COMMAND_UID), "--gid", str(COMMAND_UID)]
    args += ["--cap-drop", "ALL"]
    if spec.tier == "split":
        for capability in KEPT_CAPABILITIES:
            args += ["--cap-add", f"CAP_{capability}"]
    # No --die-with-parent: pods live on when their manager does not.
    args += ["--as-pid-1", "--new-session", "--hostname", host_name(spec.name)]
    return [*args, "--seccomp", str(SECCOMP_FD), "--info-fd", str(INFO_FD), "--json-status-fd", str(STATUS_FD)]


def _system(spec: PodSpec) -> list[str]:
    args: list[str] = [*_directory("/etc"), *_directory("/etc/ssl"), *_directory("/var")]
    for path in spec.system.binds:
        args += ["--ro-bind-try", path, path]
    for path, target in spec.system.links:
        args += ["--symlink", target, path]
    args += ["--symlink", "../proc/self/mounts", "/etc/mtab", "--symlink", "../run", "/var/run"]
    for name in etc_files(spec.name, ()):
        args += ["--ro-bind", f"{spec.etc_dir}/{name}", f"/etc/{name}"]
    args += ["--proc", "/proc"]
    for path in spec.system.masked:
        args += ["--ro-bind", "/dev/null", path]
    if spec.tier == "split":
        for path in spec.system.unwritable:
            args += ["--ro-bind", path, path]
    args += ["--dev", "/dev", *_tmpfs("/dev/shm", min(spec.memory_bytes // 8, _SHM_BYTES)), "--remount-ro", "/dev"]
    # Together with /dev/shm three quarters of the memory at most: what lies in them counts against the pod's limit and
    # cannot be reclaimed, so a full one would leave the kernel only the executor to kill.
    for path, part in (("/tmp", 2), ("/var/tmp", 16), ("/run", 16)):
        args += _tmpfs(path, spec.memory_bytes // part)
    # Seen and empty: the machine's own are hidden.
    for path in ("/root", "/home", "/mnt", "/opt", "/srv", "/sys"):
        args += _directory(path)
    return args


def _own(spec: PodSpec) -> list[str]:
    args: list[str] = []
    made = {"/"}
    for path in spec.programs:
        args += _parents(path, made)
        args += ["--ro-bind", path, path]
    for source, path in ((spec.run_dir, RUN_DIR), (spec.state_dir, STATE_DIR), (spec.workspace, WORKSPACE)):
        args += _parents(path, made)
        args += ["--bind", source, path]
    for source, path in _cgroup_binds(spec.cgroups):
        args += _parents(path, made)
        args += ["--ro-bind", source, path]
    return [*args, "--remount-ro", "/", "--chdir", "/"]


def _cgroup_binds(groups: Iterable[PodCgroup]) -> list[tuple[str, str]]:
    """The pod's own cgroups where programs look for them: /sys/fs/cgroup on v2, one directory a controller on v1."""
    groups = list(groups)
    if all(group.version == 2 for group in groups):
        return [(group.path, "/sys/fs/cgroup") for group in groups]
    binds = []
    for group in groups:
        names = group.controllers if group.version == 1 else ("unified",)
        binds += [(group.path, f"/sys/fs/cgroup/{name}") for name in names]
    return binds


def _directory(path: str) -> list[str]:
    return ["--perms", "0755", "--dir", path]


def _tmpfs(path: str, size: int) -> list[str]:
    return ["--size", str(size), "--perms", "1777", "--tmpfs", path]


def _parents(path: str, made: set[str]) -> list[str]:
    """The directories above `path`, for everybody to pass: bubblewrap's own would be closed to the command user."""
    args: list[str] = []
    for parent in reversed(Path(path).parents):
        if str(parent) not in made:
            made.add(str(parent))
            args += _directory(str(parent))
    return args
