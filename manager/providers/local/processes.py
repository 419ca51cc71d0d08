"""Processes by pid and start time: a pid alone may by now be somebody else's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

import msgspec

_GONE_STATES: Final = ("Z", "X", "x")


class ProcessId(msgspec.Struct, frozen=True):
    """One process of this boot of the machine; the start time tells it from a later one with the same pid."""

    pid: int
    start_ticks: int  # since the machine's start

    def alive(self) -> bool:
        """False for a zombie too: it runs no more code."""
        found = read_stat(self.pid)
        return found is not None and found[1] == self.start_ticks and found[0] not in _GONE_STATES


def boot_id() -> str:
    """Changes with every start of the machine, where the kernel tells; "" elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time in ticks; None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return parse_stat(file.read(1024))[1:]
    except (OSError, ValueError):
        return None


def parse_stat(line: bytes) -> tuple[int, str, int]:
    """Pid, state and start time of a line of /proc/PID/stat. Raises ValueError where it is none."""
    # The name, in parentheses, may itself hold spaces and parentheses; nothing after it does.
    head, _, tail = line.rpartition(b")")
    fields = tail.split()
    if len(fields) < 20:
        raise ValueError(f"not a line of /proc/PID/stat: {line[:80]!r}")
    return int(head.split(b" ", 1)[0]), fields[0].decode("ascii"), int(fields[19])


def identify(pid: int) -> ProcessId | None:
    found = read_stat(pid)
    return None if found is None else ProcessId(pid, found[1])


def open_pidfd(process: ProcessId) -> int | None:
    """A descriptor that becomes readable at the process's end; None where it has ended already.

    Raises OSError where the kernel has no pidfds (before 5.3, older gVisor)."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # From here on the pid cannot be recycled under us, so this comparison is the one that counts.
    if process.alive():
        return fd
    os.close(fd)
    return None


def send(process: ProcessId, number: signal.Signals) -> None:
    """Signals exactly this process; does nothing where it has ended."""
    try:
        fd = open_pidfd(process)
    except OSError:
        # Without pidfds a moment remains between the look and the signal.
        if process.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        return
    if fd is None:
        return
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def descendants(pid: int) -> list[ProcessId]:
    """Those that live now, parents before their children."""
    by_parent: dict[int, list[ProcessId]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                line = file.read(1024)
            _, state, start_ticks = parse_stat(line)
            parent = int(line.rpartition(b")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if state not in _GONE_STATES:
            by_parent.setdefault(parent, []).append(ProcessId(int(name), start_ticks))
    found: list[ProcessId] = []
    parents = [pid]
    for parent in parents:
        for child in by_parent.get(parent, ()):
            found.append(child)
            parents.append(child.pid)
    return found


def reap(process: ProcessId) -> None:
    """Collects the process if it is a child of ours that has ended, and nobody else's child."""
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(process.pid, os.WNOHANG)


def wait_ended(process: ProcessId, timeout_sec: float) -> bool:
    """Waits for our child's end and collects it; False where it had to be killed at the timeout."""
    deadline = time.monotonic() + timeout_sec
    while process.alive():
        if time.monotonic() > deadline:
            send(process, signal.SIGKILL)
            reap(process)
            return False
        time.sleep(0.005)
    reap(process)
    return True
