"""What durable records promise, over object storage and a real Valkey."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from manager.errors import StoreUnavailable
from manager.model import Owner
from manager.store import keys
from manager.store.objects import Object, Objects
from manager.store.opening import open_objects
from manager.store.records import RecordChanged, Records
from manager.store.redis import RedisStore
from tests.support.memory_objects import MemoryCache, memory_objects
from tests.support.s3_server import CREDENTIALS, S3Server

ACME, SHOP = Owner("acme", "web"), Owner("acme", "shop")


class Note(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    count: int = 0


@pytest.fixture(params=["directory", "memory", "s3"])
async def objects(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> AsyncIterator[Objects]:
    if request.param == "memory":
        found: Objects = memory_objects()
    else:
        url = s3.url(secrets.token_hex(8)) if request.param == "s3" else None
        found = open_objects(url, tmp_path, CREDENTIALS)
    yield found
    await found.close()


@pytest.fixture
async def cache(redis_url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore.at(redis_url)
    yield store
    await store.close()


@pytest.fixture
def notes(objects: Objects, cache: RedisStore) -> Records[Note]:
    return Records(objects, cache, "notes", Note, cache_sec=60)


async def texts(notes: Records[Note], owner: Owner | None, **page: str | int) -> list[str]:
    return [found.value.text for found in await notes.page(owner, **page)]  # type: ignore[arg-type]


async def test_a_record_is_read_back_and_belongs_to_its_owner_alone(notes: Records[Note]) -> None:
    """S21: another project's id finds nothing."""
    made = await notes.create(ACME, "one", Note(text="hello"))
    found = await notes.get(ACME, "one")
    assert found == made
    assert found.owner == ACME
    assert await notes.get(SHOP, "one") is None
    assert await notes.get(None, "one") is None
    assert await texts(notes, SHOP) == []


async def test_a_record_outlives_a_wiped_redis(notes: Records[Note], raw: Redis) -> None:
    await notes.create(ACME, "one", Note(text="hello"))
    await notes.create(None, "key", Note(text="nobody's"))
    await raw.flushall()
    for owner, id, text in ((ACME, "one", "hello"), (None, "key", "nobody's")):
        found = await notes.get(owner, id)
        assert found is not None
        assert found.value.text == text
    assert await texts(notes, ACME) == ["hello"]


async def test_a_second_read_asks_only_the_cache(cache: RedisStore) -> None:
    storage = memory_objects()
    notes = Records(storage, cache, f"notes{secrets.token_hex(4)}", Note, cache_sec=60)
    await notes.create(ACME, "one", Note(text="hello"))
    async for page in storage.list(""):
        for info in page:
            await storage.delete(info.key)
    assert await notes.get(ACME, "one") is not None
    assert await notes.get(ACME, "one", fresh=True) is None
    assert await notes.get(ACME, "one") is None


async def test_a_fresh_read_that_was_overtaken_by_a_writer_leaves_nothing_old_in_the_cache(cache: RedisStore) -> None:
    storage = memory_objects()
    notes = Records(storage, cache, f"notes{secrets.token_hex(4)}", Note, cache_sec=60)
    await notes.create(ACME, "one", Note(text="old"))
    read, reached, go = storage.get, asyncio.Event(), asyncio.Event()

    async def late(key: str, *, limit: int) -> Object | None:
        found = await read(key, limit=limit)
        reached.set()
        await go.wait()
        return found

    storage.get = late  # type: ignore[method-assign]
    reading = asyncio.create_task(notes.get(ACME, "one", fresh=True))
    await reached.wait()
    storage.get = read  # type: ignore[method-assign]
    await notes.update(ACME, "one", lambda note: Note(text="new"))
    go.set()
    overtaken = await reading
    assert overtaken is not None
    assert overtaken.value.text == "old"
    found = await notes.get(ACME, "one")
    assert found is not None
    assert found.value.text == "new"


async def test_the_cache_forgets_after_its_time(objects: Objects, cache: RedisStore, raw: Redis) -> None:
    notes = Records(objects, cache, "notes", Note, cache_sec=4.0)
    await notes.create(ACME, "one", Note(text="hello"))
    await notes.get(ACME, "none")
    found = [key async for key in raw.scan_iter(match=f"{keys.PREFIX}record:*")]
    assert len(found) == 2
    for key in found:
        assert 0 < await raw.pttl(key) <= 4000


async def test_creating_twice_is_refused(notes: Records[Note]) -> None:
    await notes.create(ACME, "one", Note(text="first"))
    with pytest.raises(RecordChanged):
        await notes.create(ACME, "one", Note(text="first"))
    assert await texts(notes, ACME) == ["first"]


async def test_a_record_that_was_looked_for_in_vain_is_found_once_it_is_made(notes: Records[Note]) -> None:
    assert await notes.get(ACME, "one") is None
    await notes.create(ACME, "one", Note(text="hello"))
    assert await notes.get(ACME, "one") is not None


