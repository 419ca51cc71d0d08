"""Archives and paths made at random: whatever they say, nothing is placed or found outside, and nothing else is raised.

Quick by default; SOJOURN_FUZZ_SEC=600 goes on for so long with each."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.errors import ExecutorError
from executor.gunzip import Gunzip
from executor.safepath import Roots, directory_at, enter_or_make, open_existing
from executor.tarread import Member, TarLimits, TarReader, TarRefused, parse_pax
from executor.untar import Unpacking
from tests.support.tar_corpus import END, REFUSED, attack, fingerprint, long_name, make_canary, member, ordinary, pax

FUZZ_SEC = float(os.environ.get("SOJOURN_FUZZ_SEC", "0"))
LIMITS = TarLimits(entries=200, total_bytes=1 << 20, file_bytes=1 << 20, depth=20)
QUICK = settings(
    max_examples=2000 if FUZZ_SEC else 150, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
pytestmark = pytest.mark.timeout(FUZZ_SEC + 120)

# Few names, so that members meet each other, and all that a path can be misread by.
COMPONENT = st.sampled_from(
    [b"a", b"b", b"c", b"..", b".", b"", b"l", b"m", b"\xff", b"outside", b"x" * 120, b"x" * 256]
)
PATH = st.lists(COMPONENT, max_size=5).map(b"/".join)
KIND = st.sampled_from([b"0", b"0", b"0", b"\0", b"1", b"2", b"2", b"5", b"5", b"7", b"3", b"6", b"S", b"g", b"Z"])


def as_long_as_told(fuzz: Callable[[], None]) -> None:
    until = time.monotonic() + FUZZ_SEC
    fuzz()
    while time.monotonic() < until:
        fuzz()


@st.composite
def members(draw: st.DrawFn) -> bytes:
    name, link, content = draw(PATH), draw(PATH), draw(st.binary(max_size=20))
    kind = draw(KIND)
    before = b""
    how = draw(st.sampled_from(["plain", "plain", "long", "pax", "both"]))
    if how in ("long", "both"):
        before += long_name(name) + (long_name(link, b"K") if kind in b"12" else b"")
    if how in ("pax", "both"):
        records = [(b"path", draw(PATH)), (b"linkpath", link), (b"mtime", draw(st.binary(max_size=6)))]
        before += pax(*draw(st.permutations(records))[: draw(st.integers(0, 3))])
    if kind in (b"1", b"2", b"5"):
        content = b""
    return before + member(name[:100], content, kind=kind, link=link[:100], mode=draw(st.integers(0, 0o7777)))


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Well-formed ones with ill meaning, and well-meant ones with damage."""
    data = b"".join(draw(st.lists(members(), max_size=12))) + END
    if draw(st.booleans()):
        return data
    base = bytearray(draw(st.sampled_from([data, ordinary(), *CORPUS])))
    for _ in range(draw(st.integers(0, 8))):
        if not base:
            break
        at = draw(st.integers(0, len(base) - 1))
        match draw(st.sampled_from(["set", "cut", "insert", "repeat"])):
            case "set":
                base[at] = draw(st.integers(0, 255))
            case "cut":
                del base[at : at + draw(st.integers(1, 1024))]
            case "insert":
                base[at:at] = draw(st.binary(max_size=512))
            case _:
                base += base[at : at + 512]
    return bytes(base)


CORPUS = [
    attack(name, Path("/outside"))[1]
    for name in REFUSED
    if not name.startswith(("bomb", "gzip", "ten_thousand", "pax_headers"))
]


def events_of(data: bytes, piece: int) -> tuple[list[tuple[Member, bytes]], str]:
    reader, found = TarReader(LIMITS), list[tuple[Member, bytes]]()
    try:
        for at in range(0, len(data), piece):
            for event in reader.feed(data[at : at + piece]):
                if isinstance(event, Member):
                    found.append((event, b""))
                else:
                    found[-1] = (found[-1][0], found[-1][1] + bytes(event))
        reader.finish()
    except TarRefused as why:
        return found, str(why)
    return found, ""


def test_any_bytes_are_read_or_refused_and_the_same_in_any_pieces() -> None:
    @QUICK
    @given(st.one_of(st.binary(max_size=3000), archives()), st.integers(1, 2000))
    def fuzz(data: bytes, piece: int) -> None:
        found, why = events_of(data, 1 << 20)
        again, why_again = events_of(data, piece)
        assert (why, [one for one, _ in found]) == (why_again, [one for one, _ in again])
        for one, content in found:
            assert b".." not in one.path
            assert all(part and b"/" not in part and b"\0" not in part for part in one.path)
            assert one.mode & ~0o777 == 0
            assert len(content) <= one.size
        if not why:
            assert all(len(content) == one.size for one, content in found)

    as_long_as_told(fuzz)


