"""Directory trees for the tests of layers: all that is to be kept of one, edits made at random, and layers by hand."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from executor.layerapply import Applier
from executor.layerpack import LayerPacker, data_extents
from executor.layerread import LayerReader, layer_limits
from executor.layerwire import LayerReport, layer_end
from executor.treeindex import TreeIndex
from executor.treewalk import TreeWalk

Picture = dict[bytes, tuple[Any, ...]]
NAMES: Final = (
    b"a",
    b"b.c",
    b"b",
    b"\xff\xfe",
    b".wh.a",
    b".wh..wh..opq",
    "ü".encode(),
    b"long" * 60,
    b"new\nline",
    b"b c",
)


def picture(top: Path) -> Picture:
    """All that a layer is to keep, by path: of the root too, under b""."""
    found: Picture = {}
    links: dict[tuple[int, int], bytes] = {}
    root = os.fsencode(top)
    todo = [b""]
    while todo:
        name = todo.pop()
        path = root + b"/" + name if name else root
        status = os.lstat(path)
        kind = stat.S_IFMT(status.st_mode)
        facts: tuple[Any, ...] = (kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns)
        if kind == stat.S_IFREG:
            first = links.setdefault((status.st_dev, status.st_ino), name)
            facts += (status.st_size, _digest(path), _holes(path, status), _xattrs(path), first)
        elif kind == stat.S_IFLNK:
            facts += (os.readlink(path),)
        elif kind == stat.S_IFDIR:
            facts += (_xattrs(path),)
            inner = sorted(os.listdir(path), reverse=True)
            todo += [name + b"/" + one if name else one for one in inner]
        if kind != stat.S_IFSOCK:
            found[name] = facts
    return found


def differences(one: Picture, other: Picture) -> list[str]:
    """A line for each path that is not the same in both."""
    return [f"{path!r}: {one.get(path)} != {other.get(path)}" for path in sorted(one.keys() | other.keys())
            if one.get(path) != other.get(path)]  # fmt: skip


def _digest(path: bytes) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _holes(path: bytes, status: os.stat_result) -> Any:
    if status.st_blocks * 512 >= status.st_size:
        return None
    fd = os.open(path, os.O_RDONLY)
    try:
        return data_extents(fd, status.st_size)
    finally:
        os.close(fd)


def _xattrs(path: bytes) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith("user.")}


# ── layers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def pack(top: Path, base: TreeIndex | None, **more: Any) -> tuple[bytes, TreeIndex, LayerPacker, TreeWalk]:
    """The layer's tar, the new state, and what both were made with."""
    out = io.BytesIO()
    with opened(top) as fd:
        walk = TreeWalk(fd, **more)
        packer = LayerPacker(fd, walk, base, TreeIndex(None), out.write)
        try:
            packer.run()
        except BaseException:
            packer.new.close()
            raise
    return out.getvalue(), packer.new, packer, walk


def apply(layer: bytes, top: Path, **more: Any) -> Applier:
    """Raises TarRefused."""
    settings = {"umask": 0o022, "executor": (os.geteuid(), os.getegid()), **more}
    with opened(top) as fd:
        applier = Applier(fd, **settings)
        reader = LayerReader(layer_limits())
        try:
            for start in range(0, len(layer), 70_001):
                piece = layer[start : start + 70_001]
                reader.room()[: len(piece)] = piece
                applier.take(reader.read(len(piece)))
            reader.finish()
            applier.finish()
        finally:
            applier.close()
    return applier


def packed(tar: bytes) -> bytes:
    """As zstd."""
    program = shutil.which("zstd")
    assert program is not None
    return subprocess.run([program, "-cq"], input=tar, capture_output=True, check=True).stdout


def unpacked(layer: bytes) -> bytes:
    program = shutil.which("zstd")
    assert program is not None
    return subprocess.run([program, "-dcq"], input=layer, capture_output=True, check=True).stdout


