"""What the file says of a profile's warm pool."""

from __future__ import annotations

import msgspec

from manager.model import PoolSize

_MOST_PODS = 10_000
_PLAIN_SIZE = 2


class PoolTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`size` alone, or `min` and `max` with what a pool between them is sized by."""

    size: int | None = None
    min: int | None = None
    max: int | None = None
    utilisation: float | None = None
    shrink_sec: int | None = None


def pool_size(table: PoolTable) -> PoolSize:
    """Raises ValueError, saying what to write instead."""
    if table.size is not None and (table.min, table.max) != (None, None):
        raise ValueError("pool has a size, or a min and a max, not both")
    for name in ("size", "min", "max"):
        value = getattr(table, name)
        if value is not None and not 0 <= value <= _MOST_PODS:
            raise ValueError(f"pool: {name} must be a number of pods from 0 to {_MOST_PODS}, not {value}")
    if table.max is None:
        least = most = next((given for given in (table.size, table.min) if given is not None), _PLAIN_SIZE)
    else:
        most = table.max
        least = min(_PLAIN_SIZE, most) if table.min is None else table.min
    if least > most:
        raise ValueError(f"pool needs min <= max, and {least} is more than {most}")
    if least == most and (table.utilisation, table.shrink_sec) != (None, None):
        raise ValueError(
            "pool: utilisation and shrink_sec are for a pool whose size changes: give it a max over its min"
        )
    if table.utilisation is not None and not 0.1 <= table.utilisation <= 1:
        raise ValueError(f"pool: utilisation must be a share from 0.1 to 1, not {table.utilisation}")
    if table.shrink_sec is not None and not 10 <= table.shrink_sec <= 86_400:
        raise ValueError(f"pool: shrink_sec must be seconds from 10 to 86400, not {table.shrink_sec}")
    given = {name: value for name in ("utilisation", "shrink_sec") if (value := getattr(table, name)) is not None}
    return PoolSize(min=least, max=most, **given)
