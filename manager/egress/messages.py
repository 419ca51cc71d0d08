"""What the manager tells the process that dials for pods."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Final

import msgspec

from manager.egress.dial import DialRules

MESSAGE_BYTES: Final = 65_536


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The rules for every pod."""

    ports: tuple[int, ...]
    refused: tuple[str, ...]

    def rules(self) -> DialRules:
        return DialRules(frozenset(self.ports), tuple(ip_network(text) for text in self.refused))


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Serve a pod, on the socket that comes along."""

    pod: str
    bytes_per_sec: int
    connections: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    pod: str


Message = Start | Open | Close
