"""A spawn helper: a small process that starts commands for the executor and collects them. Standard library only.

Imported by `python -I -S -c ... FD SETTINGS`, where FD is its end of a SOCK_SEQPACKET pair. It becomes the
command user once, takes on no-new-privileges and limits once, and every command inherits all of it: so each spawn is a
plain vfork+exec, which CPython only does while the user stays the same. It imports as little as it can, since it is
resident in every pod and runs as the user that commands run as.

From the executor, one packet a command (marshal; the executor is trusted): (seq, whether its pid is wanted at
once, whether it leads a session of its own, which descriptors come with it, argv, env, cwd) with the descriptors
for stdin (optional), stdout and stderr (optional: merged) as SCM_RIGHTS; a packet over PACKET_BYTES travels as a memfd.
To the executor, fixed-size REPLY packets. At the end of the socket (the executor is gone) everything that it started
is killed, however deep.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import array
import ctypes
import errno
import marshal
import os
import resource
import select
import struct
import sys
from _posixsubprocess import fork_exec
from time import monotonic

PACKET_BYTES = 65_536
REPLY = struct.Struct("=BBHIQqqddq")  # kind, flag, stage, errno, seq, pid, wait status, user s, system s, max RSS KiB
SPAWNED, FAILED, EXITED, READY = 1, 2, 3, 4
TELL_SEC = 0.001  # a command that is over by then is told of once, with its end, unless its pid was wanted at once
STAGE_EXEC, STAGE_CHDIR, STAGE_FORK = 0, 1, 2

# Every command gets its own number (its seq) as the soft limit on real-time CPU time, which nothing in a pod can make
# use of: unlike a variable in the environment it stays with the descendants of a program that clears its environment,
# leaves its session and forks twice. Read back from /proc/PID/limits.
MARK_LIMIT = resource.RLIMIT_RTTIME
MARK_MIN = 1 << 60  # every seq is larger, and no limit that anybody sets by hand is

COMMANDS_NICE = 10
AUTOGROUP_NICE = 5

PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38


class Helper:
    def __init__(self, sock: _socket.socket) -> None:
        self.sock = sock
        self.running: dict[int, int] = {}  # pid -> seq
        self.untold: dict[int, int] = {}  # running, but the executor was not told of the pid yet
        self.untold_since = 0.0
        self.orphans: dict[int, int] = {}  # pid -> seq of the command that it descends from, 0 unknown
        self.null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # With vfork a failed exec has written here before fork_exec returns, so one pipe serves all spawns.
        self.err_read, self.err_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.children_file = f"/proc/self/task/{os.getpid()}/children"
        self.mark_hard = resource.getrlimit(MARK_LIMIT)[1]
        self.marks = self.mark_hard == resource.RLIM_INFINITY

    def serve(self) -> None:
        _signal.signal(_signal.SIGCHLD, _nothing)
        _signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        poll = select.epoll()
        sock_fd = self.sock.fileno()
        poll.register(sock_fd, select.EPOLLIN)
        poll.register(self.wake_read, select.EPOLLIN)
        self.reply(READY, 0, 0, pid=os.getpid())
        while True:
            if self.untold and monotonic() - self.untold_since > TELL_SEC:
                self.tell()
            for fd, _events in poll.poll(TELL_SEC if self.untold else None):
                if fd == sock_fd:
                    if not self.take():
                        return
                else:
                    try:
                        os.read(self.wake_read, 512)
                    except BlockingIOError:
                        pass
                    self.reap()

    def tell(self) -> None:
        for pid, seq in self.untold.items():
            self.reply(SPAWNED, seq, 0, pid=pid)
        self.untold.clear()

    def take(self) -> bool:
        """One packet from the executor; False at the end of the socket."""
        try:
            packet, ancillary, _flags, _address = self.sock.recvmsg(PACKET_BYTES, 256, _socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        if not packet:
            return False
        fds = array.array("i")
        for _level, _kind, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        in_memory = packet == b"m"
        if in_memory:
            size = os.fstat(fds[-1]).st_size
            packet = os.pread(fds[-1], size, 0)
            os.close(fds.pop())
        seq, at_once, own_session, has_stdin, has_stderr, keep, argv, env, cwd = marshal.loads(packet)
        try:
            self.spawn(seq, at_once, own_session, has_stdin, has_stderr, keep, argv, env, cwd, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def spawn(
        self, seq: int, at_once: bool, own_session: bool, has_stdin: bool, has_stderr: bool, keep: bool,
        argv: list[bytes], env: list[bytes], cwd: bytes, fds: array.array[int],
    ) -> None:  # fmt: skip
        at = 0
        stdin = self.null
        if has_stdin:
            stdin, at = fds[0], 1
        stdout = fds[at]
        stderr = fds[at + 1] if has_stderr else stdout
        kept: tuple[int, ...] = (self.err_write,)
        if keep:  # a script too long for one argument, read through /dev/fd
            script = fds[len(fds) - 1]
            kept = (self.err_write, script) if self.err_write < script else (script, self.err_write)
            argv = [*argv[:-1], b"/dev/fd/%d" % script]
        candidates = _candidates(argv[0], env)
        if self.marks:
            resource.setrlimit(MARK_LIMIT, (seq, self.mark_hard))
        try:
            pid = fork_exec(
                argv, candidates, True, kept, cwd, env, stdin, -1, -1, stdout, -1, stderr,  # type: ignore[arg-type]
                self.err_read, self.err_write, True, own_session, -1 if own_session else 0,
                None, None, None, -1, None, True,  # type: ignore[arg-type]
            )  # fmt: skip
        except OSError as why:
            self.reply(FAILED, seq, why.errno or errno.EAGAIN, stage=STAGE_FORK)
            return
        finally:
            if self.marks:  # else the helper itself would be taken for a part of its latest command
                resource.setrlimit(MARK_LIMIT, (self.mark_hard, self.mark_hard))
        try:
            said = os.read(self.err_read, 4096)
        except BlockingIOError:
            said = b""
        if not said:
            self.running[pid] = seq
            if at_once:
                self.reply(SPAWNED, seq, 0, pid=pid)
            else:
                if not self.untold:
                    self.untold_since = monotonic()
                self.untold[pid] = seq
            return
        os.waitpid(pid, 0)
        _kind, number, text = said.split(b":", 2)
        error = int(number, 16)
        if error == errno.EACCES and not text and b"/" not in argv[0] and not any(map(os.path.exists, candidates)):
            error = errno.ENOENT  # a directory of PATH that may not be entered hides nothing that could be run
        # CPython says "noexec" (from 3.13 on "noexec:chdir") for what fails before the exec: the working directory
        self.reply(FAILED, seq, error, stage=STAGE_CHDIR if text.startswith(b"noexec") else STAGE_EXEC)

    def reap(self) -> None:
        ended: list[tuple[int, int, int, resource.struct_rusage]] = []
        childless = False
        while True:
            try:
                pid, status, use = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                childless = True
                break
            if pid == 0:
                break
            seq = self.running.pop(pid, None)
            if seq is None:
                self.orphans.pop(pid, None)
            else:
                ended.append((pid, seq, status, use))
                self.untold.pop(pid, None)
        if not ended:
            return
        if childless:
            self.orphans.clear()
        adopted = set() if childless else self.find_orphans()
        for pid, seq, status, use in ended:
            left = seq in adopted or group_lives(pid)
            self.reply(EXITED, seq, 0, pid=pid, flag=left, status=status, use=use)

    def find_orphans(self) -> set[int]:
        """The numbers of the commands that a child of ours, other than a command, descends from."""
        try:
            fd = os.open(self.children_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel without CONFIG_PROC_CHILDREN
            return set()
        try:
            listed = os.read(fd, 1 << 20)
        finally:
            os.close(fd)
        children = {int(pid) for pid in listed.split()}
        strangers = children - self.running.keys()
        self.orphans = {pid: self.orphans.get(pid) or mark_of(pid) for pid in strangers}
        return set(self.orphans.values())

    def reply(
        self, kind: int, seq: int, error: int, pid: int = 0, stage: int = 0, flag: bool = False, status: int = 0,
        use: resource.struct_rusage | None = None,
    ) -> None:  # fmt: skip
        user, system, rss = (use.ru_utime, use.ru_stime, use.ru_maxrss) if use is not None else (0.0, 0.0, 0)
        packet = REPLY.pack(kind, flag, stage, error, seq, pid, status, user, system, int(rss))
        try:
            self.sock.send(packet)
        except OSError:  # the executor is gone; `take` will see it too
            pass


def kill_everything() -> None:
    """KILLs every descendant until none is left: orphans come to us, the subreaper, as their parents die."""
    me = os.getpid()
    for _round in range(10_000):
        for pid, parent in _all_parents():
            if parent == me:
                try:
                    os.kill(pid, _signal.SIGKILL)
                except OSError:
                    pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            select.select((), (), (), 0.005)
        except ChildProcessError:
            return


def mark_of(pid: int) -> int:
    """The number of the command that `pid` descends from; 0 where that cannot be told."""
    try:
        fd = os.open(f"/proc/{pid}/limits", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        text = os.read(fd, 8192)
    except OSError:
        return 0
    finally:
        os.close(fd)
    at = text.find(b"Max realtime timeout")
    if at < 0:
        return 0
    soft = text[at + 20 :].split(None, 1)[0]
    return int(soft) if soft.isdigit() and int(soft) > MARK_MIN else 0


def _all_parents() -> list[tuple[int, int]]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fd = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                stat = os.read(fd, 1024)
                found.append((int(name), int(stat[stat.rindex(b")") + 2 :].split()[1])))
            except (OSError, ValueError, IndexError):
                pass
            finally:
                os.close(fd)
    return found


def _candidates(program: bytes, env: list[bytes]) -> tuple[bytes, ...]:
    if b"/" in program:
        return (program,)
    path = b"/usr/local/bin:/usr/bin:/bin"
    for entry in env:
        if entry.startswith(b"PATH="):
            path = entry[5:]
    return tuple(directory + b"/" + program for directory in path.split(b":") if directory)


def group_lives(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _nothing(_number: int, _frame: object) -> None:
    """A handler of our own makes the kernel keep zombies for us, also where SIGCHLD was ignored at our start."""


def _yield_to_the_executor() -> None:
    """However many commands want the processor, the executor gets it when it wakes: it is what answers for them.

    Both are needed: niceness counts inside a pod's cpu cgroup; where there is none, the kernel shares the processor
    between sessions first (sched(7), autogroup), which is also why commands stay in the helper's own."""
    os.nice(COMMANDS_NICE)
    try:
        with open("/proc/self/autogroup", "w") as weight:
            weight.write(str(AUTOGROUP_NICE))
    except OSError:
        pass


