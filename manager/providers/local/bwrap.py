"""What a pod is made of, as arguments of bubblewrap. Pure, but for `read_system`, which looks at this machine once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from manager.providers.local.cgroups import INNER, PodCgroup
from manager.providers.local.network import PROXY_DIR

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
MASKED: Final = ("/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/sched_debug")
OWN_LINKS: Final = (("/etc/mtab", "../proc/self/mounts"), ("/var/run", "../run"))
# Seen and empty: the machine's own are hidden.
EMPTY_DIRECTORIES: Final = ("/root", "/home", "/mnt", "/opt", "/srv", "/sys")
UNWRITABLE: Final = ("/proc/sys", "/proc/sysrq-trigger")  # root of a pod is the machine's root to these, even so bare


@dataclass(frozen=True)
class SystemLayout:
    """What of a system pods see, read-only: this machine's own, or an image's at `root`."""

    links: tuple[tuple[str, str], ...]  # (path, target) of /bin and the like where they point into /usr
    binds: tuple[str, ...]
    masked: tuple[str, ...]
    unwritable: tuple[str, ...]
    root: str = ""  # stands before the paths of `binds`, as they are here
    directories: tuple[str, ...] = ("/etc", "/etc/ssl", "/var")  # made, for what is put into them
    empty: tuple[str, ...] = EMPTY_DIRECTORIES


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
        (*links, *OWN_LINKS), tuple(binds),
        masked=tuple(path for path in MASKED if Path(root, path[1:]).exists()),
        unwritable=tuple(path for path in UNWRITABLE if Path(root, path[1:]).exists()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PodSpec:
    """One pod's container."""

    name: str
    tier: Tier
    system: SystemLayout
    programs: tuple[str, ...]  # files and directories of the executor and its interpreter, seen at their own paths
    bundle: tuple[str, str] | None = None  # the executor as a bundle instead: here, and in the pod
    etc_dir: str  # generated files, each seen in /etc under its own name
    run_dir: str
    state_dir: str
    workspace: str
    cgroups: tuple[PodCgroup, ...] = ()
    disk: str = ""  # holds `tmp` and `var-tmp` where the pod's disk is bounded; "": they are tmpfs
    netns: str = ""  # path of the pod's network namespace, in which it is started; "": it gets an empty one
    outbound_dir: str = ""  # of the proxy's socket; "": there is none
    memory_bytes: int = 2 << 30  # what the pod's tmpfs mounts share, with room left
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # an image has a say in it: nothing outside of the pod gets it


def host_name(pod: str) -> str:
    """The start of the pod's name: enough for a prompt, and a valid host name."""
    return pod[:16].rstrip("-.") or "sandbox"


