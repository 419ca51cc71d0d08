"""Reads a tar stream as it comes, in constant memory, and refuses what a directory must not be made from.

Knows ustar, pax, GNU long names and old v7 headers. Pure: it touches no file, so it can be fuzzed, and what it lets
through holds whatever is done with it afterwards: names lie below the archive's root, and so does all that a link can
lead to. Standard library only: the client's copy, `sojourn/tarread.py`, is this very file (a test compares them).

Why not `tarfile`: its `data` filter resolves links with realpath(), which an archive can mislead (CVE-2025-4517).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

BLOCK_BYTES: Final = 512
MAX_NAME_BYTES: Final = 255  # of one component
MAX_META_BYTES: Final = 1 << 20  # of one pax header: a sane one has a few hundred
MAX_META_HEADERS: Final = 8  # before one member
_MAX_RECORDS: Final = 1024
_SKIPPED_NAMES: Final = 50
_OCTAL_END: Final = 1 << 33  # the first size that the header's eleven octal digits cannot say
_LAST_SEC: Final = 1 << 33  # of a modification time: the year 2242

Parts = tuple[bytes, ...]
Kind = Literal["file", "directory", "symlink", "hardlink", "fifo"]  # the last in a layer only
Fault = Literal["malformed", "path", "unsupported", "limit"]


class TarRefused(ValueError):
    """Nothing of the archive may be used. `member` is the name as it stands in the archive, b"" where none is known."""

    def __init__(self, why: str, *, member: bytes = b"", fault: Fault = "malformed", limit: int | None = None) -> None:
        name = member.decode("utf-8", "replace")
        self.shown = name if len(name) <= 200 else f"{name[:100]}...{name[-97:]}"
        super().__init__(f"{self.shown}: {why}" if member else why)
        self.member = member
        self.fault: Fault = fault
        self.limit = limit


@dataclass(frozen=True)
class TarLimits:
    entries: int = 500_000
    total_bytes: int = 64 << 30  # of all files together, unpacked
    file_bytes: int = 8 << 30
    depth: int = 128  # components of a name
    path_bytes: int = 4096
    hollow_entries: int = 20_000  # directories and empty files, where nine in ten entries are such


@dataclass(frozen=True)
class Member:
    """One entry; the `size` bytes of a file follow it."""

    path: Parts  # below the archive's root; () is the root itself, always a directory
    kind: Kind
    size: int
    mode: int  # permission bits only: no set-id, no sticky
    mtime: float  # seconds since 1970
    target: bytes = b""  # a symlink's text
    source: Parts = ()  # the member that a hard link names
    comment: bytes = b""

    @property
    def name(self) -> bytes:
        return b"/".join(self.path) or b"."


@dataclass
class _Meta:
    """What headers before a member say about it."""

    path: bytes | None = None
    link: bytes | None = None
    size: int | None = None
    mtime: float | None = None
    comment: bytes = b""
    headers: int = 0


class TarReader:
    """Feed it the stream in any pieces, then `finish`. Both raise TarRefused; after that it is of no use."""

    def __init__(self, limits: TarLimits | None = None, *, skip_outward_links: bool = False) -> None:
        """`skip_outward_links`: symlinks that could lead out are left out and counted, not a reason to refuse all."""
        self._limits = limits or TarLimits()
        self._skip_outward_links = skip_outward_links
        self._block = bytearray()
        self._left = 0  # bytes of the file under way
        self._padding = 0
        self._meta = _Meta()
        self._meta_kind = b""
        self._meta_left = 0
        self._meta_data = bytearray()
        self._zero_blocks = 0
        self._hollow = 0
        self.entries = 0
        self.total_bytes = 0
        self.skipped_links = 0
        self.skipped_names: list[bytes] = []  # the first of them

    def feed(self, data: bytes | memoryview) -> Iterator[Member | memoryview]:
        """Members, each followed by its content in pieces."""
        view, at, end = memoryview(data), 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                yield view[at : at + step]
            elif self._meta_left:
                step = min(self._meta_left, end - at)
                self._meta_left -= step
                self._meta_data += view[at : at + step]
                if not self._meta_left:
                    self._take_meta()
            elif self._padding:
                step = min(self._padding, end - at)
                self._padding -= step
            elif self._zero_blocks == 2:
                if bytes(view[at:]).strip(b"\0"):
                    raise TarRefused("there is data after the archive's end")
                return
            else:
                step = min(BLOCK_BYTES - len(self._block), end - at)
                self._block += view[at : at + step]
                if len(self._block) == BLOCK_BYTES:
                    block = bytes(self._block)
                    self._block.clear()
                    member = self._take_header(block)
                    if member is not None:
                        yield member
            at += step

    def finish(self) -> None:
        if self._left or self._padding or self._meta_left or self._block:
            raise TarRefused("the archive is cut off")
        if not self._zero_blocks:
            raise TarRefused("the archive is cut off: its end mark is missing")

    # ── headers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_header(self, block: bytes) -> Member | None:
        if not any(block):
            if self._meta.path is not None or self._meta.link is not None or self._meta.size is not None:
                raise TarRefused("the archive is cut off: a long name or pax header has no member")
            self._zero_blocks += 1
            return None
        if self._zero_blocks:
            raise TarRefused("there is data after the archive's end")
        _check_sum(block)
        kind = block[156:157]
        if kind in (b"x", b"g", b"L", b"K"):
            self._begin_meta(kind, number_of(block[124:136], "size"))
            return None
        member = self._member(block, kind)
        self._meta = _Meta()
        self.entries += 1
        if self.entries > self._limits.entries:
            raise self._over(member.name, "entries", self._limits.entries)
        if member.size > self._limits.file_bytes:
            raise self._over(member.name, "bytes in one file", self._limits.file_bytes)
        if member.kind == "directory" or (member.kind == "file" and not member.size):
            self._hollow += 1
            if self._hollow > self._limits.hollow_entries and self._hollow * 10 > self.entries * 9:
                raise self._over(
                    member.name, "directories and empty files with hardly any other", self._limits.hollow_entries
                )
        self.total_bytes += member.size
        if self.total_bytes > self._limits.total_bytes:
            raise self._over(member.name, "bytes in all files together", self._limits.total_bytes)
        self._left, self._padding = member.size, -member.size % BLOCK_BYTES
        why = self._why_outward(member)
        if why:
            if not self._skip_outward_links:
                target = member.target[:80].decode("utf-8", "replace")
                raise TarRefused(f"its target {target!r} {why}", member=member.name, fault="path")
            self.skipped_links += 1
            if len(self.skipped_names) < _SKIPPED_NAMES:
                self.skipped_names.append(member.name)
            return None
        return member

    def _why_outward(self, member: Member) -> str:
        return leads_out(member.target, member.path) if member.kind == "symlink" else ""

    def _over(self, name: bytes, what: str, limit: int) -> TarRefused:
        return TarRefused(f"the archive is over the limit of {limit} {what}", member=name, fault="limit", limit=limit)

    def _begin_meta(self, kind: bytes, size: int) -> None:
        self._meta.headers += 1
        if self._meta.headers > MAX_META_HEADERS:
            raise TarRefused(f"more than {MAX_META_HEADERS} long-name or pax headers stand before one member")
        bound = MAX_META_BYTES if kind in (b"x", b"g") else self._limits.path_bytes + 1
        if size > bound:
            raise TarRefused(f"a name or pax header has {size} bytes, over the limit of {bound}", fault="limit")
        self._meta_kind, self._meta_left, self._padding = kind, size, -size % BLOCK_BYTES
        if not size:
            self._take_meta()

    def _take_meta(self) -> None:
        data = bytes(self._meta_data)
        self._meta_data.clear()
        meta, kind = self._meta, self._meta_kind
        if kind == b"L":
            meta.path = data.removesuffix(b"\0") if meta.path is None else meta.path  # a pax path before it wins
        elif kind == b"K":
            meta.link = data.removesuffix(b"\0") if meta.link is None else meta.link
        else:
            self._take_records(parse_pax(data), of_all=kind == b"g")

    def _take_records(self, records: dict[bytes, bytes], of_all: bool) -> None:
        meta = self._meta
        for key, value in records.items():
            if key.startswith((b"GNU.sparse.", b"SCHILY.realsize", b"SUN.holesdata")):
                raise TarRefused("holds a sparse file; pack it without --sparse", fault="unsupported")
            if key not in (b"path", b"linkpath", b"size", b"mtime", b"comment") or not value:
                continue
            if of_all:
                if key in (b"path", b"linkpath", b"size"):
                    raise TarRefused(f"a global pax header gives every member the same {key.decode()}")
            elif key == b"path":
                meta.path = value
            elif key == b"linkpath":
                meta.link = value
            elif key == b"comment":
                meta.comment = value
            elif key == b"mtime":
                meta.mtime = _decimal(value)
            else:
                if not value.isdigit() or len(value) > 19:
                    raise TarRefused(f"a pax header says {value[:20]!r} for a size", member=meta.path or b"")
                meta.size = int(value)

    def _member(self, block: bytes, kind: bytes) -> Member:
        meta = self._meta
        raw = meta.path if meta.path is not None else header_name(block)
        link = meta.link if meta.link is not None else text_of(block[157:257], raw)
        size = number_of(block[124:136], "size", raw)
        if meta.size is not None:
            if meta.size != size and meta.size < _OCTAL_END:  # a writer has reason to leave the field for larger ones
                raise TarRefused("its header and its pax header differ about its size", member=raw)
            size = meta.size
        mode = number_of(block[100:108], "mode", raw) & 0o777
        mtime = meta.mtime if meta.mtime is not None else float(number_of(block[136:148], "mtime", raw, signed=True))
        mtime = min(max(mtime, 0.0), float(_LAST_SEC))
        parts = name_parts(raw, self._limits)
        is_file = kind in (b"0", b"\0", b"7")
        if kind == b"5" or (is_file and raw.endswith(b"/")):  # before ustar a directory was told by its slash
            if size:
                raise TarRefused("a directory with content", member=raw)
            return Member(parts, "directory", 0, mode, mtime, comment=meta.comment)
        if kind not in _KINDS:
            what = _REFUSED.get(kind, f"an entry of the unknown type {kind!r}")
            raise TarRefused(f"is {what}; files, directories and links can be unpacked", member=raw, fault=(
                "malformed" if kind not in _REFUSED else "unsupported"
            ))  # fmt: skip
        if not parts:
            raise TarRefused("the archive's root can only be a directory", member=raw, fault="path")
        if is_file:
            return Member(parts, "file", size, mode, mtime, comment=meta.comment)
        if size:
            raise TarRefused("a link with content", member=raw)
        if kind == b"2":
            return Member(parts, "symlink", 0, mode, mtime, target=link, comment=meta.comment)
        try:
            source = name_parts(link, self._limits)
        except TarRefused as why:
            raise TarRefused(f"is a hard link to {why}", member=raw, fault="path") from None
        return Member(parts, "hardlink", 0, mode, mtime, source=source, comment=meta.comment)


_KINDS: Final = (b"0", b"\0", b"7", b"1", b"2", b"5")
_REFUSED: Final = {
    b"3": "a character device", b"4": "a block device", b"6": "a FIFO", b"S": "a sparse file",
    b"M": "a part of a file from another volume", b"D": "a directory dump", b"V": "a volume's label",
}  # fmt: skip


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────


def name_parts(name: bytes, limits: TarLimits) -> Parts:
    """The components below the archive's root; () for the root. Raises TarRefused for a name that leads elsewhere."""
    if not name:
        raise TarRefused("a member has no name", fault="path")
    if b"\0" in name:
        raise TarRefused("a NUL stands in the name", member=name, fault="path")
    if len(name) > limits.path_bytes:
        raise TarRefused(f"the name is longer than {limits.path_bytes} bytes", member=name, fault="path")
    if name.startswith(b"/"):
        raise TarRefused("the name is absolute", member=name, fault="path")
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise TarRefused("'..' stands in the name", member=name, fault="path")
    if any(len(part) > MAX_NAME_BYTES for part in parts):
        raise TarRefused(f"a component is longer than {MAX_NAME_BYTES} bytes", member=name, fault="path")
    if len(parts) > limits.depth:
        raise TarRefused(f"lies over {limits.depth} levels deep", member=name, fault="limit", limit=limits.depth)
    return parts


