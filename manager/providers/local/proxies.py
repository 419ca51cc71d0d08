"""Ways out of pods that have no network: a listening socket for each, served by one child process for all of them.

The sockets are the manager's: where the child dies, the next one serves the same sockets. Where the manager ends, pods
live on without a way out until the next one opens theirs again. Of several managers of one data directory, one has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

import manager
from manager.egress import messages
from manager.providers.local import pod_forwarder
from manager.providers.local.deaths import Deaths
from manager.providers.local.network import FORWARDER, PROXY_SOCKET, OutboundSettings, PodNetwork
from manager.providers.local.processes import identify

log = logging.getLogger(__name__)

DIRECTORY: Final = "outbound"  # in a pod's directory; the pod sees it read-only
_LOCK: Final = "outbound.lock"
_BACKLOG: Final = 128
_END_SEC: Final = 2.0
_LEAST_PAUSE_SEC: Final = 0.2  # before a child is started again, doubled each time
_MOST_PAUSE_SEC: Final = 10.0
_STEADY_SEC: Final = 30.0  # a child that lived so long has not failed at its start


@dataclass
class _Served:
    network: PodNetwork
    listener: socket.socket
    lock: int

    def close(self) -> None:
        self.listener.close()
        os.close(self.lock)


def prepare(home: Path) -> Path:
    """What the pod sees of its way out: the directory, with the program that carries connections. Raises OSError."""
    directory = home / DIRECTORY
    directory.mkdir(mode=0o755)
    shutil.copyfile(pod_forwarder.__file__, directory / FORWARDER)
    (directory / FORWARDER).chmod(0o644)
    return directory


class Proxies:
    """`open` and `close` are called in the event loop, any number of times."""

    def __init__(self, settings: OutboundSettings) -> None:
        self._settings = settings
        self._served: dict[str, _Served] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._outbox: deque[tuple[messages.Message, socket.socket | None]] = deque()  # as many as there are pods
        self._started_at = 0.0
        self._pause_sec = _LEAST_PAUSE_SEC
        self._deaths = Deaths(self._died)
        self._restart: asyncio.TimerHandle | None = None

    def open(self, pod: str, home: Path, network: PodNetwork) -> None:
        """Does nothing where it is open, here or by another manager. Raises OSError."""
        if pod in self._served:
            return
        served = _listen(home, network)
        if served is None:
            return
        self._served[pod] = served
        if self._child is None:
            if self._restart is None:
                self._start()
        else:
            self._send_open(pod, served)

    def close(self, pod: str) -> None:
        if (served := self._served.pop(pod, None)) is not None:
            served.close()
            self._send(messages.Close(pod))

    async def aclose(self) -> None:
        """The child ends with its control socket."""
        if self._restart is not None:
            self._restart.cancel()
        await self._deaths.close()
        for served in self._served.values():
            served.close()
        self._served.clear()
        self._hang_up()
        if (child := self._child) is not None:
            self._child = None
            await asyncio.to_thread(_end, child)

    def _start(self) -> None:
        self._restart = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        root = str(Path(manager.__file__).parent.parent)
        script = f"import runpy, sys; sys.path.insert(0, {root!r}); "
        script += "runpy.run_module('manager.egress', run_name='__main__', alter_sys=True)"
        with theirs:
            # In a session of its own: Ctrl-C is the manager's, which still needs it to the end.
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", script, str(theirs.fileno())], env={"LANG": "C.UTF-8"}, cwd="/",
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._control, self._started_at = ours, time.monotonic()
        process = identify(self._child.pid)
        assert process is not None  # ours to collect, so its pid is still there
        self._deaths.add(str(self._child.pid), process)
        refused = tuple(str(network) for network in self._settings.refused)
        self._send(messages.Start(ports=self._settings.ports, refused=refused))
        for pod, served in self._served.items():
            self._send_open(pod, served)

    def _send_open(self, pod: str, served: _Served) -> None:
        network = served.network
        message = messages.Open(pod=pod, bytes_per_sec=network.bytes_per_sec, connections=network.connections)
        self._send(message, served.listener)

    def _send(self, message: messages.Message, listener: socket.socket | None = None) -> None:
        if self._control is not None:
            self._outbox.append((message, listener))
            if len(self._outbox) == 1:
                self._flush()

    def _flush(self) -> None:
        assert self._control is not None
        while self._outbox:
            message, listener = self._outbox[0]
            try:
                if listener is None or listener.fileno() != -1:  # else closed meanwhile
                    descriptors = [] if listener is None else [listener.fileno()]
                    socket.send_fds(self._control, [msgspec.json.encode(message)], descriptors)
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._control, self._flush)
                return
            except OSError:
                return self._hang_up()  # it has died, and the next one is told everything
            self._outbox.popleft()
        asyncio.get_running_loop().remove_writer(self._control)

    def _hang_up(self) -> None:
        self._outbox.clear()
        if self._control is not None:
            asyncio.get_running_loop().remove_writer(self._control)
            self._control.close()
            self._control = None

    def _died(self, _name: str) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        code = child.wait()
        self._hang_up()
        if time.monotonic() - self._started_at > _STEADY_SEC:
            self._pause_sec = _LEAST_PAUSE_SEC
        log.error("outbound_proxy_ended", extra={"exit_code": code, "again_in_sec": self._pause_sec})
        self._restart = asyncio.get_running_loop().call_later(self._pause_sec, self._start)
        self._pause_sec = min(_MOST_PAUSE_SEC, self._pause_sec * 2)


def _listen(home: Path, network: PodNetwork) -> _Served | None:
    """None where another manager has it."""
    with contextlib.ExitStack() as stack:
        lock = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        # By descriptor: the path itself may be too long for a socket.
        directory = os.open(home / DIRECTORY, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(PROXY_SOCKET, dir_fd=directory)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.callback(listener.close)
            listener.bind(f"/proc/self/fd/{directory}/{PROXY_SOCKET}")
            os.chmod(PROXY_SOCKET, 0o666, dir_fd=directory)  # whoever of the pod; nobody else can enter the directory
            listener.listen(_BACKLOG)
        finally:
            os.close(directory)
        stack.pop_all()
        return _Served(network, listener, lock)


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(_END_SEC)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
