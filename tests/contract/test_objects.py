"""What all object storage promises: a directory, memory, a real S3 server, a stub of Google Cloud Storage, and Azurite,
a server of Azure's interface, where this machine has it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from manager.errors import StoreUnavailable
from manager.model import Owner
from manager.store.cloud import open_cloud
from manager.store.directory import DirectoryObjects
from manager.store.objects import (
    ObjectChanged,
    ObjectMissing,
    Objects,
    ObjectTooLarge,
    key_part,
    owner_prefix,
    same_version,
)
from manager.store.opening import open_objects
from tests.support.azurite_server import AZURITE, AzuriteServer, azurite_server
from tests.support.azurite_server import CREDENTIALS as AZURE_CREDENTIALS
from tests.support.gcs_stub import GcsStub, gcs_stub
from tests.support.memory_objects import memory_objects
from tests.support.s3_server import CREDENTIALS, S3Server

KINDS = [
    "directory", "memory", "s3", "gcs",
    pytest.param("azure", marks=pytest.mark.skipif(AZURITE is None, reason="Azurite is not installed (npm)")),
]  # fmt: skip


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsStub]:
    with gcs_stub() as stub:
        yield stub


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer | None]:
    """None where it is not installed: then nothing asks for it."""
    if AZURITE is None:
        yield None
        return
    with azurite_server(tmp_path_factory.mktemp("azure")) as server:
        yield server


def opened(kind: str, tmp_path: Path, server: S3Server, gcs: GcsStub, azure: AzuriteServer | None) -> Objects:
    if kind == "azure":
        assert azure is not None
        return open_objects(azure.url(secrets.token_hex(8)), tmp_path, AZURE_CREDENTIALS)
    if kind == "memory":
        return memory_objects()
    if kind == "gcs":
        return gcs.store(secrets.token_hex(8))
    url = f"file://{tmp_path}/objects" if kind == "directory" else server.url(secrets.token_hex(8))
    return open_objects(url, tmp_path, CREDENTIALS)


@pytest.fixture(params=KINDS)
async def objects(
    request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server, gcs: GcsStub, azure: AzuriteServer | None
) -> AsyncIterator[Objects]:
    found = opened(request.param, tmp_path, s3, gcs, azure)
    yield found
    await found.close()


async def read(objects: Objects, key: str) -> bytes | None:
    found = await objects.get(key, limit=1 << 20)
    return None if found is None else found.data


async def keys_under(objects: Objects, prefix: str, after: str = "") -> list[str]:
    return [info.key async for page in objects.list(prefix, after) for info in page]


async def test_what_was_put_is_read_back_with_its_size_and_etag(objects: Objects) -> None:
    etag = await objects.put("a/b", b"hello")
    found = await objects.get("a/b", limit=5)
    info = await objects.head("a/b")
    assert found is not None
    assert (found.data, found.etag) == (b"hello", etag)
    assert info is not None
    assert (info.key, info.size, info.etag) == ("a/b", 5, etag)
    for listed in [each async for page in objects.list("a/") for each in page]:
        assert (listed.key, listed.size, same_version(listed.etag, etag)) == ("a/b", 5, True)


async def test_an_empty_object_is_one(objects: Objects) -> None:
    await objects.put("empty", b"")
    assert await read(objects, "empty") == b""


async def test_a_later_put_replaces_the_whole_and_changes_the_etag(objects: Objects) -> None:
    first = await objects.put("a", b"long content")
    second = await objects.put("a", b"short")
    assert second != first
    for listed in [each async for page in objects.list("a") for each in page]:
        assert (same_version(listed.etag, first), same_version(listed.etag, second)) == (False, True)
    assert await read(objects, "a") == b"short"


async def test_what_is_missing_is_none_and_deleting_it_is_no_error(objects: Objects) -> None:
    assert await objects.get("no/such", limit=1) is None
    assert await objects.head("no/such") is None
    await objects.delete("no/such")
    with pytest.raises(ObjectMissing):
        async for _ in objects.stream("no/such"):
            pass


async def test_what_was_deleted_is_gone_and_can_be_put_again(objects: Objects) -> None:
    await objects.put("a/b/c", b"1")
    await objects.delete("a/b/c")
    assert await objects.head("a/b/c") is None
    await objects.put("a/b/c", b"2", if_absent=True)
    assert await read(objects, "a/b/c") == b"2"


async def test_an_object_over_the_readers_limit_is_refused(objects: Objects) -> None:
    await objects.put("a", b"123456")
    with pytest.raises(ObjectTooLarge):
        await objects.get("a", limit=5)


async def test_put_if_absent_writes_only_where_there_is_nothing(objects: Objects) -> None:
    await objects.put("a", b"first", if_absent=True)
    with pytest.raises(ObjectChanged):
        await objects.put("a", b"second", if_absent=True)
    assert await read(objects, "a") == b"first"


async def test_put_if_match_writes_only_over_that_version(objects: Objects) -> None:
    first = await objects.put("a", b"1")
    second = await objects.put("a", b"2", if_match=first)
    with pytest.raises(ObjectChanged):
        await objects.put("a", b"3", if_match=first)
    assert await read(objects, "a") == b"2"
    await objects.put("a", b"4", if_match=second)
    assert await read(objects, "a") == b"4"


async def test_put_if_match_makes_nothing_where_there_is_nothing(objects: Objects) -> None:
    gone = await objects.put("a", b"1")
    await objects.delete("a")
    with pytest.raises(ObjectChanged):
        await objects.put("a", b"2", if_match=gone)
    assert await read(objects, "a") is None


async def test_a_conditional_put_that_is_repeated_after_a_lost_answer_has_succeeded(objects: Objects) -> None:
    first = await objects.put("a", b"mine", if_absent=True)
    assert await objects.put("a", b"mine", if_absent=True) == first
    second = await objects.put("a", b"mine too", if_match=first)
    assert await objects.put("a", b"mine too", if_match=first) == second


async def test_of_many_at_once_exactly_one_conditional_put_wins(objects: Objects) -> None:
    for round_ in range(2):
        key = f"race/{round_}"
        made = await asyncio.gather(
            *(objects.put(key, f"made by {n}".encode(), if_absent=True) for n in range(8)), return_exceptions=True
        )
        winners = [n for n, answer in enumerate(made) if not isinstance(answer, BaseException)]
        assert all(isinstance(answer, str | ObjectChanged) for answer in made)
        assert len(winners) == 1
        found = await objects.get(key, limit=100)
        assert found is not None
        assert found.data == f"made by {winners[0]}".encode()
        changed = await asyncio.gather(
            *(objects.put(key, f"changed by {n}".encode(), if_match=found.etag) for n in range(8)),
            return_exceptions=True,
        )
        assert sum(isinstance(answer, str) for answer in changed) == 1
        assert all(isinstance(answer, str | ObjectChanged) for answer in changed)


async def test_a_range_is_streamed(objects: Objects) -> None:
    content = os.urandom(3 << 20)
    await objects.put("a", content)
    for start, end in ((0, None), (1_000_000, 2_000_001), (3_000_000, None), (5, 5)):
        assert b"".join([piece async for piece in objects.stream("a", start, end)]) == content[start:end]


async def test_a_stream_may_be_left_early(objects: Objects) -> None:
    await objects.put("a", bytes(8 << 20))
    async with aclosing(objects.stream("a")) as pieces:
        async for piece in pieces:
            assert piece
            break


async def test_a_listing_has_what_is_under_the_prefix_and_nothing_else(objects: Objects) -> None:
    for key in ("t/p/a", "t/p/b/c", "t/p2/x", "t2/p/y"):
        await objects.put(key, b"1")
    assert await keys_under(objects, "t/p/") == ["t/p/a", "t/p/b/c"]
    assert await keys_under(objects, "t/") == ["t/p/a", "t/p/b/c", "t/p2/x"]
    assert await keys_under(objects, "nobody/") == []
    assert len(await keys_under(objects, "")) == 4


async def test_a_listing_goes_on_after_a_key(objects: Objects) -> None:
    await asyncio.gather(*(objects.put(f"t/p/{n:03}", b"1") for n in range(40)))
    assert await keys_under(objects, "t/p/", "t/p/019") == [f"t/p/{n:03}" for n in range(20, 40)]
    assert await keys_under(objects, "t/p/", "t/p/039") == []


async def test_more_than_a_page_is_listed_whole_and_in_order(objects: Objects) -> None:
    for start in range(0, 1200, 100):
        await asyncio.gather(*(objects.put(f"many/{n:05}", b"1") for n in range(start, start + 100)))
    pages = [page async for page in objects.list("many/")]
    assert [info.key for page in pages for info in page] == [f"many/{n:05}" for n in range(1200)]
    assert max(len(page) for page in pages) <= 1000


async def test_parts_of_any_text_stay_apart(objects: Objects) -> None:
    """S14, S21: a tenant's name is never a path."""
    names = ["..", ".", "", "a/b", "a", "A", "a=b", "ä", "x" * 500, "x" * 501, "../../etc", "=all", "a%2fb", "\n", " "]
    for name in names:
        await objects.put(f"{owner_prefix(Owner(name, name))}one", name.encode())
    for name in names:
        assert await read(objects, f"{owner_prefix(Owner(name, name))}one") == name.encode()
        assert await keys_under(objects, owner_prefix(Owner(name, name))) == [f"{owner_prefix(Owner(name, name))}one"]
    assert len({key_part(name) for name in names}) == len(names)
    assert all(len(key_part(name)) <= 200 for name in names)