def leads_out(target: bytes, link: Parts) -> str:
    """Why a symlink (at `link`) could lead out of the archive's root, or "".

    `..` may only stand at the target's beginning: there it climbs real directories, which are counted. Behind a name
    it would climb from wherever that name, itself a link perhaps, leads."""
    if not target or b"\0" in target:
        return "is no path"
    if len(target) > 4095:
        return "is longer than 4095 bytes"
    if target.startswith(b"/"):
        return "is absolute"
    ups, below = 0, False
    for part in target.split(b"/"):
        if part == b"..":
            if below:
                return "climbs with '..' behind a name, which may itself be a link"
            ups += 1
        elif part not in (b"", b"."):
            below = True
    return "leads out of the archive" if ups > len(link) - 1 else ""


# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_pax(data: bytes) -> dict[bytes, bytes]:
    """`length key=value\\n`, repeated. Raises TarRefused."""
    records: dict[bytes, bytes] = {}
    at, count = 0, 0
    while at < len(data):
        if data[at] == 0 and not data[at:].strip(b"\0"):
            break  # padded inside its own size
        space = data.find(b" ", at, at + 12)
        digits = data[at:space] if space > at else b""
        length = int(digits) if digits.isdigit() else 0
        record = data[space + 1 : at + length]
        key, equals, value = record[:-1].partition(b"=")
        whole = space + 1 < at + length <= len(data) and record.endswith(b"\n")
        if not whole or not equals or not key or b"\0" in key:
            raise TarRefused("a pax header is malformed")
        count += 1
        if count > _MAX_RECORDS:
            raise TarRefused(f"a pax header has more than {_MAX_RECORDS} records", fault="limit")
        records[key] = value
        at += length
    return records


