"""Where things are in Redis: no two things share a place, and each place says what it holds."""

from __future__ import annotations

import inspect

from hypothesis import given
from hypothesis import strategies as st

from manager.model import Owner
from manager.store import keys

TEXT = st.text(alphabet="ab:%/. ", max_size=6)


@given(TEXT, TEXT, TEXT, TEXT, TEXT, TEXT)
def test_two_tasks_never_share_a_binding(a: str, b: str, c: str, x: str, y: str, z: str) -> None:
    same = (a, b, c) == (x, y, z)
    assert (keys.binding_key(Owner(a, b), c) == keys.binding_key(Owner(x, y), z)) is same


@given(TEXT, TEXT, TEXT, TEXT)
def test_two_owners_never_share_slots(a: str, b: str, x: str, y: str) -> None:
    same = (a, b) == (x, y)
    assert (keys.slots_key(Owner(a, b)) == keys.slots_key(Owner(x, y))) is same


@given(TEXT, TEXT, TEXT, TEXT)
def test_two_idempotency_keys_never_share_a_mark(scope: str, key: str, other_scope: str, other_key: str) -> None:
    owner = Owner("acme", "web")
    same = (scope, key) == (other_scope, other_key)
    assert (keys.mark_key(owner, scope, key) == keys.mark_key(owner, other_scope, other_key)) is same


def test_an_idempotency_key_of_any_length_makes_a_short_redis_key() -> None:
    assert len(keys.mark_key(Owner("acme", "web"), "task", "k" * 100_000)) < 100


def test_every_key_says_its_type_and_how_long_it_is_kept() -> None:
    functions = [value for name, value in inspect.getmembers(keys, inspect.isfunction) if name.endswith("_key")]
    assert len(functions) >= 14
    for function in functions:
        doc = inspect.getdoc(function) or ""
        assert doc.startswith(("Hash:", "Set:", "Sorted set:", "Stream:", "String:")), function.__name__
        assert "TTL" in doc, function.__name__


def test_every_key_carries_the_products_prefix() -> None:
    owner = Owner("acme", "web")
    made = [
        keys.binding_key(owner, "t"), keys.sandbox_key("s"), keys.live_key(), keys.slots_key(owner),
        keys.lease_key("s"), keys.leases_key(), keys.operations_key("s"), keys.holder_key("h"), keys.holding_key("h"),
        keys.clock_key(), keys.mark_key(owner, "t", "k"), keys.api_key_key("k"), keys.audit_key(),
        keys.audit_lost_key(), keys.leader_key("pool"),
    ]  # fmt: skip
    assert len(set(made)) == len(made)
    assert all(key.startswith("sojourn:") for key in made)
