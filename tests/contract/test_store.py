"""What every Store promises, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest
from redis.asyncio import Redis

from manager.errors import QuotaExceeded, StoreUnavailable, StoreUnsettled
from manager.model import Binding, BindingState, LeaseTerms, Load, Owner, PodEnded, Role, new_id
from manager.store import keys
from manager.store.base import KeyRecord, Lease, MarkWanted, Store
from manager.store.redis import RedisStore

ACME = Owner("acme", "web")
SHOP = Owner("acme", "shop")
TERMS = LeaseTerms(active_sec=1000.0, idle_sec=100.0, max_sec=5000.0)
CLAIM_SEC = 60.0
ENDED = PodEnded(reason="expired", at=1_700_000_000.25)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    redis_store = RedisStore.at(redis_url, call_sec=30.0)
    yield redis_store
    await redis_store.close()


def wanted(task_id: str = "t", owner: Owner = ACME, **changes: object) -> Binding:
    fields = {
        "owner": owner, "task_id": task_id, "sandbox_id": new_id("s"), "state": BindingState.CLAIMING,
        "token": new_id(), "profile": "small", "target": "here", "generation": 1,
    }  # fmt: skip
    return msgspec.convert({**fields, **changes}, Binding, from_attributes=True)


async def begun(store: Store, task_id: str = "t", owner: Owner = ACME, slots: int | None = None) -> Binding:
    wish = wanted(task_id, owner)
    binding = await store.begin_binding(wish, CLAIM_SEC, slots)
    assert binding.token == wish.token
    return binding


async def bound(store: Store, task_id: str = "t", owner: Owner = ACME, terms: LeaseTerms = TERMS) -> Binding:
    binding = with_pod(await begun(store, task_id, owner))
    assert await store.commit_binding(binding, terms)
    return binding


def with_pod(binding: Binding) -> Binding:
    return msgspec.structs.replace(binding, state=BindingState.BOUND, pod=new_id("p"), address="unix:/run/x")


async def lease_of(store: Store, sandbox_id: str) -> Lease:
    lease = await store.get_lease(sandbox_id)
    assert lease is not None
    return lease


def left(lease: Lease) -> float:
    return lease.until - lease.now


# ── bindings ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_fifty_clients_at_once_make_exactly_one_claim(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        stores = [RedisStore.at(redis_url, max_connections=1, call_sec=30.0) for _ in range(50)]
        for one in stores:
            stack.push_async_callback(one.close)
        for round_ in range(10):
            wishes = [wanted(f"task {round_}") for _ in stores]
            answers = await asyncio.gather(
                *(one.begin_binding(wish, CLAIM_SEC, 50) for one, wish in zip(stores, wishes, strict=True))
            )
            assert len(set(answers)) == 1
            assert sum(answer.token == wish.token for answer, wish in zip(answers, wishes, strict=True)) == 1


async def test_a_claim_says_what_was_wanted_and_when(store: Store) -> None:
    wish = wanted("tâche: 1/2 %")
    binding = await store.begin_binding(wish, CLAIM_SEC, None)
    assert binding.created_at > 1_600_000_000
    assert msgspec.structs.replace(binding, created_at=0.0) == wish
    assert await store.get_binding(ACME, "tâche: 1/2 %") == binding
    assert await store.find_sandbox(binding.sandbox_id) == binding
    assert await store.list_bindings() == [binding]


async def test_beginning_again_with_the_same_token_is_the_same_claim(store: Store) -> None:
    wish = wanted()
    first = await store.begin_binding(wish, CLAIM_SEC, 1)
    assert await store.begin_binding(wish, 0.0, 1) == first


async def test_one_owner_never_finds_anothers_task(store: Store) -> None:
    await bound(store)
    assert await store.get_binding(SHOP, "t") is None
    assert await store.get_binding(Owner("acme:web", ""), "t") is None
    assert await store.list_bindings(SHOP) == []


async def test_committing_makes_it_bound_with_an_active_lease(store: Store) -> None:
    binding = await bound(store)
    assert await store.get_binding(ACME, "t") == binding
    lease = await lease_of(store, binding.sandbox_id)
    assert left(lease) == pytest.approx(TERMS.active_sec, abs=30)
    assert lease.hard_end - lease.now == pytest.approx(TERMS.max_sec, abs=30)
    assert (lease.operations, lease.terms) == (0, TERMS)


async def test_committing_again_is_true_and_changes_no_lease(store: Store) -> None:
    binding = await bound(store)
    await store.touch_leases("m1", {binding.sandbox_id: 0})
    assert await store.commit_binding(binding, TERMS)
    assert left(await lease_of(store, binding.sandbox_id)) < TERMS.idle_sec + 5


async def test_a_bound_task_is_returned_as_it_is(store: Store) -> None:
    binding = await bound(store)
    assert await store.begin_binding(wanted(), 0.0, 1) == binding


async def test_a_stale_claim_stays_until_it_is_settled_and_cannot_be_committed_any_more(store: Store) -> None:
    """Its pod may be there yet: whoever ends that one gives the record back."""
    first = await store.begin_binding(wanted(), 0.0, 1)
    while not await store.expired_claims():
        pass
    assert (await store.begin_binding(wanted(), 0.0, 1)).token == first.token
    with pytest.raises(QuotaExceeded):
        await begun(store, "other", slots=1)
    assert (await store.held(ACME)).slots == 1
    await store.abandon_binding(first)
    second = await begun(store, slots=1)
    assert second.generation == 1
    assert not await store.commit_binding(with_pod(first), TERMS)
    assert await store.get_lease(second.sandbox_id) is None
    await store.abandon_binding(first)
    assert not await store.end_binding(first, ENDED)
    assert await store.get_binding(ACME, "t") == second
    assert await store.commit_binding(with_pod(second), TERMS)


async def test_the_next_pod_of_a_task_keeps_the_sandbox_and_knows_how_the_last_one_ended(store: Store) -> None:
    first = await bound(store)
    assert await store.end_binding(first, ENDED)
    gone = await store.get_binding(ACME, "t")
    assert gone == msgspec.structs.replace(first, state=BindingState.ENDED, ended=ENDED)
    assert await store.find_sandbox(first.sandbox_id) == gone
    assert await store.get_lease(first.sandbox_id) is None
    assert await store.list_bindings() == []

    second = await begun(store)
    assert (second.sandbox_id, second.generation, second.previous) == (first.sandbox_id, 2, ENDED)
    assert (second.pod, second.address, second.ended) == ("", "", None)
    assert not await store.end_binding(first, ENDED)
    assert not await store.commit_binding(first, TERMS)


async def test_ending_twice_is_false_the_second_time(store: Store) -> None:
    binding = await bound(store)
    assert await store.end_binding(binding, ENDED)
    assert not await store.end_binding(binding, ENDED)


async def test_an_ended_record_is_kept_a_week_and_a_live_one_for_ever(store: Store, raw: Redis) -> None:
    binding = await bound(store)
    places = [keys.binding_key(ACME, "t"), keys.sandbox_key(binding.sandbox_id)]
    assert [await raw.ttl(place) for place in places] == [-1, -1]
    await store.end_binding(binding, ENDED)
    assert all(604_000 < ttl <= 604_800 for ttl in [await raw.ttl(place) for place in places])
    await begun(store)
    assert [await raw.ttl(place) for place in places] == [-1, -1]


async def test_an_abandoned_claim_leaves_no_trace(store: Store, raw: Redis) -> None:
    await store.abandon_binding(await begun(store))
    assert await store.get_binding(ACME, "t") is None
    assert await raw.keys("sojourn:*") == [keys.settled_key()]
    await store.abandon_binding(wanted())


async def test_an_abandoned_claim_gives_the_ended_record_back(store: Store, raw: Redis) -> None:
    first = await bound(store)
    await store.end_binding(first, ENDED)
    gone = await store.get_binding(ACME, "t")
    for _ in range(2):
        await store.abandon_binding(await begun(store))
        assert await store.get_binding(ACME, "t") == gone
        assert await store.find_sandbox(first.sandbox_id) == gone
        assert 0 < await raw.ttl(keys.binding_key(ACME, "t")) <= 604_800
    assert (await begun(store)).generation == 2


async def test_a_committed_claim_cannot_be_abandoned(store: Store) -> None:
    binding = await bound(store)
    await store.abandon_binding(binding)
    assert await store.get_binding(ACME, "t") == binding


async def test_every_binding_is_listed_once_however_many(store: Store) -> None:
    made = await asyncio.gather(*(begun(store, f"t{number}") for number in range(600)))
    await begun(store, "other", SHOP)
    listed = await store.list_bindings(ACME)
    assert sorted(one.sandbox_id for one in listed) == sorted(one.sandbox_id for one in made)
    assert len(await store.list_bindings()) == 601


async def test_any_order_of_claims_ends_in_one_holder(store: Store) -> None:
    """Random orders of three managers' steps on one task, beside a model of what must come out."""
    dice = random.Random(20)
    for round_ in range(40):
        task, holder, state = f"t{round_}", "", "none"
        claims: list[Binding] = []
        for _ in range(15):
            step = dice.choice(["begin", "begin", "commit", "abandon", "end"])
            if step == "begin":
                wish = wanted(task)
                answer = await store.begin_binding(wish, CLAIM_SEC, None)
                free = state in ("none", "ended")
                assert (answer.token == wish.token) is free
                if free:
                    claims.append(answer)
                    holder, state = answer.token, "claiming"
                else:
                    assert answer.token == holder
            elif claims:
                claim = dice.choice(claims)
                ours = claim.token == holder
                if step == "commit":
                    assert await store.commit_binding(with_pod(claim), TERMS) is (
                        ours and state in ("claiming", "bound")
                    )
                    state = "bound" if ours and state == "claiming" else state
                elif step == "end":
                    assert await store.end_binding(claim, ENDED) is (ours and state in ("claiming", "bound"))
                    state = "ended" if ours and state in ("claiming", "bound") else state
                else:
                    await store.abandon_binding(claim)
                    if ours and state == "claiming":
                        state = "ended" if claim.previous else "none"
                        holder = ""
            record = await store.get_binding(ACME, task)
            assert (record.state if record else "none") == state
            leased = record is not None and await store.get_lease(record.sandbox_id) is not None
            assert leased is (state == "bound")


