"""A directory as a tar stream, in constant memory, valid whatever happens to its files meanwhile.

A file is announced with the size that it has when its turn comes, and just so many bytes follow: one that shrinks is
filled up with zeros, one that grows is cut, and both are told of, as are files that may not be read. FIFOs, sockets and
devices are left out and counted. The report is the last thing in the stream: a pax comment of the directory itself,
which every tar can read past. Hard links come as files of their own. Blocking; one thread at a time. Standard library
only: the client's copy, `sojourn/tarpack.py`, is this very file (a test compares them).
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Final

BLOCK_BYTES: Final = 512
COMMENT_MARK: Final = "sojourn: "  # before the report's JSON
CHUNK_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 128  # one descriptor a level stays open meanwhile
_OCTAL_END: Final = 1 << 33
_NAMED: Final = 50  # names of each sort in the report
_OURS: Final = re.compile(rb"\.sojourn-[0-9a-f]{24}\.part\Z")  # uploads that are not done
_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_READ_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Skip = Callable[[bytes, tuple[bytes, ...]], str]  # of a link's target and place: why it is left out, or ""


class PackLimit(Exception):
    """The directory holds more than may be packed. The stream has no end, so that nobody takes it for whole."""


class Named:
    """How many, and which the first were."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []

    def add(self, name: bytes) -> None:
        self.count += 1
        if len(self.names) < _NAMED:
            self.names.append(name.decode("utf-8", "replace")[:400])