def test_whatever_is_unpacked_stays_inside_and_so_does_all_that_its_links_lead_to() -> None:
    base = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/var/tmp"))
    make_canary(base / "outside")
    before = fingerprint(base / "outside")

    @QUICK
    @given(archives())
    def fuzz(data: bytes) -> None:
        root = Path(tempfile.mkdtemp(prefix="root-", dir=base))
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        unpacking, reader, whole = Unpacking(top, 0o022), TarReader(LIMITS), False
        try:
            unpacking.take(reader.feed(data))
            reader.finish()
            unpacking.close()
            whole = True
            for path in root.rglob("*"):
                if path.is_symlink():
                    real = os.path.realpath(path)
                    assert real == str(root) or real.startswith(f"{root}/"), (path, os.readlink(path))
                else:
                    assert path.lstat().st_mode & 0o7000 == 0
            unpacking.set_late_modes(top)
        except TarRefused:
            assert not whole
        finally:
            unpacking.close()
            os.close(top)
            for above, names, _ in os.walk(root):
                for name in names:
                    if not os.path.islink(f"{above}/{name}"):
                        os.chmod(f"{above}/{name}", 0o700)
            shutil.rmtree(root)
        assert sorted(os.listdir(base)) == ["outside"]
        assert fingerprint(base / "outside") == before

    try:
        as_long_as_told(fuzz)
    finally:
        shutil.rmtree(base)


def test_any_pax_records_are_parsed_or_refused() -> None:
    @QUICK
    @given(st.one_of(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=5).map(b"\n".join)))
    def fuzz(data: bytes) -> None:
        try:
            records = parse_pax(data)
        except TarRefused:
            return
        assert all(key and b"\0" not in key for key in records)

    as_long_as_told(fuzz)


def test_any_bytes_are_unpacked_as_gzip_or_refused() -> None:
    import gzip

    @QUICK
    @given(st.binary(max_size=300), st.binary(max_size=60), st.integers(0, 400), st.integers(1, 400))
    def fuzz(content: bytes, noise: bytes, at: int, piece: int) -> None:
        data = gzip.compress(content)
        data = data[:at] + noise + data[at:]
        gunzip, got = Gunzip(), b""
        try:
            for start in range(0, len(data), piece):
                got += b"".join(gunzip.feed(data[start : start + piece]))
            gunzip.finish()
        except TarRefused:
            return
        assert len(got) == gunzip.unpacked

    as_long_as_told(fuzz)


def test_any_path_is_walked_inside_the_root_or_refused() -> None:
    base = Path(tempfile.mkdtemp(prefix="walk-", dir="/var/tmp"))
    make_canary(base / "outside")
    root = base / "root"
    (root / "a/b").mkdir(parents=True)
    (root / "l").symlink_to("../outside")
    (root / "a/m").symlink_to("b")
    (root / "c").touch()
    before, roots = fingerprint(base / "outside"), Roots((str(root),))
    inside = {os.stat(path).st_ino for path in (root, root / "a", root / "a/b")}

    @QUICK
    @given(st.one_of(st.text(max_size=40), PATH.map(os.fsdecode), PATH.map(lambda path: f"{root}/{os.fsdecode(path)}")))
    def fuzz(path: str) -> None:
        try:
            place = roots.place(path)
            fd, missing = open_existing(place, place.parts)
        except ExecutorError:
            return
        try:
            assert os.fstat(fd).st_ino in inside
            if missing and missing[0] not in (b"a", b"c", b"l"):
                try:
                    made, _ = enter_or_make(fd, missing[0], 0o755, place.path)
                except ExecutorError:
                    return
                assert os.stat(b"..", dir_fd=made).st_ino in inside
                os.close(made)
                os.rmdir(missing[0], dir_fd=fd)
            elif not missing:
                with directory_at(place) as again:
                    assert os.fstat(again).st_ino == os.fstat(fd).st_ino
        finally:
            os.close(fd)

    try:
        as_long_as_told(fuzz)
        assert fingerprint(base / "outside") == before
    finally:
        shutil.rmtree(base)