def etc_files(
    spec_name: str, users: Iterable[str], shell: str = "/bin/sh", resolvers: Iterable[str] = (),
    image: tuple[str, str] = ("", ""),
) -> dict[str, str]:  # fmt: skip
    """The generated files of /etc. The first of `users` is the command user; the others follow it by number. `image`:
    an image's own passwd and group, of which what has one of our names or numbers goes."""
    passwd = ["root:x:0:0:root:/root:/bin/sh"]
    group = ["root:x:0:", "tty:x:5:"]
    for uid, user in enumerate(users, COMMAND_UID):
        passwd.append(f"{user}:x:{uid}:{uid}::{WORKSPACE}:{shell}")
        group.append(f"{user}:x:{uid}:")
    passwd.append("nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
    group.append("nogroup:x:65534:")
    passwd += _others(image[0], passwd, fields=7)
    group += _others(image[1], group, fields=4)
    host = host_name(spec_name)
    return {
        "passwd": "\n".join(passwd) + "\n",
        "group": "\n".join(group) + "\n",
        "hostname": host + "\n",
        "hosts": f"127.0.0.1 localhost {host}\n::1 localhost ip6-localhost ip6-loopback\n",
        "resolv.conf": "".join(f"nameserver {resolver}\n" for resolver in resolvers),
    }


def _others(text: str, ours: list[str], fields: int) -> list[str]:
    taken = {entry.split(":")[at] for entry in ours for at in (0, 2)}
    lines = (line.split(":") for line in text.splitlines())
    return [":".join(line) for line in lines if len(line) == fields and not {line[0], line[2]} & taken]


def arguments(spec: PodSpec) -> list[str]:
    """bubblewrap's arguments for the pod, the command included; the order is the order of the mounts."""
    env = [word for name, value in spec.env.items() for word in ("--setenv", name, value)]
    return [*_namespaces(spec), *_system(spec), *_own(spec), *env, "--", *spec.command]


def _namespaces(spec: PodSpec) -> list[str]:
    args = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not spec.netns:
        args.append("--unshare-net")
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
    args: list[str] = []
    for path in spec.system.directories:
        args += _directory(path)
    for path in spec.system.binds:
        args += ["--ro-bind-try", spec.system.root + path, path]
    for path, target in spec.system.links:
        args += ["--symlink", target, path]
    for name in etc_files(spec.name, ()):
        args += ["--ro-bind", f"{spec.etc_dir}/{name}", f"/etc/{name}"]
    args += ["--proc", "/proc"]
    for path in spec.system.masked:
        args += ["--ro-bind", "/dev/null", path]
    if spec.tier == "split":
        for path in spec.system.unwritable:
            args += ["--ro-bind", path, path]
    args += ["--dev", "/dev"]
    for path, source, size in scratch(spec):
        args += ["--bind", source, path] if source is not None else _tmpfs(path, size)
        if path == "/dev/shm":
            args += ["--remount-ro", "/dev"]
    for path in spec.system.empty:
        args += _directory(path)
    return args


def scratch(spec: PodSpec) -> list[tuple[str, str | None, int]]:
    """Where anybody may write: (path, directory of this machine, or None for a tmpfs of so many bytes).

    The tmpfs together are three quarters of the memory at most: what lies in them counts against the pod's limit and
    cannot be reclaimed, so a full one would leave the kernel only the executor to kill."""
    disk, memory = spec.disk, spec.memory_bytes
    return [
        ("/dev/shm", None, min(memory // 8, _SHM_BYTES)),
        ("/tmp", f"{disk}/tmp" if disk else None, memory // 2),
        ("/var/tmp", f"{disk}/var-tmp" if disk else None, memory // 16),
        ("/run", None, memory // 16),
    ]


def _own(spec: PodSpec) -> list[str]:
    args: list[str] = []
    made = {"/"}
    for source, path, writable in own_binds(spec):
        args += _parents(path, made)
        args += ["--bind" if writable else "--ro-bind", source, path]
    if spec.tier == "split":  # what the executor may divide up: below the limits, which stay out of its reach
        divided = {group.path for group in spec.cgroups if _is_divided(group)}
        for source, path in _cgroup_binds(spec.cgroups):
            if source in divided:
                args += ["--bind", f"{source}/{INNER}", f"{path}/{INNER}"]
    return [*args, "--remount-ro", "/", "--chdir", "/"]


def own_binds(spec: PodSpec) -> list[tuple[str, str, bool]]:
    """The executor, the pod's own directories and its cgroups: (directory of this machine, path, writable)."""
    found = [(path, path, False) for path in spec.programs]
    if spec.bundle is not None:
        found.append((*spec.bundle, False))
    found += [(spec.run_dir, RUN_DIR, True), (spec.state_dir, STATE_DIR, True), (spec.workspace, WORKSPACE, True)]
    if spec.outbound_dir:
        found.append((spec.outbound_dir, PROXY_DIR, False))
    return found + [(source, path, False) for source, path in _cgroup_binds(spec.cgroups)]


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


def _is_divided(group: PodCgroup) -> bool:
    return group.version == 2 or not {"memory", "pids"}.isdisjoint(group.controllers)


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
