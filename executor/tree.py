"""Finding and ending all of a command: its leader, its session, its children, and what left all of these.

A process belongs to a command when it carries the command's mark (see `executor.spawn_helper`), is in the leader's
group, or descends from one that does. Walking /proc may take milliseconds: it is done in a worker thread, once for
all that ask (`executor.sweeps`)."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable, Collection, Iterable

import msgspec

from executor.kernel import HAS_PIDFD
from executor.spawn_helper import mark_in

log = logging.getLogger("executor.tree")


class Seen(msgspec.Struct, frozen=True, gc=False):
    """One line of /proc/PID/stat (proc_pid_stat(5))."""

    pid: int
    state: str
    ppid: int
    group: int
    session: int
    start: int  # clock ticks since boot: with the pid, an identity
    mark: int  # the number of its command; 0: none


def seen(pid: int) -> Seen | None:
    """None where there is no such process. Raises OSError where none can be looked at for the moment."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(1024)
        fields = text[text.rindex(b")") + 2 :].split()
        ppid, group, session = map(int, fields[1:4])
        return Seen(pid, fields[0].decode(), ppid, group, session, int(fields[19]), mark_in(fields))
    except OSError as why:
        if why.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # what cannot be seen must not be taken for gone
            raise
        return None
    except (ValueError, IndexError):
        return None


def everything() -> dict[int, Seen]:
    """Raises OSError."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            one = seen(int(name))
            if one is not None:
                found[one.pid] = one
    return found


class Snapshot:
    """All processes at one time: one walk of /proc for any number of commands. Raises OSError."""

    def __init__(self) -> None:
        self.living = everything()
        self.children: dict[int, list[int]] = {}
        self.marked: dict[int, list[int]] = {}  # by the command's number; 0: without a mark
        self.unmarked: dict[int, list[int]] = {}  # these by session, and by process group
        for one in self.living.values():
            self.children.setdefault(one.ppid, []).append(one.pid)
            self.marked.setdefault(one.mark, []).append(one.pid)
            if not one.mark:
                for leader in {one.session, one.group}:
                    self.unmarked.setdefault(leader, []).append(one.pid)

    def with_descendants(self, wanted: list[int], spare: int = 0) -> dict[int, Seen]:
        """The living of `wanted` and their descendants, but `spare` and what is only its descendant. Zombies are
        none."""
        me = os.getpid()
        wanted = [pid for pid in wanted if pid != spare]
        found: dict[int, Seen] = {}
        while wanted:
            pid = wanted.pop()
            if pid in found or pid == me:
                continue
            found[pid] = self.living[pid]
            wanted += self.children.get(pid, ())
        return {pid: one for pid, one in found.items() if one.state not in "ZX"}


def members(at: Snapshot, seq: int, leader: int, inside: Iterable[int] = ()) -> dict[int, Seen]:
    """The living processes of command `seq`; `leader` is its first process's pid, 0 where unknown. `inside`: what is
    known to be its own besides."""
    wanted = [*at.marked.get(seq, ()), *(pid for pid in inside if pid in at.living)]
    if leader:
        # Without a mark (a kernel that does not show it, a program that changed it) the leader's group has to do;
        # with another command's mark it never does: the leader's pid may be another's by now.
        wanted += at.unmarked.get(leader, ())
    return at.with_descendants(wanted)


def call_members(at: Snapshot, seq: int, shell: int, shell_seq: int, since: int) -> dict[int, Seen]:
    """The living processes of one command of a session, without the session's shell, pid `shell`.

    They carry the command's own mark, or, where the shell cannot set one, the shell's and began at `since` (clock
    ticks since boot) or later."""
    of_shell = [*at.marked.get(shell_seq, ()), *at.unmarked.get(shell, ())]
    later = [pid for pid in of_shell if at.living[pid].start >= since]
    return at.with_descendants([*at.marked.get(seq, ()), *later], spare=shell)


def session_members(at: Snapshot, marks: Collection[int], shell: int) -> dict[int, Seen]:
    """The living processes with any of the marks or in the shell's session (`shell` 0: none), and their descendants."""
    wanted = [pid for mark in marks for pid in at.marked.get(mark, ())]
    if shell:
        wanted += [one.pid for one in at.living.values() if one.session == shell]
    return at.with_descendants(wanted)


def find_marked(seq: int) -> int:
    """The oldest living or unreaped process of command `seq`; 0 where none is."""
    marked = [one for one in everything().values() if one.mark == seq]
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


def signal_all(found: dict[int, Seen], number: int) -> None:
    """Sends `number` to all of `found`."""
    if number == signal.SIGKILL:  # stopped first, so that a fork bomb cannot outrun the sweep
        for one in found.values():
            send(one, signal.SIGSTOP)
    # Parents first: a shell that saw its child end before its own signal came would run its next command.
    for one in sorted(found.values(), key=lambda one: (one.start, one.pid)):
        send(one, number)


def kill_where(wanted: Callable[[Seen], bool]) -> int:
    """KILLs every process that `wanted` is true of, once; how many."""
    found = [one for one in everything().values() if one.state not in "ZX" and wanted(one)]
    for one in found:
        send(one, signal.SIGKILL)
    return len(found)
