"""Which files processes of the calling thread's user have mapped shared and writable: those can change without the
kernel noting a time, as long as a page that was written to is not yet written out (and on tmpfs always)."""

from __future__ import annotations

import os
from typing import Final

_MOST_BYTES: Final = 64 << 20  # of all processes' maps: a process can make as many as it likes


def mapped_inodes() -> frozenset[int]:
    """Their inode numbers, without devices: overlayfs names others here than stat(2) does."""
    found = set()
    left = _MOST_BYTES
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/maps", "rb") as file:
                for line in file:
                    left -= len(line)
                    fields = line.split(b" ", 5)
                    if len(fields) > 4 and fields[1] == b"rw-s" and fields[4] != b"0":
                        found.add(int(fields[4]))
                    if left < 0:
                        return frozenset(found)
        except (OSError, ValueError):
            continue  # ended, or not ours to look at
    return frozenset(found)