async def test_an_outage_is_said_in_time_and_with_its_code(tmp_path: Path) -> None:
    """F24: object storage that does not answer is `store_unavailable`."""
    nobody = open_cloud("s3://bucket/prefix?endpoint=http://127.0.0.1:9&region=us-east-1", CREDENTIALS)
    with pytest.raises(StoreUnavailable) as said:
        await nobody.head("a")
    assert said.value.code == "store_unavailable"
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable):
        DirectoryObjects(tmp_path / "file" / "objects")


async def test_wrong_credentials_are_an_outage_and_name_no_secret(s3: S3Server) -> None:
    wrong = open_cloud(s3.url("x"), {"access_key_id": "tests", "secret_access_key": "not-the-secret"})
    with pytest.raises(StoreUnavailable) as said:
        await wrong.put("a", b"1")
    assert "not-the-secret" not in said.value.message


@pytest.mark.parametrize("url", ["s3://", "s3://bucket?secret=1", "s3:///prefix"])
def test_an_url_that_says_nothing_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"names no bucket|is no setting"):
        open_cloud(url)


# ── the directory alone ─────────────────────────────────────────────────────────────────────────────────────────────


def _add_one_many_times(root: str, times: int) -> None:
    async def go() -> None:
        objects = DirectoryObjects(Path(root))
        for _ in range(times):
            while True:
                found = await objects.get("count", limit=100)
                assert found is not None
                number = int(found.data.split()[0]) + 1
                try:
                    await objects.put("count", f"{number} {secrets.token_hex(8)}".encode(), if_match=found.etag)
                except ObjectChanged:
                    continue
                break
        await objects.close()

    asyncio.run(go())


