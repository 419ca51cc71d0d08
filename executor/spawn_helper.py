"""A spawn helper: a small process that starts commands for the executor and collects them. Standard library only.

Imported by `python -I -S -c ... FD`, where FD is its end of a SOCK_SEQPACKET pair. It becomes the command user once,
takes on no-new-privileges, limits and the system call filter once, and every command inherits all of it: so each spawn
is a plain vfork+exec, which CPython only does while the user stays the same. It imports as little as it can, since it
is resident in every pod and runs as the user that commands run as.

From the executor, first a packet with the settings (`become`), then one a command (marshal; the executor is trusted):
(seq, whether its pid is wanted at once, whether it leads a session of its own, which descriptors come with it, argv,
env, its PATH, cwd) with the descriptors for stdin (optional), stdout and stderr (optional: merged) as SCM_RIGHTS; env
is None where it and its PATH are those of the command before, as they mostly are. A packet over PACKET_BYTES travels as
a memfd. To the executor, packets of one or more fixed-size REPLYs. At the end of the socket (the executor is gone)
everything that it started is killed, however deep.
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
REPLIES = 64  # so many may come in one packet
REPLIES_BYTES = REPLIES * REPLY.size
SPAWNED, FAILED, EXITED, READY = 1, 2, 3, 4
# A command is told of when nothing happened for TELL_SEC, or at the latest after TELL_LATEST_SEC, which commands that
# run dozens at once take; one that is over by then only with its end. Not so where its pid was wanted at once.
TELL_SEC = 0.003
TELL_LATEST_SEC = 0.1
# Ends are told of together once no job waits, or after so many jobs: several cost the executor little more than one.
TAKE_FIRST = 16
STAGE_EXEC, STAGE_CHDIR, STAGE_FORK = 0, 1, 2

# Every command gets its own number (its seq) as the soft limit on resident memory, in KiB, which no kernel since Linux
# 2.6 holds anybody to: unlike a variable in the environment it stays with the descendants of a program that clears its
# environment, leaves its session and forks twice. Read back from /proc/PID/stat, also under gVisor.
MARK_LIMIT = resource.RLIMIT_RSS
MARK_UNIT = 1024  # what bash's `ulimit -m` counts in
MARK_MIN = 1 << 52  # every seq is larger, and no limit that anybody sets by hand is; as bytes it fits 63 bits
MARK_FIELD = 22  # of /proc/PID/stat, after the name: `rsslim`

FOUND = 256
PAGE_BYTES = 4096

COMMANDS_SCORE = b"1000"  # of oom_score_adj: the kernel picks a command before it picks us, or the executor
COMMANDS_NICE = 10
AUTOGROUP_NICE = 5

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
SECCOMP_SET_MODE_FILTER = 1
# Without it kernels before 5.16 slow everything under a filter down against speculative reads; later ones do not.
SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4
_SIGACTION_SECCOMP = {"x86_64": (13, 317), "aarch64": (134, 277)}  # system call numbers


class Helper:
    def __init__(self, sock: _socket.socket, score_fd: int = -1, score: bytes = b"") -> None:
        """`score_fd`: our oom_score_adj, where it can be put back to `score`, which it was before; else -1."""
        self.sock = sock
        self.score_fd = score_fd
        self.score = score
        self.running: dict[int, int] = {}  # pid -> seq
        # Running, and the executor was not told yet: pid -> (seq, until when it need not be), the first one first
        self.untold: dict[int, tuple[int, float]] = {}
        self.tell_at = 0.0  # no later: until when the first one need not be
        self.orphans: dict[int, int] = {}  # pid -> seq of the command that it descends from, 0 unknown
        self.null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # With vfork a failed exec has written here before fork_exec returns, so one pipe serves all spawns.
        self.err_read, self.err_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.kept: tuple[int, ...] = (self.err_write,)
        self.err_poll = select.poll()
        self.err_poll.register(self.err_read, select.POLLIN)
        self.wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.buffer = bytearray(PACKET_BYTES)
        self.buffers = [self.buffer]
        self.env: list[bytes] = []  # of the latest command, and its PATH
        self.path = b""
        self.found: dict[bytes, tuple[bytes, ...]] = {}  # where to look for a program in this PATH
        try:
            self.children_fd = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # gVisor, a kernel without CONFIG_PROC_CHILDREN
            self.children_fd = -1
        self.mark_hard = resource.getrlimit(MARK_LIMIT)[1]
        self.no_mark = (self.mark_hard, self.mark_hard)
        self.marks = self.mark_hard == resource.RLIM_INFINITY

    def serve(self, filter_error: int = 0) -> None:
        _signal.signal(_signal.SIGCHLD, _nothing)
        _signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        poll = select.epoll()
        sock_fd = self.sock.fileno()
        poll.register(sock_fd, select.EPOLLIN)
        poll.register(self.wake_read, select.EPOLLIN)
        self.reply(READY, 0, filter_error, pid=os.getpid())
        taken = 0  # jobs, since ends were last looked at
        while True:
            events = poll.poll(TELL_SEC if self.untold else None, 2)
            is_end = False
            for fd, _events in events:
                if fd == sock_fd:
                    if not self.take():
                        return
                    taken += 1
                else:
                    is_end = True
            if is_end and (len(events) == 1 or taken >= TAKE_FIRST):
                taken = 0
                os.read(self.wake_read, 512)
                self.reap()
            if self.untold and (not events or monotonic() > self.tell_at):
                self.tell(everything=not events)

    def tell(self, everything: bool) -> None:
        now = monotonic()
        while self.untold:
            pid, (seq, until) = next(iter(self.untold.items()))
            if until > now and not everything:
                self.tell_at = until
                break
            del self.untold[pid]
            self.reply(SPAWNED, seq, 0, pid=pid)

    def take(self) -> bool:
        """One packet from the executor; False at the end of the socket."""
        try:
            size, ancillary, _flags, _address = self.sock.recvmsg_into(self.buffers, 256, _socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        if not size:
            return False
        fds = array.array("i")
        for _level, _kind, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        packet: bytes | bytearray = self.buffer
        if size == 1:
            packet = os.pread(fds[-1], os.fstat(fds[-1]).st_size, 0)
            os.close(fds.pop())
        try:
            self.spawn(fds, *marshal.loads(packet))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def spawn(
        self, fds: array.array[int], seq: int, at_once: bool, own_session: bool, has_stdin: bool, has_stderr: bool,
        keep: bool, argv: list[bytes], env: list[bytes] | None, path: bytes, cwd: bytes,
    ) -> None:  # fmt: skip
        if env is not None:
            self.env = env
            if path != self.path:
                self.path = path
                self.found.clear()
        at = 0
        stdin = self.null
        if has_stdin:
            stdin, at = fds[0], 1
        stdout = fds[at]
        stderr = fds[at + 1] if has_stderr else stdout
        kept = self.kept
        if keep:  # a script too long for one argument, read through /dev/fd
            script = fds[len(fds) - 1]
            kept = (self.err_write, script) if self.err_write < script else (script, self.err_write)
            argv = [*argv[:-1], b"/dev/fd/%d" % script]
        candidates = self.found.get(argv[0]) or self.find(argv[0])
        if self.marks:
            resource.setrlimit(MARK_LIMIT, (seq * MARK_UNIT, self.mark_hard))
        if self.score_fd >= 0:
            os.pwrite(self.score_fd, COMMANDS_SCORE, 0)
        try:
            pid = fork_exec(
                argv, candidates, True, kept, cwd, self.env, stdin, -1, -1, stdout, -1, stderr,  # type: ignore[arg-type]
                self.err_read, self.err_write, True, own_session, -1 if own_session else 0,
                None, None, None, -1, None, True,  # type: ignore[arg-type]
            )  # fmt: skip
        except OSError as why:
            self.reply(FAILED, seq, why.errno or errno.EAGAIN, stage=STAGE_FORK)
            return
        finally:
            if self.score_fd >= 0:  # else the kernel would pick us, who are larger, before a small command
                os.pwrite(self.score_fd, self.score, 0)
            if self.marks:  # else the helper itself would be taken for a part of its latest command
                resource.setrlimit(MARK_LIMIT, self.no_mark)
        if not self.err_poll.poll(0):
            self.running[pid] = seq
            if at_once:
                self.reply(SPAWNED, seq, 0, pid=pid)
            else:
                until = monotonic() + TELL_LATEST_SEC
                if not self.untold:
                    self.tell_at = until
                self.untold[pid] = (seq, until)
            return
        os.waitpid(pid, 0)
        _kind, number, text = os.read(self.err_read, 4096).split(b":", 2)
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
                childless = self.children_fd >= 0  # else what was left behind is another's child
                break
            if pid == 0:
                break
            seq = self.running.pop(pid, None)
            if seq is None:
                self.orphans.pop(pid, None)
            else:
                ended.append((pid, seq, status, use))
                self.untold.pop(pid, None)
                if not self.running and self.children_fd >= 0 and not os.pread(self.children_fd, 1, 0):
                    childless = True  # as the next call would say, by an exception
                    break
        if not ended:
            return
        # Whatever a command left behind descends from a child of ours: without any but running commands, nothing did.
        alone = childless or not self.find_orphans()
        if childless:
            self.orphans.clear()
        adopted = set(self.orphans.values())
        packets = []
        for pid, seq, status, use in ended:
            left = not alone and (seq in adopted or group_lives(pid))
            packets.append(REPLY.pack(
                EXITED, left, 0, 0, seq, pid, status, use.ru_utime, use.ru_stime, int(use.ru_maxrss)
            ))  # fmt: skip
        for at in range(0, len(packets), REPLIES):
            self.send(b"".join(packets[at : at + REPLIES]))

    def find_orphans(self) -> bool:
        """Whether a child of ours is none of the running commands; `orphans` says which, and whose."""
        strangers = self.strangers()
        self.orphans = {pid: self.orphans.get(pid) or mark_of(pid) for pid in strangers}
        return bool(strangers)

    def strangers(self) -> set[int]:
        if self.children_fd < 0:
            # gVisor gives orphans to the first process, whoever is their subreaper; their marks tell whose they are.
            ours = {1, os.getpid()}
            return {pid for pid, parent in _all_parents() if parent in ours} - self.running.keys() - ours
        listed = piece = os.pread(self.children_fd, PACKET_BYTES, 0)
        while len(piece) > PAGE_BYTES // 2:  # the kernel gives about a page of them at a time
            piece = os.pread(self.children_fd, PACKET_BYTES, len(listed))
            listed += piece
        if listed.count(b" ") == len(self.running):  # each number has a space behind it
            return set()
        return {int(pid) for pid in listed.split()} - self.running.keys()

    def find(self, program: bytes) -> tuple[bytes, ...]:
        """Where to look for a program, in this order."""
        if b"/" in program:
            return (program,)
        candidates = tuple(directory + b"/" + program for directory in self.path.split(b":") if directory)
        if len(self.found) >= FOUND:
            self.found.clear()
        self.found[program] = candidates
        return candidates

    def reply(self, kind: int, seq: int, error: int, pid: int = 0, stage: int = 0) -> None:
        self.send(REPLY.pack(kind, False, stage, error, seq, pid, 0, 0.0, 0.0, 0))

    def send(self, packet: bytes) -> None:
        try:
            self.sock.send(packet, _socket.MSG_NOSIGNAL)  # a SIGPIPE would leave what runs to itself
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
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        stat = os.read(fd, 1024)
        return mark_in(stat[stat.rindex(b")") + 2 :].split())
    except (OSError, ValueError, IndexError):
        return 0
    finally:
        os.close(fd)


def mark_in(fields: list[bytes]) -> int:
    """The same of the fields of /proc/PID/stat after the name. Raises ValueError, IndexError where they are none."""
    mark, rest = divmod(int(fields[MARK_FIELD]), MARK_UNIT)
    return mark if rest == 0 and MARK_MIN < mark < 2 * MARK_MIN else 0


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
    numbers = _SIGACTION_SECCOMP.get(os.uname().machine)
    if numbers is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        for internal in (32, 33):
            libc.syscall(numbers[0], internal, ctypes.create_string_buffer(32), None, 8)


def _set_filter(code: bytes) -> int:
    """Sets the system call filter, which no-new-privileges must come before; the errno of a kernel that has none."""
    numbers = _SIGACTION_SECCOMP.get(os.uname().machine)
    if numbers is None or not code:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    steps = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("HP", len(code) // 8, ctypes.addressof(steps))  # struct sock_fprog
    if not libc.syscall(numbers[1], SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, filter_):
        return 0
    if not libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0):  # before 4.17, and gVisor
        return 0
    return ctypes.get_errno()


def become(settings: dict[str, object]) -> int:
    """The identity, limits and signals that every command inherits. The order matters: privileges go last.

    The settings: uid, gid, groups, umask, nofile, and `filter`, a BPF program in hex, empty where there is none; a
    helper's `cgroups`: the `cgroup.procs` files of those that commands begin in.
    The errno of a kernel that takes no filter, else 0."""
    for number in range(1, _signal.NSIG):
        try:
            if number != _signal.SIGCHLD and _signal.getsignal(number) == _signal.SIG_IGN:
                _signal.signal(number, _signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    _reset_internal_signals()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    groups_to_enter = settings.get("cgroups", [])
    assert isinstance(groups_to_enter, list)
    for path in groups_to_enter:
        try:
            with open(path, "w") as file:
                file.write("0")
        except OSError:
            pass
    try:
        with open("/proc/self/oom_score_adj", "wb") as score:
            score.write(COMMANDS_SCORE)
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
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no command may trace us; each becomes an ordinary process by its exec
    filter_ = settings["filter"]
    assert isinstance(filter_, str)
    return _set_filter(bytes.fromhex(filter_))


def _own_score() -> tuple[int, bytes]:
    """Our oom_score_adj, to be written later: a process that may not be traced has no say over its /proc files."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1, b""
    return fd, os.pread(fd, 16, 0).strip()


def _is_put_back(score_fd: int, score: bytes) -> bool:
    try:
        os.pwrite(score_fd, score, 0)
    except OSError:  # there is none; or it is lower than who started us may go without CAP_SYS_RESOURCE
        return False
    return True


def main() -> None:
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, int(sys.argv[1]))
    score_fd, score = _own_score()
    filter_error = become(marshal.loads(sock.recv(PACKET_BYTES)))
    if not _is_put_back(score_fd, score):
        score_fd = -1
    try:
        Helper(sock, score_fd, score).serve(filter_error)
    finally:
        kill_everything()