class Packer:
    def __init__(
        self, directory: int, *, max_bytes: int = 64 << 30, max_entries: int = 10_000_000, skip_link: Skip | None = None
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._skip_link = skip_link
        self.entries = 0
        self.file_bytes = 0
        self.changed = Named()  # while they were read
        self.unreadable = Named()
        self.special = Named()  # FIFOs, sockets, devices
        self.links = Named()  # that `skip_link` left out
        self.too_deep = Named()

    @property
    def is_whole(self) -> bool:
        told = (self.changed, self.unreadable, self.special, self.links, self.too_deep)
        return not any(one.count for one in told)

    def report(self) -> dict[str, object]:
        """Counts, and the names behind those that are a warning."""
        found: dict[str, object] = {"entries": self.entries, "bytes": self.file_bytes}
        for what in ("changed", "unreadable", "special", "links", "too_deep"):
            named: Named = getattr(self, what)
            if named.count:
                found[what] = {"count": named.count, "names": named.names}
        return found

    def chunks(self) -> Generator[bytes, None, None]:
        """The stream in pieces of CHUNK_BYTES or a little more. Raises OSError for the directory itself, PackLimit."""
        kept = bytearray()
        with closing(self._blocks()) as blocks:
            for block in blocks:
                kept += block
                if len(kept) >= CHUNK_BYTES:
                    yield bytes(kept)
                    kept.clear()
        yield bytes(kept)

    def _blocks(self) -> Generator[bytes, None, None]:
        fd = os.open(b".", _READ_DIRECTORY, dir_fd=self._directory)
        try:
            yield from self._inside(fd, ())
            status = os.fstat(fd)
        finally:
            os.close(fd)
        comment = COMMENT_MARK + json.dumps(self.report(), ensure_ascii=True)
        yield pax_header({b"comment": comment.encode()})
        yield header(b"./", b"5", 0, status)
        yield bytes(2 * BLOCK_BYTES)

    def _inside(self, fd: int, above: tuple[bytes, ...]) -> Iterator[bytes]:
        with os.scandir(fd) as scan:
            for entry in scan:
                name = os.fsencode(entry.name)
                if _OURS.match(name):
                    continue
                parts = (*above, name)
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue  # gone since its name was read
                if self.entries >= self._max_entries:
                    raise PackLimit(f"more than {self._max_entries} entries")
                yield from self._one(fd, name, parts, status)

    def _one(self, fd: int, name: bytes, parts: tuple[bytes, ...], status: os.stat_result) -> Iterator[bytes]:
        path = b"/".join(parts)
        if stat.S_ISREG(status.st_mode):
            yield from self._file(fd, name, path)
        elif stat.S_ISDIR(status.st_mode):
            yield from self._one_directory(fd, name, parts, path)
        elif stat.S_ISLNK(status.st_mode):
            try:
                target = os.readlink(name, dir_fd=fd)
            except OSError:
                return
            if self._skip_link is not None and self._skip_link(target, parts):
                self.links.add(path)
                return
            self.entries += 1
            yield header(path, b"2", 0, status, target)
        else:
            self.special.add(path)

    def _one_directory(self, fd: int, name: bytes, parts: tuple[bytes, ...], path: bytes) -> Iterator[bytes]:
        try:
            inner = os.open(name, _READ_DIRECTORY, dir_fd=fd)
        except OSError:
            self.unreadable.add(path)
            return
        try:
            self.entries += 1
            yield header(path + b"/", b"5", 0, os.fstat(inner))
            if len(parts) < MAX_DEPTH:
                yield from self._inside(inner, parts)
            else:
                self.too_deep.add(path)
        finally:
            os.close(inner)

    def _file(self, fd: int, name: bytes, path: bytes) -> Iterator[bytes]:
        try:
            file = os.open(name, _READ_FILE, dir_fd=fd)
        except OSError:
            self.unreadable.add(path)
            return
        try:
            before = os.fstat(file)
            if not stat.S_ISREG(before.st_mode):
                self.special.add(path)
                return
            size = before.st_size
            if self.file_bytes + size > self._max_bytes:
                raise PackLimit(f"more than {self._max_bytes} bytes in its files")
            self.entries += 1
            self.file_bytes += size
            yield header(path, b"0", size, before)
            left, is_whole = size, True
            while left:
                data = b""
                if is_whole:
                    try:
                        data = os.read(file, min(left, CHUNK_BYTES))
                    except OSError:
                        pass
                if not data:
                    is_whole = False
                    data = bytes(min(left, CHUNK_BYTES))
                yield data
                left -= len(data)
            if size % BLOCK_BYTES:
                yield bytes(-size % BLOCK_BYTES)
            after = os.fstat(file)
            if not is_whole or (after.st_size, after.st_ctime_ns) != (size, before.st_ctime_ns):
                self.changed.add(path)
        finally:
            os.close(file)


# ── headers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def header(path: bytes, kind: bytes, size: int, status: os.stat_result, target: bytes = b"") -> bytes:
    """A member's header, after those that what it cannot say needs. Names are kept byte by byte."""
    before, records = b"", dict[bytes, bytes]()
    for text, key, long_kind in ((path, b"path", b"L"), (target, b"linkpath", b"K")):
        if len(text) <= 100:
            continue
        if _is_utf8(text):
            records[key] = text
        else:  # pax promises UTF-8, GNU's long names promise nothing
            before += ustar_block(b"././@LongLink", long_kind, len(text) + 1, 0, 0, 0, 0) + padded(text + b"\0")
    if size >= _OCTAL_END:
        records[b"size"] = str(size).encode()
        size = 0
    if records:
        before += pax_header(records)
    mtime = min(max(int(status.st_mtime), 0), _OCTAL_END - 1)
    mode = stat.S_IMODE(status.st_mode)
    return before + ustar_block(path[:100], kind, size, mode, status.st_uid, status.st_gid, mtime, target[:100])


def pax_header(records: dict[bytes, bytes]) -> bytes:
    """The extended header that says more about the member after it."""
    data = b"".join(_record(key, value) for key, value in records.items())
    return ustar_block(b"././@PaxHeader", b"x", len(data), 0o644, 0, 0, 0) + padded(data)


def _record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    length = len(body) + len(str(length))  # the length counts its own digits
    return str(length).encode() + body


def ustar_block(
    name: bytes, kind: bytes, size: int, mode: int, uid: int, gid: int, mtime: int, target: bytes = b""
) -> bytes:
    """One ustar header."""
    uid, gid = (number if number < 1 << 21 else 0 for number in (uid, gid))  # more than seven octal digits
    fields = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0        %b%bustar\x0000" % (
        name.ljust(100, b"\0"), mode, uid, gid, size, mtime, kind, target.ljust(100, b"\0"),
    )  # fmt: skip
    block = fields.ljust(BLOCK_BYTES, b"\0")
    halves = (zlib.adler32(half) & 0xFFFF for half in (block[:256], block[256:]))  # of so few bytes: their sum, plus 1
    return block[:148] + b"%06o\0 " % (sum(halves) - 2) + block[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK_BYTES)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
