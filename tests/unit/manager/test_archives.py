"""Strangers' archives become one plain tar, or are refused before anything is made of them. (S8, S9)"""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.gunzip import Gunzip
from executor.tarread import Member, TarLimits, TarReader, TarRefused
from manager.archives import child
from manager.archives.canonical import Canonical
from manager.archives.child import ArchiveRefused, NoZstd, kind_of, layer_of
from manager.archives.zipread import zip_members
from tests.support import tar_corpus, zip_corpus
from tests.support.own_memory import peak_bytes, peak_from_now_bytes

needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the program zstd")
_FAULT = {"invalid_path": {"path"}, "invalid_request": {"malformed", "unsupported"}, "too_large": {"limit"}}


def events(data: bytes, limits: TarLimits) -> Iterator[Member | memoryview | bytes]:
    kind = kind_of(data[:8])
    if kind == "zip":
        yield from zip_members(io.BytesIO(data), limits)
        return
    reader, gunzip = TarReader(limits), Gunzip() if kind == "gzip" else None
    for at in range(0, len(data), 100_000):
        piece = data[at : at + 100_000]
        for plain in [piece] if gunzip is None else gunzip.feed(piece):
            yield from reader.feed(plain)
    if gunzip is not None:
        gunzip.finish()
    reader.finish()


def converted(data: bytes) -> bytes:
    """In this process; the bound of the whole is the one that the child gets."""
    total = min(child.LIMITS.total_bytes, max(10 << 20, 100 * len(data)))
    canonical = Canonical()
    limits = TarLimits(entries=child.LIMITS.entries, total_bytes=total)
    return b"".join(canonical.take(events(data, limits))) + canonical.finish()


