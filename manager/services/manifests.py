"""What a workspace durably is: a manifest, which is a row of layers; and a snapshot, a manifest that nobody changes."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from manager.model import Owner
from manager.store.blobs import Blob
from manager.store.objects import key_part, owner_prefix

LAYERS: Final = "layers/"  # where all layers lie: `layers/<tenant>/<project>/<workspace>/<save>/<chunk>`
STATE: Final = re.compile(r"[0-9a-f]{1,128}\Z")  # what an executor calls a state of its workspace
MAX_LAYERS: Final = 48  # beyond so many, the next checkpoint is a whole one
_WORTH_BYTES: Final = 4 << 20  # below it, many small layers do no harm but by their number


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a workspace: a zstd stream of a tar, kept as it came. Never changed."""

    blob: Blob
    full: bool  # stands alone; else it changes what the layers before it made
    content_bytes: int  # of the files in it, as the pod said: a bound for whoever applies it
    entries: int  # changed and removed names, as the pod said
    of_command_user: bool = False  # all in it belongs to whomever its pod runs commands as, whatever it says itself
    packed: bytes | None = None  # a small one's bytes lie here, deflated, and its blob has no chunks


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What file calls have changed since what was kept before it; laid over all that."""

    layer: Layer
    state: str  # of the pod's file calls with it: of two the greater is the later


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A workspace as of its last complete checkpoint: `layers` in order; and what file calls have changed since,
    `written` in order. Number 0 has nothing: nothing was saved yet."""

    owner: Owner
    workspace: str
    number: int = 0  # of this change
    saved_at: float = 0.0  # seconds since the epoch
    layers: tuple[Layer, ...] = ()
    pod: str = ""  # the pod whose workspace was like this when its executor called it `state`
    state: str | None = None
    written: tuple[Written, ...] = ()
    covered: str = ""  # the state of that pod's file calls that is in the layers

    @property
    def rows(self) -> tuple[Layer, ...]:
        """All that makes the workspace, in order."""
        return (*self.layers, *(written.layer for written in self.written))

    @property
    def prefixes(self) -> set[str]:
        """Where that lies."""
        return {layer.blob.prefix for layer in self.rows if layer.packed is None}

    @property
    def packed_bytes(self) -> int:
        """Of the layers that lie in the manifest itself."""
        return sum(len(layer.packed) for layer in self.rows if layer.packed is not None)

    @property
    def calls(self) -> str:
        """The state of its pod's file calls up to which all of them are in it; "": none is known."""
        return self.written[-1].state if self.written else self.covered

    @property
    def stored_bytes(self) -> int:
        """What it takes in object storage."""
        return sum(layer.blob.size if layer.packed is None else len(layer.packed) for layer in self.rows)

    @property
    def wants_whole(self) -> bool:
        """Whether its layers have become many, or weigh more than the whole would: a whole checkpoint replaces them."""
        first, *others = (layer.blob.size for layer in self.layers) if self.layers else (0,)
        return len(self.layers) >= MAX_LAYERS or sum(others) > max(_WORTH_BYTES, first)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest under an id of its own; nobody changes it, and it outlives its workspace."""

    snapshot_id: str
    name: str
    created_at: float  # seconds since the epoch
    manifest: Manifest
    keep_until: float | None = None  # None: until it is deleted


def save_prefix(owner: Owner, workspace: str, save_id: str) -> str:
    """Where one checkpoint's chunks lie, and no other's: what a dead one left is told by its prefix alone."""
    return f"{LAYERS}{owner_prefix(owner)}{key_part(workspace)}/{key_part(save_id)}/"
