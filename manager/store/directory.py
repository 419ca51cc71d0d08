"""Object storage in a directory: whole files, written beside and then linked or renamed, on the disk before the answer.

Conditions hold across processes: writers that replace or delete take a lock of the file system, which ends with its
holder. Blocking calls run on threads of this module's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from manager.errors import StoreUnavailable
from manager.store.objects import (
    CALL_SEC,
    MAX_PUT_BYTES,
    MOVE_SEC,
    PAGE,
    Object,
    ObjectChanged,
    ObjectInfo,
    ObjectTooLarge,
    answered,
)

T = TypeVar("T")

_BESIDE: Final = ".beside"  # files being written; no part of a key starts with a dot
_LOCKS: Final = ".locks"
_LOCK_FILES: Final = 64
_PIECE: Final = 1 << 20
_THREADS: Final = 8
_NAMED_KEPT: Final = 10_000
_TRIES: Final = 100  # a directory may be taken away, empty, between being made and being used


class DirectoryObjects:
    """manager.store.objects.Objects over the files under `root`. See there for what each method does."""

    def __init__(self, root: Path) -> None:
        """Raises StoreUnavailable where the directory cannot be made or written."""
        self.describe = f"directory {root}"
        self._root = root
        self._named: set[Path] = set()  # directories whose own names are on the disk
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="objects")
        try:
            for path in (root, root / _BESIDE, root / _LOCKS):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sweep(root / _BESIDE)
        except OSError as why:
            raise StoreUnavailable(f"the objects' {self.describe} cannot be used: {why.strerror or why}") from why

    async def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        if len(data) > MAX_PUT_BYTES:
            raise ValueError(f"{len(data)} bytes at once are over the bound of {MAX_PUT_BYTES}")
        async with answered("put", MOVE_SEC):
            return await self._call(partial(self._put, self._path(key), data, if_absent, if_match))

    async def get(self, key: str, *, limit: int) -> Object | None:
        async with answered("get", MOVE_SEC):
            return await self._call(partial(_read, self._path(key), limit))

    async def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        path = self._path(key)
        async with answered("get", CALL_SEC, missing=key):
            file = await self._call(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        try:
            while end is None or start < end:
                want = _PIECE if end is None else min(_PIECE, end - start)
                async with answered("read", CALL_SEC):
                    piece = await self._call(partial(os.pread, file, want, start))
                if not piece:
                    return
                yield piece
                start += len(piece)
        finally:
            os.close(file)

    async def head(self, key: str) -> ObjectInfo | None:
        async with answered("head", CALL_SEC):
            return await self._call(partial(_info, self._path(key), key))

    async def list(self, prefix: str, after: str = "") -> AsyncGenerator[list[ObjectInfo], None]:
        walk = _walk(self._path(prefix) if prefix else self._root, prefix, after)
        while True:
            async with answered("list", MOVE_SEC):
                page = await self._call(lambda: list(islice(walk, PAGE)))
            if page:
                yield page
            if len(page) < PAGE:
                return

    async def delete(self, key: str) -> None:
        async with answered("delete", CALL_SEC):
            await self._call(partial(self._delete, self._path(key)))

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ── on a thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, path: Path, data: bytes, if_absent: bool, if_match: str | None) -> str:
        beside = self._root / _BESIDE / secrets.token_hex(16)
        file = _begin(beside)
        try:
            _write_all(file, data)
            # The clock of files is coarser than two writes are apart, and a freed inode is used again at once.
            os.utime(file, ns=(now := time.time_ns(), now))
            os.fsync(file)
            etag = _etag(os.fstat(file))
            if if_absent:
                published = self._publish(beside, path, os.link)
            else:
                with self._locked(path):
                    if if_match is not None and _etag_at(path) != if_match:
                        published = False
                    else:
                        published = self._publish(beside, path, os.replace)
        finally:
            with contextlib.suppress(FileNotFoundError):
                beside.unlink()
            os.close(file)
        if published:
            return etag
        present = _read(path, MAX_PUT_BYTES)
        if present is not None and present.data == data:
            return present.etag
        raise ObjectChanged(str(path.relative_to(self._root)))

    def _publish(self, beside: Path, path: Path, place: Callable[[Path, Path], None]) -> bool:
        for _ in range(_TRIES):
            try:
                place(beside, path)
            except FileExistsError:
                return False
            except FileNotFoundError:  # not made yet, or a delete found the directory empty and took it away
                self._named.discard(path.parent)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            self._sync_names(path)
            return True
        raise OSError("the directory goes away as often as it is made")

    def _sync_names(self, path: Path) -> None:
        """A file is there after a power cut only when its name is, and the names of its directories are: those of a
        directory are brought to the disk when this process first puts something into it."""
        known = path.parent in self._named
        for directory in path.parents:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
            if known or directory == self._root:
                break
        if len(self._named) >= _NAMED_KEPT:
            self._named.clear()
        self._named.add(path.parent)

    def _delete(self, path: Path) -> None:
        with self._locked(path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
        for directory in path.parents:
            if directory == self._root:
                return
            try:
                directory.rmdir()
            except OSError:
                return
            self._named.discard(directory)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        which = hashlib.sha256(bytes(path)).digest()[0] % _LOCK_FILES
        file = os.open(self._root / _LOCKS / str(which), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # held for one rename or unlink, and its fsyncs
            yield
        finally:
            os.close(file)

    # ── from the loop ───────────────────────────────────────────────────────────────────────────────────────────

    async def _call(self, blocking: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, blocking)

    def _path(self, key: str) -> Path:
        parts = key.rstrip("/").split("/")
        if any(not part or part.startswith(".") or "\0" in part for part in parts):
            raise ValueError(f"{key!r} is no key")
        return self._root.joinpath(*parts)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _etag_at(path: Path) -> str | None:
    try:
        return _etag(path.lstat())
    except FileNotFoundError:
        return None


def _read(path: Path, limit: int) -> Object | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(file, "rb") as opened:
        data = opened.read(limit + 1)
        if len(data) > limit:
            raise ObjectTooLarge(f"object storage: {path.name} has more than {limit} bytes")
        return Object(data, _etag(os.fstat(file)))


def _info(path: Path, key: str) -> ObjectInfo | None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not os.path.isfile(path):
        return None
    return ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)


def _walk(directory: Path, prefix: str, after: str) -> Iterator[ObjectInfo]:
    """By key as object storage orders them: a directory stands where its name and `/` do."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(
                (entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name) for entry in entries
            )
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        key = prefix + name
        if name.startswith(".") or (key <= after and not after.startswith(key)):
            continue
        if name.endswith("/"):
            yield from _walk(directory / name[:-1], key, after)
        elif key > after and (info := _info(directory / name, key)) is not None:
            yield info


@contextlib.contextmanager
def _directory_locked(directory: Path, how: int) -> Iterator[None]:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


def _begin(beside: Path) -> int:
    """A new file to write, locked as long as its writer lives: what is not locked was left behind."""
    with _directory_locked(beside.parent, fcntl.LOCK_SH):  # a sweep sees the file only once it is locked
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file


def _sweep(directory: Path) -> None:
    """Takes away what writers that are dead had begun."""
    with _directory_locked(directory, fcntl.LOCK_EX):
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(file)
