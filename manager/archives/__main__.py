"""The child: an archive on its standard input, one plain tar on its standard output, why not on its error output.

`python -I -m manager.archives tar|gzip|zip ENTRIES TOTAL_BYTES`; `zstd` and `unzstd` run that program likewise, which
Python has none of before 3.14. A zip archive has to be a file. What it
reads is a stranger's, so it gives up what it does not need before the first byte: its user where that is root, memory
and time beyond a bound, the right to make files or processes and to gain privileges.
"""

from __future__ import annotations

import codecs
import ctypes
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import BinaryIO, Final

from executor.gunzip import Gunzip
from executor.tarread import Member, TarLimits, TarReader, TarRefused
from manager.archives.canonical import Canonical
from manager.archives.zipread import zip_members

MEMORY_BYTES: Final = 512 << 20  # of addresses, the interpreter's own 100 MB included
WINDOW_MIB: Final = 128  # what `zstd --ultra -22` uses; --long=28 and more are refused
CPU_SEC: Final = 900
NOBODY: Final = 65_534
_PIECE_BYTES: Final = 256 * 1024
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_DUMPABLE: Final = 4

codecs.lookup("cp437")  # what zip archives' names are in; loaded now, while the library can still be read


def main(kind: str, limits: TarLimits) -> int:
    _give_up()
    try:
        canonical = Canonical()
        with open(1, "wb", buffering=_PIECE_BYTES, closefd=False) as out:
            for piece in canonical.take(_events(kind, limits)):
                out.write(piece)
            out.write(canonical.finish())
        _say({"entries": canonical.entries, "bytes": canonical.file_bytes})
        return 0
    except TarRefused as why:
        _say({"fault": why.fault, "message": str(why), "limit": why.limit, "member": why.shown})
    except MemoryError:
        _say({"fault": "limit", "message": "the archive takes too much memory to read", "limit": None, "member": ""})
    except BrokenPipeError:
        pass  # whoever wanted it has gone
    return 1


def _events(kind: str, limits: TarLimits) -> Iterator[Member | memoryview | bytes]:
    with open(0, "rb", buffering=0, closefd=False) as source:
        if kind == "zip":
            with open(0, "rb", closefd=False) as file:
                yield from zip_members(file, limits)
            return
        reader = TarReader(limits)
        gunzip = Gunzip() if kind == "gzip" else None
        for data in _pieces(source):
            for plain in [data] if gunzip is None else gunzip.feed(data):
                yield from reader.feed(plain)
        if gunzip is not None:
            gunzip.finish()
        reader.finish()


def _pieces(source: BinaryIO) -> Iterator[bytes]:
    while data := source.read(_PIECE_BYTES):
        yield data


def run_zstd(options: list[str]) -> None:
    """Becomes that program."""
    program = shutil.which("zstd") or "zstd"
    _give_up()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv(program, [program, *options])


def _give_up() -> None:
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_SEC),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
    ):
        hard = resource.getrlimit(limit)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (bound, bound))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _say(what: dict[str, object]) -> None:
    sys.stderr.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "zstd":
        run_zstd(["-cq", "-3", "-T1"])
    if sys.argv[1] == "unzstd":
        run_zstd(["-dcq", f"--memory={WINDOW_MIB}MiB"])
    sys.exit(main(sys.argv[1], TarLimits(entries=int(sys.argv[2]), total_bytes=int(sys.argv[3]))))