def sum_of(data: bytes | memoryview) -> int:
    """Of at most 256 bytes: the low half of their Adler-32, a twentieth of the time that sum() takes."""
    return (zlib.adler32(data) & 0xFFFF) - 1


def _check_sum(block: bytes) -> None:
    said = number_of(block[148:156], "checksum")
    unsigned = sum_of(block[:148]) + 8 * 32 + sum_of(block[156:334]) + sum_of(block[334:])
    if said == unsigned:
        return
    high = sum(1 for byte in block if byte > 127) - sum(1 for byte in block[148:156] if byte > 127)
    if said != unsigned - 256 * high:  # some old writers summed signed characters
        raise TarRefused("no tar archive, or a damaged one: a header's checksum is wrong")


def header_name(block: bytes) -> bytes:
    name = text_of(block[:100])
    # GNU's own format keeps other things where POSIX has the prefix.
    prefix = text_of(block[345:500], name) if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def text_of(field: bytes, member: bytes = b"") -> bytes:
    text, _, rest = field.partition(b"\0")
    if rest.strip(b"\0"):
        raise TarRefused("a NUL stands in a name", member=member or text, fault="path")
    return text


def number_of(field: bytes, what: str, member: bytes = b"", *, signed: bool = False) -> int:
    """Octal digits, or base 256 where the first bit is set. Raises TarRefused, also for a negative one."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else int.from_bytes(field, "big")
        value = value if field[0] == 0xFF else value - (0x80 << 8 * (len(field) - 1))
        if value < 0 and not signed:
            raise TarRefused(f"a header has a negative {what}", member=member)
        return value
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise TarRefused(f"no tar archive, or a damaged one: a header's {what} is no number", member=member)
    return int(digits, 8) if digits else 0


def _decimal(value: bytes) -> float:
    text = value.decode("ascii", "replace")
    whole, _, fraction = text.removeprefix("-").partition(".")
    if not (whole.isdigit() and whole.isascii() and len(whole) < 20) or (fraction and not fraction.isdigit()):
        raise TarRefused("a pax header's mtime is no number")
    return float(f"{'-' if text.startswith('-') else ''}{whole}.{fraction[:9] or '0'}")
