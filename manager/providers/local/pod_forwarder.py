"""In a pod without a network of its own: carries connections to 127.0.0.1 over to the proxy's Unix socket.

A program of the standard library alone, copied into the pod and started there beside the executor:
`pod_forwarder.py SOCKET PORT`. As a pod's root it becomes nobody first, so that commands cannot touch it."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys

PIECE_BYTES = 65_536
PAIRS = 1024
NOBODY = 65534
AWAY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 39\r\nConnection: close\r\n\r\n"
AWAY += b"sojourn: no outbound network right now\n"


class Side:
    """One of a pair: `held` is what its peer has sent and it has not yet taken."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.held = b""
        self.ended = False  # sends no more
        self.told = False  # has been told that its peer sends no more
        self.events = 0
        self.peer = self


class Forwarder:
    def __init__(self, listener: socket.socket, path: str) -> None:
        self.listener, self.path = listener, path
        self.selector = selectors.DefaultSelector()
        self.pairs = 0

    def run(self) -> None:
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        while True:
            for key, events in self.selector.select():
                if key.data is None:
                    self.accept()
                    continue
                side: Side = key.data
                if side.connection.fileno() == -1:
                    continue  # its peer's turn came first
                try:
                    if events & selectors.EVENT_READ:
                        self.take(side)
                    if events & selectors.EVENT_WRITE:
                        self.give(side)
                    self.watch(side)
                    self.watch(side.peer)
                except OSError:
                    self.close(side)

    def accept(self) -> None:
        try:
            client, _ = self.listener.accept()
        except OSError:
            return
        proxy = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.setblocking(False)
        proxy.setblocking(False)
        try:
            if self.pairs >= PAIRS:
                raise OSError(errno.EMFILE, "too many")
            proxy.connect(self.path)
        except OSError:
            try:
                client.send(AWAY)
            except OSError:
                pass
            client.close()
            proxy.close()
            return
        one, other = Side(client), Side(proxy)
        one.peer, other.peer = other, one
        self.pairs += 1
        self.watch(one)
        self.watch(other)

    def take(self, side: Side) -> None:
        try:
            piece = side.connection.recv(PIECE_BYTES)
        except BlockingIOError:
            return
        if piece:
            side.peer.held = piece
        else:
            side.ended = True
        self.give(side.peer)

    def give(self, side: Side) -> None:
        if side.held:
            try:
                side.held = side.held[side.connection.send(side.held) :]
            except BlockingIOError:
                return
        if not side.held and side.peer.ended and not side.told:
            side.told = True
            side.connection.shutdown(socket.SHUT_WR)

    def watch(self, side: Side) -> None:
        if side.told and side.peer.told:
            return self.close(side)
        # Nothing more is read from one until the other has taken what there is.
        wanted = selectors.EVENT_READ if not side.ended and not side.peer.held else 0
        if side.held:
            wanted |= selectors.EVENT_WRITE
        if wanted == side.events or side.connection.fileno() == -1:
            return
        if not side.events:
            self.selector.register(side.connection, wanted, side)
        elif not wanted:
            self.selector.unregister(side.connection)
        else:
            self.selector.modify(side.connection, wanted, side)
        side.events = wanted

    def close(self, side: Side) -> None:
        if side.connection.fileno() == -1:
            return
        self.pairs -= 1
        for one in (side, side.peer):
            if one.events:
                self.selector.unregister(one.connection)
                one.events = 0
            one.connection.close()


def main() -> None:
    path, port = sys.argv[1], int(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", port), backlog=256)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    os.closerange(0, listener.fileno())
    os.closerange(listener.fileno() + 1, 1024)
    os.chdir("/")
    Forwarder(listener, path).run()


if __name__ == "__main__":
    main()
