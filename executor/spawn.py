"""The executor's side of the spawn helpers: sending jobs, hearing of pids and ends, replacing a helper that died.

Nothing is ever spawned on the event loop. A command that runs when its helper is killed (a command may kill its own
user's processes) is left to the executor as subreaper and goes on; its end is then heard from the Reaper."""

from __future__ import annotations

import array
import asyncio
import errno
import logging
import marshal
import os
import resource
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from executor import seccomp, tree
from executor.isolation import CommandUser
from executor.reaper import Reaper
from executor.spawn_helper import (
    EXITED,
    FAILED,
    MARK_MIN,
    PACKET_BYTES,
    READY,
    REPLIES_BYTES,
    REPLY,
    SPAWNED,
    STAGE_CHDIR,
    STAGE_EXEC,
    STAGE_FORK,
    group_lives,
)
from executor.sweeps import Sweeps

log = logging.getLogger("executor.spawn")

# Imported, not run as a script, so that its compiled form is used: that is 20 ms and 1 MiB for each helper.
HELPER_CODE: Final = (
    f"import sys; sys.path[:0] = [{os.path.dirname(__file__)!r}]; import spawn_helper; spawn_helper.main()"
)
DEFAULT_PATH: Final = b"/usr/local/bin:/usr/bin:/bin"  # where a command's environment has none
READY_SEC: Final = 20.0
ANSWER_SEC: Final = 30.0  # a helper that has not spawned for so long is stuck (stopped by a command, say) and replaced
# Two helpers work side by side at any time, for each waits while its command starts. Only where one has so many at once
# are more of them worth that they share the processor's caches too.
CROWD: Final = 6
RESERVED_DESCRIPTORS: Final = 32  # commands and connections leave them for /proc, without which nothing could be ended

__all__ = ["STAGE_CHDIR", "STAGE_EXEC", "STAGE_FORK", "Job", "Spawner"]


class Job(Protocol):
    """What a command tells the spawner, and hears from it."""

    seq: int
    pid: int

    def spawned(self, pid: int) -> None: ...
    def failed(self, error: int, stage: int) -> None: ...
    def exited(self, status: int, user_sec: float, system_sec: float, max_rss_kib: int, left: bool) -> None: ...
    def lost(self) -> None: ...


class _Helper:
    """One helper process and the jobs it has."""

    def __init__(self, spawner: Spawner, user: CommandUser) -> None:
        self.spawner = spawner
        self.user = user
        self.jobs: dict[int, Job] = {}
        self.waiting = 0  # jobs sent and not yet answered
        self.ready: asyncio.Future[None] = spawner.loop.create_future()
        self.answered_at = spawner.loop.time()
        self.backlog: deque[tuple[bytes, list[int]]] = deque()
        self.env: list[bytes] | None = None  # of the command that it was sent last
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            settings = spawner.identity(user, spawner.nofile) | {"cgroups": spawner.cgroup_files}
            self.sock.send(marshal.dumps(settings))
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", HELPER_CODE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={"LC_ALL": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            self.sock.close()
            raise
        finally:
            theirs.close()
        self.pid = self.process.pid
        self.closed = self.dead = False
        spawner.loop.add_reader(self.sock.fileno(), self._read)
        spawner.reaper.expect(self.pid, self._died, keep_running=True)  # commands may stop what their user runs

    def send(self, job: Job, packet: bytes, fds: list[int]) -> None:
        """Takes over `fds`, which are closed once sent."""
        self.jobs[job.seq] = job
        if not self.waiting:
            self.answered_at = self.spawner.loop.time()
        self.waiting += 1
        if self.backlog:
            self.backlog.append((packet, fds))
        elif not self._try_send(packet, fds):
            self.backlog.append((packet, fds))
            self.spawner.loop.add_writer(self.sock.fileno(), self._drain)

    def _try_send(self, packet: bytes, fds: list[int]) -> bool:
        try:
            self.sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as why:
            if why.errno in (errno.ENOBUFS, errno.ETOOMANYREFS):
                return False
            # the helper is gone; its end is on its way and settles the job
        for fd in fds:
            os.close(fd)
        return True

    def _drain(self) -> None:
        while self.backlog:
            if not self._try_send(*self.backlog[0]):
                return
            self.backlog.popleft()
        self.spawner.loop.remove_writer(self.sock.fileno())

    def _read(self) -> bool:
        """One packet; False where there is none. The loop calls again while there are more."""
        try:
            packet = self.sock.recv(REPLIES_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            packet = b""
        if not packet:
            self._detach()
            # It is dead or about to be; a helper whose socket is closed serves nothing
            self._kill()
            return False
        if len(packet) % REPLY.size == 0:
            for kind, flag, stage, error, seq, pid, status, user, system, rss in REPLY.iter_unpack(packet):
                if kind == EXITED:
                    job = self.jobs.pop(seq, None)
                    if job is not None:
                        if not job.pid:  # over before the helper would have told of it
                            job.pid = pid
                            self.waiting -= 1
                            self.answered_at = self.spawner.loop.time()
                        job.exited(status, user, system, rss, bool(flag))
                else:
                    self._heard(kind, stage, error, seq, pid)
        return True

    def _heard(self, kind: int, stage: int, error: int, seq: int, pid: int) -> None:
        self.answered_at = self.spawner.loop.time()
        if kind == SPAWNED:
            self.waiting -= 1
            job = self.jobs.get(seq)
            if job is not None:
                job.spawned(pid)
        elif kind == FAILED:
            self.waiting -= 1
            job = self.jobs.pop(seq, None)
            if job is not None:
                job.failed(error, stage)
        elif kind == READY and not self.ready.done():
            if error:
                log.warning("protection_missing", extra={"what": "seccomp", "errno": error})
            self.ready.set_result(None)

    def _kill(self) -> None:
        if self.dead:  # collected: the pid may be another's by now
            return
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def check(self, now: float) -> None:
        """Ends a helper that does not answer any more, so that its place is taken."""
        if self.waiting and not self.closed and now - self.answered_at > ANSWER_SEC:
            self.end()

    def end(self) -> None:
        log.error("helper_stuck", extra={"helper": self.pid, "waiting": self.waiting})
        self._kill()

    def _detach(self) -> None:
        if self.closed:
            return
        self.closed = True
        loop = self.spawner.loop
        loop.remove_reader(self.sock.fileno())
        if self.backlog:
            loop.remove_writer(self.sock.fileno())
        self.sock.close()
        for _packet, fds in self.backlog:
            for fd in fds:
                os.close(fd)
        self.backlog.clear()

    def _died(self, status: int, _user: float, _system: float, _rss: int) -> None:
        self.dead = True
        self.process.returncode = os.waitstatus_to_exitcode(status)  # collected by us, not by Popen
        while not self.closed and self._read():  # what it said before its end
            pass
        self._detach()
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"a spawn helper ended at its start with {self.process.returncode}"))
            self.ready.exception()  # seen: the starter awaits it, later replacements are retried
        self.spawner.helper_died(self)

    def close(self) -> None:
        """The end of its socket tells the helper to kill what it started and go."""
        self._detach()