def ended(data: bytes, state: str = "0" * 32, **facts: Any) -> bytes:
    """With an end mark."""
    counts = {"entries": 0, "removed": 0, "bytes": 0, "tar_bytes": 0, "base": None, **facts}
    return data + layer_end(LayerReport(state=state, sha256=hashlib.sha256(data).hexdigest(), **counts))


# ── edits ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Edits:
    """Changes a tree as programs would, chosen by a seed, staying inside it."""

    def __init__(self, top: Path, seed: int, *, owners: bool = False) -> None:
        self._top = os.fsencode(top)
        self._random = random.Random(seed)
        self._owners = owners

    def run(self, count: int) -> None:
        for _ in range(count):
            step = self._random.choice((
                self._write, self._write, self._append, self._mkdir, self._symlink, self._link, self._fifo,
                self._remove, self._rename, self._chmod, self._touch, self._sparse, self._xattr, self._chown,
                self._same_size,
            ))  # fmt: skip
            with contextlib.suppress(OSError):
                step()

    def _directories(self) -> list[bytes]:
        return [root for root, _, _ in os.walk(self._top)]

    def _everything(self) -> list[bytes]:
        return [os.path.join(root, name) for root, inner, files in os.walk(self._top) for name in (*inner, *files)]

    def _files(self) -> list[bytes]:
        return [path for path in self._everything() if stat.S_ISREG(os.lstat(path).st_mode)]

    def _new(self) -> bytes:
        return os.path.join(self._random.choice(self._directories()), self._random.choice(NAMES))

    def _any(self, of: list[bytes]) -> bytes:
        if not of:
            raise OSError
        return self._random.choice(sorted(of))

    def _created(self) -> IO[bytes]:
        """A new or emptied file; never what a link leads to, nor a FIFO."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        return open(os.open(self._new(), flags, 0o644), "wb")

    def _write(self) -> None:
        with self._created() as file:
            file.write(self._random.randbytes(self._random.choice((0, 1, 511, 512, 513, 5000))))

    def _append(self) -> None:
        with open(self._any(self._files()), "ab") as file:
            file.write(b"more")

    def _same_size(self) -> None:
        """And with the times as before."""
        path = self._any(self._files())
        status = os.stat(path)
        with open(path, "r+b") as file:
            file.write(self._random.randbytes(min(status.st_size, 8)))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _mkdir(self) -> None:
        os.mkdir(self._new())

    def _symlink(self) -> None:
        os.symlink(self._random.choice((b"a", b"/nonexistent/file", b"../../..", b"nowhere", b"x" * 300)), self._new())

    def _link(self) -> None:
        os.link(self._any(self._files()), self._new())

    def _fifo(self) -> None:
        os.mkfifo(self._new())

    def _remove(self) -> None:
        path = self._any(self._everything())
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def _rename(self) -> None:
        os.rename(self._any(self._everything()), self._new())

    def _chmod(self) -> None:
        path = self._any(self._everything())
        if not stat.S_ISLNK(os.lstat(path).st_mode):
            is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
            bits = self._random.choice((0, stat.S_ISVTX)) | (0o700 if os.geteuid() else 0) if is_directory else 0
            os.chmod(path, self._random.choice((0o700, 0o755, 0o640, 0o600, 0o777)) | bits)

    def _touch(self) -> None:
        ns = self._random.choice((0, 1, 1_234_567_890_123_456_789, -5_000_000_001, 4_000_000_000_000_000_001))
        os.utime(self._any(self._everything()), ns=(ns, ns), follow_symlinks=False)

    def _sparse(self) -> None:
        with self._created() as file:
            file.seek(self._random.choice((0, 65_536)))
            file.write(b"data")
            file.truncate(self._random.choice((1 << 20, 300_000)))

    def _xattr(self) -> None:
        path = self._any([*self._directories(), *self._files()])
        os.setxattr(path, "user.with=sign%", self._random.randbytes(20), follow_symlinks=False)

    def _chown(self) -> None:
        if self._owners:
            os.chown(self._any(self._everything()), self._random.choice((1000, 3_000_000)), 1000, follow_symlinks=False)
