"""Starts a pod: a line of shell that enters the cgroups and becomes bubblewrap. Blocks for a millisecond or so."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from manager.providers.local import bwrap
from manager.providers.local.cgroups import PodCgroup

EXECUTOR_OOM_SCORE: Final = -500  # the machine's last choice among a pod's processes; commands raise their own

# Writes its own /proc/PID/stat down before anything else, so that a manager that finds the pod half made can end it,
# and enters the cgroups before there is anything to escape them. `read` and `echo` are the shell's own: no fork.
_SCRIPT: Final = """\
read -r line < /proc/self/stat && echo "$line" > "$1" || exit 125
[ -z "$2" ] || echo "$2" 2>/dev/null > /proc/self/oom_score_adj
groups=$3; shift 3
while [ "$groups" -gt 0 ]; do echo 0 > "$1/cgroup.procs" || exit 125; shift; groups=$((groups - 1)); done
exec "$@"
"""


def launch(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    log: Path,
    launcher: Path,
    cgroups: Sequence[PodCgroup] = (),
    oom_score: int | None = None,
    descriptors: Mapping[int, int] | None = None,
) -> int:
    """The pid of the outer process, a child of ours in a session of its own. `descriptors`: number there -> ours.

    Raises OSError."""
    shell = ["sh", "-c", _SCRIPT, "sojourn-pod", str(launcher), "" if oom_score is None else str(oom_score)]
    shell += [str(len(cgroups)), *(group.path for group in cgroups), *argv]
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(_opened(os.devnull, os.O_RDONLY))
        out = stack.enter_context(_opened(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        wanted = {0: null, 1: out, 2: out, **(descriptors or {})}
        actions = []
        for number, fd in wanted.items():
            # Copied far up first: a number below could be the source of a later one.
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200)
            stack.callback(os.close, high)
            actions.append((os.POSIX_SPAWN_DUP2, high, number))
        return os.posix_spawn(
            "/bin/sh", shell, dict(env), file_actions=actions, setsid=True, setsigmask=(),
            setsigdef=set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP},
        )  # fmt: skip


def launch_bwrap(
    program: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    seccomp: bytes,
    log: Path,
    launcher: Path,
    status: Path,
    before: Sequence[str] = (),
    cgroups: Sequence[PodCgroup] = (),
    oom_score: int | None = None,
) -> tuple[int, int]:
    """Pid of the outer process, and a descriptor to read bubblewrap's JSON of `child-pid` from, which is the caller's.

    `before` is a program with arguments that becomes what it finds after them. Raises OSError."""
    split = arguments.index("--")
    with contextlib.ExitStack() as stack:
        # The arguments by descriptor: they are long, and `ps` would show little else.
        args = stack.enter_context(_memory("args", b"".join(os.fsencode(one) + b"\0" for one in arguments[:split])))
        filter_ = stack.enter_context(_memory("seccomp", seccomp))
        status_fd = stack.enter_context(_opened(str(status), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        info_read, info_write = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, info_write)
        try:
            pid = launch(
                [*before, program, "--args", str(bwrap.ARGS_FD), *arguments[split:]], env, log=log,
                launcher=launcher, cgroups=cgroups, oom_score=oom_score,
                descriptors={
                    bwrap.SECCOMP_FD: filter_, bwrap.INFO_FD: info_write, bwrap.STATUS_FD: status_fd,
                    bwrap.ARGS_FD: args,
                },
            )  # fmt: skip
        except BaseException:
            os.close(info_read)
            raise
        return pid, info_read


def read_child_pid(info: int, timeout_sec: float) -> int | None:
    """What bubblewrap says of its child, the pod's PID 1; None where it ended or stayed silent. Closes `info`."""
    poll = select.poll()
    poll.register(info, select.POLLIN)
    said = b""
    try:
        deadline = time.monotonic() + timeout_sec
        # To the end: bubblewrap writes in pieces, and dies of a reader that left.
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            piece = os.read(info, 4096)
            if not piece or len(said) > 65_536:
                break
            said += piece
    finally:
        os.close(info)
    try:
        return msgspec.json.decode(said, type=_ChildInfo).child_pid
    except msgspec.DecodeError:
        return None


class _ChildInfo(msgspec.Struct, frozen=True, rename="kebab"):
    child_pid: int


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _memory(name: str, content: bytes) -> Iterator[int]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
