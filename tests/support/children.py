"""What tests start and make outside themselves, and what must not outlive a test run that is killed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills this process when the thread that started it ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def run_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A directory that is removed on the way out, or, where this process is killed, by the next that asks for one with
    the same prefix: a lock beside it tells whether its owner lives."""
    parent = parent or Path(tempfile.gettempdir())
    for lock in parent.glob(f"{prefix}-*.lock"):
        _remove_if_left_behind(lock)
    number, name = tempfile.mkstemp(prefix=f"{prefix}-", suffix=".lock", dir=parent)
    lock = Path(name)
    directory = lock.with_suffix("")
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        directory.mkdir(mode=0o700)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(number)


def _remove_if_left_behind(lock: Path) -> None:
    with contextlib.suppress(OSError), lock.open() as file:  # somebody else's, gone by now, or in use
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink()
