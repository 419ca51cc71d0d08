"""Reads a zip file as the members of a tar, in bounded memory, by the same rules.

The standard library parses the central directory, but only one that is found where the end record says, with no more
in it than it may have: how many entries there are is known before any of them is read. Members may not share bytes
(as in overlap bombs), are decoded in pieces, and give exactly what they announce. Blocking.
"""

from __future__ import annotations

import calendar
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

from executor.tarread import Kind, Member, TarLimits, TarRefused, leads_out, name_parts

PIECE_BYTES: Final = 256 * 1024
_ENTRY_BYTES: Final = 512  # of the central directory for one entry, on average: a long name and its times
_DIRECTORY_FREE_BYTES: Final = 1 << 20
_END: Final = struct.Struct("<4s4H2LH")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64: Final = struct.Struct("<4sLQL")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_COMMENT_MAX: Final = 65_535
_LINK_MAX: Final = 4095
_ENCRYPTED: Final = 0x1 | 0x40 | 0x2000
_UTF_8: Final = 0x800
_UNIX: Final = 3
_METHODS: Final = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}
_HOW: Final = "pack it with `zip -r`, or as tar"


def zip_members(file: BinaryIO, limits: TarLimits) -> Iterator[Member | bytes]:
    """Members, each followed by its content in pieces. Raises TarRefused."""
    size = file.seek(0, 2)
    directory_at, announced = _check_end(file, size, limits)
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            if len(infos) != announced:
                raise TarRefused("the zip archive has another number of members than it says")
            _check_places(file, infos, directory_at)
            total = 0
            for info in infos:
                member = _member(archive, info, limits)
                total += member.size
                if total > limits.total_bytes:
                    raise _over(member.name, "bytes in all files together", limits.total_bytes)
                yield member
                if member.kind == "file":
                    yield from _content(archive, info, member)
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, UnicodeError, ValueError, OverflowError) as why:
        if isinstance(why, TarRefused):
            raise
        raise TarRefused(f"no zip archive, or a damaged one: {why}") from None
    except (NotImplementedError, RuntimeError) as why:
        raise TarRefused(f"cannot be unpacked here: {why}; {_HOW}", fault="unsupported") from None


# ── the end record and the directory before it ──────────────────────────────────────────────────────────────────────


