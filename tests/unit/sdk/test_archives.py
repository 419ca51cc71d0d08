"""Directories on the client's side: the reader that the server has too, and what a hostile sandbox can send."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sojourn.archives import _Arrival, _open_to_pack
from sojourn.cli.copy import split
from sojourn.errors import UnexpectedAnswer
from sojourn.types import Transferred
from tests.support import tar_corpus
from tests.support.tar_corpus import END, GOOD, directory, fingerprint, make_canary, member, symlink

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["tarread", "untar", "tarpack"])
def test_the_clients_archive_code_is_the_executors(name: str) -> None:
    ours = (ROOT / f"sdk/src/sojourn/{name}.py").read_text()
    theirs = (ROOT / f"executor/{name}.py").read_text()
    assert ours == theirs.replace("from executor.", "from sojourn.")


def received(data: bytes, local: Path, max_bytes: int = 1 << 30) -> Transferred:
    arrival = _Arrival(local, max_bytes)
    try:
        for at in range(0, len(data), 1000):
            arrival.feed(data[at : at + 1000])
        return arrival.put_in_place()
    finally:
        arrival.close()


# Links that lead out are left out by the client; what else such an archive has is then no attack any more.
LINKS = {name for name in tar_corpus.REFUSED if name.startswith("symlink_") and "then" not in name}
PACKED = ("gzip_", "bomb_", "ten_thousand", "pax_headers")


@pytest.mark.parametrize("name", sorted(name for name in tar_corpus.REFUSED if not name.startswith(PACKED)))
def test_nothing_that_a_sandbox_sends_is_written_outside_or_in_part(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    make_canary(outside)
    before, (code, data) = fingerprint(outside), tar_corpus.attack(name, outside)
    for local in (tmp_path / "new", tmp_path / "there"):
        if local.name == "there":
            local.mkdir()
        try:
            received(data, local, max_bytes=1 << 20 if code == "too_large" else 1 << 40)
        except (UnexpectedAnswer, FileNotFoundError):
            assert not (local.exists() and os.listdir(local))
        else:
            assert name in LINKS or "symlink" in name or code == "too_large", "an attack was taken"
            for path in local.rglob("*"):
                if path.is_symlink():
                    assert os.path.realpath(path).startswith(str(local))
        assert fingerprint(outside) == before
    assert set(os.listdir(tmp_path)) <= {"outside", "new", "there"}


def test_links_that_lead_out_are_left_out_and_named(tmp_path: Path) -> None:
    data = GOOD + symlink(b"out", b"/etc/passwd") + symlink(b"in", b"good") + symlink(b"up", b"..") + END
    done = received(data, tmp_path / "x")
    assert sorted(os.listdir(tmp_path / "x")) == ["good", "in"]
    assert [(one.path, one.reason) for one in done.left] == [
        ("out", "leads out of the directory"), ("up", "leads out of the directory"),
    ]  # fmt: skip
    assert done.entries == 2


def test_what_the_sandbox_says_of_itself_may_be_anything(tmp_path: Path) -> None:
    comments = (
        b"sojourn: ", b"sojourn: []", b"sojourn: {", b'sojourn: {"changed": 3}', b"sojourn: " + b"[" * 5000, b"\xff",
        b'sojourn: {"changed": {"names": [1, {}]}}',
    )  # fmt: skip
    for at, comment in enumerate(comments):
        data = GOOD + tar_corpus.pax((b"comment", comment)) + directory(b"./") + END
        assert received(data, tmp_path / str(at)).left == []
    told = b'sojourn: {"changed": {"count": 1, "names": ["log"]}}'
    done = received(GOOD + tar_corpus.pax((b"comment", told)) + directory(b"./") + END, tmp_path / "told")
    assert [(one.path, one.reason) for one in done.left] == [("log", "changed while it was read")]


def test_what_is_there_is_joined_and_a_directory_never_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "x/a").mkdir(parents=True)
    (tmp_path / "x/a/old").write_text("old")
    received(member(b"a/new", b"new") + directory(b"shut", 0o500) + END, tmp_path / "x")
    assert sorted(os.listdir(tmp_path / "x/a")) == ["new", "old"]
    assert stat.S_IMODE((tmp_path / "x/shut").stat().st_mode) == 0o500
    with pytest.raises(FileExistsError):
        received(member(b"a", b"a file") + END, tmp_path / "x")
    (tmp_path / "x/l").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        received(member(b"l/f", b"x") + END, tmp_path / "x")
    with pytest.raises(NotADirectoryError):
        received(END, tmp_path / "x/a/old")
    assert sorted(os.listdir(tmp_path / "x")) == ["a", "l", "shut"]


def test_a_sandbox_that_sends_without_end_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(UnexpectedAnswer, match="limit"):
        received(member(b"f", size=1 << 40, raw_size=b"\x80" + (1 << 40).to_bytes(11, "big")), tmp_path / "x")
    with pytest.raises(UnexpectedAnswer, match="limit"):
        received(
            b"".join(member(b"f%d" % at, bytes(1000)) for at in range(100)) + END, tmp_path / "x", max_bytes=50_000
        )
    assert os.listdir(tmp_path) == []


def test_what_is_packed_here_has_no_link_that_the_server_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_text("x")
    for name, target in (("in", "d/f"), ("out", "../x"), ("abs", "/etc"), ("d/up", "../d"), ("late", "d/../d/f")):
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    packer, fd = _open_to_pack(tmp_path)
    try:
        data = b"".join(packer.chunks())
    finally:
        os.close(fd)
    assert sorted(packer.links.names) == ["abs", "late", "out"]
    assert packer.special.names == ["fifo"]
    done = received(data, tmp_path / "back")
    assert sorted(os.listdir(tmp_path / "back")) == ["d", "in"]
    assert {one.path for one in done.left} == {"abs", "late", "out", "fifo"}


@pytest.mark.parametrize(
    ("word", "parts"),
    [("demo:a/b", ("demo", "a/b")), ("demo:", ("demo", ".")), ("demo:/tmp/x", ("demo", "/tmp/x")), ("./a:b", None),
     ("a/b:c", None), ("a", None), (":a", None), ("demo:a:b", ("demo", "a:b")), ("/a:b", None), (".", None)],
)  # fmt: skip
def test_a_word_with_a_colon_before_any_slash_is_in_a_sandbox(word: str, parts: tuple[str, str] | None) -> None:
    assert split(word) == parts
