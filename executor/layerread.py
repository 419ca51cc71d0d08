"""Reads a layer's tar as it comes, and refuses what no tree may be made from. Pure, as `tarread`, on which it builds.

Beside what an archive may hold a layer has FIFOs, sparse files, owners, set-id bits, times to the nanosecond, extended
attributes, marks of what is gone, and links with any target: whoever lays it over a tree follows none.

Nearly every entry of a layer is a small file of whose headers nothing but name, owner, mode, size and time differs from
the last one's. Such headers are known by a comparison, not read field by field, and the file comes with its content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from executor.layerformat import (
    EMPTIED,
    EMPTIED_NAME,
    GONE,
    MAX_EXTENTS,
    MAX_XATTRS,
    PLAIN_BYTES,
    REAL_SIZE,
    SPARSE,
    WHITEOUT,
    WHITEOUT_PREFIX,
    XATTR,
    Extents,
    plain_file_parts,
    xattr_name,
)
from executor.layerwire import MAX_BYTES, MAX_ENTRIES
from executor.tarread import (
    BLOCK_BYTES,
    Kind,
    Member,
    Parts,
    TarLimits,
    TarReader,
    TarRefused,
    header_name,
    name_parts,
    number_of,
    sum_of,
    text_of,
)
from executor.treewalk import MAX_DEPTH, MAX_KEY_BYTES

_KINDS: Final[dict[bytes, Kind]] = {
    b"0": "file", b"\0": "file", b"7": "file", b"1": "hardlink", b"2": "symlink", b"5": "directory", b"6": "fifo",
}  # fmt: skip
_LAST_ID: Final = (1 << 32) - 2  # the one above means "leave it" to chown(2)
_LAST_NS: Final = (1 << 63) - 1
_SEC: Final = 1_000_000_000
_MAX_SIZE: Final = (1 << 63) - 1
_LINK_BYTES: Final = 4095
ROOM_BYTES: Final = 128 * 1024  # what was just read is to be in the processor's cache when it is written
_SMALL_BYTES: Final = 64 * 1024  # a file up to this comes in one piece
_BUFFER_BYTES: Final = ROOM_BYTES + _SMALL_BYTES + PLAIN_BYTES + BLOCK_BYTES
_BEFORE, _AFTER, _TAIL = plain_file_parts()
_TIME: Final = Struct("10s1s9s")
_TIME_AT: Final = len(_BEFORE)
_AFTER_AT: Final = _TIME_AT + 20
_FIELDS: Final = Struct("100s24s12s12x8s")  # name; mode and owner; size; sum
_FIELDS_AT: Final = 2 * BLOCK_BYTES
_SUMMED_TO: Final = _FIELDS_AT + 148
_TAIL_AT: Final = _FIELDS_AT + 156
_TAIL_SUM: Final = 8 * 32 + sum_of(_TAIL[:178]) + sum_of(_TAIL[178:])
_OWNERS: Final = 1024  # remembered at once


def layer_limits(max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES) -> TarLimits:
    """Of what a workspace can hold, not of what somebody would send: a layer that was made can be applied."""
    return TarLimits(
        entries=max_entries, total_bytes=max_bytes, file_bytes=max_bytes, depth=MAX_DEPTH,
        path_bytes=MAX_KEY_BYTES, hollow_entries=max_entries,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerMember(Member):
    """`mode` with the set-id and sticky bits. With `whiteout` it is no entry, but a mark."""

    uid: int
    gid: int
    mtime_ns: int
    xattrs: dict[bytes, bytes]
    whiteout: bytes = b""  # GONE: what is at `path`; EMPTIED: all that is in the directory `path`
    extents: Extents | None = None  # of a sparse file: where the content goes that follows
    real_size: int = 0  # of a file, holes and all


class SmallFile(NamedTuple):
    """A file that came whole, and has neither holes nor attributes nor bits above the permissions."""

    above: Parts  # its directory: the same object for files of one directory that follow each other
    base: bytes
    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    content: memoryview

    @property
    def path(self) -> Parts:
        return (*self.above, self.base)

    @property
    def name(self) -> bytes:
        return b"/".join(self.path)


class LayerReader(TarReader):
    """Put bytes into its `room` and have them `read`; or `feed` it, which yields LayerMembers only."""

    def __init__(self, limits: TarLimits | None = None, owner: tuple[int, int] | None = None) -> None:
        """`owner`: user and group of every entry, whatever the layer says."""
        super().__init__(limits or layer_limits())
        self._all_of = owner
        self._own: dict[bytes, bytes] = {}
        self._names = limits or layer_limits()
        self._buffer = bytearray(_BUFFER_BYTES)  # one for all: new pages cost more than the reading
        self._begun = 0  # bytes in it of a small file that is not whole yet
        self._until = 0  # how many it takes
        self._above: tuple[bytes, Parts] = (b"", ())  # the last small file's directory, as written and as read
        self._owners: dict[bytes, tuple[int, tuple[int, int]]] = {}  # mode and owner by their fields

    def room(self) -> memoryview:
        """Where the next bytes go: at least ROOM_BYTES."""
        return memoryview(self._buffer)[self._begun :]

    def read(self, count: int) -> Iterator[Member | SmallFile | memoryview]:
        """SmallFiles, and of all else LayerMembers, each followed by its content in pieces, out of `count` more bytes.

        Content is good until the next one comes. Raises TarRefused."""
        data, view, at, end = self._buffer, memoryview(self._buffer), 0, self._begun + count
        if end < self._until:
            self._begun = end
            return
        self._begun = self._until = 0
        while at < end:
            wanted = self._left or self._meta_left or self._padding
            if not (wanted or self._block or self._meta.headers or self._zero_blocks):  # between two members
                while data.startswith(_BEFORE, at, end):
                    start = at + PLAIN_BYTES
                    if start > end:
                        return self._keep(view[at:end], PLAIN_BYTES)
                    said = self._small(data, view, at)
                    if said is None:
                        break
                    size, above, base, mode, owner, mtime_ns = said
                    behind = start + size + -size % BLOCK_BYTES
                    if behind > end:
                        return self._keep(view[at:end], behind - at)
                    self.entries += 1
                    self.total_bytes += size
                    self._hollow += not size
                    yield SmallFile(above, base, mode, owner, mtime_ns, view[start : start + size])
                    at = behind
                if at == end:
                    return
            step = min(wanted or BLOCK_BYTES - len(self._block), end - at)
            yield from self.feed(view[at : at + step])
            at += step

    def finish(self) -> None:
        if self._begun:
            raise TarRefused("the archive is cut off")
        super().finish()

    def _keep(self, begun: memoryview, until: int) -> None:
        memoryview(self._buffer)[: len(begun)] = begun
        self._begun, self._until = len(begun), until

    def _small(
        self, data: bytearray, view: memoryview, at: int
    ) -> tuple[int, Parts, bytes, int, tuple[int, int], int] | None:
        """Size, directory, name, mode, owner and time of the small file whose headers begin here; None where they are
        not just such ones, or are to be refused: `feed` is then to see them."""
        if not (data.startswith(_TAIL, at + _TAIL_AT) and data.startswith(_AFTER, at + _AFTER_AT)):
            return None
        name, ids, length, check = _FIELDS.unpack_from(data, at + _FIELDS_AT)
        if check != b"%06o\0 " % (sum_of(view[at + _FIELDS_AT : at + _SUMMED_TO]) + _TAIL_SUM):
            return None
        seconds, point, fraction = _TIME.unpack_from(data, at + _TIME_AT)
        if point != b"." or not (seconds + fraction + length[:11]).isdigit() or length[11]:
            return None
        name = name.rstrip(b"\0")
        above, slash, base = name.rpartition(b"/")
        try:
            size = int(length[:11], 8)
            if above != self._above[0]:
                self._above = above, name_parts(above, self._names)
            found = self._owners.get(ids)
            if found is None:
                found = self._owner(ids, name)
        except ValueError:  # TarRefused is one
            return None
        limits, parts = self._limits, self._above[1]
        if (
            found[0] > 0o777 or size > min(_SMALL_BYTES, limits.file_bytes, limits.total_bytes - self.total_bytes)
            or base in (b"", b".", b"..") or b"\0" in base or (slash and not above)
            or len(parts) >= limits.depth or len(name) > limits.path_bytes
            or self.entries >= limits.entries or (not size and self._hollow >= limits.hollow_entries)
        ):  # fmt: skip
            return None
        return size, parts, base, *found, min(int(seconds + fraction), _LAST_NS)

    def _owner(self, ids: bytes, member: bytes) -> tuple[int, tuple[int, int]]:
        """Mode and owner out of their fields."""
        mode = number_of(ids[:8], "mode", member) & 0o7777
        found = mode, self._all_of or (_id({}, b"uid", ids[8:16], member), _id({}, b"gid", ids[16:], member))
        if len(self._owners) == _OWNERS:
            self._owners.clear()
        self._owners[ids] = found
        return found

    @property
    def is_over(self) -> bool:
        """The tar's end was there; only zeros may follow."""
        return self._zero_blocks == 2

    def _why_outward(self, member: Member) -> str:
        if member.kind == "symlink" and (not member.target or b"\0" in member.target):
            raise TarRefused("its target is no path", member=member.name, fault="path")
        if len(member.target) > _LINK_BYTES:
            raise TarRefused(f"its target is longer than {_LINK_BYTES} bytes", member=member.name, fault="path")
        return ""

    def _take_records(self, records: dict[bytes, bytes], of_all: bool) -> None:
        if of_all and any(key.startswith((b"SOJOURN.", XATTR)) or key in (b"uid", b"gid") for key in records):
            raise TarRefused("a global pax header says of all entries what can be true of one only")
        own = (WHITEOUT, SPARSE, REAL_SIZE, b"uid", b"gid", b"mtime")
        self._own |= {key: value for key, value in records.items() if key in own or key.startswith(XATTR)}
        super()._take_records({key: value for key, value in records.items() if key not in self._own}, of_all)

    def _member(self, block: bytes, kind: bytes) -> LayerMember:
        meta, own = self._meta, self._own
        self._own = {}
        raw = meta.path if meta.path is not None else header_name(block)
        link = meta.link if meta.link is not None else text_of(block[157:257], raw)
        what = _KINDS.get(kind)
        if what is None:
            raise TarRefused("is a device or of an unknown type", member=raw, fault="unsupported")
        size = meta.size if meta.size is not None else number_of(block[124:136], "size", raw)
        if size and what != "file":
            raise TarRefused("only a file has content", member=raw)
        mark = own.get(WHITEOUT, b"")
        if mark:
            return self._mark(raw, mark, what, size)
        parts = name_parts(raw, self._names)
        if not parts and what != "directory":
            raise TarRefused("the root can only be a directory", member=raw, fault="path")
        source = name_parts(link, self._names) if what == "hardlink" else ()
        extents, real_size = _holes(own, size, raw) if what == "file" else (None, 0)
        mtime_ns = _nanoseconds(own[b"mtime"], raw) if b"mtime" in own else _header_ns(block, raw)
        said = _id(own, b"uid", block[108:116], raw), _id(own, b"gid", block[116:124], raw)
        uid, gid = self._all_of or said
        return LayerMember(
            path=parts, kind=what, size=size, mode=number_of(block[100:108], "mode", raw) & 0o7777,
            mtime=mtime_ns / _SEC, target=link if what == "symlink" else b"", source=source, comment=meta.comment,
            uid=uid, gid=gid, mtime_ns=mtime_ns, xattrs=_xattrs(own, raw), extents=extents, real_size=real_size,
        )  # fmt: skip

    def _mark(self, raw: bytes, mark: bytes, what: Kind, size: int) -> LayerMember:
        above, slash, name = raw.rpartition(b"/")
        if what != "file" or size or mark not in (GONE, EMPTIED):
            raise TarRefused("is no mark of what is gone", member=raw)
        if mark == EMPTIED:
            if name != EMPTIED_NAME:
                raise TarRefused("is no mark of an emptied directory", member=raw)
            parts = name_parts(above or b".", self._names)
        else:
            gone = name.removeprefix(WHITEOUT_PREFIX)
            if gone in (name, b"", b".", b".."):
                raise TarRefused("is no mark of what is gone", member=raw)
            parts = name_parts(above + slash + gone, self._names)
        return LayerMember(
            path=parts, kind="file", size=0, mode=0, mtime=0.0, uid=0, gid=0, mtime_ns=0, xattrs={}, whiteout=mark
        )