async def layer(data: bytes) -> tuple[bytes, child.Layer]:
    """By the child processes."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        async with layer_of(file) as made:
            return b"".join([piece async for piece in made.pieces]), made


def unpacked(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True, timeout=60).stdout


def tree(tar: bytes) -> dict[str, tuple[str, int, bytes | str]]:
    found: dict[str, tuple[str, int, bytes | str]] = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in archive:
            assert (member.uid, member.gid) == (0, 0)  # whoever commands run as in the pod gets it all
            if member.isfile():
                content = archive.extractfile(member)
                assert content is not None
                found[member.name] = ("file", member.mode, content.read())
            else:
                found[member.name] = (str(member.type, "ascii"), member.mode, member.linkname)
    return found


@pytest.mark.parametrize("name", tar_corpus.REFUSED)
def test_every_attack_of_the_tar_corpus_is_refused(name: str, tmp_path: Path) -> None:
    tar_corpus.make_canary(tmp_path / "outside")
    code, data = tar_corpus.attack(name, tmp_path / "outside")
    with pytest.raises(TarRefused) as refusal:
        converted(data)
    # What `zip` is by its magic is refused as a damaged zip.
    assert refusal.value.fault in _FAULT[code]


@pytest.mark.parametrize("name", zip_corpus.REFUSED)
def test_every_attack_of_the_zip_corpus_is_refused(name: str) -> None:
    fault, build = zip_corpus.REFUSED[name]
    with pytest.raises(TarRefused) as refusal:
        converted(build())
    assert refusal.value.fault == fault


def test_an_ordinary_tar_comes_out_as_the_same_tree() -> None:
    for data in (tar_corpus.ordinary(), gzip.compress(tar_corpus.ordinary())):
        made = tree(converted(data))
        assert made["run.sh"] == ("file", 0o755, b"#!/bin/sh\n")
        assert made["secret"] == ("file", 0o600, b"s")
        assert made["a/b/deep"] == ("file", 0o644, b"")
        assert made["a/up"][::2] == ("2", "../run.sh")
        assert made["dangling"][::2] == ("2", "nowhere/yet")
        assert made["empty"][0] == made["a"][0] == made["a/b"][0] == "5"
        assert made["hard"][::2] == ("1", "secret")


def test_an_ordinary_zip_comes_out_with_modes_links_and_names() -> None:
    made = tree(converted(zip_corpus.ordinary()))
    assert made["run.sh"] == ("file", 0o755, b"#!/bin/sh\n")
    assert made["empty"] == ("5", 0o700, "")
    assert made["a/b/grüß.txt"] == ("file", 0o644, "grün".encode() * 1000)
    assert made["set-id"][1] == 0o755
    assert made["stored"] == ("file", 0o600, bytes(range(256)))
    assert made["a/link"] == ("2", 0o777, "../run.sh")
    assert made["from-dos.txt"][2] == b"dos"


def test_parents_stand_before_what_is_in_them_and_long_names_are_whole() -> None:
    long = "d" * 150 + "/" + "e" * 150 + "/" + "f" * 200
    made = list(tree(converted(zip_corpus.packed((long, b"x"), ("d" * 150 + "/g", b"y")))))
    assert made == ["d" * 150, "d" * 150 + "/" + "e" * 150, long, "d" * 150 + "/g"]


def test_what_is_made_is_itself_an_archive_that_is_not_refused() -> None:
    once = converted(tar_corpus.ordinary())
    assert converted(once) == once


def test_a_member_of_many_gigabytes_is_refused_by_what_it_announces() -> None:
    with pytest.raises(TarRefused, match="limit"):
        converted(tar_corpus.member(b"f", raw_size=b"%011o\0" % (7 << 30)))


# ── the child processes ─────────────────────────────────────────────────────────────────────────────────────────────


@needs_zstd
async def test_the_child_makes_a_layer_and_counts_what_is_in_it() -> None:
    made, counts = await layer(gzip.compress(tar_corpus.ordinary()))
    assert unpacked(made) == converted(tar_corpus.ordinary())
    assert (counts.entries, counts.file_bytes) == (10, 11)
    made, _ = await layer(zip_corpus.ordinary())
    assert "from-dos.txt" in tree(unpacked(made))


@needs_zstd
async def test_zstd_is_unpacked_and_what_is_wrong_with_it_is_said() -> None:
    good = subprocess.run(
        ["zstd", "-cq"], input=tar_corpus.ordinary(), capture_output=True, check=True, timeout=60
    ).stdout
    made, _ = await layer(good)
    assert unpacked(made) == converted(tar_corpus.ordinary())
    with pytest.raises(ArchiveRefused, match="no zstd stream"):
        await layer(good[:-5])
    bomb = subprocess.run(
        ["zstd", "-cq"], input=tar_corpus.member(b"x", bytes(200 << 20)) + tar_corpus.END, capture_output=True,
        check=True, timeout=60,
    ).stdout  # fmt: skip
    with pytest.raises(ArchiveRefused, match="100 times its size") as refusal:
        await layer(bomb)
    assert refusal.value.fault == "limit"


@pytest.mark.parametrize("name", ["dot_dot", "cve_2025_4517", "bomb_by_ratio", "twice_the_same_file", "text"])
async def test_the_childs_refusal_names_the_fault(name: str, tmp_path: Path) -> None:
    code, data = tar_corpus.attack(name, tmp_path)
    with pytest.raises(ArchiveRefused) as refusal:
        await layer(data)
    assert refusal.value.fault in _FAULT[code]


@needs_zstd
async def test_without_a_zstd_program_layers_are_made_all_the_same_and_zstd_archives_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    big = zip_corpus.packed(("big", os.urandom(700_000)), ("small", b"s"))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    made, _ = await layer(big)
    assert unpacked(made) == converted(big)
    with pytest.raises(NoZstd):
        await layer(b"\x28\xb5\x2f\xfd" + bytes(20))


@needs_zstd
async def test_a_caller_that_goes_away_leaves_no_process_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    real = asyncio.create_subprocess_exec

    async def noted(*words: str, **options: object) -> asyncio.subprocess.Process:
        started.append(await real(*words, **options))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    noise = zip_corpus.packed(("noise", os.urandom(8 << 20)))
    before = sorted(os.listdir("/proc/self/fd"))

    async def begin() -> None:
        with tempfile.TemporaryFile() as file:
            file.write(noise)
            file.flush()
            async with layer_of(file) as made:
                async for _ in made.pieces:
                    begun.set()
                    await asyncio.Event().wait()

    begun = asyncio.Event()
    caller = asyncio.create_task(begin())
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
    assert len(sorted(os.listdir("/proc/self/fd"))) <= len(before)


async def test_a_large_archive_takes_no_memory_here() -> None:
    """The manager moves pieces: what an archive holds never is in its memory."""
    size = 256 << 20
    head = tar_corpus.member(b"zeros-and-noise", size=size, raw_size=b"%011o\0" % size)
    with tempfile.TemporaryFile() as file:
        file.write(head)
        noise = os.urandom(1 << 20)
        for _ in range(size >> 20):
            file.write(noise)
        file.write(tar_corpus.END)
        file.flush()
        before = peak_from_now_bytes()
        async with layer_of(file) as made:
            total = sum([len(piece) async for piece in made.pieces])
        assert total > 0
        assert made.file_bytes == size
        assert peak_bytes() - before < 64 << 20
