"""The process that dials for pods: `python -m manager.egress FD`. A child of the manager, which hands it the sockets.

Descriptor FD is a socket of messages: one JSON object each (`Start` first, then `Open` and `Close`), with the pod's
listening socket beside an `Open`. At its end, with the manager's, everything here ends. It holds no secret and, started
as root, becomes nobody before the first message is read.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - while the interpreter's files can still be read
import logging
import os
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from manager.egress.dial import LOOKUPS_AT_ONCE, DialRules
from manager.egress.messages import MESSAGE_BYTES, Close, Message, Open, Start
from manager.egress.proxy import PodProxy

NOBODY: Final = 65534
DESCRIPTORS: Final = 16_384  # of all pods together: two a connection, each of which may hold 100 KiB


class Proxies:
    """One proxy for each pod, opened and closed by the messages of `control`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._threads = ThreadPoolExecutor(LOOKUPS_AT_ONCE, thread_name_prefix="look-up")
        self._rules = DialRules()
        self._proxies: dict[str, PodProxy] = {}
        self._messages: asyncio.Queue[tuple[Message, list[int]] | None] = asyncio.Queue()

    async def run(self) -> None:
        """Returns when the manager has gone."""
        asyncio.get_running_loop().add_reader(self._control, self._readable)
        while (received := await self._messages.get()) is not None:
            message, descriptors = received
            if isinstance(message, Start):
                self._rules = message.rules()
            elif isinstance(message, Close):
                if (proxy := self._proxies.pop(message.pod, None)) is not None:
                    await proxy.close()
            else:
                self._open(message, descriptors)

    def _open(self, message: Open, descriptors: list[int]) -> None:
        listener = socket.socket(fileno=descriptors[0])
        self._proxies[message.pod] = proxy = PodProxy(
            listener, self._rules, self._threads, bytes_per_sec=message.bytes_per_sec, connections=message.connections
        )
        proxy.start()

    def _readable(self) -> None:
        try:
            raw, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            raw, descriptors = b"", []
        if not raw:
            asyncio.get_running_loop().remove_reader(self._control)
            self._messages.put_nowait(None)
            return
        self._messages.put_nowait((msgspec.json.decode(raw, type=Message), descriptors))


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(message)s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS), hard))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        asyncio.run(Proxies(control).run())
    sys.stderr.flush()
    os._exit(0)  # not waiting for lookups under way


if __name__ == "__main__":
    sys.exit(main())
