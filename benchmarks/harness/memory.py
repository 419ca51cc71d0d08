"""Memory of a process and of all that it started, from /proc."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SAMPLE_SEC: Final = 0.05


@dataclass
class Peak:
    """The highest figure seen while a block ran; 0 where none could be read."""

    pss_bytes: int = 0
    samples: int = 0


def tree(pid: int) -> list[int]:
    """`pid` and its descendants; gone ones are left out."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    found = [pid] if pid in parents else []
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found


def pss_bytes(pids: list[int]) -> int | None:
    """Proportional set size of all of them; None where the kernel does not let us read one that still lives."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except PermissionError:
            return None
        except OSError:  # ended in between
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def alone_bytes(pids: list[int]) -> int | None:
    """Their PSS as it were if nobody else on the machine had the same files mapped, as in a pod of its own.

    A benchmark runs several executors and is Python itself: the kernel's figure shares the interpreter among them all.
    None where the kernel does not let us read one that still lives."""
    total_kb = 0
    most_kb: dict[tuple[str, str], int] = {}  # by file and place in it: the most that one of them has of it
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        except PermissionError:
            return None
        except OSError:  # ended in between
            continue
        shared_kb: dict[tuple[str, str], int] = {}
        key: tuple[str, str] | None = None
        for line in lines:
            name, *fields = line.split()
            if not name.endswith(":"):  # a mapping's first line: addresses, rights, offset, device, inode, path
                key = (fields[3], fields[1]) if fields[3] != "0" else None
            elif name in (("Pss:",) if key is None else ("Private_Clean:", "Private_Dirty:")):
                total_kb += int(fields[0])
            elif name in ("Shared_Clean:", "Shared_Dirty:") and key is not None:
                shared_kb[key] = shared_kb.get(key, 0) + int(fields[0])
        for place, kb in shared_kb.items():
            most_kb[place] = max(most_kb.get(place, 0), kb)
    return (total_kb + sum(most_kb.values())) * 1024


def wakeups(pids: list[int]) -> int:
    """How often all their threads have left the processor so far, by themselves or not."""
    total = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*/status"):
            try:
                lines = thread.read_text().splitlines()
            except OSError:  # ended in between
                continue
            total += sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)
    return total


@contextmanager
def peak_pss(pids: list[int]) -> Iterator[Peak]:
    """Samples the given processes while the block runs."""
    peak, stop = Peak(), threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_SEC):
            now = pss_bytes(pids)
            if now is None:
                return
            peak.pss_bytes = max(peak.pss_bytes, now)
            peak.samples += 1

    thread = threading.Thread(target=sample, name="memory-sampler", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join(5)
