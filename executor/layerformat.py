"""How a tree's entries and their absence are said in a layer's tar: pax, with these records beside the usual ones.

A mark of what is gone looks as in OCI layers, an empty file named `.wh.` and the name; but only the record WHITEOUT
makes it one, so that a user's own file of such a name stays a file. Names are raw bytes.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from executor.tarpack import BLOCK_BYTES, pax_header, ustar_block

WHITEOUT: Final = b"SOJOURN.whiteout"  # GONE, or EMPTIED for a directory that begins empty, whatever is in it
GONE: Final = b"gone"
EMPTIED: Final = b"emptied"
SPARSE: Final = b"SOJOURN.sparse"  # offset,length,... of the content that follows; the rest is holes
REAL_SIZE: Final = b"SOJOURN.size"  # of a sparse file, holes and all
XATTR: Final = b"SCHILY.xattr."
WHITEOUT_PREFIX: Final = b".wh."
EMPTIED_NAME: Final = b".wh..wh..opq"
MAX_EXTENTS: Final = 16_384  # of one sparse file; beyond them holes become zeros
MAX_XATTRS: Final = 512
MAX_XATTR_BYTES: Final = 384 * 1024  # of one entry, names and values
_NAME_BYTES: Final = 100
_OCTAL_END: Final = 1 << 33
_SMALL_ID_END: Final = 1 << 21
_SEC: Final = 1_000_000_000

# The pax header of nearly every entry: it says the time of any second since 2001, and nothing else.
_PLAIN_RECORD: Final = b"30 mtime=%d.%09d\n"
_PLAIN_SEC: Final = range(1_000_000_000, 10_000_000_000)
_PLAIN_PAX: Final = ustar_block(b"././@PaxHeader", b"x", 30, 0o644, 0, 0, 0) + _PLAIN_RECORD + bytes(BLOCK_BYTES - 30)
PLAIN_BYTES: Final = 3 * BLOCK_BYTES  # of a plain file's headers: this one, and the usual one

Extents = list[tuple[int, int]]  # (offset, length), ascending, none empty


def entry_header(
    path: bytes,
    kind: bytes,
    status: os.stat_result,
    *,
    size: int = 0,
    target: bytes = b"",
    xattrs: dict[bytes, bytes] | None = None,
    extents: Extents | None = None,
    comment: bytes = b"",
) -> bytes:
    """An entry's headers. `size` is that of the content that follows."""
    sec, ns = divmod(status.st_mtime_ns, _SEC)
    records: dict[bytes, bytes] = {}
    if len(path) > _NAME_BYTES:
        records[b"path"] = path
    if len(target) > _NAME_BYTES:
        records[b"linkpath"] = target
    if size >= _OCTAL_END:
        records[b"size"], size = b"%d" % size, 0
    for key, number in ((b"uid", status.st_uid), (b"gid", status.st_gid)):
        if number >= _SMALL_ID_END:
            records[key] = b"%d" % number
    for name, value in (xattrs or {}).items():
        records[XATTR + name.replace(b"%", b"%25").replace(b"=", b"%3D")] = value
    if extents is not None:
        records[REAL_SIZE] = b"%d" % status.st_size
        records[SPARSE] = b",".join(b"%d,%d" % extent for extent in extents) or b"0,0"
    if comment:
        records[b"comment"] = comment
    if not records and sec in _PLAIN_SEC:
        pax = _PLAIN_PAX % (sec, ns)
    else:
        pax = pax_header({b"mtime": b"%d.%09d" % (sec, ns) if sec >= 0 else _negative(status.st_mtime_ns), **records})
    mtime = min(max(sec, 0), _OCTAL_END - 1)
    mode = stat.S_IMODE(status.st_mode)
    return pax + ustar_block(
        path[:_NAME_BYTES], kind, size, mode, status.st_uid, status.st_gid, mtime, target[:_NAME_BYTES]
    )


def whiteout(path: bytes) -> bytes:
    """The mark that nothing is at the path any more."""
    above, slash, name = path.rpartition(b"/")
    return _mark(above + slash + WHITEOUT_PREFIX + name, GONE)


def emptied() -> bytes:
    """The mark that the tree begins with nothing in it."""
    return _mark(EMPTIED_NAME, EMPTIED)


def _mark(path: bytes, what: bytes) -> bytes:
    records = {WHITEOUT: what}
    if len(path) > _NAME_BYTES:
        records[b"path"] = path
    return pax_header(records) + ustar_block(path[:_NAME_BYTES], b"0", 0, 0, 0, 0, 0)


def _negative(ns: int) -> bytes:
    sec, rest = divmod(-ns, _SEC)
    return b"-%d.%09d" % (sec, rest)


def plain_file_parts() -> tuple[bytes, bytes, bytes]:
    """Of a plain file's PLAIN_BYTES of headers: what is before the time, what is after it up to the usual header, and
    that from its kind on. Times are as long as the one in `entry_header`, so that the parts always lie alike."""
    said = _PLAIN_PAX % (_PLAIN_SEC.start, 0)
    end = said.index(b"\n", BLOCK_BYTES)
    return said[: end - 20], said[end:], ustar_block(b"", b"0", 0, 0, 0, 0, 0)[156:]


def xattr_name(record: bytes) -> bytes:
    return record.removeprefix(XATTR).replace(b"%3D", b"=").replace(b"%25", b"%")
