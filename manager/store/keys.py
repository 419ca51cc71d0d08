"""Every Redis key, one function each. The docstring gives its type, what it holds and how long.

All start with `sojourn:`. Scripts build some keys from ids that they find in Redis, so everything lives in one Redis
(or a primary with replicas), not in a Redis Cluster.
"""

from __future__ import annotations

import hashlib
from typing import Final

from manager.model import Owner

PREFIX: Final = "sojourn:"


def _part(text: str) -> str:
    """`text` without the separator, reversibly: two different tuples never make one key."""
    return text.replace("%", "%25").replace(":", "%3A")


def binding_key(owner: Owner, task_id: str) -> str:
    """Hash: the fields of a Binding, when it was claimed, and what an abandoned claim puts back. No TTL until it has
    ended; then a week."""
    return f"{PREFIX}binding:{_part(owner.tenant)}:{_part(owner.project)}:{_part(task_id)}"


def sandbox_key(sandbox_id: str) -> str:
    """String: the binding's key. TTL: the binding's."""
    return f"{PREFIX}sandbox:{sandbox_id}"


def live_key() -> str:
    """Set: the ids of all sandboxes that have not ended. No TTL."""
    return f"{PREFIX}live"


def slots_key(owner: Owner) -> str:
    """Sorted set: the ids of the owner's sandboxes that have not ended, one slot each; the score is when an
    unfinished claim may be taken back (ms), +inf once it is bound. No TTL."""
    return f"{PREFIX}slots:{_part(owner.tenant)}:{_part(owner.project)}"


def lease_key(sandbox_id: str) -> str:
    """Hash: `until_ms`, `hard_ms`, `active_ms`, `idle_ms`, `max_ms`. No TTL: goes with the binding's end."""
    return f"{PREFIX}lease:{sandbox_id}"


def leases_key() -> str:
    """Sorted set: sandbox ids by their lease's `until_ms`. No TTL."""
    return f"{PREFIX}leases"


def operations_key(sandbox_id: str) -> str:
    """Hash: holder (a manager instance) -> operations it has under way. No TTL: goes with the lease; the fields of
    holders without a heartbeat do not count."""
    return f"{PREFIX}operations:{sandbox_id}"


def holder_key(holder: str) -> str:
    """String: a manager instance's heartbeat. TTL: a minute from its last `touch_leases`."""
    return f"{PREFIX}holder:{holder}"


def holding_key(holder: str) -> str:
    """Set: sandbox ids for which the holder has operations under way. TTL: a day from its last `touch_leases`."""
    return f"{PREFIX}holding:{holder}"


def clock_key() -> str:
    """String: milliseconds to take off Redis `TIME`, the sum of the steps that its clock made. No TTL."""
    return f"{PREFIX}clock"


def mark_key(owner: Owner, scope: str, key: str) -> str:
    """String: JSON of what the idempotency key was first used for. TTL: the caller's."""
    digest = hashlib.sha256()
    for text in (scope, key):  # both are the caller's and of any length
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return f"{PREFIX}mark:{_part(owner.tenant)}:{_part(owner.project)}:{digest.hexdigest()[:40]}"


def api_key_key(key_id: str) -> str:
    """String: JSON of a KeyRecord. No TTL: until it is deleted."""
    return f"{PREFIX}key:{key_id}"


def api_keys_key(owner: Owner | None) -> str:
    """Set: the ids of the owner's API keys; for None of everybody's. No TTL."""
    return f"{PREFIX}keys" if owner is None else f"{PREFIX}keys:{_part(owner.tenant)}:{_part(owner.project)}"


def leader_key(name: str) -> str:
    """String: who holds the leadership. TTL: what was asked for."""
    return f"{PREFIX}leader:{name}"
