"""Judged members as one plain tar: what unpacks to exactly one tree, whoever unpacks it.

What a reader of single members cannot see is refused here: names that come twice, members below what is no directory,
hard links to what is no file before them. Parents that the archive leaves out are written before what is in them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from executor.tarpack import BLOCK_BYTES, pax_header, ustar_block
from executor.tarread import Member, Parts, TarRefused

_NOBODYS: Final = 0  # whose the files are only their pod knows: its command user's
_PARENT_MODE: Final = 0o755
_NAME_BYTES: Final = 100
_OCTAL_END: Final = 1 << 33
_TYPES: Final = {"file": b"0", "hardlink": b"1", "symlink": b"2", "directory": b"5"}

_Kind = Literal["implied", "directory", "file", "other"]


class Canonical:
    """Takes what a reader yields, in its order; gives a tar's bytes. Memory: some 100 bytes an entry, no names."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)  # so that nobody can make names that look like one
        self._seen: dict[int, _Kind] = {}
        self._left = 0
        self._padding = 0
        self.entries = 0
        self.file_bytes = 0

    def take(self, events: Iterable[Member | memoryview | bytes]) -> Iterator[bytes]:
        """Raises TarRefused."""
        for event in events:
            if isinstance(event, Member):
                yield from self._member(event)
            else:
                self._left -= len(event)
                yield bytes(event)
                if not self._left and self._padding:
                    yield bytes(self._padding)

    def finish(self) -> bytes:
        return bytes(2 * BLOCK_BYTES)

    def _member(self, member: Member) -> Iterator[bytes]:
        if not member.path:
            return  # the workspace's own directory is not the archive's to change
        for depth in range(1, len(member.path)):
            parent = member.path[:depth]
            known = self._seen.get(self._hash(parent))
            if known is None:
                self._note(parent, "implied")
                yield _header(parent, "directory", _PARENT_MODE, member.mtime)
            elif known not in ("implied", "directory"):
                raise TarRefused("lies below what is no directory in this archive", member=member.name, fault="path")
        known = self._seen.get(self._hash(member.path))
        if known is not None and not (member.kind == "directory" and known in ("implied", "directory")):
            raise TarRefused("comes twice", member=member.name)
        if member.kind == "hardlink":
            if not member.source or self._seen.get(self._hash(member.source)) != "file":
                shown = b"/".join(member.source).decode("utf-8", "replace")
                raise TarRefused(
                    f"is a hard link to {shown}, which is no file before it", member=member.name, fault="path"
                )
            self._note(member.path, "file")  # a link to it is a link to the file
        else:
            self._note(member.path, member.kind if member.kind in ("file", "directory") else "other")
        self._left, self._padding = member.size, -member.size % BLOCK_BYTES
        self.file_bytes += member.size
        target = member.target if member.kind == "symlink" else b"/".join(member.source)
        yield _header(member.path, member.kind, member.mode, member.mtime, member.size, target)

    def _note(self, path: Parts, kind: _Kind) -> None:
        self._seen[self._hash(path)] = kind
        self.entries += 1

    def _hash(self, path: Parts) -> int:
        """64 bits: two of a million names share them once in 37 million archives, and are then refused."""
        return int.from_bytes(hashlib.blake2b(b"/".join(path), digest_size=8, key=self._key).digest(), "big")


def _header(path: Parts, kind: str, mode: int, mtime: float, size: int = 0, target: bytes = b"") -> bytes:
    name = b"/".join(path)
    records = {}
    if mtime != int(mtime):
        records[b"mtime"] = b"%.9f" % mtime
    if len(name) > _NAME_BYTES:
        records[b"path"] = name
    if len(target) > _NAME_BYTES:
        records[b"linkpath"] = target
    if size >= _OCTAL_END:
        records[b"size"], size = b"%d" % size, 0
    block = ustar_block(
        name[:_NAME_BYTES], _TYPES[kind], size, mode, _NOBODYS, _NOBODYS, int(mtime), target[:_NAME_BYTES]
    )
    return (pax_header(records) if records else b"") + block
