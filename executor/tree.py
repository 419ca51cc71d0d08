"""Finding and ending all of a command: its leader, its session, its children, and what left all of these.

A process belongs to a command when it carries the command's mark (`executor.spawn_helper.mark_of`), is in the leader's
session, or descends from one that does. Walking /proc may take milliseconds: run these in a worker thread."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection

import msgspec

from executor.kernel import HAS_PIDFD
from executor.spawn_helper import mark_of as mark_of

log = logging.getLogger("executor.tree")


class Seen(msgspec.Struct, frozen=True, gc=False):
    """One line of /proc/PID/stat (proc_pid_stat(5))."""

    pid: int
    state: str
    ppid: int
    session: int
    start: int  # clock ticks since boot: with the pid, an identity


def seen(pid: int) -> Seen | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(1024)
        fields = text[text.rindex(b")") + 2 :].split()
        return Seen(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def everything() -> dict[int, Seen]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            one = seen(int(name))
            if one is not None:
                found[one.pid] = one
    return found


def members(seq: int, leader: int) -> dict[int, Seen]:
    """The living processes of command `seq`; `leader` is its first process's pid, 0 where unknown. Zombies are none."""
    # Without a mark (a kernel that does not show it, a program that changed it) the leader's session has to do;
    # with another command's mark it never does: the leader's pid may be another's by now.
    return _found(lambda one, mark: mark == seq or (not mark and bool(leader) and leader in (one.pid, one.session)))


def call_members(seq: int, shell: int, shell_seq: int, since: int) -> dict[int, Seen]:
    """The living processes of one command of a session, without the session's shell, pid `shell`.

    They carry the command's own mark, or, where the shell cannot set one, the shell's and began at `since` (clock
    ticks since boot) or later."""

    def wanted(one: Seen, mark: int) -> bool:
        if mark == seq:
            return True
        return one.start >= since and (mark == shell_seq or (not mark and one.session == shell))

    return _found(wanted, spare=shell)


def session_members(marks: Collection[int], shell: int) -> dict[int, Seen]:
    """The living processes with any of the marks or in the shell's session (`shell` 0: none), and their descendants."""
    return _found(lambda one, mark: mark in marks or (bool(shell) and one.session == shell))


def _found(is_wanted: Callable[[Seen, int], bool], spare: int = 0) -> dict[int, Seen]:
    """The living processes that `is_wanted` (with their marks) and their descendants, but `spare` and what is only
    its descendant."""
    living = everything()
    children: dict[int, list[int]] = {}
    for one in living.values():
        children.setdefault(one.ppid, []).append(one.pid)
    me = os.getpid()
    wanted = [one.pid for one in living.values() if one.pid != spare and is_wanted(one, mark_of(one.pid))]
    found: dict[int, Seen] = {}
    while wanted:
        pid = wanted.pop()
        if pid in found or pid == me:
            continue
        found[pid] = living[pid]
        wanted += children.get(pid, ())
    return {pid: one for pid, one in found.items() if one.state not in "ZX"}


def find_marked(seq: int) -> int:
    """The oldest living or unreaped process of command `seq`; 0 where none is."""
    marked = [one for one in everything().values() if mark_of(one.pid) == seq]
    return min(marked, key=lambda one: one.start).pid if marked else 0


def send(one: Seen, number: int) -> None:
    """Signals exactly this process, never one that has taken over its pid."""
    try:
        if not HAS_PIDFD:
            now = seen(one.pid)
            if now is not None and now.start == one.start:
                os.kill(one.pid, number)
            return
        fd = os.pidfd_open(one.pid)
        try:
            now = seen(one.pid)
            if now is not None and now.start == one.start:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
    except ProcessLookupError:
        pass
    except OSError as why:
        log.warning("signal_failed", extra={"pid": one.pid, "signal": number, "errno": why.errno})


def signal_tree(seq: int, leader: int, number: int) -> int:
    """Sends `number` to every process of the command; how many there were. KILL repeats until no new one shows up."""
    return signal_found(lambda: members(seq, leader), number)


def signal_found(find: Callable[[], dict[int, Seen]], number: int) -> int:
    """As `signal_tree`, for what `find` finds."""
    total = 0
    for _sweep in range(50 if number == signal.SIGKILL else 1):
        found = find()
        if not found:
            break
        total += len(found)
        if number == signal.SIGKILL:  # stopped first, so that a fork bomb cannot outrun the sweep
            for one in found.values():
                send(one, signal.SIGSTOP)
        # Parents first: a shell that saw its child end before its own signal came would run its next command.
        for one in sorted(found.values(), key=lambda one: (one.start, one.pid)):
            send(one, number)
    return total


def kill_where(wanted: Callable[[Seen], bool]) -> int:
    """KILLs every process that `wanted` is true of, once; how many."""
    found = [one for one in everything().values() if one.state not in "ZX" and wanted(one)]
    for one in found:
        send(one, signal.SIGKILL)
    return len(found)
