"""One file's new content: written beside its target under a hidden name, then put in its place in one step."""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from executor.errors import ExecutorError, NotAFile, PreconditionFailed
from executor.filetree import entry_of, etag_of
from executor.fileuser import FileUser
from executor.safepath import Parts, Place, enter_or_make, file_error, open_existing, rename
from executor.wire import FileEntry


@dataclass(frozen=True, kw_only=True)
class WriteTerms:
    mode: int | None = None  # permission bits; None: the replaced file's, else the default
    if_match: str | None = None  # an ETag, or `*`: any file
    create_only: bool = False  # If-None-Match: *


class Upload:
    """begin, then write as often as needed, then commit; or abort, at any time and from any thread.

    Each runs in a worker thread under the file user's identity and holds the lock meanwhile, so that an abort which a
    cancelled caller sends after a step still under way comes after it, and closes no descriptor under it.
    Directories that are missing are made at the commit only: an upload that fails leaves nothing."""

    def __init__(self, place: Place, terms: WriteTerms, user: FileUser, umask: int, commits: threading.Lock) -> None:
        self._place = place
        self._terms = terms
        self._user = user
        self._umask = umask
        self._commits = commits  # one for all uploads: nothing of ours comes between a condition's check and its rename
        self._lock = threading.Lock()
        self._directory = -1  # the deepest that exists above the target
        self._missing: Parts = ()
        self._fd = -1
        self._temporary = b".sojourn-" + secrets.token_hex(12).encode() + b".part"
        self._over = False

    def begin(self) -> None:
        """Raises what makes the upload impossible from the start, before any content is read."""
        with self._lock:
            if self._over:
                return
            self._directory, self._missing = open_existing(self._place, self._place.parts[:-1])
            if self._missing:
                self._check_terms(None)
            else:
                self._check_terms(self._status_of_target(self._directory))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                self._fd = os.open(self._temporary, flags, 0o600, dir_fd=self._directory)
            except OSError as error:
                raise file_error(error, self._place.path) from None

    def write(self, pieces: Sequence[bytes]) -> None:
        """At most 1024 pieces at a time (IOV_MAX)."""
        with self._lock:
            if self._over:
                return
            try:
                written = os.writev(self._fd, pieces) if pieces else 0
                for piece in pieces:  # what is left of them after a short write
                    left = memoryview(piece)[written:]
                    written = max(0, written - len(piece))
                    while left:
                        left = left[os.write(self._fd, left) :]
            except OSError as error:
                raise file_error(error, self._place.path) from None

    def write_and_commit(self, pieces: Sequence[bytes]) -> tuple[FileEntry, bool]:
        self.write(pieces)
        return self.commit()

    def commit(self) -> tuple[FileEntry, bool]:
        """What is at the target now, and whether nothing was there before. Raises PreconditionFailed, NotAFile."""
        with self._lock, ExitStack() as steps:
            if self._over:
                raise ExecutorError("the upload is over")
            made: list[tuple[int, bytes]] = []
            parent = self._directory
            try:
                with self._commits:
                    for name in self._missing:
                        deeper, is_new = enter_or_make(parent, name, 0o777 & ~self._umask, self._place.path)
                        steps.callback(os.close, deeper)
                        if is_new:
                            made.append((parent, name))
                        parent = deeper
                    return self._replace(parent)
            except BaseException as error:
                for above, name in reversed(made):
                    _remove_if_empty(above, name)
                if isinstance(error, OSError):
                    raise file_error(error, self._place.path) from None
                raise

    def abort(self) -> None:
        """Removes what was written, unless it is in place already. Never raises."""
        with self._lock:
            if self._over:
                return
            self._over = True
            if self._fd >= 0:
                os.close(self._fd)
                try:
                    os.unlink(self._temporary, dir_fd=self._directory)
                except OSError:
                    pass  # a command removed it, or its directory
            if self._directory >= 0:
                os.close(self._directory)

    def _replace(self, parent: int) -> tuple[FileEntry, bool]:
        before = self._status_of_target(parent)
        self._check_terms(before)
        self._give_mode_and_owner(before)
        replace = not self._terms.create_only
        try:
            rename(self._directory, self._temporary, parent, self._place.parts[-1], replace)
        except FileExistsError:
            raise self._exists() from None
        entry = entry_of(os.fstat(self._fd), self._place.path)
        self._over = True
        os.close(self._fd)
        os.close(self._directory)
        return entry, before is None

    def _give_mode_and_owner(self, before: os.stat_result | None) -> None:
        replaced = before if before is not None and stat.S_ISREG(before.st_mode) else None
        mode = self._terms.mode
        if mode is None:
            mode = replaced.st_mode & 0o777 if replaced is not None else 0o666 & ~self._umask
        os.fchmod(self._fd, mode)
        new = os.fstat(self._fd)
        if replaced is None or (replaced.st_uid, replaced.st_gid) == (new.st_uid, new.st_gid):
            return
        # Only root gives files away. Without it the file becomes the writer's, as with any editor. The set-id bits are
        # never kept: they would turn what the caller wrote into the owner's program.
        with self._user.root_again() as is_root:
            try:
                if is_root:
                    os.fchown(self._fd, replaced.st_uid, replaced.st_gid)
            except PermissionError:
                pass  # a root without CAP_CHOWN

    def _status_of_target(self, parent: int) -> os.stat_result | None:
        """None where nothing is there. Raises NotAFile for what no file may replace: all but files and links."""
        try:
            status = os.stat(self._place.parts[-1], dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise file_error(error, self._place.path) from None
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
            what = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise NotAFile(f"{self._place.shown} is {what}")
        return status

    def _check_terms(self, status: os.stat_result | None) -> None:
        check_match(self._terms.if_match, status, self._place)
        if self._terms.create_only and status is not None:
            raise self._exists()

    def _exists(self) -> PreconditionFailed:
        return PreconditionFailed(f"{self._place.shown} is there already")


def check_match(if_match: str | None, status: os.stat_result | None, place: Place) -> None:
    """Raises PreconditionFailed where If-Match was given and no ETag in it is the file's."""
    if if_match is None:
        return
    etag = etag_of(status) if status is not None and stat.S_ISREG(status.st_mode) else None
    if not matches(if_match, etag):
        now = f"its ETag is now {etag}" if etag is not None else "no such file is there now"
        raise PreconditionFailed(f"{place.shown} changed since it was read: {now}")


def matches(header: str, etag: str | None) -> bool:
    """Whether an If-Match or If-None-Match header names the ETag; `*` names every file's, None is no file's."""
    if etag is None:
        return False
    listed = [item.strip() for item in header.split(",")]
    return "*" in listed or etag in listed


def _remove_if_empty(parent: int, name: bytes) -> None:
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError:
        pass  # another put something into it