class Spawner:
    def __init__(
        self, reaper: Reaper, user: CommandUser, *, helpers: int, umask: int, nofile: int | None = None,
        cgroup_files: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`cgroup_files`: what a helper writes 0 to, to be where its commands begin."""
        self.reaper = reaper
        self.user = user
        self.umask = umask
        self.cgroup_files = list(cgroup_files)
        self.nofile = nofile if nofile is not None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._filter = seccomp.program().hex() if seccomp.supported() else ""
        self.last_descriptor = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_DESCRIPTORS
        self.loop: asyncio.AbstractEventLoop
        self.sweeps: Sweeps
        self._first: _Helper
        self._count = helpers
        self._helpers: dict[int, list[_Helper]] = {}  # by uid
        # 22 random bits, so that executors that share a pid namespace tell their commands apart
        self._seq = self._first_seq = MARK_MIN + (int.from_bytes(os.urandom(4)) >> 10 << 30)
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._alive = 0
        self._restarts: deque[float] = deque(maxlen=16)
        self._watch: asyncio.TimerHandle | None = None

    def begin(self, then: Callable[[], object] = lambda: None) -> None:
        """Starts the first helper; `ready` waits for it, and `then` is called once it is where it belongs."""
        self.loop = asyncio.get_running_loop()
        self.sweeps = Sweeps(self.loop)
        self._first = self._add(self.user)
        self._first.ready.add_done_callback(lambda _ready: then())

    async def ready(self) -> None:
        async with asyncio.timeout(READY_SEC):
            await asyncio.shield(self._first.ready)

    def _add(self, user: CommandUser) -> _Helper:
        helper = _Helper(self, user)
        self._helpers.setdefault(user.uid, []).append(helper)
        self._alive += 1
        self._idle.clear()
        return helper

    def identity(self, user: CommandUser, nofile: int) -> dict[str, object]:
        """What a process of ours needs to become that user (`spawn_helper.become`)."""
        return {
            "uid": user.uid, "gid": user.gid, "groups": list(user.groups), "umask": self.umask, "nofile": nofile,
            "filter": self._filter,
        }  # fmt: skip

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def spawn(
        self, job: Job, user: CommandUser, argv: list[bytes], env: list[bytes], cwd: bytes, stdin: int | None,
        stdout: int, stderr: int | None, script: int | None, *, at_once: bool = True,
        own_session: bool = True,
    ) -> None:  # fmt: skip
        """Starts a command; the descriptors become the spawner's. The outcome comes through `job`.

        Without `at_once` the job hears of its pid a moment later, or with its end. Without `own_session` it leads a
        process group only, and shares the processor with the other commands as one (see `spawn_helper`)."""
        helpers = self._helpers.get(user.uid)
        if not helpers:
            helper = self._add(user)
        else:
            helper = helpers[0]
            if len(helpers) > 1 and len(helpers[1].jobs) < len(helper.jobs):
                helper = helpers[1]
            if len(helper.jobs) >= CROWD:
                for other in helpers[2:]:
                    if len(other.jobs) < len(helper.jobs):
                        helper = other
            # When commands run at once; most pods never need a second one.
            if helper.waiting >= (1 if len(helpers) < 2 else CROWD) and len(helpers) < self._count:
                self._replace(user, self._count)
        fds = [stdout] if stdin is None else [stdin, stdout]
        if stderr is not None:
            fds.append(stderr)
        if script is not None:
            fds.append(script)
        env_sent, path = None, b""
        if env is not helper.env:  # mostly it is the same list as the last time, which the helper still has
            env_sent, path = env, _path_of(env)
        packet = marshal.dumps((
            job.seq, at_once, own_session, stdin is not None, stderr is not None, script is not None, argv, env_sent,
            path, cwd,
        ))  # fmt: skip
        if len(packet) > PACKET_BYTES:
            memory = os.memfd_create("sojourn-job", os.MFD_CLOEXEC)
            fds.append(memory)
            view = memoryview(packet)
            while view:
                view = view[os.write(memory, view) :]
            packet = b"m"
        helper.env = env
        helper.send(job, packet, fds)
        if self._watch is None:
            self._watch = self.loop.call_later(ANSWER_SEC, self._check)

    def _check(self) -> None:
        """Runs only while a job waits for its helper: an idle executor has no timer."""
        self._watch = None
        now = self.loop.time()
        waiting = False
        for helpers in self._helpers.values():
            for helper in helpers:
                helper.check(now)
                waiting = waiting or helper.waiting > 0
        if waiting and not self._closing:
            self._watch = self.loop.call_later(ANSWER_SEC / 3, self._check)

    def helper_died(self, helper: _Helper) -> None:
        self._alive -= 1
        if not self._alive:
            self._idle.set()
        self._helpers[helper.user.uid].remove(helper)
        jobs, helper.jobs = helper.jobs, {}
        if jobs:
            log.warning("helper_died", extra={"helper": helper.pid, "commands": len(jobs)})
        for job in jobs.values():
            if not job.pid:
                self._adopt_unknown(job)
            elif not self.reaper.adopt(job.pid, _orphaned(job)):
                job.lost()  # the helper had collected it and died before it said so
        if self._closing:
            return
        now = self.loop.time()
        self._restarts.append(now)
        burst = len(self._restarts) == self._restarts.maxlen and now - self._restarts[0] < 1.0
        self.loop.call_later(0.5 if burst else 0.0, self._replace, helper.user)

    def _replace(self, user: CommandUser, wanted: int = 1) -> None:
        if self._closing or len(self._helpers[user.uid]) >= wanted:
            return
        try:
            self._add(user)
        except OSError as why:  # no pid or memory left in the pod for the moment
            log.error("helper_start_failed", extra={"errno": why.errno})
            self.loop.call_later(0.5, self._replace, user)

    def _adopt_unknown(self, job: Job) -> None:
        """The helper died between taking the job and telling its pid: the command's mark says whether it runs."""

        def found(done: asyncio.Future[int]) -> None:
            pid = 0 if done.cancelled() or done.exception() is not None else done.result()
            pid = pid or self.reaper.collected(job.seq)
            if not pid:
                job.lost()
                return
            job.spawned(pid)
            if not self.reaper.adopt(pid, _orphaned(job)):
                job.lost()

        self.loop.run_in_executor(None, tree.find_marked, job.seq).add_done_callback(found)

    def give_up(self, seq: int) -> None:
        """That command is dead, and the helper that should have said so is stuck: its place is taken."""
        for helper in [helper for helpers in self._helpers.values() for helper in helpers]:
            if seq in helper.jobs:
                helper.end()

    def _is_ours(self, one: tree.Seen) -> bool:
        return one.pid != os.getpid() and self._first_seq < one.mark <= self._seq

    async def close(self) -> None:
        """Ends the helpers, and with them every command, before it returns; at most a few seconds."""
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        helpers = [helper for helpers in self._helpers.values() for helper in helpers]
        for helper in helpers:
            helper.close()
        try:
            async with asyncio.timeout(2.0):
                await self._idle.wait()
        except TimeoutError:
            await asyncio.to_thread(tree.kill_where, lambda one: one.session in {helper.pid for helper in helpers})
        self.sweeps.close()
        marked = await asyncio.to_thread(tree.kill_where, self._is_ours)
        if marked:
            log.warning("commands_killed_at_end", extra={"count": marked})


def _path_of(env: list[bytes]) -> bytes:
    path = DEFAULT_PATH
    for entry in env:
        if entry.startswith(b"PATH="):
            path = entry[5:]
    return path


def _orphaned(job: Job) -> Callable[[int, float, float, int], None]:
    def ended(status: int, user: float, system: float, rss: int) -> None:
        job.exited(status, user, system, rss, group_lives(job.pid))

    return ended
