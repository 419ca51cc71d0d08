"""API keys over a real store."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from manager.errors import NotFound, Unauthenticated
from manager.model import Owner, Principal, Role
from manager.services.tenants import KEY_SHAPE, VERIFIED_SEC, Tenants
from manager.store.base import Store
from manager.store.redis import RedisStore
from tests.support.memory_objects import memory_objects

ACME, SHOP = Owner("acme", "web"), Owner("acme", "shop")
PEPPER = b"p" * 32


@pytest.fixture
async def second_store(valkey_url: str, store: Store) -> AsyncIterator[Store]:
    """Another manager's connection to the same store; opened after `store` emptied it."""
    other = RedisStore.at(valkey_url, call_sec=30.0)
    yield other
    await other.close()


async def believed(tenants: Tenants, text: str) -> bool:
    try:
        return await tenants.authenticate(text) is not None
    except Unauthenticated:
        return False


async def test_a_dump_of_the_store_holds_no_usable_key(store: Store, valkey_url: str) -> None:
    tenants = Tenants(store, memory_objects(), PEPPER)
    texts = [(await tenants.create_key(ACME, role, "ci", member="ann@example.org"))[0] for role in Role]
    for text in texts:
        await tenants.authenticate(text)
    async with Redis.from_url(valkey_url) as redis:
        dump = b""
        async for key in redis.scan_iter():
            dump += key + b"\n"
            dump += await redis.get(key) or b"" if await redis.type(key) == b"string" else b""
        folder = str((await redis.config_get("dir"))["dir"])
    dump += b"".join(file.read_bytes() for file in (Path(folder) / "appendonlydir").iterdir())
    assert b"ann@example.org" in dump  # it is the dump that was meant
    for text in texts:
        shape = KEY_SHAPE.match(text)
        assert shape is not None
        assert shape[1].encode() in dump
        assert shape[2].encode() not in dump
        assert PEPPER not in dump
    # Whatever of it looks like a key's part opens nothing.
    for found in set(re.findall(rb"[0-9a-f]{64}", dump)):
        for text in texts:
            with pytest.raises(Unauthenticated):
                await tenants.authenticate(text[: text.rindex("_") + 1] + found.decode())


async def test_a_key_works_at_every_manager_and_a_revocation_within_five_seconds(
    store: Store, second_store: Store
) -> None:
    objects = memory_objects()
    here, there = Tenants(store, objects, PEPPER), Tenants(second_store, objects, PEPPER)
    text, record = await here.create_key(ACME, Role.MEMBER, "ci")
    assert await there.authenticate(text) == record
    await here.revoke_key(Principal(ACME, Role.ADMIN, "k"), record.key_id)
    with pytest.raises(Unauthenticated):
        await here.authenticate(text)
    async with asyncio.timeout(15):
        while await believed(there, text):
            await asyncio.sleep(VERIFIED_SEC / 20)


async def test_a_foreign_keys_id_cannot_be_told_from_one_that_is_not_there(store: Store) -> None:
    tenants = Tenants(store, memory_objects(), PEPPER)
    text, foreign = await tenants.create_key(SHOP, Role.MEMBER, "ci")
    admin = Principal(ACME, Role.ADMIN, "k")
    answers = []
    for key_id in (foreign.key_id, "a" * 26):
        with pytest.raises(NotFound) as refusal:
            await tenants.revoke_key(admin, key_id)
        answers.append((refusal.value.code, refusal.value.message, refusal.value.details))
    assert answers[0] == answers[1]
    assert await tenants.authenticate(text) == foreign
    assert list(await tenants.list_keys(admin)) == []


async def test_a_wiped_redis_forgets_no_key_and_remembers_no_revoked_one(store: Store, valkey_url: str) -> None:
    objects = memory_objects()
    tenants = Tenants(store, objects, PEPPER)
    admin = Principal(ACME, Role.ADMIN, "k")
    kept, record = await tenants.create_key(ACME, Role.MEMBER, "ci")
    revoked, gone = await tenants.create_key(ACME, Role.MEMBER, "old")
    await tenants.revoke_key(admin, gone.key_id)
    async with Redis.from_url(valkey_url) as redis:
        await redis.flushall()
    for manager in (tenants, Tenants(store, objects, PEPPER)):
        assert await manager.authenticate(kept) == record
        assert not await believed(manager, revoked)
        assert list(await manager.list_keys(admin)) == [record]
        await manager.close()
