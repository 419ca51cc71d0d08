"""What a manager keeps on its machine: secrets made once, the development key, the address of a running stack.

The directory is mode 0700 and its files 0600. Every file is written beside and then linked or renamed, so that nobody
ever reads half of one and two managers that start at once agree on one secret.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from manager.config import BadConfig

API_KEY: Final = "api-key"
ADDRESS: Final = "address"
_MAX_BYTES: Final = 4096


def prepare(path: Path) -> None:
    """Makes the directory with mode 0700. Raises BadConfig where it cannot be ours alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise BadConfig(
                f"the data directory {path} belongs to another user; name one of your own: SOJOURN_DATA_DIR"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o700)
    except OSError as why:
        raise BadConfig(f"the data directory {path} cannot be used: {why}; name another one: SOJOURN_DATA_DIR") from why


def secret(path: Path, name: str, *, make: bool) -> str | None:
    """The secret kept under `name`, made now where there is none; None where it may not be made. Raises BadConfig."""
    kept = read(path, name)
    if kept is None and make:
        _write(path, name, secrets.token_hex(32) + "\n", replace=False)
        kept = read(path, name)
    return kept


def read(path: Path, name: str) -> str | None:
    """The one line under `name`; None where there is none or it is empty. Raises BadConfig."""
    try:
        with (path / name).open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as why:
        raise BadConfig(f"{path / name} cannot be read: {why}") from why


def write(path: Path, name: str, text: str) -> None:
    """Raises BadConfig."""
    _write(path, name, text + "\n", replace=True)


def remove(path: Path, name: str) -> None:
    (path / name).unlink(missing_ok=True)


def _write(path: Path, name: str, text: str, *, replace: bool) -> None:
    beside = path / f".{name}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                beside.replace(path / name)
            else:
                os.link(beside, path / name)
        except FileExistsError:
            pass  # another manager was first, and its secret is the one
        finally:
            beside.unlink(missing_ok=True)
    except OSError as why:
        raise BadConfig(f"{path / name} cannot be written: {why}") from why
