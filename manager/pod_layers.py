"""Layers between a pod and the manager: a workspace's changes on their way out, checked to be whole.

The pod is a hostile server: what it says of a layer is claims, but a layer that does not end with its own end mark, of
the state that was announced and of the bytes that came, is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from executor.layerwire import END_BYTES, NO_BASE, LayerReport, NoLayerEnd, is_state, read_layer_end
from manager.errors import ExecutorUnreachable

SILENT_SEC: Final = 600.0  # an unchanged tree sends nothing while it is walked
APPLIED_BYTES: Final = 64 << 10


class PodLayer:
    """A layer on its way out of a pod. `report` is there when the last chunk has come."""

    def __init__(self, base: str, state: str, body: AsyncIterator[bytes]) -> None:
        """Raises ExecutorUnreachable where the headers are none that an executor gives."""
        if not is_state(state) or not (base == NO_BASE or is_state(base)):
            raise ExecutorUnreachable("the pod does not say what its layer is laid over")
        self.base = None if base == NO_BASE else base
        self.state = state
        self._body = body
        self._report: LayerReport | None = None

    @property
    def report(self) -> LayerReport:
        if self._report is None:
            raise AssertionError("the layer has not come to its end")
        return self._report

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """All of its bytes. Raises ExecutorUnreachable where it is not whole; the end mark comes only if it is."""
        digest, kept = hashlib.sha256(), b""
        async for piece in self._body:
            kept += piece
            if len(kept) > END_BYTES:
                chunk, kept = kept[:-END_BYTES], kept[-END_BYTES:]
                digest.update(chunk)
                yield chunk
        try:
            report = read_layer_end(kept)
        except NoLayerEnd as why:
            raise ExecutorUnreachable(f"the pod did not send its workspace whole: {why}") from None
        if report.sha256 != digest.hexdigest() or (report.base, report.state) != (self.base, self.state):
            raise ExecutorUnreachable("the pod's layer is not the one that it announced")
        self._report = report
        yield kept


async def bounded(body: AsyncIterator[bytes], limit: int) -> bytes:
    """The whole body. Raises ExecutorUnreachable beyond `limit` bytes."""
    parts = bytearray()
    async for piece in body:
        parts += piece
        if len(parts) > limit:
            raise ExecutorUnreachable(f"the pod's answer is over the bound of {limit} bytes")
    return bytes(parts)
