"""The few calls of the kernel that Python lacks, and what this kernel lacks, detected once."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from typing import Final

_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> bool:
    return bool(_libc.prctl(option, value, 0, 0, 0) == 0)


def become_subreaper() -> bool:
    """Orphans of our descendants become our children: what PID 1 gets anyway (prctl(2))."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def become_unreadable() -> bool:
    """No other process of the same user may read our memory or /proc files, trace us or make us dump core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return _prctl(_PR_SET_DUMPABLE, 0)


def refuse_new_privileges() -> bool:
    """No exec from here on, in us or in what we start, gains a privilege from a set-uid file."""
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def know_accounts_from_files_only() -> None:
    """Users and groups come from /etc/passwd and /etc/group, as image makers are told, whatever nsswitch.conf says: its
    other services are libraries of the image, which have no business in this process and may not fit its C library."""
    configure = getattr(_libc, "__nss_configure_lookup", None)
    if configure is not None:  # musl has files alone
        for database in (b"passwd", b"group", b"initgroups"):
            configure(database, b"files")


def raise_open_files() -> int:
    """Raises our own soft limit on descriptors to the hard one; the old soft limit, which commands keep."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def trim_heap() -> None:
    """Gives the kernel back what malloc holds and nobody uses; takes milliseconds for each 100 MiB (malloc_trim(3))."""
    trim = getattr(_libc, "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def find_program(name: str) -> str | None:
    """Where a program is that our own PATH leads to. (`shutil.which` costs an executor's start two milliseconds.)"""
    for directory in os.get_exec_path():
        path = os.path.join(directory, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _detect_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # ENOSYS under older gVisor
        return False
    return hasattr(signal, "pidfd_send_signal")


HAS_PIDFD: Final = _detect_pidfd()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}" if number < 34 else f"SIGRTMIN+{number - 34}"


def signal_number(name: str | int) -> int | None:
    """The number of "INT", "SIGINT", "15" or 15; None where there is no such signal."""
    if isinstance(name, int):
        return name if 1 <= name <= 64 else None
    if name.isascii() and name.isdigit() and len(name) <= 2:
        return signal_number(int(name))
    upper = name.upper()
    found = signal.Signals.__members__.get(upper if upper.startswith("SIG") else "SIG" + upper)
    return int(found) if found is not None else None


def is_space_error(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
