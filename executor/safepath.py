"""From a caller's path to open directories, without ever following a link.

A path is cut into components, and each is opened relative to the descriptor of the one before with O_NOFOLLOW: what
a command renames or links meanwhile cannot lead the walk anywhere else, as a check of the whole path beforehand could
be led. The places that files may be in are a few root directories; `..` is refused and not resolved.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from executor.errors import (
    Conflict,
    ExecutorError,
    FileMissing,
    InvalidPath,
    NoSpace,
    NotADirectory,
    NotAFile,
    NotSupported,
    PermissionDenied,
    TooLarge,
)  # fmt: skip

MAX_PATH_BYTES: Final = 4096
MAX_NAME_BYTES: Final = 255
DIRECTORY_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_NOREPLACE: Final = 1

_libc: Final = ctypes.CDLL(None, use_errno=True)

Parts = tuple[bytes, ...]


@dataclass(frozen=True)
class Place:
    """A path that names something in a root, or the root itself (`parts` empty)."""

    root: Parts  # the root's real components from `/` on
    parts: Parts
    path: bytes  # absolute, in the caller's spelling of the root

    @property
    def is_root(self) -> bool:
        return not self.parts

    def is_below(self, other: Place) -> bool:
        mine, its = self.root + self.parts, other.root + other.parts
        return len(mine) > len(its) and mine[: len(its)] == its

    @property
    def shown(self) -> str:
        return shown(self.path)


class Roots:
    """The directories that files may be in; relative paths start at the first."""

    def __init__(self, paths: Sequence[str]) -> None:
        # A root may be reached through links of the operator's: they are followed here, once, before any command runs.
        spelled = [(_cut(os.fsencode(path)), _cut(os.path.realpath(os.fsencode(path)))) for path in paths]
        self._first = spelled[0]
        both = {as_given: real for given, real in spelled for as_given in (given, real)}
        self._by_length = sorted(both.items(), key=lambda pair: -len(pair[0]))  # the innermost root wins
        self._names = ", ".join(paths)

    def place(self, path: str, field: str = "path") -> Place:
        """Raises InvalidPath (details: `field`)."""
        try:
            raw = path.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidPath(f"{field}: holds a lone surrogate, which no file name can", field=field) from None
        if not raw:
            raise InvalidPath(f"{field}: is empty", field=field)
        if b"\0" in raw:
            raise InvalidPath(f"{field}: holds a NUL character", field=field)
        if len(raw) > MAX_PATH_BYTES:
            raise InvalidPath(f"{field}: is longer than {MAX_PATH_BYTES} bytes", field=field)
        parts = _cut(raw)
        for part in parts:
            if part == b"..":
                raise InvalidPath(f"{field}: '..' is not allowed", field=field)
            if len(part) > MAX_NAME_BYTES:
                raise InvalidPath(f"{field}: a name is longer than {MAX_NAME_BYTES} bytes", field=field)
        if not raw.startswith(b"/"):
            given, real = self._first
            return Place(real, parts, _join((*given, *parts)))
        for given, real in self._by_length:
            if parts[: len(given)] == given:
                return Place(real, parts[len(given) :], _join(parts))
        raise InvalidPath(
            f"{field}: {shown(raw)} is in none of the places that files may be in: {self._names}", field=field
        )

    def holds_root(self, place: Place) -> bool:
        """Whether a root is at the place or below it, so that it must be neither deleted nor moved."""
        full = place.root + place.parts
        return any(real[: len(full)] == full for _, real in self._by_length)


def shown(path: bytes) -> str:
    """For messages and JSON: bytes that are no UTF-8 become U+FFFD, and very long paths are cut."""
    text = path.decode("utf-8", "replace")
    return text if len(text) <= 400 else f"{text[:200]}...{text[-197:]}"


@contextmanager
def directory_at(place: Place, parts: Parts | None = None) -> Iterator[int]:
    """An O_PATH descriptor of the directory `parts` (default: all of the place's) below the place's root.

    Raises InvalidPath where a component is a link, NotADirectory, FileMissing, PermissionDenied."""
    fd = open_directory(place, place.parts if parts is None else parts)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def parent_of(place: Place) -> Iterator[tuple[int, bytes]]:
    """The directory that holds the place, and the place's name in it. Not for roots."""
    with directory_at(place, place.parts[:-1]) as fd:
        yield fd, place.parts[-1]


def open_directory(place: Place, parts: Parts) -> int:
    fd, missing = open_existing(place, parts)
    if missing:
        os.close(fd)
        raise FileMissing(f"{shown(_below(place, parts[: len(parts) - len(missing) + 1]))} does not exist")
    return fd


def open_existing(place: Place, parts: Parts) -> tuple[int, Parts]:
    """The deepest directory of `parts` that exists, and the components that do not. The root itself must exist."""
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    steps = place.root + parts
    for index, name in enumerate(steps):
        try:
            deeper = step_into(fd, name)
        except OSError as error:
            if error.errno == errno.ENOENT and index >= len(place.root):
                return fd, steps[index:]
            refusal = step_error(error, fd, name, _join(steps[: index + 1]))
            os.close(fd)
            raise refusal from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        fd = deeper
    return fd, ()


def step_into(fd: int, name: bytes) -> int:
    """An O_PATH descriptor of the directory `name` in `fd`; OSError where it is missing, a link or no directory."""
    return os.open(name, DIRECTORY_FLAGS, dir_fd=fd)


def step_error(error: OSError, fd: int, name: bytes, path: bytes) -> ExecutorError:
    """The typed error where `name` in `fd`, at `path`, could not be stepped into."""
    if error.errno in (errno.ENOTDIR, errno.ELOOP):  # O_DIRECTORY on a link says either
        try:
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
        except OSError:
            is_link = True  # it changed under us, which only something that plays with links does
        if is_link:
            return file_error(OSError(errno.ELOOP, ""), path)
    return file_error(error, path)


def enter_or_make(fd: int, name: bytes, mode: int, path: bytes) -> tuple[int, bool]:
    """A descriptor of the directory `name` in `fd`, and whether it is new. `path` is for the typed errors."""
    try:
        try:
            return step_into(fd, name), False
        except FileNotFoundError:
            pass
        try:
            return make_directory(fd, name, mode), True
        except FileExistsError:  # another made it meanwhile
            return step_into(fd, name), False
    except OSError as error:
        raise step_error(error, fd, name, path) from None


def make_directory(fd: int, name: bytes, mode: int) -> int:
    """Makes `name` in `fd`, with just this mode whatever the umask is; a descriptor of it. Raises OSError."""
    os.mkdir(name, 0o700, dir_fd=fd)
    made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        inherited = os.fstat(made).st_mode & stat.S_ISGID
        os.fchmod(made, mode | inherited)
    except BaseException:
        os.close(made)
        raise
    return made


def rename(source_fd: int, source: bytes, target_fd: int, target: bytes, replace: bool) -> None:
    """Atomic; raises OSError, EEXIST where something is at the target that may not be replaced."""
    if replace:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
        return
    function = getattr(_libc, "renameat2", None)  # glibc 2.28
    if function is not None:
        if function(source_fd, source, target_fd, target, _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(number, os.strerror(number))
    # The file system cannot do it in one step: what is made in between is then replaced.
    try:
        os.stat(target, dir_fd=target_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
        return
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))


def file_error(error: OSError, path: bytes) -> ExecutorError:
    """The typed error for what the kernel said about a path."""
    name, why = shown(path), error.strerror or str(error)
    match error.errno:
        case errno.ENOENT | errno.ESTALE:
            return FileMissing(f"{name} does not exist")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return PermissionDenied(f"{name}: {why}")
        case errno.ENOSPC | errno.EDQUOT:
            return NoSpace(f"{name}: {why}; delete something first")
        case errno.EISDIR:
            return NotAFile(f"{name} is a directory")
        case errno.ENXIO | errno.ENODEV:
            return NotAFile(f"{name} is a socket or device")
        case errno.ENOTDIR:
            return NotADirectory(f"{name}: a part of the path is no directory")
        case errno.ELOOP:
            return InvalidPath(f"{name} is a symbolic link, and links are not followed", component=name)
        case errno.ENAMETOOLONG | errno.EINVAL | errno.EILSEQ:
            return InvalidPath(f"{name}: {why}")
        case errno.EEXIST | errno.ENOTEMPTY | errno.EBUSY | errno.ETXTBSY:
            return Conflict(f"{name}: {why}")
        case errno.EFBIG:
            return TooLarge(f"{name}: {why}")
        case errno.EXDEV:
            return NotSupported(f"{name}: source and target are on different file systems; run `mv` there instead")
    return ExecutorError(f"{name}: {why}", errno=errno.errorcode.get(error.errno or 0, "unknown"))


def _below(place: Place, parts: Parts) -> bytes:
    return _join(place.root + parts)


def _cut(raw: bytes) -> Parts:
    return tuple(part for part in raw.split(b"/") if part not in (b"", b"."))


def _join(parts: Parts) -> bytes:
    return b"/" + b"/".join(parts)
