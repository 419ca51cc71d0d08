"""What a workspace may begin with, and what is refused without leaving anything behind. (S8, S9, S12 to S14)"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.tarread import TarLimits
from manager.app import sources_of
from manager.config import ManagerConfig
from manager.egress.fetch import Fetcher, FetchLimits
from manager.errors import InvalidRequest, ManagerError, NotFound, RateLimited, StoreUnavailable, TooLarge
from manager.model import Owner
from manager.services.checkpoints import Checkpoints
from manager.services.manifests import Manifest
from manager.services.sources import Source, Sources
from manager.services.sweeping import Sweeper
from manager.store.blobs import read_blob
from manager.store.cloud import CloudObjects
from tests.support import tar_corpus, zip_corpus
from tests.support.memory_objects import MemoryCache, memory_objects
from tests.support.tls_server import Certificates, TestDialler, dialler_for, reply, tls_server
from tests.support.world import ACME, SHOP

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="layers are looked into with the program zstd")
OTHER = Owner("other", "web")
PREFIXES = ("s3://data/shared", "gs://bucket")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def dialler() -> Iterator[TestDialler]:
    with ThreadPoolExecutor(2) as threads:
        made = dialler_for(threads)
        made.answers["archives.test"] = [["127.0.0.1"]]
        yield made


class At:
    def __init__(self, dialler: TestDialler, certificates: Certificates, spool: Path, **options: Any) -> None:
        self.objects, self.bucket = memory_objects(), memory_objects()
        self.opened: list[str] = []
        self.dialler, self.certificates, self.spool = dialler, certificates, spool
        self.checkpoints = Checkpoints(self.objects, MemoryCache(), cast(Any, None))
        fetcher = Fetcher(dialler, FetchLimits(total_bytes=8 << 20), tls=certificates.client)
        self.sources = Sources(
            self.checkpoints, fetcher, prefixes=PREFIXES, open_at=self._open, spool_dir=spool, **options
        )

    def _open(self, url: str) -> CloudObjects:
        self.opened.append(url)
        return self.bucket

    async def left(self) -> list[str]:
        """Everything that object storage holds, and the spool."""
        names = [info.key async for page in self.objects.list("") for info in page]
        return names + [str(path) for path in self.spool.iterdir()]

    async def tree(self, manifest: Manifest) -> dict[str, tuple[int, bytes | str]]:
        assert [layer.full for layer in manifest.layers] == [True]
        packed = b"".join([piece async for piece in read_blob(self.objects, manifest.layers[0].blob)])
        tar = subprocess.run(["zstd", "-dcq"], input=packed, capture_output=True, check=True, timeout=60).stdout
        found: dict[str, tuple[int, bytes | str]] = {}
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                found[member.name] = (member.mode, content.read() if content is not None else member.linkname)
        return found

    @asynccontextmanager
    async def serving(self, answer: bytes) -> AsyncIterator[str]:
        async with tls_server(self.certificates, lambda path: answer) as served:
            self.dialler.opened.add(("127.0.0.1", served.port))
            self.dialler.rules = type(self.dialler.rules)(ports=frozenset({443, served.port}))
            yield f"{served.url}/archive"


@pytest.fixture
async def at(dialler: TestDialler, certificates: Certificates, tmp_path: Path) -> AsyncIterator[At]:
    made = At(dialler, certificates, tmp_path)
    yield made
    await made.objects.close()
    await made.bucket.close()


async def refused(at: At, source: Source, owner: Owner = ACME, **options: Any) -> ManagerError:
    """What it is refused with: and nothing is left of it."""
    before = await at.left()
    with pytest.raises(ManagerError) as refusal:
        await at.sources.prepare(owner, "s1", source, **options)
    assert await at.left() == before
    assert await at.checkpoints.head(owner, "s1") is None
    assert refusal.value.message.isprintable()
    return refusal.value


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-cq"], input=data, capture_output=True, check=True, timeout=60).stdout


# ── archives ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["tar", "gzip", "zstd", "zip"])
async def test_an_archive_becomes_the_workspaces_first_checkpoint(at: At, kind: str) -> None:
    tar = tar_corpus.ordinary()
    data = {"tar": tar, "gzip": gzip.compress(tar), "zstd": zstd(tar), "zip": zip_corpus.ordinary()}[kind]
    async with at.serving(reply(data)) as url:
        source = Source(archive_url=url, sha256=hashlib.sha256(data).hexdigest().upper())
        manifest = await at.sources.prepare(ACME, "s1", source)
    tree = await at.tree(manifest)
    assert tree["run.sh"] == (0o755, b"#!/bin/sh\n")
    assert manifest == await at.checkpoints.head(ACME, "s1")
    assert (manifest.owner, manifest.workspace, manifest.state) == (ACME, "s1", None)
    assert manifest.layers[0].entries == len(tree)
    assert [name for name in await at.left() if str(at.spool) in name] == []


@pytest.mark.parametrize("name", ["dot_dot", "hardlink_to_shadow", "cve_2025_4517", "fifo", "text", "gzip_cut",
                                  "bomb_in_many_members", "twice_the_same_file"])  # fmt: skip
async def test_a_bad_archive_is_refused_by_name_and_leaves_nothing(at: At, name: str, tmp_path: Path) -> None:
    code, data = tar_corpus.attack(name, tmp_path)
    async with at.serving(reply(data)) as url:
        why = await refused(at, Source(archive_url=url))
    assert why.code == ("too_large" if code == "too_large" else "invalid_request")
    assert why.details["field"] == "source.archive_url"
    if name == "dot_dot":
        assert why.details["member"] == "../evil"
        assert "'..'" in why.message


@pytest.mark.parametrize("name", ["overlap_bomb", "link_to_the_parent", "nul_in_the_name", "wrong_crc"])
async def test_a_bad_zip_is_refused_and_leaves_nothing(at: At, name: str) -> None:
    async with at.serving(reply(zip_corpus.REFUSED[name][1]())) as url:
        await refused(at, Source(archive_url=url))


async def test_an_archive_with_another_hash_than_the_given_one_is_not_even_read(at: At) -> None:
    async with at.serving(reply(b"not an archive at all")) as url:
        why = await refused(at, Source(archive_url=url, sha256="0" * 64))
    assert why.details == {"field": "source.sha256"}


async def test_what_the_server_does_wrong_is_said(at: At) -> None:
    for answer, words in (
        (reply(b"", "404 Not Found"), "404"),
        (reply(b"x" * 100, headers={"Content-Length": "200"}), "cut off"),
        (reply(b"", "302 Found", {"Location": "https://169.254.169.254/"}), "not a public address"),
    ):
        async with at.serving(answer) as url:
            why = await refused(at, Source(archive_url=url))
            assert isinstance(why, InvalidRequest)
            assert words in why.message
    async with at.serving(reply(bytes(9 << 20))) as url:
        why = await refused(at, Source(archive_url=url))
        assert (why.code, why.details["limit"]) == ("too_large", 8 << 20)


async def test_an_archive_larger_than_the_sandboxs_disk_is_refused(at: At) -> None:
    data = tar_corpus.member(b"f", os.urandom(2 << 20)) + tar_corpus.END
    async with at.serving(reply(data)) as url:
        why = await refused(at, Source(archive_url=url), disk_bytes=1 << 20)
        assert isinstance(why, TooLarge)
        assert why.details["limit"] == 1 << 20


async def test_an_empty_archive_is_no_workspace(at: At) -> None:
    async with at.serving(reply(tar_corpus.directory(b"./") + tar_corpus.END)) as url:
        assert "nothing in it" in (await refused(at, Source(archive_url=url))).message


async def test_object_storage_that_is_away_says_so_and_what_it_does_all_the_same_is_swept(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = at.objects.put
    late: list[tuple[str, bytes]] = []

    async def unanswered(key: str, data: bytes, **options: Any) -> str:
        if key.startswith("layers/"):
            late.append((key, data))
            raise StoreUnavailable("away")
        return await real(key, data, **options)

    async def leading() -> bool:
        return True

    monkeypatch.setattr(at.objects, "put", unanswered)
    async with at.serving(reply(tar_corpus.ordinary())) as url:
        with pytest.raises(StoreUnavailable):
            await at.sources.prepare(ACME, "s1", Source(archive_url=url))
    monkeypatch.undo()
    assert late
    for key, data in late:  # it had been carried out, and only the answer was lost
        await at.objects.put(key, data)
    sweeper = Sweeper(at.objects, at.checkpoints, leading, dead_sec=-2.0, grace_sec=0.0)
    await sweeper.sweep_saves()
    await sweeper.collect_due()
    assert await at.left() == ["clock"]  # the sweeper's own


async def test_a_caller_that_goes_away_leaves_nothing(at: At) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000)
        begun.set()
        await asyncio.Event().wait()

    begun = asyncio.Event()
    async with tls_server(at.certificates, lambda path: endless()) as served:
        at.dialler.opened.add(("127.0.0.1", served.port))
        at.dialler.rules = type(at.dialler.rules)(ports=frozenset({served.port}))
        caller = asyncio.create_task(at.sources.prepare(ACME, "s1", Source(archive_url=f"{served.url}/x")))
        await begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert await at.left() == []


async def test_one_projects_sources_keep_no_other_project_waiting(
    dialler: TestDialler, certificates: Certificates, tmp_path: Path
) -> None:
    at = At(dialler, certificates, tmp_path, turn_sec=1.0)
    started = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal started
        started += 1
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000)
        await asyncio.Event().wait()

    data = tar_corpus.ordinary()
    async with tls_server(certificates, lambda path: endless() if path == "/slow" else reply(data)) as served:
        at.dialler.opened.add(("127.0.0.1", served.port))
        at.dialler.rules = type(at.dialler.rules)(ports=frozenset({served.port}))
        slow = [
            asyncio.create_task(at.sources.prepare(ACME, f"slow{n}", Source(archive_url=f"{served.url}/slow")))
            for n in range(2)
        ]
        async with asyncio.timeout(60):
            while started < 2:
                await asyncio.sleep(0.01)
        with pytest.raises(RateLimited):
            await at.sources.prepare(ACME, "third", Source(archive_url=f"{served.url}/quick"))
        theirs = await at.sources.prepare(OTHER, "theirs", Source(archive_url=f"{served.url}/quick"))
        assert theirs.workspace == "theirs"
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
    await at.objects.close()


# ── prefixes ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_prefix_becomes_the_workspaces_first_checkpoint(at: At) -> None:
    big = os.urandom(3 << 20)
    for key, data in (("run/a.txt", b"a"), ("run/deep/er/b", big), ("run/empty", b""), ("other/c", b"c")):
        await at.bucket.put(key, data)
    manifest = await at.sources.prepare(ACME, "s1", Source(prefix="s3://data/shared/acme/run/"))
    assert at.opened == ["s3://data/shared/acme"]
    tree = await at.tree(manifest)
    assert {name: content for name, (_, content) in tree.items() if content} == {"a.txt": b"a", "deep/er/b": big}
    assert set(tree) == {"a.txt", "deep", "deep/er", "deep/er/b", "empty"}
    assert tree["a.txt"][0] == 0o644


@pytest.mark.parametrize(
    "prefix",
    [
        "s3://data/shared/acme2/run/", "s3://data/shared/acm/", "s3://data/shared/", "s3://data/shared/other/run/",
        "s3://data/sharedacme/", "s3://data/shared/acme/../other/", "s3://data/shared/acme/%2e%2e/other/",
        "s3://data/shared/./acme/", "s3://data/shared//acme/", "s3://data2/shared/acme/", "s3://dat/shared/acme/",
        "gs://data/shared/acme/", "gs://bucket/other/", "file:///shared/acme/", "s3://data/shared/acme/run?x=1",
        "s3://data/shared/acme/run#x", "s3://user@data/shared/acme/", "S3://data/shared/acme/", "s3://data/shared/ACME/",
        "s3://data/shared/acme\n/", "s3://data/shared/acme/\0", "/shared/acme", "acme/run", "s3://", "s3:///shared/acme/",
        "https://data/shared/acme/", "s3://data/shared/acme/" + "d" * 2000, "",
    ],
)  # fmt: skip
async def test_a_prefix_outside_the_tenants_own_is_refused_unopened(at: At, prefix: str) -> None:
    why = await refused(at, Source(prefix=prefix))
    assert why.details == {"field": "source.prefix"}
    assert at.opened == []


def test_no_text_leads_to_objects_outside_the_tenants_prefix() -> None:
    """S14: whatever is written, what is opened is the operator's place with the tenant's own name behind it."""
    sources = Sources(cast(Any, None), cast(Any, None), prefixes=PREFIXES, open_at=cast(Any, None))
    pieces = st.sampled_from(
        ["s3://", "gs://", "data", "bucket", "shared", "acme", "other", "/", "//", "..", ".", "%2e", "%2f", "?", "#",
         "@", ":", "\\", "\0"]
    )  # fmt: skip

    @settings(max_examples=400, deadline=None)
    @given(st.lists(pieces, max_size=12).map("".join) | st.text(max_size=40))
    def tries(text: str) -> None:
        try:
            url, within = sources._place(ACME, text)
        except InvalidRequest:
            return
        assert url in ("s3://data/shared/acme", "gs://bucket/acme")
        assert within == "" or within.endswith("/")
        assert not {"..", ".", ""} & set(within.split("/")[:-1])

    tries()


async def test_objects_whose_names_are_no_paths_or_that_are_too_many_are_refused(at: At) -> None:
    at.sources._limits = TarLimits(entries=3, total_bytes=1000)
    await at.bucket.put("run/f", b"x")
    await at.bucket.put("run/f/below", b"x")
    assert "no directory" in (await refused(at, Source(prefix="gs://bucket/acme/run"))).message
    await at.bucket.delete("run/f/below")
    for number in range(4):
        await at.bucket.put(f"run/{number}", b"x")
    assert (await refused(at, Source(prefix="gs://bucket/acme/run"))).code == "too_large"
    for number in range(4):
        await at.bucket.delete(f"run/{number}")
    await at.bucket.put("run/f", bytes(1001))
    assert (await refused(at, Source(prefix="gs://bucket/acme/run"))).code == "too_large"
    assert "nothing at this prefix" in (await refused(at, Source(prefix="gs://bucket/acme/none"))).message


# ── snapshots, and what is none of the three ────────────────────────────────────────────────────────────────────────


async def test_a_snapshot_is_found_by_its_own_project_only(at: At) -> None:
    async with at.serving(reply(tar_corpus.ordinary())) as url:
        await at.sources.prepare(ACME, "s0", Source(archive_url=url))
    snapshot = await at.checkpoints.snapshot(ACME, "s0", name="first")
    answers = []
    for owner, snapshot_id in ((OTHER, snapshot.snapshot_id), (SHOP, snapshot.snapshot_id), (ACME, "n" + "a" * 26)):
        why = await refused(at, Source(snapshot_id=snapshot_id), owner)
        assert isinstance(why, NotFound)
        answers.append((why.message, why.details))
    assert answers == [("there is no such snapshot", {})] * 3
    manifest = await at.sources.prepare(ACME, "s1", Source(snapshot_id=snapshot.snapshot_id))
    assert "run.sh" in await at.tree(manifest)


@pytest.mark.parametrize(
    "source",
    [
        Source(), Source(archive_url="https://x.org/", prefix="s3://data/shared/acme/"), Source(sha256="0" * 64),
        Source(prefix="s3://data/shared/acme/", sha256="0" * 64), Source(archive_url="https://x.org/", sha256="abc"),
        Source(archive_url="http://x.org/"), Source(archive_url="https://u:p@x.org/"), Source(snapshot_id="../x"),
        Source(snapshot_id=""), Source(snapshot_id="A" * 10), Source(archive_url=""),
    ],
)  # fmt: skip
async def test_what_is_no_source_is_refused_without_asking_anybody(at: At, source: Source) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        at.sources.check(ACME, source)
    assert refusal.value.details["field"].startswith("source")
    await refused(at, source)
    assert at.dialler.looked_up == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "2130706433", "localhost"])
async def test_no_setting_opens_this_machine_to_archive_urls(at: At, host: str) -> None:
    """What production makes of a configuration: its seams for tests are arguments, which no setting reaches."""
    config = ManagerConfig.load(
        {"SOJOURN_OUTBOUND_PORTS": "1,80,443,8780", "SOJOURN_DATA_DIR": str(at.spool)}, {}, {}, None
    )
    async with AsyncExitStack() as stack:
        sources = sources_of(config, at.checkpoints, stack)
        for port in ("", ":8780", ":80"):
            with pytest.raises(InvalidRequest):
                await sources.prepare(ACME, "s1", Source(archive_url=f"https://{host}{port}/x"))
    assert await at.left() == []
