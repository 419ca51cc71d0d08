"""The tar reader alone: what real writers make is read, in pieces of any size, and limits hold."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from executor.gunzip import Gunzip
from executor.tarpack import Packer
from executor.tarread import Member, TarLimits, TarReader, TarRefused, leads_out, parse_pax
from tests.support.tar_corpus import END, REFUSED, attack, directory, long_name, member, pax, symlink


def read(data: bytes, limits: TarLimits | None = None, piece: int = 1 << 20) -> list[tuple[Member, bytes]]:
    reader = TarReader(limits)
    found: list[tuple[Member, bytes]] = []
    for at in range(0, len(data), piece):
        for event in reader.feed(data[at : at + piece]):
            if isinstance(event, Member):
                found.append((event, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + bytes(event))
    reader.finish()
    return found


def a_tree(base: Path) -> None:
    (base / "d/empty").mkdir(parents=True)
    (base / "d/file").write_bytes(b"x" * 1000)
    (base / ("n" * 120)).mkdir()
    (base / ("n" * 120) / ("é" * 90)).write_bytes(b"long")
    (base / "link").symlink_to("d/file")
    (base / "longlink").symlink_to("t" * 150)


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program here")
@pytest.mark.parametrize("format", ["v7", "ustar", "gnu", "oldgnu", "pax"])
@pytest.mark.parametrize("piece", [1, 511, 513, 100_000])
def test_what_tar_writes_in_any_of_its_formats_is_read(tmp_path: Path, format: str, piece: int) -> None:
    a_tree(tmp_path)
    if format in ("v7", "ustar"):  # which have no place for such names
        shutil.rmtree(tmp_path / ("n" * 120))
        (tmp_path / "longlink").unlink()
    command = ["tar", "-c", f"--format={format}", "-C", str(tmp_path), "."]
    data = subprocess.run(command, capture_output=True, check=True).stdout
    found = {os.fsdecode(one.name): (one, content) for one, content in read(data, piece=piece)}
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} | {"."}
    assert set(found) == there
    assert found["d/file"][1] == b"x" * 1000
    assert (found["link"][0].kind, found["link"][0].target) == ("symlink", b"d/file")
    assert found["d/empty"][0].kind == "directory"


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_pythons_tarfile_writes_is_read(tmp_path: Path, format: int) -> None:
    a_tree(tmp_path)
    (tmp_path / "longlink").unlink()
    if format == tarfile.USTAR_FORMAT:
        shutil.rmtree(tmp_path / ("n" * 120))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        tar.add(tmp_path, arcname="top")
    assert len(read(out.getvalue())) == len(list(tmp_path.rglob("*"))) + 1


@pytest.mark.parametrize("name", sorted(name for name in REFUSED if not name.startswith(("gzip_", "bomb_", "ten_"))))
def test_attacks_are_refused_wherever_the_pieces_are_cut(tmp_path: Path, name: str) -> None:
    """All but those that only a file system can tell: what comes twice, or lies below a link."""
    told_by_files = ("twice_", "same_", "through", "below", "then_a", "hardlink_to", "cve")
    data = attack(name, tmp_path)[1]
    if any(part in name for part in told_by_files):
        return
    refusals = set()
    for piece in (1 << 20, 512, 7):
        with pytest.raises(TarRefused) as caught:
            read(data, piece=piece)
        refusals.add((str(caught.value), caught.value.fault))
    assert len(refusals) == 1


def test_a_pax_size_that_hides_a_member_in_anothers_content_is_refused_and_an_equal_one_is_content() -> None:
    hidden = member(b"hidden", b"x")
    with pytest.raises(TarRefused, match="differ about its size"):
        read(pax((b"size", b"%d" % len(hidden))) + member(b"f", size=0) + hidden + END)
    inner = read(pax((b"size", b"%d" % len(hidden))) + member(b"f", hidden) + END)
    assert [(one.name, content) for one, content in inner] == [(b"f", hidden)]


def test_pax_wins_over_long_names_and_long_names_over_headers() -> None:
    assert [one.name for one, _ in read(long_name(b"long") + member(b"short", b"") + END)] == [b"long"]
    assert [one.name for one, _ in read(pax((b"path", b"pax")) + long_name(b"long") + member(b"s", b"") + END)] == [
        b"pax"
    ]
    assert [one.name for one, _ in read(pax((b"path", b"")) + member(b"kept", b"") + END)] == [b"kept"]


def test_headers_for_all_members_are_read_past() -> None:
    data = pax((b"comment", b"0123456789abcdef"), kind=b"g") + member(b"f", b"x") + END
    assert [one.name for one, _ in read(data)] == [b"f"]
    assert read(pax((b"comment", b"an empty tree"), kind=b"g") + END) == []


def test_every_limit_is_one() -> None:
    limits = TarLimits(entries=30, total_bytes=1000, file_bytes=600, depth=4, path_bytes=50, hollow_entries=20)
    for data in (
        b"".join(member(b"%d" % n, b"x") for n in range(31)),
        b"".join(member(b"%d" % n) for n in range(21)),
        b"".join(directory(b"%d" % n) for n in range(21)),
        member(b"a", b"x" * 601),
        member(b"a", b"x" * 600) + member(b"b", b"x" * 401),
        directory(b"a/b/c/d/e"),
        long_name(b"x" * 52) + member(b"f"),
    ):
        with pytest.raises(TarRefused) as caught:
            read(data + END, limits)
        assert caught.value.fault == "limit"
    assert len(read(member(b"a", b"x" * 600) + member(b"b", b"x" * 400) + directory(b"a/b/c/d") + END, limits)) == 3
    many = b"".join(member(b"%d" % n) for n in range(24)) + b"".join(member(b"x%d" % n, b"x") for n in range(3))
    assert len(read(b"".join(member(b"y%d" % n, b"x") for n in range(3)) + many + END, limits)) == 30


def test_an_empty_archive_is_one_and_no_bytes_are_none() -> None:
    assert read(END) == []
    assert read(bytes(10_240)) == []
    with pytest.raises(TarRefused, match="cut off"):
        read(b"")


def test_times_are_kept_within_what_a_file_system_can_hold() -> None:
    for given, kept in ((b"12.5", 12.5), (b"-7", 0.0), (b"99999999999999", float(1 << 33))):
        assert read(pax((b"mtime", given)) + member(b"f") + END)[0][0].mtime == kept
    for given in (b"nan", b"1e400", b"inf", b"1.x", b"", b"--1"):
        if given:
            with pytest.raises(TarRefused):
                read(pax((b"mtime", given)) + member(b"f") + END)


@pytest.mark.parametrize(
    ("target", "link", "leads"),
    [
        (b"a", (b"l",), False), (b"../a", (b"d", b"l"), False), (b"./../a/./b/", (b"d", b"l"), False),
        (b"..", (b"d", b"l"), False), (b".", (b"l",), False), (b"../../a", (b"d", b"l"), True), (b"..", (b"l",), True),
        (b"a/../b", (b"d", b"l"), True), (b"/a", (b"d", b"l"), True), (b"a/..", (b"l",), True),
        (b"x" * 4096, (b"l",), True), (b"", (b"l",), True), (b"a\0", (b"l",), True),
    ],
)  # fmt: skip
def test_links_may_lead_where_nothing_can_turn_them_out(target: bytes, link: tuple[bytes, ...], leads: bool) -> None:
    assert bool(leads_out(target, link)) is leads


@pytest.mark.parametrize(
    "data", [b"5", b"x", b"3 =\n", b"6 =ab\n", b"11 path=ab\n\0x", b" 7 a=b\n", b"999999999999 a=b\n"]
)
def test_malformed_pax_records_are_refused(data: bytes) -> None:
    with pytest.raises(TarRefused):
        parse_pax(data)


def test_pax_values_may_hold_anything() -> None:
    assert parse_pax(b"13 path=a\n=\n\n" + b"7 a=\xff\0\n" + bytes(20)) == {b"path": b"a\n=\n", b"a": b"\xff\0"}


def test_gzip_members_may_be_many_but_not_many_for_nothing() -> None:
    import gzip as writer

    one = writer.compress(os.urandom(2000))
    plain = Gunzip()
    assert sum(len(piece) for piece in plain.feed(one * 3000)) == 6_000_000
    plain.finish()
    nothing = Gunzip()
    with pytest.raises(TarRefused, match="members"):
        list(nothing.feed(writer.compress(b"") * 3000))
    for cut in range(1, 17):
        short = Gunzip()
        assert list(short.feed(writer.compress(b"")[:cut])) == []
        with pytest.raises(TarRefused, match="cut off"):
            short.finish()


def test_gunzip_gives_bounded_pieces_and_stops_at_the_ratio() -> None:
    import zlib

    packer = zlib.compressobj(9, wbits=31)
    data = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    gunzip, sizes = Gunzip(), list[int]()
    with pytest.raises(TarRefused, match="times its size"):
        sizes.extend(map(len, gunzip.feed(data)))
    assert gunzip.unpacked < 100 * len(data) + (1 << 20)


def test_what_the_packer_writes_the_reader_reads(tmp_path: Path) -> None:
    a_tree(tmp_path)
    odd = os.fsencode(tmp_path) + b"/\xff" + b"o" * 150
    with open(odd, "wb") as file:
        file.write(b"odd")
    os.symlink(b"\xfe" * 150, os.fsencode(tmp_path) + b"/oddlink")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate((8 << 30) - 1)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(Exception, match="bytes in its files"):
            list(Packer(fd, max_bytes=1 << 30).chunks())
        os.unlink(tmp_path / "huge")
        data = b"".join(Packer(fd).chunks())
    finally:
        os.close(fd)
    found = {one.name: (one, content) for one, content in read(data)}
    assert found[b"\xff" + b"o" * 150][1] == b"odd"
    assert found[b"oddlink"][0].target == b"\xfe" * 150
    assert found[b"longlink"][0].target == b"t" * 150
    assert found[b"."][0].comment.startswith(b'sojourn: {"entries": 9')
    assert symlink(b"x", b"y")  # the support module's own writer is in use above