async def test_replacing_another_version_is_refused(notes: Records[Note]) -> None:
    first = await notes.create(ACME, "one", Note(text="a"))
    second = await notes.replace(first, Note(text="b"))
    third = await notes.replace(second, Note(text="a"))
    assert third.version != first.version
    for old in (first, second):
        with pytest.raises(RecordChanged):
            await notes.replace(old, Note(text="c"))
    assert await texts(notes, ACME) == ["a"]


async def test_no_update_of_many_at_once_is_lost(notes: Records[Note]) -> None:
    await notes.create(ACME, "one", Note(text="sum"))

    def more(note: Note) -> Note:
        return Note(text=note.text, count=note.count + 1)

    await asyncio.gather(*(notes.update(ACME, "one", more) for _ in range(4)))
    found = await notes.get(ACME, "one")
    assert found is not None
    assert found.value.count == 4


async def test_an_update_of_nothing_makes_nothing(notes: Records[Note]) -> None:
    assert await notes.update(ACME, "one", lambda note: note) is None
    await notes.create(ACME, "two", Note(text="kept"))
    left = await notes.update(ACME, "two", lambda _: None)
    assert left is not None
    assert left.value.text == "kept"
    assert await texts(notes, ACME) == ["kept"]


async def test_what_was_deleted_is_gone_at_once_and_for_the_cache_as_well(notes: Records[Note]) -> None:
    made = await notes.create(ACME, "one", Note(text="a"))
    assert await notes.delete(ACME, "one")
    assert not await notes.delete(ACME, "one")
    assert await notes.get(ACME, "one") is None
    with pytest.raises(RecordChanged):
        await notes.replace(made, Note(text="b"))


async def test_pages_are_whole_in_order_and_go_on_where_one_ended(notes: Records[Note]) -> None:
    await asyncio.gather(*(notes.create(ACME, f"n{n:02}", Note(text=f"{n:02}")) for n in range(25)))
    await notes.create(SHOP, "n99", Note(text="other"))
    assert await texts(notes, ACME, limit=10) == [f"{n:02}" for n in range(10)]
    assert await texts(notes, ACME, limit=10, after="n19") == [f"{n:02}" for n in range(20, 25)]
    assert await texts(notes, ACME, limit=25) == [f"{n:02}" for n in range(25)]
    everybody = [found.value.text async for found in notes.every()]
    assert sorted(everybody) == sorted([*(f"{n:02}" for n in range(25)), "other"])


async def test_a_page_is_full_though_some_of_it_are_deleted_while_it_is_read(cache: RedisStore) -> None:
    """Who takes a short page for the last one would miss the rest."""
    storage = memory_objects()
    notes = Records(storage, cache, f"notes{secrets.token_hex(4)}", Note, cache_sec=60)
    for number in range(6):
        await notes.create(ACME, f"n{number}", Note(text=str(number)))
    read = storage.get

    async def deleted_first(key: str, *, limit: int) -> Object | None:
        if key.endswith(("n1", "n2")):
            await storage.delete(key)
        return await read(key, limit=limit)

    storage.get = deleted_first  # type: ignore[method-assign]
    cached, cache.cache_get = cache.cache_get, MemoryCache().cache_get  # type: ignore[method-assign]  # knows none
    assert await texts(notes, ACME, limit=3) == ["0", "3", "4"]
    assert await texts(notes, ACME, after="n4", limit=3) == ["5"]
    cache.cache_get = cached  # type: ignore[method-assign]


async def test_a_page_asks_storage_for_none_that_the_cache_knows(objects: Objects, cache: RedisStore) -> None:
    notes = Records(objects, cache, f"notes{secrets.token_hex(4)}", Note, cache_sec=60)
    for number in range(3):
        await notes.create(ACME, f"n{number}", Note(text=str(number)))

    async def never(key: str, *, limit: int) -> Object | None:
        raise AssertionError(key)

    objects.get = never  # type: ignore[method-assign]
    assert await texts(notes, ACME) == ["0", "1", "2"]


async def test_a_page_shows_what_was_written_past_the_cache(objects: Objects, cache: RedisStore) -> None:
    cached = Records(objects, cache, "notes", Note, cache_sec=60)
    elsewhere = Records(objects, MemoryCache(), "notes", Note)
    made = await cached.create(ACME, "one", Note(text="old"))
    await elsewhere.replace(made, Note(text="new"))
    assert await texts(cached, ACME) == ["new"]


async def test_records_work_while_the_cache_is_down() -> None:
    cache = MemoryCache()
    notes = Records(memory_objects(), cache, "notes", Note)
    cache.down = True
    await notes.create(ACME, "one", Note(text="hello"))
    assert await notes.get(ACME, "one") is not None
    assert await texts(notes, ACME) == ["hello"]
    assert await notes.delete(ACME, "one")


async def test_a_record_that_cannot_be_read_is_said_to_be_unreadable() -> None:
    storage = memory_objects()
    notes = Records(storage, MemoryCache(), "notes", Note)
    await storage.put("records/notes/acme/web/one", b'{"half":')
    with pytest.raises(StoreUnavailable):
        await notes.get(ACME, "one")
