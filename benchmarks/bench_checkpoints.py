"""What does it take to keep a sandbox's workspace and to bring it back? Beside `tar | zstd` and restic on such a tree.

A whole stack is asked as its users ask it: `POST .../stop`, `POST .../start`, the first command's answer. See
`harness/kept.py` for the floor of a start. Let `--directory` be on a file system with a journal: ext4
without one takes seconds over new files where many were just deleted, as a stop does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":  # started as a file, the tree's root is not where imports are looked for
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import machine
from benchmarks.harness.kept import Kept, measured
from benchmarks.harness.tree import CHANGED, change, digest, fill

ALL_FILES, ALL_BYTES = 50_000, 1 << 30


@dataclass
class Figures:
    """Seconds and bytes of one way to do it; None: not measured."""

    way: str
    first_sec: float
    again_sec: float | None
    back_sec: float
    first_bytes: int
    again_bytes: int | None
    exact: bool  # what came back has every byte


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=ALL_FILES)
    parser.add_argument("--bytes", type=int, default=ALL_BYTES)
    parser.add_argument("--rounds", type=int, default=3, help="of floor and start")
    parser.add_argument("--quick", action="store_true", help="a twentieth of files and bytes")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--objects", metavar="URL", help="object storage; as in the configuration; else a directory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit 1 where a must does not hold")
    parser.add_argument("--directory", type=Path, help="where to work; needs ten times the bytes")
    flags = parser.parse_args(argv)
    files, size = (flags.files // 20, flags.bytes // 20) if flags.quick else (flags.files, flags.bytes)
    about = machine.describe()
    with tempfile.TemporaryDirectory(prefix="sojourn-bench-", dir=flags.directory) as name:
        top = Path(name)
        top.chmod(0o711)
        ours = asyncio.run(measured(top, files, size, flags.rounds, flags.objects))
        peers = [] if flags.no_peers else [_tar_zstd(top, files, size)]
        if peers and shutil.which("restic"):
            peers.append(_restic(top, files, size))
    musts = {
        "a stop after 10 changes takes under a tenth of the first": ours.again_sec * 10 < ours.first_sec,
        "start to first command takes under 1.5 times the plain streaming of its layers": ours.start_ratio < 1.5,
        "the manager takes under 100 MB": ours.memory_bytes < 100 << 20,
        "what comes back has every byte": ours.exact and all(one.exact for one in peers),
    }
    if flags.json:
        figures = {"sojourn": asdict(ours), "peers": [asdict(one) for one in peers], "musts": musts}
        print(json.dumps({"files": files, "bytes": size, "machine": about, **figures}, indent=2))
    else:
        print(f"{about['date']}, commit {about['commit']}, {about['cores']} cores, load before {about['load_before']}")
        print(_table(ours, peers, files, size, musts))
    return int(flags.check and not all(musts.values()))


def _table(ours: Kept, peers: Sequence[Figures], files: int, size: int, musts: dict[str, bool]) -> str:
    lines = [
        f"{files} files, {size >> 20} MiB; {CHANGED} of them changed before the second time",
        f"{'':<14}{'first':>10}{'again':>10}{'back':>10}{'stored':>12}{'again':>12}",
    ]
    back = statistics.median(ours.start_sec)
    own = Figures("sojourn", ours.first_sec, ours.again_sec, back, ours.first_bytes, ours.again_bytes, ours.exact)
    for one in (own, *peers):
        again = "-" if one.again_sec is None else f"{one.again_sec:.2f} s"
        more = "-" if one.again_bytes is None else f"{one.again_bytes / 1e6:.2f} MB"
        lines.append(
            f"{one.way:<14}{one.first_sec:>8.2f} s{again:>10}{one.back_sec:>8.2f} s"
            f"{one.first_bytes / 1e6:>9.2f} MB{more:>12}"
        )
    rounds = ", ".join(f"{start:.2f}/{floor:.2f}" for start, floor in zip(ours.start_sec, ours.floor_sec, strict=True))
    lines += [
        f"start to first command / plain streaming of its layers, in turns: {rounds} s: {ours.start_ratio:.2f}x",
        f"the same of an empty sandbox: {ours.empty_start_sec:.2f} s; "
        f"a stop with nothing changed: {statistics.median(ours.unchanged_sec):.2f} s",
        f"processor time of a start / of the streaming: {statistics.median(ours.start_cpu_sec):.2f} / "
        f"{statistics.median(ours.floor_cpu_sec):.2f} s; the manager's memory: {ours.memory_bytes / 1e6:.0f} MB more",
    ]
    return "\n".join([*lines, *(f"{'holds ' if held else 'FAILS '} {must}" for must, held in musts.items())])


def _stored(top: Path) -> int:
    return sum(path.stat().st_size for path in top.rglob("*") if path.is_file())


def _timed(doing: Callable[[], object]) -> float:
    started = time.perf_counter()
    doing()
    return time.perf_counter() - started


def _tar_zstd(top: Path, files: int, size: int) -> Figures:
    tree, packed, back = top / "tar-tree", top / "tar.zst", top / "tar-back"
    tree.mkdir()
    back.mkdir()
    fill(tree, files, size)
    first = _timed(lambda: _run(f"tar -C '{tree}' -cf - . | zstd -q -1 -o '{packed}' && sync '{packed}'"))
    back_sec = _timed(lambda: _run(f"zstd -dqc '{packed}' | tar -C '{back}' -xpf -"))
    exact = digest(back) == digest(tree)
    return Figures("tar | zstd -1", first, None, back_sec, packed.stat().st_size, None, exact)


def _restic(top: Path, files: int, size: int) -> Figures:
    tree, repository, back = top / "restic-tree", top / "restic", top / "restic-back"
    tree.mkdir()
    fill(tree, files, size)
    os.environ["RESTIC_PASSWORD"] = "benchmark"
    restic = f"restic -q --no-cache -r '{repository}'"
    _run(f"{restic} init")
    first = _timed(lambda: _run(f"{restic} backup '{tree}'"))
    first_bytes = _stored(repository)
    change(tree)
    again = _timed(lambda: _run(f"{restic} backup '{tree}'"))
    again_bytes = _stored(repository) - first_bytes
    back_sec = _timed(lambda: _run(f"{restic} restore latest --target '{back}'"))
    exact = digest(back / tree.relative_to("/")) == digest(tree)
    return Figures("restic", first, again, back_sec, first_bytes, again_bytes, exact)


def _run(command: str) -> None:
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
