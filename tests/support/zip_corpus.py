"""Zip files that try to get out, break in or blow up, made in code."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable

Build = Callable[[], bytes]


def entry(name: str, mode: int = 0o644, kind: int = stat.S_IFREG) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, (2024, 2, 29, 12, 30, 10))
    info.create_system = 3
    info.external_attr = (kind | mode) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def packed(*members: tuple[zipfile.ZipInfo | str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in members:
            archive.writestr(info, content)
    return out.getvalue()


def renamed(old: bytes, new: bytes) -> Build:
    """An archive whose writer would not write such a name."""
    assert len(old) == len(new)
    return lambda: packed(("good", b"good"), (old.decode(), b"x")).replace(old, new)


def link(name: str, target: bytes) -> tuple[zipfile.ZipInfo, bytes]:
    return entry(name, 0o777, stat.S_IFLNK), target


def patched(data: bytes, at_local: int, at_central: int, value: bytes) -> bytes:
    """Changes a field of the only member in both its headers."""
    raw = bytearray(data)
    local, central = raw.index(b"PK\3\4"), raw.index(b"PK\1\2")
    raw[local + at_local : local + at_local + len(value)] = value
    raw[central + at_central : central + at_central + len(value)] = value
    return bytes(raw)


def overlapping(copies: int) -> bytes:
    """One member's bytes under many names."""
    packer = zlib.compressobj(9, wbits=-15)
    body = packer.compress(bytes(1 << 20)) + packer.flush()
    crc = zlib.crc32(bytes(1 << 20))
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 33, crc, len(body), 1 << 20, 1, 0) + b"a" + body
    central = b""
    for number in range(copies):
        name = b"%06d" % number
        central += (
            struct.pack(
                "<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 33, crc, len(body), 1 << 20, len(name), 0, 0, 0, 0, 0, 0
            )
            + name
        )
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, copies, copies, len(central), len(local), 0)
    return local + central + end


def many(count: int) -> bytes:
    """Just a directory of so many entries, which all are somewhere else."""
    head = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    first = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 33, 0, 0, 0, 1, 0) + b"a"
    central = head * count
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(central), len(first))
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(first) + len(central), 1)
    return first + central + record + locator + end


def mutated(change: Callable[[bytearray], None], *members: tuple[zipfile.ZipInfo | str, bytes]) -> Build:
    def build() -> bytes:
        raw = bytearray(packed(*(members or (("f", b"content" * 100),))))
        change(raw)
        return bytes(raw)

    return build


def _cut_middle(raw: bytearray) -> None:
    del raw[40:45]


def _wrong_crc(raw: bytearray) -> None:
    for mark, at in ((b"PK\3\4", 14), (b"PK\1\2", 16)):
        raw[raw.index(mark) + at] ^= 0xFF


def _no_end(raw: bytearray) -> None:
    del raw[raw.index(b"PK\5\6") :]


def _rest(raw: bytearray) -> None:
    raw += b"rest"


def _before(raw: bytearray) -> None:
    raw[:0] = b"PK\3\4#!/bin/sh\n"


def _entry_count(raw: bytearray) -> None:
    end = raw.index(b"PK\5\6")
    raw[end + 8 : end + 12] = struct.pack("<2H", 2, 2)


def _offset(raw: bytearray) -> None:
    end = raw.index(b"PK\5\6")
    raw[end + 16] ^= 1


def _local_elsewhere(raw: bytearray) -> None:
    raw[raw.index(b"PK\1\2") + 42] = 7


def _damaged_data(raw: bytearray) -> None:
    raw[34] ^= 0xFF


