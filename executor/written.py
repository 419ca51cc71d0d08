"""Which paths of the workspace file calls have changed, in their order, so that just these can be made durable at once.

Each change has the next number. A state's name is when this executor began and a number, both in hex: of two names of
one pod the greater one is the later. What was changed by commands is not here: that is what checkpoints are for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from executor.safepath import Parts, Place

MAX_PATHS: Final = 50_000
MAX_BYTES: Final = 8 << 20  # of paths
_HALF: Final = 16  # hex digits of each half of a name


class Forgotten(Exception):
    """More was changed since that state than is remembered."""


class Changed(NamedTuple):
    """A path by its key (see treewalk). `whole`: with all below it, in place of whatever was there."""

    key: bytes
    whole: bool


class Written:
    """Safe to be told from any thread."""

    def __init__(self, workspace: Place, *, max_paths: int = MAX_PATHS, max_bytes: int = MAX_BYTES) -> None:
        self._root = workspace.root
        self._began = f"{time.time_ns():0{_HALF}x}"
        self._max_paths, self._max_bytes = max_paths, max_bytes
        self._lock = threading.Lock()
        self._paths: dict[Changed, int] = {}  # when last; the oldest first
        self._bytes = 0
        self._number = 0
        self._known_from = 0  # what was changed after this number is remembered

    def changed(self, place: Place) -> None:
        """The entry itself: a file with its content, a directory without."""
        self._note(place.root, [Changed(b"\0".join(place.parts), whole=False)])

    def replaced(self, place: Place, paths: Sequence[Parts] | None = None) -> None:
        """What is there, or no longer there, with all in it; or what is at these paths in the same root."""
        found = [place.parts] if paths is None else paths
        self._note(place.root, [Changed(b"\0".join(parts), whole=True) for parts in found])

    def moved(self, source: Place, target: Place) -> None:
        self.replaced(source)
        self.replaced(target)

    def forget(self) -> None:
        """Too much changed to be told path by path."""
        with self._lock:
            self._number += 1
            self._forget()

    @property
    def state(self) -> str:
        """The state's name as of now."""
        return self._name(self._number)

    def since(self, state: str) -> tuple[list[Changed], str | None, str]:
        """What was changed since the state, in the order of a walk, then the state that this counts from (None: since
        this executor began, which does not know the state) and that now. Raises Forgotten."""
        with self._lock:
            number = self._number_of(state)
            if (number or 0) < self._known_from:
                raise Forgotten
            found = [changed for changed, at in self._paths.items() if at > (number or 0)]
            return sorted(found), state if number is not None else None, self._name(self._number)

    def _note(self, root: Parts, paths: list[Changed]) -> None:
        if root != self._root:
            return  # /tmp, say, which no checkpoint has either
        with self._lock:
            self._number += 1
            for changed in paths:
                if not changed.key and changed.whole:
                    self._forget()
                    return
                if self._paths.pop(changed, None) is None:
                    self._bytes += len(changed.key)
                self._paths[changed] = self._number
            if len(self._paths) > self._max_paths or self._bytes > self._max_bytes:
                self._forget()

    def _forget(self) -> None:
        self._paths.clear()
        self._bytes = 0
        self._known_from = self._number

    def _name(self, number: int) -> str:
        return f"{self._began}{number:0{_HALF}x}"

    def _number_of(self, state: str) -> int | None:
        if state[:_HALF] != self._began:
            return None
        number = int(state[_HALF:], 16)
        return number if number <= self._number else None