# ── slots ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_owner_holds_no_more_sandboxes_than_it_may(store: Store) -> None:
    tries = [store.begin_binding(wanted(f"t{number}"), CLAIM_SEC, 5) for number in range(30)]
    answers = await asyncio.gather(*tries, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, QuotaExceeded)]
    assert len(refused) == 25
    assert all(refusal.details["held"] == refusal.details["limit"] == 5 for refusal in refused)
    assert len(await store.list_bindings(ACME)) == 5
    await begun(store, "t", SHOP, slots=1)


async def test_ending_or_abandoning_gives_the_slot_back(store: Store) -> None:
    binding = await bound(store, "a")
    with pytest.raises(QuotaExceeded):
        await begun(store, "b", slots=1)
    await store.end_binding(binding, ENDED)
    claim = await begun(store, "b", slots=1)
    await store.abandon_binding(claim)
    await begun(store, "a", slots=1)
    assert await store.get_binding(ACME, "b") is None


async def test_a_task_that_holds_a_slot_needs_no_other(store: Store) -> None:
    held = await begun(store, "a", slots=1)
    assert (await store.begin_binding(wanted("a"), CLAIM_SEC, 1)).token == held.token
    assert len(await store.list_bindings(ACME)) == 1


async def test_no_slots_at_all_is_a_limit_too(store: Store) -> None:
    with pytest.raises(QuotaExceeded):
        await begun(store, slots=0)


