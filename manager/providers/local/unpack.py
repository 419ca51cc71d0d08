"""An image's layers, laid one over the other in a directory. All calls block.

The archive is not trusted: nothing is written outside of the directory, whatever names and links a layer holds. Nobody
else writes there meanwhile, so that looking at a path and then using it is no race. What only root of a machine has a
use for is left out: devices, sockets, set-uid and set-gid bits."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from manager.errors import ImagePullFailed
from manager.providers.local.removal import remove_tree

MAX_BYTES: Final = 64 << 30  # of all files of an image
MAX_ENTRIES: Final = 4_000_000
_MAX_LINKS: Final = 40  # followed for one path, as the kernel does
_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
_COPY_BYTES: Final = 1 << 20
_MAX_ID: Final = (1 << 31) - 1


def resolve(root: Path, path: str, *, make: bool = False) -> Path | None:
    """Where `path` leads to with `root` as `/`, all links followed within it, the last component's too.

    `make`: directories that are missing are made, and what stands in the place of one is removed. Else None where
    there is nothing. Raises ImagePullFailed for a circle of links."""
    todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    here: list[str] = []
    followed = 0
    while todo:
        part = todo.pop()
        if part == "..":
            here = here[:-1]
            continue
        at = root.joinpath(*here, part)
        try:
            mode = at.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if not make:
                return None
            at.mkdir(mode=0o755)
            mode = stat.S_IFDIR
        if stat.S_ISLNK(mode):
            followed += 1
            if followed > _MAX_LINKS:
                raise ImagePullFailed(f"the image's {path} is a circle of links")
            target = os.readlink(at)
            if target.startswith("/"):
                here = []
            todo += [part for part in reversed(target.split("/")) if part not in ("", ".")]
            continue
        if make and not stat.S_ISDIR(mode):
            at.unlink()
            at.mkdir(mode=0o755)
        here.append(part)
    return root.joinpath(*here)


class Unpacker:
    """Raises ImagePullFailed for what is no layer, OSError where the file system does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._is_root = os.geteuid() == 0
        self._bytes = self._entries = 0

    def layer(self, stream: IO[bytes]) -> None:
        """`stream` is a tar archive, also one in gzip, bzip2 or xz."""
        made: set[Path] = set()
        try:
            with tarfile.open(fileobj=stream, mode="r|*", bufsize=_COPY_BYTES) as archive:
                for entry in archive:
                    self._entries += 1
                    self._bytes += max(0, entry.size) if entry.isreg() else 0
                    if self._entries > MAX_ENTRIES or self._bytes > MAX_BYTES:
                        raise ImagePullFailed(f"the image is over {MAX_ENTRIES} files or {MAX_BYTES >> 30} GiB")
                    self._put(archive, entry, made)
        except (tarfile.TarError, EOFError, ValueError) as why:
            raise ImagePullFailed(f"a layer of the image cannot be read: {why}") from why

    def _put(self, archive: tarfile.TarFile, entry: tarfile.TarInfo, made: set[Path]) -> None:
        parts = [part for part in entry.name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in entry.name:
            raise ImagePullFailed(f"a layer of the image holds the name {entry.name!r}")
        if not parts:
            return
        parent = resolve(self.root, "/".join(parts[:-1]), make=True)
        assert parent is not None
        name = parts[-1]
        if name == _OPAQUE:
            for child in parent.iterdir():
                if child not in made:
                    remove_tree(child)
            return
        if name.startswith(_WHITEOUT):
            gone = name.removeprefix(_WHITEOUT)
            if gone in ("", ".", ".."):
                raise ImagePullFailed(f"a layer of the image holds the name {entry.name!r}")
            remove_tree(parent / gone)
            return
        target = parent / name
        if self._write(archive, entry, target):
            made.update((target, *target.parents))

    def _write(self, archive: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> bool:
        """Whether it is of a kind that is kept."""
        mode = stat.S_IMODE(entry.mode) & 0o1777
        if entry.isdir():
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(target.lstat().st_mode):
                    target.unlink()
            target.mkdir(exist_ok=True)
            self._own(target, entry)
            target.chmod(mode if self._is_root else mode | 0o700)
            return True
        if entry.isreg():
            remove_tree(target)
            source = archive.extractfile(entry)
            assert source is not None
            with open(target, "xb") as file:
                shutil.copyfileobj(source, file, _COPY_BYTES)
            self._own(target, entry)
            target.chmod(mode)
        elif entry.issym():
            remove_tree(target)
            target.symlink_to(entry.linkname)
            self._own(target, entry)
        elif entry.islnk():
            *above, last = [part for part in entry.linkname.split("/") if part not in ("", ".")] or [""]
            parent = resolve(self.root, "/".join(above))
            if parent is None or last in ("", ".."):
                raise ImagePullFailed(f"a layer of the image links {entry.name!r} to {entry.linkname!r}")
            if parent / last != target:
                remove_tree(target)
                os.link(parent / last, target, follow_symlinks=False)
        else:
            return False
        return True

    def _own(self, target: Path, entry: tarfile.TarInfo) -> None:
        if self._is_root and 0 <= entry.uid <= _MAX_ID and 0 <= entry.gid <= _MAX_ID:
            os.lchown(target, entry.uid, entry.gid)


def entries(root: Path, path: str) -> Iterator[os.DirEntry[str]]:
    """What the image's directory holds; nothing where it is none."""
    try:
        with os.scandir(root / path.lstrip("/")) as scan:
            yield from scan
    except (FileNotFoundError, NotADirectoryError):
        return
