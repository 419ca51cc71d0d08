"""A layer out of a pod is whole and the one that was announced, or it is none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator

import msgspec
import pytest

from executor.layerwire import END_BYTES, NO_BASE, LayerReport, layer_end
from manager.errors import ExecutorUnreachable
from manager.pod_layers import PodLayer, bounded

STATE, BASE = "a" * 32, "b" * 32
BODY = os.urandom(10_000)


def end_of(body: bytes, **changes: object) -> bytes:
    report = LayerReport(
        state=STATE, base=BASE, sha256=hashlib.sha256(body).hexdigest(), entries=3, removed=1, bytes=7, tar_bytes=9
    )
    return layer_end(msgspec.structs.replace(report, **changes))


async def pieces(data: bytes, size: int) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def read(data: bytes, size: int = 700, base: str = BASE, state: str = STATE) -> tuple[bytes, PodLayer]:
    layer = PodLayer(base, state, pieces(data, size))
    return b"".join([chunk async for chunk in layer.chunks()]), layer


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 5000, 100_000])
@pytest.mark.parametrize("body", [b"", b"x", BODY], ids=["empty", "one byte", "some"])
async def test_a_whole_layer_comes_with_its_end_mark_however_it_is_cut(body: bytes, size: int) -> None:
    data = body + end_of(body)
    got, layer = await read(data, size)
    assert got == data
    assert (layer.base, layer.report.entries, layer.report.removed, layer.report.bytes) == (BASE, 3, 1, 7)


async def test_a_layer_that_stands_alone_has_no_base() -> None:
    _, layer = await read(BODY + end_of(BODY, base=None), base=NO_BASE)
    assert layer.base is None


@pytest.mark.parametrize("cut", [1, 500, END_BYTES, END_BYTES + 1, 5000, len(BODY) + END_BYTES])
async def test_a_layer_that_was_cut_short_is_none(cut: int) -> None:
    """F24: whatever the connection looked like."""
    data = BODY + end_of(BODY)
    with pytest.raises(ExecutorUnreachable, match="whole"):
        await read(data[: len(data) - cut])


@pytest.mark.parametrize(
    "end",
    [
        end_of(BODY + b"x"),
        end_of(BODY, state=BASE),
        end_of(BODY, base=None),
        end_of(BODY, base=STATE),
        end_of(BODY).replace(b'"entries":3', b'"entries":x'),
        end_of(BODY).replace(b'"entries":3', b'"entries":-'),
        end_of(BODY).replace(b"sojourn_layer", b"sojourn_lager"[:13], 1).replace(b'"state"', b'"stale"'),
        bytes(END_BYTES),
        b"\xff" * END_BYTES,
    ],
)
async def test_a_layer_that_is_not_what_was_announced_is_none(end: bytes) -> None:
    with pytest.raises(ExecutorUnreachable):
        await read(BODY + end)


@pytest.mark.parametrize(
    ("base", "state"), [("", STATE), (BASE, ""), (BASE, "../x"), ("NONE", STATE), (BASE, "A" * 32), (BASE, "a" * 33)]
)
async def test_headers_that_name_no_states_are_refused(base: str, state: str) -> None:
    with pytest.raises(ExecutorUnreachable):
        await read(BODY + end_of(BODY), base=base, state=state)


async def test_an_answer_without_end_is_refused() -> None:
    assert await bounded(pieces(b"x" * 100, 10), 100) == b"x" * 100
    with pytest.raises(ExecutorUnreachable):
        await bounded(pieces(b"x" * 101, 10), 100)
