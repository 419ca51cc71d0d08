"""The tree that checkpoints are measured with: `tree.py fill|change|digest DIRECTORY [FILES BYTES]`.

Runs wherever the tree is, in a sandbox too, so the standard library alone. Half of each file is text that packs well,
half does not pack at all; sizes differ by a hundred.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

CHANGED = 10
DIRECTORIES = 211


def fill(top: Path, files: int, size: int) -> None:
    rng = random.Random(7)
    text = b"the quick brown fox jumps over the lazy dog\n" * 2000
    weights = [min(rng.paretovariate(1.2), 100.0) for _ in range(files)]
    scale = size / sum(weights)
    for number, weight in enumerate(weights):
        length = int(weight * scale)
        path = top / f"d{number % DIRECTORIES}" / f"f{number}"
        path.parent.mkdir(exist_ok=True)
        half = length // 2
        with path.open("wb") as file:
            file.write(rng.randbytes(half))
            for at in range(0, length - half, len(text)):
                file.write(text[: length - half - at])


def change(top: Path) -> None:
    for number in range(CHANGED):
        (top / f"d{number % DIRECTORIES}" / f"f{number}").write_bytes(random.Random(number).randbytes(2000))


def digest(top: Path) -> str:
    """Of every file's name and content."""
    found = hashlib.sha256()
    for path in sorted(path for path in top.rglob("*") if path.is_file()):
        found.update(str(path.relative_to(top)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    what, directory = sys.argv[1], Path(sys.argv[2])
    if what == "fill":
        fill(directory, int(sys.argv[3]), int(sys.argv[4]))
    elif what == "change":
        change(directory)
    else:
        sys.stdout.write(digest(directory))
