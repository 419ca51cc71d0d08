"""Small files of a layer are known by their headers' bytes: what comes of it is what reading field by field gives."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import layerapply
from executor.layerformat import PLAIN_BYTES, entry_header, plain_file_parts, whiteout
from executor.layerread import ROOM_BYTES, LayerMember, LayerReader, SmallFile, layer_limits
from executor.tarread import TarLimits, TarRefused
from tests.support.trees import apply, differences, pack, picture

END = bytes(1024)
Found = list[tuple[tuple[bytes, ...], str, int, tuple[int, int], int, bytes]]


def status_of(mode: int = 0o644, uid: int = 1000, gid: int = 1000, mtime_ns: int = 1_700_000_000_123_456_789) -> Any:
    return SimpleNamespace(st_mode=mode, st_uid=uid, st_gid=gid, st_mtime_ns=mtime_ns, st_size=0)


def file_entry(name: bytes, content: bytes = b"", **facts: int) -> bytes:
    padding = bytes(-len(content) % 512)
    return entry_header(name, b"0", status_of(**facts), size=len(content)) + content + padding


def read_whole(tar: bytes, piece: int, limits: TarLimits | None = None) -> tuple[Found, str]:
    reader, found = LayerReader(limits), Found()
    try:
        for start in range(0, len(tar), piece):
            part = tar[start : start + piece]
            reader.room()[: len(part)] = part
            for event in reader.read(len(part)):
                if isinstance(event, SmallFile):
                    mode, owner, mtime_ns = event.mode, event.owner, event.mtime_ns
                    found.append((event.path, "file", mode, owner, mtime_ns, bytes(event.content)))
                else:
                    _add(found, event)
        reader.finish()
    except TarRefused as why:
        return found, str(why)
    return found, ""


def read_by_fields(tar: bytes, limits: TarLimits | None = None) -> tuple[Found, str]:
    reader, found = LayerReader(limits), Found()
    try:
        for event in reader.feed(tar):
            _add(found, event)
        reader.finish()
    except TarRefused as why:
        return found, str(why)
    return found, ""


def _add(found: Found, event: object) -> None:
    if isinstance(event, LayerMember):
        found.append((event.path, event.kind, event.mode, (event.uid, event.gid), event.mtime_ns, event.whiteout))
    else:
        assert isinstance(event, memoryview)
        found[-1] = (*found[-1][:5], found[-1][5] + bytes(event))


names = st.one_of(
    st.sampled_from([b"f", b"a/f", b"a/b/f", b"a//f", b"./f", b"/f", b"a/../f", b"..", b"a/.", b"a/", b"x" * 300]),
    st.lists(st.sampled_from([b"a", b"b", b"c\xff", b".wh.x"]), min_size=1, max_size=4).map(b"/".join),
)
entries = st.one_of(
    st.builds(
        file_entry,
        names,
        st.one_of(st.binary(max_size=2000), st.sampled_from([b"", bytes(512), bytes(200_000)])),
        mode=st.sampled_from([0o644, 0o755, 0o600, 0o4755, 0o1777, 0]),
        uid=st.sampled_from([0, 1000, 1 << 22, (1 << 21) - 1]),
        gid=st.sampled_from([0, 65534]),
        mtime_ns=st.sampled_from([0, -5, 1, 1_700_000_000_000_000_001, 9_300_000_000 * 10**9, 20_000_000_000 * 10**9]),
    ),
    names.map(lambda name: entry_header(name, b"5", status_of(0o755))),
    names.map(lambda name: entry_header(name, b"2", status_of(0o777), target=b"anywhere")),
    names.map(whiteout),
)
damage = st.tuples(st.integers(0, 1 << 20), st.one_of(st.integers(0, 255), st.sampled_from(b"\x00 89_+-/.")))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(entries, max_size=8),
    damages=st.lists(damage, max_size=3),
    cut=st.one_of(st.none(), st.integers(0, 6000)),
    piece=st.sampled_from([1, 100, 512, 1536, 2048, 10_000, ROOM_BYTES]),
    bounds=st.sampled_from([None, (3, 1 << 40), (100, 1500)]),
)
def test_a_layer_in_any_pieces_is_the_same_as_field_by_field(
    rows: list[bytes], damages: list[tuple[int, int]], cut: int | None, piece: int, bounds: tuple[int, int] | None
) -> None:
    """Also what is refused, and why."""
    tar = bytearray(b"".join(rows) + END)
    for at, value in damages:
        tar[at % len(tar)] = value
    limits = layer_limits(bounds[1], bounds[0]) if bounds is not None else None
    data = bytes(tar[:cut])
    found, why = read_whole(data, max(piece, len(data) // 500), limits)
    meant, why_meant = read_by_fields(data, limits)
    assert why == why_meant
    if not why:
        assert found == meant
    else:  # what was cut off in the middle of a small file never began
        assert found == meant[: len(found)] or (found[:-1] == meant[: len(found) - 1] and len(found) == len(meant))
        assert len(meant) - len(found) <= 1


def test_each_changed_byte_of_a_small_file_s_headers_is_read_as_field_by_field() -> None:
    before, after, tail = plain_file_parts()
    plain = file_entry(b"dir/name", b"content")
    assert plain.startswith(before)
    assert plain[len(before) + 20 :].startswith(after)
    assert plain[:PLAIN_BYTES].endswith(tail)
    rng = random.Random(3)
    for at in range(PLAIN_BYTES):
        changed = bytearray(plain + END)
        changed[at] ^= 1 << rng.randrange(8)
        assert read_whole(bytes(changed), ROOM_BYTES) == read_by_fields(bytes(changed)), at


def test_usual_files_come_whole_and_those_of_one_directory_share_its_path() -> None:
    tar = b"".join(file_entry(b"d/%d" % number, b"x" * number) for number in range(50)) + END
    reader = LayerReader()
    reader.room()[: len(tar)] = tar
    events = list(reader.read(len(tar)))
    assert all(isinstance(event, SmallFile) for event in events)
    assert len(events) == 50
    assert len({id(event.above) for event in events if isinstance(event, SmallFile)}) == 1


def test_new_files_get_their_modes_and_owners_whatever_the_directory_and_the_umask_make_of_them(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for top in (one, other):
        top.mkdir()
    (one / "d").mkdir()
    (other / "d").mkdir()
    (other / "d").chmod(0o2777)
    group = 4242 if os.geteuid() == 0 else os.getegid()
    os.chown(other / "d", -1, group)
    (other / "d").chmod(0o2777)
    for directory in (one, one / "d"):
        for number, mode in enumerate((0o644, 0o600, 0o777, 0o666, 0o444, 0o000, 0o644, 0o777)):
            path = directory / f"f{number}"
            path.write_bytes(b"x" * number)
            path.chmod(mode)
            if os.geteuid() == 0 and number % 3 == 0:
                os.chown(path, 1000 + number, 2000)
    layer, index, _, _ = pack(one, None)
    index.close()
    before = os.umask(0o077)
    try:
        apply(layer, other)
    finally:
        os.umask(before)
    assert differences(picture(one), picture(other)) == []


def test_what_a_new_file_has_already_is_not_given_to_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owner and mode cost a system call only where they are not what the directory makes them."""
    uid, gid = os.geteuid(), os.getegid()
    rows = [file_entry(b"d/%d" % number, b"x", uid=uid, gid=gid) for number in range(300)]
    made = entry_header(b"d", b"5", status_of(0o755, uid, gid))
    calls: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(os, name)

    monkeypatch.setattr(layerapply, "os", Counting())
    before = os.umask(0o022)
    try:
        applied = apply(made + b"".join(rows) + END, tmp_path)
    finally:
        os.umask(before)
    assert applied.files == 300
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in (tmp_path / "d").iterdir())
    assert len(calls) < 300 * 4 + 80  # open, write, utime, close, and what the directories take


@pytest.mark.parametrize("there", ["file", "directory", "link"])
def test_a_small_file_takes_the_place_of_whatever_is_there(tmp_path: Path, there: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("stays")
    top = tmp_path / "top"
    top.mkdir()
    match there:
        case "file":
            (top / "f").write_text("a longer content than the new one")
        case "directory":
            (top / "f" / "inner").mkdir(parents=True)
        case "link":
            (top / "f").symlink_to(outside)
    apply(file_entry(b"f", b"new", uid=os.geteuid(), gid=os.getegid()) + END, top)
    assert not (top / "f").is_symlink()
    assert (top / "f").read_bytes() == b"new"
    assert outside.read_text() == "stays"


def test_no_small_file_is_made_through_a_link(tmp_path: Path) -> None:
    """S8: a layer's own link cannot be stepped through either."""
    outside, top = tmp_path / "outside", tmp_path / "top"
    outside.mkdir()
    top.mkdir()
    link = entry_header(b"d", b"2", status_of(0o777), target=os.fsencode(outside))
    with pytest.raises(TarRefused, match="no directory"):
        apply(file_entry(b"d0", b"x") + link + file_entry(b"d/f", b"x") + END, top)
    assert list(outside.iterdir()) == []