def _reset_internal_signals() -> None:
    """glibc's posix_spawn leaves its own two signals ignored in the child (GNU make starts everything by it), and its
    sigaction refuses to name them: so by the kernel's call, with an all-zero struct (SIG_DFL)."""
    number = {"x86_64": 13, "aarch64": 134}.get(os.uname().machine)
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        for internal in (32, 33):
            libc.syscall(number, internal, ctypes.create_string_buffer(32), None, 8)


def become(settings: dict[str, object]) -> None:
    """The identity, limits and signals that every command inherits. The order matters: privileges go last."""
    for number in range(1, _signal.NSIG):
        try:
            if number != _signal.SIGCHLD and _signal.getsignal(number) == _signal.SIG_IGN:
                _signal.signal(number, _signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    _reset_internal_signals()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # the kernel picks a command before it picks the executor
    except OSError:
        pass
    _yield_to_the_executor()
    umask = settings["umask"]
    assert isinstance(umask, int)
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nofile = settings["nofile"]
    assert isinstance(nofile, int)
    resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    uid, gid, groups = settings["uid"], settings["gid"], settings["groups"]
    assert isinstance(uid, int)
    assert isinstance(gid, int)
    assert isinstance(groups, list)
    if os.getuid() != uid or os.getgid() != gid:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no-new-privileges is refused")
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> None:
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, int(sys.argv[1]))
    settings: dict[str, object] = {}
    for entry in sys.argv[2].split(","):
        name, _, value = entry.partition("=")
        settings[name] = [int(group) for group in value.split("+") if group] if name == "groups" else int(value)
    become(settings)
    try:
        Helper(sock).serve()
    finally:
        kill_everything()