async def test_an_owner_uses_no_more_cpu_and_memory_than_it_may(store: Store) -> None:
    half = Load(cpu=0.5, memory_bytes=1 << 30)
    for most in (Load(cpu=1.6), Load(memory_bytes=3 << 30)):
        tries = [store.begin_binding(wanted(f"t{number}"), CLAIM_SEC, None, half, most) for number in range(12)]
        answers = await asyncio.gather(*tries, return_exceptions=True)
        made = [answer for answer in answers if isinstance(answer, Binding)]
        assert len(made) == 3
        assert all(isinstance(answer, QuotaExceeded) for answer in answers if answer not in made)
        held = await store.held(ACME)
        assert (held.slots, held.cpu, held.memory_bytes) == (3, 1.5, 3 << 30)
        await store.abandon_binding(made[0])
        await store.begin_binding(wanted("small"), CLAIM_SEC, None, Load(cpu=0.1, memory_bytes=1), most)
        for binding in await store.list_bindings(ACME):
            await store.abandon_binding(binding)
        assert (await store.held(ACME)).slots == 0


async def test_a_refusal_says_when_a_slot_may_come_free(store: Store, raw: Redis) -> None:
    binding = await bound(store, "a")
    await store.touch_leases("m1", {binding.sandbox_id: 0})
    with pytest.raises(QuotaExceeded) as quiet:
        await begun(store, "b", slots=1)
    assert quiet.value.details["what"] == "slots"
    assert TERMS.idle_sec - 60 < quiet.value.details["free_in_sec"] <= TERMS.idle_sec
    await store.touch_leases("m1", {binding.sandbox_id: 1})
    with pytest.raises(QuotaExceeded) as busy:
        await begun(store, "b", slots=1)
    assert TERMS.max_sec - 60 < busy.value.details["free_in_sec"] <= TERMS.max_sec
    assert 1 <= (busy.value.retry_after_sec or 0) <= 60


async def test_nothing_is_counted_in_an_empty_store_until_the_pods_were_looked_at(store: Store, raw: Redis) -> None:
    await raw.delete(keys.settled_key())
    with pytest.raises(StoreUnsettled):
        await begun(store)
    assert await store.list_bindings() == []
    await store.settle()
    await begun(store)


async def test_slots_of_nobody_are_found_and_given_back(store: Store, raw: Redis) -> None:
    """F5"""
    kept, ended = await bound(store, "kept"), await bound(store, "ended")
    await store.end_binding(ended, ENDED)
    nobodys = {ended.sandbox_id, *(f"unknown-{number}" for number in range(500))}
    await raw.zadd(keys.slots_key(ACME), dict.fromkeys(nobodys, "+inf"))
    assert await store.recount() == len(nobodys)
    assert await store.recount() == 0
    assert await raw.zrange(keys.slots_key(ACME), 0, -1) == [kept.sandbox_id]


