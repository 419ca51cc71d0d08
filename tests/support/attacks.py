"""What code in a pod does to other processes: the script of a command that tries to trace, read, write, signal them."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Final

REFUSALS: Final = {"Operation not permitted", "Permission denied", "Bad file descriptor"}
ALL_SIGNALS: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGQUIT)

_ATTACK: Final = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def got(call, *args):
    ctypes.set_errno(0)
    return "done" if getattr(libc, call)(*args) != -1 else os.strerror(ctypes.get_errno())
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
here = Piece(ctypes.addressof(buffer), 8)
there = Piece(ADDRESS, 8)
found = {}
for name, pid in PIDS.items():
    tried = {
        "attach": got("ptrace", 16, pid, None, None), "seize": got("ptrace", 0x4206, pid, None, None),
        "read": got("process_vm_readv", pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
        "write": got("process_vm_writev", pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
        "descriptor": got("syscall", 438, libc.syscall(434, pid, 0), 0, 0),
    }
    for file, flags in (("mem", os.O_RDWR), ("environ", os.O_RDONLY), ("fd/0", os.O_RDONLY), ("cwd", os.O_RDONLY)):
        try:
            os.close(os.open(f"/proc/{pid}/{file}", flags))
            tried[file] = "done"
        except OSError as why:
            tried[file] = why.strerror
    if name in SIGNALLED:
        for number in map(signal.Signals, SIGNALS):
            try:
                os.kill(pid, number); tried[number.name] = "done"
            except OSError as why:
                tried[number.name] = why.strerror
        try:
            os.setpriority(os.PRIO_PROCESS, pid, 19); tried["nice"] = "done"
        except OSError as why:
            tried["nice"] = why.strerror
        try:
            os.sched_setaffinity(pid, {0}); tried["affinity"] = "done"
        except OSError as why:
            tried["affinity"] = why.strerror
    found[name] = tried
print(repr(found))
"""


def attack_script(
    pids: Mapping[str, int], *, signalled: Sequence[str] = (), signals: Sequence[signal.Signals] = ALL_SIGNALS
) -> str:
    """A Python script that prints the repr of {name: {what was tried: `done` or the error}}; those of `signalled` are
    sent the signals, and slowed down, too."""
    numbers = [int(number) for number in signals]
    head = f"PIDS, SIGNALLED, SIGNALS, ADDRESS = {dict(pids)!r}, {tuple(signalled)!r}, {numbers!r}, 0x10000\n"
    return head + _ATTACK
