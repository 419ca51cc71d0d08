"""A pod's system call filter, as the classic BPF program that `bwrap --seccomp` loads.

What is refused is what no command needs and what the kernel's holes are mostly found in: new namespaces and mounts,
kernel modules, io_uring, BPF, kernel keyrings. Refusals are errors (EPERM), so that programs fall back; only a foreign
instruction set, whose call numbers the filter does not know, kills. Tracing one's own processes stays allowed.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# linux/bpf_common.h, linux/seccomp.h
_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_KILL_PROCESS: Final = 0x80000000
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data; the low halves of the arguments
_X32_BIT: Final = 0x40000000

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. (CLONE_NEWTIME is only for unshare and clone3.)
_CLONE_NEW: Final = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. Refused among others: AF_ALG (kernel crypto), AF_VSOCK (reaches a VM's host).
_FAMILIES: Final = (1, 2, 10, 16)
# TIOCSTI types into the terminal of whoever started us, TIOCLINUX pastes there.
_TERMINAL_REQUESTS: Final = (0x5412, 0x541C)
# PER_LINUX, UNAME26, PER_LINUX32, both, without address randomisation (debuggers), and the question.
_PERSONALITIES: Final = (0x0, 0x0020000, 0x8, 0x0020008, 0x0040000, 0xFFFFFFFF)

# (name, x86_64, aarch64); None: this architecture has no such call.
_REFUSED: Final[tuple[tuple[str, int | None, int | None], ...]] = (
    ("unshare", 272, 97), ("setns", 308, 268),
    ("mount", 165, 40), ("umount2", 166, 39), ("pivot_root", 155, 41), ("chroot", 161, 51),
    ("open_tree", 428, 428), ("move_mount", 429, 429), ("fsopen", 430, 430), ("fsconfig", 431, 431),
    ("fsmount", 432, 432), ("fspick", 433, 433), ("mount_setattr", 442, 442), ("open_tree_attr", 467, 467),
    ("io_uring_setup", 425, 425), ("io_uring_enter", 426, 426), ("io_uring_register", 427, 427),
    ("bpf", 321, 280), ("userfaultfd", 323, 282), ("perf_event_open", 298, 241),
    ("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219),
    ("open_by_handle_at", 304, 265), ("fanotify_init", 300, 262), ("lookup_dcookie", 212, 18),
    ("init_module", 175, 105), ("finit_module", 313, 273), ("delete_module", 176, 106), ("create_module", 174, None),
    ("get_kernel_syms", 177, None), ("query_module", 178, None),
    ("kexec_load", 246, 104), ("kexec_file_load", 320, 294), ("reboot", 169, 142),
    ("swapon", 167, 224), ("swapoff", 168, 225), ("quotactl", 179, 60), ("quotactl_fd", 443, 443), ("acct", 163, 89),
    ("settimeofday", 164, 170), ("clock_settime", 227, 112), ("clock_adjtime", 305, 266),
    ("sethostname", 170, 161), ("setdomainname", 171, 162), ("syslog", 103, 116), ("vhangup", 153, 58),
    ("iopl", 172, None), ("ioperm", 173, None), ("uselib", 134, None), ("sysfs", 139, None), ("_sysctl", 156, None),
    ("nfsservctl", 180, 42),
)  # fmt: skip


@dataclass(frozen=True)
class _Machine:
    audit_arch: int
    column: int  # in _REFUSED, after the name
    socket: int
    clone: int
    ioctl: int
    personality: int
    clone3: int = 435


_MACHINES: Final = {
    "x86_64": _Machine(0xC000003E, 0, socket=41, clone=56, ioctl=16, personality=135),
    "aarch64": _Machine(0xC00000B7, 1, socket=198, clone=220, ioctl=29, personality=92),
}


def supported(machine: str | None = None) -> bool:
    return (machine or platform.machine()) in _MACHINES


def refused_calls(machine: str) -> dict[str, int]:
    """The calls that always fail with EPERM, by name."""
    column = 1 + _MACHINES[machine].column
    return {str(row[0]): number for row in _REFUSED if isinstance(number := row[column], int)}


def program(machine: str | None = None) -> bytes:
    """The filter for `machine` (None: this one): 8-byte instructions, little-endian as both architectures are.

    Raises KeyError for an architecture whose call numbers are not in the table."""
    name = machine or platform.machine()
    known = _MACHINES[name]
    steps = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, known.audit_arch, yes=1),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
    ]
    if name == "x86_64":  # x32 calls come under the same architecture, with numbers of their own
        steps += [_step(_AT_LEAST, _X32_BIT, no=1), _step(_RETURN, _KILL_PROCESS)]
    steps += _only(known.socket, _ARG0, _FAMILIES, errno.EAFNOSUPPORT)
    steps += _none_of(known.ioctl, _ARG1, _TERMINAL_REQUESTS)
    steps += _only(known.personality, _ARG0, _PERSONALITIES, errno.EPERM)
    steps += [
        _step(_EQUAL, known.clone, no=5),
        _step(_LOAD, _ARG0),
        _step(_AND, _CLONE_NEW),
        _step(_EQUAL, 0, no=1),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ERRNO | errno.EPERM),
        # Its flags are behind a pointer, which a filter cannot follow; C libraries fall back to clone.
        _step(_EQUAL, known.clone3, no=1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in refused_calls(name).values():
        steps += [_step(_EQUAL, number, no=1), _step(_RETURN, _ERRNO | errno.EPERM)]
    steps.append(_step(_RETURN, _ALLOW))
    return b"".join(steps)


def _only(call: int, argument: int, values: Sequence[int], error: int) -> list[bytes]:
    """Allows `call` with these values of one argument, fails it with any other."""
    body = [_step(_LOAD, argument)]
    body += [_step(_EQUAL, value, yes=len(values) - index) for index, value in enumerate(values)]
    body += [_step(_RETURN, _ERRNO | error), _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, call, no=len(body)), *body]


def _none_of(call: int, argument: int, values: Sequence[int]) -> list[bytes]:
    """Fails `call` with these values of one argument, allows it with any other."""
    body = [_step(_LOAD, argument)]
    body += [_step(_EQUAL, value, yes=len(values) - index) for index, value in enumerate(values)]
    body += [_step(_RETURN, _ALLOW), _step(_RETURN, _ERRNO | errno.EPERM)]
    return [_step(_EQUAL, call, no=len(body)), *body]


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """struct sock_filter; `yes` and `no` are the instructions that a jump skips."""
    return struct.pack("<HBBI", code, yes, no, value)