# ── closing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def state_of(store: Store, binding: Binding) -> BindingState:
    found = await store.get_binding(binding.owner, binding.task_id)
    assert found is not None
    return found.state


async def test_of_many_that_close_one_does_and_its_slot_stays_taken(store: Store) -> None:
    binding = await bound(store)
    assert sorted(await asyncio.gather(*(store.close_binding(binding, CLAIM_SEC) for _ in range(20)))) == [
        False
    ] * 19 + [True]
    assert await state_of(store, binding) is BindingState.CLOSING
    with pytest.raises(QuotaExceeded):
        await begun(store, "other", slots=1)
    again = await store.begin_binding(wanted(), CLAIM_SEC, None)
    assert (again.token, again.state) == (binding.token, BindingState.CLOSING)
    assert await store.end_binding(binding, ENDED)
    await begun(store, "other", slots=1)


async def test_nothing_renews_a_lease_that_is_closing_but_who_closes_it(store: Store) -> None:
    binding = await bound(store)
    assert await store.close_binding(binding, 1000.0)
    await store.touch_leases("m1", {binding.sandbox_id: 1})
    await store.extend_lease(binding.sandbox_id, TERMS.max_sec)
    assert 900 < left(await lease_of(store, binding.sandbox_id)) <= 1000
    assert await store.renew_claim(binding, 2000.0)
    assert left(await lease_of(store, binding.sandbox_id)) > 1900
    assert await store.reopen_binding(binding, 50.0)
    assert 40 < left(await lease_of(store, binding.sandbox_id)) <= 50
    await store.touch_leases("m1", {binding.sandbox_id: 1})
    assert left(await lease_of(store, binding.sandbox_id)) > 50


async def test_a_closing_whose_manager_fell_silent_is_taken_over(store: Store) -> None:
    binding = await bound(store)
    assert await store.close_binding(binding, 0.0)
    taken_over = False
    while not taken_over:
        taken_over = await store.close_binding(binding, CLAIM_SEC)
    assert not await store.close_binding(binding, CLAIM_SEC)


async def test_who_lost_a_closing_to_another_can_neither_renew_nor_reopen_nor_end_it(store: Store) -> None:
    binding = await bound(store)
    assert await store.close_binding(binding, 0.0, "first")
    taken_over = False
    while not taken_over:
        taken_over = await store.close_binding(binding, CLAIM_SEC, "second")
    assert not await store.renew_claim(binding, CLAIM_SEC, "first")
    assert not await store.reopen_binding(binding, 50.0, "first")
    assert not await store.end_binding(binding, ENDED, closer="first")
    assert await state_of(store, binding) is BindingState.CLOSING
    assert await store.renew_claim(binding, CLAIM_SEC, "second")
    assert await store.reopen_binding(binding, 50.0, "second")
    assert not await store.end_binding(binding, ENDED, closer="second")  # it is in use again
    assert await store.close_binding(binding, CLAIM_SEC, "third")
    assert await store.end_binding(binding, ENDED, closer="third")


async def test_claims_that_nobody_renews_are_told_until_they_are_settled(store: Store) -> None:
    lives = await store.begin_binding(wanted("lives"), CLAIM_SEC, None)
    tokens = {(await store.begin_binding(wanted(task), 0.0, None)).token for task in ("a", "b", "c")}
    dead: list[Binding] = []
    while len(dead) < 3:
        dead = await store.expired_claims()
    assert {claim.token for claim in dead} == tokens
    assert len(await store.expired_claims(2)) == 2
    by_task = {claim.task_id: claim for claim in dead}
    assert await store.renew_claim(by_task["a"], CLAIM_SEC)
    assert await store.commit_binding(with_pod(by_task["b"]), TERMS)
    assert [claim.task_id for claim in await store.expired_claims()] == ["c"]
    await store.abandon_binding(by_task["c"])
    assert await store.expired_claims() == []
    assert await store.claim_left_sec(lives) > 0


async def test_what_was_renewed_since_is_not_closed_for_being_quiet(store: Store) -> None:
    binding = await bound(store)
    assert not await store.close_binding(binding, CLAIM_SEC, if_expired=True)
    assert await state_of(store, binding) is BindingState.BOUND
    assert await store.reopen_binding(binding, 0.0)
    closed = False
    while not closed:
        closed = await store.close_binding(binding, CLAIM_SEC, if_expired=True)


