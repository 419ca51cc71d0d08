"""The system call filter of commands, as the classic BPF program that seccomp(2) and `bwrap --seccomp` load.

What is refused is what no command needs and what the kernel's holes are mostly found in: new namespaces and mounts,
kernel modules, io_uring, BPF, kernel keyrings. Refusals are errors (EPERM), so that programs fall back; only a foreign
instruction set, whose call numbers the filter does not know, kills. Tracing one's own processes stays allowed.

The executor's spawn helpers set it for every command, in any image; the manager has bubblewrap set it for a local pod
as a whole, executor included. Two filters of one kind cost what one does: the kernel keeps one list of calls that all
filters always allow, and runs none for those (Linux 5.11 and later). A call that is looked up passes some seven steps.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from typing import Final

# linux/bpf_common.h, linux/seccomp.h
_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_ANY_OF: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_KILL_PROCESS: Final = 0x80000000
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data; the low halves of the arguments
_X32_BIT: Final = 0x40000000

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; NEWTIME, which clone has no bit for.
_CLONE_NEW: Final = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_UNSHARE_NEW: Final = _CLONE_NEW | 0x00000080
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. Refused among others: AF_ALG (kernel crypto), AF_VSOCK (reaches a VM's host).
_FAMILIES: Final = (1, 2, 10, 16)
# TIOCSTI types into the terminal of whoever started us, TIOCLINUX pastes there.
_TERMINAL_REQUESTS: Final = (0x5412, 0x541C)
# PER_LINUX, UNAME26, PER_LINUX32, both, without address randomisation (debuggers), and the question.
_PERSONALITIES: Final = (0x0, 0x0020000, 0x8, 0x0020008, 0x0040000, 0xFFFFFFFF)

# (name, x86_64, aarch64); None: this architecture has no such call.
_REFUSED: Final[tuple[tuple[str, int | None, int | None], ...]] = (
    ("setns", 308, 268),
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


class _Machine:
    """Plain, as a dataclass would take longer to make than all the rest here."""

    clone3: Final = 435

    def __init__(
        self, audit_arch: int, column: int, *, socket: int, clone: int, unshare: int, ioctl: int, personality: int
    ) -> None:
        self.audit_arch = audit_arch
        self.column = column  # in _REFUSED, after the name
        self.socket = socket
        self.clone = clone
        self.unshare = unshare
        self.ioctl = ioctl
        self.personality = personality


_MACHINES: Final = {
    "x86_64": _Machine(0xC000003E, 0, socket=41, clone=56, unshare=272, ioctl=16, personality=135),
    "aarch64": _Machine(0xC00000B7, 1, socket=198, clone=220, unshare=97, ioctl=29, personality=92),
}


def supported(machine: str | None = None) -> bool:
    return (machine or os.uname().machine) in _MACHINES and struct.calcsize("P") == 8


def refused_calls(machine: str) -> dict[str, int]:
    """The calls that always fail with EPERM, by name."""
    column = 1 + _MACHINES[machine].column
    return {str(row[0]): number for row in _REFUSED if isinstance(number := row[column], int)}


def program(machine: str | None = None) -> bytes:
    """The filter for `machine` (None: this one): 8-byte instructions, little-endian as both architectures are.

    Raises KeyError for an architecture whose call numbers are not in the table."""
    name = machine or os.uname().machine
    known = _MACHINES[name]
    code = _Code()
    kill = code.put(_RETURN, _KILL_PROCESS)
    refuse = code.put(_RETURN, _ERRNO | errno.EPERM)
    no_family = code.put(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
    missing = code.put(_RETURN, _ERRNO | errno.ENOSYS)
    allow = code.put(_RETURN, _ALLOW)
    answers = dict.fromkeys(refused_calls(name).values(), refuse)
    # Its flags are behind a pointer, which a filter cannot follow; C libraries fall back to clone.
    answers[known.clone3] = missing
    answers[known.clone] = code.flagged(_ARG0, _CLONE_NEW, refuse, allow)
    answers[known.unshare] = code.flagged(_ARG0, _UNSHARE_NEW, refuse, allow)
    answers[known.socket] = code.chosen(_ARG0, _FAMILIES, allow, no_family)
    answers[known.ioctl] = code.chosen(_ARG1, _TERMINAL_REQUESTS, refuse, allow)
    answers[known.personality] = code.chosen(_ARG0, _PERSONALITIES, allow, refuse)
    ranges = [(0, allow)]
    for number, answer in sorted(answers.items()):
        if ranges[-1][0] == number:
            ranges.pop()
        ranges += [(number, answer), (number + 1, allow)]
    if name == "x86_64":  # x32 calls come under the same architecture, with numbers of their own
        ranges.append((_X32_BIT, kill))
    code.search([one for at, one in enumerate(ranges) if not at or one[1] != ranges[at - 1][1]])
    number_is_read = code.put(_LOAD, _NUMBER)
    code.put(_EQUAL, known.audit_arch, number_is_read, kill)
    code.put(_LOAD, _ARCH)
    return code.bytes()


class _Code:
    """Instructions, put from the last one to the first: jumps only lead on, so where they lead to is there already."""

    def __init__(self) -> None:
        self._backwards: list[bytes] = []

    def put(self, code: int, value: int, yes: int | None = None, no: int | None = None) -> int:
        """One struct sock_filter; `yes` and `no` are what earlier calls returned, None the instruction put before."""
        here = len(self._backwards)
        skips = [0 if target is None else here - 1 - target for target in (yes, no)]
        self._backwards.append(struct.pack("<HBBI", code, *skips, value))
        return here

    def chosen(self, argument: int, values: Sequence[int], yes: int, no: int) -> int:
        """Goes to `yes` where the argument is one of the values, else to `no`."""
        self.put(_EQUAL, values[-1], yes, no)
        for value in values[-2::-1]:
            self.put(_EQUAL, value, yes)
        return self.put(_LOAD, argument)

    def flagged(self, argument: int, bits: int, yes: int, no: int) -> int:
        """Goes to `yes` where the argument has any of the bits, else to `no`."""
        self.put(_ANY_OF, bits, yes, no)
        return self.put(_LOAD, argument)

    def search(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Goes where the range leads that the loaded number is in: (its first number, target), ascending."""
        if len(ranges) == 1:
            return ranges[0][1]
        middle = len(ranges) // 2
        above = self.search(ranges[middle:])
        below = self.search(ranges[:middle])
        return self.put(_AT_LEAST, ranges[middle][0], above, below)

    def bytes(self) -> bytes:
        return b"".join(reversed(self._backwards))
