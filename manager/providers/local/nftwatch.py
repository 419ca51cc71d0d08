"""Tells when somebody removes our table from the packet filter, as `nft flush ruleset` and reloads of firewalls do.

The kernel sends every change of the filter to who listens; nothing is polled."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

from manager.providers.local.ruleset import TABLE

_NETLINK_NETFILTER: Final = 12
_GROUP_NFTABLES: Final = 7
_DELETED_TABLE: Final = 10 << 8 | 2  # NFNL_SUBSYS_NFTABLES, NFT_MSG_DELTABLE
_TABLE_NAME: Final = 1  # NFTA_TABLE_NAME
_HEADER: Final = struct.Struct("=IHHII")  # struct nlmsghdr; a struct nfgenmsg of 4 bytes follows
_ATTRIBUTE: Final = struct.Struct("=HH")


class FilterWatch:
    """Calls `removed()` in the event loop, also where it may have missed something."""

    def __init__(self, removed: Callable[[], None]) -> None:
        self._removed = removed
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Also calls `removed`, for what has happened before. Does nothing where it has begun. Raises OSError."""
        if self._socket is not None:
            return
        listening = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_NETFILTER)
        try:
            listening.bind((0, 1 << (_GROUP_NFTABLES - 1)))
            asyncio.get_running_loop().add_reader(listening, self._readable)
        except BaseException:
            listening.close()
            raise
        self._socket = listening
        self._removed()

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            datagram = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as why:
            if why.errno == errno.ENOBUFS:  # more than fits: the kernel dropped some
                self._removed()
            return
        if TABLE in removed_tables(datagram):
            self._removed()


def removed_tables(datagram: bytes) -> Iterator[str]:
    """The names in a datagram of netlink messages; others are passed over."""
    at = 0
    while at + _HEADER.size <= len(datagram):
        length, kind, *_ = _HEADER.unpack_from(datagram, at)
        if length < _HEADER.size:
            return
        end, inner = min(at + length, len(datagram)), at + _HEADER.size + 4
        while kind == _DELETED_TABLE and inner + _ATTRIBUTE.size <= end:
            size, attribute = _ATTRIBUTE.unpack_from(datagram, inner)
            if attribute & 0x3FFF == _TABLE_NAME:
                yield datagram[inner + _ATTRIBUTE.size : inner + size].rstrip(b"\0").decode("ascii", "replace")
            inner += max(_ATTRIBUTE.size, (size + 3) & ~3)
        at += (length + 3) & ~3