async def test_other_terms_count_from_now_for_the_quiet_and_from_the_claim_for_the_end(store: Store) -> None:
    binding = await bound(store)
    await store.touch_leases("m1", {binding.sandbox_id: 0})
    assert await store.set_terms(binding, LeaseTerms(active_sec=500.0, idle_sec=20.0, max_sec=400.0))
    lease = await lease_of(store, binding.sandbox_id)
    assert 0 < left(lease) <= 20
    assert 300 < lease.hard_end - lease.now <= 400
    found = await store.get_binding(ACME, "t")
    assert found is not None
    assert found.terms == LeaseTerms(active_sec=500.0, idle_sec=20.0, max_sec=400.0)
    assert not await store.set_terms(msgspec.structs.replace(binding, token="other"), TERMS)


async def test_a_claim_that_goes_on_is_kept_from_going_stale(store: Store) -> None:
    claim = await store.begin_binding(wanted(), 1000.0, None)
    assert 900 < await store.claim_left_sec(claim) <= 1000
    assert await store.renew_claim(claim, 5000.0)
    assert await store.claim_left_sec(claim) > 4900
    binding = with_pod(claim)
    assert await store.commit_binding(binding, TERMS)
    assert not await store.renew_claim(binding, 5000.0)
    assert await store.claim_left_sec(binding) == 0


# ── adoption ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pod_found_after_the_store_was_wiped_is_adopted_with_its_age(store: Store) -> None:
    clock = await begun(store, "clock")
    found = with_pod(wanted(generation=3, previous=ENDED, created_at=clock.created_at - 4000))
    assert await store.adopt_binding(found, TERMS)
    assert await store.get_binding(ACME, "t") == found
    lease = await lease_of(store, found.sandbox_id)
    assert left(lease) == pytest.approx(TERMS.idle_sec, abs=30)
    assert lease.hard_end - lease.now == pytest.approx(TERMS.max_sec - 4000, abs=30)
    with pytest.raises(QuotaExceeded):
        await begun(store, "other", slots=2)


async def test_a_pod_past_its_time_is_adopted_and_expires_at_once(store: Store) -> None:
    clock = await begun(store, "clock")
    found = with_pod(wanted(created_at=clock.created_at - 6000))
    assert await store.adopt_binding(found, TERMS)
    assert [one.sandbox_id for one in await store.expired_leases()] == [found.sandbox_id]


async def test_a_creation_time_in_the_future_gives_no_longer_life(store: Store) -> None:
    """F23"""
    found = with_pod(wanted(created_at=32_000_000_000.0))
    assert await store.adopt_binding(found, TERMS)
    lease = await lease_of(store, found.sandbox_id)
    assert lease.hard_end - lease.now <= TERMS.max_sec + 1


async def test_adopting_what_is_bound_already_keeps_its_lease(store: Store) -> None:
    binding = await bound(store)
    await store.touch_leases("m1", {binding.sandbox_id: 2})
    moved = msgspec.structs.replace(binding, address="unix:/run/y", created_at=5.0)
    assert await store.adopt_binding(moved, TERMS)
    lease = await lease_of(store, binding.sandbox_id)
    assert left(lease) == pytest.approx(TERMS.active_sec, abs=30)
    assert lease.operations == 2
    assert await store.get_binding(ACME, "t") == msgspec.structs.replace(binding, address="unix:/run/y")


async def test_a_claim_whose_manager_died_after_the_patch_is_adopted(store: Store) -> None:
    """F5"""
    claim = await begun(store)
    assert await store.adopt_binding(with_pod(claim), TERMS)
    record = await store.get_binding(ACME, "t")
    assert record is not None
    assert record.state is BindingState.BOUND
    assert await store.get_lease(claim.sandbox_id) is not None


async def test_a_stray_pod_is_not_adopted(store: Store) -> None:
    claim = await begun(store)
    stray = with_pod(wanted(generation=9))
    assert not await store.adopt_binding(stray, TERMS)  # another claim is under way
    binding = with_pod(claim)
    await store.commit_binding(binding, TERMS)
    assert not await store.adopt_binding(stray, TERMS)  # another pod is bound
    await store.end_binding(binding, ENDED)
    assert not await store.adopt_binding(binding, TERMS)  # its end is on record
    record = await store.get_binding(ACME, "t")
    assert record is not None
    assert record.state is BindingState.ENDED
    assert await store.list_bindings() == []
    assert await store.get_lease(stray.sandbox_id) is None


async def test_a_later_pod_than_the_record_knows_is_adopted(store: Store) -> None:
    first = await bound(store)
    await store.end_binding(first, ENDED)
    later = with_pod(wanted(generation=2))
    assert await store.adopt_binding(later, TERMS)
    assert await store.get_binding(ACME, "t") == msgspec.structs.replace(later, previous=ENDED)
    assert await store.find_sandbox(first.sandbox_id) is None


# ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_operations_keep_a_lease_active_and_the_last_end_makes_it_idle(store: Store) -> None:
    sandbox_id = (await bound(store)).sandbox_id
    await store.touch_leases("m1", {sandbox_id: 0})
    assert left(await lease_of(store, sandbox_id)) == pytest.approx(TERMS.idle_sec, abs=30)
    await store.touch_leases("m1", {sandbox_id: 3})
    lease = await lease_of(store, sandbox_id)
    assert left(lease) == pytest.approx(TERMS.active_sec, abs=30)
    assert lease.operations == 3
    await store.touch_leases("m1", {sandbox_id: 1})
    assert (await lease_of(store, sandbox_id)).operations == 1
    await store.touch_leases("m1", {sandbox_id: 0})
    lease = await lease_of(store, sandbox_id)
    assert left(lease) == pytest.approx(TERMS.idle_sec, abs=30)
    assert lease.operations == 0


async def test_renewing_never_shortens(store: Store) -> None:
    """RE11"""
    sandbox_id = (await bound(store)).sandbox_id
    await store.extend_lease(sandbox_id, 3000)
    await store.extend_lease(sandbox_id, 10)
    await store.extend_lease(sandbox_id, -10)
    await store.touch_leases("m1", {sandbox_id: 1})
    assert left(await lease_of(store, sandbox_id)) == pytest.approx(3000, abs=30)


async def test_nothing_carries_a_lease_past_its_hard_end(store: Store) -> None:
    terms = LeaseTerms(active_sec=1000, idle_sec=100, max_sec=50)
    sandbox_id = (await bound(store, terms=terms)).sandbox_id
    hard_end = (await lease_of(store, sandbox_id)).hard_end
    await store.touch_leases("m1", {sandbox_id: 1})
    await store.extend_lease(sandbox_id, 1e9)
    await store.touch_leases("m1", {sandbox_id: 0})
    lease = await lease_of(store, sandbox_id)
    assert lease.until == lease.hard_end == hard_end


async def test_another_managers_operations_keep_the_lease_active(store: Store) -> None:
    sandbox_id = (await bound(store)).sandbox_id
    await store.touch_leases("m1", {sandbox_id: 1})
    await store.touch_leases("m2", {sandbox_id: 4})
    await store.touch_leases("m1", {sandbox_id: 0})
    lease = await lease_of(store, sandbox_id)
    assert left(lease) == pytest.approx(TERMS.active_sec, abs=30)
    assert lease.operations == 4


async def test_a_dead_managers_operations_do_not_count(store: Store, raw: Redis) -> None:
    sandbox_id = (await bound(store)).sandbox_id
    await store.touch_leases("dead", {sandbox_id: 4})
    await store.touch_leases("m1", {sandbox_id: 1})
    assert 0 < await raw.pttl(keys.holder_key("dead")) <= 60_000
    await raw.delete(keys.holder_key("dead"))  # what a minute without a heartbeat does
    assert (await lease_of(store, sandbox_id)).operations == 1
    await store.touch_leases("m1", {sandbox_id: 0})
    assert left(await lease_of(store, sandbox_id)) == pytest.approx(TERMS.idle_sec, abs=30)


async def test_touching_nothing_is_still_a_heartbeat(store: Store, raw: Redis) -> None:
    await store.touch_leases("m1", {})
    assert await raw.exists(keys.holder_key("m1")) == 1


async def test_a_manager_that_says_goodbye_leaves_its_leases_idle(store: Store, raw: Redis) -> None:
    mine = [(await bound(store, f"t{number}")).sandbox_id for number in range(3)]
    await store.touch_leases("m1", dict.fromkeys(mine, 1))
    await store.touch_leases("m2", {mine[0]: 1})
    await store.drop_holder("m1")
    await store.drop_holder("m1")
    lengths = [round(left(await lease_of(store, sandbox_id)), -1) for sandbox_id in mine]
    assert lengths == [TERMS.active_sec, TERMS.idle_sec, TERMS.idle_sec]
    assert await raw.exists(keys.holder_key("m1"), keys.holding_key("m1")) == 0


async def test_a_great_many_leases_are_touched_in_one_round_trip(store: Store, raw: Redis) -> None:
    made = await asyncio.gather(*(bound(store, f"t{number}") for number in range(1200)))
    counts = {binding.sandbox_id: 1 for binding in made}
    await store.touch_leases("m1", counts)
    before = (await raw.info("commandstats"))["cmdstat_evalsha"]["calls"]
    await store.touch_leases("m1", counts)
    assert (await raw.info("commandstats"))["cmdstat_evalsha"]["calls"] - before == 6, (
        "in parts, so that Redis serves others between"
    )
    assert await raw.scard(keys.holding_key("m1")) == 1200
    assert (await lease_of(store, made[-1].sandbox_id)).operations == 1
    await store.drop_holder("m1")
    assert (await lease_of(store, made[-1].sandbox_id)).operations == 0


