"""Removing a directory whose content a pod's commands made: any depth, any permissions, any names.

Nothing in it runs any more when this is called, but what it looks like was chosen by an attacker."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Removes `path` and everything under it; links are removed, never followed. No error where it is gone.

    Two descriptors and two levels at any depth: a subdirectory that is not empty is first moved up beside its parent,
    so that no path grows and nothing recurses. Raises OSError for what cannot be removed."""
    try:
        top = _open(os.fspath(path), None)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        path.unlink(missing_ok=True)
        return
    try:
        while True:
            while names := _names(top):
                for name in names:
                    _remove(top, name)
            try:
                path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as why:  # a second remover has moved something up
                if why.errno != errno.ENOTEMPTY:
                    raise
    finally:
        os.close(top)


def _remove(top: int, name: str) -> None:
    """Removes one entry of `top`, moving what is deeper up into `top`."""
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
            os.unlink(name, dir_fd=top)
            return
        try:
            os.rmdir(name, dir_fd=top)
            return
        except OSError:
            inner = _open(name, top)
    except FileNotFoundError:
        return  # a second remover was faster
    try:
        while names := _names(inner):
            for child in names:
                _empty_or_raise(inner, child, top)
    finally:
        os.close(inner)
    try:
        os.rmdir(name, dir_fd=top)
    except FileNotFoundError:
        pass


def _empty_or_raise(inner: int, name: str, top: int) -> None:
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=inner).st_mode):
            os.unlink(name, dir_fd=inner)
            return
        try:
            os.rmdir(name, dir_fd=inner)
        except OSError:
            # Moving a directory writes its `..`, so it has to be writable itself.
            os.close(_open(name, inner))
            os.rename(name, f"up-{secrets.token_hex(16)}", src_dir_fd=inner, dst_dir_fd=top)
    except FileNotFoundError:
        pass


def _open(name: str, parent: int | None) -> int:
    """The directory itself, made readable, writable and enterable for us where it was not."""
    path = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
    try:
        if os.fstat(path).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{path}", 0o700)
        return os.open(".", _DIRECTORY, dir_fd=path)
    finally:
        os.close(path)


def _names(directory: int) -> list[str]:
    """The first names in it, 4096 at most: a directory may hold more than fits in memory."""
    found: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            found.append(entry.name)
            if len(found) == 4096:
                break
    return found
