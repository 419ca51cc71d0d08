"""Whose identity commands and file calls take on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommandUser:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str
