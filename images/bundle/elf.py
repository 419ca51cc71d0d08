"""What the build has to know of ELF files: the loader they ask for, the libraries they need, the paths they search."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NULL, _DT_RPATH, _DT_RUNPATH = 0, 15, 29
_PROGRAM = struct.Struct("<IIQQQQQQ")  # type, flags, offset, vaddr, paddr, file size, memory size, alignment
_DYNAMIC = struct.Struct("<qQ")  # tag, value


class NotElf(Exception):
    """The file is not a 64-bit little-endian ELF file."""


def _programs(data: bytes | bytearray, path: Path) -> list[tuple[int, int, int]]:
    """(type, offset, size) of each segment."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise NotElf(f"{path} is not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 32)
    _size, count = struct.unpack_from("<HH", data, 54)
    entries = [_PROGRAM.unpack_from(data, table + index * _PROGRAM.size) for index in range(count)]
    return [(entry[0], entry[2], entry[5]) for entry in entries]


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def loader_of(program: Path) -> Path | None:
    """The dynamic loader that a program asks for; None for a static one. Raises NotElf."""
    data = program.read_bytes()
    for kind, offset, size in _programs(data, program):
        if kind == _PT_INTERP:
            return Path(data[offset : offset + size].rstrip(b"\0").decode())
    return None


def needed_by(file: Path, loader: Path) -> dict[str, Path]:
    """Name -> file of every library that `file` loads, however deep, as this machine resolves them.

    Raises FileNotFoundError where one is missing."""
    listed = subprocess.run([loader, "--list", file], capture_output=True, text=True, timeout=60, check=True)
    found = {}
    for line in listed.stdout.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if not arrow:  # the kernel's own and the loader
            continue
        where = rest.rpartition(" (")[0]
        if not where.startswith("/"):
            raise FileNotFoundError(f"{file} needs {name}, which this machine does not have")
        found[Path(name).name] = Path(where)
    return found


def forget_search_paths(file: Path) -> None:
    """Takes RPATH and RUNPATH out of a file: they name directories of the machine that it was built on."""
    data = bytearray(file.read_bytes())
    changed = False
    for kind, offset, size in _programs(data, file):
        if kind != _PT_DYNAMIC:
            continue
        entries = list(_DYNAMIC.iter_unpack(data[offset : offset + size]))
        kept = [entry for entry in entries if entry[0] not in (_DT_RPATH, _DT_RUNPATH)]
        if len(kept) != len(entries):
            kept += [(_DT_NULL, 0)] * (len(entries) - len(kept))
            data[offset : offset + size] = b"".join(_DYNAMIC.pack(*entry) for entry in kept)
            changed = True
    if changed:
        file.write_bytes(data)
