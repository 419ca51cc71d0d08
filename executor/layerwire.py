"""Layers as they cross the pod's edge: the names of their headers, what is said about one, and its end mark.

The last bytes of every layer that an executor makes are a zstd frame that each decoder skips (RFC 8878, 3.1.2), with a
LayerReport in it. What lacks this end mark was cut short, whatever the connection looked like. Needs msgspec only.
"""

from __future__ import annotations

import re
import struct
from typing import Final

import msgspec

LAYER_BASE_HEADER: Final = "Sandbox-Layer-Base"  # the state that a layer is laid over, or NO_BASE
LAYER_STATE_HEADER: Final = "Sandbox-Layer-State"  # the workspace's state with the layer
LAYER_TYPE: Final = "application/zstd"
NO_BASE: Final = "none"
END_BYTES: Final = 1024
MAX_ENTRIES: Final = 10_000_000  # of one layer
MAX_BYTES: Final = 1 << 40  # of content in one layer

RAW_BEGIN: Final = b"\x28\xb5\x2f\xfd\x00\x68"  # of a zstd frame that packs nothing: no size said; a window of 8 MiB
RAW_END: Final = b"\x01\x00\x00"  # an empty last block

_RAW_BLOCK: Final = 128 * 1024
_END_HEAD: Final = struct.pack("<II", 0x184D2A5E, END_BYTES - 8)
_STATE: Final = re.compile(r"[0-9a-f]{32}\Z")
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer holds, and that it is whole. The counts from `changed` on say what is not as exact as the rest."""

    sojourn_layer: int = 1
    state: str
    base: str | None  # the state that it is laid over; None: it stands alone
    sha256: str  # in hex, of all of the layer's bytes before the end mark
    entries: int
    removed: int  # marks of what is no longer there
    bytes: int  # of content; holes are not counted
    tar_bytes: int  # unpacked
    changed: int = 0  # files that changed while they were read; the next layer has them again
    unreadable: int = 0  # not the executor's to read
    sockets: int = 0  # left out
    devices: int = 0  # left out
    mounts: int = 0  # of other file systems inside the workspace: not entered
    too_deep: int = 0  # directories whose content is left out
    links_split: int = 0  # further names of one file that are files of their own in the layer
    attributes_lost: int = 0  # extended ones, too many or too large
    written: str | None = None  # the state of what file calls change (`GET /v1/changes?written=`) when this began


class LayerApplied(msgspec.Struct, frozen=True, kw_only=True):
    """What `PUT /v1/layers` did to the workspace."""

    entries: int
    files: int
    removed: int  # marks of what is no longer there
    bytes: int
    owners_lost: int  # entries whose owner this pod may not give: they belong to the executor's user
    set_id_dropped: int  # set-id bits that would have been root's or the executor's user's
    left_alone: int  # entries at a mount or a bound secret
    attributes_lost: int  # extended ones that the file system does not take
    state: str | None = None  # the base for the next layer; with `last=true` only


class NoLayerEnd(ValueError):
    """The bytes are no end mark: the layer was cut short, or an executor did not make it."""


def is_state(text: str) -> bool:
    return _STATE.match(text) is not None


def is_sha256(text: str) -> bool:
    return _SHA256.match(text) is not None


def raw_blocks(data: bytes) -> bytes:
    """The bytes as blocks of a zstd frame that packs nothing (RFC 8878, 3.1.1.2)."""
    blocks = (data[at : at + _RAW_BLOCK] for at in range(0, len(data), _RAW_BLOCK))
    return b"".join((len(block) << 3).to_bytes(3, "little") + block for block in blocks)


def layer_end(report: LayerReport) -> bytes:
    """END_BYTES of them."""
    text = msgspec.json.encode(report)
    assert len(text) <= END_BYTES - 8
    return _END_HEAD + text.ljust(END_BYTES - 8)


def read_layer_end(data: bytes) -> LayerReport:
    """Out of a layer's last END_BYTES. Raises NoLayerEnd."""
    if len(data) != END_BYTES or not data.startswith(_END_HEAD):
        raise NoLayerEnd("the layer has no end mark: it was cut short")
    try:
        report = msgspec.json.decode(data[8:], type=LayerReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as why:
        raise NoLayerEnd(f"the layer's end mark cannot be read: {str(why)[:200]}") from None
    counts = [value for name in LayerReport.__struct_fields__ if isinstance(value := getattr(report, name), int)]
    if not is_state(report.state) or not is_sha256(report.sha256) or min(counts) < 0 or max(counts) > 1 << 60:
        raise NoLayerEnd("the layer's end mark says what cannot be")
    if any(state is not None and not is_state(state) for state in (report.base, report.written)):
        raise NoLayerEnd("the layer's end mark names a state that is none")
    return report