def _check_end(file: BinaryIO, size: int, limits: TarLimits) -> tuple[int, int]:
    """Where the central directory begins, and how many entries it has.

    Raises TarRefused unless it lies right before its end record, with nothing behind that, and has no more entries and
    bytes than it may."""
    tail_at = max(0, size - _COMMENT_MAX - _END.size)
    file.seek(tail_at)
    tail = file.read()
    # As `zipfile` looks: at the very end, else the last that looks like one.
    at = len(tail) - _END.size
    if at < 0 or tail[at : at + 4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise TarRefused("no zip archive, or one that is cut off: its end record is missing")
    _, disk, first_disk, here, entries, length, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        raise TarRefused("there is data behind the zip archive's end")
    end = tail_at + at
    locator_at = end - _LOCATOR_64.size
    if locator_at >= 0:
        file.seek(locator_at)
        magic, disk_64, record_at, disks = _LOCATOR_64.unpack(file.read(_LOCATOR_64.size))
        if magic == b"PK\6\7":
            if record_at != locator_at - _END_64.size:
                raise TarRefused("the zip archive's end records do not lie one behind the other")
            file.seek(record_at)
            fields = _END_64.unpack(file.read(_END_64.size))
            if fields[0] != b"PK\6\6" or disk_64 or disks > 1:
                raise TarRefused("the zip archive's end record is damaged")
            disk, first_disk, here, entries, length, start = fields[4:]
            end = record_at
    if disk or first_disk or here != entries:
        raise TarRefused(f"is one part of a zip archive of several; {_HOW}", fault="unsupported")
    if entries > limits.entries:
        raise _over(b"", "entries", limits.entries)
    if length > _DIRECTORY_FREE_BYTES + entries * _ENTRY_BYTES:
        raise TarRefused("the zip archive's directory is larger than its entries explain", fault="limit")
    if start + length != end:
        raise TarRefused("the zip archive's directory does not lie right before its end, or data is before the archive")
    return int(start), int(entries)


def _check_places(file: BinaryIO, infos: list[zipfile.ZipInfo], directory_at: int) -> None:
    """Every member has bytes of its own: in overlap bombs many share the same ones."""
    free_from = 0
    for info in sorted(infos, key=lambda each: each.header_offset):
        name = info.orig_filename.encode("utf-8", "replace")
        if info.header_offset < free_from:
            raise TarRefused("shares bytes with another member, as only a bomb does", member=name, fault="limit")
        file.seek(info.header_offset)
        head = file.read(_LOCAL.size)
        if len(head) != _LOCAL.size or head[:4] != b"PK\3\4":
            raise TarRefused("is not where the zip archive's directory says", member=name)
        name_bytes, extra_bytes = _LOCAL.unpack(head)[-2:]
        free_from = info.header_offset + _LOCAL.size + name_bytes + extra_bytes + info.compress_size
        if free_from > directory_at:
            raise TarRefused("reaches over the zip archive's directory", member=name)


# ── members ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limits: TarLimits) -> Member:
    raw = info.orig_filename.encode("utf-8", "surrogateescape")  # names without UTF-8's flag were read as cp437
    if b"\\" in raw:
        raise TarRefused(f"has a backslash in its name; {_HOW}", member=raw, fault="path")
    path = name_parts(raw, limits)
    if info.flag_bits & _ENCRYPTED:
        raise TarRefused("is encrypted", member=raw, fault="unsupported")
    if info.compress_type not in _METHODS:
        raise TarRefused(f"is packed by method {info.compress_type}; {_HOW}", member=raw, fault="unsupported")
    if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        raise TarRefused("has two sizes", member=raw)
    if info.file_size > limits.file_bytes:
        raise _over(raw, "bytes in one file", limits.file_bytes)
    mode, kind = _kind(info, raw)
    mtime = _mtime(info)
    if kind == "directory":
        if info.file_size:
            raise TarRefused("a directory with content", member=raw)
        return Member(path, kind, 0, mode, mtime)
    if not path:
        raise TarRefused("the archive's root can only be a directory", member=raw, fault="path")
    if kind == "symlink":
        target = _link_target(archive, info, raw)
        if why := leads_out(target, path):
            raise TarRefused(f"its target {target[:80].decode('utf-8', 'replace')!r} {why}", member=raw, fault="path")
        return Member(path, kind, 0, mode, mtime, target=target)
    return Member(path, kind, info.file_size, mode, mtime)


def _kind(info: zipfile.ZipInfo, raw: bytes) -> tuple[int, Kind]:
    """Permission bits and what it is. Only archives made on Unix say more than by the slash at a name's end."""
    is_directory = raw.endswith(b"/")
    said = info.external_attr >> 16 if info.create_system == _UNIX else 0
    if said == 0:
        return (0o755, "directory") if is_directory else (0o644, "file")
    kind = stat.S_IFMT(said)
    mode = said & 0o777
    if kind == stat.S_IFLNK and not is_directory:
        return 0o777, "symlink"
    if kind == stat.S_IFDIR or (kind == 0 and is_directory):
        return mode or 0o755, "directory"
    if kind in (0, stat.S_IFREG) and not is_directory:
        return mode or 0o644, "file"
    raise TarRefused("is neither file, directory nor link; those can be unpacked", member=raw, fault="unsupported")


def _link_target(archive: zipfile.ZipFile, info: zipfile.ZipInfo, raw: bytes) -> bytes:
    if info.file_size > _LINK_MAX:
        raise TarRefused(f"is a link whose target is longer than {_LINK_MAX} bytes", member=raw, fault="path")
    with archive.open(info) as file:
        target = file.read(_LINK_MAX + 1)
    if len(target) != info.file_size:
        raise TarRefused("is cut off", member=raw)
    return target


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, member: Member) -> Iterator[bytes]:
    """Exactly the announced bytes; the library checks their CRC at the end."""
    left = member.size
    with archive.open(info) as file:
        while piece := file.read(PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise TarRefused("holds more than it announces", member=member.name)
            yield piece
    if left:
        raise TarRefused("is cut off", member=member.name)


def _mtime(info: zipfile.ZipInfo) -> float:
    """A zip file's times have no zone: UTC is as good as any, and the same everywhere."""
    try:
        return max(0.0, float(_utc_seconds(info.date_time)))
    except (ValueError, OverflowError):
        return 0.0


def _utc_seconds(date_time: tuple[int, int, int, int, int, int]) -> int:
    year, month, day, hour, minute, second = date_time
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 62):
        raise ValueError("no time")
    return calendar.timegm((year, month, day, hour, minute, second))


def _over(name: bytes, what: str, limit: int) -> TarRefused:
    return TarRefused(f"the archive is over the limit of {limit} {what}", member=name, fault="limit", limit=limit)