async def test_unknown_and_ended_sandboxes_are_ignored(store: Store, raw: Redis) -> None:
    binding = await bound(store)
    await store.touch_leases("m1", {binding.sandbox_id: 2})
    await store.end_binding(binding, ENDED)
    await store.touch_leases("m1", {binding.sandbox_id: 2, "nothing": 1})
    await store.extend_lease(binding.sandbox_id, 10)
    assert await store.get_lease(binding.sandbox_id) is None
    assert await store.get_lease("nothing") is None
    assert await store.expired_leases() == []
    assert await raw.exists(keys.operations_key(binding.sandbox_id), keys.operations_key("nothing")) == 0


async def test_operations_of_an_earlier_pod_do_not_count_for_the_next(store: Store) -> None:
    first = await bound(store)
    await store.touch_leases("m1", {first.sandbox_id: 2})
    await store.end_binding(first, ENDED)
    second = await bound(store)
    assert second.sandbox_id == first.sandbox_id
    assert (await lease_of(store, second.sandbox_id)).operations == 0


async def test_expired_leases_come_oldest_first(store: Store) -> None:
    gone = []
    for number in range(4):
        binding = await bound(store, f"t{number}", terms=LeaseTerms(active_sec=-10 + number, idle_sec=5, max_sec=50))
        gone.append(binding.sandbox_id)
    await bound(store, "fresh")
    assert [one.sandbox_id for one in await store.expired_leases()] == gone
    assert [one.sandbox_id for one in await store.expired_leases(limit=2)] == gone[:2]


async def test_an_operation_that_began_after_the_reaper_looked_wins(store: Store) -> None:
    binding = await bound(store, terms=LeaseTerms(active_sec=-1, idle_sec=100, max_sec=500))
    assert len(await store.expired_leases()) == 1
    await store.extend_lease(binding.sandbox_id, 60)
    assert not await store.end_binding(binding, ENDED, if_expired=True)
    assert await store.get_binding(ACME, "t") == binding
    assert await store.end_binding(binding, ENDED)


async def test_the_reaper_ends_what_is_still_expired(store: Store) -> None:
    binding = await bound(store, terms=LeaseTerms(active_sec=-1, idle_sec=100, max_sec=500))
    assert await store.end_binding(binding, ENDED, if_expired=True)
    claim = await begun(store, "other")
    assert not await store.end_binding(claim, ENDED, if_expired=True)


@pytest.mark.parametrize("step_sec", [3600, -3600, 8 * 3600])
async def test_a_step_of_the_servers_clock_ends_no_lease_and_lengthens_none(
    store: Store, raw: Redis, redis_url: str, step_sec: int
) -> None:
    """F23"""
    binding = await bound(store)
    other = RedisStore.at(redis_url, call_sec=30.0)
    assert await store.expired_leases() == await other.expired_leases() == []
    await raw.set(keys.clock_key(), -step_sec * 1000)  # the same as TIME having moved by so much
    assert await store.expired_leases() == await other.expired_leases() == []
    assert await store.expired_leases() == await other.expired_leases() == []
    assert left(await lease_of(store, binding.sandbox_id)) == pytest.approx(TERMS.active_sec, abs=30)
    assert abs(int(await raw.get(keys.clock_key()) or 0)) < 5000  # corrected once, not once for each manager
    await other.close()


# ── idempotency ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_fifty_marks_at_once_are_one_mark(store: Store) -> None:
    marks = await asyncio.gather(*(store.mark(ACME, "task", "key", "f", f"pod{n}", 60) for n in range(50)))
    assert sum(mark.fresh for mark in marks) == 1
    assert len({(mark.fingerprint, mark.pod) for mark in marks}) == 1


async def test_a_mark_says_what_it_was_first_used_for(store: Store, raw: Redis) -> None:
    await store.mark(ACME, "task", "key", "first", "pod1", 3600)
    again = await store.mark(ACME, "task", "key", "second", "pod2", 60)
    assert (again.fingerprint, again.pod, again.fresh) == ("first", "pod1", False)
    assert 3000 < await raw.ttl(keys.mark_key(ACME, "task", "key")) <= 3600
    for owner, scope, key in [(SHOP, "task", "key"), (ACME, "other", "key"), (ACME, "task", "other")]:
        assert (await store.mark(owner, scope, key, "second", "pod2", 60)).fresh


async def test_many_marks_are_made_or_found_in_one_step(store: Store) -> None:
    first = await store.mark(ACME, "task", "known", "f", "pod1", 60)
    assert first.fresh
    wanted_marks = [MarkWanted(ACME, "task", key, "g", "pod2") for key in ("known", "new", "new", "newer")]
    marks = await store.mark_many(wanted_marks, 60)
    assert [(mark.fingerprint, mark.pod, mark.fresh) for mark in marks] == [
        ("f", "pod1", False), ("g", "pod2", True), ("g", "pod2", False), ("g", "pod2", True),
    ]  # fmt: skip
    assert not (await store.mark(ACME, "task", "newer", "h", "pod3", 60)).fresh
    assert await store.mark_many([], 60) == []