def _id(own: dict[bytes, bytes], key: bytes, field: bytes, member: bytes) -> int:
    value = own.get(key)
    if value is not None and not (value.isdigit() and len(value) <= 10):
        raise TarRefused(f"its {key.decode()} is no number", member=member)
    number = int(value) if value is not None else number_of(field, key.decode(), member)
    if number > _LAST_ID:
        raise TarRefused(f"its {key.decode()} is none that a file can have", member=member)
    return number


def _header_ns(block: bytes, member: bytes) -> int:
    return max(-_LAST_NS, min(number_of(block[136:148], "mtime", member, signed=True) * _SEC, _LAST_NS))


def _nanoseconds(value: bytes, member: bytes) -> int:
    sign = -1 if value.startswith(b"-") else 1
    whole, _, fraction = value.removeprefix(b"-").partition(b".")
    if not (whole.isdigit() and len(whole) < 20) or (fraction and not (fraction.isdigit() and len(fraction) < 40)):
        raise TarRefused("its mtime is no number", member=member)
    ns = sign * (int(whole) * _SEC + int(fraction[:9].ljust(9, b"0")))
    return max(-_LAST_NS, min(ns, _LAST_NS))


def _holes(own: dict[bytes, bytes], size: int, member: bytes) -> tuple[Extents | None, int]:
    """Of a file with `size` bytes of content in the layer: where they go, and how large it is."""
    if SPARSE not in own:
        return None, size
    said = own[SPARSE].split(b",")
    numbers = [int(text) for text in said if text.isdigit() and len(text) < 20]
    real = own.get(REAL_SIZE, b"")
    if len(numbers) != len(said) or len(said) % 2 or len(said) > 2 * MAX_EXTENTS or not real.isdigit():
        raise TarRefused("its holes are malformed", member=member)
    real_size = int(real[:20])
    extents = [(offset, length) for offset, length in zip(numbers[::2], numbers[1::2], strict=True) if length]
    end = 0
    for offset, length in extents:
        if offset < end:
            raise TarRefused("its holes are malformed", member=member)
        end = offset + length
    if end > real_size or real_size > _MAX_SIZE or sum(length for _, length in extents) != size:
        raise TarRefused("its holes are malformed", member=member)
    return extents, real_size


def _xattrs(own: dict[bytes, bytes], member: bytes) -> dict[bytes, bytes]:
    found = {xattr_name(key): value for key, value in own.items() if key.startswith(XATTR)}
    if any(not name.startswith(b"user.") or len(name) > 255 or b"\0" in name for name in found):
        raise TarRefused("has an extended attribute that is not the user's", member=member, fault="unsupported")
    if len(found) > MAX_XATTRS:
        raise TarRefused(f"has more than {MAX_XATTRS} extended attributes", member=member, fault="limit")
    return found
