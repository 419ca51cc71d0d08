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


def claims_key() -> str:
    """Sorted set: the ids of sandboxes that are being made, by when their claim is stale (ms). No TTL."""
    return f"{PREFIX}claims"


def slots_key(owner: Owner) -> str:
    """Sorted set: the ids of the owner's sandboxes that have not ended, one slot each; the score is when an
    unfinished claim may be taken back (ms), +inf once it is bound. No TTL. The project's quota is counted by it."""
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


def managers_key() -> str:
    """Sorted set: the managers that are there, until when by the leases' clock. No TTL: each `meet` clears it up."""
    return f"{PREFIX}managers"


def clock_key() -> str:
    """String: milliseconds to take off Redis `TIME`, the sum of the steps that its clock made. No TTL."""
    return f"{PREFIX}clock"


def settled_key() -> str:
    """String: "1" once the pods were looked for after Redis was empty. No TTL: only a wipe takes it away."""
    return f"{PREFIX}settled"


def mark_key(owner: Owner, scope: str, key: str) -> str:
    """String: JSON of what the idempotency key was first used for. TTL: the caller's."""
    digest = hashlib.sha256()
    for text in (scope, key):  # both are the caller's and of any length
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return f"{PREFIX}mark:{_part(owner.tenant)}:{_part(owner.project)}:{digest.hexdigest()[:40]}"


def api_key_key(key_id: str) -> str:
    """String: JSON of a KeyRecord, a copy of the object; or `revoked`. No TTL; an hour where it is revoked."""
    return f"{PREFIX}api-key:{key_id}"


def leader_key(name: str) -> str:
    """String: who holds the leadership. TTL: what was asked for."""
    return f"{PREFIX}leader:{name}"


def audit_key() -> str:
    """Stream: audit events that object storage does not have yet, oldest first. No TTL: bounded by its appender."""
    return f"{PREFIX}audit"


def audit_lost_key() -> str:
    """String: how many audit events found the stream full since it last had room. No TTL."""
    return f"{PREFIX}audit-lost"


def record_key(object_key: str) -> str:
    """String: JSON of a durable record as its object holds it, and of which version; empty where there is no such
    object. TTL: seconds (`manager.store.records`)."""
    return f"{PREFIX}record:{object_key}"