async def test_conditions_hold_across_processes(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    await objects.put("count", b"0 start")
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_add_one_many_times, args=(str(tmp_path), 25)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        await asyncio.to_thread(writer.join, 100)
        assert writer.exitcode == 0
        writer.close()
    found = await objects.get("count", limit=100)
    assert found is not None
    assert int(found.data.split()[0]) == 100
    await objects.close()


def _put_for_ever(root: str) -> None:
    async def go() -> None:
        objects = DirectoryObjects(Path(root))
        while True:
            await asyncio.gather(*(objects.put(f"k/{n}", bytes([n]) * (1 << 20)) for n in range(4)))

    asyncio.run(go())


async def test_a_killed_writer_leaves_whole_objects_and_nothing_beside_them(tmp_path: Path) -> None:
    """F24."""
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_put_for_ever, args=(str(tmp_path),))
    writer.start()
    while len(list((tmp_path / "k").glob("*"))) < 4:
        await asyncio.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    await asyncio.to_thread(writer.join, 60)
    writer.close()
    objects = DirectoryObjects(tmp_path)
    assert list((tmp_path / ".beside").iterdir()) == []
    for page in [page async for page in objects.list("k/")]:
        for info in page:
            found = await objects.get(info.key, limit=1 << 20)
            assert found is not None
            assert found.data == bytes([int(info.key[2:])]) * (1 << 20)
    await objects.close()


async def test_deleting_the_last_object_leaves_no_directory_behind(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    await objects.put("a/b/c", b"1")
    await objects.delete("a/b/c")
    assert not (tmp_path / "a").exists()
    await objects.close()


async def test_making_and_deleting_side_by_side_never_fails(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)

    async def one(n: int) -> None:
        for _ in range(30):
            await objects.put(f"a/b/{n}", b"1")
            await objects.delete(f"a/b/{n}")

    await asyncio.gather(*(one(n) for n in range(6)))
    await objects.close()
