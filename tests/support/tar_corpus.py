"""Archives that try to get out, break in or blow up, made in code; and the tree outside that none may touch.

`outside` is an absolute path of a directory beside the target, for the attacks that name it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

BLOCK = 512
END = bytes(2 * BLOCK)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def member(
    name: bytes,
    content: bytes = b"",
    *,
    kind: bytes = b"0",
    link: bytes = b"",
    mode: int = 0o644,
    size: int | None = None,
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
    raw_size: bytes | None = None,
    checksum: int | None = None,
) -> bytes:
    """One header and its content, however wrong."""
    size_field = raw_size if raw_size is not None else b"%011o\0" % (len(content) if size is None else size)
    head = b"%b%07o\0%07o\0%07o\0%b%011o\0        %b%b%b" % (
        name[:100].ljust(100, b"\0"), mode, 0, 0, size_field, 0, kind, link[:100].ljust(100, b"\0"), magic,
    )  # fmt: skip
    block = bytearray(head.ljust(345, b"\0") + prefix.ljust(155, b"\0") + bytes(12))
    block[148:156] = b"%06o\0 " % (sum(block) if checksum is None else checksum)
    return bytes(block) + padded(content)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    data = b""
    for key, value in records:
        body = b" %b=%b\n" % (key, value)
        length = len(body) + len(str(len(body)))
        length = len(body) + len(str(length))
        data += b"%d%b" % (length, body)
    return member(b"PaxHeader", data, kind=kind)


def long_name(name: bytes, kind: bytes = b"L") -> bytes:
    return member(b"././@LongLink", name + b"\0", kind=kind)


def directory(name: bytes, mode: int = 0o755) -> bytes:
    return member(name, kind=b"5", mode=mode)


def symlink(name: bytes, target: bytes) -> bytes:
    if len(target) > 100:
        return long_name(target, b"K") + member(name, kind=b"2", link=target)
    return member(name, kind=b"2", link=target)


def hardlink(name: bytes, target: bytes) -> bytes:
    return member(name, kind=b"1", link=target)


def cve_2025_4517(outside: str) -> bytes:
    """Directories with names so long that realpath() gives up in the middle of a chain of links, which then climbs."""
    long = b"d" * 247
    archive, path = b"", b""
    for letter in b"abcdefghijklmnop":
        archive += long_name(path + long) + member(b"x", kind=b"5")
        archive += long_name(path + bytes([letter])) + symlink(b"x", long)
        path += bytes([letter]) + b"/"
    climb = path + b"l" * 254
    archive += long_name(climb) + long_name(b"../" * 16, b"K") + member(b"x", kind=b"2")
    archive += symlink(b"escape", climb + b"/.." * 4 + os.fsencode(outside))
    archive += hardlink(b"flag", b"escape/secret")
    return archive + member(b"flag", b"overwritten") + END


Build = Callable[[str], bytes]


def _with(*parts: bytes) -> Build:
    return lambda outside: b"".join(parts) + END


def _cut(count: int) -> Build:
    return lambda outside: (member(b"f", b"x" * 2000) + END)[:count]


GOOD = member(b"good", b"good")

# Every archive begins with a good member, so that one that was unpacked as far as it went would leave a trace.
_PATHS: dict[str, Build] = {
    "dot_dot": _with(member(b"../evil", b"x")),
    "dot_dot_inside": _with(member(b"a/../../evil", b"x")),
    "dot_dot_that_stays_inside": _with(member(b"a/b/../c", b"x")),
    "dot_dot_directory": _with(directory(b"..")),
    "dot_dot_behind_a_slash": _with(member(b"a/..", b"")),
    "absolute": lambda outside: member(os.fsencode(outside) + b"/evil", b"x") + END,
    "absolute_root": _with(directory(b"/")),
    "two_slashes": _with(member(b"//etc/evil", b"x")),
    "prefix_dot_dot": _with(member(b"evil", b"x", prefix=b"..")),
    "prefix_absolute": _with(member(b"evil", b"x", prefix=b"/tmp")),
    "long_name_dot_dot": _with(long_name(b"a/" * 60 + b"../" * 61 + b"evil"), member(b"innocent", b"x")),
    "pax_path_dot_dot": _with(pax((b"path", b"../evil")), member(b"innocent", b"x")),
    "pax_path_absolute": _with(pax((b"path", b"/tmp/evil")), member(b"innocent", b"x")),
    "pax_path_with_nul": _with(pax((b"path", b"a\0b")), member(b"innocent", b"x")),
    "pax_over_long_name": _with(long_name(b"fine"), pax((b"path", b"../evil")), member(b"innocent", b"x")),
    "nul_in_the_name": _with(member(b"a\0b", b"x")),
    "nul_in_a_long_name": _with(long_name(b"a\0b"), member(b"innocent", b"x")),
    "no_name": _with(member(b"", b"x")),
    "file_named_dot": _with(member(b"./", kind=b"2", link=b"x")),
    "name_over_255": _with(long_name(b"n" * 256), member(b"n", b"x")),
    "path_over_4096": _with(pax((b"path", b"d/" * 2048 + b"ff")), member(b"n", b"x")),
    "symlink_absolute": _with(symlink(b"l", b"/etc/passwd")),
    "symlink_to_the_parent": _with(symlink(b"l", b"..")),
    "symlink_out_of_a_directory": _with(directory(b"a"), symlink(b"a/l", b"../../outside")),
    "symlink_climbing_late": _with(directory(b"a"), symlink(b"a/l", b"x/../../../outside")),
    "symlink_climbing_through_a_link": _with(
        directory(b"a"), directory(b"a/b"), symlink(b"a/b/up", b"../.."), symlink(b"l", b"a/b/up/../outside"),
    ),
    "symlink_with_nul": _with(pax((b"linkpath", b"x\0y")), symlink(b"l", b"fine")),
    "symlink_to_nothing": _with(symlink(b"l", b"")),
    "symlink_pax_linkpath": _with(pax((b"linkpath", b"../outside")), symlink(b"l", b"fine")),
    "symlink_long_link": _with(symlink(b"l", b"../" * 60)),
    "symlink_out_then_a_file_through_it": _with(symlink(b"l", b"../outside"), member(b"l/evil", b"x")),
    "symlink_inside_then_a_file_through_it": _with(directory(b"a"), symlink(b"l", b"a"), member(b"l/evil", b"x")),
    "dangling_symlink_then_a_file_through_it": _with(symlink(b"l", b"later"), member(b"l/evil", b"x")),
    "symlink_to_itself_then_through_it": _with(symlink(b"l", b"l"), member(b"l/evil", b"x")),
    "file_then_a_file_below_it": _with(member(b"f", b"x"), member(b"f/evil", b"x")),
    "hardlink_absolute": lambda outside: hardlink(b"h", os.fsencode(outside) + b"/secret") + END,
    "hardlink_to_shadow": _with(hardlink(b"h", b"/etc/shadow")),
    "hardlink_dot_dot": _with(hardlink(b"h", b"../outside/secret")),
    "hardlink_through_a_symlink": _with(directory(b"a"), symlink(b"l", b"a"), hardlink(b"h", b"l/f")),
    "hardlink_to_a_symlink": _with(symlink(b"l", b"good"), hardlink(b"h", b"l")),
    "hardlink_to_a_directory": _with(directory(b"a"), hardlink(b"h", b"a")),
    "hardlink_to_the_root": _with(hardlink(b"h", b".")),
    "hardlink_to_nothing": _with(hardlink(b"h", b"missing")),
    "hardlink_to_what_comes_later": _with(hardlink(b"h", b"later"), member(b"later", b"x")),
    "cve_2025_4517": cve_2025_4517,
}  # fmt: skip
_MALFORMED: dict[str, Build] = {
    "character_device": _with(member(b"dev", kind=b"3")),
    "block_device": _with(member(b"dev", kind=b"4")),
    "fifo": _with(member(b"fifo", kind=b"6")),
    "gnu_sparse": _with(member(b"s", b"x" * 512, kind=b"S")),
    "pax_sparse": _with(pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.name", b"s")), member(b"s", b"x")),
    "unknown_type": _with(member(b"u", kind=b"Z")),
    "volume_label": _with(member(b"label", kind=b"V")),
    "multi_volume": _with(member(b"m", b"x", kind=b"M")),
    "twice_the_same_file": _with(member(b"f", b"one"), member(b"f", b"two")),
    "symlink_then_a_file_of_its_name": _with(symlink(b"l", b"good"), member(b"l", b"x")),
    "symlink_then_a_directory_of_its_name": _with(symlink(b"l", b"good"), directory(b"l")),
    "file_then_a_directory_of_its_name": _with(member(b"d", b"x"), directory(b"d")),
    "same_file_in_two_spellings": _with(member(b"a/f", b"1"), member(b"./a//f", b"2")),
    "pax_size_larger": _with(pax((b"size", b"1024")), member(b"f", b"x" * 512), bytes(512)),
    "pax_size_smaller": _with(pax((b"size", b"0")), member(b"f", member(b"hidden", b"x"))),
    "pax_size_negative": _with(pax((b"size", b"-1")), member(b"f", b"x")),
    "pax_size_no_number": _with(pax((b"size", b"0x10")), member(b"f", b"x")),
    "global_size": _with(pax((b"size", b"0"), kind=b"g"), member(b"f", b"x")),
    "global_path": _with(pax((b"path", b"other"), kind=b"g"), member(b"f", b"x")),
    "pax_malformed": _with(member(b"p", b"99 path=x\n", kind=b"x"), member(b"f", b"x")),
    "pax_length_zero": _with(member(b"p", b"0 path=x\n", kind=b"x"), member(b"f", b"x")),
    "pax_without_a_member": _with(pax((b"path", b"x"))),
    "pax_headers_without_end": _with(*[pax((b"comment", b"x"))] * 20, member(b"f", b"x")),
    "negative_size": _with(member(b"f", b"x", raw_size=b"\xff" * 12)),
    "size_no_number": _with(member(b"f", b"x", raw_size=b"9999999999 \0")),
    "bad_checksum": _with(member(b"f", b"x", checksum=1)),
    "directory_with_content": _with(member(b"d", b"x" * 10, kind=b"5")),
    "symlink_with_content": _with(member(b"l", b"x" * 10, kind=b"2", link=b"good")),
    "hardlink_with_content": _with(member(b"h", b"x" * 10, kind=b"1", link=b"good")),
    "no_tar_at_all": lambda outside: b"PK\x03\x04" + b"zip" * 1000,
    "text": lambda outside: b"hello\n" * 200,
    "cut_in_a_header": _cut(300),
    "cut_in_the_content": _cut(1000),
    "cut_before_the_end_mark": _cut(512 + 2048),
    "data_after_the_end": lambda outside: GOOD + END + member(b"late", b"x") + END,
    "lone_zero_block_in_the_middle": lambda outside: GOOD + bytes(BLOCK) + member(b"late", b"x") + END,
    "gzip_cut": lambda outside: gzip.compress(GOOD + END)[:-9],
    "gzip_damaged": lambda outside: gzip.compress(GOOD + END)[:-8] + bytes(8),
    "gzip_with_data_after_it": lambda outside: gzip.compress(GOOD + END) + b"rest",
}  # fmt: skip
_TOO_LARGE: dict[str, Build] = {
    "too_deep": _with(member(b"d/" * 40 + b"f", b"x", prefix=b"d/" * 70 + b"d"), directory(b"e/" * 49, 0o755),
                      pax((b"path", b"d/" * 200 + b"f")), member(b"f", b"x")),
    "one_file_over_the_limit": _with(member(b"f", raw_size=b"\x80" + (9 << 30).to_bytes(11, "big"))),
    "size_of_ninety_bits": _with(member(b"f", raw_size=b"\xbf" + b"\xff" * 11)),
    "pax_size_over_the_limit": _with(pax((b"size", b"9223372036854775807")), member(b"f", size=0)),
    "pax_header_over_the_limit": _with(member(b"p", size=1 << 30, kind=b"x")),
    "long_name_over_the_limit": _with(member(b"p", size=1 << 20, kind=b"L")),
    "bomb_by_ratio": lambda outside: bomb(256),
    "bomb_in_many_members": lambda outside: b"".join([gzip.compress(bytes(1 << 20))] * 64),
    "ten_thousand_empty_gzip_members": lambda outside: gzip.compress(GOOD) + gzip.compress(b"") * 10_000,
}  # fmt: skip


def bomb(mebibytes: int) -> bytes:
    """A gzip of a file of zeros."""
    packer = zlib.compressobj(9, wbits=31)
    size = mebibytes << 20
    data = packer.compress(member(b"zeros", size=size, raw_size=b"%011o\0" % size))
    for _ in range(mebibytes):
        data += packer.compress(bytes(1 << 20))
    return data + packer.compress(END) + packer.flush()


REFUSED: dict[str, tuple[str, Build]] = {
    **{name: ("invalid_path", build) for name, build in _PATHS.items()},
    **{name: ("invalid_request", build) for name, build in _MALFORMED.items()},
    **{name: ("too_large", build) for name, build in _TOO_LARGE.items()},
}
_WHOLE = frozenset({"no_tar_at_all", "text", "data_after_the_end", "lone_zero_block_in_the_middle"})


def attack(name: str, outside: Path) -> tuple[str, bytes]:
    """(the code that it is refused with, the archive): a good member first, where the attack is one of members."""
    code, build = REFUSED[name]
    data = build(str(outside))
    if name in _WHOLE or name.startswith(("cut_", "gzip_", "bomb_", "ten_thousand_")):
        return code, data
    return code, GOOD + data


def ordinary() -> bytes:
    """What FI11 asks to be kept, as tarfile writes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, mode, content in (
            ("run.sh", 0o755, b"#!/bin/sh\n"),
            ("secret", 0o600, b"s"),
            ("a/b/deep", 0o644, b""),
        ):
            info = tarfile.TarInfo(name)
            info.mode, info.size = mode, len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, kind, target in (
            ("relative", tarfile.SYMTYPE, "run.sh"), ("dangling", tarfile.SYMTYPE, "nowhere/yet"),
            ("a/up", tarfile.SYMTYPE, "../run.sh"), ("empty", tarfile.DIRTYPE, ""), ("hard", tarfile.LNKTYPE, "secret"),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, target, 0o755
            tar.addfile(info)
    return out.getvalue()


def make_canary(outside: Path) -> None:
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (outside / "run.sh").write_text("#!/bin/sh\n")
    (outside / "run.sh").chmod(0o755)
    (outside / "inner").mkdir()
    (outside / "inner/link").symlink_to("../secret")


def fingerprint(tree: Path) -> str:
    """Of all that is below: names, types, modes, owners, links, times and content."""
    digest = hashlib.sha256()
    for path in [tree, *sorted(tree.rglob("*"))]:
        status = path.lstat()
        facts = (str(path.relative_to(tree)), status.st_mode, status.st_uid, status.st_gid, status.st_size,
                 status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)  # fmt: skip
        digest.update(repr(facts).encode())
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