# ── audit events ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_audit_events_are_kept_in_order_until_they_are_trimmed(store: Store, raw: Redis) -> None:
    assert await store.append_audit([b'{"n": 1}', b'{"n": "\xc3\xa9"}'], 10) == 0
    assert await store.append_audit([b'{"n": 3}'], 10) == 0
    first, second, third = await store.read_audit()
    assert [each.event for each in (first, second, third)] == [b'{"n": 1}', b'{"n": "\xc3\xa9"}', b'{"n": 3}']
    assert await store.read_audit(first.place, 1) == [second]
    await store.trim_audit(second.place)
    await store.trim_audit(second.place)
    assert await store.read_audit() == [third]
    await store.trim_audit(third.place)
    assert await store.read_audit(third.place) == []


async def test_a_full_audit_stream_keeps_what_it_has_and_marks_the_gap(store: Store, raw: Redis) -> None:
    assert await store.append_audit([b"1", b"2", b"3"], 2) == 1
    assert await store.append_audit([b"4"], 2) == 1
    kept = await store.read_audit()
    assert [each.event for each in kept] == [b"1", b"2"]
    await store.trim_audit(kept[-1].place)
    assert await store.append_audit([b"5"], 2) == 0
    assert [(each.event, each.lost) for each in await store.read_audit()] == [(b"", 2), (b"5", 0)]
    assert await raw.exists(keys.audit_lost_key()) == 0


# ── API keys ────────────────────────────────────────────────────────────────────────────────────────────────────────


def key_record(owner: Owner = ACME, **changes: object) -> KeyRecord:
    fields = {"key_id": new_id(), "secret_hash": "00" * 32, "tenant": owner.tenant, "project": owner.project}
    return msgspec.convert({**fields, "role": Role.ADMIN, **changes}, KeyRecord)


async def test_a_keys_copy_is_kept_and_never_written_over_a_revocation(store: Store, raw: Redis) -> None:
    record = key_record(created_at=2.0, name="ci", member="ann@example.org", expires_at=5.5)
    assert await store.cached_key(record.key_id) is None
    await store.cache_key(record)
    await store.cache_key(msgspec.structs.replace(record, name="other"))
    assert await store.cached_key(record.key_id) == record
    await store.mark_key_revoked(record.key_id)
    await store.cache_key(record)
    assert await store.cached_key(record.key_id) == "revoked"
    assert 0 < await raw.ttl(keys.api_key_key(record.key_id)) <= 3600
    await store.mark_key_revoked(record.key_id)


# ── health and election ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_leads_until_it_gives_up_or_falls_silent(store: Store) -> None:
    """F28"""
    answers = await asyncio.gather(*(store.lead("pool", f"m{number}", 60) for number in range(20)))
    assert sum(answers) == 1
    leader = f"m{answers.index(True)}"
    assert await store.lead("pool", leader, 60)
    assert not await store.lead("pool", "other", 60)
    assert not await store.lead("pool", "other", 0)
    assert await store.lead("reaper", "other", 60)
    assert not await store.lead("pool", leader, 0)
    assert await store.lead("pool", "other", 0.05)
    async with asyncio.timeout(30):
        while not await store.lead("pool", leader, 60):
            pass


async def test_managers_meet_and_those_that_go_or_fall_silent_are_not_counted(store: Store) -> None:
    assert await store.meet("m1", 60) == ["m1"]
    assert sorted(await store.meet("m2", 60)) == ["m1", "m2"]
    assert await store.meet("m1", 0) == ["m2"]
    await store.meet("m3", 0.05)
    async with asyncio.timeout(30):
        while sorted(await store.meet("m1", 60)) != ["m1", "m2"]:
            pass


async def test_a_ping_takes_some_time(store: Store) -> None:
    assert 0 < await store.ping() < 30


async def test_forgotten_scripts_are_sent_again(store: Store, raw: Redis) -> None:
    sandbox_id = (await bound(store)).sandbox_id
    await raw.script_flush()
    await store.touch_leases("m1", {sandbox_id: 1})
    await raw.script_flush()
    assert (await lease_of(store, sandbox_id)).operations == 1


async def test_a_foreign_value_in_our_place_is_a_typed_error(store: Store, raw: Redis) -> None:
    await raw.set(keys.binding_key(ACME, "t"), "not a hash")
    await raw.set(keys.api_key_key("k"), "{not json")
    await raw.hset(keys.binding_key(ACME, "u"), "tenant", "acme")
    with pytest.raises(StoreUnavailable):
        await begun(store)
    with pytest.raises(StoreUnavailable):
        await store.get_binding(ACME, "t")
    with pytest.raises(StoreUnavailable):
        await store.get_binding(ACME, "u")
    with pytest.raises(StoreUnavailable):
        await store.cached_key("k")
    assert await store.list_bindings() == []