REFUSED: dict[str, tuple[str, Build]] = {
    "dot_dot": ("path", renamed(b"aa/evil", b"../evil")),
    "dot_dot_inside": ("path", renamed(b"a/bb/cc/evil", b"a/../../evil")),
    "absolute": ("path", renamed(b"aetc/evil", b"/etc/evil")),
    "backslashes": ("path", renamed(b"aa/evil", b"..\\evil")),
    "drive": ("path", renamed(b"c:/evil", b"c:\\evil")),
    "nul_in_the_name": ("path", renamed(b"a/evil.txt", b"a/evil\0txt")),
    "no_name": ("path", lambda: packed(("/", b""))),
    "only_dots": ("path", lambda: packed(("./.", b"x"))),
    "name_over_255": ("path", lambda: packed(("n" * 256, b"x"))),
    "too_deep": ("limit", lambda: packed(("d/" * 200 + "f", b"x"))),
    "link_absolute": ("path", lambda: packed(link("l", b"/etc/passwd"))),
    "link_to_the_parent": ("path", lambda: packed(link("l", b"../outside"))),
    "link_climbing_late": ("path", lambda: packed(("a/f", b"x"), link("a/l", b"x/../../../outside"))),
    "link_to_nothing": ("path", lambda: packed(link("l", b""))),
    "link_of_a_megabyte": ("path", lambda: packed(link("l", b"a" * (1 << 20)))),
    "link_then_a_file_through_it": ("path", lambda: packed(link("l", b"a"), ("l/evil", b"x"))),
    "link_then_a_file_of_its_name": ("malformed", lambda: packed(link("l", b"a"), ("./l", b"x"))),
    "file_then_a_file_below_it": ("path", lambda: packed(("f", b"x"), ("f/evil", b"x"))),
    "twice_the_same_file": ("malformed", renamed(b"hood", b"good")),
    "same_file_in_two_spellings": ("malformed", lambda: packed(("a/f", b"1"), ("./a//f", b"2"))),
    "device": ("unsupported", lambda: packed((entry("dev", 0o600, stat.S_IFCHR), b""))),
    "fifo": ("unsupported", lambda: packed((entry("fifo", 0o600, stat.S_IFIFO), b""))),
    "socket": ("unsupported", lambda: packed((entry("sock", 0o600, stat.S_IFSOCK), b""))),
    "directory_with_content": ("malformed", lambda: packed((entry("d/", 0o755, stat.S_IFDIR), b"x"))),
    "encrypted": ("unsupported", lambda: patched(packed(("f", b"x")), 6, 8, b"\1")),
    "method_unknown": ("unsupported", lambda: patched(packed(("f", b"x")), 8, 10, b"\x0e")),
    "announces_less_than_it_holds": ("malformed", lambda: patched(packed(("f", bytes(5000))), 22, 24, b"\1\0\0\0")),
    "announces_more_than_it_holds": ("malformed", lambda: patched(packed(("f", bytes(50))), 22, 24, b"\0\1\0\0")),
    "wrong_crc": ("malformed", mutated(_wrong_crc)),
    "damaged_data": ("malformed", mutated(_damaged_data, ("f", os.urandom(64) * 20))),
    "cut_in_the_middle": ("malformed", mutated(_cut_middle)),
    "without_its_end": ("malformed", mutated(_no_end)),
    "data_behind_its_end": ("malformed", mutated(_rest)),
    "data_before_it": ("malformed", mutated(_before)),
    "more_entries_than_there_are": ("malformed", mutated(_entry_count)),
    "directory_elsewhere": ("malformed", mutated(_offset)),
    "member_elsewhere": ("malformed", mutated(_local_elsewhere)),
    "overlap_bomb": ("limit", lambda: overlapping(5000)),
    "ratio_bomb": ("limit", lambda: packed(("zeros", bytes(64 << 20)))),
    "size_of_eight_gigabytes_and_more": ("limit", lambda: patched(packed(("f", b"x")), 22, 24, b"\xff\xff\xff\xfe")),
    "a_million_entries": ("limit", lambda: many(1_000_000)),
    "no_zip_at_all": ("malformed", lambda: b"PK\3\4" + b"text " * 1000),
    "nothing_but_a_magic": ("malformed", lambda: b"PK\5\6"),
}  # fmt: skip


def ordinary() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(entry("run.sh", 0o755), b"#!/bin/sh\n")
        archive.writestr(entry("empty/", 0o700, stat.S_IFDIR), b"")
        archive.writestr(entry("a/b/gr\u00fc\u00df.txt"), "grün".encode() * 1000)
        archive.writestr(entry("set-id", 0o6755), b"s")
        stored = entry("stored", 0o600)
        stored.compress_type = zipfile.ZIP_STORED
        archive.writestr(stored, bytes(range(256)))
        archive.writestr(*link("a/link", b"../run.sh"))
        archive.writestr(zipfile.ZipInfo("from-dos.txt"), b"dos")
    return out.getvalue()
